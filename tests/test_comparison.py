"""Paired differences and their intervals."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from benchmarks.comparison import by_seed, difference


def test_of_three_seeds_the_interval_is_the_range():
    """All 27 resamples listed by hand; the expanded percentiles lie beyond the outermost."""
    found = difference({0: 1.0, 1: 2.5, 2: 2.0}, {0: 0.5, 1: 1.0, 2: 1.8})
    assert found.n == 3
    assert found.mean == pytest.approx((0.5 + 1.5 + 0.2) / 3)
    assert (found.low, found.high) == (pytest.approx(0.2), pytest.approx(1.5))


def test_of_five_seeds_the_interval_is_that_of_all_resamples():
    x = [0.3, -0.1, 0.2, 0.4, 0.05]
    means = sorted(sum(draw) / 5 for draw in product(x, repeat=5))
    tail = stats.norm.cdf(-stats.t.ppf(0.975, 4) * np.sqrt(5 / 4))
    low, high = np.quantile(means, tail), np.quantile(means, 1 - tail)
    found = difference(dict(enumerate(x)), dict.fromkeys(range(5), 0.0))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.low < np.quantile(means, 0.025)


def test_for_many_pairs_the_interval_is_that_of_student():
    x = np.random.default_rng(1).normal(0.2, 1.0, 200)
    found = difference(dict(enumerate(x)), dict.fromkeys(range(200), 0.0))
    half = stats.t.ppf(0.975, 199) * x.std(ddof=1) / np.sqrt(200)
    assert found.low == pytest.approx(x.mean() - half, abs=0.02)
    assert found.high == pytest.approx(x.mean() + half, abs=0.02)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """5 seeds of normal differences around 0: a miss in at most 10 % (5 % wanted, 1/16 at best without tails)."""
    rng = np.random.default_rng(0)
    misses = 0
    for _ in range(400):
        found = difference(dict(enumerate(rng.normal(size=5))), dict.fromkeys(range(5), 0.0))
        misses += found.verdict() != "tie"
    assert 0.02 < misses / 400 < 0.1


@pytest.mark.parametrize(("values", "higher", "verdict"), [
    ((1.0, 1.2, 1.1), True, "better"), ((1.0, 1.2, 1.1), False, "worse"), ((-1.0, -1.2, -1.1), True, "worse"),
    ((-1.0, -1.2, -1.1), False, "better"), ((-0.1, 0.2, 0.1), True, "tie"), ((0.0, 0.0, 0.0), True, "tie"),
    ((0.5,), True, "one seed")])
def test_the_verdict_is_a_tie_where_the_interval_holds_zero(values, higher, verdict):
    found = difference(dict(enumerate(values)), dict.fromkeys(range(3), 0.0))
    assert found.verdict(higher) == verdict


def test_pairs_are_made_by_seed_whatever_the_order():
    found = difference({2: 3.0, 0: 1.0, 7: 100.0}, {0: 0.0, 2: 1.0})
    assert (found.n, found.mean) == (2, 1.5)
    assert str(difference({0: 1.0}, {0: 0.5})) == "+0.500"
    assert found.shown(1) == "+1.5 [+1.0, +2.0]"
    with pytest.raises(ValueError, match="nothing to pair"):
        difference({0: 1.0}, {1: 1.0})


def test_a_seed_with_two_rows_is_refused():
    rows = [{"case": {"seed": 1}, "loss": 2.0}, {"case": {"seed": 0}, "loss": 3.0}]
    assert by_seed(rows, "loss") == {1: 2.0, 0: 3.0}
    with pytest.raises(ValueError, match="seed 1 has more than one row"):
        by_seed([*rows, rows[0]], "loss")


def test_a_loss_that_is_infinite_leaves_the_range_as_interval_and_nan_is_refused():
    found = difference({0: float("inf"), 1: 2.0}, {0: 1.0, 1: 1.0})
    assert (found.mean, found.low, found.high) == (float("inf"), 1.0, float("inf"))
    assert found.verdict(higher_is_better=False) == "worse"
    both = difference({0: float("inf"), 1: 2.0}, {0: float("inf"), 1: 1.0})
    assert (both.mean, both.n) == (0.5, 2)
    with pytest.raises(ValueError, match="NaN"):
        difference({0: float("nan"), 1: 2.0}, {0: 1.0, 1: 1.0})
