"""The state of a run with ``parallel = "fsdp"`` on disk: each process writes its shards, any number of processes reads
them (torch.distributed.checkpoint). Whole or not at all, the one before kept, as ``odeformer.checkpoint`` has it.

In a run's folder: the folders ``checkpoint.sharded``, ``checkpoint.sharded.previous``, ``checkpoint.sharded.stable``.
torch.distributed.checkpoint reads its index with pickle: take up runs from people that you trust.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from odeformer import checkpoint
from odeformer.processes import Processes

NEWEST, PREVIOUS, STABLE = "checkpoint.sharded", "checkpoint.sharded.previous", "checkpoint.sharded.stable"
NAMES = (NEWEST, PREVIOUS, STABLE)
RUN = "run.pt"  # what is no tensor of a parameter's, and the sizes of the other files
SECTIONS = ("model", "optimizer", "average", "best")


def write(folder: Path, state: Mapping[str, Any], processes: Processes, *, stable: bool = False) -> None:
    """Make ``state`` the newest checkpoint, and the newest so far the previous one; ``stable``: that one, too. Called
    by all processes.

    Raises OSError where it cannot be written; those that there are stay.
    """
    import torch.distributed.checkpoint as dcp

    tensors: dict[str, Tensor] = {}
    rest = {**state, **{name: taken_out(state[name], name, tensors) for name in SECTIONS}}
    beside = folder / f".{NEWEST}.part"
    with checkpoint.explained(folder, checkpoint.ADVICE):
        if processes.main:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
        processes.wait()
        try:
            with stored(processes):
                dcp.save(tensors, storage_writer=dcp.FileSystemWriter(beside), process_group=processes.group)
            if processes.main:
                save_run(beside, rest)
                commit(folder, beside, stable)
        except OSError:
            if processes.main:
                shutil.rmtree(beside, ignore_errors=True)
            raise
    processes.wait()


@contextmanager
def stored(processes: Processes) -> Iterator[None]:
    """torch.distributed.checkpoint is at work within. Raises OSError for what it could not write or read."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of being used by one process, and of its own use of torch
        try:
            yield
        except CheckpointException as error:  # no Exception, and it quotes the traceback of each process
            first = next(iter(error.failures.values()))[0]
            raise (first if isinstance(first, OSError) else OSError(" ".join(str(first).split())[:200])) from None


def taken_out(x: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """x without its tensors, which go to ``tensors`` under their paths; their places are kept as {"tensor": path}."""
    if isinstance(x, Tensor):
        tensors[path] = x
        return {"tensor": path}
    if isinstance(x, Mapping):
        return {key: taken_out(value, f"{path}/{key}", tensors) for key, value in x.items()}
    return x


def put_back(x: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse."""
    if isinstance(x, Mapping):
        if x.keys() == {"tensor"}:
            return tensors[x["tensor"]]
        return {key: put_back(value, tensors) for key, value in x.items()}
    return x


def save_run(beside: Path, rest: Mapping[str, Any]) -> None:
    """Write what is left, with the sizes of the files that are there, so that one cut short is found."""
    sizes = {path.name: path.stat().st_size for path in beside.iterdir()}
    checkpoint.save(beside / RUN, {**rest, "sizes": sizes})
    flush(beside)


def commit(folder: Path, beside: Path, stable: bool) -> None:
    """Rename: at each moment the newest or the previous one is there, and whole."""
    if stable:
        replace(link_all(beside, folder / f".{STABLE}.part"), folder / STABLE)
    if (folder / NEWEST).exists():
        replace(folder / NEWEST, folder / PREVIOUS)
    os.replace(beside, folder / NEWEST)
    flush(folder)
    for name in checkpoint.NAMES:  # of an earlier run
        (folder / name).unlink(missing_ok=True)


def replace(source: Path, target: Path) -> None:
    """A folder under the name of another, which is removed."""
    old = target.with_name(f".{target.name}.old.part")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(source, target)
    shutil.rmtree(old, ignore_errors=True)


def link_all(source: Path, target: Path) -> Path:
    """A copy of a folder that shares its files, where the file system knows that."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.iterdir():
        checkpoint.link(path, target / path.name)
    return target


def flush(folder: Path) -> None:
    """Names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, without its tensors; ``filled`` reads them. Raises ValueError for a damaged
    one."""
    state = checkpoint.read(path / RUN)
    for name, size in state.pop("sizes", {}).items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise ValueError(f"{path} is damaged ({name} has {found or 'no'} bytes, {size} were written)")
    return {**state, "folder": str(path)}


def filled(state: Mapping[str, Any], model: nn.Module, names: Mapping[int, str],
           processes: Processes) -> dict[str, Any]:
    """A state that ``read`` gave, with its tensors, cut into shards as the model's are now. Called by all processes.

    ``names``: those of the parameters by their numbers in the optimizer. Raises ValueError where they do not fit.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(state["folder"])
    like = likeness(model, names)
    try:
        with stored(processes):
            tensors = {path: place(like(path), entry) for path, entry in
                       reader.read_metadata().state_dict_metadata.items()}
            dcp.load(tensors, storage_reader=reader, process_group=processes.group)
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        words = " ".join(str(error).split())[:200]
        raise ValueError(f"the checkpoint {state['folder']} is damaged or of another model ({words})") from error
    return {**state, **{name: put_back(state[name], tensors) for name in SECTIONS}}


def likeness(model: nn.Module, names: Mapping[int, str]) -> Callable[[str], Tensor | None]:
    """path of a stored tensor -> the model's tensor that it belongs to."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}

    def like(path: str) -> Tensor | None:
        section, _, rest = path.partition("/")
        if section == "optimizer":
            number = rest.split("/")[1]
            return own.get(names.get(int(number), "")) if number.isdigit() else None
        return own.get(rest.removeprefix("weights/") if section == "best" else rest)

    return like


def place(like: Tensor | None, entry: Any) -> Tensor:
    """Room for a stored tensor, in shards like those of the tensor that it belongs to."""
    if like is not None and like.shape == entry.size:
        return torch.zeros_like(like.detach(), dtype=entry.properties.dtype)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)
