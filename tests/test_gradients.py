"""Gradient modes against float64 backprop: exact ones, the adjoint, second derivatives, compiled solves."""

import math
import warnings

import pytest
import torch
from convergence import perturbed
from gradient_modes import (
    ADJOINT,
    EXACT,
    PAIRS,
    difference,
    gradients,
    gradients_of_square,
    loss_of,
    net,
    saved_bytes,
    state,
)
from torch import nn
from torch.func import functional_call

from solvers import SOLVERS, LieTrotter, SolverError, Strang, get_solver, solve
from solvers.gradients import GRADIENTS
from solvers.solve import WHOLE


def test_every_mode_of_every_solver_is_known():
    for solver in SOLVERS.values():
        known = {*GRADIENTS, *WHOLE, "jacobian_free"}  # the last one of solvers.equilibrium
        assert set(solver.gradients) <= known
        assert ("reversible" in solver.gradients) == solver.is_reversible
        with pytest.raises(ValueError, match=r"gradient must be one of backprop.*, got 'exact'"):
            solve(lambda z, l: z, state(2), solver=solver, gradient="exact",
                  **({} if solver.is_adaptive else {"n_steps": 2}))
    with pytest.raises(ValueError, match="checkpoint_recursive, adjoint for solver 'rk4', got 'rev"):
        solve(lambda z, l: z, state(2), n_steps=2, gradient="reversible")


# --- exact modes ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_exact_modes_give_the_gradient_of_backprop(name, mode):
    """To z0 and to the parameters of a module, with saved states at grid points and between them."""
    f, z0 = net(), state(2, 3)
    inputs = [z0, *f.parameters()]
    grid = perturbed(0.0, 1.5, 13)
    options = {"solver": name, "grid": grid, "save_at": [0.0, 0.2, 0.25, grid[4], 1.4, 1.5]}
    reference, wanted = gradients(f, z0, inputs, **options)
    solution, got = gradients(f, z0, inputs, gradient=mode, **options)
    assert torch.equal(solution.z, reference.z) and torch.equal(solution.states, reference.states)
    assert solution.nfe == reference.nfe
    assert difference(got, wanted) < 1e-10


@pytest.mark.parametrize("mode", EXACT)
def test_parameters_are_found_wherever_they_come_from(mode):
    """Closed over, non-leaf, non-leaf made from another one, the state itself, swapped in by functional_call."""
    module, z0 = net(), state(2, 3)
    leaf = state(3)
    swapped = {name: (2 * p.detach()).requires_grad_() for name, p in module.named_parameters()}
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    inputs = [z0, leaf, scale, *swapped.values(), *module.parameters()]

    def run(given=False, **options):
        made, doubled = (leaf * 2).sin(), {name: p * 1.5 for name, p in swapped.items()}
        if given:
            options["params"] = (leaf, made, scale, z0, *doubled.values())

        def f(z, l):
            return functional_call(module, doubled, (z, l)) + scale * made * z + leaf * z0

        return gradients(f, z0, inputs, solver="reversible_midpoint", n_steps=8, **options)

    wanted = run()[1]
    assert wanted[-1] is None
    for given in (False, True):
        solution, got = run(given, gradient=mode)
        assert difference(got, wanted) < 1e-10
        assert solution.nfe == 32


@ADJOINT
def test_the_adjoint_finds_the_same_parameters():
    leaf, z0 = state(3), state(2, 3)

    def run(given=False, **options):
        made = (leaf * 2).sin()
        if given:
            options["params"] = (made, leaf, z0)
        return gradients(lambda z, l: torch.sin(made * z) + leaf * z0, z0, [z0, leaf], **options)[1]

    wanted = run(n_steps=200)
    for options in ({"n_steps": 40}, {"solver": "dopri5", "rtol": 1e-9, "atol": 1e-9}):
        for given in (False, True):
            assert difference(run(given, gradient="adjoint", **options), wanted) < 1e-7


