"""Input injection: fields that hold the state they started from, and models whose depth is an equilibrium of them."""

import pytest
import torch
from torch import nn

from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig, load
from odeformer.block import COUPLINGS
from odeformer.blocks import LayeredField
from odeformer.injection import Injected, inject
from solvers import SOLVERS, LieTrotter, get_solver, solve

F64 = torch.float64
TIGHT = {"rtol": 1e-12, "atol": 1e-14}


def refusal(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def two_parts(coupling):
    """A field of two parts, as a layer has."""
    w = torch.randn(2, 4, 4, dtype=F64) / 8
    return COUPLINGS[coupling]([lambda z, l, w=w[0]: torch.tanh(z @ w), lambda z, l, w=w[1]: torch.sin(z @ w)])


def layered(n=3):
    return LayeredField([(float(i), float(i + 1), two_parts("lie")) for i in range(n)])


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_injection_adds_the_start_and_takes_the_state_away(coupling):
    f = two_parts(coupling)
    z, z0, l = torch.randn(2, 3, 4, dtype=F64), torch.randn(2, 3, 4, dtype=F64), torch.tensor(0.0)
    g = inject(f, z0)
    assert (g(z, l) - (f(z, l) + z0 - z)).abs().max() < 1e-15
    assert g.splitting == f.splitting
    if f.parts is None:
        assert g.parts is None
    else:
        assert (sum(part(z, l) for part in g.parts) - g(z, l)).abs().max() < 1e-15 and len(g.parts) == len(f.parts)
    equilibrium = solve(g, z0, solver="equilibrium", **TIGHT).z
    assert (equilibrium - z0 - f(equilibrium, l)).abs().max() < 1e-11
    assert (equilibrium - solve(g, 0 * z0, solver="equilibrium", **TIGHT).z).abs().max() < 1e-10


def test_injection_keeps_pieces_and_the_count_of_evaluations():
    f, z0 = layered(), torch.randn(2, 3, 4, dtype=F64)
    g = inject(f, z0)
    assert [piece[:2] for piece in g.pieces] == [piece[:2] for piece in f.pieces]
    for solver in ("rk4", LieTrotter("euler"), "strang", "imex_euler"):
        x, y = (solve(field, z0, span=(0.0, 3.0), solver=solver, n_steps=6).nfe for field in (f, g))
        assert x == y or solver == "imex_euler"  # whose inner iterations are counted
    assert solve(g, z0, span=(0.0, 3.0), solver="dopri5").z.isfinite().all()
    z, l = torch.randn(2, 3, 4, dtype=F64), torch.tensor(1.5)
    assert torch.equal(g(z, l), g.pieces[1][2](z, l))


def test_an_euler_step_of_an_injected_field_starts_again_from_the_input():
    """By parts (lie): z -> y + f_2(y) with y = z0 + f_1(z)."""
    f, z0 = two_parts("lie"), torch.randn(2, 3, 4, dtype=F64)
    z = z0
    for _ in range(3):
        y = z0 + f.parts[0](z, None)
        z = y + f.parts[1](y, None)
    got = solve(inject(f, z0), z0, span=(0.0, 3.0), n_steps=3, solver=LieTrotter("euler")).z
    assert (got - z).abs().max() < 1e-14


def test_a_dropped_layer_has_no_injection_and_others_are_scaled():
    f, z0 = layered(), torch.randn(2, 3, 4, dtype=F64)
    keep = [0.5, torch.tensor([0.0, 1.0], dtype=F64).view(2, 1, 1), 1.0]
    z, l = torch.randn(2, 3, 4, dtype=F64), torch.tensor(0.0)
    for (_, _, plain), (_, _, injected), w in zip(f.pieces, inject(f, z0, keep).pieces, keep, strict=True):
        assert (injected(z, l) - plain(z, l) - w * (z0 - z)).abs().max() < 1e-15
    with pytest.raises(ValueError, match="factor for each piece"):
        inject(two_parts("lie"), z0, keep)


def test_rows_take_their_own_input_with_them():
    f, z0 = two_parts("parallel"), torch.randn(4, 3, 4, dtype=F64)
    z, l, rows = torch.randn(4, 3, 4, dtype=F64), torch.tensor(0.0), torch.tensor([3, 1])
    keep = torch.rand(4, 1, 1, dtype=F64)
    g = Injected(f, z0, keep)
    assert torch.equal(g.select(rows)(z[rows], l), g(z, l)[rows])
    whole = solve(inject(f, z0), z0, solver=get_solver("dopri5", per_sample=True), rtol=1e-6)
    alone = solve(inject(f, z0[:1]), z0[:1], solver=get_solver("dopri5", per_sample=True), rtol=1e-6)
    assert (whole.z[:1] - alone.z).abs().max() < 1e-13


@pytest.mark.parametrize(("solver", "mode"), [
    ("rk4", "checkpoint"), ("rk4", "checkpoint_recursive"), ("reversible_midpoint", "reversible"),
    ("implicit_midpoint", "implicit"), ("dopri5", "adjoint"), ("equilibrium", "implicit")])
def test_every_gradient_mode_reaches_the_input_through_the_injection(solver, mode):
    f, x = two_parts("parallel"), torch.randn(2, 3, 4, dtype=F64, requires_grad=True)
    options = ({"rtol": 1e-10, "atol": 1e-12} if SOLVERS[solver].is_adaptive else {"n_steps": 8}) | {"solver": solver}

    def gradient(mode):
        z0 = 2 * x  # not a leaf
        return torch.autograd.grad(solve(inject(f, z0), z0, gradient=mode, **options).z.square().sum(), x)[0]

    wanted = gradient("backprop")
    assert (gradient(mode) - wanted).abs().max() < 1e-8 * wanted.abs().max()


# --- models ----------------------------------------------------------------------------------------------------------

def encoder(*, n_layers=3, block=(), weights="shared", injection=True, **depth):
    block = BlockConfig(8, 2, **{"d_ff": 16} | dict(block))
    depth = DepthConfig(weights=weights, injection=injection, **depth)
    model = Encoder(EncoderConfig(vocab_size=11, max_seq_len=10, n_layers=n_layers, block=block, depth=depth)).double()
    with torch.no_grad():
        model.token_embedding.weight.mul_(10)
        for p in model.layers.parameters():
            p.mul_(0.7)
    return model


def tokens(batch=3, length=10):
    return torch.randint(11, (batch, length))


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_model_goes_to_the_equilibrium_of_its_field(coupling):
    model = encoder(solver="equilibrium", rtol=1e-10, atol=1e-12, block={"coupling": coupling})
    _, solution = model(tokens(), return_solution=True)
    assert solution.field(solution.z, torch.tensor(1.0)).abs().max() < 1e-8
    assert solution.states.shape == (2, 3, 10, 8) and solution.depths == [0.0, 3.0]
    assert solution.nfe == solution.n_steps + 1 == len(solution.errors) + 1 and solution.residual < 1e-9
    settled = solve(solution.field, solution.states[0], span=(0.0, 60.0), solver="dopri8", rtol=1e-9, atol=1e-9).z
    assert (settled - solution.z).abs().max() < 1e-6


def test_a_sentence_alone_and_padded_beside_another_one_gives_the_same_states_and_work():
    model = encoder(solver="equilibrium", rtol=1e-7)
    short = tokens(1, 4)
    alone, a = model(short, return_solution=True)
    padded, mask = torch.cat([short, tokens(1, 6)], 1), torch.arange(10)[None] < 4
    together, b = model(padded, mask, return_solution=True)
    assert (together[:, :4] - alone).abs().max() < 1e-12 and a.nfe == b.nfe
    batch = torch.cat([padded, tokens(2)])
    beside = model(batch, torch.cat([mask, torch.ones(2, 10, dtype=torch.bool)]))
    assert (beside[:1, :4] - alone).abs().max() < 1e-12


@pytest.mark.parametrize("gradient", ["implicit", "jacobian_free", "backprop"])
def test_training_lowers_the_loss(gradient):
    """To tell whether a sentence holds more tokens above 5 than below."""
    model = encoder(solver="equilibrium", gradient=gradient, rtol=1e-4).train()
    readout = nn.Linear(8, 1).double()
    ids = tokens(16)
    wanted = ((ids > 5).sum(1) > 5).double()
    optimizer = torch.optim.Adam([*model.parameters(), *readout.parameters()], lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        logits = readout(model(ids).mean(1))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_implicit_gradient_of_a_model_is_that_of_backprop():
    model = encoder(solver="equilibrium", rtol=1e-11, atol=1e-13, block={"dropout": 0.2}).train()
    ids, grads = tokens(), []
    for mode in ("backprop", "implicit"):
        torch.manual_seed(5)  # of the masks of dropout, which are drawn once a solve
        model.zero_grad()
        model.with_solver("equilibrium", rtol=1e-11, atol=1e-13, gradient=mode)(ids).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (grads[0] - grads[1]).norm() < 1e-8 * grads[0].norm()


@pytest.mark.parametrize(("options", "words"), [
    ({"injection": False}, ["'equilibrium' needs injection=True", "does not depend on the input"]),
    ({"weights": "piecewise"}, ["weights='shared'", "'piecewise'"]),
    ({"weights": "linear"}, ["weights='shared'", "'linear'"]),
    ({"weights": "linear", "n_layers": 1}, ["weights='shared'", "'linear'"]),
    ({"layer_drop": 0.1}, ["layer_drop", "straight to an equilibrium"]),
    ({"fusion": "mean"}, ["fusion", "straight to an equilibrium"]),
    ({"steer": 0.1}, ["steer", "straight to an equilibrium"]),
    ({"steps_per_layer": 2}, ["steps_per_layer is for fixed-step solvers"]),
])
def test_a_model_without_an_equilibrium_of_its_own_is_refused(options, words):
    text = refusal(lambda: encoder(**{"solver": "equilibrium"} | options))
    assert all(word in text for word in words), text
    if "steps_per_layer" not in options:
        text = refusal(lambda: encoder(**{"solver": "dopri5"} | options).with_solver("equilibrium"))
        assert all(word in text for word in words), text


def test_a_causal_model_is_refused():
    model = Decoder(DecoderConfig(vocab_size=5, max_seq_len=4, n_layers=2, block=BlockConfig(8, 2),
                                  depth=DepthConfig(weights="shared", injection=True)))
    with pytest.raises(ValueError, match="later tokens move earlier outputs"):
        model.with_solver("equilibrium")


def test_a_causal_model_with_injection_leaks_nothing_under_a_fixed_step_solver():
    model = Decoder(DecoderConfig(vocab_size=5, max_seq_len=6, n_layers=2, block=BlockConfig(8, 2),
                                  depth=DepthConfig(solver="rk4", injection=True))).double().eval()
    ids = torch.randint(5, (2, 6))
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 5
    assert (model(ids)[:, :-1] - model(other)[:, :-1]).abs().max() < 1e-12
    cache, logits = model.new_cache(), []
    for i in range(6):
        out, cache = model(ids[:, i : i + 1], cache=cache)
        logits.append(out)
    assert (torch.cat(logits, 1) - model(ids)).abs().max() < 1e-12


def test_a_model_comes_back_from_disk_bit_for_bit(tmp_path):
    model = encoder(solver="equilibrium", gradient="implicit", solver_options={"window": 3}).eval()
    model.save(tmp_path)
    ids = tokens()
    assert torch.equal(load(tmp_path)(ids), model(ids))
    assert load(tmp_path).config.depth.injection
