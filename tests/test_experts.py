"""Mixtures of experts (eqs. 48-53) against plain loops and values worked out by hand."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from odeformer.experts import GROUPINGS, StackedLinear, balance_loss, router_z_loss
from odeformer.feedforward import FEEDFORWARD
from odeformer.routing import GATES, Visit, serve_in_order

WIDTH, HIDDEN = 6, 8
PLAIN = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
         "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))}
GATED = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}


def experts(name="experts", **options):
    """A layer of four experts in float64 with random weights and biases."""
    module = FEEDFORWARD[name](WIDTH, HIDDEN, **{"n_experts": 4, **options}).double()
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    return module


def state(batch=2, tokens=5, **options):
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64, **options)


def one_expert(module, activation, i, x):
    """Eq. 48 with the i-th weights, written out."""
    def through(stack, x):
        return x @ stack.weight[i] + (0 if stack.bias is None else stack.bias[i])

    if activation in GATED:
        return through(module.output, GATED[activation](through(module.gate, x)) * through(module.hidden, x))
    return through(module.output, PLAIN[activation](through(module.hidden, x)))


def test_the_gates_of_a_token_worked_out_by_hand():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]], dtype=torch.float64).log()
    chosen = torch.tensor([[1, 3]])
    wanted = {"softmax_then_topk": [0.4, 0.3], "topk_then_softmax": [4 / 7, 3 / 7], "sigmoid": [4 / 5, 3 / 4],
              "none": [1.0, 1.0]}
    assert set(wanted) == set(GATES)
    for name, gate in GATES.items():
        assert (gate(logits, chosen) - torch.tensor([wanted[name]], dtype=torch.float64)).abs().max() < 1e-15, name


def plain_loop(module, x, gate, activation, top_k, renormalize=False):
    """Eq. 53, a token and an expert at a time."""
    rows = []
    for token in x.flatten(0, -2):
        logits = module.router.weight @ token
        chosen = sorted(range(4), key=lambda i: -logits[i])[:top_k]
        e = logits.exp()
        g = {"softmax_then_topk": e / e.sum(), "topk_then_softmax": e / sum(e[j] for j in chosen),
             "sigmoid": 1 / (1 + 1 / e), "none": torch.ones_like(e)}[gate]
        if renormalize:
            g = g / sum(g[i] for i in chosen)
        rows.append(sum(g[i] * one_expert(module, activation, i, token) for i in chosen))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize(("gate", "renormalize"), [*((gate, False) for gate in GATES), ("softmax_then_topk", True),
                                                   ("sigmoid", True)])
def test_eq_53_outputs_and_gradients_are_those_of_a_loop_over_tokens(gate, renormalize, grouping):
    module = experts(top_k=2, gate=gate, grouping=grouping, renormalize=renormalize)
    x = state(requires_grad=True)
    y, wanted = module(x), plain_loop(module, x, gate, "relu", 2, renormalize)
    assert (y - wanted).abs().max() < 1e-13
    weight = torch.randn_like(y)
    leaves = [x, *module.parameters()]
    ours, theirs = (torch.autograd.grad((out * weight).sum(), leaves, materialize_grads=True) for out in (y, wanted))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [name for name, form in FEEDFORWARD.items() if hasattr(form, "activation")])
def test_eqs_48_and_53_every_feed_forward_form_can_be_the_expert(activation, bias):
    module = experts(activation=activation, bias=bias)
    x = state()
    assert (module(x) - plain_loop(module, x, "softmax_then_topk", activation, 2)).abs().max() < 1e-13


def test_renormalized_weights_are_a_softmax_over_the_chosen():
    a, b = experts(renormalize=True), experts(gate="topk_then_softmax")
    b.load_state_dict(a.state_dict())
    x = state()
    assert (a(x) - b(x)).abs().max() < 1e-14


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_eqs_49_50_with_all_experts_chosen_it_is_the_dense_mixture(grouping):
    module = experts(top_k=4, grouping=grouping)
    x = state()
    gates = (x @ module.router.weight.T).softmax(-1)
    hidden = (torch.einsum("btd,ndf->bntf", x, module.hidden.weight) + module.hidden.bias[:, None]).relu()
    each = torch.einsum("bntf,nfd->bntd", hidden, module.output.weight) + module.output.bias[:, None]
    assert (module(x) - torch.einsum("btn,bntd->btd", gates, each)).abs().max() < 1e-14


def test_a_single_expert_is_the_feed_forward_network():
    module, dense = experts(n_experts=1, top_k=1), FEEDFORWARD["relu"](WIDTH, HIDDEN).double()
    with torch.no_grad():
        for ours, theirs in ((module.hidden, dense.hidden), (module.output, dense.output)):
            ours.weight[0], ours.bias[0] = theirs.weight.T, theirs.bias
    x = state()
    assert (module(x) - dense(x)).abs().max() < 1e-15


def test_gradients_reach_the_chosen_experts_and_no_others():
    module = experts(top_k=2)
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[:, 0] = torch.tensor([3.0, 1.0, 2.0, 0.0])
    x = state()
    x[..., 0] = 1.0  # experts 0 and 2 for every token
    module(x).square().sum().backward()
    for stack in (module.hidden, module.output):
        assert (stack.weight.grad.abs().amax((1, 2)) > 0).tolist() == [True, False, True, False]
    assert (module.router.weight.grad.abs().amax(1) > 0).all()  # the softmax is over all


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (0, WIDTH), (2, 0, WIDTH), (2, 3, 4, WIDTH)])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_any_number_of_tokens_and_leading_axes(shape, grouping):
    module = experts(n_experts=8, top_k=3, grouping=grouping)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = module(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    if x.numel():
        alone = torch.stack([module(row) for row in x.reshape(-1, WIDTH)]).view_as(x)
        assert (y - alone).abs().max() < 1e-14


# -- slices (eqs. 51-52)

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", PLAIN)
def test_eqs_51_52_all_slices_with_weight_1_are_the_dense_network_bit_for_bit(activation, dtype):
    slices = FEEDFORWARD["expert_slices"](WIDTH, HIDDEN, n_experts=4, activation=activation).to(dtype)
    dense = FEEDFORWARD[activation](WIDTH, HIDDEN).to(dtype)
    slices.load_state_dict(dense.state_dict())
    x = state().to(dtype)
    assert torch.equal(slices(x), dense(x))


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_eqs_51_52_grouped_slices_that_all_serve_give_the_dense_product_too(grouping):
    slices = experts("expert_slices", capacity_factor=4.0, grouping=grouping)  # room for all, but not taken for dense
    x = state()
    assert (slices(x) - slices.output(slices.hidden(x).relu())).abs().max() < 1e-14


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("activation", PLAIN)
def test_eq_51_the_product_of_each_token_is_that_of_its_weighted_slices(activation, gate, grouping, bias):
    module = experts("expert_slices", top_k=2, gate=gate, activation=activation, grouping=grouping, bias=bias)
    x = state(requires_grad=True)
    logits = x @ module.router.weight.T
    rows = []
    for token, scores in zip(x.flatten(0, 1), logits.flatten(0, 1).tolist(), strict=True):
        chosen = sorted(range(4), key=lambda i: -scores[i])[:2]
        g = GATES[gate](module.router.weight @ token, torch.tensor(chosen))
        product = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, i in zip(g, chosen, strict=True):
            product = product + F.pad(weight * (module.hidden.weight[2 * i:2 * i + 2] @ token), (2 * i, 6 - 2 * i))
        hidden = PLAIN[activation](product + (module.hidden.bias if bias else 0))
        rows.append(module.output(hidden))
    wanted = torch.stack(rows).view_as(x)
    y = module(x)
    assert (y - wanted).abs().max() < 1e-13
    leaves = [x, *module.parameters()]
    for a, b in zip(torch.autograd.grad(y.sin().sum(), leaves, materialize_grads=True),
                    torch.autograd.grad(wanted.sin().sum(), leaves, materialize_grads=True), strict=True):
        assert (a - b).abs().max() < 1e-12


# -- capacity

def served(choices, per_token, *, causal=False, mask=None):
    """Which tokens of one sequence are served, each with one choice."""
    indices = torch.tensor(choices)[None, :, None]
    mask = None if mask is None else torch.tensor(mask)[None]
    return serve_in_order(indices, 2, Fraction(per_token).as_integer_ratio(), mask, causal)[0, :, 0].int().tolist()


def test_capacity_serves_the_first_and_drops_the_rest_worked_out_by_hand():
    assert served([0, 0, 0, 0, 0, 0], "1/2") == [1, 1, 1, 0, 0, 0]  # ceil(6 / 2) = 3
    assert served([0, 1, 0, 0, 0], "1/2") == [1, 1, 1, 1, 0]  # ceil(5 / 2) = 3 of expert 0
    assert served([0, 0, 0, 1], "1/4") == [1, 0, 0, 1]
    assert served([0] * 11 + [1], "11/120") == [1] * 2 + [0] * 9 + [1]  # ceil(1.1) = 2
    assert served([0, 0, 0, 0, 0, 0], "1/2", mask=[False, True, True, True, False, True]) == [0, 1, 1, 0, 0, 0]


def test_causal_capacity_grows_with_the_tokens_read_worked_out_by_hand():
    assert served([0, 0, 0, 0, 0, 0], "1/2", causal=True) == [1, 0, 1, 0, 1, 0]  # room 1 1 2 2 3 3
    assert served([1, 1, 0, 0, 0, 0], "1/2", causal=True) == [1, 0, 1, 1, 1, 0]  # what expert 0 left unused is kept
    assert served([0, 0, 0, 0], "1/2", causal=True, mask=[False, True, True, True]) == [0, 1, 0, 1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("factor", "top_k"), [(0.3, 1), (1.0, 2), (1.25, 3)])
def test_capacity_of_random_claims_is_that_of_a_loop_over_tokens(causal, factor, top_k):
    batch, tokens, n = 3, 17, 4
    indices = torch.rand(batch, tokens, n).topk(top_k, -1).indices
    indices[0] = torch.arange(top_k)  # everybody wants the same
    mask = torch.rand(batch, tokens) > 0.3
    per_token = Fraction(str(factor)) * top_k / n
    got = serve_in_order(indices, n, per_token.as_integer_ratio(), mask, causal)
    assert (~got).any()
    for b in range(batch):
        filled, read = [0] * n, 0
        for t in range(tokens):
            read += int(mask[b, t])
            limit = math.ceil(per_token * (read if causal else int(mask[b].sum())))
            for j in range(top_k):
                i = int(indices[b, t, j])
                fits = bool(mask[b, t]) and filled[i] < limit
                filled[i] += fits
                assert bool(got[b, t, j]) == fits, (b, t, j)
        assert max(filled) <= math.ceil(per_token * read)


def test_capacity_is_exact_where_floating_point_rounds_up():
    module = experts(n_experts=1, top_k=1, capacity_factor=0.7)  # 0.7 * 10 = 7.000000000000001 with some orders
    y = module(state(batch=1, tokens=10))
    assert (y.abs().sum(-1) > 0).sum() == 7


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_dropped_tokens_get_nothing_and_the_rest_what_they_got_without_a_limit(grouping):
    limited = experts(top_k=1, capacity_factor=1.0, grouping=grouping)
    free = experts(top_k=1)
    with torch.no_grad():
        limited.router.weight[0] = 0
        limited.router.weight[1:] = -1.0
    free.load_state_dict(limited.state_dict())
    x = state(tokens=8).abs()  # all tokens choose expert 0, which has room for ceil(8 / 4) = 2 of each sequence
    reports = []
    y = limited(x, Visit(report=lambda *report: reports.append(report)))
    assert (y[:, 2:] == 0).all()
    assert (y[:, :2] - free(x)[:, :2]).abs().max() < 1e-14
    reports = dict(reports)
    assert reports["dropped"] == 0.75
    assert reports["load"].tolist() == [1, 0, 0, 0]


def test_batch_mates_do_not_compete_for_capacity():
    module = experts(capacity_factor=0.5)
    x = state(batch=4)
    together = module(x)
    for row, out in zip(x, together, strict=True):
        assert (module(row[None])[0] - out).abs().max() < 1e-14


def test_padding_takes_no_capacity_and_what_it_holds_does_not_matter():
    module = experts(capacity_factor=0.5)
    x = state(batch=1, tokens=4)
    mask = torch.tensor([[False, True, True, False, True, False, True]])
    padded = torch.full((1, 7, WIDTH), math.nan, dtype=torch.float64).masked_scatter(mask[..., None], x)
    padded.requires_grad_()
    reports, wanted = [], []
    y = module(padded, Visit(mask=mask, report=lambda *report: reports.append(report)))
    assert (y[mask] - module(x, Visit(report=lambda *report: wanted.append(report)))[0]).abs().max() < 1e-14
    assert (y[~mask] == 0).all()
    for (name, a), (_, b) in zip(reports, wanted, strict=True):
        assert (a - b).abs().max() < 1e-14, name
    gradients = torch.autograd.grad(y.sum() + reports[0][1], [padded, *module.parameters()])
    assert all(torch.isfinite(g).all() for g in gradients)


# -- losses

def test_balance_loss_worked_out_by_hand():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.1, 0.7, 0.2], [0.4, 0.1, 0.5]], dtype=torch.float64)
    logits = p.log() + 3.0  # a constant changes nothing
    # choices 0, 0, 1, 2: f = (1/2, 1/4, 1/4); P = (0.4, 0.35, 0.25)
    assert balance_loss(logits).item() == pytest.approx(3 * (0.2 + 0.0875 + 0.0625), abs=1e-14)
    # two of each: 01, 01, 12, 02: f = (3, 3, 2) / 8
    assert balance_loss(logits, top_k=2).item() == pytest.approx(3 * (1.2 + 1.05 + 0.5) / 8, abs=1e-14)
    # without the third: f = (2/3, 0, 1/3); P = (1.5, 0.7, 0.8) / 3
    mask = torch.tensor([True, True, False, True])
    assert balance_loss(logits, mask=mask).item() == pytest.approx(3 * (3.0 + 0.8) / 9, abs=1e-14)
    logits[2] = math.nan
    assert balance_loss(logits, mask=mask).item() == pytest.approx(3 * (3.0 + 0.8) / 9, abs=1e-14)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balance_loss_is_1_at_perfect_balance_and_n_where_one_expert_takes_all(top_k):
    even = torch.stack([torch.eye(4)[i:i + 1].roll(j, 1)[0] for i in range(4) for j in range(1)]).double()
    logits = even * 1.0 + even.roll(1, 1) * 0.5 + even.roll(2, 1) * 0.25  # each expert first, second and third once
    assert balance_loss(logits, top_k=top_k).item() == pytest.approx(1.0, abs=1e-14)
    one = torch.zeros(10, 4, dtype=torch.float64)
    one[:, 2] = 100.0
    assert balance_loss(one).item() == pytest.approx(4.0, abs=1e-12)


def test_balance_loss_has_a_gradient_that_spreads_and_is_0_where_nothing_is_real():
    logits = torch.zeros(5, 3, dtype=torch.float64)
    logits[:, 1] = 1.0
    logits.requires_grad_()
    (g,) = torch.autograd.grad(balance_loss(logits), logits)
    assert (g[:, 1] > 0).all() and (g[:, [0, 2]] < 0).all()
    nothing = balance_loss(logits, mask=torch.zeros(5, dtype=torch.bool))
    assert nothing == 0 and torch.isfinite(torch.autograd.grad(nothing, logits)[0]).all()


def test_router_z_loss_worked_out_by_hand():
    logits = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 2.0], [9.0, 9.0, 9.0]], dtype=torch.float64).log()
    wanted = (math.log(6) ** 2 + math.log(12) ** 2) / 2
    mask = torch.tensor([True, True, False])
    assert router_z_loss(logits, mask).item() == pytest.approx(wanted, abs=1e-14)
    assert router_z_loss(logits).item() == pytest.approx((2 * wanted + math.log(27) ** 2) / 3, abs=1e-14)


# -- the router

def test_the_router_computes_in_float32_under_bf16_autocast_and_with_bf16_weights():
    torch.manual_seed(1)
    module = FEEDFORWARD["experts"](64, 32, n_experts=8, top_k=2)
    x = torch.randn(4, 16, 64)
    wanted = x @ module.router.weight.T
    with torch.autocast("cpu", torch.bfloat16):
        logits = module.router.logits(x, Visit())
        assert module(x).dtype == FEEDFORWARD["relu"](64, 32)(x).dtype == torch.bfloat16
    assert logits.dtype == torch.float32 and torch.equal(logits, F.linear(x, module.router.weight))
    assert (logits - wanted).abs().max() < 1e-5
    module = module.bfloat16()
    x = x.bfloat16()
    logits = module.router.logits(x, Visit())
    wanted = (x.double() @ module.router.weight.double().T)
    assert logits.dtype == torch.float32 and (logits - wanted).abs().max() < 1e-5
    assert module(x).dtype == torch.bfloat16


def test_noise_is_added_in_training_scaled_by_softplus_and_drawn_once_a_solve():
    module = experts(noise=True)
    x = state()
    with torch.no_grad():
        module.router.noise.normal_()
    clean = x @ module.router.weight.T
    assert torch.equal(module.router.logits(x, Visit()), F.linear(x, module.router.weight))
    visit = Visit(training=True)
    noisy = module.router.logits(x, visit)
    assert torch.equal(noisy, module.router.logits(x, visit))
    assert not torch.equal(noisy, module.router.logits(x, Visit(training=True)))
    scale = torch.log1p((x @ module.router.noise.T).exp())
    many = torch.stack([(module.router.logits(x, Visit(training=True)) - clean) / scale for _ in range(500)])
    assert many.mean().abs() < 0.03 and (many.std() - 1).abs() < 0.03
    module(x).sum().backward()  # called by itself the module's own mode counts
    assert module.router.noise.grad.abs().max() > 0


def test_jitter_multiplies_the_routers_input_in_training():
    module = experts(jitter=0.1)
    with torch.no_grad():
        module.router.weight.copy_(torch.eye(4, WIDTH))
    x = state(batch=50)
    ratio = module.router.logits(x, Visit(training=True)) / x[..., :4]
    assert 0.9 <= ratio.min() < 0.91 and 1.09 < ratio.max() <= 1.1
    assert torch.equal(module.router.logits(x, Visit()), x[..., :4])


# -- cost and tracing

def flops(module, x):
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["experts", "expert_slices"])
def test_cost_grows_with_top_k_and_not_with_the_number_of_experts(name):
    d, tokens, width = 16, 256, 32  # of each expert

    def cost(n, k, grouping):
        wide = width if name == "experts" else n * width
        module = FEEDFORWARD[name](d, wide, n_experts=n, top_k=k, grouping=grouping, bias=False)
        return flops(module, torch.randn(1, tokens, d)) - 2 * tokens * d * n  # without the router

    exact = 2 * tokens * 2 * d * width  # for each expert of a token
    for n in (8, 64):
        for k in (1, 2, 4):
            assert cost(n, k, "loop") == k * exact
            assert cost(n, k, "blocks") <= 1.5 * k * exact


def test_dropped_choices_and_padding_cost_nothing_in_the_loop():
    x = torch.randn(1, 32, WIDTH)
    everything, limited = (FEEDFORWARD["experts"](WIDTH, HIDDEN, n_experts=4, top_k=1, bias=False, capacity_factor=c)
                           for c in (None, 1.0))
    with torch.no_grad():
        limited.router.weight.zero_()  # all choose the same expert, which serves 8 of 32
    router, token = 2 * 32 * WIDTH * 4, 4 * WIDTH * HIDDEN
    assert flops(limited, x) == router + 8 * token
    mask = torch.arange(32)[None] < 10
    assert flops(lambda x: everything(x, Visit(mask=mask)), x) == router + 10 * token


@pytest.mark.parametrize("name", ["experts", "expert_slices"])
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_func_transforms_and_compile_give_the_same(name, capacity_factor):
    module = experts(name, top_k=2, capacity_factor=capacity_factor)
    x, v = state(), state()
    y = module(x)
    assert (torch.func.vmap(module)(x) - y).abs().max() < 1e-14
    assert (torch.compile(module, backend="eager", fullgraph=True)(x) - y).abs().max() < 1e-14
    _, tangent = torch.func.jvp(module, (x,), (v,))
    step = 1e-6
    assert ((module(x + step * v) - module(x - step * v)) / (2 * step) - tangent).abs().max() < 1e-7
    x.requires_grad_()
    (g,) = torch.autograd.grad(module(x).sum(), x)
    assert (torch.func.vmap(torch.func.grad(lambda x: module(x).sum()))(x) - g).abs().max() < 1e-12


def test_second_derivatives_of_both_groupings_agree_with_finite_differences():
    for grouping in GROUPINGS:
        module = experts(activation="gelu", grouping=grouping)
        torch.autograd.gradgradcheck(module, state(batch=1, tokens=3, requires_grad=True))


# -- options

@pytest.mark.parametrize(("options", "message"), [
    ({"n_experts": 0}, "n_experts must be at least 1"),
    ({"top_k": 0}, "top_k must be at least 1"),
    ({"top_k": 9}, "top_k must be at most n_experts = 4"),
    ({"gate": "soft"}, "unknown gate"),
    ({"routing": "layer"}, "routing must be one of"),
    ({"grouping": "bmm"}, "unknown grouping"),
    ({"capacity_factor": 0.0}, "capacity_factor must be"),
    ({"capacity_factor": math.inf}, "capacity_factor must be"),
    ({"jitter": 1.0}, "jitter must be"),
    ({"gate": "topk_then_softmax", "renormalize": True}, "renormalize has nothing to do"),
    ({"activation": "experts"}, "activation must be"),
    ({"activation": "softsign"}, "unknown activation"),
])
@pytest.mark.parametrize("name", ["experts", "expert_slices"])
def test_options_out_of_range_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        FEEDFORWARD[name](WIDTH, HIDDEN, **{"n_experts": 4, "top_k": 2, **options})


def test_slices_must_divide_d_ff_and_refuse_options_that_would_do_nothing():
    with pytest.raises(ValueError, match="d_ff must be a multiple of n_experts"):
        FEEDFORWARD["expert_slices"](WIDTH, HIDDEN, n_experts=3)
    with pytest.raises(ValueError, match="one hidden matrix"):
        FEEDFORWARD["expert_slices"](WIDTH, HIDDEN, n_experts=4, activation="swiglu")
    with pytest.raises(ValueError, match="nothing to do"):
        FEEDFORWARD["expert_slices"](WIDTH, HIDDEN, n_experts=4, noise=True)


def test_each_expert_is_initialised_as_a_matrix_of_its_own():
    stack = StackedLinear(3, 200, 100)
    bound = math.sqrt(6 / 300)
    for weight in stack.weight:
        assert bound * 0.99 < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not torch.equal(stack.weight[0], stack.weight[1])