@pytest.mark.parametrize("mode", [*EXACT, "adjoint"])
@ADJOINT
def test_tuple_states_and_pieces_and_spans_get_gradients(mode):
    """f jumps at 1/2 and at 1, the second time between modules; both ends of the span are tensors."""
    first, second = net(), net(width=3, hidden=4)
    z0 = (state(2, 3), state(2, 1))
    ends = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.1, 1.6)]

    class Layered:
        breakpoints = (0.5,)

        def __init__(self):
            self.pieces = [(0.0, 1.0, self.low), (1.0, 2.0, self.high)]

        def low(self, z, l):
            x, y = z
            return first(x, l) * y, torch.cos(x).mean(-1, keepdim=True) * torch.where(l < 0.5, 1.0, -2.0)

        def high(self, z, l):
            x, y = z
            return second(x, l) - y, -y * l

    inputs = [*z0, *ends, *first.parameters(), *second.parameters()]
    n = 60 if mode == "adjoint" else 9
    inside = [] if mode == "adjoint" else [0.3, 1.2]  # of pieces whose ends move, which the adjoint refuses
    options = {"span": ends, "solver": "reversible_rk4", "n_steps": n, "save_at": sorted([0.5, 0.9, *inside])}
    _, wanted = gradients(Layered(), z0, inputs, **options)
    assert all(x is not None and x.abs().max() > 0 for x in wanted)
    for params in (None, (*first.parameters(), *second.parameters())):
        _, got = gradients(Layered(), z0, inputs, gradient=mode, params=params, **options)
        assert difference(got, wanted) < (1e-6 if mode == "adjoint" else 1e-10)  # order 4: 20 steps a piece
    if mode == "adjoint":
        _, got = gradients(Layered(), z0, inputs, gradient=mode, solver="dopri5", rtol=1e-9, atol=1e-9, span=ends,
                           save_at=options["save_at"])
        assert difference(got, wanted) < 1e-6


@pytest.mark.parametrize("solver", ["momentum", "revnet", "reversible_midpoint", "leapfrog", "alf", "reversible_heun",
                                    get_solver("leapfrog", across_pieces=True)])
def test_reversal_over_many_pieces_keeps_states_only_where_the_method_starts_afresh(solver):
    blocks = [net() for _ in range(6)]
    pieces = [(float(i), i + 1.0, block) for i, block in enumerate(blocks)]

    class Stack:
        def __init__(self):
            self.pieces = pieces

        def __call__(self, z, l):
            raise AssertionError("f is integrated by its pieces")

    z0 = state(2, 3)
    inputs = [z0, *(p for block in blocks for p in block.parameters())]
    options = {"span": (0.0, 6.0), "solver": solver, "n_steps": 12}
    _, wanted = gradients(Stack(), z0, inputs, **options)
    kept, solution = saved_bytes(lambda: solve(Stack(), z0, gradient="reversible", **options))
    got = torch.autograd.grad(loss_of(solution), inputs)
    assert difference(got, wanted) < 1e-10
    carries = getattr(solver, "across_pieces", False) or solver in ("momentum", "revnet", "reversible_midpoint")
    assert (kept <= 4 * z0.numel() * 8) == carries


@pytest.mark.parametrize("mode", ["checkpoint_recursive", "reversible", "adjoint"])
@ADJOINT
def test_fields_that_differentiate_inside_and_complex_states(mode):
    """The gradient of an energy, by autograd and by torch.func, and i times a complex state."""
    energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    phase = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def by_autograd(z, l):
        with torch.enable_grad():
            z = z if z.requires_grad else z.requires_grad_()
            return torch.autograd.grad(energy(z).sum(), z, create_graph=True)[0].roll(2, -1)

    def by_func(z, l):
        return torch.func.grad(lambda x: energy(x).sum())(z).roll(2, -1)

    def turn(z, l):
        return 1j * phase * z * (1 + l) + 0.1 * z * z.abs()

    for f, z0, inputs in ((by_autograd, state(2, 4), [*energy.parameters()]), (by_func, state(2, 4), [phase]),
                          (turn, torch.randn(3, dtype=torch.complex128, requires_grad=True), [phase])):
        options = {"solver": "alf", "n_steps": 40}
        (before, wanted), (after, got) = (gradients_of_square(f, z0, [z0, *inputs], gradient=kind, **options)
                                          for kind in ("backprop", mode))
        assert torch.equal(before.z, after.z)
        assert difference(got, wanted) < (1e-3 if mode == "adjoint" else 1e-10)


def test_carried_increments_and_moving_ends_do_not_mix():
    end = torch.tensor(1.0, requires_grad=True)
    for solver in ("momentum", get_solver("leapfrog", across_pieces=True), get_solver("ab2", across_pieces=True)):
        with pytest.raises(ValueError, match="span cannot get gradients"):
            solve(lambda z, l: z, state(2), span=(0.0, end), solver=solver, n_steps=4, breakpoints=[0.5])


