"""Weights as functions of l: what θ(l) is, the order of solvers under it, gradients, and how often it is made."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from smooth_models import EXPANSIONS, FORMULAS, LENGTH, Bare, D, final, stacked, state, tiny
from torch import nn

import odeformer.theta
from odeformer import WEIGHTS, BlockConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.smooth_weights import SMOOTH


@pytest.mark.parametrize("name", EXPANSIONS)
@pytest.mark.parametrize("size", [4, 6])
def test_expansions_are_what_numpy_and_scipy_say_between_and_at_the_ends(name, size):
    option = "n_knots" if name in ("linear", "spline") else "n_basis"
    model = tiny(weights=name, weights_options={option: size}, moved=0.3)
    for l in (0.0, 0.4, 1.0, 4 / 3, 2.7, 3.999, 4.0):
        theta = model.layers.theta(torch.tensor(l, dtype=torch.float64))
        assert theta.keys() == dict(model.layers[0].named_parameters()).keys()
        for key in ("attention.core.query.weight", "feedforward.placement.norm.bias"):
            wanted = FORMULAS[name](stacked(model, key), l, 4)
            assert np.abs(theta[key].detach().numpy() - wanted).max() < 1e-13


def test_fourier_takes_another_period():
    model = tiny(weights="fourier", weights_options={"n_basis": 3, "period": 4.0}, moved=0.3)
    theta = [model.layers.theta(torch.tensor(l, dtype=torch.float64))["attention.core.key.weight"] for l in (0.0, 4.0)]
    assert (theta[0] - theta[1]).abs().max() < 1e-14


@pytest.mark.parametrize("basis", ["linear", "spline", "chebyshev"])
def test_lowrank_adds_a_product_whose_factors_move_with_depth(basis):
    model = tiny(weights="lowrank", weights_options={"rank": 2, "n_knots": 4, "basis": basis}, moved=0.3)
    key = "feedforward.core.hidden.weight"
    left, right = (getattr(model.layers, side)[key.replace(".", "/")].detach().numpy() for side in ("left", "right"))
    shared = model.layers[0].get_parameter(key).detach().numpy()
    for l in (0.0, 1.7, 4.0):
        theta = model.layers.theta(torch.tensor(l, dtype=torch.float64))
        moved = FORMULAS[basis](left, l, 4) @ FORMULAS[basis](right, l, 4)
        assert np.abs(theta[key].detach().numpy() - shared - moved).max() < 1e-13
        assert np.linalg.matrix_rank(moved) == 2
        assert theta["feedforward.core.hidden.bias"] is model.layers[0].feedforward.core.hidden.bias


def embedded(model, l):
    """The embedding of l, written out."""
    linear = model.layers.embedding.linear
    x = l * math.pi / model.config.n_layers
    features = [1.0]
    for k in range(1, linear.in_features):
        features.append(math.cos((k + 1) // 2 * x) if k % 2 else math.sin(k // 2 * x))
    y = linear.weight.detach().numpy() @ np.array(features) + linear.bias.detach().numpy()
    return y / (1 + np.exp(-y))


def test_modulated_moves_the_scale_and_shift_of_norms_and_nothing_else():
    model = tiny(weights="modulated", moved=0.3)
    first = dict(model.layers[0].named_parameters())
    for l in (0.3, 3.1):
        theta = model.layers.theta(torch.tensor(l, dtype=torch.float64))
        changed = {key for key in theta if not torch.equal(theta[key], first[key])}
        assert changed == {f"{part}.placement.norm.{x}" for part in ("attention", "feedforward")
                           for x in ("weight", "bias")}
        move = model.layers.moves["attention"]
        y = move.weight.detach().numpy() @ embedded(model, l) + move.bias.detach().numpy()
        scale = theta["attention.placement.norm.weight"] - first["attention.placement.norm.weight"]
        assert np.abs(scale.detach().numpy() - y[:D]).max() < 1e-13


def test_hyper_generates_all_weights_from_an_embedding_of_depth():
    model = tiny(weights="hyper", weights_options={"n_basis": 2}, moved=0.3)
    for l in (0.3, 3.1):
        theta = model.layers.theta(torch.tensor(l, dtype=torch.float64))
        head = model.layers.functions
        phi = head.weight.detach().numpy() @ embedded(model, l) + head.bias.detach().numpy()
        for key in ("attention.core.query.weight", "feedforward.core.output.bias"):
            c = stacked(model, key)
            assert np.abs(theta[key].detach().numpy() - c[0] - phi[0] * c[1] - phi[1] * c[2]).max() < 1e-13


@pytest.mark.parametrize("name", SMOOTH)
def test_all_start_as_the_shared_field_at_every_depth(name):
    model, shared = tiny(weights=name), tiny(weights="shared")
    assert not model.layers.by_layer
    with torch.no_grad():
        for mine, theirs in zip(model.layers[0].parameters(), shared.layers[0].parameters(), strict=True):
            theirs.copy_(mine)
    for solver, steps in (("euler", 4), ("rk4", 3), ("ab3", 7)):
        x, y = (final(m, state(), solver=solver, n_steps=steps) for m in (model, shared))
        assert (x - y).abs().max() < 1e-12


@pytest.mark.parametrize("name", EXPANSIONS)
@pytest.mark.parametrize(("init", "power"), [("ds_init", -0.5), ("depth_gain", None), ("xavier_uniform", 0.0)])
def test_gains_that_depend_on_the_layer_hold_at_the_nodes(name, init, power):
    """Eqs. 21-22: the standard deviation at a node is that of its layer."""
    options = {"a": 1.0, "b": -0.5} if init == "depth_gain" else {}
    model = tiny(weights=name, n_layers=6, block={"init": init, "init_options": options})
    theta = [model.layers.theta(torch.tensor(l, dtype=torch.float64))["attention.core.query.weight"]
             for l in model.layers.basis.nodes]
    for l, w in zip(model.layers.basis.nodes, theta, strict=True):
        layer, first = min(int(l), 5) + 1, min(int(model.layers.basis.nodes[0]), 5) + 1
        ratio = 1.0 if power is None else (layer / first) ** power  # depth_gain's is that of L, the same in all layers
        assert (w - ratio * theta[0]).abs().max() < 1e-6  # drawn in float32
    rows = {row.matrix: row for row in odeformer.init.report(model)}
    row = rows["layers.0.attention.core.query.weight"]
    assert row.wanted == pytest.approx(row.measured, rel=0.35)


# Solvers


@pytest.mark.parametrize(("name", "options"), [("linear", {"n_knots": 5}), ("spline", {"n_knots": 7}),
                                               ("fourier", {}), ("chebyshev", {"n_basis": 4}), ("lowrank", {}),
                                               ("modulated", {}), ("hyper", {})])
def test_rk4_has_order_4_with_the_knots_on_steps(name, options):
    model = tiny(weights=name, weights_options=options, moved=0.1)
    z = 3 * state()  # far from 0, where a norm of z is a stiff field
    fine = final(model, z, solver="dopri8", rtol=1e-11, atol=1e-12)
    steps = [16, 32, 64]
    errors = [(final(model, z, solver="rk4", n_steps=n) - fine).norm().item() for n in steps]
    assert math.log2(errors[-2] / errors[-1]) > 3.9, errors
    assert errors[-1] < 2e-5


def test_rk4_loses_its_order_on_linear_weights_with_the_knots_off_the_steps():
    model = tiny(weights="linear", weights_options={"n_knots": 5}, moved=0.2)
    z = state()
    fine = final(model, z, solver="dopri8", rtol=1e-11, atol=1e-12)
    errors = [(final(model, z, solver="rk4", n_steps=n) - fine).norm().item() for n in (18, 54, 162)]
    orders = [math.log(a / b, 3) for a, b in itertools.pairwise(errors)]
    assert 1.5 < np.mean(orders) < 2.8, orders


@pytest.mark.parametrize("name", SMOOTH)
def test_the_same_model_goes_to_one_answer_under_every_solver(name):
    model = tiny(weights=name, moved=0.1)
    z = state()
    best = final(model, z, solver="dopri5", rtol=1e-10, atol=1e-10)
    for solver, steps, bound in (("euler", 1024, 1e-2), ("ab3", 256, 1e-4), ("rk4", 64, 1e-5)):
        gap = (final(model, z, solver=solver, n_steps=steps) - best).norm() / best.norm()
        assert gap < bound, (solver, gap)
    assert (final(model, z, solver="dopri5", rtol=1e-8, atol=1e-8) - best).norm() / best.norm() < 1e-6


class Still(nn.Module):
    """An attention that does nothing."""

    def __init__(self, d_model, n_heads):
        super().__init__()

    def forward(self, x, *, mask=None, causal=False):
        return torch.zeros_like(x)


class Map(nn.Module):
    """A feed-forward that is one matrix."""

    def __init__(self, d_model, d_ff):
        super().__init__()
        self.matrix = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        return self.matrix(x)


def linear_model(first, last, **depth):
    """dz/dl = A(l) z with A(l) on a straight line from ``first`` to ``last`` over [0, 2]."""
    n = len(first)
    config = EncoderConfig(vocab_size=3, max_seq_len=4, n_layers=2, depth=DepthConfig(
        weights="linear", weights_options={"n_knots": 2}, **depth),
        block=BlockConfig(n, 1, attention=Still, feedforward=Map, norm=Bare, coupling="parallel", position="none"))
    model = Encoder(config).double()
    with torch.no_grad():
        for block, matrix in zip(model.layers, (first, last), strict=True):
            block.feedforward.core.matrix.weight.copy_(torch.from_numpy(matrix))
    return model


def test_a_linear_field_with_commuting_weights_is_the_exponential_of_their_integral():
    """A(l) = (1 - l / 2) A_0 + l / 2 A_1 over [0, 2] with A_1 = A_0² / 3: z(2) = exp(A_0 + A_1) z(0)."""
    a = np.array([[0.1, 0.9], [-0.7, -0.2]])
    model = linear_model(a, a @ a / 3, solver="rk4", n_steps=64)
    z = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = z.numpy() @ expm(a + a @ a / 3).T
    assert np.abs(model.evolve(z).z.detach().numpy() - wanted).max() < 1e-7
    fine = model.with_solver("dopri8", rtol=1e-12, atol=1e-13).evolve(z).z.detach().numpy()
    assert np.abs(fine - wanted).max() < 1e-12


def test_a_linear_field_with_weights_that_do_not_commute_is_what_magnus_says():
    """Fourth-order Magnus steps (Iserles & Nørsett 1999): for A linear in l, Ω = h A_m - h³ [A', A_m] / 12 with A_m in
    the middle of the step and A' the slope; and scipy's DOP853 beside it."""
    a, b = np.array([[0.1, 0.9], [-0.7, -0.2]]), np.array([[0.4, -0.3], [1.1, 0.2]])
    model = linear_model(a, b, solver="rk4", n_steps=256)
    n, flow = 512, np.eye(2)
    h, slope = 2 / n, (b - a) / 2
    for i in range(n):
        middle = a + slope * h * (i + 0.5)
        flow = expm(h * middle + h**3 / 12 * (slope @ middle - middle @ slope)) @ flow
    reference = solve_ivp(lambda l, y: ((a + slope * l) @ y.reshape(2, 2)).ravel(), (0, 2), np.eye(2).ravel(),
                          method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1].reshape(2, 2)
    assert np.abs(flow - reference).max() < 1e-9
    assert np.abs(flow - expm(a + b)).max() > 0.05  # commuting or not makes a difference here
    z = torch.eye(2, dtype=torch.float64).unsqueeze(0)
    assert np.abs(model.evolve(z).z[0].T.detach().numpy() - reference).max() < 1e-8
    adaptive = model.with_solver("dopri5", rtol=1e-10, atol=1e-12).evolve(z).z[0].T.detach().numpy()
    assert np.abs(adaptive - reference).max() < 1e-8


def test_adaptive_solvers_are_told_the_kinks_and_stop_there():
    model = tiny(weights="linear", weights_options={"n_knots": 4}, n_layers=6, moved=0.3, solver="dopri5", rtol=1e-6)
    solution = model.evolve(state())
    ends = np.cumsum(solution.steps)
    for kink in (2.0, 4.0):
        assert np.abs(ends - kink).min() < 1e-9
    assert solution.field.kinks == (2.0, 4.0)


def test_the_number_of_steps_is_free_of_the_number_of_knots():
    model = tiny(weights="spline", weights_options={"n_knots": 5}, moved=0.1)
    for n in (1, 3, 7):
        solution = model.with_solver("midpoint", n_steps=n).evolve(state())
        assert solution.n_steps == n and solution.nfe == 2 * n


# Refusals


def test_rows_at_depths_of_their_own_are_refused():
    for name in SMOOTH:
        with pytest.raises(ValueError, match="per_sample"):
            tiny(weights=name, solver="dopri54", solver_options={"per_sample": True})
    f = tiny(weights="linear").vector_field(state())
    with pytest.raises(ValueError, match="one depth"):
        f(state(), torch.zeros(2, 1, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="0-d tensor"):
        f(state(), 1.0)


@pytest.mark.parametrize(("name", "options", "word"), [
    ("linear", {"n_knots": 1}, "n_knots"), ("spline", {"n_knots": 3}, "n_knots"),
    ("spline", {"n_knots": 4.0}, "n_knots"), ("fourier", {"period": 0.0}, "period"),
    ("lowrank", {"rank": 0}, "rank"), ("lowrank", {"basis": "wavelet"}, "basis"),
    ("hyper", {"n_basis": 0}, "n_basis"), ("modulated", {"hidden": 0}, "hidden"), ("linear", {"knots": 4}, "knots"),
])
def test_wrong_options_are_refused_by_name(name, options, word):
    with pytest.raises((ValueError, TypeError), match=word):
        tiny(weights=name, weights_options=options)


def test_modulated_needs_norms_with_parameters():
    with pytest.raises(ValueError, match="norms"):
        tiny(weights="modulated", block={"norm": Bare})


def test_no_block_is_a_layer():
    model = tiny(weights="linear")
    with pytest.raises(TypeError, match="functions of l"):
        model.layers.index(0)
    with pytest.raises(ValueError, match="vary within layers"):
        odeformer.prune(model, keep=[0, 1])


def test_every_smooth_entry_stands_in_the_table():
    assert set(SMOOTH) <= set(WEIGHTS)
    assert {name for name, kind in WEIGHTS.items() if not kind.by_layer} == set(SMOOTH)


def test_padding_changes_nothing():
    for name in SMOOTH:
        model = tiny(weights=name, solver="rk4", n_steps=3, moved=0.2)
        z = state()
        padded = torch.cat([z, torch.full_like(z[:, :3], torch.nan)], 1)
        mask = torch.ones(2, LENGTH + 3, dtype=torch.bool)
        mask[:, LENGTH:] = False
        assert (model.evolve(padded, mask).z[:, :LENGTH] - model.evolve(z).z).abs().max() < 1e-12
