"""The checks that benchmarks/checks.py puts to every library, put to ours; and that they can fail."""

import pytest
import torch

from benchmarks.checks import CHECKS, LIBRARIES

OURS = [name for name in LIBRARIES if name.startswith("solvers")]


@pytest.mark.parametrize("library", OURS)
@pytest.mark.parametrize("check", list(CHECKS))
def test_our_adaptive_methods_pass_every_check(library, check):
    with torch.no_grad():
        CHECKS[check](LIBRARIES[library])


@pytest.mark.parametrize("check", list(CHECKS))
def test_an_integrator_that_returns_its_input_fails_every_check_but_the_idle_one(check):
    def idle(f, z0, span, rtol, atol):
        return z0, 10**9

    with pytest.raises(AssertionError):
        CHECKS[check](idle)
