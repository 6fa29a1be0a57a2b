"""Differences between what two configurations gave, seed by seed, with an interval: better, worse, or a tie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
from scipy import stats

DRAWS = 20_000  # resamples, where there are too many to list them all
LISTED = 5  # pairs up to which all n^n resamples are listed


@dataclass(frozen=True)
class Difference:
    """The mean of n paired differences with a 95 % bootstrap interval; prints as ``+0.012 [-0.003, +0.020]``."""

    mean: float
    low: float
    high: float
    n: int

    def verdict(self, higher_is_better: bool = True) -> str:
        """"better", "worse", "tie" where the interval holds 0, "one seed" where there is no interval."""
        if self.n < 2:
            return "one seed"
        if self.low <= 0 <= self.high:
            return "tie"
        return "better" if (self.mean > 0) is higher_is_better else "worse"

    def shown(self, digits: int = 3) -> str:
        """With that many digits behind the point."""
        if self.n < 2:
            return f"{self.mean:+.{digits}f}"
        return f"{self.mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"

    def __str__(self) -> str:
        return self.shown()


def by_seed(rows: Iterable[Mapping[str, Any]], name: str) -> dict[Any, float]:
    """{seed: value} of rows that differ in nothing but the seed. Raises ValueError where two have the same one."""
    values: dict[Any, float] = {}
    for row in rows:
        seed = row["case"]["seed"]
        if seed in values:
            raise ValueError(f"seed {seed} has more than one row: {name} cannot be paired by seed")
        values[seed] = row[name]
    return values


def difference(values: Mapping[Any, float], base: Mapping[Any, float]) -> Difference:
    """values - base, paired by key (the seed, or an example); keys that only one of them has are left out.

    The interval: percentiles of the bootstrapped mean, drawn apart for small n so that a t interval's coverage is kept
    where the data are normal (Hesterberg 2015, "What teachers should know about the bootstrap", section 5.3: expanded
    percentiles). For three seeds that is the range of the differences: where nothing differs, all three have one sign
    in a quarter of the cases, so that it is one of 75 %; for five in a sixteenth. Take more seeds before you believe a
    small difference. Two infinite values of one sign (both diverged) differ by 0; a difference that is infinite leaves
    the interval at the range. Raises ValueError where nothing pairs, or for NaN.
    """
    keys = sorted(set(values) & set(base))
    if not keys:
        raise ValueError(f"nothing to pair: one has {sorted(values)}, the other {sorted(base)}")
    x = np.array([0.0 if values[key] == base[key] else values[key] - base[key] for key in keys], dtype=float)
    n = len(x)
    if np.isnan(x).any():
        raise ValueError("a value is NaN: give inf for a run that diverged, or leave it out")
    if n < 2 or not np.isfinite(x).all():
        return Difference(float(x.mean()), float(x.min()), float(x.max()), n)
    tail = stats.norm.cdf(stats.t.ppf(0.025, n - 1) * (n / (n - 1)) ** 0.5)
    low, high = np.quantile(x[resamples(n)].mean(1), [tail, 1 - tail])
    return Difference(mean(x.tolist()), float(low), float(high), n)


@cache
def resamples(n: int) -> np.ndarray:
    """Rows of n indices drawn with replacement: all of them where that is few, else always the same draws."""
    if n <= LISTED:
        return np.array(list(product(range(n), repeat=n)))
    return np.random.default_rng(0).integers(n, size=(DRAWS, n))
