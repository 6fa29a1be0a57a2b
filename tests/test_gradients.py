"""Gradient modes against float64 backprop: what they reach, what they cost, what they refuse."""

import math
import warnings
import weakref

import pytest
import torch
from convergence import perturbed
from torch import nn
from torch.func import functional_call

from solvers import SOLVERS, LieTrotter, SolverError, Strang, get_solver, solve
from solvers.gradients import GRADIENTS
from solvers.solve import WHOLE

EXACT = ("checkpoint", "checkpoint_recursive", "reversible")
# one solver a family; all reversible ones
FIXED = ["euler", "rk4", "ab3", "abm3", *(name for name, solver in SOLVERS.items() if solver.is_reversible)]
PAIRS = [(name, mode) for name in FIXED for mode in SOLVERS[name].gradients if mode in EXACT]
ADJOINT = pytest.mark.filterwarnings('ignore:gradient="adjoint" gives')


class Net(nn.Module):
    """A small non-autonomous, non-linear field."""

    def __init__(self, width=3, hidden=6):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, z, l):
        return 0.8 * self.down(torch.tanh(self.up(z) * (1 + l)))


def net(**options):
    torch.manual_seed(3)
    return Net(**options).double()


def state(*shape):
    return torch.linspace(-1.0, 1.0, math.prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()


def loss_of(solution):
    """Weighs every entry of the final and saved states differently."""
    total = 0.0
    for x in (solution.z, solution.states):
        for y in x if isinstance(x, tuple) else () if x is None else (x,):
            total = total + (y * torch.linspace(0.5, 1.5, y.numel()).to(y).reshape(y.shape)).sum() + y.square().sum()
    return total


def gradients(f, z0, inputs, **options):
    solution = solve(f, z0, **options)
    return solution, torch.autograd.grad(loss_of(solution), inputs, allow_unused=True)


def gradients_of_square(f, z0, inputs, **options):
    solution = solve(f, z0, **options)
    z = torch.view_as_real(solution.z)[..., 0] if solution.z.is_complex() else solution.z
    return solution, torch.autograd.grad(z.square().sum(), inputs, allow_unused=True)


def difference(xs, ys):
    """Largest difference over the largest entry, of the worst tensor."""
    worst = 0.0
    for x, y in zip(xs, ys, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            worst = max(worst, ((x - y).abs().max() / y.abs().max().clamp(min=1e-30)).item())
    return worst


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


# --- memory and work -----------------------------------------------------------------------------------------------

def saved_bytes(run):
    """Bytes that ``run`` has kept for backward at its end, each storage once and parameters apart."""
    kept = []

    class Saved:
        def __init__(self, x):
            self.x = x

    def pack(x):
        saved = Saved(x)
        if not isinstance(x, nn.Parameter):
            kept.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.x):
        result = run()
    storages = [ref().x.untyped_storage() for ref in kept if ref() is not None]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()), result


def test_what_is_kept_grows_as_stated():
    f, z0 = net(width=16, hidden=32), state(8, 16)
    size = z0.numel() * 8

    def kept(solver, mode, n):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return saved_bytes(lambda: solve(f, z0, solver=solver, n_steps=n, gradient=mode).z.sum())[0]

    for solver in ("alf", "rk4"):
        assert kept(solver, "backprop", 32) - kept(solver, "backprop", 16) > 16 * 3 * size
        for mode in SOLVERS[solver].gradients[2:]:
            assert kept(solver, mode, 16) == kept(solver, mode, 64) <= 3 * size
    # one state a step; the times and the random state are not tensors of autograd's
    assert kept("rk4", "checkpoint", 16) <= 17 * size + 16 * 2 * 8
    assert kept("rk4", "checkpoint", 32) - kept("rk4", "checkpoint", 16) == pytest.approx(16 * size, rel=0.05)


def test_recursive_checkpointing_holds_about_log2_n_states():
    alive, most = [], 0

    def f(z, l):
        nonlocal alive, most
        alive = [ref for ref in (*alive, weakref.ref(z)) if ref() is not None]
        most = max(most, len(alive))
        return torch.sin(z) + l

    peaks = {}
    for n in (16, 64):
        alive, most = [], 0
        z0 = state(4)
        solve(f, z0, solver="euler", n_steps=n, gradient="checkpoint_recursive").z.sum().backward()
        peaks[n] = most
    assert peaks[64] <= peaks[16] + 2 + 2 and peaks[64] < 16


