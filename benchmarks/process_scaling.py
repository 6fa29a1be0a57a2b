"""Training steps in several processes on this machine's cores: ``processes``, a factor of ``scaling``."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from odeformer.estimate import estimate
from odeformer.machine import Machine, reference
from odeformer.processes import Processes, joined
from odeformer.tasks import Task
from odeformer.train import TrainConfig, Trainer
from odeformer.workload import loss

COUNTS = (1, 2, 4)
COSTS = {"strong": "step, wall, batch shared", "weak": "step, wall, batch each"}
LONGER = 3  # times as many rounds as for the other factors: whoever else is on the machine is waited for, too
TURN, WARM_UP = 0.2, 3  # seconds of a turn; calls before the first
PATIENCE = 60.0  # seconds that processes wait for each other

Make = Callable[[dict[str, Any]], nn.Module]


def counts() -> tuple[int, ...]:
    """Numbers of processes with a core for each."""
    return tuple(n for n in COUNTS if n <= len(os.sched_getaffinity(0)))


class Texts(Task):
    """Made-up texts, as those on which ``odeformer.workload`` times a pass."""

    name = "made-up texts"

    def __init__(self, n_texts: int, n_tokens: int):
        self.n_texts, self.n_tokens = n_texts, n_tokens

    @property
    def splits(self) -> dict[str, int]:
        return {"train": self.n_texts}

    def batch(self, rows: Tensor, split: str = "train") -> Tensor:
        return torch.zeros(len(rows), self.n_tokens, dtype=torch.int64)

    def loss(self, model: Any, batch: Tensor, *, save_states: bool = False) -> tuple[Tensor, Any]:
        return loss(model, [batch])


def measure(case: dict[str, Any], make: Make, machine: Machine, context: Any) -> list[dict[str, Any]]:
    """A row for each number of processes, with the seconds of a training step of all in the median over rounds.

    "strong": they share ``case["batch"]`` examples; "weak": each has so many. Beside them "reduce", a sum of all
    gradients over the processes, and "busy", how much longer the reference pass takes where each process makes one than
    when the machine was measured. All take turns. ``make``: the model of a case; ``context``: of multiprocessing.
    """
    with groups(case, make, context) as found:
        rounds = [{(n, name): group.turn(name) for n, group in found.items() for name in group.repeats}
                  for _ in range(LONGER * case["rounds"])]
    return [row(case, n, {name: [each[n, name] for each in rounds] for name in group.repeats}, make, machine)
            for n, group in found.items()]


def row(case: dict[str, Any], n: int, seconds: dict[str, list[float]], make: Make, machine: Machine) -> dict[str, Any]:
    """What n processes took, and what was to be expected: busy x the estimate of one's share + the sum of gradients."""
    times = {"weak": seconds["strong"], "reduce": [0.0]} | seconds  # of one process: both are the same
    found: dict[str, Any] = {"processes": n, "busy": median(times["reference"]) / machine.reference,
                             "reduce": median(times["reduce"])}
    for name, batch in (("strong", -(-case["batch"] // n)), ("weak", case["batch"])):
        low, _, high = quantiles(times[name], n=4)
        share = estimate(lambda: make(case), machine, batch=batch, n_tokens=case["n_tokens"]).step.seconds
        found |= {name: median(times[name]), f"{name}_quartiles": [low, high],
                  f"{name}_predicted": found["busy"] * share + found["reduce"]}
    return found


@contextmanager
def groups(case: dict[str, Any], make: Make, context: Any) -> Iterator[dict[int, Group]]:
    """One of processes for each number of them, all waiting; they end with the block."""
    found: dict[int, Group] = {}
    try:
        for n in case["counts"]:
            found[n] = Group(n, case, make, context)
        for group in found.values():
            group.prepare()
        yield found
        for group in found.values():
            group.end()
    finally:
        for group in found.values():
            group.kill()


class Group:
    """n processes that train together. ``repeats``: how often a turn makes each of their calls."""

    def __init__(self, n: int, case: dict[str, Any], make: Make, context: Any):
        self.pipes, self.children, self.repeats = [], [], {}
        port = free_port()
        for rank in range(n):
            ours, theirs = context.Pipe()
            child = context.Process(target=serve, args=(theirs, rank, n, port, case, make), daemon=True)
            child.start()
            theirs.close()
            self.pipes.append(ours)
            self.children.append(child)

    def prepare(self) -> None:
        """Once all are there: warm up, and see how long calls take."""
        for name in self.answers()[0]:
            self.repeats[name] = WARM_UP
            self.turn(name)
            self.repeats[name] = max(1, round(TURN / max(self.turn(name), 1e-6)))

    def turn(self, name: str) -> float:
        """Seconds of a call that all make at once, of the slowest of them."""
        for pipe in self.pipes:
            with suppress(ConnectionError):  # it is gone, which answers() says
                pipe.send((name, self.repeats[name]))
        return max(self.answers())

    def answers(self) -> list[Any]:
        """What each says. Raises RuntimeError where one failed."""
        try:
            found = [pipe.recv() for pipe in self.pipes]
        except (EOFError, ConnectionError):
            found = ["it was killed"]
        for answer in found:
            if isinstance(answer, str):
                raise RuntimeError(f"one of {len(self.pipes)} processes failed: {answer}")
        return found

    def end(self) -> None:
        """Let them leave."""
        for pipe in self.pipes:
            pipe.send(None)
        for child in self.children:
            child.join(PATIENCE)

    def kill(self) -> None:
        """Those that have not left."""
        for child in self.children:
            child.kill()
            child.join()


def free_port() -> int:
    """One at which processes of this machine can meet."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def serve(pipe: Connection, rank: int, n: int, port: int, case: dict[str, Any], make: Make) -> None:
    """One of n processes: make calls as often as asked, and say how long each took; a text says what went wrong."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    try:
        with joined("cpu", timeout=PATIENCE) as processes:
            calls = calls_of(case, processes, make)
            pipe.send(list(calls))
            while (asked := pipe.recv()) is not None:
                name, repeats = asked
                processes.wait()
                begun = time.perf_counter()
                for _ in range(repeats):
                    calls[name]()
                pipe.send((time.perf_counter() - begun) / repeats)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def calls_of(case: dict[str, Any], processes: Processes, make: Make) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    found = {"strong": trainer(case, case["batch"], make).train_step, "reference": reference()}
    if processes.n > 1:
        gradients = torch.zeros(sum(p.numel() for p in make(case).parameters()))
        found |= {"weak": trainer(case, processes.n * case["batch"], make).train_step,
                  "reduce": lambda: dist.all_reduce(gradients)}
    return found


def trainer(case: dict[str, Any], batch: int, make: Make) -> Trainer:
    """Of a case's model, on batches of so many texts for all processes."""
    config = TrainConfig(steps=1, batch_size=batch, schedule="constant", warmup=0, parallel="ddp")
    made = Trainer(make(case), Texts(batch, case["n_tokens"]), config)
    made.model.train()
    return made
