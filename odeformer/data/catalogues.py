"""Pairs from gettext catalogues (.mo, .po), as programs carry them: /usr/share/locale/de/LC_MESSAGES has hundreds.

Licences are those of the programs.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from odeformer.data.pairs import Pairs, apart
from odeformer.data.parallel_files import keyed
from odeformer.data.text import read_text
from odeformer.data.text_files import listed

LINE = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)?\s*(".*")$')


def catalogues(paths: str | Path | Iterable[str | Path], *, valid: float = 0.05, test: float = 0.05,
               name: str = "catalogues") -> Pairs:
    """Messages and their translations from files, or from the catalogues of folders, in the order of their names.

    Marks such as ``&File`` and ``%s`` stay. Left out: what is not translated, marked fuzzy, obsolete, equal on both
    sides, or has plural forms (which of them belongs to the message depends on the language). Split by the hash of the
    message.

    Raises FileNotFoundError where a path or a match is missing, ValueError for a damaged catalogue.
    """
    pairs = (pair for path in listed(paths, "*.mo", "*.po") for pair in messages(path))
    return apart(name, keyed((s, t) for s, t in pairs if s.strip() != t.strip()), valid=valid, test=test)


def messages(path: Path) -> Iterator[tuple[str, str]]:
    """(message, translation) of a catalogue, header left out. Raises ValueError for a file of another kind."""
    if path.suffix not in READERS:
        raise ValueError(f"{path} must be a catalogue: {' or '.join(READERS)}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    yield from READERS[path.suffix](path)


def read_mo(path: Path) -> Iterator[tuple[str, str]]:
    """The messages of a compiled catalogue: magic number, version, count, offsets of two tables of (length, offset).

    Not by the standard library's gettext, which refuses headers that are not UTF-8.
    """
    data = path.read_bytes()
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(data[:4])
    if order is None:
        raise ValueError(f"{path} is no catalogue: it begins with {data[:4].hex(' ') or 'nothing'}")
    try:
        count, *tables = struct.unpack_from(f"{order}3I", data, 8)
        places = [struct.unpack_from(f"{order}{2 * count}I", data, table) for table in tables]
    except struct.error as error:
        raise ValueError(f"{path} is a damaged catalogue ({error})") from error
    if max((n + start for place in places for n, start in zip(*halves(place), strict=True)), default=0) > len(data):
        raise ValueError(f"{path} is a damaged catalogue: it is cut short")
    ids, texts = ([data[start : start + n] for n, start in zip(*halves(place), strict=True)] for place in places)
    messages = dict(zip(ids, texts, strict=True))
    charset = re.search(rb"charset=([\w.:-]+)", messages.get(b"", b""))
    try:
        for key, translation in messages.items():
            if key and b"\0" not in key:
                key, text = (part.decode(charset[1].decode() if charset else "ascii") for part in (key, translation))
                yield key.rpartition("\x04")[2], text  # without its context
    except (UnicodeDecodeError, LookupError) as error:
        raise ValueError(f"{path} is a damaged catalogue ({error})") from error


def halves(place: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and offsets, which alternate."""
    return place[::2], place[1::2]


def read_po(path: Path) -> Iterator[tuple[str, str]]:
    """The messages of a catalogue's source: entries parted by blank lines, strings quoted as in C."""
    for entry in re.split(r"\n[ \t\r]*(?=\n)", read_text(path)):
        lines = [line.strip() for line in entry.split("\n") if line.strip()]
        if any(line.startswith("#,") and "fuzzy" in line for line in lines):
            continue
        fields: dict[str, str] = {}
        field = None
        for line in lines:
            if line.startswith("#"):
                continue
            match = LINE.match(line)
            field = (match[1] or field) if match else None
            if field is None:
                raise ValueError(f"{path} is no catalogue: {line!r} is neither a comment nor a string with its keyword")
            fields[field] = fields.get(field, "") + unquoted(match[2], path)
        if fields.get("msgid") and "msgstr" in fields:
            yield fields["msgid"], fields["msgstr"]


def unquoted(string: str, path: Path) -> str:
    """A C string without quotes and escapes."""
    try:
        return ast.literal_eval(string)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is no catalogue: {string} is no string") from error


READERS = {".mo": read_mo, ".po": read_po}