def test_splitting_methods_have_the_same_modes():
    class Two:
        def __init__(self, *parts):
            self.parts = parts

        def __call__(self, z, l):
            return sum(part(z, l) for part in self.parts)

    f, z0 = Two(net(), net(hidden=4)), state(2, 3)
    inputs = [z0, *f.parts[0].parameters(), *f.parts[1].parameters()]
    for solver in (LieTrotter("midpoint"), Strang("rk4"), Strang(SOLVERS["ab2"]), SOLVERS["rk4"]):
        reference, wanted = gradients(f, z0, inputs, solver=solver, n_steps=8)
        for mode in ("checkpoint", "checkpoint_recursive"):
            solution, got = gradients(f, z0, inputs, solver=solver, n_steps=8, gradient=mode)
            assert difference(got, wanted) < 1e-12 and solution.nfe == reference.nfe
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            errors = [difference(gradients(f, z0, inputs, solver=solver, n_steps=n, gradient="adjoint")[1],
                                 gradients(f, z0, inputs, solver=solver, n_steps=n)[1]) for n in (16, 32)]
        assert math.log2(errors[0] / errors[1]) > solver.order - 0.3


# --- the adjoint ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "n"), [("euler", 64), ("midpoint", 16), ("kutta3", 16), ("rk4", 8), ("ab2", 32),
                                         ("ab3", 64), ("leapfrog", 32), ("alf", 16), ("reversible_rk4", 8)])
@ADJOINT
def test_the_adjoint_converges_to_the_exact_gradient_with_the_order_of_the_method(name, n):
    f, z0 = net(), state(2, 3)
    inputs = [z0, *f.parameters()]
    errors = []
    for steps in (n, 2 * n):
        options = {"solver": name, "n_steps": steps, "save_at": [0.2, 0.5, 0.83]}
        # the loss at saved states only, between the grid's points too: Hermite interpolation is of order 4
        errors.append(difference(gradients(f, z0, inputs, gradient="adjoint", **options)[1],
                                 gradients(f, z0, inputs, **options)[1]))
    assert math.log2(errors[0] / errors[1]) > SOLVERS[name].order - 0.35, errors


def test_the_adaptive_adjoint_agrees_with_torchdiffeq_and_with_the_exact_gradient():
    from torchdiffeq import odeint_adjoint

    f, z0 = net(), state(2, 3)
    inputs = [z0, *f.parameters()]
    _, exact = gradients(f, z0, inputs, solver="rk4", n_steps=400, save_at=[0.3, 1.0])

    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = f

        def forward(self, l, z):
            return self.f(z, l)

    l = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    states = odeint_adjoint(Swapped(), z0, l, rtol=1e-10, atol=1e-10, method="dopri5")
    theirs = torch.autograd.grad(loss_of(type("S", (), {"z": states[-1], "states": states[1:]})), inputs)
    solution, ours = gradients(f, z0, inputs, solver="dopri5", rtol=1e-10, atol=1e-10, save_at=[0.3, 1.0],
                               gradient="adjoint")
    assert difference(theirs, exact) < 1e-7 and difference(ours, exact) < 1e-7
    assert solution.nfe_backward > 0 and solution.reconstruction_error < 1e-7


def test_the_adjoint_is_solved_for_gradients_of_size_one():
    """A loss averaged over a large batch must not put its gradient below atol: here z rests, and a grows by e^6."""
    z0 = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    z = solve(lambda z, l: 6 * torch.sin(z), z0, solver="dopri5", rtol=1e-6, atol=1e-6, gradient="adjoint").z
    (gradient,) = torch.autograd.grad(1e-9 * z.sum(), z0)
    assert torch.allclose(gradient * 1e9, torch.full_like(z0, math.exp(6.0)), rtol=1e-4)


def test_a_mask_keeps_padding_out_of_the_adjoint_norm():
    def f(z, l):
        return torch.sin(3 * z) * z

    mask = torch.tensor([[True, True, False]])
    z0 = state(1, 3, 2)
    wild = z0.detach().clone()
    wild[0, 2] = 1e3
    counts = []
    for start in (z0, wild.requires_grad_()):
        solution = solve(f, start, solver="dopri5", mask=mask, gradient="adjoint", rtol=1e-6, atol=1e-6)
        (solution.z * mask[..., None]).sum().backward()
        counts.append((solution.nfe, solution.nfe_backward))
        gradient = start.grad[0, :2]
    assert counts[0] == counts[1]
    assert torch.allclose(gradient, z0.grad[0, :2], rtol=1e-6)


def test_a_coarse_fixed_grid_warns_and_a_fine_one_does_not():
    f, z0 = net(), state(2, 3)
    for name, n in (("euler", 12), ("rk4", 4), ("ab3", 9)):
        with pytest.warns(UserWarning, match="gradient of the continuous problem, not of what was computed"):
            solve(f, z0, solver=name, n_steps=n, gradient="adjoint")
    for name, n in (("rk4", 6), ("midpoint", 32), ("euler", 1000)):
        solve(f, z0, solver=name, n_steps=n, gradient="adjoint")  # warnings are errors here
    with pytest.warns(UserWarning, match="as coarse as 3 steps"):
        solve(f, z0, n_steps=6, gradient="adjoint", breakpoints=[0.5])
    with torch.no_grad():
        solve(f, z0, n_steps=2, gradient="adjoint")


