"""The processes that train one model together, as ``torchrun`` starts them, and what they tell each other.

    with joined() as processes:                  # in each process; alone where there is one
        model = model.to(processes.device)
        Trainer(model, task, config, out).run()
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# where the parameters are -> what carries tensors there, and what processes tell each other on the CPU
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
SECONDS = 1800.0
LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Broken pipe")
FAILED = "failed"


class Processes:
    """One process. ``device``: where it computes; ``main``: whether it is the one that writes and reports."""

    rank, n, group = 0, 1, None

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)

    @property
    def main(self) -> bool:
        """Whether this is the first process."""
        return self.rank == 0

    @property
    def first_here(self) -> bool:
        """Whether this is the first process on its machine."""
        return self.n == 1 or os.environ.get("LOCAL_RANK", "0") == "0"

    def sums(self, *values: float) -> list[float]:
        """The sums over all processes, in each. Like the other methods called by all at the same time."""
        return list(values)

    def agreed(self, value: Any) -> Any:
        """The first process's value, in each."""
        return value

    def gathered(self, value: Any) -> list[Any]:
        """All processes' values, in each."""
        return [value]

    def wait(self) -> None:
        """Until all are here."""

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        """This process's share of some rows; shares differ by at most one."""
        return rows.tensor_split(self.n)[self.rank]

    def differ(self) -> None:
        """Let each process draw other random numbers from here on; the first goes on as it would alone."""
        if not self.rank:
            return
        seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * self.rank) % 2**63
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)


class Several(Processes):
    """The processes of torch.distributed's default group. They talk by gloo, whatever carries the gradients."""

    def __init__(self, device: torch.device | str = "cpu"):
        super().__init__(device)
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        if "gloo" not in str(dist.get_backend_config()):
            self.group = dist.new_group(backend="gloo")

    def sums(self, *values: float) -> list[float]:
        x = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(x, group=self.group)
        return x.tolist()

    def agreed(self, value: Any) -> Any:
        box = [value if self.main else None]
        dist.broadcast_object_list(box, 0, group=self.group)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        found = [None] * self.n
        dist.all_gather_object(found, value, group=self.group)
        return found

    def wait(self) -> None:
        dist.barrier(group=self.group)


def current() -> Processes:
    """The processes that there are. Raises ValueError where torchrun started several that have not joined."""
    if dist.is_available() and dist.is_initialized():
        return Several() if dist.get_world_size() > 1 else Processes()
    if started() > 1:
        raise ValueError(f"torchrun has started {started()} processes, and this one has not joined the others: make "
                         "the Trainer within odeformer.processes.joined()")
    return Processes()


def started() -> int:
    """How many processes torchrun started; 1 without it. Raises ValueError for a WORLD_SIZE that is no number."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or not int(text):
        raise ValueError(f"the environment variable WORLD_SIZE must be a number of processes, got {text!r}")
    return int(text)


@contextmanager
def joined(device: str = "auto", *, timeout: float = SECONDS) -> Iterator[Processes]:
    """This process among those that torchrun started; alone without it.

    ``device``: "cpu", "cuda" or, for GPUs where there are some, "auto"; each process takes the GPU of its LOCAL_RANK
    (alone any device that torch has). ``timeout``: seconds that a process waits for the others.

    Where one fails, its error is told to the others, which end with a ConnectionError that says so; one that was
    killed is missed as soon as it is waited for. Raises ValueError for a device that is not there.
    """
    if started() == 1:
        yield Processes(single_device(device))
        return
    place = own_device(device)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE says that there are {started()} processes, but {' and '.join(missing)} are "
                         "missing from the environment: start them with torchrun")
    store, rank, n = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    dist.init_process_group(BACKENDS[place.type], store=dist.PrefixStore("group", store), rank=rank, world_size=n,
                            timeout=timedelta(seconds=timeout))
    told = dist.PrefixStore("odeformer", store)
    try:
        yield Several(place)
    except BaseException as error:  # the group is left as it is: to end it might mean to wait for the others
        if is_lost(error):
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, while there is something to say
            raise ConnectionError(f"process {rank} ends: {reason(told)}") from error
        with contextlib.suppress(RuntimeError):
            told.set(FAILED, f"process {rank} failed ({type(error).__name__}: {' '.join(str(error).split())[:1000]})")
        raise
    dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process is gone."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError)
                                                or any(word in str(error) for word in LOST))


def reason(told: Any, wait: float = 2.0) -> str:
    """What became of the others, as far as they could tell."""
    end = time.monotonic() + wait
    try:
        while time.monotonic() < end:
            if told.check([FAILED]):
                return told.get(FAILED).decode()
            time.sleep(0.05)
    except RuntimeError:  # kept by a process that is gone
        pass
    return ("the connection to another process was lost, which was killed or took too long; go on from the last "
            "checkpoint with --resume")


def single_device(name: str) -> torch.device:
    """A device for one process. Raises ValueError where torch does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device must be one that torch has here, got {name!r} ({str(error).splitlines()[0]})") \
            from error


def own_device(name: str) -> torch.device:
    """The device of this one of several processes. Raises ValueError where it has none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in BACKENDS:
        raise ValueError(f"--device must be auto, {' or '.join(BACKENDS)} for several processes (each takes the GPU of "
                         f"its LOCAL_RANK), got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"there is no GPU for the process with LOCAL_RANK {index}: this machine has {count}; start at "
                         f"most as many (torchrun --nproc-per-node), or take --device cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
