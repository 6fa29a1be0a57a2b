"""How several processes train one model: PARALLEL[name](model, processes, config).

Each has a part of every batch. Losses are weighted by what they are means over, in all processes together, so that the
update is that of one process on the whole batch.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from odeformer import checkpoint, sharded_checkpoint
from odeformer.processes import Processes, current
from odeformer.shards import no_view, stacks, uneven, units
from odeformer.tables import look_up

State = dict[str, Any]


class Alone:
    """One process has the model and the whole batch ("none").

    ``model``: what is trained; ``call``: what a training pass calls. Raises ValueError where there are several.
    """

    foreach: bool | None = None  # how the optimizer goes over parameters; None: as it likes

    def __init__(self, model: nn.Module, processes: Processes, config: Any):
        if processes.n > 1:
            self.check(model, processes, config)
        self.processes, self.whole = processes, model
        self.model = self.call = model

    def check(self, model: nn.Module, processes: Processes, config: Any) -> None:
        """Raises ValueError for what several processes cannot train like this."""
        raise ValueError(f"parallel = 'none' is for one process, and there are {processes.n}; take 'ddp', 'fsdp' or "
                         "'experts'")

    def pass_of(self, last: bool) -> AbstractContextManager[Any]:
        """Around a forward and backward pass; ``last``: the last one before an update."""
        return nullcontext()

    def gathered(self) -> None:
        """After the last backward pass: the gradients are those of the mean of the processes' losses."""

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients so that their norm, which comes back, is at most limit."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def moved(self) -> None:
        """The parameters were written to."""

    def write(self, folder: Path, state: State, *, stable: bool) -> None:
        """A checkpoint, in a file that is the same for any number of processes; called by all."""
        state = self.all_of(state)
        if self.processes.main:
            checkpoint.write(folder, state, stable=stable)
            remove(folder, sharded_checkpoint.NAMES)

    def find(self, folder: Path, *reasons: Callable[[State], str | None]) -> tuple[State | None, list[str]]:
        """As ``checkpoint.find``. Raises ValueError where there are only checkpoints of the other kind."""
        found = checkpoint.find(folder, *reasons)
        if found[0] is None and (folder / sharded_checkpoint.NEWEST).exists():
            raise ValueError(f"{folder / sharded_checkpoint.NEWEST} was written with parallel = 'fsdp'; go on with "
                             "that, on any number of processes, or move it away to start anew")
        return found

    def exists(self, folder: Path) -> bool:
        """Whether there is a checkpoint in folder."""
        return has_checkpoint(folder)

    def filled(self, state: State) -> State:
        """A checkpoint that was found, as this process needs it; called by all."""
        return self.own(state)

    def all_of(self, state: State) -> State:
        """The tensors of a checkpoint, as those of one process; called by all."""
        return state

    def own(self, state: State) -> State:
        """The reverse."""
        return state

    def finished(self) -> nn.Module:
        """The model that was given, whole, with the trained weights; called by all."""
        return self.whole


class Shared(Alone):
    """What several processes have in common: the first one's weights, parts of each batch, gradients for all."""

    def check(self, model: nn.Module, processes: Processes, config: Any) -> None:
        least = processes.n * config.accumulate
        if config.batch_size < least:
            raise ValueError(f"batch_size must be at least accumulate times the number of processes = {least}, got "
                             f"{config.batch_size}")

    def gathered(self) -> None:
        """Raises ValueError where a parameter got no gradient, which the others may be waiting for."""
        idle = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if idle:
            raise ValueError(f"every parameter must have a part in the loss of each process, and {', '.join(idle[:3])} "
                             "had none; freeze what is not used with requires_grad_(False)")