@ADJOINT
def test_backward_evaluations_are_counted():
    counted = {("euler", "backprop"): (16, 0), ("rk4", "checkpoint"): (64, 64),
               # n s again, and s n/2 for each of the log2(n) halvings
               ("rk4", "checkpoint_recursive"): (64, 64 + 4 * 8 * 4),
               # one evaluation to reverse a step and one to pull it back; the first steps of each method evaluate twice
               ("leapfrog", "reversible"): (17, 15 + 17), ("alf", "reversible"): (17, 16 + 17),
               ("reversible_heun", "reversible"): (17, 16 + 17), ("momentum", "reversible"): (16, 16 + 16),
               ("revnet", "reversible"): (32, 32 + 32), ("reversible_midpoint", "reversible"): (64, 64 + 64),
               ("rk4", "adjoint"): (64, 64)}
    f = net()
    for (name, mode), (forward, backward) in counted.items():
        solution = solve(f, state(2, 3), solver=name, n_steps=16, gradient=mode)
        assert (solution.nfe, solution.nfe_backward) == (forward, 0)
        solution.z.square().sum().backward()
        assert (solution.nfe, solution.nfe_backward) == (forward, backward), (name, mode)


@ADJOINT
def test_saved_states_without_a_gradient_do_not_break_the_adjoint_into_steps():
    for options in ({"solver": "alf", "n_steps": 16, "save_at": "steps"}, {"solver": "dopri5", "save_at": [0.3, 0.6]}):
        solution = solve(net(), state(2, 3), gradient="adjoint", **options)
        solution.z.sum().backward()
        plain = solve(net(), state(2, 3), gradient="adjoint", **(options | {"save_at": None}))
        plain.z.sum().backward()
        assert solution.nfe_backward == plain.nfe_backward > 0


def test_backward_may_be_run_twice():
    f, z0 = net(), state(2, 3)
    loss = solve(f, z0, solver="alf", n_steps=8, gradient="reversible").z.square().sum()
    first = torch.autograd.grad(loss, z0, retain_graph=True)
    assert difference(torch.autograd.grad(loss, z0), first) == 0
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, z0)


# --- randomness and precision --------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "mode"), [pair for pair in PAIRS if pair[0] in ("rk4", "ab3")
                                            or SOLVERS[pair[0]].is_reversible])
def test_dropout_inside_f_is_replayed_exactly(name, mode):
    module, drop, z0 = net(), nn.Dropout(0.4), state(2, 3)

    def f(z, l):
        return drop(module(z, l))

    inputs = [z0, *module.parameters()]
    results = []
    for gradient in ("backprop", mode):
        torch.manual_seed(11)
        solution, got = gradients(f, z0, inputs, solver=name, n_steps=9, save_at=[0.07, 0.5, 1.0], gradient=gradient)
        results.append((solution.z, got, torch.rand(1)))
    assert torch.equal(results[0][0], results[1][0])
    assert difference(results[1][1], results[0][1]) < 1e-10
    if mode != "checkpoint":
        assert torch.equal(results[0][2], results[1][2]), "backward must leave the generator as it found it"


@ADJOINT
def test_the_adjoint_replays_dropout_on_a_fixed_grid_and_refuses_it_on_an_adaptive_one():
    """One mask a step is a field that jumps between steps: replayed, the adjoint of Euler is off by O(h) only."""
    module, drop, z0 = net(), nn.Dropout(0.4), state(2, 3)

    def f(z, l):
        return drop(module(z, l))

    errors = []
    for n in (16, 256):
        got = []
        for mode in ("backprop", "adjoint"):
            torch.manual_seed(5)
            got.append(gradients(f, z0, [z0, *module.parameters()], solver="euler", n_steps=n, gradient=mode)[1])
        errors.append(difference(got[1], got[0]))
    assert errors[1] < errors[0] / 8 and errors[1] < 0.02, errors
    with pytest.raises(ValueError, match="draw its random numbers once a solve"):
        solve(lambda z, l: 1e-9 * torch.rand_like(z) + z, z0, solver="dopri5", rtol=1e-2, atol=1e-2, gradient="adjoint")
    drawn = []

    def once(z, l):
        drawn.append(torch.rand_like(z) if not drawn else drawn[0])
        return torch.sin(z) * drawn[0]

    solve(once, z0, solver="dopri5", gradient="adjoint").z.sum().backward()


