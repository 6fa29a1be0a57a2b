"""Pairs of your own: two files with a sentence a line, or one with columns. Source and licence are yours to know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from odeformer.data.pairs import Pairs, apart
from odeformer.data.text import read_text
from odeformer.tables import at_least


def lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file, without their ends (\\n or \\r\\n; no other character ends a line)."""
    return [line.removesuffix("\r") for line in read_text(path).removesuffix("\n").split("\n")]


def parallel_files(source: str | Path, target: str | Path, *, valid: float = 0.05, test: float = 0.05,
                   name: str = "parallel_files") -> Pairs:
    """Line i of ``source`` with line i of ``target``; where a side is blank, the pair is left out.

    Split by the hash of the source line: what has the same source comes into the same split. Raises FileNotFoundError;
    ValueError for unequal numbers of lines, an empty file, or bytes that are not UTF-8.
    """
    left, right = lines(source), lines(target)
    if len(left) != len(right):
        raise ValueError(f"source and target must have as many lines each: {source} has {len(left)}, {target} has "
                         f"{len(right)}")
    return apart(name, keyed(zip(left, right, strict=True)), valid=valid, test=test)


def tab_separated(path: str | Path, *, source: int = 0, target: int = 1, valid: float = 0.05, test: float = 0.05,
                  name: str = "tab_separated") -> Pairs:
    """The columns ``source`` and ``target`` (from 0) of a file whose columns are parted by tabs; else as above.

    Raises ValueError that tells the line where one has too few columns.
    """
    at_least("source", source, 0)
    at_least("target", target, 0)
    rows = []
    for number, line in enumerate(lines(path), 1):
        columns = line.split("\t")
        if len(columns) <= max(source, target):
            raise ValueError(f"{path}, line {number}: {max(source, target) + 1} columns parted by tabs are needed, got "
                             f"{len(columns)}")
        rows.append((columns[source], columns[target]))
    return apart(name, keyed(rows), valid=valid, test=test)


def keyed(pairs: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """(key, source, target) without blank ones; the source is the key."""
    for source, target in pairs:
        source, target = source.strip(), target.strip()
        if source and target:
            yield source, source, target
