"""Learning-rate schedules: ``SCHEDULES[name](step, warmup=, total=)`` is a factor in [0, 1]; steps count from 1."""

from __future__ import annotations

import math
from collections.abc import Callable


def constant(step: int, *, warmup: int, total: int) -> float:
    """Linear warm-up, then 1."""
    return min(1.0, step / max(1, warmup))


def cosine(step: int, *, warmup: int, total: int) -> float:
    """Linear warm-up, then half a cosine down to 0 at ``total`` (Loshchilov & Hutter 2017)."""
    if step <= warmup:
        return step / max(1, warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def inverse_sqrt(step: int, *, warmup: int, total: int) -> float:
    """Linear warm-up, then sqrt(warmup / step) (Vaswani et al. 2017, section 5.3)."""
    warmup = max(1, warmup)
    return min(step / warmup, math.sqrt(warmup / step))


SCHEDULES: dict[str, Callable[..., float]] = {"constant": constant, "cosine": cosine, "inverse_sqrt": inverse_sqrt}
