"""What a translation task is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from odeformer.data.splits import SPLITS, check_shares, check_split, checksum, split_of

Pair = tuple[str, str]


@dataclass(frozen=True)
class Pairs:
    """(source, target) strings to learn from and, apart from them, to choose by (valid) and to report on (test)."""

    name: str
    train: tuple[Pair, ...]
    valid: tuple[Pair, ...]
    test: tuple[Pair, ...]

    def sources(self, split: str) -> list[str]:
        """The source strings of a split. Raises ValueError for an unknown split."""
        check_split(split)
        return [source for source, _ in getattr(self, split)]

    def targets(self, split: str) -> list[str]:
        """The target strings of a split, in the order of ``sources``."""
        check_split(split)
        return [target for _, target in getattr(self, split)]

    @property
    def checksum(self) -> str:
        """SHA-256 of the three splits: equal where the data are."""
        return checksum(part for split in SPLITS for pair in (("", ""), *getattr(self, split)) for part in pair)


def apart(name: str, keyed: Iterable[tuple[str, str, str]], *, valid: float = 0.05, test: float = 0.05) -> Pairs:
    """The task made of (key, source, target): what has the same key comes into the same split.

    A pair that came already is left out. So is, from valid and test, a pair whose source or target is in train, and
    from test one whose source or target is in valid: what is reported on was not seen. Raises ValueError where
    nothing is left to train on.
    """
    check_shares(valid, test)
    rows: dict[str, dict[Pair, None]] = {split: {} for split in SPLITS}
    for key, source, target in keyed:
        rows[split_of(key, valid=valid, test=test)][source, target] = None
    sources: set[str] = set()
    targets: set[str] = set()
    for split in SPLITS:
        rows[split] = {(s, t): None for s, t in rows[split] if s not in sources and t not in targets}
        sources |= {source for source, _ in rows[split]}
        targets |= {target for _, target in rows[split]}
    if not rows["train"]:
        raise ValueError(f"{name} has no pairs to train on")
    return Pairs(name, *(tuple(rows[split]) for split in SPLITS))