def test_an_adjoint_that_cannot_find_its_way_back_says_so():
    with pytest.raises(SolverError, match="the adjoint is meaningless"):
        solve(lambda z, l: -30 * z, state(2), n_steps=20, gradient="adjoint").z.sum().backward()
    options = {"solver": "dopri5", "gradient": "adjoint", "rtol": 1e-8, "atol": 1e-8}
    free = solve(lambda z, l: torch.sin(3 * z), state(2), **options)
    free.z.sum().backward()
    assert free.nfe_backward > free.nfe  # z grows on the way back
    short = solve(lambda z, l: torch.sin(3 * z), state(2), max_nfe=free.nfe, **options)
    with pytest.raises(SolverError, match=f"more than max_nfe = {2 * free.nfe}"):
        short.z.sum().backward()


def test_an_infinite_loss_scale_gives_gradients_that_are_not_finite():
    """As backprop does: mixed-precision training skips such a step."""
    f, z0 = net(), state(2, 3)
    (solve(f, z0, solver="dopri5", gradient="adjoint").z * math.inf).sum().backward()
    assert z0.grad.isnan().all() and f.up.weight.grad.isnan().all()


# --- second derivatives --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", ["backprop", "checkpoint"])
def test_second_derivatives_of_backprop_and_checkpoint(mode):
    """z' = a z, z(1) = e^a: d²z/da² = e^a up to the truncation of RK4, d/dz0 of d/da = e^a."""
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
    z = solve(lambda z, l: a * z, z0, n_steps=64, gradient=mode).z
    first = torch.autograd.grad(z.sum(), a, create_graph=True)[0]
    second = torch.autograd.grad(first, [a, z0])
    assert all(abs(x.item() - math.exp(0.5)) < 1e-8 for x in second)


@pytest.mark.parametrize("mode", ["checkpoint_recursive", "reversible", "adjoint"])
@ADJOINT
def test_second_derivatives_of_the_other_modes_are_a_clear_error(mode):
    f, z0 = net(), state(2, 3)
    z = solve(f, z0, solver="alf", n_steps=8, gradient=mode).z
    first = torch.autograd.grad(z.sum(), z0, create_graph=True)[0]
    assert torch.isfinite(first).all()
    with pytest.raises(RuntimeError, match=f'gradient="{mode}" gives first derivatives only; take gradient="backprop"'):
        first.square().sum().backward()


def test_gradcheck_of_the_exact_modes():
    w = state(2, 2)

    for name, mode in (("rk4", "checkpoint"), ("rk4", "checkpoint_recursive"), ("reversible_rk4", "reversible")):
        def run(z, w, name=name, mode=mode):
            return solve(lambda z, l: torch.sin(z @ w) * l, z, solver=name, n_steps=3, gradient=mode).z

        assert torch.autograd.gradcheck(run, (state(3, 2), w))


# --- compiled ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [name for name, solver in SOLVERS.items() if solver.is_reversible] + ["rk4", "ab3"])
def test_a_backprop_solve_compiles_to_one_graph(name):
    f, z0 = net(), state(2, 3)

    def run(z):
        return solve(f, z, solver=name, n_steps=4, save_at=[0.3, 1.0]).states

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    assert torch.equal(compiled(z0), run(z0))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_a_compiled_field_is_searched_too():
    f, z0, scale = net(), state(2, 3), state(3)
    torch._dynamo.reset()
    results = []
    for mode, wrap in (("backprop", lambda g: g), ("reversible", lambda g: torch.compile(g, backend="eager"))):
        made = scale * 2
        field = wrap(lambda z, l, made=made: f(z, l) * made)
        results.append(gradients(field, z0, [z0, scale, *f.parameters()], solver="alf", n_steps=6, gradient=mode)[1])
    assert difference(results[1], results[0]) < 1e-10


@pytest.mark.parametrize(("mode", "solver"), [("adjoint", "rk4"), ("checkpoint_recursive", "rk4"),
                                              ("reversible", "reversible_midpoint"), ("adjoint", "dopri5")])
def test_a_second_derivative_is_refused_also_where_only_the_product_with_the_state_asks_for_it(mode, solver):
    """d/dz of (g(z) z): the path through g must not be dropped in silence."""
    z = torch.full((2, 3), 0.5, dtype=torch.float64, requires_grad=True)
    amount = {"rtol": 1e-6} if solver == "dopri5" else {"n_steps": 32}
    out = solve(lambda y, l: -y * y, z, gradient=mode, solver=solver, **amount).z
    (g,) = torch.autograd.grad(out.sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad((g * z).sum(), z)
