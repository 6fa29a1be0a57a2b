"""Solver invariance on cases whose answer is known."""

import math

import pytest
import torch

from odeformer.invariance import invariance, relative_distances


def test_the_score_of_a_linear_field_is_that_of_its_closed_forms():
    """dz/dl = -z over [0, 1]: euler with n steps ends in (1 - 1/n)^n z, the flow in z / e, for all samples alike."""
    z = torch.randn(5, 3, 4, dtype=torch.float64)
    ends = {"exact": math.exp(-1), "euler:1": 0.0, "euler:2": 0.25}
    states = {name: factor * z for name, factor in ends.items()}
    outputs = {name: x.mean(1) for name, x in states.items()}
    found = invariance(states, outputs, "exact")
    wanted = {name: abs(factor - ends["exact"]) / ends["exact"] for name, factor in ends.items()}
    assert found.distances == pytest.approx(wanted, abs=1e-12)
    assert found.score == pytest.approx(1 - (wanted["euler:1"] + wanted["euler:2"]) / 2)
    largest = z.mean(1).abs().max().item() * ends["exact"]
    assert found.output_differences["euler:1"] == pytest.approx(largest)
    assert found.agreement["euler:2"] == 1  # scaling moves no maximum
    assert found.output_differences["exact"] == 0 and found.distances["exact"] == 0


def test_equal_states_score_1_and_what_is_far_or_not_finite_is_at_the_distance_1():
    z = torch.randn(3, 2, 4)
    assert invariance({"a": z, "b": z.clone()}, {"a": z, "b": z.clone()}, "a").score == 1
    far = z.clone()
    far[0], far[1] = torch.nan, 100 * z[1]
    assert relative_distances(far, z).tolist() == [1, 1, 0]
    assert relative_distances(torch.zeros(2, 1, 3), torch.zeros(2, 1, 3)).tolist() == [0, 0]
    assert relative_distances(torch.ones(1, 1, 3), torch.zeros(1, 1, 3)).tolist() == [1]
    assert invariance({"a": z, "b": far}, {"a": z, "b": far}, "a").output_differences["b"] == math.inf


def test_padding_counts_for_nothing():
    z, mask = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]])
    other = z.clone()
    other[~mask] = torch.nan
    found = invariance({"a": z, "b": other}, {"a": z, "b": other}, "a", mask)
    assert found.score == 1 and found.output_differences["b"] == 0 and found.agreement["b"] == 1


def test_predictions_agree_where_their_largest_output_is_the_same():
    z = torch.zeros(4, 1, 2)
    outputs = {"a": torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]]),
               "b": torch.tensor([[1.0, 0], [0, 1], [0, 1], [0, 2]])}
    assert invariance({"a": z, "b": z}, outputs, "a").agreement["b"] == 0.75
    single = {"a": torch.zeros(4, 1), "b": torch.ones(4, 1)}
    assert invariance({"a": z, "b": z}, single, "a").agreement["b"] is None


def test_one_solver_or_an_unknown_reference_is_refused():
    z = torch.zeros(1, 1, 1)
    for states, reference in (({"a": z}, "a"), ({"a": z, "b": z}, "c")):
        with pytest.raises(ValueError, match="at least two and the reference"):
            invariance(states, states, reference)
