"""solve(): grids, pieces, saving, counting, precision, gradients. Each family's own tests measure orders."""

import math

import pytest
import torch
from solve_problem import EXPLICIT, F64, Counted, coupled, start
from torch.autograd import forward_ad

from solvers import SOLVERS, LieTrotter, LinearMultistep, get_solver, solve

OVER_A_SPAN = [name for name, solver in SOLVERS.items() if not getattr(solver, "to_equilibrium", False)]


@pytest.mark.parametrize("name", list(SOLVERS))
def test_the_zero_field_is_the_identity_and_tuples_work(name):
    solver = SOLVERS[name]
    amount = {} if solver.is_adaptive else {"n_steps": 3}
    z0 = torch.randn(2, 3, dtype=F64), torch.randn(2, 5, dtype=F64)

    def zero(z, l):
        return tuple(torch.zeros_like(x) for x in z)

    zero.parts = (zero, zero)
    solution = solve(zero, z0, solver=solver, **amount)
    for x, y in zip(solution.z, z0, strict=True):
        assert (x - y).abs().max() < 1e-14


@pytest.mark.parametrize("name", list(EXPLICIT))
def test_nfe_is_what_the_method_documents_and_what_an_independent_counter_sees(name):
    solver = EXPLICIT[name]
    for n in (1, 2, 7):
        f = Counted(coupled)
        solution = solve(f, start(), solver=solver, n_steps=n)
        assert solution.nfe == len(f.depths)  # Counted has no parts
        assert solution.nfe == solver.nfe(n, **({"n_parts": 1} if hasattr(solver, "windows") else {}))
        assert solution.n_steps == n == len(solution.steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exactly_n_steps_that_end_exactly_at_the_end(dtype):
    for n in (*range(1, 129), 255, 256, 511, 512):
        f = Counted(lambda z, l: torch.zeros_like(z))
        solution = solve(f, torch.zeros(1, dtype=dtype), solver="heun2", span=(0.0, 1.0), n_steps=n)
        assert len(f.depths) == 2 * n and solution.n_steps == n
        assert f.depths[-1] == 1.0 == solution.l
        assert abs(sum(solution.steps) - 1) < 1e-12


def test_depth_is_a_zero_dimensional_tensor_of_the_documented_dtype():
    for dtype, wanted in ((torch.float64, torch.float64), (torch.float32, torch.float32),
                          (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                          (torch.complex128, torch.float64)):
        seen = []

        def f(z, l, seen=seen, dtype=dtype):
            seen.append((l.dim(), l.dtype, z.dtype == dtype))
            return torch.zeros_like(z)

        assert solve(f, torch.ones(2, dtype=dtype), n_steps=1).z.dtype == dtype
        assert set(seen) == {(0, wanted, True)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_state_is_carried_in_float32(dtype):
    z = torch.ones(3, dtype=dtype)
    got = solve(lambda z, l: torch.ones_like(z), z, solver="euler", n_steps=256).z
    assert (got - 2).abs().max() <= 0.02
    naive = z
    for _ in range(256):
        naive = naive + torch.ones_like(naive) / 256
    if dtype is torch.bfloat16:
        assert (naive - 2).abs().max() > 0.5  # what is avoided


CONSISTENT = [name for name, solver in SOLVERS.items() if solver.order]


def settings(name, n, rtol):
    return {"rtol": rtol, "atol": rtol * 1e-2} if SOLVERS[name].is_adaptive else {"n_steps": n}


@pytest.mark.parametrize("name", CONSISTENT)
def test_a_backward_span_returns_to_the_start(name):
    amount = settings(name, 16 if SOLVERS[name].is_implicit else 64, 1e-5)
    there = solve(coupled, start(), span=(0.0, 1.0), solver=name, **amount)
    back = solve(coupled, there.z, span=(1.0, 0.0), solver=name, **amount)
    away = (there.z - start()).abs().max()
    # what is left is the error of two solves: that of one, against a fine one, bounds it up to a factor
    fine = solve(coupled, start(), span=(0.0, 1.0), solver="dopri8", rtol=1e-11, atol=1e-13).z
    assert (back.z - start()).abs().max() < 20 * (there.z - fine).abs().max() + 1e-7
    assert (back.z - start()).abs().max() < 0.5 * away and back.l == 0.0  # momentum is that far off at 64 steps


@pytest.mark.parametrize("name", CONSISTENT)
def test_float32_follows_float64(name):
    amount = settings(name, 16, 1e-4)
    wide, narrow = (solve(coupled, start(dtype), span=(0.0, 1.0), solver=name, **amount).z
                    for dtype in (torch.float64, torch.float32))
    assert narrow.dtype == torch.float32
    assert (wide - narrow).abs().max() < (1e-3 if SOLVERS[name].is_adaptive else 2e-5)


@pytest.mark.parametrize("name", OVER_A_SPAN)
def test_a_tuple_state_evolves_as_its_parts_laid_side_by_side(name):
    """The two halves of the state as a tuple, with the same norm: one row."""
    amount = settings(name, 4, 1e-6)

    def split(z, l):
        return tuple(coupled(torch.stack([z[0][0], z[1][0]]), l).view(2, 1).unbind())

    def half(z, l):
        return tuple(k / 2 for k in split(z, l))

    split.parts = (half, half)
    whole = solve(coupled, start(), solver=name, span=(0.0, 0.5), **amount).z
    x, y = solve(split, tuple(start().view(2, 1).unbind()), solver=name, span=(0.0, 0.5), **amount).z
    assert (torch.cat([x, y]) - whole).abs().max() < (1e-5 if SOLVERS[name].is_adaptive else 1e-9)


def test_grid_and_n_steps_agree_and_a_tensor_grid_is_taken():
    by_number = solve(coupled, start(), span=(0.0, 2.0), n_steps=4).z
    assert torch.equal(by_number, solve(coupled, start(), grid=[0.0, 0.5, 1.0, 1.5, 2.0]).z)
    assert torch.equal(by_number, solve(coupled, start(), grid=torch.linspace(0, 2, 5, dtype=F64), n_steps=4).z)
    assert torch.equal(by_number, solve(coupled, start(), span=(0.0, 2.0), grid=(0, 0.5, 1, 1.5, 2)).z)


# --- pieces ---------------------------------------------------------------------------------------------------------


def layer(k):
    return lambda z, l: torch.sin(z + k) * (1 + k * l)


class Layered:
    """f is layer k between l = k and k + 1."""

    pieces = tuple((float(k), float(k + 1), layer(k)) for k in range(3))


def through_layers(z, points):
    for k in points:
        z = solve(layer(k), z, span=(float(k), float(k + 1)), n_steps=1000).z
    return z


@pytest.mark.parametrize("name", ["rk4", "ab3", "dopri5"])
def test_each_piece_is_solved_with_its_own_field_to_its_right_end(name):
    z0 = torch.tensor([0.3], dtype=F64)
    wanted = through_layers(z0, range(3))
    if SOLVERS[name].is_adaptive:
        got = solve(Layered(), z0, span=(0.0, 3.0), solver=name, rtol=1e-9, atol=1e-11).z
        assert (got - wanted).abs().max() < 1e-8
        return
    errors = [(solve(Layered(), z0, span=(0.0, 3.0), solver=name, n_steps=3 * n).z - wanted).abs().max()
              for n in (64, 128)]
    assert abs(torch.log2(errors[0] / errors[1]) - SOLVERS[name].order) < 0.2


def test_pieces_run_backwards_and_in_part():
    z0 = torch.tensor([0.3], dtype=F64)
    there = solve(Layered(), z0, span=(0.0, 3.0), n_steps=600).z
    assert (solve(Layered(), there, span=(3.0, 0.0), n_steps=600).z - z0).abs().max() < 1e-7  # e^{∫ f'} is large
    half = solve(Layered(), z0, span=(0.5, 1.5), n_steps=100).z
    wanted = solve(layer(0), z0, span=(0.5, 1.0), n_steps=100).z
    wanted = solve(layer(1), wanted, span=(1.0, 1.5), n_steps=100).z
    assert (half - wanted).abs().max() < 1e-9


@pytest.mark.parametrize("span", [(0.0, 3.0), (3.0, 0.0)])
@pytest.mark.parametrize("name", ["heun2", "rk4", "ab2", "dopri5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_breakpoints_l_lies_just_inside_the_piece(name, span, dtype):
    rates = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)

    def f(z, l):
        return rates[math.floor(l.item())] * torch.ones_like(z)  # floor(3.0) would be out of range

    f.breakpoints = [0.0, 1.0, 2.0, 3.0]
    amount = {"rtol": 1e-3} if SOLVERS[name].is_adaptive else {"n_steps": 6}
    got = solve(f, torch.zeros(1, dtype=dtype), span=span, solver=name, **amount).z
    assert abs(got.item() - rates.sum().item() * (1 if span[1] == 3 else -1)) < 1e-5


def test_a_floor_lookup_without_breakpoints_is_what_ruins_the_order():
    z0 = torch.tensor([0.3], dtype=F64)

    def by_floor(z, l):
        return layer(min(2, math.floor(l.item())))(z, l)

    wanted = through_layers(z0, range(3))
    naive = [(solve(by_floor, z0, span=(0.0, 3.0), n_steps=3 * n).z - wanted).abs().max() for n in (16, 32)]
    assert torch.log2(naive[0] / naive[1]) < 1.2
    told = [(solve(by_floor, z0, span=(0.0, 3.0), n_steps=3 * n, breakpoints=[1, 2, 3]).z - wanted).abs().max()
            for n in (16, 32)]
    assert torch.log2(told[0] / told[1]) > 3.8


def test_steps_over_uneven_pieces():
    f = Counted(lambda z, l: torch.ones_like(z))
    f.breakpoints = [0.25]
    assert solve(f, torch.zeros(1), n_steps=4, solver="euler").steps == [0.25] * 4  # the even grid holds it
    uneven = solve(f, torch.zeros(1), n_steps=6, solver="euler").steps  # three and three
    assert uneven[:3] == pytest.approx([0.25 / 3] * 3) and uneven[3:] == pytest.approx([0.25] * 3)
    with pytest.raises(ValueError, match=r"n_steps must be a multiple of the number of pieces of f \(2"):
        solve(f, torch.zeros(1), n_steps=3, solver="euler")
    with pytest.raises(ValueError, match="grid must hold every depth where f jumps"):
        solve(f, torch.zeros(1), grid=[0, 0.5, 1], solver="euler")


def test_multistep_history_crosses_a_boundary_only_where_asked():
    calls = {}
    for across in (False, True):
        f = Layered()
        solution = solve(f, torch.tensor([0.3], dtype=F64), span=(0.0, 3.0), n_steps=3,
                         solver=get_solver("ab2", across_pieces=across))
        calls[across] = solution.nfe
    assert calls == {False: 6, True: 4}


# --- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OVER_A_SPAN)
def test_the_result_does_not_depend_on_save_at(name):
    solver = SOLVERS[name]
    amount = {"rtol": 1e-4, "atol": 1e-6} if solver.is_adaptive else {"n_steps": 8}
    z0 = start().expand(2, 2)
    plain = solve(coupled, z0, solver=solver, span=(0.0, 1.0), **amount)
    saved = solve(coupled, z0, solver=solver, span=(0.0, 1.0), save_at=[0.0, 0.3, 0.75, 1.0], **amount)
    assert torch.equal(plain.z, saved.z) and plain.steps == saved.steps
    assert saved.states.shape == (4, 2, 2) and saved.depths == [0.0, 0.3, 0.75, 1.0]
    assert torch.equal(saved.states[0], z0) and torch.equal(saved.states[-1], saved.z)
    assert plain.states is None and plain.depths is None


def test_states_between_steps_are_interpolated_to_fourth_order():
    errors = []
    for n in (10, 20):
        solution = solve(coupled, start(), span=(0.0, 2.0), n_steps=n, save_at=[0.33, 1.71])
        assert solution.nfe == 4 * n + 4
        exact = torch.stack([solve(coupled, start(), span=(0.0, l), n_steps=400).z for l in (0.33, 1.71)])
        errors.append((solution.states - exact).abs().max())
    assert torch.log2(errors[0] / errors[1]) > 3.5


def test_every_step_can_be_saved_also_over_pieces_and_of_tuples():
    solution = solve(Layered(), torch.tensor([0.3], dtype=F64), span=(0.0, 3.0), n_steps=6, save_at="steps")
    assert solution.depths == [0, 0.5, 1, 1.5, 2, 2.5, 3] and solution.states.shape == (7, 1)
    pair = solve(lambda z, l: (z[1], -z[0]), (torch.zeros(2), torch.ones(2)), n_steps=3, save_at="steps")
    assert [x.shape for x in pair.states] == [(4, 2), (4, 2)]


# --- counting in parts, gradients to the span -------------------------------------------------------------------------


def test_a_part_counts_by_its_share():
    class Parts:
        parts = (lambda z, l: z, lambda z, l: -z, lambda z, l: 2 * z)

        def __call__(self, z, l):
            return sum(part(z, l) for part in self.parts)

    assert solve(Parts(), torch.ones(1), solver=LieTrotter("rk4"), n_steps=5).nfe == 20
    assert solve(Parts(), torch.ones(1), solver="rk4", n_steps=5).nfe == 20


@pytest.mark.parametrize("name", ["rk4", "ab3", "dopri5"])
def test_gradients_reach_the_ends_of_the_span(name):
    """d z(l1) / d l1 = f(z(l1), l1) and d z / d l0 = -(d z / d z0) f(z0, l0)."""
    z0 = start().requires_grad_()
    l0, l1 = torch.tensor(0.2, dtype=F64, requires_grad=True), torch.tensor(1.3, dtype=F64, requires_grad=True)
    amount = {"rtol": 1e-9, "atol": 1e-11} if SOLVERS[name].is_adaptive else {"n_steps": 300}
    z = solve(coupled, z0, span=(l0, l1), solver=name, **amount).z
    g0, g1, gz = torch.autograd.grad(z.sum(), (l0, l1, z0))
    assert abs(g1 - coupled(z, l1).sum()) < 1e-5
    assert abs(g0 + (gz * coupled(z0, l0)).sum()) < 1e-5
    plain = solve(coupled, z0, span=(0.2, 1.3), solver=name, **amount).z
    assert (z - plain).abs().max() < 1e-7


@pytest.mark.parametrize("name", ["rk4", "ab3", "dopri5"])
@pytest.mark.parametrize("depth", [0.5, 0.53])
def test_a_saved_state_stays_at_its_depth_while_the_ends_of_the_span_move(name, depth):
    """z' = -z from l0: z(l) = exp(l0 - l), so d z(l) / d l0 = z(l) and d z(l) / d l1 = 0."""
    l0, l1 = torch.tensor(0.0, dtype=F64, requires_grad=True), torch.tensor(1.0, dtype=F64, requires_grad=True)
    amount = {"rtol": 1e-9, "atol": 1e-11} if SOLVERS[name].is_adaptive else {"n_steps": 64}
    solution = solve(lambda z, l: -z, torch.ones(1, dtype=F64), span=(l0, l1), solver=name, save_at=[depth], **amount)
    assert abs(solution.states.item() - math.exp(-depth)) < 1e-5
    g0, g1 = torch.autograd.grad(solution.states.sum(), (l0, l1))
    assert abs(g0 - math.exp(-depth)) < 1e-5 and abs(g1) < 1e-5
    if not SOLVERS[name].is_adaptive:
        with pytest.raises(ValueError, match="save_at inside a piece whose end needs gradients"):
            solve(lambda z, l: -z, torch.ones(1, dtype=F64), span=(l0, l1), n_steps=64, save_at=[depth],
                  gradient="adjoint")


def test_forward_mode_derivatives_reach_the_span_too():
    """z' = -z l from 0: z(s) = exp(-s² / 2), whose derivative is -s z."""
    def run(s):
        return solve(lambda z, l: -z * l, torch.ones(1, dtype=F64), span=(0.0, s), n_steps=64).z.sum()

    s = torch.tensor(1.2, dtype=F64)
    exact = -1.2 * math.exp(-0.72)
    _, tangent = torch.func.jvp(run, (s,), (torch.ones_like(s),))
    assert abs(tangent - exact) < 1e-7 and abs(torch.func.grad(run)(s) - exact) < 1e-7
    assert abs(torch.func.jacfwd(run)(s) - exact) < 1e-7
    with forward_ad.dual_level():
        z = run(forward_ad.make_dual(s, torch.ones_like(s)))
        assert abs(forward_ad.unpack_dual(z).tangent - exact) < 1e-7


def test_the_state_keeps_its_dtype_whatever_f_returns():
    for name in ("rk4", "ab2", "dopri5", "backward_euler"):
        amount = {} if SOLVERS[name].is_adaptive else {"n_steps": 3}
        wide = solve(lambda z, l: -z.double(), torch.ones(3), solver=name, **amount).z
        assert wide.dtype == torch.float32
        with pytest.raises(TypeError, match="complex increment"):
            solve(lambda z, l: 1j * z, torch.ones(3), solver=name, **amount)


def test_an_even_grid_in_float32_counts_as_even():
    leapfrog = LinearMultistep([0, 1], [2, 0])
    grid = torch.linspace(0, 1, 12)
    got = solve(coupled, start(), solver=leapfrog, grid=grid).z
    assert torch.equal(got, solve(coupled, start(), solver=leapfrog, n_steps=11).z)


def test_a_solver_of_ones_own_needs_no_more_than_the_protocol():
    class Halves:
        name, order, n_stages, embedded_order = "halves", 1, 1, None
        is_implicit = is_adaptive = is_reversible = False
        nodes = (0.0,)

        def init(self, memory):
            return None

        def step(self, f, z, step, memory):
            return z + step.h * f(z, step.at[0]), None

    for gradient in ("backprop", "checkpoint"):
        got = solve(coupled, start(), solver=Halves(), n_steps=7, gradient=gradient).z
        assert (got - solve(coupled, start(), solver="euler", n_steps=7).z).abs().max() < 1e-15


@pytest.mark.parametrize("name", list(EXPLICIT))
def test_gradcheck_in_float64(name):
    z0 = start().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: solve(coupled, z, solver=name, n_steps=4).z, (z0,))
