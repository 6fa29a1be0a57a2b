"""Dropout inside an integrated field: one mask a solve and piece, or a new one at each evaluation."""

import pytest
import torch

import odeformer.block
from odeformer import BlockConfig, DepthConfig, Encoder, EncoderConfig
from solvers import SOLVERS

VOCAB, LENGTH, D = 17, 6, 8
EXACT = ("backprop", "checkpoint", "checkpoint_recursive", "reversible", "implicit")


def tiny(*, n_layers=2, block=(), **depth):
    torch.manual_seed(0)
    return Encoder(EncoderConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers,
                                 block=BlockConfig(D, 2, **{"dropout": 0.3, "coupling": "parallel", **dict(block)}),
                                 depth=DepthConfig(**depth))).double().train()


def tokens():
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def calmed(model, factor=0.3):
    with torch.no_grad():
        for p in model.layers.parameters():
            p.mul_(factor)
    return model


def gradient_of(model, seed=3):
    torch.manual_seed(seed)
    model.zero_grad()
    out = model(tokens())
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.layers.parameters()])


MODES = [(name, mode) for name in ("euler", "rk4", "ab3", "abm3", "leapfrog", "alf", "momentum", "revnet",
                                   "reversible_heun", "reversible_midpoint", "yoshida4", "gauss4", "rk2_gate")
         for mode in SOLVERS[name].gradients if mode in EXACT and mode != "backprop"]


@pytest.mark.parametrize(("solver", "mode", "per"), [
    (solver, mode, per) for solver, mode in MODES for per in ("solve", "evaluation")
    if per == "solve" or not SOLVERS[solver].is_implicit])
def test_every_exact_gradient_mode_replays_the_masks(solver, mode, per):
    model = calmed(tiny(block={"dropout_per": per}))
    runs = [gradient_of(model.with_solver(solver, gradient=gradient, steps_per_layer=2))
            for gradient in ("backprop", mode)]
    assert (runs[0][0] - runs[1][0]).abs().max() < 1e-12
    assert (runs[0][1] - runs[1][1]).abs().max() < 1e-9 * runs[0][1].abs().max()


@pytest.mark.parametrize("coupling", ["lie", "strang", "composed"])
@pytest.mark.parametrize("per", ["solve", "evaluation"])
@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_recursive", "reversible"])
def test_masks_are_replayed_under_every_coupling(mode, per, coupling):
    model = tiny(block={"dropout_per": per, "coupling": coupling})
    runs = [gradient_of(model.with_solver("reversible_midpoint", gradient=gradient, steps_per_layer=2))
            for gradient in ("backprop", mode)]
    assert (runs[0][1] - runs[1][1]).abs().max() < 1e-9 * runs[0][1].abs().max()


@pytest.mark.parametrize("solver", ["rk4", "dopri5"])
def test_the_adjoint_integrates_the_field_that_was_drawn(solver):
    """Its gradient is that of the flow, so it agrees the better the finer the solve; other masks would be far off."""
    amount = {"rtol": 1e-7, "atol": 1e-9} if SOLVERS[solver].is_adaptive else {"steps_per_layer": 12}
    model = calmed(tiny())
    exact, adjoint, other = (gradient_of(model.with_solver(solver, gradient=mode, **amount), seed)[1]
                             for mode, seed in (("backprop", 3), ("adjoint", 3), ("backprop", 4)))
    assert (exact - adjoint).norm() < 1e-5 * exact.norm() < (exact - other).norm()


def masks(model, monkeypatch):
    """The masks of the first layer's attention, one an evaluation."""
    drawn, original = [], odeformer.block.Context.drop

    def spy(self, site, layer, *rest):
        y = original(self, site, layer, *rest)
        if site is model.layers[0].attention and layer == 0:
            drawn.append(y != 0)
        return y

    monkeypatch.setattr(odeformer.block.Context, "drop", spy)
    model(tokens())
    monkeypatch.undo()
    return drawn


@pytest.mark.parametrize(("per", "equal"), [("solve", True), ("evaluation", False)])
def test_stages_and_steps_share_a_mask_or_draw_their_own(per, equal, monkeypatch):
    drawn = masks(tiny(solver="rk4", steps_per_layer=2, block={"dropout_per": per}), monkeypatch)
    assert len(drawn) == 8
    assert all(torch.equal(x, y) == equal for i, x in enumerate(drawn) for y in drawn[:i])


def test_both_ways_drop_as_often_as_asked_and_keep_the_mean():
    for per in ("solve", "evaluation"):
        context = odeformer.block.Context(training=True, dropout_per=per)
        torch.manual_seed(0)
        y = context.drop(torch.nn.Identity(), 0, 0.3, torch.ones(100, 10, 10))
        kept = (y != 0).double()
        assert abs(kept.mean() - 0.7) < 4 * (0.21 / 10_000) ** 0.5
        assert torch.equal(y[y != 0].unique(), torch.tensor([1 / 0.7]))


def test_nothing_is_dropped_in_evaluation():
    for per in ("solve", "evaluation"):
        model = tiny(block={"dropout_per": per}).eval()
        plain = tiny(block={"dropout": 0.0}).eval()
        assert torch.equal(model(tokens()), plain(tokens()))


def wrong(call, *words):
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "equilibrium"])  # it needs injection
def test_solvers_that_cannot_follow_a_field_that_changes_refuse_it_when_the_model_is_made(name):
    solver, block = SOLVERS[name], {"dropout_per": "evaluation", "coupling": "parallel"}
    kind = "adaptive" if solver.is_adaptive else "implicit" if solver.is_implicit else None
    if kind is None:
        tiny(solver=name, block=block)
        if "adjoint" in solver.gradients:
            wrong(lambda: tiny(solver=name, gradient="adjoint", block=block), "dropout_per", "adjoint")
        return
    wrong(lambda: tiny(solver=name, block=block), "dropout_per", kind, name)
    wrong(lambda: tiny(block=block).with_solver(name), "dropout_per", kind, name)
    tiny(solver=name, block=block | {"dropout": 0.0})


def test_one_mask_a_solve_lets_an_adaptive_solver_work_as_hard_as_without_dropout():
    nfe = []
    for dropout in (0.0, 0.1):
        torch.manual_seed(3)
        nfe.append(calmed(tiny(solver="dopri5", rtol=1e-4, block={"dropout": dropout}))(
            tokens(), return_solution=True)[1].nfe)
    assert nfe[1] <= 1.5 * nfe[0]


def test_wrong_options_are_refused():
    wrong(lambda: BlockConfig(D, 2, dropout_per="step"), "dropout_per", "step", "'solve' or 'evaluation'")
    wrong(lambda: tiny(solver="dopri54", solver_options={"per_sample": True}), "compact", "dopri54")
    tiny(solver="dopri54", solver_options={"per_sample": True, "compact": False})(tokens())
