"""The settings of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from odeformer.parallel import PARALLEL
from odeformer.schedules import SCHEDULES
from odeformer.tables import at_least, build, finite, look_up, probability

AUTOCAST = {"none": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """``steps`` updates by AdamW on batches of ``batch_size`` examples, drawn in an order fixed by ``seed``.

    ``accumulate``: the parts, computed one after the other, into which a batch is cut to save memory. Their gradients
    are weighted by what their losses are means over (tokens, images), so that the update is that of the whole batch;
    the losses of experts and ``regularize``, which are means over a part, are weighted in the same way.

    ``parallel``: how several processes (``torchrun``, see ``odeformer.processes``) train one model, a key of PARALLEL;
    one process trains alone under each. "ddp": the model in each process (DistributedDataParallel). "fsdp": its
    parameters and their optimizer's state in shards (fully_shard), checkpoints too. "experts": its experts spread over
    the processes, all else in each. "none": one process only. A batch is shared out, so the update is that of one
    process; what is a mean over a part stays one, but for the experts' losses under "experts".

    ``learning_rate``: the peak; ``schedule``, a key of SCHEDULES with ``schedule_options``, leads it after ``warmup``
    steps. ``weight_decay`` is for matrices alone (``odeformer.optim``); ``beta1``, ``beta2``, ``epsilon`` are AdamW's.
    ``clip``: the largest norm of a batch's gradient, inf for any. ``autocast``: "bfloat16" for mixed precision; the
    parameters, the state in depth and the loss stay float32.

    ``ema``: the decay of an average of the weights over updates, such as 0.999; it is validated, and the model has it
    at the end of the run. ``validate_every``: steps between evaluations of the task's validation split (the test data
    are never read). ``patience``: the run ends after so many validations without a better one, and the model has the
    weights of the best.

    A checkpoint comes every ``checkpoint_every`` steps, and after ``checkpoint_minutes`` where given. ``tensorboard``:
    write for TensorBoard as well. ``balance``, ``router_z``: weights of these losses of a model's experts (see
    ``odeformer.experts``), without effect in a model that has none. ``regularize``: weights of terms added to the loss,
    by their names in ``odeformer.regularizers``.
    """

    steps: int
    seed: int = 0
    batch_size: int = 64
    accumulate: int = 1
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip: float = 1.0
    schedule: str | Callable[..., float] = "cosine"
    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    warmup: int = 20
    autocast: str = "none"
    ema: float | None = None
    validate_every: int | None = None
    patience: int | None = None
    checkpoint_every: int = 50
    checkpoint_minutes: float | None = None
    tensorboard: bool = False
    parallel: str | type = "ddp"
    balance: float = 0.01
    router_z: float = 0.001
    regularize: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "checkpoint_every"):
            at_least(name, getattr(self, name), 1)
        for name in ("seed", "warmup"):
            at_least(name, getattr(self, name), 0)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        for name in ("validate_every", "patience"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate must be at most batch_size = {self.batch_size}, got {self.accumulate}")
        finite("learning_rate", self.learning_rate, above=0)
        finite("epsilon", self.epsilon, above=0)
        for name in ("weight_decay", "balance", "router_z"):
            finite(name, getattr(self, name), least=0)
        for name in ("beta1", "beta2", *(["ema"] if self.ema is not None else [])):
            probability(name, getattr(self, name))
        if not isinstance(self.clip, int | float) or not self.clip > 0:
            raise ValueError(f"clip must be a number above 0, inf to clip nothing; got {self.clip!r}")
        if self.checkpoint_minutes is not None:
            finite("checkpoint_minutes", self.checkpoint_minutes, above=0)
        look_up(AUTOCAST, self.autocast, "autocast")
        look_up(PARALLEL, self.parallel, "parallel")
        if self.patience is not None and self.validate_every is None:
            raise ValueError(f"patience counts validations: give validate_every, too, beside patience = "
                             f"{self.patience}")
        if not isinstance(self.regularize, Mapping):
            raise TypeError(f"regularize must map names to weights, got {self.regularize!r}")
        for name, weight in self.regularize.items():
            finite(f"regularize[{name!r}]", weight)
        for name, field_ in (("warmup", "warmup"), ("total", "steps")):
            if name in self.schedule_options:
                raise ValueError(f"schedule_options must not hold {name}, which is the setting {field_}")
        build(SCHEDULES, self.schedule, "schedule", 1, options={"warmup": self.warmup, "total": self.steps,
                                                                **self.schedule_options})

    def factor(self) -> Callable[..., float]:
        """The schedule: (step, total=steps) -> factor of the learning rate."""
        return partial(look_up(SCHEDULES, self.schedule, "schedule"), warmup=self.warmup,
                       **{"total": self.steps, **self.schedule_options})