@pytest.mark.parametrize("mode", [*EXACT, "adjoint"])
@ADJOINT
def test_autocast_is_restored_in_backward(mode):
    torch.manual_seed(0)
    linear, z0, seen = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True), []

    def f(z, l):
        k = torch.tanh(linear(z))
        seen.append(k.dtype)
        return k

    got = []
    for gradient in ("backprop", mode):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = solve(f, z0, solver="alf", n_steps=32, gradient=gradient).z.square().mean()
        got.append(torch.autograd.grad(loss, [z0, linear.weight]))
    assert set(seen) == {torch.bfloat16}
    assert difference(got[1], got[0]) < 0.03  # backprop adds up the weight's gradient in bf16
    outside = solve(f, z0, solver="alf", n_steps=4, gradient=mode).z.sum()
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outside.backward()
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("mode", [*EXACT, "adjoint"])
@ADJOINT
def test_half_precision_states_are_carried_in_float32(mode):
    torch.manual_seed(0)
    linear = nn.Linear(8, 8).bfloat16()
    z0 = torch.randn(4, 8).bfloat16().requires_grad_()
    got = []
    for gradient in ("backprop", mode):
        solution, grads = gradients(lambda z, l: torch.tanh(linear(z)), z0, [z0, linear.weight], solver="leapfrog",
                                    n_steps=64, gradient=gradient, save_at=[0.5])
        assert all(g.dtype == torch.bfloat16 for g in grads)
        got.append([g.float() for g in grads])
    assert difference(got[1], got[0]) < 0.05
    if mode == "reversible":
        assert solution.reconstruction_error < 1e-4


def test_a_reconstruction_that_lost_the_state_is_an_error():
    """γ = 0.5 multiplies float32 rounding by 2 a step on the way back."""
    solver = get_solver("momentum", gamma=0.5)
    z0 = torch.randn(4, 3, requires_grad=True)
    f = net().float()
    fine = solve(f, z0, solver=solver, n_steps=8, gradient="reversible")
    assert fine.reconstruction_error is None
    fine.z.sum().backward()
    assert 0 < fine.reconstruction_error < 1e-4
    lost = solve(f, z0, solver=solver, n_steps=60, gradient="reversible")
    with pytest.raises(SolverError, match="missed the state it came from") as caught:
        lost.z.sum().backward()
    assert caught.value.nfe > 60 and lost.reconstruction_error > 1e-2
    strict = get_solver("momentum", gamma=0.5, reconstruction_bound=1e-12)
    with pytest.raises(SolverError, match="bound 1e-12"):
        solve(f, z0, solver=strict, n_steps=8, gradient="reversible").z.sum().backward()
    assert solve(f, z0, solver=solver, n_steps=8).reconstruction_error is None


def test_padding_does_not_count_as_a_lost_state():
    def f(z, l):  # rounding in the last position grows out of bounds on the way back
        return torch.cat([torch.sin(z[:, :2]), 1e4 * torch.sin(1e4 * z[:, 2:])], 1)

    z0 = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False])
    options = {"solver": "reversible_midpoint", "n_steps": 16, "gradient": "reversible"}
    solution = solve(f, z0, mask=mask, **options)
    solution.z[:, :2].sum().backward()
    assert solution.reconstruction_error < 1e-10
    with pytest.raises(SolverError, match="missed the state"):
        solve(f, z0, **options).z[:, :2].sum().backward()


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


# --- refusals ------------------------------------------------------------------------------------------------------

class Routed(nn.Module):
    """Uses its second weight only after the middle."""

    def __init__(self):
        super().__init__()
        self.low, self.high = net(), net(hidden=4)

    def forward(self, z, l):
        return self.low(z, l) if l < 0.5 else self.high(z, l)