class Replica(DistributedDataParallel):
    """DistributedDataParallel with the attributes of the model in it, which a task may read."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Replicated(Shared):
    """The model in each process, its gradients averaged while backward is under way ("ddp").

    Works with every solver and gradient mode, since nothing is waited for within a solve.
    """

    def __init__(self, model: nn.Module, processes: Processes, config: Any):
        super().__init__(model, processes, config)
        if processes.n > 1:
            device = next(model.parameters()).device
            self.call = Replica(model, device_ids=[device] if device.type == "cuda" else None)

    def pass_of(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self.call is self.model else self.call.no_sync()

    def gathered(self) -> None:
        if self.processes.n > 1:
            super().gathered()


class Sharded(Shared):
    """Parameters, gradients and the optimizer's state cut into pieces, one a process: FSDP2's fully_shard ("fsdp").

    The whole model is gathered before its forward pass, out of the solve, and until its backward pass is over: so no
    process waits for another within a solve, and every solver and gradient mode works. Where a layer has weights of its
    own and each process surely evaluates it as often (see ``units``), a sublayer is gathered when it is evaluated, and
    a whole model is nowhere. In the meantime the model that was given is empty.
    """

    def __init__(self, model: nn.Module, processes: Processes, config: Any):
        super().__init__(model, processes, config)
        self.scalars: list[nn.Parameter] = []
        if processes.n == 1:
            return
        spread_weights(model)
        self.model = self.call = copy.deepcopy(model)
        for p in model.parameters():
            p.data = p.data.new_empty(0)
        self._shard(bool(any(config.regularize.values())))

    def _shard(self, whole: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        self.scalars = [p for p in self.model.parameters() if p.dim() == 0]  # which FSDP does not take
        options: dict[str, Any] = {"ignored_params": set(self.scalars)} if self.scalars else {}
        self.foreach = False if self.scalars else None
        for module in [] if whole else units(self.model):
            module.register_forward_hook(no_view)
            fully_shard(module, **options)
        fully_shard(self.model, **options)

    def pass_of(self, last: bool) -> AbstractContextManager[Any]:
        if self.processes.n > 1:
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def gathered(self) -> None:
        if self.processes.n == 1:
            return
        super().gathered()
        for p in self.scalars:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad.div_(self.processes.n)

    def clip(self, limit: float) -> Tensor:
        if self.processes.n == 1:
            return super().clip(limit)
        common = [p.grad for p in self.scalars if p.grad is not None]
        own = [p.grad.to_local() for p in self.model.parameters() if p.dim() and p.grad is not None]
        return clip_parts(own, common, limit)

    def write(self, folder: Path, state: State, *, stable: bool) -> None:
        """A checkpoint, each process its shards; see ``odeformer.sharded_checkpoint``."""
        sharded_checkpoint.write(folder, state, self.processes, stable=stable)

    def find(self, folder: Path, *reasons: Callable[[State], str | None]) -> tuple[State | None, list[str]]:
        found = checkpoint.find(folder, *reasons, names=sharded_checkpoint.NAMES, read=sharded_checkpoint.read)
        if found[0] is None and (folder / checkpoint.NEWEST).exists():
            raise ValueError(f"{folder / checkpoint.NEWEST} was written without shards; go on with parallel = 'ddp' or "
                             "'experts', or move it away to start anew")
        return found

    def filled(self, state: State) -> State:
        names = optimizer_names(self.model, state["optimizer"])
        return sharded_checkpoint.filled(state, self.model, names, self.processes)

    def moved(self) -> None:
        for module in self.model.modules() if self.processes.n > 1 else ():
            if hasattr(module, "reshard"):
                module.reshard()

    def finished(self) -> nn.Module:
        if self.processes.n == 1:
            return self.whole
        self.moved()
        found = dict(self.model.named_parameters())
        for name, p in self.whole.named_parameters():
            p.data = full(found[name].detach())
        for (_, buffer), trained in zip(self.whole.named_buffers(), self.model.buffers(), strict=True):
            buffer.copy_(trained)
        return self.whole.train(self.model.training)


class SpreadExperts(Shared):
    """The experts of each layer spread over the processes, all else in each ("experts"); see
    ``odeformer.expert_parallel``. Tokens go to their experts at each evaluation of f, so all processes must evaluate it
    equally often."""

    def __init__(self, model: nn.Module, processes: Processes, config: Any):
        from odeformer.expert_parallel import ExpertParallel, spread

        super().__init__(model, processes, config)
        self.held: set[str] = set()
        if processes.n > 1:
            spread(model)
            self.held = {f"{path}.{name}" for path, module in model.named_modules()
                         if isinstance(module, ExpertParallel) for name in module.held_names()}

    def check(self, model: nn.Module, processes: Processes, config: Any) -> None:
        from odeformer.experts import Experts

        super().check(model, processes, config)
        if not any(type(module) is Experts for module in model.modules()):
            raise ValueError("parallel = 'experts' needs a model with experts (feedforward 'experts'), and this one "
                             "has none; take 'ddp' or 'fsdp'")
        for stack in stacks(model):
            if stack.config.depth.gradient == "adjoint":
                raise ValueError("parallel = 'experts' cannot be used with gradient 'adjoint', which does not give the "
                                 "gradients of one process there; take another gradient mode, or 'ddp'")
            if uneven(stack):
                raise ValueError(f"parallel = 'experts' needs as many evaluations of f in each process, and solver "
                                 f"{stack.solver.name!r} makes them depend on the data; take an explicit fixed-step "
                                 "solver, or 'ddp'")

    def gathered(self) -> None:
        from odeformer.expert_parallel import average_gradients

        if self.processes.n > 1:
            average_gradients(self.model)

    def clip(self, limit: float) -> Tensor:
        if self.processes.n == 1:
            return super().clip(limit)
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return clip_parts([g for name, g in grads.items() if name in self.held],
                          [g for name, g in grads.items() if name not in self.held], limit)

    def all_of(self, state: State) -> State:
        return self._each(state, _joined)

    def own(self, state: State) -> State:
        return self._each(state, lambda x: x.tensor_split(self.processes.n)[self.processes.rank].clone())

    def _each(self, state: State, change: Callable[[Tensor], Tensor]) -> State:
        """Change the tensors of a checkpoint that belong to experts."""
        if self.processes.n == 1:
            return state

        def named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(x) if name in self.held else x for name, x in tensors.items()}

        found = dict(state)
        for part in ("model", "average"):
            found[part] = state[part] and named(state[part])
        if state["best"] is not None:
            found["best"] = {**state["best"], "weights": named(state["best"]["weights"])}
        names = optimizer_names(self.model, state["optimizer"])
        found["optimizer"] = {**state["optimizer"], "state": {
            i: {key: change(x) if names[i] in self.held and isinstance(x, Tensor) and x.dim() else x
                for key, x in values.items()} for i, values in state["optimizer"]["state"].items()}}
        return found

    def finished(self) -> nn.Module:
        from odeformer.expert_parallel import collect

        return self.whole if self.processes.n == 1 else collect(self.model)


PARALLEL = {"none": Alone, "ddp": Replicated, "fsdp": Sharded, "experts": SpreadExperts}


def make(model: nn.Module, config: Any, n_examples: int) -> Alone:
    """The way of ``config.parallel``. Raises ValueError for what the processes that there are cannot do like this."""
    processes = current()
    least = processes.n * config.accumulate
    if processes.n > 1 and n_examples < least:
        raise ValueError(f"a batch must hold at least accumulate times the number of processes = {least} examples, and "
                         f"there are only {n_examples} to train on")
    made = look_up(PARALLEL, config.parallel, "parallel")(model, processes, config)
    processes.differ()
    return made


RUN_FILES = ("config.toml", "train.csv", "valid.csv", "results.json", "config.json", "model.safetensors",
             "tokenizer.json", *checkpoint.NAMES, *sharded_checkpoint.NAMES)  # what a run leaves in its folder


def has_checkpoint(folder: Path) -> bool:
    """Whether a run left a checkpoint there, of either kind."""
    return any((folder / name).exists() for name in (*checkpoint.NAMES, *sharded_checkpoint.NAMES))


def set_aside(folder: Path) -> None:
    """Move what a run left in folder to ``earlier`` within it, in place of what was there."""
    earlier = folder / "earlier"
    with checkpoint.explained(earlier, checkpoint.ADVICE):
        shutil.rmtree(earlier, ignore_errors=True)
        earlier.mkdir()
        for name in RUN_FILES:
            if (folder / name).exists():
                (folder / name).rename(earlier / name)


def remove(folder: Path, names: Iterable[str]) -> None:
    """What an earlier run left in folder."""
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)


# Tensors


@torch.no_grad()
def spread_weights(model: nn.Module) -> None:
    """The first process's parameters and buffers in all; called by all."""
    for x in [*model.parameters(), *model.buffers()]:
        dist.broadcast(x.detach(), 0)


