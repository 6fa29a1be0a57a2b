"""Adaptive Runge-Kutta methods under torchdiffeq's engine: accuracy, saving, failures, norms, gradients, options."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torchdiffeq
from adaptive_pairs import F64, LEADING, PAIRS, start
from scipy.integrate import solve_ivp
from solve_problem import Counted, coupled

from solvers import SOLVERS, Tableau, get_solver, solve
from solvers.adaptive import METHODS, Adaptive
from solvers.coefficients import EXPLICIT
from solvers.engine import engine, middle_weights
from solvers.stepsize import error_order

IDENTICAL = {"rtol": 1e-6, "atol": 1e-9}


@pytest.fixture(scope="module")
def reference():
    """depth -> state, by scipy's DOP853 at 1e-13."""
    def f(l, z):
        x, y = z.reshape(2, 2).T
        return np.stack([l * x + y, l * y - x * x / 4], -1).ravel()

    out = solve_ivp(f, (0, 2), start().numpy().ravel(), method="DOP853", rtol=1e-13, atol=1e-15, dense_output=True)
    return lambda l: torch.tensor(out.sol(l)).view(2, 2)


def test_there_are_pairs_of_every_order():
    assert len(PAIRS) >= 15
    assert {2, 3, 4, 5, 6, 8} <= {pair.order for pair in PAIRS.values()}


@pytest.mark.parametrize("name", list(PAIRS))
def test_every_pair_meets_its_tolerance_at_the_end_and_at_saved_depths(name, reference):
    # The error of a step is held to the tolerance, the steps add up: allow the sum over the steps, four times over
    # (the flow stretches errors by e^2 at most, its norm by less). fehlberg's 1(2) estimate is 1/512 of its weights.
    depths, rtol = [0.0, 0.4, 1.03, 1.5, 2.0], 1e-4 if PAIRS[name].order < 3 else 1e-6
    out = solve(coupled, start(), span=(0.0, 2.0), solver=PAIRS[name], rtol=rtol, atol=rtol, save_at=depths)
    allowed = 4 * rtol * out.n_steps * (60 if name.startswith("fehlberg2") else 1)
    for l, state in zip(depths, out.states, strict=True):
        assert (state - reference(l)).abs().max() < allowed
    assert torch.equal(out.states[0], start()) and torch.equal(out.states[-1], out.z)
    assert max(out.errors) <= 1 and len(out.errors) == out.n_steps == len(out.steps)
    assert sum(out.steps) == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize("name", list(PAIRS))
def test_nfe_is_two_for_the_first_step_and_the_stages_of_each_trial(name):
    pair = PAIRS[name]
    out = solve(coupled, start(), span=(0.0, 2.0), solver=pair, rtol=1e-3, atol=1e-4)
    stages = pair.n_stages - 1 if pair.tableau.is_fsal else pair.n_stages
    assert out.nfe == 2 + stages * (out.n_steps + out.n_rejected)


@pytest.mark.parametrize("name", list(PAIRS))
def test_the_final_state_and_the_steps_do_not_depend_on_save_at(name):
    settings = {"span": (0.0, 2.0), "solver": PAIRS[name], "rtol": 1e-3, "atol": 1e-4}
    plain = solve(coupled, start(), **settings)
    saved = solve(coupled, start(), save_at=[0.0, 1e-9, 0.3, 0.3, 1.999, 2.0], **settings)
    assert torch.equal(plain.z, saved.z) and plain.steps == saved.steps
    assert torch.equal(saved.states[2], saved.states[3])


def test_saved_depths_are_free_where_an_interpolant_is_as_good_as_the_estimate():
    for name, pair in PAIRS.items():
        settings = {"span": (0.0, 2.0), "solver": pair, "rtol": 1e-3, "atol": 1e-4}
        plain, saved = solve(coupled, start(), **settings), solve(coupled, start(), save_at=[0.9, 2.0], **settings)
        free = error_order(pair.tableau) <= 4 or name in ("dopri5", "dopri54")
        stages = pair.n_stages - 1 if pair.tableau.is_fsal else pair.n_stages
        assert saved.nfe - plain.nfe == (0 if free else stages), name


