"""solve(): grids, pieces, saving, counting, precision, errors. Each family's own tests measure orders."""

import math
import pickle

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from solvers import SOLVERS, ExplicitRungeKutta, LieTrotter, LinearMultistep, SolverError, get_solver, solve
from solvers.learned import Learned

FIXED = {name: solver for name, solver in SOLVERS.items() if not solver.is_adaptive}
OVER_A_SPAN = [name for name, solver in SOLVERS.items() if not getattr(solver, "to_equilibrium", False)]
EXPLICIT = {name: solver for name, solver in FIXED.items() if not solver.is_implicit}
F64 = torch.float64


def coupled(z, l):
    """x' = l x + y, y' = l y - x^2 / 4: not autonomous, not linear, its parts do not commute."""
    x, y = z[..., 0], z[..., 1]
    return torch.stack([l * x + y, l * y - x * x / 4], -1)


def half_coupled(z, l):
    return coupled(z, l) / 2


coupled.parts = (half_coupled, half_coupled)  # for methods that need two


def start(dtype=F64):
    return torch.tensor([0.7, -0.4], dtype=dtype)


class Counted:
    """A field that counts its own calls and keeps the depths."""

    def __init__(self, f):
        self.f, self.depths = f, []

    def __call__(self, z, l):
        self.depths.append(l.item())
        return self.f(z, l)


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


@pytest.mark.parametrize("name", ["grid", "save_at", "breakpoints"])
def test_points_that_would_lose_their_gradient_are_refused(name):
    points = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
    amount = {} if name == "grid" else {"n_steps": 4}
    with pytest.raises(ValueError, match=f"{name} must not require grad"):
        solve(lambda z, l: -z, torch.ones(1), **{name: points}, **amount)


def test_the_state_keeps_its_dtype_whatever_f_returns():
    for name in ("rk4", "ab2", "dopri5", "backward_euler"):
        amount = {} if SOLVERS[name].is_adaptive else {"n_steps": 3}
        wide = solve(lambda z, l: -z.double(), torch.ones(3), solver=name, **amount).z
        assert wide.dtype == torch.float32
        with pytest.raises(TypeError, match="complex increment"):
            solve(lambda z, l: 1j * z, torch.ones(3), solver=name, **amount)


def test_a_method_that_evaluates_beyond_its_steps_is_refused_at_breakpoints():
    with pytest.raises(ValueError, match="breakpoints rule out 'yoshida4'"):
        solve(coupled, start(), solver="yoshida4", n_steps=4, breakpoints=[0.5])


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


