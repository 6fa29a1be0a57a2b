"""The ``.ts`` format of time series: a header of ``@key value`` lines, then one series a line.

Channels are parted by colons, values by commas, and the class or the number to predict comes last. With
``@timeStamps true`` a point is ``(time,value)``, its time a number or a date. ``?`` and NaN are missing values. Source
of the format: the sktime and aeon projects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

import torch
from torch import Tensor

POINT = re.compile(r"\(([^(),]*),([^(),]*)\)")


@dataclass(frozen=True)
class Header:
    """What the ``@`` lines say. ``target``: 'class', 'number' or 'none'."""

    name: str = ""
    classes: tuple[str, ...] = ()
    target: str = "none"
    stamped: bool = False
    n_channels: int | None = None


@dataclass(frozen=True)
class Lines:
    """The series of a file: values (points, channels) and times (points,) of each, and what is to be predicted."""

    header: Header
    values: list[Tensor]
    times: list[Tensor]
    y: list[str]


def parse_ts(lines: Iterable[str], path: str) -> Lines:
    """Read a file's lines. Raises ValueError that names ``path`` and the line where something is wrong."""
    header, in_data = Header(), False
    read = Lines(header, [], [], [])
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line[0] in "#%":
            continue
        try:
            if in_data:
                add(read, line)
            elif line.lower() == "@data":
                in_data, read = True, Lines(header, [], [], [])
            else:
                header = headed(header, line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not read.values:
        raise ValueError(f"{path} holds no series: {'nothing follows @data' if in_data else 'it has no @data line'}")
    return read


def headed(header: Header, line: str) -> Header:
    """The header with what one more line says; keys that change nothing here are passed over."""
    if not line.startswith("@"):
        raise ValueError(f"before @data a line must begin with @, # or %, got {line[:40]!r}")
    key, *words = line[1:].split()
    match key.lower(), words:
        case "problemname", [_, *_]:
            return replace(header, name=" ".join(words))
        case "timestamps", [word]:
            return replace(header, stamped=truth(word))
        case "dimensions" | "dimension", [word] if word.isdigit():
            return replace(header, n_channels=int(word))
        case "univariate", [word]:
            return replace(header, n_channels=1) if truth(word) else header
        case "classlabel", [word, *classes]:
            if truth(word) and not classes:
                raise ValueError("@classLabel true must be followed by the classes")
            return replace(header, target="class", classes=tuple(classes)) if truth(word) else header
        case "targetlabel", [word, *_]:
            return replace(header, target="number") if truth(word) else header
        case "missing" | "equallength" | "serieslength", _:
            return header
    raise ValueError(f"this line is not understood: {line[:60]!r}")


def truth(word: str) -> bool:
    """Raises ValueError unless word is true or false."""
    if word.lower() not in ("true", "false"):
        raise ValueError(f"true or false is needed, got {word!r}")
    return word.lower() == "true"


def add(read: Lines, line: str) -> None:
    """One more series."""
    header = read.header
    channels = re.split(r":(?![^(]*\))", line) if header.stamped else line.split(":")  # dates hold colons
    if header.target != "none":
        y = channels.pop().strip()
        if header.target == "class" and y not in header.classes:
            raise ValueError(f"class {y!r} is not among {', '.join(header.classes)}")
        read.y.append(y if header.target == "class" else str(number_of(y)))
    expected = header.n_channels or (read.values[0].shape[1] if read.values else len(channels))
    if len(channels) != expected or not channels:
        raise ValueError(f"{expected} channels are needed, got {len(channels)}")
    times, columns = (stamped if header.stamped else counted)(channels)
    read.values.append(torch.tensor(columns, dtype=torch.float32).T.contiguous())
    read.times.append(torch.tensor(times, dtype=torch.float64))


def number_of(word: str) -> float:
    """A value; NaN for a missing one."""
    return math.nan if word.strip() == "?" else float(word)


def counted(channels: list[str]) -> tuple[list[float], list[list[float]]]:
    """Times 0, 1, 2 ... and a column a channel; a channel that ends early is missing from there on."""
    columns = [[number_of(word) for word in channel.split(",")] for channel in channels]
    n = max(map(len, columns))
    return [float(i) for i in range(n)], [column + [math.nan] * (n - len(column)) for column in columns]


def stamped(channels: list[str]) -> tuple[list[float], list[list[float]]]:
    """All times of the channels in order, and a column a channel, missing where it has no such time.

    Dates become seconds since the first of the series.
    """
    columns = []
    for channel in channels:
        if POINT.sub("", channel).replace(",", "").strip():
            raise ValueError(f"points must read (time,value), got {channel[:40]!r}")
        columns.append({time_of(stamp): number_of(value) for stamp, value in POINT.findall(channel)})
    stamps = {stamp for column in columns for stamp in column}
    if not stamps:
        raise ValueError("the series has no points")
    if len({type(stamp) for stamp in stamps}) > 1:
        raise ValueError("the times of a series must be all numbers or all dates")
    order = sorted(stamps)
    times = [(stamp - order[0]).total_seconds() if isinstance(stamp, datetime) else stamp for stamp in order]
    return times, [[column.get(stamp, math.nan) for stamp in order] for column in columns]


def time_of(stamp: str) -> float | datetime:
    """A number or a date (ISO 8601). Raises ValueError for another text."""
    try:
        return float(stamp)
    except ValueError:
        return datetime.fromisoformat(stamp.strip())
