"""What the functions take: numpy arrays, tensors of any dtype and device, lists; read into float64 or complex128."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def read(name: str, value: Any, dtype: type = float) -> np.ndarray:
    """The value as an array of that dtype. Raises TypeError where it holds no such numbers."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().resolve_conj().resolve_neg()
        value = value.float().numpy() if str(value.dtype) in ("torch.bfloat16", "torch.float16") else value.numpy()
    try:
        found = np.asarray(value)
        if found.dtype == object or found.dtype.kind not in "biufc":
            found = np.array([read(name, x, dtype) for x in value]) if isinstance(value, list | tuple) else None
        if found is None or (found.dtype.kind == "c" and dtype is float):
            raise TypeError
        return found.astype(dtype)
    except (TypeError, ValueError, RecursionError):
        kind = "complex numbers" if dtype is complex else "real numbers"
        got = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{name} must be an array, a tensor or nested lists of {kind}, all rows of one length; got "
                        f"{got}") from None


def shaped(name: str, value: Any, axes: str, *, dtype: type = float, more: bool = False,
           missing: bool = False) -> np.ndarray:
    """The value with the axes that ``axes`` names, such as "steps, tokens", each of at least 1 entry.

    ``more``: further axes may follow. ``missing``: nan may stand for places without a number; infinite numbers may
    not. Raises ValueError otherwise.
    """
    found = read(name, value, dtype)
    n = len(axes.split(","))
    if found.ndim < n or (found.ndim > n and not more) or 0 in found.shape:
        tail = ", ..." if more else ""
        raise ValueError(f"{name} must have the shape ({axes}{tail}) with no axis empty, got {found.shape}")
    if np.isinf(found).any() or (not missing and np.isnan(found).any()):
        raise ValueError(f"{name} must be finite" + (" or nan" if missing else ""))
    return found


def depths_of(depths: Any, n: int, what: str) -> np.ndarray:
    """n depths, 0 to n - 1 if None. Raises ValueError for another number of them, or if they turn back."""
    if depths is None:
        return np.arange(n, dtype=float)
    found = shaped("depths", depths, "points")
    turns = np.diff(found)
    if len(found) != n or not ((turns > 0).all() or (turns < 0).all()):
        raise ValueError(f"depths must be {n} increasing or decreasing numbers, one for each of the {what}; got "
                         f"{len(found)}" + (" that turn back" if len(found) == n else ""))
    return found


def labelled(value: Any) -> dict[str | None, Any]:
    """A mapping from labels as it is, anything else as the one entry without a label. Raises ValueError for none."""
    entries = dict(value) if isinstance(value, Mapping) else {None: value}
    if not entries:
        raise ValueError("there must be at least one entry to draw, and the mapping is empty")
    return entries


def pairs(name: str, value: Any, axes: tuple[str, str], *, missing: bool = False) -> dict[str | None,
                                                                                      tuple[np.ndarray, np.ndarray]]:
    """{label: (x, y)} or one (x, y), each two arrays of one length. ``missing``: y may hold nan and infinite numbers.

    Raises ValueError where they are not that.
    """
    found = {}
    for label, entry in labelled(value).items():
        here = name if label is None else f"{name}[{label!r}]"
        if isinstance(entry, Mapping | str) or not hasattr(entry, "__len__") or len(entry) != 2:
            raise ValueError(f"{here} must be a pair ({axes[0]}, {axes[1]}), got {type(entry).__name__}"
                             + (f" of length {len(entry)}" if hasattr(entry, "__len__") else ""))
        x = shaped(f"{axes[0]} of {here}", entry[0], "points")
        y = read(f"{axes[1]} of {here}", entry[1])
        if y.ndim < 1 or len(y) != len(x) or 0 in y.shape:
            raise ValueError(f"{axes[0]} and {axes[1]} of {here} must be equally long, got {len(x)} numbers and the "
                             f"shape {y.shape}")
        if not missing and not np.isfinite(y).all():
            raise ValueError(f"{axes[1]} of {here} must be finite")
        found[label] = x, y
    return found


def states_of(source: Any) -> tuple[Any, Any]:
    """(states, depths) of a Solution, or (the states themselves, None). Raises ValueError for one that kept none."""
    if not hasattr(source, "states"):
        return source, None
    if source.states is None:
        raise ValueError("the Solution holds no states: ask for them with save_at='steps', or call the model with "
                         "return_solution=True")
    return source.states, getattr(source, "depths", None)
