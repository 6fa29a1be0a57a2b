"""Time series of your own, or of the UEA and UCR archives: files in the ``.ts`` format.

Source and licence are told in the comments at the head of those files, or on the page of the archive.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from odeformer.data.series import Series, drop_points, pad_series
from odeformer.data.text import read_text
from odeformer.data.ts_format import Lines, parse_ts
from odeformer.tables import probability


def series_files(train: str | Path, test: str | Path, *, drop: float = 0.0, seed: int = 0) -> Series:
    """The series of two ``.ts`` files, of unequal length where they are; times count from 0 unless they are given.

    ``drop``: the probability with which a point is left out, drawn once with ``seed``; the others keep their times.

    Raises FileNotFoundError, and ValueError that tells the line for what is no series, and for files that differ in
    channels or classes.
    """
    read = [parse_ts(read_text(path).split("\n"), str(path)) for path in (train, test)]
    return series(read[0].header.name or "series_files", *read, drop=drop, seed=seed)


def series(name: str, train: Lines, test: Lines, *, drop: float = 0.0, seed: int = 0) -> Series:
    """The task made of two files' series."""
    probability("drop", drop)
    if train.header.target == "none" or test.header.target != train.header.target:
        raise ValueError("both files must give classes (@classLabel true ...) or both numbers (@targetLabel true); got "
                         f"{train.header.target} and {test.header.target}")
    if train.header.classes != test.header.classes:
        raise ValueError(f"train has the classes {', '.join(train.header.classes)}, test has "
                         f"{', '.join(test.header.classes)}")
    channels = [lines.values[0].shape[1] for lines in (train, test)]
    if channels[0] != channels[1]:
        raise ValueError(f"train has {channels[0]} channels, test has {channels[1]}")
    generator = torch.Generator().manual_seed(seed)
    parts = [part for lines in (train, test) for part in tensors(lines, drop, generator)]
    return Series(name, train.header.classes, *parts)


def tensors(lines: Lines, drop: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """values, times, mask and y of a file's series."""
    values, times = lines.values, lines.times
    if drop:
        values, times = drop_points(values, times, share=drop, generator=generator)
    if lines.header.classes:
        y = torch.tensor([lines.header.classes.index(y) for y in lines.y], dtype=torch.int64)
    else:
        y = torch.tensor([float(y) for y in lines.y], dtype=torch.float32)
    return *pad_series(values, times), y
