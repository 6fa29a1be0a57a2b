"""What a language modelling task is, and text from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from odeformer.data.splits import SPLITS, check_shares, check_split, checksum


class Encodes(Protocol):
    """Anything that makes token ids of a text, such as a tokenizer of ``odeformer.tokenizers``."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Text:
    """Running text to learn from and, apart from it, to choose by (valid) and to report on (test)."""

    name: str
    train: str
    valid: str
    test: str

    def ids(self, split: str, tokenizer: Encodes) -> Tensor:
        """The split as token ids (tokens,), int64. Raises ValueError for an unknown split."""
        check_split(split)
        return torch.tensor(tokenizer.encode(getattr(self, split)), dtype=torch.int64)

    @property
    def checksum(self) -> str:
        """SHA-256 of the three splits: equal where the data are."""
        return checksum(getattr(self, split) for split in SPLITS)


def cut(name: str, text: str, *, valid: float, test: float) -> Text:
    """The task whose test split is the last share of the text, valid the one before, train the rest.

    Raises ValueError where a share is out of range or the text too short for it.
    """
    check_shares(valid, test)
    n_valid, n_test = round(len(text) * valid), round(len(text) * test)
    n_train = len(text) - n_valid - n_test
    for split, n, share in (("train", n_train, 1), ("valid", n_valid, valid), ("test", n_test, test)):
        if share and not n:
            raise ValueError(f"{name} has {len(text)} characters, too few for a {split} split")
    return Text(name, text[:n_train], text[n_train : n_train + n_valid], text[n_train + n_valid :])


def read_text(path: str | Path) -> str:
    """A whole UTF-8 file, line ends as they are, a leading byte order mark left out.

    Raises FileNotFoundError, and ValueError for an empty file or for bytes that are not UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return decoded(path.read_bytes(), path)


def decoded(data: bytes, path: object) -> str:
    """The UTF-8 text in data, which path holds; raises as above."""
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} "
                         f"({error.reason}); convert the file, for example with iconv") from error
    if not text:
        raise ValueError(f"{path} is empty: give a file with text in it, or leave it out")
    return text
