"""What solve() refuses, and what it says of a solve that fails."""

import math
import pickle

import pytest
import torch
from solve_problem import F64, Counted, coupled, start

from solvers import SOLVERS, SolverError, get_solver, solve


@pytest.mark.parametrize("name", ["grid", "save_at", "breakpoints"])
def test_points_that_would_lose_their_gradient_are_refused(name):
    points = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
    amount = {} if name == "grid" else {"n_steps": 4}
    with pytest.raises(ValueError, match=f"{name} must not require grad"):
        solve(lambda z, l: -z, torch.ones(1), **{name: points}, **amount)


def test_a_method_that_evaluates_beyond_its_steps_is_refused_at_breakpoints():
    with pytest.raises(ValueError, match="breakpoints rule out 'yoshida4'"):
        solve(coupled, start(), solver="yoshida4", n_steps=4, breakpoints=[0.5])


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