def test_the_middle_weights_of_dopri5_are_of_order_four():
    # b(1/2) must satisfy the order conditions with 1 / gamma replaced by (1/2)^|t| / gamma (Hairer et al. II.6)
    t = METHODS["dopri5"].tableau
    w, c, a = np.array(middle_weights(t)), np.array(t.c), np.zeros((7, 7))
    for i, row in enumerate(t.a):
        a[i, :i] = row
    conditions = {1: [np.ones(7)], 2: [2 * c], 3: [3 * c**2, 6 * a @ c],
                  4: [4 * c**3, 8 * c * (a @ c), 12 * a @ c**2, 24 * a @ a @ c]}
    for size, vectors in conditions.items():
        for v in vectors:
            assert w @ v == pytest.approx(0.5**size, abs=1e-12)
    assert middle_weights(METHODS["dopri8"].tableau) is None


# The engine

@pytest.mark.parametrize("name", list(PAIRS))
def test_equal_steps_in_the_engine_are_powers_of_the_stability_function(name):
    # the FSAL trap: an engine that takes the last stage for f at the end of the step is right once and wrong then
    pair = dataclasses.replace(PAIRS[name], first_step=0.5, max_step=0.5)
    out = solve(lambda z, l: -1.5 * z, torch.ones(1, dtype=F64), span=(0.0, 2.0), solver=pair, rtol=1e6, atol=1e6)
    assert out.steps == [0.5] * 4
    assert out.z.item() == pytest.approx(float(pair.tableau.stability(-0.75)) ** 4, rel=1e-12)


def test_adaptive_heun_is_stable_up_to_two():
    # in the torchdiffeq wheel its real interval is 1.05: 200 steps of h λ = -1.8 would grow
    pair = dataclasses.replace(METHODS["adaptive_heun"], first_step=0.18, max_step=0.18)
    out = solve(lambda z, l: -10 * z, torch.ones(1, dtype=F64), span=(0.0, 36.0), solver=pair, rtol=1e9, atol=1e9)
    assert out.z.abs().item() < 1e-6


def test_the_engine_is_refused_where_torchdiffeq_takes_another_step(monkeypatch):
    from torchdiffeq._impl import rk_common

    def step_of_another_release(func, y0, f0, t0, dt, t1, tableau):
        y1, f1, error, k = real(func, y0, f0, t0, dt, t1, tableau)
        return y1 + 1e-9, f1, error, k

    real = rk_common._runge_kutta_step
    engine.cache_clear()
    monkeypatch.setattr(rk_common, "_runge_kutta_step", step_of_another_release)
    with pytest.raises(ImportError, match=r"does not run a tableau as the adaptive engine needs it.*0\.2\.5"):
        solve(coupled, start(), solver="dopri5")
    monkeypatch.setattr(rk_common, "_runge_kutta_step", real)
    monkeypatch.delattr(rk_common.RKAdaptiveStepsizeODESolver, "_adaptive_step")
    with pytest.raises(ImportError, match="_adaptive_step"):
        solve(coupled, start(), solver="bosh3")
    engine.cache_clear()


def test_dopri5_agrees_with_torchdiffeq_and_scipy():
    ours = solve(coupled, start(), span=(0.0, 2.0), solver="dopri5", rtol=1e-8, atol=1e-10)
    theirs = torchdiffeq.odeint(lambda l, z: coupled(z, l), start(), torch.tensor([0.0, 2.0], dtype=F64),
                                rtol=1e-8, atol=1e-10)[-1]
    assert (ours.z - theirs).abs().max() < 1e-7


def test_a_name_does_not_lend_its_interpolant_to_another_tableau():
    pair = Adaptive(EXPLICIT["tsit54"], "dopri5")
    out = solve(lambda z, l: -z, torch.ones(1, dtype=F64), span=(0.0, 4.0), solver=pair, rtol=1e-6, atol=1e-9,
                save_at=[0.5, 1.7])
    assert (out.states[:, 0] - torch.tensor([-0.5, -1.7], dtype=F64).exp()).abs().max() < 1e-6


# Pieces

@pytest.mark.parametrize("name", LEADING)
@pytest.mark.parametrize("span", [(0.0, 1.0), (1.0, 0.0)])
def test_no_step_and_no_stage_crosses_a_jump(name, span):
    seen = []

    def f(z, l):
        seen.append(float(l))
        return torch.where(l < 0.3, 1.0, -5.0) * z

    rtol = 1e-7 if PAIRS[name].order > 2 else 1e-5
    out = solve(f, torch.ones(1, 1, dtype=F64), span=span, solver=PAIRS[name], rtol=rtol, atol=1e-9,
                breakpoints=[0.3, 5.0])
    exact = 0.3 - 5 * 0.7
    assert out.z.log().item() == pytest.approx(exact if span[0] == 0 else -exact, abs=1e-3)
    ends = np.cumsum([span[0], *out.steps])
    assert np.abs(ends - 0.3).min() < 1e-9
    assert 0.3 not in seen and not any(0.3 - 1e-9 > l > 0.3 + 1e-9 for l in seen)
    assert min(seen) >= 0 and max(seen) <= 1


