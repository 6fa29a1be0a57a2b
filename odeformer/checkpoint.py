"""The whole state of a training run on disk: written whole or not at all, the one before kept.

In a run's folder: ``checkpoint.pt``, the newest; ``checkpoint.previous.pt``, the one before; ``checkpoint.stable.pt``,
that of the last step before a schedule lets the learning rate fall, from where a run can be lengthened.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odeformer.files import write_atomically

NEWEST, PREVIOUS, STABLE = "checkpoint.pt", "checkpoint.previous.pt", "checkpoint.stable.pt"
NAMES = (NEWEST, PREVIOUS, STABLE)
ADVICE = "make room or mend it, then go on with --resume: the last checkpoint is whole"


def writable_folder(folder: str | Path) -> Path:
    """The folder, made if missing and tried out; what a killed run left half written in it is removed.

    Raises OSError, with what to do, where nothing can be written.
    """
    folder = Path(folder)
    with explained(folder, "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "writable", lambda beside: beside.write_bytes(b"1"))
        (folder / "writable").unlink()
        for half in folder.glob(".*.part"):
            if half.is_dir():
                shutil.rmtree(half)
            else:
                half.unlink(missing_ok=True)
    return folder


@contextmanager
def explained(path: Path, advice: str) -> Iterator[None]:
    """Raises OSError that names path, the reason and what to do, where something within cannot be written."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write into {path} ({error.strerror or error}); {advice}") from error


def write(folder: Path, state: Mapping[str, Any], *, stable: bool = False) -> None:
    """Make ``state`` the newest checkpoint, and the newest so far the previous one; ``stable``: that one, too.

    Raises OSError where it cannot be written; those that there are stay.
    """
    def put(beside: Path) -> None:
        save(beside, state)
        if stable:
            link(beside, folder / STABLE)
        if (folder / NEWEST).exists():
            os.replace(folder / NEWEST, folder / PREVIOUS)  # killed here, the previous one is taken up

    with explained(folder, ADVICE):
        write_atomically(folder / NEWEST, put)


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state into a file, to the disk. Raises OSError where that fails."""
    with open(path, "wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # torch's writer reports a failed write in its own words
            raise (error.__context__ if isinstance(error.__context__, OSError)
                   else OSError(str(error).splitlines()[0])) from error
        file.flush()
        os.fsync(file.fileno())


def link(source: Path, target: Path) -> None:
    """The file under a second name, without a second copy where the file system knows that."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    beside.unlink(missing_ok=True)
    try:
        os.link(source, beside)
    except OSError:
        beside.write_bytes(source.read_bytes())
    os.replace(beside, target)


def read(path: Path) -> dict[str, Any]:
    """The state in a file, its tensors on the CPU. Raises ValueError for a damaged file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"step", "model", "optimizer", "config"} - state.keys()
    except (OSError, RuntimeError, ValueError, EOFError, AttributeError, KeyError, pickle.UnpicklingError) as error:
        words = " ".join(str(error).split())[:120] or type(error).__name__
        raise ValueError(f"{path} is damaged or no checkpoint ({words})") from error
    if missing:
        raise ValueError(f"{path} is no checkpoint of this version: it lacks {', '.join(sorted(missing))}")
    return state


def find(folder: Path, other: Callable[[Mapping[str, Any]], str | None],
         length: Callable[[Mapping[str, Any]], str | None], *, names: Sequence[str] = NAMES,
         read: Callable[[Path], dict[str, Any]] = read) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest checkpoint of this run that can be gone on from, and the reasons against newer ones.

    ``other``: why a state is that of another run; ``length``: why it does not go with the number of steps; None where
    there is no reason. ``names``, newest first, and ``read``: what such checkpoints are called, and how they are read.
    (None, []) where there is no checkpoint. Raises ValueError where the newest is another run's, or
    none can be taken up.
    """
    reasons, damaged = [], 0
    for name in names:
        path = folder / name
        if not path.exists():
            continue
        try:
            state = read(path)
        except ValueError as error:
            reasons.append(str(error))
            damaged += 1
            continue
        reason = other(state)
        if reason is not None and name == names[0]:
            raise ValueError(f"{path} {reason}")
        reason = reason or length(state)
        if reason is None:
            return state, reasons
        reasons.append(f"{path} {reason}")
    if not reasons:
        return None, []
    raise ValueError(reasons[0] + ("; move it away to start anew" if damaged else ""))


def difference(stored: Mapping[str, Any], now: Mapping[str, Any], free: frozenset[str]) -> str | None:
    """The first setting in which two runs differ, as a reason; None where there is none. ``free``: those that may."""
    before, wanted = dict(flat(stored)), dict(flat(now))
    for key in [*wanted, *(key for key in before if key not in wanted)]:
        if key not in free and before.get(key) != wanted.get(key):
            return (f"was written with {key} = {before.get(key)!r}, this run has {wanted.get(key)!r}; use the same "
                    "setting or another out folder")
    return None


def flat(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted name, value)."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def plain(value: Any) -> Any:
    """Settings as plain values, to be stored and compared; own classes by their full name."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


def random_states() -> dict[str, Any]:
    """The states of all generators that draw without being asked which: torch's on each device, numpy's, Python's."""
    kind, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest], "python": [version, list(internal), gauss]}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Go on drawing from there."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
