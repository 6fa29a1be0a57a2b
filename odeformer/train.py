"""Training that can be stopped and resumed: the same steps give the same weights, bit for bit, on a CPU."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from odeformer.files import write_atomically, write_json
from odeformer.models.store import to_dict
from odeformer.schedules import SCHEDULES
from odeformer.tables import at_least, finite, look_up
from odeformer.tasks import Task, accuracy, as_task, perplexity, smoothed_cross_entropy

__all__ = ["SCHEDULES", "TrainConfig", "Trainer", "accuracy", "perplexity", "smoothed_cross_entropy"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """``steps`` of AdamW on batches drawn in an order fixed by ``seed``; a checkpoint every ``checkpoint_every``.

    ``balance``, ``router_z``: weights of these losses of a model's experts (see ``odeformer.experts``), added to the
    task's; without effect in a model that has none.
    """

    steps: int
    seed: int = 0
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    schedule: str = "cosine"
    warmup: int = 20
    checkpoint_every: int = 50
    balance: float = 0.01
    router_z: float = 0.001

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "checkpoint_every"):
            at_least(name, getattr(self, name), 1)
        at_least("warmup", self.warmup, 0)
        for name in ("balance", "router_z"):
            finite(name, getattr(self, name), least=0)
        look_up(SCHEDULES, self.schedule, "schedule")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate!r}")


class Trainer:
    """Trains a model for a task (``odeformer.tasks``; images alone mean classification).

    With ``out``, checkpoints and results go there.
    """

    def __init__(self, model: nn.Module, task: Task | Any, config: TrainConfig, out: str | Path | None = None):
        self.model, self.task, self.config = model, as_task(task), config
        self.out = None if out is None else Path(out)
        if self.out is not None:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                write_atomically(self.out / "writable", lambda beside: beside.touch())
                (self.out / "writable").unlink()
            except OSError as error:
                raise OSError(f"cannot write into {self.out} ({error.strerror}); choose another folder") from error
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate)
        self.step = 0
        self.rows: list[dict[str, float]] = []
        self.seconds = 0.0

    def batch(self, step: int) -> Any:
        """The batch of a step (from 0): a function of the seed and the step alone."""
        n, size = self.task.n_train, self.config.batch_size
        epoch, position = divmod(step, max(1, n // size))
        generator = torch.Generator().manual_seed(self.config.seed * 100_003 + epoch)
        rows = torch.randperm(n, generator=generator)[position * size : (position + 1) * size]
        return self.task.batch(rows)

    def train_step(self) -> dict[str, float]:
        """One update. Raises FloatingPointError where the loss is not finite (nothing is updated then)."""
        config = self.config
        for group in self.optimizer.param_groups:
            factor = SCHEDULES[config.schedule](self.step + 1, warmup=config.warmup, total=config.steps)
            group["lr"] = config.learning_rate * factor
        loss, solution = self.task.loss(self.model, self.batch(self.step))
        if getattr(solution, "routing", None) is not None:
            for name in ("balance", "router_z"):
                weight = getattr(config, name)
                loss = loss + weight * solution.losses[name] if weight else loss
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss became {value} at step {self.step + 1}: lower the learning rate, or "
                                     "take more or smaller depth steps")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.step += 1
        return {"step": self.step, "loss": value, "nfe": solution.nfe}

    def run(self, *, stop_at: int | None = None, progress: bool = True) -> bool:
        """Train to the end, or leave without saving after ``stop_at`` steps; True where the end was reached.

        SIGINT and SIGTERM finish the step under way, save a checkpoint and end the run with False.
        """
        self.model.train()
        bar = tqdm(total=self.config.steps, initial=self.step, desc="train", disable=not progress)
        with _signals() as stopped, bar:
            while self.step < self.config.steps:
                start = time.perf_counter()
                row = self.train_step()
                self.seconds += time.perf_counter() - start
                self.rows.append(row)
                bar.update()
                bar.set_postfix(loss=f"{row['loss']:.3f}", nfe=row["nfe"])
                if stop_at is not None and self.step >= stop_at:
                    return False
                if stopped():
                    self.save()
                    return False
                if self.step % self.config.checkpoint_every == 0:
                    self.save()
        self.model.eval()
        self.save()
        return True

    def described(self) -> dict[str, Any]:
        """All settings that the course of the run depends on, as plain values."""
        return asdict(self.config) | {"data": self.task.name, "model": to_dict(self.model.config)}

    def save(self) -> None:
        """Write checkpoint.pt and results.json into ``out``, each whole or not at all."""
        if self.out is None:
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "rows": self.rows, "seconds": self.seconds, "rng": torch.get_rng_state(),
                 "config": self.described()}
        write_atomically(self.out / "checkpoint.pt", lambda beside: torch.save(state, beside))
        write_json(self.out / "results.json", {"config": self.described(), "rows": self.rows,
                                               "seconds": self.seconds})

    def resume(self) -> bool:
        """Take up the checkpoint in ``out``; False where there is none.

        Raises ValueError for a damaged checkpoint or one of another configuration.
        """
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return False
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:
            raise ValueError(f"{path} is damaged or no checkpoint ({error}); move it away to start anew") from error
        stored = dict(flat(state["config"]))
        for key, value in flat(self.described()):
            if stored.get(key) != value:
                raise ValueError(f"{path} was written with {key} = {stored.get(key)!r}, this run has {value!r}; use "
                                 "the same setting or another out folder")
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{path} holds another model: {error}") from error
        self.step, self.rows, self.seconds = state["step"], state["rows"], state["seconds"]
        torch.set_rng_state(state["rng"])
        return True


def flat(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted name, value)."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Turns SIGINT and SIGTERM into a flag while a run is under way (in the main thread; elsewhere they act as ever).
    """
    seen: list[int] = []
    previous: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, lambda number, frame: seen.append(number))
    except ValueError:  # not the main thread
        pass
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
