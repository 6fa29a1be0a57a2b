"""Training that can be stopped and resumed: the same steps give the same weights, bit for bit, on a CPU."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from odeformer import checkpoint, parallel
from odeformer.best import Best
from odeformer.ema import Average
from odeformer.files import write_json
from odeformer.interrupts import Interrupts
from odeformer.logs import Logs, packed, unpacked
from odeformer.metrics import accuracy, perplexity, smoothed_cross_entropy
from odeformer.optim import adamw
from odeformer.order import BatchOrder
from odeformer.schedules import SCHEDULES, STABLE_ENDS, agree
from odeformer.tasks import Task, as_task, to_device
from odeformer.train_config import AUTOCAST, TrainConfig

__all__ = ["SCHEDULES", "TrainConfig", "Trainer", "accuracy", "perplexity", "smoothed_cross_entropy"]

# settings that may be others when a run is gone on with: they say how long it is and what it leaves, not what it does
FREE = frozenset({"steps", "checkpoint_every", "checkpoint_minutes", "tensorboard", "parallel"})


class Trainer:
    """Trains a model for a task (``odeformer.tasks``; images alone mean classification), where its parameters are.

    In several processes (``odeformer.processes``) each makes one, with a model of the same settings, and calls the same
    methods; they train one model together, as ``config.parallel`` says, and the first one writes and reports. From then
    on each draws other random numbers, so that dropout differs.

    With ``out``, checkpoints, logs and results go there; several processes must have it in common.
    ``settings``: further plain values that the run depends on, such as options of the data; a checkpoint written with
    others is not gone on from.

    ``rows``: what each step gave. ``validations``: what each validation gave.
    """

    def __init__(self, model: nn.Module, task: Any, config: TrainConfig, out: str | Path | None = None, *,
                 settings: Mapping[str, Any] | None = None):
        self.task, self.config = as_task(task), config
        if config.validate_every is not None and not getattr(self.task, "n_valid", 0):
            raise ValueError(f"validate_every needs validation data, and task {self.task.name!r} has none: give some, "
                             "or put a share of the training data aside with valid")
        self.device = next(model.parameters()).device
        self.parallel = parallel.make(model, config, self.task.n_train)
        self.model, self.processes = self.parallel.model, self.parallel.processes
        self.out = None if out is None else self.folder(out)
        self.settings = dict(settings or {})
        self.factor = config.factor()
        self.order = BatchOrder(self.task.n_train, config.batch_size, config.seed)
        self.optimizer = adamw(self.model, learning_rate=config.learning_rate, weight_decay=config.weight_decay,
                               betas=(config.beta1, config.beta2), epsilon=config.epsilon,
                               foreach=self.parallel.foreach)
        self.penalties = penalties(config.regularize)
        self.average = None if config.ema is None else Average(self.model, config.ema)
        self.best = None if config.patience is None else Best(config.patience, higher=self.task.higher)
        self.step, self.seconds, self.finished = 0, 0.0, False
        self.rows: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []
        self._saved, self._saved_at, self._reported = 0, time.monotonic(), 0

    def folder(self, out: str | Path) -> Path:
        """The folder, once the first process has found that it can be written into."""
        if self.processes.main:
            checkpoint.writable_folder(out)
        self.processes.wait()
        return Path(out)

    @property
    def saved(self) -> int:
        """The step of the last checkpoint; 0: there is none."""
        return self._saved

    # ---- one step

    def batch(self, step: int) -> Any:
        """The batch of a step (from 0), for all processes: a function of the seed and the step alone."""
        return self.task.batch(self.order.rows(step))

    def parts(self, step: int) -> list[Any]:
        """This process's share of the batch of a step, cut into parts."""
        rows = self.processes.part(self.order.rows(step))
        return [self.task.batch(part) for part in rows.tensor_split(self.config.accumulate) if len(part)]

    def loss(self, batch: Any) -> tuple[Tensor, Any]:
        """The mean loss of some examples, with what the config adds to it, and the Solution."""
        states = {"save_states": True} if self.penalties else {}
        with self.precision():
            loss, solution = self.task.loss(self.parallel.call, to_device(batch, self.device), **states)
            if getattr(solution, "routing", None) is not None:
                for name in ("balance", "router_z"):
                    weight = getattr(self.config, name)
                    loss = loss + weight * solution.losses[name] if weight else loss
            if self.penalties is not None:
                loss = loss + sum(self.penalties(self.model, solution).values())
        return loss, solution

    def train_step(self) -> dict[str, float]:
        """One update, by all processes together; what comes back is the same in each.

        Raises FloatingPointError where the loss or its gradient is not finite (nothing is updated then).
        """
        rate = self.config.learning_rate * self.factor(self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = self.parts(self.step)
        counts = [getattr(self.task, "count", partial(Task.count, self.task))(part) for part in parts]
        processes = self.processes.n
        total = max(1, int(self.processes.sums(sum(counts))[0]))
        self.optimizer.zero_grad(set_to_none=True)
        losses, evaluations = [], 0
        for i, (part, count) in enumerate(zip(parts, counts, strict=True)):
            with self.parallel.pass_of(i == len(parts) - 1):
                loss, solution = self.loss(part)
                loss = loss * (count * processes / total)  # the gradient is a mean over processes
                loss.backward()
            losses.append(loss.detach())
            evaluations += solution.nfe
        self.parallel.gathered()
        norm = self.parallel.clip(self.config.clip)
        value, norm = torch.stack([torch.stack(losses).sum().double(), norm.double()]).tolist()  # the one host read
        value, nfe = (x / processes for x in self.processes.sums(value, evaluations / len(parts)))
        for what, number in (("loss", value), ("gradient's norm", norm)):
            if not math.isfinite(number):
                raise FloatingPointError(self.diverged(what, number))
        self.optimizer.step()
        self.step += 1
        if self.average is not None:
            self.average.update(self.step)
        return {"step": self.step, "loss": value, "nfe": int(nfe) if nfe == int(nfe) else nfe, "norm": norm,
                "learning_rate": rate, "count": total}

    def diverged(self, what: str, number: float) -> str:
        """What to do about it."""
        kept = f"; the checkpoint of step {self._saved} is kept" if self._saved else ""
        return (f"the {what} became {number} at step {self.step + 1}: lower the learning rate, or take more or smaller "
                f"depth steps, in a new run{kept}")

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast, where asked for."""
        dtype = AUTOCAST[self.config.autocast]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    # ---- a run

    def run(self, *, stop_at: int | None = None, progress: bool = True) -> bool:
        """Train to the end, or leave without saving after ``stop_at`` steps; True where the end was reached.

        SIGINT and SIGTERM, to any process, finish the step under way, save a checkpoint and end the run with False. At
        the end the model is in evaluation mode and has the weights to keep: the best where ``patience`` is given, else
        the averaged ones where ``ema`` is, else the last.
        """
        if self.finished:
            return True
        self.model.train()
        self._saved_at = time.monotonic()
        main = self.processes.main
        with (Logs(self.out if main else None, self.step, tensorboard=self.config.tensorboard) as logs,
              Interrupts() as interrupts,
              tqdm(total=self.config.steps, initial=self.step, desc="train", disable=not (progress and main)) as bar):
            while not self.done:
                self.advance(logs, bar)
                if stop_at is not None and self.step >= stop_at:
                    return False
                wanted, late = self.processes.sums(interrupts.wanted, main and self.late)
                if wanted:
                    self.save(whole=True)
                    return False
                if late or self.due:
                    self.save()
        self.model.eval()
        self.save(whole=True)
        self.keep()
        return True

    @property
    def done(self) -> bool:
        """Whether all steps are done, or waiting for a better model was given up."""
        return self.step >= self.config.steps or (self.best is not None and self.best.over)

    @property
    def due(self) -> bool:
        """Whether a checkpoint is, by the step."""
        return self.step % self.config.checkpoint_every == 0 or self.at_stable_end

    @property
    def late(self) -> bool:
        """Whether a checkpoint is due by the time."""
        minutes = self.config.checkpoint_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    @property
    def at_stable_end(self) -> bool:
        """Whether this is the last step before the schedule lets the learning rate fall."""
        ends = STABLE_ENDS.get(self.config.schedule) if isinstance(self.config.schedule, str) else None
        return ends is not None and ends(self.step, total=self.config.steps, **self.config.schedule_options)

    def advance(self, logs: Logs, bar: Any) -> None:
        """A step, and a validation where one is due, reported."""
        start = time.perf_counter()
        row = self.train_step()
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.rows.append(row)
        speed = row["count"] / seconds
        logs.add("train", row | {"count_per_second": speed, "seconds": self.seconds})
        bar.set_postfix_str(f"loss {row['loss']:.3f}, NFE {row['nfe']:g}, {speed:.0f} {self.unit}/s", refresh=False)
        bar.update()
        every = self.config.validate_every
        if every is not None and (self.step % every == 0 or self.step == self.config.steps):
            logs.add("valid", self.validate())

    @property
    def unit(self) -> str:
        """What a task's losses are means over."""
        return getattr(self.task, "unit", Task.unit)

    def validate(self) -> dict[str, float]:
        """Evaluate the validation split, with the averaged weights where there are some. Moves no random state.

        Each process does all of it, and what the first one finds counts.
        """
        states = checkpoint.random_states()
        try:
            with self.averaged(), self.precision():
                scores = self.processes.agreed(self.task.evaluate(self.model, "valid"))
                if self.best is not None:
                    self.best.report(scores[self.task.metric], self.step, self.model)
        finally:
            checkpoint.set_random_states(states)
        self.validations.append({"step": self.step, **scores})
        return self.validations[-1]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the averaged weights within, where there are some."""
        self.parallel.moved()
        with nullcontext() if self.average is None else self.average.applied():
            yield
        self.parallel.moved()

    def keep(self) -> None:
        """Give the model the weights to keep, see ``run``; the last ones are in the checkpoint. Ends the run: the model
        is the one that was given, whole."""
        if self.best is not None and self.best.weights:
            self.model.load_state_dict(self.best.weights)
        elif self.average is not None:
            self.average.apply()
        self.model = self.parallel.finished()
        self.finished = True

    # ---- on disk

    def described(self) -> dict[str, Any]:
        """All settings that the course of the run depends on, as plain values."""
        model = getattr(self.model, "config", None)
        return checkpoint.plain(self.config) | {"data": self.task.name, "n_train": self.task.n_train,
                                                "model": checkpoint.plain(model), **checkpoint.plain(self.settings)}

    def save(self, *, whole: bool = False) -> None:
        """Write checkpoint.pt into ``out``, whole or not at all, the one before kept as checkpoint.previous.pt; with
        parallel = "fsdp" the folder checkpoint.sharded, see ``odeformer.sharded_checkpoint``.

        results.json, with all rows, is written with ``whole``, or where rows are a tenth more than in the last one.
        """
        self._saved_at = time.monotonic()
        if self.out is None or self.finished:
            return
        random, *others = self.processes.gathered(checkpoint.random_states())
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "rows": packed(self.rows), "validations": self.validations, "seconds": self.seconds,
                 "random": random, "others": others, "config": self.described(),
                 "average": None if self.average is None else self.average.state_dict(),
                 "best": None if self.best is None else self.best.state_dict()}
        self.parallel.write(self.out, state, stable=self.at_stable_end)
        self._saved = self.step
        if self.processes.main and (whole or self.step >= 1.1 * self._reported):
            with checkpoint.explained(self.out, "make room or mend it, then go on with --resume"):
                write_json(self.out / "results.json", self.results())
            self._reported = self.step
        self.processes.wait()

    def results(self) -> dict[str, Any]:
        """What results.json holds."""
        found = {"config": self.described(), "rows": self.rows, "validations": self.validations,
                 "seconds": self.seconds}
        if self.best is not None:
            found["best"] = {"step": self.best.step, self.task.metric: self.best.value}
        return found

    def resume(self) -> bool:
        """Take up the newest checkpoint in ``out``, by as many processes as there are now; False where there is none.

        ``steps``, and how often checkpoints come, may be others than before: a run can be made longer where its
        schedule has had the same factors so far, or else from the checkpoint before they fall (``wsd``). A damaged
        checkpoint is passed over with a warning where the one before is whole. Raises ValueError for a damaged
        checkpoint otherwise, one of another configuration, and one that the schedule does not let go on.
        """
        if self.out is None:
            raise ValueError("out must name a folder to resume from, got None")
        settings = self.described()
        state, passed = self.parallel.find(
            self.out, lambda state: checkpoint.difference(state["config"], settings, FREE), self.too_long)
        steps = self.processes.gathered(None if state is None else state["step"])
        if len(set(steps)) > 1:
            raise ValueError(f"out must be a folder that all processes have in common; they find checkpoints of the "
                             f"steps {', '.join(map(str, steps))}")
        if state is None:
            return False
        try:
            state = self.parallel.filled(state)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for name in ("average", "best"):
                if getattr(self, name) is not None:
                    getattr(self, name).load_state_dict(state[name])
        except (RuntimeError, ValueError) as error:
            words = " ".join(str(error).split())[:200]
            raise ValueError(f"the checkpoint in {self.out} holds another model: {words}") from error
        self.parallel.moved()
        self.step, self.seconds, self._saved = state["step"], state["seconds"], state["step"]
        self.rows, self.validations = unpacked(state["rows"]), list(state["validations"])
        randoms = [state["random"], *state.get("others", [])]
        if self.processes.rank < len(randoms):
            checkpoint.set_random_states(randoms[self.processes.rank])
        for reason in passed if self.processes.main else ():
            warnings.warn(f"{reason}; going on from the checkpoint of step {self.step}", stacklevel=2)
        return True

    def too_long(self, state: Mapping[str, Any]) -> str | None:
        """Why a checkpoint does not go with the number of steps, or None."""
        before, now, step = state["config"]["steps"], self.config.steps, state["step"]
        if step > now:
            return f"has done {step} steps, more than steps = {now}; use another out folder for a shorter run"
        if before == now or agree(self.factor, step, (before, now)):
            return None
        return (f"was written on the way to steps = {before}, where schedule {self.config.schedule!r} has led the "
                f"learning rate at step {step} otherwise than for steps = {now}; keep steps, or start anew with "
                "'constant' or 'inverse_sqrt', which have no end, or 'wsd', which is lengthened from before its fall")


def penalties(weights: Mapping[str, float]) -> Callable[[nn.Module, Any], dict[str, Tensor]] | None:
    """(model, solution) -> the weighted penalties on the dynamics, or None where none is asked for.

    Raises ValueError for an unknown one.
    """
    if not any(weights.values()):
        return None
    from odeformer import regularizers

    regularizers.check_weights(weights)
    return partial(regularizers.penalties, weights=weights)
