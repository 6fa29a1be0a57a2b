"""Per-sample adaptive methods: every row has its own steps, and no row feels the others."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from solvers import SOLVERS, SolverError, get_solver, solve
from solvers.coefficients import EXPLICIT
from solvers.per_sample import PerSample
from solvers.stepsize import error_order
from solvers.tableau import Tableau

F64 = torch.float64
PAIRS = {name: PerSample(t, name) for name, t in EXPLICIT.items() if t.b_hat is not None}
CASES = [(name, True) for name in PAIRS] + [(name, False) for name in ("bosh32", "dopri54", "tsit54")]
LEADING = ["heun_euler21", "bosh32", "dopri54", "tsit54", "dopri853"]  # of each kind of interpolation and order


class Springs:
    """z'' = -w^2 z (1 + l / 4) for a row of each stiffness w; counts calls and rows."""

    def __init__(self, w, log=None):
        self.w, self.log = w, [] if log is None else log

    def __call__(self, z, l):
        self.log.append((len(z), tuple(l.shape)))
        x, v = z[..., :1], z[..., 1:]
        return torch.cat([v, -self.w**2 * (1 + l / 4) * x], -1)

    def select(self, rows):
        return Springs(self.w[rows], self.log)


def springs(*w):
    w = torch.tensor(w, dtype=F64)[:, None]
    return Springs(w), torch.cat([torch.ones_like(w), 0 * w], -1)


def settings(pair, loose=1e-4, tight=1e-6):
    rtol = loose if pair.order < 4 else tight
    return {"span": (0.0, 2.0), "solver": pair, "rtol": rtol, "atol": rtol, "max_nfe": 100_000}


# Rows apart from each other

@pytest.mark.parametrize("name, compact", CASES)
def test_a_row_takes_the_steps_and_reaches_the_result_it_has_alone(name, compact):
    pair = PerSample(PAIRS[name].tableau, name, compact=compact)
    how = settings(pair, 1e-3, 1e-5) | {"save_at": [0.0, 0.3, 1.1, 1.9, 2.0]}
    w = (1.0, 7.0, 0.2)
    f, z0 = springs(*w)
    together = solve(f, z0, **how)
    assert len({len(row) for row in together.steps}) > 1 and together.n_steps == max(map(len, together.steps))
    for i in range(3):
        f, z = springs(w[i])
        alone = solve(f, z, **how)
        assert len(alone.steps[0]) == len(together.steps[i])
        assert np.abs(np.array(alone.steps[0]) - together.steps[i]).max() < 1e-12
        assert (alone.z[0] - together.z[i]).abs().max() < 1e-12
        assert (alone.states[:, 0] - together.states[:, i]).abs().max() < 1e-12


def test_neighbours_may_be_stiff_moved_or_doubled():
    how = settings(PAIRS["dopri54"])
    f, z0 = springs(3.0, 1.0)
    z = solve(f, z0, **how).z
    f, z0 = springs(1.0, 25.0, 3.0, 3.0)
    other = solve(f, z0, **how)
    assert (other.z[[2, 0]] - z).abs().max() < 1e-12
    assert torch.equal(other.z[2], other.z[3]) and other.steps[2] == other.steps[3]
    shared = solve(f, z0, **(how | {"solver": "dopri5"}))
    assert (shared.z[2] - z[0]).abs().max() > 1e-12  # what the rows of one batch do to each other under dopri5


def test_rows_that_are_done_cost_nothing():
    f, z0 = springs(1.0, 2.0, 30.0)
    out = solve(f, z0, **settings(PAIRS["dopri54"]))
    rows = sum(n for n, _ in f.log)
    alone = 0
    for w in (1.0, 2.0, 30.0):
        g, z = springs(w)
        alone += solve(g, z, **settings(PAIRS["dopri54"])).nfe
    assert rows == alone < out.nfe * 1.3
    assert len(f.log) == out.nfe  # a call is an evaluation, for however many rows
    f, z0 = springs(1.0, 2.0, 30.0)
    solve(f, z0, **settings(PerSample(EXPLICIT["dopri54"], compact=False)))
    assert sum(n for n, _ in f.log) == 3 * out.nfe


def test_l_has_a_row_axis_and_ones():
    shapes = set()

    def f(z, l):
        shapes.add((tuple(z.shape), tuple(l.shape)))
        return -z

    solve(f, torch.ones(3, 4, 5), solver=PAIRS["dopri54"])
    solve(f, torch.ones(3), solver=PAIRS["dopri54"])
    assert {((3, 4, 5), (3, 1, 1)), ((3,), (3,))} <= shapes


def test_a_field_written_for_one_depth_serves_for_many():
    def f(z, l):
        return torch.sin(3 * l) * z + l

    z0 = torch.tensor([[0.5, 1.0], [2.0, -1.0]], dtype=F64)
    ours = solve(f, z0, solver=PAIRS["dopri54"], rtol=1e-9, atol=1e-11)
    theirs = solve(f, z0, solver="dopri5", rtol=1e-9, atol=1e-11)
    assert (ours.z - theirs.z).abs().max() < 1e-8


def test_a_field_that_cannot_be_restricted_needs_all_rows():
    w = torch.tensor([[1.0], [50.0]], dtype=F64)

    def f(z, l):
        return -w * z

    with pytest.raises(ValueError, match="shaped like the state"):
        solve(f, torch.ones(2, 1, dtype=F64), solver=PAIRS["dopri54"])
    out = solve(f, torch.ones(2, 1, dtype=F64), solver=get_solver("dopri54", per_sample=True, compact=False),
                rtol=1e-6, atol=1e-9)
    assert (out.z - torch.exp(-w)).abs().max() < 1e-6


def test_rows_that_have_ended_and_stay_are_left_alone_whatever_f_says_there():
    # z' = w / (2 sqrt(1 - l)) is infinite at the end, where this pair has no stage
    w = torch.tensor([[1.0], [0.01]], dtype=F64)
    midpoint = Tableau([[], [0.5]], [0.0, 1.0], b_hat=[1.0, 0.0])

    class Pole:
        def __init__(self, w):
            self.w = w

        def __call__(self, z, l):
            return self.w / (2 * (1 - l).sqrt())

        def select(self, rows):
            return Pole(self.w[rows])

    out, kept = (solve(Pole(w), 0 * w, solver=PerSample(midpoint, compact=compact), rtol=1e-2, atol=1e-3)
                 for compact in (True, False))
    assert len(out.steps[0]) != len(out.steps[1]) and (out.z - w).abs().max() < 0.05
    assert torch.equal(kept.z, out.z) and kept.steps == out.steps and kept.n_rejected == out.n_rejected


# Accuracy

@pytest.mark.parametrize("name, compact", CASES)
def test_every_pair_meets_its_tolerance_at_the_end_and_at_saved_depths(name, compact):
    # per step the tolerance, over the steps their sum; oscillators do not stretch errors much. fehlberg's 1(2)
    # estimate is 1/512 of its weights, which is how far it can be off
    pair = PerSample(PAIRS[name].tableau, name, compact=compact)
    how = settings(pair, 1e-3, 1e-6)
    depths = [0.0, 0.4, 1.03, 1.5, 2.0]
    f, z0 = springs(1.0, 4.0)
    out = solve(f, z0, save_at=depths, **how)
    for i, w in enumerate((1.0, 4.0)):
        ref = solve_ivp(lambda l, z, w=w: [z[1], -w * w * (1 + l / 4) * z[0]], (0, 2), [1, 0], rtol=1e-12, atol=1e-13,
                        method="DOP853", t_eval=depths).y.T
        allowed = 8 * how["rtol"] * len(out.steps[i]) * (60 if name.startswith("fehlberg2") else 1)
        assert np.abs(out.states[:, i].numpy() - ref).max() < allowed
        assert sum(out.steps[i]) == pytest.approx(2.0, abs=1e-12) and max(out.errors[i]) <= 1
    assert torch.equal(out.states[0], z0) and torch.equal(out.states[-1], out.z)


@pytest.mark.parametrize("name", LEADING)
def test_the_final_state_and_the_steps_do_not_depend_on_save_at(name):
    f, z0 = springs(1.0, 5.0)
    how = settings(PAIRS[name], 1e-3, 1e-5)
    plain = solve(f, z0, **how)
    saved = solve(f, z0, save_at=[0.0, 1e-9, 0.7, 0.7, 1.999, 2.0], **how)
    assert torch.equal(plain.z, saved.z) and plain.steps == saved.steps
    assert torch.equal(saved.states[2], saved.states[3])


def test_the_control_is_proportional_integral():
    # h' / h = s e^(-(1 - 0.75 b) / k) e_before^(b / k), no growth after a rejection, I control on one (Hairer, II.4)
    pair = PAIRS["dopri54"]
    k, one = error_order(pair.tableau), np.ones(1)
    assert k == 5
    no, yes = np.array([False]), np.array([True])
    factor = pair.factor(0.1 * one, 0.3 * one, no).item()
    assert factor == pytest.approx(0.9 * 0.1 ** (-0.85 / 5) * 0.3 ** (0.2 / 5), rel=1e-12)
    assert pair.factor(0.1 * one, 0.3 * one, yes).item() == 1.0
    assert pair.factor(3.0 * one, 0.3 * one, no).item() == pytest.approx(0.9 * 3 ** (-1 / 5), rel=1e-12)
    assert pair.factor(0.0 * one, one, no).item() == pair.max_factor
    assert pair.factor(math.inf * one, one, no).item() == pair.min_factor
    assert PAIRS["rkf45"].factor(4.0 * one, one, no).item() == pytest.approx(0.9 * 4 ** (-1 / 5), rel=1e-12)


def test_it_takes_about_as_many_steps_as_torchdiffeqs_control():
    f, z0 = springs(3.0)
    how = settings(PAIRS["dopri54"], tight=1e-6) | {"span": (0.0, 10.0)}
    assert solve(f, z0, **how).nfe < 1.1 * solve(f, z0, **(how | {"solver": "dopri5"})).nfe


# Spans, pieces, padding, states

@pytest.mark.parametrize("name", LEADING)
def test_backwards_returns_to_the_start(name):
    f, z0 = springs(1.0, 3.0)
    how = settings(PAIRS[name])
    there = solve(f, z0, save_at=[0.7], **how)
    back = solve(f, there.z, save_at=[2.0, 0.7, 0.0], **(how | {"span": (2.0, 0.0)}))
    allowed = 100 * how["rtol"]
    assert (back.z - z0).abs().max() < allowed and (back.states[1] - there.states[0]).abs().max() < allowed
    assert all(h < 0 for row in back.steps for h in row)


def test_the_mirror_image_of_a_problem_takes_the_mirror_image_of_its_steps():
    def f(z, l):
        return torch.sin(3 * z + l)

    z0 = torch.tensor([[0.3], [-2.0], [1.1]], dtype=F64)
    for pair in PAIRS.values():
        there = solve(f, z0, solver=pair, rtol=1e-4, save_at=[0.2, 0.5])
        mirror = solve(lambda z, l: -f(z, -l), z0, span=(0.0, -1.0), solver=pair, rtol=1e-4, save_at=[-0.2, -0.5])
        assert torch.equal(there.z, mirror.z) and torch.equal(there.states, mirror.states)
        assert there.steps == [[-h for h in row] for row in mirror.steps]


@pytest.mark.parametrize("span", [(0.0, 1.0), (1.0, 0.0)])
def test_no_row_steps_over_a_jump(span):
    w = torch.tensor([[1.0], [4.0]], dtype=F64)

    class Jumping:
        breakpoints = (0.3,)

        def __init__(self, w):
            self.w = w

        def __call__(self, z, l):
            assert bool(((l >= 0) & (l <= 1) & (l != 0.3)).all())
            return torch.where(l < 0.3, 1.0, -5.0) * self.w * z

        def select(self, rows):
            return Jumping(self.w[rows])

    out = solve(Jumping(w), torch.ones(2, 1, dtype=F64), span=span, solver=PAIRS["tsit54"], rtol=1e-8, atol=1e-10,
                save_at=[0.3])
    sign = 1 if span[0] == 0 else -1
    assert torch.allclose(out.z.log(), sign * w * (0.3 - 5 * 0.7), atol=1e-4)
    first = 0.3 if sign == 1 else 5 * 0.7
    assert torch.allclose(out.states[0].log(), w * first, atol=1e-4)
    for row in out.steps:
        assert np.abs(np.cumsum([span[0], *row]) - 0.3).min() < 1e-9


def test_a_field_is_never_asked_for_no_rows():
    class Decay:
        def __call__(self, z, l):
            return -z

        def select(self, rows):
            assert rows.dtype == torch.int64 and len(rows)
            return self

    z0 = torch.tensor([[1.0], [1e3], [1.0]], dtype=F64)
    out = solve(Decay(), z0, span=(0.0, 3.0), solver=PAIRS["dopri54"], breakpoints=[1.0], rtol=1e-8,
                atol=1e-10)
    assert torch.allclose(out.z, z0 * math.exp(-3), rtol=1e-6, atol=0)


def test_layers_are_restricted_too():
    made = []

    class Layer:
        def __init__(self, w):
            self.w = w

        def __call__(self, z, l):
            return self.w * z

        def select(self, rows):
            made.append(rows.tolist())
            return Layer(self.w[rows])

    def field(z, l):
        raise AssertionError

    field.pieces = [(0.0, 1.0, Layer(torch.tensor([[1.0], [-5.0]]))), (1.0, 2.0, Layer(torch.tensor([[8.0], [1.0]])))]
    out = solve(field, torch.ones(2, 1), span=(0.0, 2.0), solver=PAIRS["bosh32"])
    assert [1] in made and [0] in made
    assert torch.allclose(out.z.log(), torch.tensor([[9.0], [-4.0]]), atol=0.05)


def test_a_step_that_was_cut_at_a_jump_does_not_shorten_the_next():
    def run(jumps):
        return solve(lambda z, l: -z, torch.ones(1, 1, dtype=F64), span=(0.0, 8.0), solver=PAIRS["dopri54"],
                     breakpoints=jumps).n_steps

    assert run([4.0, 4.0 + 1e-7]) <= run([4.0]) + 1


def test_padding_does_not_reach_the_steps_of_its_row():
    z0 = torch.zeros(2, 40, 2, dtype=F64)
    z0[:, 0, 0] = 1.0
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[:, 0] = True
    mask[1, 1:3] = True

    def f(z, l):
        return torch.stack([z[..., 1], -25 * z[..., 0]], -1)

    padded = solve(f, z0, span=(0.0, 5.0), solver=PAIRS["dopri54"], mask=mask)
    alone = solve(f, z0[:1, :1], span=(0.0, 5.0), solver=PAIRS["dopri54"])
    assert padded.steps[0] == alone.steps[0] and len(padded.steps[1]) < len(padded.steps[0])
    z0[0, 7, 1] = math.nan  # padding that is not finite counts as zero
    again = solve(f, z0, span=(0.0, 5.0), solver=PAIRS["dopri54"], mask=mask)
    assert torch.equal(again.z, padded.z)


def test_a_tuple_state_is_integrated_with_one_step_for_all_parts_of_a_row():
    def f(z, l):
        return -z[0], 1j * z[1]

    z0 = (torch.ones(3, 2, dtype=F64), torch.ones(3, 1, dtype=torch.complex128))
    out = solve(f, z0, solver=PAIRS["dopri54"], rtol=1e-8, atol=1e-10, save_at=[0.5, 1.0])
    assert (out.z[0] - math.exp(-1)).abs().max() < 1e-7
    assert (out.z[1] - complex(math.cos(1), math.sin(1))).abs().max() < 1e-7
    assert [x.shape for x in out.states] == [(2, 3, 2), (2, 3, 1)]


def test_states_without_a_common_row_axis_are_refused():
    for z0 in (torch.tensor(1.0), (torch.ones(2, 1), torch.ones(3, 1)), (torch.ones(2, 1), torch.ones(2))):
        with pytest.raises(ValueError, match="first axis of rows"):
            solve(lambda z, l: z, z0, solver=PAIRS["dopri54"])


def test_f_sees_every_part_of_a_state_in_its_own_dtype_and_l_in_the_widest_real_one():
    several = torch.ones(2, 1), torch.ones(2, 3, dtype=F64), torch.ones(2, 1, dtype=torch.complex64)
    for z0 in (torch.ones(2, 1), several):
        parts = z0 if isinstance(z0, tuple) else (z0,)
        widest = torch.float32 if len(parts) == 1 else F64
        seen = set()

        def f(z, l, seen=seen):
            seen.add((*(x.dtype for x in (z if isinstance(z, tuple) else (z,))), l.dtype))
            return tuple(-x for x in z) if isinstance(z, tuple) else -z

        out = solve(f, z0, span=(1.0, 0.0), solver=PAIRS["tsit54"], rtol=1e-5, save_at=[0.7])
        assert seen == {(*(x.dtype for x in parts), widest)}
        for x, y in zip(parts, out.z if isinstance(out.z, tuple) else (out.z,), strict=True):
            assert x.dtype == y.dtype and (y - math.e).abs().max() < 1e-4


def test_increments_in_half_precision_are_added_in_that_of_the_state():
    # a step of 1/8 of 1 + 2^-9 would be lost in bfloat16, whose numbers near 1 are 2^-7 apart
    def f(z, l):
        return torch.full_like(z, 2.0**-9, dtype=torch.bfloat16)

    pair = PerSample(EXPLICIT["dopri54"], max_step=0.125)
    out = solve(f, torch.ones(2, 1), solver=pair)
    pairs = solve(lambda z, l: tuple(f(x, l) for x in z), (torch.ones(2, 1), torch.ones(2, 3)), solver=pair)
    for z in (out.z, *pairs.z):
        assert z.dtype == torch.float32 and (z - (1 + 2.0**-9)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_state_is_carried_in_float32(dtype):
    seen = set()

    def f(z, l):
        seen.add((z.dtype, l.dtype))
        return torch.ones_like(z)

    out = solve(f, torch.ones(2, 4, dtype=dtype), solver=PAIRS["dopri54"])
    assert seen == {(dtype, torch.float32)} and out.z.dtype == dtype and (out.z.float() - 2).abs().max() < 0.02


def test_a_zero_field_is_the_identity():
    z0 = torch.randn(3, 2, dtype=F64)
    for name, pair in PAIRS.items():
        assert torch.equal(solve(lambda z, l: 0 * z, z0, solver=pair).z, z0), name


# Failures

def falling(z, l):
    return -z.sqrt()


def test_a_row_whose_trial_step_hits_nan_retries_alone():
    # z = (c - l / 2)^2: over a first step of 1 the second row leaves the domain of the root, the first does not
    pair = PerSample(EXPLICIT["dopri54"], first_step=1.0)
    z0 = torch.tensor([[9.0], [0.2809]], dtype=F64)
    how = {"span": (0.0, 1.0), "solver": pair, "rtol": 1e-5, "atol": 1e-7}
    out = solve(falling, z0, **how)
    assert out.z[:, 0].tolist() == pytest.approx([6.25, 0.0009], abs=1e-5)
    assert out.steps[0] == solve(falling, z0[:1], **how).steps[0] and out.n_rejected >= 1


def test_a_row_that_hit_nan_does_not_put_nan_into_gradients():
    # zero times NaN: the rejected row's graph must be gone
    pair = PerSample(EXPLICIT["dopri54"], first_step=1.0)
    z0 = torch.tensor([[9.0], [0.2809]], dtype=F64, requires_grad=True)
    scale = torch.ones((), dtype=F64, requires_grad=True)
    out = solve(lambda z, l: scale * falling(z, l), z0, span=(0.0, 1.0), solver=pair, rtol=1e-8, atol=1e-10)
    out.z.sum().backward()
    assert out.n_rejected >= 1
    # z = (sqrt(z0) - s l / 2)^2
    assert z0.grad[:, 0].tolist() == pytest.approx([2.5 / 3, 0.03 / 0.53], rel=1e-3)
    assert scale.grad.item() == pytest.approx(-(2.5 + 0.03), rel=1e-3)


def test_a_step_into_infinity_is_rejected_though_its_error_is_finite():
    # z' = c is exact: only the state itself says that it has left the range of float32
    with pytest.raises(SolverError, match=r"in row 1 at l = 0\.40"):
        solve(lambda z, l: torch.full_like(z, 1e38), torch.tensor([[0.0], [3e38]]), span=(0.0, 1.0),
              solver=PAIRS["dopri54"])


@pytest.mark.parametrize("name", ["dopri54", "dopri853"])
def test_a_pole_in_one_row_ends_in_bounded_work_and_names_the_row(name):
    with pytest.raises(SolverError, match=r"in row 2 at l = ") as caught:
        solve(lambda z, l: z * z, torch.tensor([[0.1], [-3.0], [1.0]], dtype=F64), span=(0.0, 2.0), solver=PAIRS[name],
              rtol=1e-5)
    assert 0.9 < caught.value.l < 1.01 and 0 < caught.value.h < 0.01 and caught.value.nfe <= 10_000


def test_max_nfe_bounds_the_calls():
    with pytest.raises(SolverError, match="more than max_nfe = 200") as caught:
        solve(lambda z, l: -1e6 * z + l, torch.ones(2, 1, dtype=F64), solver=PAIRS["dopri54"], max_nfe=200)
    assert caught.value.nfe <= 200 and 0 < caught.value.h < 1


def test_nan_at_the_start_says_which_share():
    z0 = torch.ones(4, 4)
    z0[1, 2] = math.nan
    with pytest.raises(SolverError, match=r"z0 is not finite \(6\.2% of its entries\)"):
        solve(lambda z, l: -z, z0, solver=PAIRS["dopri54"])
    bad = torch.zeros(4, 4)
    bad[:, 0] = math.nan
    with pytest.raises(SolverError, match=r"f is not finite at the start of the piece \(25\.0% of its entries\)"):
        solve(lambda z, l: -z + bad[: len(z)], torch.ones(4, 4), solver=PAIRS["dopri54"])


def test_noise_is_blamed_and_exceptions_pass():
    with pytest.raises(SolverError, match="dropout"):
        solve(lambda z, l: torch.nn.functional.dropout(z, 0.3), torch.ones(2, 8), solver=PAIRS["dopri54"], rtol=1e-7,
              atol=1e-8, max_nfe=300)
    error = AssertionError("mine")

    def f(z, l):
        raise error

    with pytest.raises(AssertionError) as caught:
        solve(f, torch.ones(2, 8), solver=PAIRS["dopri54"])
    assert caught.value is error


def test_a_span_that_float32_cannot_resolve_is_refused():
    with pytest.raises(SolverError, match="cannot resolve the span"):
        solve(lambda z, l: -z, torch.ones(1, 1), span=(1e8, 1e8 + 1), solver=PAIRS["dopri54"])


# Gradients

@pytest.mark.parametrize("name, compact", [("dopri54", True), ("tsit54", True), ("tsit54", False)])
def test_gradients_reach_z0_parameters_and_span_through_pieces_and_saves(name, compact):
    pair = PerSample(EXPLICIT[name], name, compact=compact)

    def run(z0, w, a, b):
        out = solve(lambda z, l: torch.sin(w * z) * (1 + l) + torch.where(l < 0.5, 0.2, -0.3), z0, span=(a, b),
                    solver=pair, rtol=1e-8, atol=1e-8, save_at=[0.25, 0.5, 0.7], breakpoints=[0.5])
        return out.z, out.states

    inputs = (torch.tensor([[0.3], [-2.0]], dtype=F64), torch.tensor(1.3, dtype=F64), torch.tensor(0.0, dtype=F64),
              torch.tensor(1.0, dtype=F64))
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs], eps=1e-4, atol=1e-5, rtol=1e-4)


def test_a_rows_gradient_does_not_depend_on_its_neighbours():
    f, z0 = springs(1.0, 30.0, 2.0)
    z0.requires_grad_()
    out = solve(f, z0, **settings(PAIRS["dopri54"]))
    out.z[0].square().sum().backward()
    g, z = springs(1.0)
    z.requires_grad_()
    solve(g, z, **settings(PAIRS["dopri54"])).z.square().sum().backward()
    assert (z0.grad[0] - z.grad[0]).abs().max() < 1e-12 and not z0.grad[1:].any()


def test_steps_are_constants_to_the_gradient():
    z0 = torch.tensor([[0.5]], dtype=F64, requires_grad=True)
    out = solve(lambda z, l: -z * z, z0, solver=PAIRS["dopri54"], rtol=1e-2, atol=1e-3)
    out.z.sum().backward()
    d = torch.tensor([[0.5]], dtype=F64, requires_grad=True)
    solve(lambda z, l: -z * z, d, solver="dopri54",
          grid=[0.0, *np.cumsum(out.steps[0])[:-1].tolist(), 1.0]).z.sum().backward()
    assert z0.grad.item() == pytest.approx(d.grad.item(), rel=1e-12)


@pytest.mark.parametrize("name", ["dopri54", "tsit54"])
def test_torch_func_differentiates_a_solve(name):
    # z = z0 e^(-w b): over z0, w and the end b, forward, backward and twice
    z0 = torch.tensor([[1.0, 0.5], [-3.0, 2.0]], dtype=F64)
    w, b = torch.tensor(1.5, dtype=F64), torch.tensor(0.8, dtype=F64)

    def end(z0, w, b):
        out = solve(lambda z, l: -w * z, z0, span=(0.0, b), solver=PAIRS[name], rtol=1e-9, atol=1e-11, save_at=[0.4])
        return out.states[0], out.z

    shrunk = torch.exp(-w * b)
    for i, wanted in enumerate((shrunk * torch.ones_like(z0), (-b * shrunk * z0).sum(), (-w * shrunk * z0).sum())):
        got = torch.func.grad(lambda *x: end(*x)[1].sum(), argnums=i)(z0, w, b)
        assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-9)
    _, tangent = torch.func.jvp(lambda w: end(z0, w, b)[0], (w,), (torch.ones_like(w),))
    assert torch.allclose(tangent, -0.4 * torch.exp(-0.4 * w) * z0, rtol=1e-6)
    twice = torch.func.hessian(lambda w: end(z0, w, b)[1].sum())(w)
    assert torch.allclose(twice, (b * b * shrunk * z0).sum(), rtol=1e-5)


# Options

def test_get_solver_makes_any_pair_per_sample():
    solver = get_solver("dopri54", per_sample=True)
    assert isinstance(solver, PerSample) and solver.name == "dopri54" and solver.is_adaptive
    assert (solver.order, solver.embedded_order, solver.n_stages) == (5, 4, 7)
    assert get_solver("dopri5", per_sample=True, beta=0.0).beta == 0.0
    assert get_solver(SOLVERS["tsit54"], per_sample=True).name == "tsit54"
    assert get_solver(solver, per_sample=True) is solver
    with pytest.raises(ValueError, match="embedded row"):
        get_solver("euler", per_sample=True)
    with pytest.raises(ValueError, match=r"unknown option 'bata'.*compact"):
        get_solver("dopri54", per_sample=True, bata=1)


def test_the_options_of_the_step_control_do_what_they_say():
    def steps(**options):
        solver = get_solver("dopri54", per_sample=True, **options)
        return solve(lambda z, l: -z, torch.ones(1, 1, dtype=F64), span=(0.0, 4.0), solver=solver).steps[0]

    assert steps(first_step=0.3)[0] == 0.3
    assert max(steps(max_step=0.25)) <= 0.25 < max(steps())
    grown = steps(max_factor=1.5, first_step=1e-3)
    assert max(b / a for a, b in itertools.pairwise(grown)) <= 1.5 + 1e-9
    assert len(steps(safety=0.3)) > len(steps()) and steps(beta=0.0) != steps(beta=0.4)
    for options in ({"beta": -1.0}, {"first_step": 0.0}, {"safety": 2.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            steps(**options)
    with pytest.raises(TypeError, match="compact"):
        steps(compact=1)