def test_vmap_over_one_tensor_of_a_tuple():
    b = torch.ones(3, 2, dtype=F64)

    def run(b):
        return solve(lambda z, l: (-z[0], -z[1]), (torch.ones(2, dtype=F64), b), n_steps=4).z[1]

    got = torch.func.vmap(run)(b)
    assert (got - math.exp(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("name", list(EXPLICIT))
def test_gradcheck_in_float64(name):
    z0 = start().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: solve(coupled, z, solver=name, n_steps=4).z, (z0,))


# --- compiled and transformed -----------------------------------------------------------------------------------------


LEAN = [name for name, solver in EXPLICIT.items() if not isinstance(solver, Learned)]


@pytest.mark.parametrize("name", LEAN)
def test_a_fixed_step_solve_compiles_to_one_graph_with_equal_results(name):
    z, n_steps = torch.randn(4, 2), 2 if isinstance(EXPLICIT[name], ExplicitRungeKutta) else 5  # others have a past

    def run(z):
        return solve(coupled, z, solver=name, n_steps=n_steps).z

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert torch.equal(compiled(z), run(z))


def test_one_compiled_graph_of_the_field_serves_all_depths_steps_and_solvers():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    f = torch.compile(coupled, fullgraph=True, backend=backend)
    z = torch.randn(4, 2)
    for name in ("euler", "rk4", "ab3", "leapfrog"):
        for n in (3, 8):
            solve(f, z, solver=name, n_steps=n, span=(0.0, 0.1 * n))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", LEAN)
def test_solves_work_under_vmap_jvp_vjp_and_jacrev(name):
    z = torch.randn(4, 2, dtype=F64)

    def run(z):
        return solve(coupled, z, solver=name, n_steps=4).z

    assert (torch.func.vmap(run)(z) - run(z)).abs().max() < 1e-12
    jacobian = torch.func.jacrev(run)(z[0])
    _, forward = torch.func.jvp(run, (z[0],), (torch.ones(2, dtype=F64),))
    assert (jacobian.sum(1) - forward).abs().max() < 1e-12
    _, pull = torch.func.vjp(run, z[0])
    assert (jacobian.sum(0) - pull(torch.ones(2, dtype=F64))[0]).abs().max() < 1e-12


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher: host reads, and the other operations."""

    def __init__(self):
        super().__init__()
        self.reads = self.others = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(func):
            self.reads += 1
        else:
            self.others += 1
        return func(*args, **(kwargs or {}))


def counted(name, n, *, backward):
    """Operations of a solve outside f (which makes none), and those of its backward."""
    k = torch.randn(3, requires_grad=backward)
    z0 = torch.randn(3, requires_grad=backward)
    with Operations() as forward:
        z = solve(lambda z, l: k, z0, solver=name, n_steps=n).z
    back = Operations()
    if backward:
        with back:
            z.sum().backward()
    return forward, back


@pytest.mark.parametrize(("name", "most"), [("euler", 1), ("midpoint", 2), ("heun2", 3), ("rk4", 7), ("dopri54", 20),
                                            ("ab2", 3)])
def test_operations_a_step_outside_f_are_as_few_as_the_method_needs(name, most):
    """The difference between eight and four steps: neither set-up nor the final check is in it."""
    few, many = (counted(name, n, backward=False)[0].others for n in (4, 8))
    unbound = 4 * len(SOLVERS[name].nodes)  # views of the one tensor of depths, an operation in a dispatch mode only
    assert few < many <= few + 4 * most + unbound
    calls = [counted(name, n, backward=True) for n in (4, 8)]
    assert calls[1][0].others - calls[0][0].others <= 4 * most + unbound
    # backward scales by alpha and adds up, once a forward operation; z passes through
    assert calls[1][1].others - calls[0][1].others <= 4 * 3 * most


@pytest.mark.parametrize("name", list(EXPLICIT))
def test_a_fixed_step_solve_reads_from_the_device_at_most_once(name):
    for n in (4, 8):
        forward, back = counted(name, n, backward=True)
        assert forward.reads <= 1 and back.reads == 0


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"solver": "rk5"}, ValueError, ["unknown solver 'rk5'", "rk4", "euler"]),
    ({"solver": 3}, TypeError, ["solver"]),
    ({"z0": torch.zeros(2, dtype=torch.int64)}, TypeError, ["z0", "int64"]),
    ({"z0": [1.0]}, TypeError, ["z0", "list"]),
    ({"z0": ()}, TypeError, ["z0"]),
    ({"z0": torch.zeros(0)}, ValueError, ["z0", "empty"]),
    ({"n_steps": 0}, ValueError, ["n_steps", "0"]),
    ({"n_steps": -3}, ValueError, ["n_steps", "-3"]),
    ({"n_steps": 2.0}, TypeError, ["n_steps", "2.0"]),
    ({"n_steps": True}, TypeError, ["n_steps"]),
    ({"n_steps": None}, ValueError, ["n_steps", "grid", "rk4"]),
    ({"span": (0.0, math.nan)}, ValueError, ["span", "nan"]),
    ({"span": (0.0, math.inf)}, ValueError, ["span", "inf"]),
    ({"span": (1.0, 1.0)}, ValueError, ["span"]),
    ({"span": (0.0,)}, TypeError, ["span"]),
    ({"span": 1.0}, TypeError, ["span"]),
    ({"grid": [0.0, 1.0, 0.5], "n_steps": None}, ValueError, ["grid", "increasing"]),
    ({"grid": [0.0], "n_steps": None}, ValueError, ["grid"]),
    ({"grid": [0.0, math.nan], "n_steps": None}, ValueError, ["grid", "finite"]),
    ({"grid": [0.0, 1.0], "n_steps": 2}, ValueError, ["n_steps", "grid"]),
    ({"grid": [0.0, 2.0], "n_steps": None, "span": (0.0, 3.0)}, ValueError, ["grid", "span"]),
    ({"rtol": 1e-3}, ValueError, ["rtol", "rk4"]),
    ({"atol": 1e-3}, ValueError, ["atol", "rk4"]),
    ({"solver": "dopri5"}, ValueError, ["n_steps", "dopri5"]),
    ({"solver": "dopri5", "n_steps": None, "rtol": -1.0}, ValueError, ["rtol", "-1.0"]),
    ({"solver": "dopri5", "n_steps": None, "rtol": 0.0, "atol": 0.0}, ValueError, ["rtol", "atol"]),
    ({"solver": "dopri5", "n_steps": None, "rtol": "1e-3"}, ValueError, ["rtol", "1e-3"]),
    ({"gradient": "exact"}, ValueError, ["gradient", "backprop", "exact"]),
    ({"save_at": [2.0]}, ValueError, ["save_at", "span"]),
    ({"save_at": [0.5, 0.2]}, ValueError, ["save_at"]),
    ({"save_at": []}, ValueError, ["save_at"]),
    ({"save_at": "layers"}, ValueError, ["save_at", "steps"]),
    ({"mask": torch.ones(2)}, TypeError, ["mask", "bool"]),
    ({"z0": torch.zeros(2, 3, 4), "mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, ["mask", "(2, 3)"]),
    ({"max_nfe": 0}, ValueError, ["max_nfe"]),
    ({"params": (torch.zeros(1),)}, ValueError, ["params", "backprop"]),
    ({"breakpoints": [math.nan]}, ValueError, ["breakpoints"]),
])
def test_wrong_arguments_are_refused_by_name(arguments, error, words):
    options = {"z0": torch.zeros(2, 2), "n_steps": 2, **arguments}
    with pytest.raises(error) as caught:
        solve(lambda z, l: -z, options.pop("z0"), **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["rk4", "dopri5", "ab2"])
def test_a_field_of_another_shape_is_refused_and_its_own_errors_pass_unchanged(name):
    amount = {} if SOLVERS[name].is_adaptive else {"n_steps": 4}
    with pytest.raises(ValueError, match=r"f must return an increment shaped like the state: z is \(2, 3\)"):
        solve(lambda z, l: z[:1], torch.ones(2, 3), solver=name, **amount)
    with pytest.raises(TypeError, match="float"):
        solve(lambda z, l: 1.0, torch.ones(2, 3), solver=name, **amount)
    with pytest.raises(ValueError, match="shaped like the state"):
        solve(lambda z, l: z[0], (torch.ones(2), torch.ones(2)), solver=name, **amount)
    for error in (KeyError("mine"), AssertionError("mine"), RuntimeError("mine")):
        def f(z, l, error=error):
            raise error

        with pytest.raises(type(error)) as caught:
            solve(f, torch.ones(2, 3), solver=name, **amount)
        assert caught.value is error


@pytest.mark.parametrize("name", ["euler", "rk4", "ab4"])
def test_an_unstable_fixed_step_solve_says_where_and_what_to_try(name):
    with pytest.raises(SolverError) as caught:
        solve(lambda z, l: -1e9 * z**3, torch.ones(3), solver=name, n_steps=40)
    error = caught.value
    assert error.l == 1.0 and error.h == pytest.approx(1 / 40) and error.nfe == SOLVERS[name].nfe(40)
    assert "stability region" in str(error)


def test_nan_at_the_start_is_told_with_its_share():
    z0 = torch.ones(2, 2)
    z0[0, 0] = math.nan
    for options in ({"n_steps": 3}, {"solver": "dopri5"}):
        with pytest.raises(SolverError, match=r"25\.0%"):
            solve(lambda z, l: -z, z0, **options)
    mask = torch.tensor([False, True])
    for options in ({"n_steps": 3}, {"solver": "dopri5"}):
        out = solve(lambda z, l: -z, z0, mask=mask, **options).z
        assert out[1].isfinite().all()


def test_a_finite_state_whose_sum_overflows_is_no_failure():
    z = torch.full((4,), 3e38)
    assert torch.equal(solve(lambda z, l: torch.zeros_like(z), z, n_steps=1).z, z)


def test_a_span_that_float32_cannot_resolve_is_an_error_not_a_standstill():
    with pytest.raises(SolverError, match="resolution"):
        solve(lambda z, l: z, torch.ones(1), span=(1e8, 1e8 + 1), n_steps=16)
    solve(lambda z, l: z, torch.ones(1, dtype=F64), span=(1e8, 1e8 + 1), n_steps=16)


def test_a_span_that_float32_cannot_hold_is_refused():
    for span in ((0.0, 1e39), (-1e308, 1e308)):
        with pytest.raises(ValueError, match="span must lie within what"):
            solve(lambda z, l: 0 * z, torch.ones(2), span=span, n_steps=2)


@pytest.mark.parametrize("pieces", [[(0, 0.7, coupled), (0.7, 0.3, coupled), (0.3, 1, coupled)],
                                    [(0, 0.5, coupled), (0.6, 1, coupled)], [(0, 0.5)], [(1, 0, coupled)]])
def test_pieces_that_do_not_increase_and_adjoin_are_refused(pieces):
    class Wrong:
        pass

    f = Wrong()
    f.pieces = pieces
    with pytest.raises(ValueError, match=r"f\.pieces must"):
        solve(f, start(), n_steps=6)


@pytest.mark.parametrize("name", ["gauss4", "backward_euler", "bdf2"])
def test_implicit_methods_leave_padding_alone_and_name_a_start_that_is_not_finite(name):
    z0 = torch.ones(2, 3, dtype=F64)
    z0[1] = math.nan
    alone = solve(lambda z, l: -z, z0[:1], solver=name, n_steps=4).z
    padded = solve(lambda z, l: -z, z0, solver=name, n_steps=4, mask=torch.tensor([True, False])).z
    assert (padded[0] - alone[0]).abs().max() < 1e-10
    with pytest.raises(SolverError, match="z0 was not finite"):
        solve(lambda z, l: -z, z0, solver=name, n_steps=4)


def test_max_nfe_bounds_the_work():
    f = Counted(lambda z, l: -z)
    with pytest.raises(SolverError, match="max_nfe = 10") as caught:
        solve(f, torch.ones(1), n_steps=5, max_nfe=10)
    assert len(f.depths) <= 10 == caught.value.nfe


def test_unknown_options_of_a_solver_are_listed():
    with pytest.raises(ValueError, match=r"unknown option 'across' for solver 'ab2'; known: .*across_pieces"):
        get_solver("ab2", across=True)
    with pytest.raises(ValueError, match="did you mean 'midpoint'"):
        get_solver("mitpoint")


def test_a_solver_error_survives_being_sent_to_another_process():
    error = SolverError("no step", l=0.5, h=0.1, nfe=7, advice="try less")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and (again.l, again.h, again.nfe) == (0.5, 0.1, 7)
    assert type(again) is SolverError and "advice" not in vars(again)


def test_depths_are_made_once_for_all_solves_over_a_grid_and_a_field_that_spoils_them_spoils_no_other():
    """z' = l has z(3) = 4.5 under the midpoint rule, whatever an earlier f did to its l."""
    def seen(spoil):
        at = []

        def f(z, l):
            at.append(l)
            k = l.expand_as(z).clone()
            spoil(l)
            return k

        z = solve(f, torch.zeros(2), span=(0.0, 3.0), solver="midpoint", n_steps=3).z
        assert torch.equal(z.detach(), torch.full((2,), 4.5))
        assert not z.requires_grad
        return at

    first, again = seen(lambda l: None), seen(lambda l: None)
    assert all(x is y for x, y in zip(first, again, strict=True))
    seen(lambda l: l.add_(100.0))
    assert not any(x is y for x, y in zip(seen(lambda l: None), first, strict=True))
    solve(lambda z, l: l.requires_grad_() * z, torch.zeros(2), span=(0.0, 5.0), solver="midpoint", n_steps=5)
    other = solve(lambda z, l: l.expand_as(z), torch.zeros(2), span=(0.0, 5.0), solver="midpoint", n_steps=5).z
    assert not other.requires_grad
    with torch.inference_mode():
        solve(lambda z, l: l * z, torch.zeros(2), span=(0.0, 7.0), solver="midpoint", n_steps=7)
    z0 = torch.ones(2, requires_grad=True)
    solve(lambda z, l: l * z, z0, span=(0.0, 7.0), solver="midpoint", n_steps=7).z.sum().backward()
    assert z0.grad.isfinite().all()


def test_a_solve_under_another_default_device_leaves_later_ones_alone():
    with torch.device("meta"):
        solve(lambda z, l: l * z, torch.ones(2, device="cpu"), span=(0.0, 9.0), solver="euler", n_steps=9)
    z = solve(lambda z, l: l.expand_as(z), torch.zeros(2), span=(0.0, 9.0), solver="euler", n_steps=9).z
    assert torch.equal(z, torch.full((2,), 36.0))


@pytest.mark.parametrize("spoil", [lambda l: l.add_(1.0), lambda l: l.requires_grad_()])
def test_a_field_that_changes_its_depth_argument_does_not_change_the_next_solve(spoil):
    """Grids are kept between solves; z' = l from 0 is l² / 2, which midpoint integrates without an error."""
    def spoiling(z, l):
        k = torch.full_like(z, float(l.detach()))
        spoil(l)
        return k

    z = torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        solve(spoiling, z, span=(0.0, 3.0), solver="midpoint", n_steps=3)
    after = solve(lambda z, l: l.expand(2), z, span=(0.0, 3.0), solver="midpoint", n_steps=3)
    assert torch.equal(after.z, torch.full((2,), 4.5, dtype=torch.float64)) and not after.z.requires_grad


def test_a_solve_in_inference_mode_leaves_nothing_that_a_later_one_cannot_use():
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    z = torch.ones(1, dtype=torch.float64)
    for mode in (torch.inference_mode, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            got = solve(lambda z, l: w * l * torch.ones_like(z), z, span=(0.0, 2.0), solver="rk4", n_steps=5)
    got.z.sum().backward()
    assert abs(w.grad.item() - 2.0) < 1e-12  # ∫ l dl
