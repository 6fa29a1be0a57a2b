"""Numbers as a report says them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def number(x: float) -> str:
    """Three digits: 0.123, 12.3, 1.2e-05.

    >>> number(1234.5), number(-0.00001234), number(2.0)
    ('1,234', '-1.23e-05', '2')
    """
    x = float(x)
    if math.isnan(x):
        return "not defined"
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    if x == 0:
        return "0"
    if 1000 <= abs(x) < 1e6:
        return f"{x:,.0f}"
    return f"{x:.3g}"


def percent(share: float) -> str:
    """A share.

    >>> percent(0.123), percent(1.0), percent(0.9999), percent(0.001)
    ('12 %', '100 %', 'over 99 %', 'under 1 %')
    """
    if math.isnan(share):
        return "not defined"
    if 0 < share < 0.01:
        return "under 1 %"
    if 0.99 < share < 1:
        return "over 99 %"
    return f"{100 * share:.0f} %"


def counted(n: int, thing: str, things: str | None = None) -> str:
    """How many of a thing.

    >>> counted(1, "layer"), counted(3, "layer")
    ('1 layer', '3 layers')
    """
    return f"{n:,} {thing if n == 1 else things or f'{thing}s'}"


def listed(words: Sequence[Any], last: str = "and") -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else "none"


def times(ratio: float) -> str:
    """A factor.

    >>> times(2.5), times(1.02)
    ('2.5 times', 'about once')
    """
    return "about once" if 0.95 < ratio < 1.05 else f"{number(ratio)} times"


def median(x: torch.Tensor) -> float:
    """Of what is not nan; nan if nothing is."""
    return float(torch.nanmedian(x.double()))


def largest(x: torch.Tensor) -> tuple[float, int]:
    """The largest value and where it is; nan counts as the smallest."""
    i = int(x.nan_to_num(-math.inf).argmax())
    return float(x[i]), i


def graded(x: float, *steps: tuple[float, str], otherwise: str) -> str:
    """The words of the first bound that x is below.

    >>> graded(0.2, (0.1, "small"), (0.5, "middling"), otherwise="large")
    'middling'
    """
    return next((words for bound, words in steps if x < bound), otherwise)
