"""Results that are the same for every solve over the same depths, kept for the next one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch

LONGEST = 257  # of the arguments whose result is kept


def kept(length: Callable[..., int]) -> Callable[[Callable], Callable]:
    """A function that keeps its last results, except those whose arguments are longer than LONGEST, and except
    under torch.compile, which warns of lru_cache and keeps them itself. ``__wrapped__`` always makes a new one."""
    def decorate(function: Callable) -> Callable:
        keeping = lru_cache(maxsize=32)(function)

        @wraps(function)
        def call(*key: Any) -> Any:
            anew = torch.compiler.is_compiling() or length(*key) > LONGEST
            return function(*key) if anew else keeping(*key)

        return call

    return decorate
