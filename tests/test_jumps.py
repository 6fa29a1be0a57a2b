"""A field that jumps in l without saying so: adaptive solves warn, name the depth, and are silent otherwise."""

import contextlib
import re
import warnings

import pytest
import torch

import solvers
from solvers.problems import PROBLEMS


def relay(at, width=0.0):
    """z' = 1 - z, then -1 - z; ``width``: of a smooth passage in between."""
    def f(z, l):
        u = torch.tanh((at - l) / width) if width else torch.where(l < at, 1.0, -1.0)
        return u - z

    return f


@pytest.mark.parametrize("solver", ["dopri5", "bosh3", "dopri8", "adaptive_heun"])
@pytest.mark.parametrize(("span", "at"), [((0.0, 1.0), 0.4137), ((2.0, -1.0), 0.123)])
def test_a_jump_is_named_with_its_depth(solver, span, at):
    z = torch.full((3,), 0.3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="breakpoints") as caught:
        solvers.solve(relay(at), z, span=span, solver=solver, rtol=1e-6, atol=1e-8)
    assert caught[0].filename == __file__
    assert float(re.search(r"near l = ([-\d.e]+),", str(caught[0].message))[1]) == pytest.approx(at, abs=2e-3)


def test_padding_that_is_nan_hides_no_jump():
    z = torch.full((2, 4, 3), 0.3, dtype=torch.float64)
    mask = torch.ones(2, 4, dtype=torch.bool)
    z[1, 2:], mask[1, 2:] = torch.nan, False
    with pytest.warns(UserWarning, match="jump"):
        solvers.solve(relay(0.4137), z, solver="dopri5", rtol=1e-6, atol=1e-8, mask=mask)


def test_nothing_is_said_where_breakpoints_are_given_or_f_is_only_steep():
    z = torch.full((3,), 0.3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solvers.solve(relay(0.4137), z, solver="dopri5", rtol=1e-6, atol=1e-8, breakpoints=[0.4137])
        for width in (0.1, 0.01, 0.001):
            solvers.solve(relay(0.4137, width), z, solver="dopri5", rtol=1e-6, atol=1e-8)


def test_the_warning_costs_no_evaluations_that_count_and_no_random_numbers():
    z = torch.full((3,), 0.3, dtype=torch.float64)
    calls = []

    def f(z, l):
        calls.append(float(l))
        return relay(0.4137)(z, l)

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="jump"):
        solution = solvers.solve(f, z, solver="dopri5", rtol=1e-6, atol=1e-8)
    assert solution.nfe == len(calls) - 3
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("name", [name for name, p in PROBLEMS.items() if not getattr(p, "stiff", False)])
def test_no_problem_of_the_collection_is_taken_for_one_that_jumps(name):
    problem = PROBLEMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(solvers.SolverError):  # of a stiff one
            solvers.solve(problem.f, problem.z0, span=problem.span, solver="dopri5", rtol=1e-5, atol=1e-7,
                          max_nfe=5000)