@pytest.mark.parametrize("mode", [*EXACT, "adjoint"])
@ADJOINT
def test_what_f_comes_to_depend_on_later_gets_its_gradient_or_an_error(mode):
    module, z0 = Routed(), state(2, 3)
    inputs = [z0, *module.parameters()]
    options = {"solver": "alf", "n_steps": 40, "breakpoints": None}
    _, wanted = gradients(module, z0, inputs, **options)
    bound = 0.1 if mode == "adjoint" else 1e-10  # across the jump the adjoint of alf is of order 1
    for f in (module, lambda z, l: module(z, l), module.forward):
        assert difference(gradients(f, z0, inputs, gradient=mode, **options)[1], wanted) < bound
    late = state(3)
    if mode != "checkpoint":
        with pytest.raises(RuntimeError, match=r"f depends on a tensor of shape \(3,\)"):
            gradients(lambda z, l: z * late if l > 0.5 else z, z0, [z0], gradient=mode, **options)
    _, got = gradients(lambda z, l: z * late if l > 0.5 else z, z0, [late], gradient=mode, params=(late,), **options)
    assert got[0].abs().min() > 0


@pytest.mark.parametrize("mode", ["checkpoint_recursive", "reversible", "adjoint"])
@ADJOINT
def test_what_cannot_be_reached_or_would_be_wrong_is_refused(mode):
    z0, leaf = state(2, 3), state(3)
    made, options = leaf * 2, {"solver": "alf", "n_steps": 8, "gradient": mode}

    def hidden(z, l):
        with torch._C.DisableTorchFunction():
            return z * made

    with pytest.raises(ValueError, match="cannot reach a tensor that f depends on, made by MulBackward0"):
        solve(hidden, z0, **options)
    solve(hidden, z0, params=(made,), **options).z.sum().backward(retain_graph=True)
    assert leaf.grad.abs().max() > 0
    with pytest.raises(RuntimeError, match="not among params"):
        solve(hidden, z0, params=(z0,), **options).z.sum().backward()
    hooked = state(3)
    hooked.register_hook(lambda g: 2 * g)
    with pytest.raises(ValueError, match="would call the hook"):
        solve(lambda z, l: z * hooked, z0, **options)
    solution = solve(lambda z, l: z * leaf, z0, **options)
    with torch.no_grad():
        leaf.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        solution.z.sum().backward()
    with pytest.raises(ValueError, match=f"gradient='{mode}' works outside autograd and cannot be traced"):
        torch.func.grad(lambda z: solve(torch.sin and (lambda z, l: z), z, **options).z.sum())(z0.detach())
    with pytest.raises(TypeError, match="params must hold tensors, got str"):
        solve(lambda z, l: z, z0, params=("w",), **options)


def test_params_are_for_the_modes_that_need_them():
    for options in ({"n_steps": 2}, {"solver": "dopri5"}):
        with pytest.raises(ValueError, match="params is for gradient modes that cannot find them"):
            solve(lambda z, l: z, state(2), params=(state(2),), **options)
    w = state(2)
    for params in ((w,), w, (x for x in (w,)), [w.detach(), w]):
        assert solve(lambda z, l: z * w, state(2), n_steps=2, gradient="checkpoint", params=params).nfe == 8


def test_what_f_raises_comes_through_in_every_mode():
    class Own(Exception):
        pass

    def f(z, l):
        raise Own

    for mode in ("backprop", *WHOLE):
        with warnings.catch_warnings(), pytest.raises(Own):
            warnings.simplefilter("ignore", UserWarning)
            solve(f, state(2), solver="alf", n_steps=2, gradient=mode)
    for k in ("no tensor", torch.zeros(3)):
        with pytest.raises((TypeError, ValueError), match="f must return an increment shaped like the state"):
            solve(lambda z, l, k=k: k, state(2), solver="alf", n_steps=2, gradient="reversible")


def test_nothing_is_recorded_where_no_gradient_is_wanted():
    f, z0 = net(), state(2, 3)
    with torch.no_grad():
        for mode in WHOLE:
            assert not solve(f, z0, solver="alf", n_steps=4, gradient=mode).z.requires_grad
    for parameter in f.parameters():
        parameter.requires_grad_(False)
    z = solve(f, z0.detach(), solver="alf", n_steps=4, gradient="reversible").z
    assert not z.requires_grad
    (gradient,) = torch.autograd.grad(solve(f, z0, solver="alf", n_steps=4, gradient="reversible").z.sum(), z0)
    assert gradient.abs().min() > 0


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
