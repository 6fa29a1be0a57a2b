"""solve() compiled and transformed, the operations it adds to those of f, and what is kept between solves."""

import math

import pytest
import torch
from solve_problem import EXPLICIT, F64, LEAN, coupled
from torch.utils._python_dispatch import TorchDispatchMode

from solvers import SOLVERS, solve


def test_vmap_over_one_tensor_of_a_tuple():
    b = torch.ones(3, 2, dtype=F64)

    def run(b):
        return solve(lambda z, l: (-z[0], -z[1]), (torch.ones(2, dtype=F64), b), n_steps=4).z[1]

    got = torch.func.vmap(run)(b)
    assert (got - math.exp(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("name", LEAN)
def test_a_fixed_step_solve_compiles_to_one_graph_with_equal_results(name):
    z = torch.randn(4, 2)
    n_steps = max(1, getattr(EXPLICIT[name], "n_history", 1)) + 1  # the last one has all the past that it can have

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
