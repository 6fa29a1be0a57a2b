"""Train, valid and test: which part of the data goes where, always the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

SPLITS = ("train", "valid", "test")


def check_shares(valid: float, test: float) -> None:
    """Raises ValueError unless valid and test are shares that leave something to train on."""
    for name, share in (("valid", valid), ("test", test)):
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"{name} must be a share in [0, 1), got {share!r}")
    if valid + test >= 1:
        raise ValueError(f"valid + test must be less than 1, got {valid} + {test}")


def check_split(split: str) -> None:
    """Raises ValueError unless split is one of SPLITS."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")


def split_of(key: str, *, valid: float = 0.05, test: float = 0.05) -> str:
    """'train', 'valid' or 'test', by the hash of key alone: what else there is changes nothing."""
    place = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
    return "test" if place < test else "valid" if place < test + valid else "train"


def checksum(parts: Iterable[str]) -> str:
    """The SHA-256 of some strings, in hexadecimal; where one ends and the next begins counts."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()