def test_the_parts_of_a_layered_field_are_only_called_inside_their_layers():
    layers = [Counted(lambda z, l, k=k: -k * z) for k in (1.0, 3.0, 0.5)]

    def field(z, l):
        raise AssertionError("the layers are called")

    field.pieces = [(0.0, 1e-3, layers[0]), (1e-3, 1.0, layers[1]), (1.0, 2.0, layers[2])]
    out = solve(field, torch.ones(1, 1, dtype=F64), span=(0.0, 2.0), solver="dopri5", **IDENTICAL, save_at=[1e-3, 2.0])
    for (a, b, _), layer in zip(field.pieces, layers, strict=True):
        assert min(layer.depths) >= a and max(layer.depths) <= b
    assert out.z.log().item() == pytest.approx(-(1e-3 + 3 * 0.999 + 0.5), abs=1e-5)
    assert out.states[0].log().item() == pytest.approx(-1e-3, abs=1e-8)


def test_a_step_that_was_cut_at_a_jump_does_not_shorten_the_next():
    def run(jumps):
        return solve(lambda z, l: -z, torch.ones(1, 1, dtype=F64), span=(0.0, 8.0), solver="dopri5", breakpoints=jumps)

    assert run([4.0, 4.0 + 1e-7]).n_steps <= run([4.0]).n_steps + 1


# Norms

def test_padding_does_not_reach_the_steps():
    # 100 entries of padding that stand still would shrink an RMS over everything by sqrt(25)
    def f(z, l):
        return torch.stack([z[..., 1], -z[..., 0]], -1)

    z0 = torch.zeros(1, 101, 2, dtype=F64)
    z0[0, 0, 0] = 1.0
    mask = torch.zeros(1, 101, dtype=torch.bool)
    mask[0, 0] = True
    padded = solve(f, z0, span=(0.0, 10.0), solver="dopri5", mask=mask)
    alone = solve(f, z0[:, :1], span=(0.0, 10.0), solver="dopri5")
    assert padded.steps == alone.steps
    assert torch.equal(padded.z[:, :1], alone.z)
    assert solve(f, z0, span=(0.0, 10.0), solver="dopri5").n_steps < alone.n_steps


def test_padding_that_is_not_finite_counts_as_zero():
    mask = torch.tensor([[True, True, False]])

    def f(z, l):
        return torch.where(mask[..., None], -z, math.nan)

    z0 = torch.ones(1, 3, 2, dtype=F64)
    z0[0, 2, 0] = math.nan
    out = solve(f, z0, solver="dopri5", mask=mask, **IDENTICAL)
    assert (out.z[:, :2] - math.exp(-1)).abs().max() < 1e-5
    assert out.z[0, 2].tolist() == [0.0, 1.0]


def test_a_demanding_row_is_not_averaged_away():
    # one oscillator among 256 rows at rest: under an RMS over the batch its error is 16 times the tolerance
    def f(z, l):
        return torch.stack([z[..., 1], -25 * z[..., 0]], -1)

    z0 = torch.zeros(256, 2, dtype=F64)
    z0[17, 0] = 1.0
    alone = solve(f, z0[17:18], span=(0.0, 5.0), solver="dopri5", **IDENTICAL)
    among = solve(f, z0, span=(0.0, 5.0), solver="dopri5", **IDENTICAL)
    assert among.steps == alone.steps and torch.equal(among.z[17:18], alone.z)

    pooled = dataclasses.replace(METHODS["dopri5"], norm=lambda e: e.square().mean().sqrt())
    error = [(solve(f, z0, span=(0.0, 5.0), solver=s, **IDENTICAL).z[17, 0] - math.cos(25)).abs()
             for s in ("dopri5", pooled)]
    assert error[1] > 4 * error[0]


def test_a_norm_of_ones_own_sees_the_state_as_it_is():
    shapes = []

    def norm(e):
        shapes.append([tuple(x.shape) for x in e])
        return e[0].abs().max()

    pair = dataclasses.replace(METHODS["dopri5"], norm=norm)
    solve(lambda z, l: (-z[0], -z[1]), (torch.ones(2, 3), torch.ones(4)), solver=pair)
    assert shapes[0] == [(2, 3), (4,)]
    with pytest.raises(ValueError, match="norm and mask"):
        solve(lambda z, l: -z, torch.ones(2, 3), solver=dataclasses.replace(pair, norm=lambda e: e.abs().max()),
              mask=torch.ones(2, dtype=torch.bool))


