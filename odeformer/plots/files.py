"""Figures on disk."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def save(figure: Figure | Axes, path: str | os.PathLike) -> Path:
    """Write a figure, or the one that axes are on, in the format of the suffix of ``path``; returns the path.

    It is written beside and renamed, so that no reader meets half a file. Raises ValueError for a suffix that is no
    format, TypeError for anything but a figure or axes.
    """
    if not isinstance(figure, Figure | Axes):
        raise TypeError(f"figure must be a matplotlib Figure or Axes, got {type(figure).__name__}")
    while not isinstance(figure, Figure):  # axes may be on a part of a figure
        figure = figure.figure
    path = Path(path)
    suffix, known = path.suffix[1:].lower(), figure.canvas.get_supported_filetypes()
    if suffix not in known:
        formats = ", ".join(f".{name}" for name in sorted(known))
        raise ValueError(f"path must end in one of {formats}; got {path.name!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path must be in a folder that exists; {path.parent} does not")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(beside, format=suffix, dpi=200, bbox_inches="tight")  # labels beside axes are part of it
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path
