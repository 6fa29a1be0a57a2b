"""Adaptive solves that fail, are refused or are retried: poles, NaN, bounded work, wrong options."""

import dataclasses
import math

import pytest
import torch
from adaptive_pairs import F64, LEADING, PAIRS

from solvers import SolverError, Tableau, get_solver, solve
from solvers.adaptive import Adaptive
from solvers.coefficients import EXPLICIT


def sharp(z, l):
    return -z.sqrt()


def test_a_trial_step_that_hits_nan_is_rejected_and_retried():
    # z = (1 - l / 2)^2; a first step over the whole span takes the root of a negative number
    for name in LEADING:
        pair = dataclasses.replace(PAIRS[name], first_step=1.9)
        out = solve(sharp, torch.ones(1, 1, dtype=F64), span=(0.0, 1.9), solver=pair, rtol=1e-5, atol=1e-7)
        assert out.n_rejected > 0
        assert out.z.item() == pytest.approx(0.05**2, abs=2e-4)


def test_nan_where_the_first_step_is_chosen_does_not_stop_the_solve():
    # u = 1 - z = (sqrt(0.001) - l / 2)^2: the probe of the first step moves z by 1 %, to where the root is NaN
    out = solve(lambda z, l: (1 - z).sqrt(), torch.full((1, 1), 0.999, dtype=F64), span=(0.0, 0.05), solver="dopri5")
    assert 1 - out.z.item() == pytest.approx((math.sqrt(0.001) - 0.025) ** 2, abs=1e-5)
    assert out.n_steps + out.n_rejected <= 12


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", LEADING)
def test_a_pole_ends_in_bounded_work_and_says_where(name, dtype):
    with pytest.raises(SolverError) as caught:
        solve(lambda z, l: z * z, torch.ones(1, 1, dtype=dtype), span=(0.0, 2.0), solver=PAIRS[name],
              rtol=1e-5 if PAIRS[name].order > 2 else 1e-2)
    error = caught.value
    assert 0.9 < error.l < 1.01 and 0 < error.nfe <= 10_000 and 0 < error.h < 0.01
    assert all(word in str(error) for word in ("l = ", "h = ", "NFE = ", "pole"))


def test_a_pole_met_backwards_has_a_negative_step():
    with pytest.raises(SolverError) as caught:
        solve(lambda z, l: -z * z, torch.ones(1, 1, dtype=F64), span=(0.0, -2.0), solver="dopri5")
    assert -1.01 < caught.value.l < -0.9 and -0.01 < caught.value.h < 0


def test_nan_at_the_start_says_which_share():
    z0 = torch.ones(4, 4, dtype=F64)
    z0[0, 0] = math.nan
    with pytest.raises(SolverError, match=r"z0 is not finite \(6\.2% of its entries\).*NFE = 0"):
        solve(lambda z, l: -z, z0, solver="dopri5")
    bad = torch.zeros(4, 4, dtype=F64)
    bad[:, 1] = math.inf
    with pytest.raises(SolverError, match=r"f is not finite at the start of the piece \(25\.0% of its entries\)"):
        solve(lambda z, l: bad - z, torch.ones(4, 4, dtype=F64), solver="dopri5")


def test_the_share_of_bad_entries_counts_real_ones():
    z0, mask = torch.ones(2, 4, dtype=F64), torch.tensor([True, False])
    z0[0, 0] = z0[1, 0] = z0[1, 1] = math.nan
    with pytest.raises(SolverError, match=r"25\.0%"):
        solve(lambda z, l: -z, z0, solver="dopri5", mask=mask)


def test_a_span_that_float32_cannot_resolve_is_refused():
    for span in ((1e8, 1e8 + 1), (1.0, 1.0 + 2e-7)):
        with pytest.raises(SolverError, match=r"cannot resolve the span.*float64"):
            solve(lambda z, l: -z, torch.ones(1, 1), span=span, solver="dopri5")
        moving = (torch.tensor(span[0], dtype=F64, requires_grad=True), torch.tensor(span[1], dtype=F64))
        with pytest.raises(SolverError, match="cannot resolve"):
            solve(lambda z, l: -z, torch.ones(1, 1), span=moving, solver="dopri5")
    assert solve(lambda z, l: -z, torch.ones(1, 1, dtype=F64), span=(1e8, 1e8 + 1), solver="dopri5").n_steps > 0