# States

@pytest.mark.parametrize("name", LEADING)
def test_backwards_returns_to_the_start(name):
    settings = {"solver": PAIRS[name], "rtol": 1e-7 if PAIRS[name].order > 2 else 1e-5, "atol": 1e-8}
    there = solve(coupled, start(), span=(0.0, 1.5), save_at=[0.5], **settings)
    back = solve(coupled, there.z, span=(1.5, 0.0), save_at=[1.5, 0.5, 0.0], **settings)
    allowed = 1e-4 if PAIRS[name].order > 2 else 1e-3
    assert (back.z - start()).abs().max() < allowed
    assert (back.states[1] - there.states[0]).abs().max() < allowed
    assert all(h < 0 for h in back.steps) and torch.equal(back.states[0], there.z)


def test_a_tuple_state_is_integrated_as_its_parts_each_in_its_dtype():
    w = torch.tensor([1.0, 2.0], dtype=F64)

    def f(z, l):
        x, y, c = z
        return -w * x, y * l.to(y.dtype), 1j * c

    z0 = (torch.ones(3, 2, dtype=F64), torch.ones(4), torch.ones(2, dtype=torch.complex128))
    out = solve(f, z0, solver="dopri5", rtol=1e-8, atol=1e-10, save_at=[0.0, 0.5, 1.0])
    assert [x.dtype for x in out.z] == [F64, torch.float32, torch.complex128]
    assert (out.z[0] - torch.exp(-w)).abs().max() < 1e-7
    assert (out.z[1] - math.exp(0.5)).abs().max() < 1e-6
    assert (out.z[2] - complex(math.cos(1), math.sin(1))).abs().max() < 1e-7
    assert out.states[0].shape == (3, 3, 2)


def test_a_complex_state_turns():
    out = solve(lambda z, l: 1j * z, torch.ones(2, 2, dtype=torch.complex64), span=(0.0, math.pi), solver="dopri5",
                rtol=1e-5, atol=1e-6, save_at=[math.pi / 2])
    assert (out.z + 1).abs().max() < 1e-4 and (out.states[0] - 1j).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LEADING)
def test_a_half_precision_state_is_carried_in_float32(name, dtype):
    seen = set()

    def f(z, l):
        seen.add((z.dtype, l.dtype))
        return torch.ones_like(z)

    out = solve(f, torch.ones(2, 4, dtype=dtype), solver=PAIRS[name])
    assert seen == {(dtype, torch.float32)}
    assert out.z.dtype == dtype and (out.z.float() - 2).abs().max() < 0.02
    assert out.nfe < 100


def test_default_tolerances_follow_the_arithmetic_of_f():
    weight = torch.eye(8) * 0.5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = solve(lambda z, l: (z @ weight).float(), torch.ones(2, 8), solver="dopri5")
    assert out.nfe < 100  # 9236 at the tolerances of float32 in torchdiffeq
    assert (out.z - math.exp(0.5)).abs().max() < 0.03


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
def test_any_shape_of_state_is_taken(shape):
    out = solve(lambda z, l: -z, torch.ones(shape, dtype=F64), solver="dopri5", save_at=[0.5, 1.0], **IDENTICAL)
    assert out.states.shape == (2, *shape) and (out.z - math.exp(-1)).abs().max() < 1e-5


def test_a_zero_field_is_the_identity():
    for name, pair in PAIRS.items():
        assert torch.equal(solve(lambda z, l: 0 * z, start(), solver=pair).z, start()), name


# Gradients

@pytest.mark.parametrize("name", LEADING)
def test_gradients_reach_z0_parameters_and_span_through_pieces_and_saves(name):
    # finite differences move the steps too: they see the exact flow up to the tolerance, hence 1e-10 and few digits
    def run(z0, w, a, b):
        out = solve(lambda z, l: torch.sin(w * z) * (1 + l) + torch.where(l < 0.5, 0.2, -0.3), z0, span=(a, b),
                    solver=PAIRS[name], rtol=1e-10, atol=1e-10, save_at=[0.25, 0.5, 0.7], breakpoints=[0.5],
                    max_nfe=100_000)
        return out.z, out.states

    if PAIRS[name].order < 4:
        pytest.skip("so tight a tolerance takes a low order too many steps")
    inputs = (torch.tensor([[0.3, -0.8]], dtype=F64), torch.tensor(1.3, dtype=F64), torch.tensor(0.0, dtype=F64),
              torch.tensor(1.0, dtype=F64))
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs], eps=1e-4, atol=1e-5, rtol=1e-4)


