"""Text of your own: files, or all files of a folder. Its source and licence are yours to know."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from odeformer.data.text import Text, cut, read_text


def text_files(paths: str | Path | Iterable[str | Path], *, pattern: str = "*.txt", valid: float = 0.05,
               test: float = 0.05, name: str = "text_files") -> Text:
    """The files one after the other (UTF-8), the end of all held out: a share to choose by, then one to report on.

    ``paths``: a file, a folder, or several; of a folder, the files below it that ``pattern`` matches, by name.

    Raises FileNotFoundError where a path or a match is missing; ValueError for an empty file, for bytes that are not
    UTF-8 (with the file and the offset) and for a text too short to be split.
    """
    found = listed(paths, pattern)
    return cut(name, "\n".join(read_text(path) for path in found), valid=valid, test=test)


def listed(paths: str | Path | Iterable[str | Path], *patterns: str) -> list[Path]:
    """The files meant by paths, each once. Raises FileNotFoundError where a path or a match is missing."""
    found: dict[Path, None] = {}
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        inside = sorted({p for pattern in patterns for p in path.rglob(pattern) if p.is_file()})
        if path.is_dir() and not inside:
            raise FileNotFoundError(f"{path} holds no file that matches {' or '.join(patterns)}")
        found |= dict.fromkeys(inside if path.is_dir() else [path])
    if not found:
        raise FileNotFoundError("paths names no file")
    return list(found)