def test_a_stiff_problem_ends_at_max_nfe_with_a_step():
    with pytest.raises(SolverError, match=r"more than max_nfe = 500 .*steps taken.*implicit") as caught:
        solve(lambda z, l: -1e6 * (z - l), torch.zeros(1, 1, dtype=F64), span=(0.0, 1.0), solver="dopri5", max_nfe=500)
    assert caught.value.nfe <= 500 and 0 < caught.value.h < 1 and 0 <= caught.value.l < 1


def test_overflow_is_an_error():
    with pytest.raises(SolverError):
        solve(lambda z, l: 50 * z, torch.ones(1, 1), span=(0.0, 10.0), solver="dopri5")


def test_a_field_that_redraws_randomness_is_blamed_within_max_nfe():
    def noisy(z, l):
        return torch.nn.functional.dropout(z, 0.3)

    with pytest.raises(SolverError, match=r"different values at one and the same point.*dropout") as caught:
        solve(noisy, torch.ones(2, 8), solver="dopri5", rtol=1e-7, atol=1e-8, max_nfe=300)
    assert caught.value.nfe <= 300


@pytest.mark.parametrize("error", [AssertionError("underflow in dt 1e-9"), ValueError("mine"), KeyError("k"),
                                   SolverError("inner", l=0.0, h=0.0, nfe=1, advice="none")])
def test_what_f_raises_passes_unchanged(error):
    calls = []

    def f(z, l):
        calls.append(l)
        if len(calls) > 3:
            raise error
        return -z

    with pytest.raises(type(error)) as caught:
        solve(f, torch.ones(1, 2), solver="dopri5")
    assert caught.value is error


def test_a_field_of_another_shape_or_kind_is_refused():
    with pytest.raises(ValueError, match="shaped like the state"):
        solve(lambda z, l: z[:1], torch.ones(2, 3), solver="dopri5")
    with pytest.raises(TypeError, match="complex"):
        solve(lambda z, l: 1j * z, torch.ones(2, 3), solver="dopri5")


@pytest.mark.parametrize("options, word", [
    ({"first_step": 0.0}, "first_step must be above 0"), ({"max_step": -1.0}, "max_step"), ({"safety": 1.5}, "safety"),
    ({"min_factor": 2.0}, "min_factor"), ({"max_factor": 1.0}, "max_factor"), ({"min_step": -1.0}, "at least 0")])
def test_options_out_of_range_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        get_solver("dopri5", **options)


def test_options_of_another_kind_are_refused():
    for options in ({"first_step": "x"}, {"safety": None}, {"max_step": True}, {"norm": 3}):
        with pytest.raises(TypeError, match=next(iter(options))):
            get_solver("dopri5", **options)


def test_tableaus_that_cannot_estimate_an_error_are_refused():
    with pytest.raises(ValueError, match="embedded row"):
        Adaptive(EXPLICIT["rk4"])
    with pytest.raises(ValueError, match="implicit"):
        Adaptive(Tableau([[0.5]], [1.0], b_hat=[1.0]))
    with pytest.raises(ValueError, match="b_hat must differ"):
        Adaptive(Tableau([[], [0.5]], [0, 1], b_hat=[0, 1]))
    with pytest.raises(TypeError, match="Tableau"):
        Adaptive("dopri5")


def test_a_missing_torchdiffeq_is_an_import_error_that_says_what_to_install(monkeypatch):
    import sys

    from solvers.engine import engine

    getattr(engine, "cache_clear", lambda: None)()
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match="pip install torchdiffeq"):
        solve(lambda z, l: -z, torch.ones(2, 3), solver="dopri5")
