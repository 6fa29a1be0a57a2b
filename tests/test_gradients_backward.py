"""The backward pass of each gradient mode: what it keeps, evaluates again and refuses."""

import warnings
import weakref

import pytest
import torch
from gradient_modes import ADJOINT, EXACT, PAIRS, difference, gradients, net, saved_bytes, state
from torch import nn

from solvers import SOLVERS, SolverError, get_solver, solve
from solvers.solve import WHOLE


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