def full(x: Tensor) -> Tensor:
    """All of a tensor that may be in shards; called by all."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _joined(x: Tensor) -> Tensor:
    """The processes' tensors behind one another."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)


@torch.no_grad()
def clip_parts(own: Iterable[Tensor], common: Iterable[Tensor], limit: float) -> Tensor:
    """As nn.utils.clip_grad_norm_, for gradients of which each process has a part, and others that all have."""
    own, common = list(own), list(common)
    squares = [sum((n.square() for n in torch._foreach_norm(grads)), torch.zeros((), device=grads[0].device))
               if grads else None for grads in (own, common)]
    like = next(x for x in squares if x is not None)
    mine = torch.zeros_like(like) if squares[0] is None else squares[0]
    dist.all_reduce(mine)
    norm = (mine + (squares[1] if squares[1] is not None else 0)).sqrt()
    torch._foreach_mul_([*own, *common], (limit / (norm + 1e-6)).clamp(max=1))
    return norm


def optimizer_names(model: nn.Module, state: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter of an optimizer's state, by its number."""
    from odeformer.optim import groups

    names = {id(p): name for name, p in model.named_parameters()}
    ordered = [p for group in groups(model, 0.0) for p in group["params"]]
    return {i: names[id(ordered[i])] for group in state["param_groups"] for i in group["params"]}