def test_steps_are_constants_to_the_gradient():
    # with the first step part of the graph, the gradient would hold d(step)/d(z0) as well
    z0 = torch.tensor([[0.5]], dtype=F64, requires_grad=True)
    out = solve(lambda z, l: -z * z, z0, solver="dopri5", rtol=1e-2, atol=1e-3)
    out.z.sum().backward()
    z, d = 0.5, torch.tensor(0.5, dtype=F64, requires_grad=True)
    fixed = solve(lambda z, l: -z * z, d.view(1, 1), solver="dopri54",
                  grid=[0.0, *np.cumsum(out.steps)[:-1].tolist(), 1.0])
    fixed.z.sum().backward()
    assert z0.grad.item() == pytest.approx(d.grad.item(), rel=1e-12) and z == 0.5


def test_second_derivatives_pass_through():
    z0 = torch.tensor([[0.7]], dtype=F64, requires_grad=True)
    z = solve(lambda z, l: -z * z, z0, solver="dopri5", rtol=1e-10, atol=1e-12).z  # z0 / (1 + z0)
    (g,) = torch.autograd.grad(z.sum(), z0, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), z0)
    assert g.item() == pytest.approx(1 / 1.7**2, rel=1e-8) and h.item() == pytest.approx(-2 / 1.7**3, rel=1e-6)


# Options

def test_the_options_of_the_step_control_do_what_they_say():
    def steps(**options):
        solver = get_solver("dopri5", **options)
        return solve(lambda z, l: -z, torch.ones(1, 1, dtype=F64), span=(0.0, 4.0), solver=solver).steps

    assert steps(first_step=0.3)[0] == 0.3
    assert max(steps(max_step=0.25)) <= 0.25 < max(steps())
    ratios = [b / a for a, b in zip(steps(max_factor=1.5, first_step=1e-3)[:-1],
                                    steps(max_factor=1.5, first_step=1e-3)[1:], strict=True)]
    assert max(ratios) <= 1.5 + 1e-9
    assert len(steps(safety=0.3)) > len(steps())
    forced = get_solver("dopri5", min_step=1.0, first_step=1.0)
    out = solve(lambda z, l: -z, torch.ones(1, 1, dtype=F64), span=(0.0, 4.0), solver=forced, rtol=1e-12, atol=1e-12)
    assert out.n_rejected == 0 and max(out.errors) > 1


def test_get_solver_makes_any_pair_adaptive():
    solver = get_solver("tsit54", adaptive=True, max_step=0.5)
    assert isinstance(solver, Adaptive) and solver.name == "tsit54" and solver.max_step == 0.5
    assert get_solver("dopri5", adaptive=True) is SOLVERS["dopri5"]
    assert get_solver("tsit54", adaptive=False) is SOLVERS["tsit54"]
    with pytest.raises(ValueError, match=r"embedded row.*those that have:.*dopri54"):
        get_solver("rk4", adaptive=True)
    with pytest.raises(ValueError, match="not both"):
        get_solver("tsit54", adaptive=True, per_sample=True)
    with pytest.raises(TypeError, match="adaptive must be a bool"):
        get_solver("tsit54", adaptive=1)


def test_a_users_own_pair_runs():
    own = Adaptive(Tableau([[], [2 / 3]], [1 / 4, 3 / 4], b_hat=[1, 0]))
    out = solve(lambda z, l: -z, torch.ones(1, 1, dtype=F64), solver=own, rtol=1e-4, atol=1e-6)
    assert out.z.item() == pytest.approx(math.exp(-1), abs=1e-4)


def test_torchdiffeqs_callbacks_are_called_with_depth_state_and_step():
    class Field:
        def __init__(self):
            self.told = []

        def __call__(self, z, l):
            return -z

        def callback_step(self, l, z, h):
            self.told.append(("try", l.item(), h.item()))

        def callback_accept_step(self, l, z, h):
            self.told.append(("accept", l.item(), h.item()))

    field = Field()
    out = solve(field, torch.ones(1, 2, dtype=F64), span=(1.0, 0.0), solver="dopri5")
    accepted = [(l, h) for kind, l, h in field.told if kind == "accept"]
    assert [h for _, h in accepted] == out.steps and accepted[0][0] == 1.0
    assert len([kind for kind, *_ in field.told if kind == "try"]) == out.n_steps + out.n_rejected
