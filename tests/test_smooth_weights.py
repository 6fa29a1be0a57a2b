"""Weights as functions of l: what θ(l) is, the order of solvers under it, gradients, and how often it is made."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.interpolate import BSpline
from scipy.linalg import expm
from torch import nn

import odeformer.theta
from odeformer import (
    WEIGHTS,
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
    VisionConfig,
    VisionEncoder,
)
from odeformer.norms import Placement
from odeformer.smooth_weights import SMOOTH
from odeformer.theta import KEPT

VOCAB, LENGTH, D = 17, 6, 8
EXPANSIONS = ("linear", "spline", "fourier", "chebyshev")


def tiny(kind=Encoder, config=EncoderConfig, *, n_layers=4, block=(), moved=0.0, **depth):
    """A model in float64; ``moved``: how far its parameters are taken from the constant weights that it starts with."""
    torch.manual_seed(0)
    model = kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers,
                        block=BlockConfig(D, 2, **{"coupling": "parallel"} | dict(block)),
                        depth=DepthConfig(**depth))).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.layers.parameters():
            p.add_(moved * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def tokens(batch=2):
    return torch.randint(VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def state(batch=2):
    return torch.randn(batch, LENGTH, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def final(model, z, **options):
    """The state at the end, from z."""
    return model.with_solver(options.pop("solver"), **options).evolve(z).z


def stacked(model, name):
    return np.stack([block.get_parameter(name).detach().numpy() for block in model.layers])


# What θ(l) is

FORMULAS = {  # of coefficients (K, ...), l and L
    "linear": lambda c, l, L: np.apply_along_axis(
        lambda column: np.interp(l, np.linspace(0, L, len(c)), column), 0, c),
    "spline": lambda c, l, L: BSpline(np.r_[[0.0] * 3, np.linspace(0, L, len(c) - 2), [L] * 3], c, 3)(l),
    "fourier": lambda c, l, L: sum(
        c[k] * (1 if k == 0 else math.cos((k + 1) // 2 * math.pi * l / L) if k % 2 else
                math.sin(k // 2 * math.pi * l / L)) for k in range(len(c))),
    "chebyshev": lambda c, l, L: np.polynomial.chebyshev.chebval(2 * l / L - 1, c),
}


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


class Bare(Placement):
    """No norm: f = F(z)."""

    def __init__(self, d_model):
        super().__init__()

    def forward(self, z, branch):
        return branch(z)


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


# Gradients

MODES = {"checkpoint": ("rk4", {}), "checkpoint_recursive": ("rk4", {}), "reversible": ("reversible_midpoint", {}),
         "implicit": ("implicit_midpoint", {"tol": 1e-12})}


def gradients(name, solver, gradient, options=(), *, block=(), training=False, steps=8, batch=2):
    model = tiny(weights=name, moved=0.1, solver=solver, gradient=gradient, n_steps=steps, block=block,
                 solver_options=dict(options)).train(training)
    z = state(batch).requires_grad_()
    torch.manual_seed(3)
    model.evolve(z).z.cos().sum().backward()
    return [z.grad, *(p.grad for p in model.layers.parameters())]


def gap(mine, theirs):
    """The largest difference over the largest entry; a tensor without a gradient has none in either."""
    assert [x is None for x in mine] == [x is None for x in theirs]
    pairs = [(x, y) for x, y in zip(mine, theirs, strict=True) if x is not None]
    return (max((x - y).abs().max() for x, y in pairs) / max(y.abs().max() for _, y in pairs)).item()


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("mode", MODES)
def test_every_gradient_mode_gives_the_gradient_of_backprop(name, mode):
    solver, options = MODES[mode]
    wanted = gradients(name, solver, "backprop", options)
    assert all(x is not None for x in wanted)
    assert gap(gradients(name, solver, mode, options), wanted) < (1e-6 if mode == "implicit" else 1e-9)


@pytest.mark.parametrize("name", SMOOTH)
def test_the_continuous_adjoint_is_near_it_within_the_error_of_its_grid(name):
    gaps = [gap(gradients(name, "rk4", "adjoint", steps=n), gradients(name, "rk4", "backprop", steps=n))
            for n in (12, 48)]
    assert 1e-12 < gaps[1] < gaps[0] / 30 < 1e-2 / 30, gaps  # of fourth order, too


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_recursive", "reversible"])
def test_gradient_modes_replay_dropout_and_layers_that_share_weights(name, mode):
    solver = MODES[mode][0]
    wanted = gradients(name, solver, "backprop", block={"dropout": 0.3}, training=True)
    assert gap(gradients(name, solver, mode, block={"dropout": 0.3}, training=True), wanted) < 1e-9


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_those_of_finite_differences(name):
    model = tiny(weights=name, moved=0.2, solver="midpoint", n_steps=3)
    z = state()
    model.evolve(z).z.cos().sum().backward()
    generator = torch.Generator().manual_seed(7)
    for p in model.layers.parameters():
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p.add_(step * direction)
                values.append(model.evolve(z).z.cos().sum().item())
                p.sub_(step * direction)
        assert (p.grad * direction).sum().item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-6)


# How often θ(l) is made


@pytest.fixture
def made(monkeypatch):
    """(grad mode, l) of every θ(l) that is made, for each sublayer."""
    log = []
    remembered = odeformer.theta.Remembered.__init__

    def init(self, at, blocks):
        def counted(l):
            log.append((id(self), torch.is_grad_enabled(), float(l)))
            return at(l)

        remembered(self, counted, blocks)

    monkeypatch.setattr(odeformer.theta.Remembered, "__init__", init)
    return log


@pytest.mark.parametrize("coupling", ["parallel", "lie", "composed"])
@pytest.mark.parametrize(("solver", "mode"), [("rk4", "backprop"), ("ssprk3", "backprop"), ("ab3", "backprop"),
                                              ("rk4", "checkpoint")])
def test_weights_are_made_once_for_each_depth_of_a_pass(made, coupling, solver, mode):
    model = tiny(weights="spline", solver=solver, gradient=mode, n_steps=5, block={"coupling": coupling})
    model.evolve(state()).z.sum().backward()
    forward = len(set(made))
    if mode == "backprop":
        assert len(made) == forward
    else:  # those of a step are made again with it
        assert len(made) <= 2 * forward
    depths = {l for _, _, l in made}
    wanted = {"rk4": 11}.get(solver)
    assert wanted is None or len(depths) == wanted  # 5 steps, their middles, the end
    assert len({key for key, _, _ in made}) == 2


def test_the_way_back_of_a_reversible_solve_makes_them_once_more(made):
    model = tiny(weights="spline", solver="reversible_midpoint", gradient="reversible", n_steps=6)
    loss = model.evolve(state()).z.sum()
    forward = len(made)
    loss.backward()
    back = made[forward:]
    assert len(back) <= 2 * len(set(back)) and len(set(back)) <= 2 * len({x[::2] for x in made[:forward]})


def test_a_field_can_be_used_again_after_a_backward_pass_through_it():
    model = tiny(weights="spline", moved=0.1, solver="rk4", n_steps=2)
    solution = model.evolve(state())
    solution.z.sum().backward()
    l = torch.tensor(2.0, dtype=torch.float64)
    first, second = [], []
    for grads in (first, second):
        model.zero_grad()
        solution.field(state(), l).cos().sum().backward()
        grads += [p.grad.clone() for p in model.layers.parameters() if p.grad is not None]
    assert first and all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("name", SMOOTH)
def test_passes_in_threads_do_not_see_each_others_weights(name):
    model = tiny(weights=name, moved=0.2, solver="rk4", n_steps=3)
    inputs = [state() * (i + 1) for i in range(4)]

    def run(z):
        with torch.no_grad():
            return model.evolve(z).z

    wanted = [run(z) for z in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, inputs * 5))
    assert all(torch.equal(x, wanted[i % 4]) for i, x in enumerate(found))


def test_a_model_made_under_inference_mode_runs():
    with torch.inference_mode():
        model = tiny(weights="linear", solver="rk4", n_steps=2)
        assert model.evolve(state()).z.isfinite().all()


def test_a_field_kept_while_parameters_change_has_the_new_ones_at_every_depth():
    model = tiny(weights="linear", moved=0.2)
    f, ls = model.vector_field(state()), [torch.tensor(l, dtype=torch.float64) for l in (1.0, 1.5)]
    with torch.no_grad():
        f(state(), ls[0])
        for p in model.layers.parameters():
            p.mul_(1.5)
        assert all(torch.equal(f(state(), l), model.vector_field(state())(state(), l)) for l in ls)


@pytest.mark.parametrize("mode", ["checkpoint", "reversible"])
def test_hooks_stay_off_the_tensors_of_the_caller(mode):
    model = tiny(weights="linear", solver="reversible_midpoint", gradient=mode, n_steps=4)
    other = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    moved = {name: 1 * p for name, p in other.items()}
    for _ in range(2):
        torch.func.functional_call(model, moved, (tokens(),)).sum()
    assert not any(p._backward_hooks for p in moved.values())


@pytest.mark.parametrize("name", EXPANSIONS)
def test_half_precision_weights_are_summed_in_float32(name):
    model = tiny(weights=name, moved=0.3)
    l = torch.tensor(1.37)
    wanted = model.layers.theta(l.double())
    half = model.bfloat16().layers
    exact = tiny(weights=name, moved=0.3)
    for p, q in zip(exact.layers.parameters(), half.parameters(), strict=True):
        p.data = q.double()
    rounded = {key: x.bfloat16() for key, x in exact.layers.theta(l.double()).items()}
    key = "attention.core.query.weight"
    assert half.theta(l)[key].dtype == torch.bfloat16
    off = (half.theta(l)[key].double() - rounded[key].double()).abs() / wanted[key].abs().clamp(min=0.1)
    assert off.max() <= 2**-7  # one rounding, of a number that float32 may put on the other side of a tie


def test_what_is_remembered_does_not_grow_with_depth():
    model = tiny(weights="linear", solver="euler", n_steps=50)
    with torch.no_grad():
        solution = model.evolve(state())
    for part in solution.field.parts:
        assert len(part.weights.kept) <= KEPT


# Within a model


def test_a_cached_decoder_says_what_one_without_does():
    for name in SMOOTH:
        model = tiny(Decoder, DecoderConfig, weights=name, solver="rk4", n_steps=3, moved=0.2)
        x = tokens(1)
        with torch.no_grad():
            whole, cache, rows = model(x), model.new_cache(), []
            for i in range(LENGTH):
                logits, cache = model(x[:, i : i + 1], cache=cache)
                rows.append(logits)
        assert (torch.cat(rows, 1) - whole).abs().max() < 1e-12, name


def test_a_cached_translator_keeps_the_memory_of_every_evaluation():
    for name in SMOOTH:
        torch.manual_seed(0)
        model = Seq2Seq(Seq2SeqConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=3, block=BlockConfig(D, 2),
                                      depth=DepthConfig(weights=name, solver="midpoint", n_steps=2))).double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
            source, target = tokens(), tokens().flip(1)
            memory, cache, rows = model.encode(source), model.new_cache(), []
            for i in range(LENGTH):
                logits, cache = model.decode(target[:, i : i + 1], memory, cache=cache)
                rows.append(logits)
            assert (torch.cat(rows, 1) - model(source, target)).abs().max() < 1e-12, name


@pytest.mark.parametrize("name", SMOOTH)
def test_a_compiled_model_is_one_graph_with_equal_results(name):
    model = tiny(weights=name, solver="rk4", n_steps=2, moved=0.2)
    compiled = torch.compile(lambda z: model.evolve(z).z, fullgraph=True, backend="eager")
    assert (compiled(state()) - model.evolve(state()).z).abs().max() < 1e-12


@pytest.mark.parametrize("name", SMOOTH)
def test_torch_func_and_derivatives_in_depth(name):
    model = tiny(weights=name, moved=0.2)
    z, direction, l = state(), state().flip(0), torch.tensor(1.3, dtype=torch.float64)
    f = model.vector_field(z)
    _, tangent = torch.func.jvp(lambda z: f(z, l), (z,), (direction,))
    with torch.no_grad():
        difference = (f(z + 1e-6 * direction, l) - f(z - 1e-6 * direction, l)) / 2e-6
        in_depth = (f(z, l + 1e-6) - f(z, l - 1e-6)) / 2e-6
    assert (tangent - difference).abs().max() < 1e-6
    _, tangent = torch.func.jvp(lambda l: f(z, l), (l,), (torch.ones_like(l),))
    assert (tangent - in_depth).abs().max() < 1e-6
    moving = l.clone().requires_grad_()
    (grad,) = torch.autograd.grad((f(z, moving) * direction).sum(), moving)
    assert grad.item() == pytest.approx((in_depth * direction).sum().item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", SMOOTH)
def test_dropped_layers_are_stretches_of_depth(name):
    model = tiny(weights=name, moved=0.1, solver="rk4", layer_drop=0.5, steps_per_layer=2).train()
    torch.manual_seed(1)
    solution = model.evolve(state(), save=True)
    keep = [f.parts[0].context.keep[i] for i, (_, _, f) in enumerate(solution.field.pieces)]
    for i, kept in enumerate(keep):
        before, after = solution.states[2 * i], solution.states[2 * i + 2]
        moved = (after - before).abs().amax((1, 2)) > 1e-9
        assert torch.equal(moved, kept.view(-1) > 0)
    assert any((kept == 0).any() for kept in keep) and any((kept > 0).any() for kept in keep)


def test_weights_stay_in_full_precision_under_autocast():
    model = tiny(weights="lowrank", moved=0.2).float()
    model.layers.left.requires_grad_(False)
    l = torch.tensor(1.5)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        made = odeformer.theta.Remembered(model.layers.bind("attention"), model.layers)(l)
    assert made["core.query.weight"].dtype == torch.float32
    assert torch.equal(made["core.query.weight"], model.layers.bind("attention")(l)["core.query.weight"])


def test_a_vision_model_takes_them_too():
    config = VisionConfig(image_size=4, patch_size=2, n_classes=3, channels=1, n_layers=4, block=BlockConfig(D, 2),
                          depth=DepthConfig(weights="hyper", solver="rk4"))
    model = VisionEncoder(config)
    model(torch.randn(2, 1, 4, 4)).sum().backward()
    assert all(p.grad is not None for p in model.layers[0].parameters())


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
