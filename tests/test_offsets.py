"""Terms by clipped offset, tile by tile: against an index for each pair."""

import copy
import warnings

import pytest
import torch
from torch.autograd import grad, gradcheck, gradgradcheck

from odeformer.attention import ATTENTION, offsets, relative
from odeformer.attention.offsets import Collect, Offsets, Spread
from odeformer.attention.tiled import Attend, elementary

# queries, keys, place of the first query, reach: square, beyond a tile, behind a cache, one query, all within reach
SHAPES = [(5, 5, 0, 2), (9, 9, 0, 1), (7, 12, 5, 3), (1, 6, 5, 2), (4, 20, 3, 2), (6, 6, 0, 9), (2, 3, 0, 1),
          (1, 1, 0, 1)]


@pytest.fixture(params=[3, 4, 128])
def tile(request, monkeypatch):
    monkeypatch.setattr(offsets, "TILE", request.param)


def rows(n, m, first, reach):
    return (torch.arange(m) - torch.arange(n)[:, None] - first).clamp(-reach, reach) + reach


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def close(ours, wanted, tolerance=1e-11):
    for x, y in zip(ours, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_tables_spread_over_pairs_are_the_gathered_ones_with_their_gradients(shape, tile):
    n, m, _, reach = shape
    row, by_query, by_key = rows(*shape), drawn(2, n, 2 * reach + 1), drawn(2, m, 2 * reach + 1)
    of_query = by_query.gather(-1, row.expand(2, n, m))
    of_key = by_key.gather(-1, row.mT.expand(2, m, n)).mT
    g = torch.randn(2, n, m, dtype=torch.float64)
    for tables, wanted in (((by_query, by_key), of_query + of_key), ((by_query, None), of_query),
                           ((None, by_key), of_key)):
        ours, given = Spread.apply(*tables, Offsets(*shape)), [x for x in tables if x is not None]
        close([ours, *grad(ours, given, g)], [wanted, *grad(wanted, given, g, retain_graph=True)])


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_over_pairs_are_the_scattered_ones_with_their_gradients(shape, tile):
    n, m, _, reach = shape
    row, x = rows(*shape), drawn(2, n, m)
    empty = torch.zeros(2, n, 2 * reach + 1, dtype=torch.float64), torch.zeros(2, m, 2 * reach + 1, dtype=torch.float64)
    wanted = [empty[0].scatter_add(-1, row.expand(2, n, m), x), empty[1].scatter_add(-1, row.mT.expand(2, m, n), x.mT)]
    ours = Collect.apply(x, Offsets(*shape), True, True)
    close(ours, wanted)
    weights = [torch.randn_like(y) for y in wanted]
    close(grad(ours, [x], weights), grad(wanted, [x], weights))
    assert Collect.apply(x, Offsets(*shape), True, False)[1] is None


def test_each_is_differentiable_to_any_order():
    shape = Offsets(5, 6, 1, 2)
    tables = drawn(1, 5, 5), drawn(1, 6, 5)
    assert gradcheck(lambda p, q: Spread.apply(p, q, shape).square(), tables)
    assert gradgradcheck(lambda p, q: Spread.apply(p, q, shape).square(), tables)
    assert gradgradcheck(lambda x: Collect.apply(x.square(), shape, True, True), drawn(2, 5, 6))


def sights(n, m, first):
    """What may be seen: everything, no later token, some for each row of the batch, for some queries nothing."""
    some = torch.rand(2, 1, n, m) > 0.4
    blind = some.clone()
    blind[0, :, n // 2] = False
    return {"all": None, "causal": (torch.arange(m) <= torch.arange(n)[:, None] + first)[None, None], "some": some,
            "blind": blind}


@pytest.mark.parametrize("sight", sights(1, 1, 0))
@pytest.mark.parametrize("shape", [(7, 7, 0, 2), (5, 9, 4, 2), (6, 8, 1, 3)])
@pytest.mark.parametrize("tables", ["qkv", "kv", "qv", "v"])
def test_attention_by_tiles_equals_the_softmax_written_out_to_second_derivatives(tables, shape, sight, tile):
    n, m, first, reach = shape
    width, row = 2 * reach + 1, rows(*shape)
    query, key, value = drawn(4, n, 3), drawn(4, m, 3), drawn(4, m, 3)
    by_query, by_key = (drawn(4, size, width) if x in tables else None for x, size in (("k", n), ("q", m)))
    table, seen = drawn(width, 3), sights(n, m, first)[sight]

    def wanted():
        scores = 0.7 * query @ key.mT
        if by_query is not None:
            scores = scores + by_query.gather(-1, row.expand(4, n, m))
        if by_key is not None:
            scores = scores + by_key.gather(-1, row.mT.expand(4, m, n)).mT
        values = value[:, None] + table[row]
        shown = torch.ones(4, n, m, dtype=torch.bool)
        if seen is not None:
            shown = seen.expand(2, 2, n, m).flatten(0, 1) if len(seen) > 1 else seen[0].expand(4, n, m)
        weights = scores.masked_fill(~shown, -1e30).softmax(-1) * shown
        return (weights.unsqueeze(-1) * values).sum(2)

    given = [x for x in (query, key, value, by_query, by_key, table) if x is not None]
    arguments = (query, key, value, by_query, by_key, table, seen, Offsets(*shape), 0.7)
    g = torch.randn(4, n, 3, dtype=torch.float64)
    exact = wanted()
    first_order = grad(exact, given, g, create_graph=True)
    second = grad(sum(x.square().sum() for x in first_order), given)
    ours = Attend.apply(*arguments)
    close([ours, *grad(ours, given, g)], [exact, *first_order])
    again = grad(Attend.apply(*arguments), given, g, create_graph=True)
    close(again, first_order)
    close(grad(sum(x.square().sum() for x in again), given), second, 1e-9)
    close([elementary(*arguments)], [exact])


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_gives_the_same_by_tiles_and_by_pairs_in_training_and_under_functional_transforms(causal, monkeypatch):
    monkeypatch.setattr(relative, "MANY_TO_ATTEND", 0)
    attention = ATTENTION["relative"](8, 2, max_distance=3).double()
    x = drawn(2, 11, 8)
    mask = torch.arange(11) < torch.tensor([[11], [7]])

    def call(x):
        return attention(x, mask=mask, causal=causal)

    ours = call(x)
    gradients = grad(ours.square().sum(), [x, *attention.parameters()])
    close([torch.func.jvp(call, (x.detach(),), (torch.ones_like(x),))[0]], [ours])  # which takes elementary operations
    monkeypatch.setattr(Offsets, "of", classmethod(lambda cls, *rest: None))
    other = call(x)
    close([ours, *gradients], [other, *grad(other.square().sum(), [x, *attention.parameters()])])


def test_many_gradients_at_once_and_traces_take_elementary_operations(monkeypatch):
    monkeypatch.setattr(relative, "MANY_TO_ATTEND", 0)
    monkeypatch.setattr(offsets, "MANY_TO_SPREAD", 0)
    x = drawn(1, 11, 8)
    for tables in ("qkv", "kv", "qk"):
        attention = ATTENTION["relative"](8, 2, max_distance=3, tables=tables).double()
        y = attention(x)
        directions = torch.randn(3, *y.shape, dtype=torch.float64)
        together, = grad(y, x, directions, is_grads_batched=True, retain_graph=True)
        close(together, [grad(y, x, direction, retain_graph=True)[0] for direction in directions])
        mapped = torch.vmap(lambda direction, y=y: grad(y, x, direction, retain_graph=True)[0])(directions)
        close(mapped, together)
        with warnings.catch_warnings(action="ignore"):  # the tracer has several
            traced = torch.jit.trace(attention, (x.detach(),), check_trace=False)
        close([traced(x)], [y])


@pytest.mark.parametrize("big", [1.0, 1e3])
def test_gradients_in_single_precision_are_as_exact_by_tiles_as_by_pairs(big, monkeypatch):
    monkeypatch.setattr(relative, "MANY_TO_ATTEND", 0)
    attention, x = ATTENTION["relative"](16, 2, max_distance=3), torch.randn(1, 64, 16)
    with torch.no_grad():
        for table in (attention.query_table, attention.key_table, attention.value_table):
            table.mul_(big)

    def gradients(module, x):
        return torch.cat([g.flatten().double() for g in grad(module(x).sum(), list(module.parameters()))])

    by_tiles = gradients(attention, x)
    exact = gradients(copy.deepcopy(attention).double(), x.double())
    monkeypatch.setattr(Offsets, "of", classmethod(lambda cls, *rest: None))
    by_pairs = gradients(attention, x)
    errors = [(found - exact).norm() / exact.norm() for found in (by_tiles, by_pairs)]
    assert errors[0] < max(4 * errors[1], 1e-5)
