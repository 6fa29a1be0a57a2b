"""Learning-rate schedules: ``SCHEDULES[name](step, warmup=, total=, **options)`` is a factor in [0, 1].

Steps count from 1. ``total``: the length of the run, without effect on ``constant`` and ``inverse_sqrt``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from odeformer.tables import finite


def constant(step: int, *, warmup: int, total: int) -> float:
    """Linear warm-up, then 1."""
    return min(1.0, step / max(1, warmup))


def cosine(step: int, *, warmup: int, total: int, floor: float = 0.0) -> float:
    """Linear warm-up, then half a cosine down to ``floor`` at ``total`` (Loshchilov & Hutter 2017)."""
    check_share("floor", floor)
    if step <= warmup:
        return step / max(1, warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def inverse_sqrt(step: int, *, warmup: int, total: int) -> float:
    """Linear warm-up, then sqrt(warmup / step) (Vaswani et al. 2017, section 5.3)."""
    warmup = max(1, warmup)
    return min(step / warmup, math.sqrt(warmup / step))


def wsd(step: int, *, warmup: int, total: int, decay: float = 0.2, shape: str = "sqrt", floor: float = 0.0) -> float:
    """Warm-up, stable, decay (Hu et al. 2024): linear warm-up, then 1, then down to ``floor`` in the last share
    ``decay`` of the run.

    ``shape`` of the fall at the part x of it: "sqrt", 1 - sqrt(x) (Hägele et al. 2024), or "linear", 1 - x. Up to
    where the fall begins, a run does not depend on its length, so that it can be lengthened from there.
    """
    check_share("decay", decay)
    check_share("floor", floor)
    if shape not in FALLS:
        raise ValueError(f"shape must be one of {', '.join(FALLS)}, got {shape!r}")
    n_decay = round(decay * total)
    rise, begin = min(1.0, step / max(1, warmup)), total - n_decay
    if step <= begin or not n_decay:
        return rise
    return min(rise, floor + (1 - floor) * FALLS[shape](min(1.0, (step - begin) / n_decay)))


def decay_begins(step: int, *, total: int, decay: float = 0.2, **options: object) -> bool:
    """Whether ``step`` is the last one before the fall of ``wsd``."""
    return step == total - round(decay * total)


FALLS: dict[str, Callable[[float], float]] = {"sqrt": lambda x: 1 - math.sqrt(x), "linear": lambda x: 1 - x}
SCHEDULES: dict[str, Callable[..., float]] = {"constant": constant, "cosine": cosine, "inverse_sqrt": inverse_sqrt,
                                              "wsd": wsd}
STABLE_ENDS: dict[str, Callable[..., bool]] = {"wsd": decay_begins}  # schedules with a last step worth going on from


def check_share(name: str, value: float) -> None:
    """Raises ValueError unless 0 <= value <= 1."""
    if finite(name, value, least=0) > 1:
        raise ValueError(f"{name} must be a share of at most 1, got {value!r}")


def agree(factor: Callable[..., float], step: int, totals: tuple[int, int]) -> bool:
    """Whether runs of both lengths have had the same factors up to ``step``; ``factor``: (step, total=) -> factor."""
    return all(factor(i, total=totals[0]) == factor(i, total=totals[1]) for i in range(1, step + 1))
