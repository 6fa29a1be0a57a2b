"""What every model is: an embedding, layers whose field is integrated over depth, and a final norm."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from odeformer.attention.pairs import Sight
from odeformer.block import COUPLINGS, Block
from odeformer.cache import Cache, CachePass
from odeformer.compiled import Compiled
from odeformer.context import Context
from odeformer.depth import DepthConfig, integrate
from odeformer.depth_checks import (
    check_causal,
    check_coupling,
    check_depth,
    check_dropout,
    check_fusion,
    check_routing,
    check_rows,
)
from odeformer.fusion import make_fusion
from odeformer.init import INITIALIZERS
from odeformer.injection import check_equilibrium, inject
from odeformer.layer_drop import draw
from odeformer.masks import check_mask
from odeformer.norms import make_norm
from odeformer.positions import Rotary
from odeformer.tables import at_least, build, look_up
from odeformer.weights import WEIGHTS

_TO_BE_FILLED = ContextVar("to_be_filled", default=False)


@contextmanager
def to_be_filled() -> Iterator[None]:
    """Models made within it are not initialised and move no random state: their parameters come from elsewhere."""
    token = _TO_BE_FILLED.set(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        _TO_BE_FILLED.reset(token)


class DepthModel(nn.Module):
    """Shared by all models: ``config`` has n_layers, block and depth; ``causal`` and ``cross`` (whether the layers
    attend to a memory) are the class's."""

    causal = False
    cross = False
    own_layers = True  # made of Block, not a user's modules
    compiled: Compiled | None = None  # what compile() left

    def __init__(self, config: Any):
        super().__init__()
        at_least("n_layers", config.n_layers, 1)
        self.config = config
        self.fusion = make_fusion(config.depth.fusion, config.n_layers, config.block.d_model,
                                  config.depth.fusion_options)
        self.solver = self._make_solver()  # a submodule where it has learned coefficients
        block = config.block
        self.layers = build(WEIGHTS, config.depth.weights, "weights", config.n_layers,
                            lambda: Block(block, config.n_layers, cross=self.cross),
                            options=config.depth.weights_options)
        final = getattr(self.layers[0].attention.placement, "final", True)
        final = final and not (self.fusion is not None and self.fusion.leaves_normed)
        kind = {name: block.norm_options[name] for name in ("kind", "eps") if name in block.norm_options}
        self.final_norm = make_norm(block.d_model, **kind) if final else nn.Identity()

    def _make_solver(self) -> Any:
        config = self.config
        solver = config.depth.make_solver(d_model=config.block.d_model, n_steps=config.depth.steps(config.n_layers))
        self._check_solver(solver)
        return solver

    def _check_solver(self, solver: Any) -> None:
        """Raises ValueError where the solver does not go with the rest of the config."""
        config, block, depth = self.config, self.config.block, self.config.depth
        check_causal(solver, self.causal)
        check_coupling(solver, look_up(COUPLINGS, block.coupling, "coupling"), depth.gradient)
        check_dropout(solver, block.dropout, block.dropout_per, depth.gradient)
        check_depth(solver, depth, self.fusion, config.n_layers)
        check_equilibrium(solver, depth, config.n_layers)
        check_rows(solver, block.dropout > 0 or (depth.layer_drop > 0 and depth.layer_drop_per == "sample"))
        check_fusion(self.fusion, solver, depth, config.n_layers)
        check_routing(solver, block.feedforward_options.get("routing"), depth.gradient)

    def initialize(self) -> None:
        """Apply the configured initialiser (called at the end of construction)."""
        if _TO_BE_FILLED.get():
            return
        block = self.config.block
        build(INITIALIZERS, block.init, "init", self, options=block.init_options)
        self.layers.settle(self)

    def rotary(self, z: Tensor, n_before: int) -> Any:
        """What attention turns queries and keys by, for a state behind n_before tokens."""
        block = self.config.block
        return self.position.rotary(n_before + z.shape[1], block.d_model // block.n_heads, z.device, z.dtype)

    def evolve(self, z: Tensor, mask: Tensor | None = None, *, save: bool = False, cache: Cache | None = None,
               memory: Tensor | None = None, memory_mask: Tensor | None = None,
               rotary: Rotary | None = None) -> Any:
        """Integrate z (batch, tokens, d_model) from l = 0 to n_layers; a Solution.

        ``cache``: what earlier tokens left; z goes on behind them. ``memory`` (batch, source, d_model): what
        cross-attention attends to. ``rotary``: what attention turns queries and keys by, if not ``self.rotary``.

        Raises ValueError for a cache under a gradient mode that evaluates f again, and for a memory that is missing,
        of another size, or of no use to the layers.
        """
        check_memory(self.cross, z, memory, memory_mask)
        if mask is not None:
            z = z.masked_fill(~mask.unsqueeze(-1), 0)  # what padding holds, NaN perhaps, must not reach real tokens
        reading = None
        if cache is not None:
            gradient = self.config.depth.gradient
            if torch.is_grad_enabled() and gradient != "backprop":
                raise ValueError(f"gradient {gradient!r} evaluates the field again in backward, which a cache cannot "
                                 "follow; use torch.no_grad() or gradient 'backprop'")
            reading = cache.begin(len(z), z.shape[1], mask)
        sight = Sight(mask if reading is None else reading.mask)
        field, context = self._field(z, mask, reading, rotary, memory, memory_mask,
                                     None if self.compiled is not None else sight)
        depth, n_layers = self.config.depth, self.config.n_layers
        with sight.during(clean=not context.replayed):
            solution = integrate(field, z, self.solver, depth, n_layers, context, save=save, fusion=self.fusion)
        if reading is not None:
            reading.end()
        return solution

    def vector_field(self, z: Tensor, mask: Tensor | None = None, *, memory: Tensor | None = None,
                     memory_mask: Tensor | None = None) -> Any:
        """f(z, l) over [0, n_layers], the increment dz/dl, as a forward pass for states like z would see it: with this
        padding, and with masks of dropout and layer drop of its own.

        A Solution has the one that it was integrated with as ``field``. Fusion is no part of f.
        """
        check_memory(self.cross, z, memory, memory_mask)
        if mask is not None:
            check_mask(mask, z.shape[:2])
            z = z.masked_fill(~mask.unsqueeze(-1), 0)
        return self._field(z, mask, None, None, memory, memory_mask, None)[0]

    def _field(self, z: Tensor, mask: Tensor | None, reading: CachePass | None, rotary: Rotary | None,
               memory: Tensor | None, memory_mask: Tensor | None, sight: Sight | None) -> tuple[Any, Context]:
        """The field of a forward pass, and what that pass knows."""
        if rotary is None:
            rotary = self.rotary(z, 0 if reading is None else reading.cache.n_tokens)
        depth, block, training = self.config.depth, self.config.block, self.layers.training
        keep = draw(depth.layer_drop, depth.layer_drop_per, depth.layer_drop_schedule, self.config.n_layers, z,
                    training)
        context = Context(mask=mask, causal=self.causal, training=training, rotary=rotary, cache=reading,
                          memory=memory, memory_mask=memory_mask, keep=keep, dropout_per=block.dropout_per,
                          moving=not self.layers.by_layer, compiled=self.compiled, sight=sight,
                          replayed=depth.gradient != "backprop" and torch.is_grad_enabled())
        if block.feedforward_options.get("routing") == "step":
            context.routing.step = 0
        inner = context if self.fusion is None else self.fusion.context(context)
        field = self.layers.field(block.coupling, inner)
        return (inject(field, z, keep) if depth.injection else field), context

    def with_solver(self, solver: Any, **options: Any) -> Self:
        """The same parameters under another solver, a name or an object.

        One with learned coefficients brings its own, unless it is the one that the model has.

        Options that DepthConfig has (steps_per_layer, rtol, gradient, ...) go there, others to the solver. What is not
        given stays, as far as the other solver knows it: its steps unless it chooses them itself, its gradient mode or
        else backprop. Training and evaluation mode are those of the shared layers.
        """
        fixed = {"solver", "weights", "weights_options", "fusion", "fusion_options"}
        known = {f.name for f in fields(DepthConfig)} - fixed
        given = {name: value for name, value in options.items() if name in known}
        extra = {name: value for name, value in options.items() if name not in known}
        extra = {**given.pop("solver_options", {}), **extra}
        bare = DepthConfig(solver=solver, solver_options=extra).make_solver()
        depth = {"rtol": None, "atol": None, "solver_options": extra}
        amounts = {"steps_per_layer": 1, "n_steps": None, "grid": None}
        depth |= {name: default for name, default in amounts.items()
                  if bare.is_adaptive or (amounts.keys() - {name}) & given.keys()}
        if self.config.depth.gradient not in bare.gradients:
            depth["gradient"] = "backprop"
        depth |= given
        other = copy.copy(self)
        other._modules, other._parameters = dict(self._modules), dict(self._parameters)
        other.config = replace(self.config, depth=replace(self.config.depth, solver=solver, **depth))
        other._modules.pop("solver", None)
        own = self.config.depth
        same = isinstance(solver, str) and solver == own.solver and extra in ({}, dict(own.solver_options))
        other.solver = self.solver if same and isinstance(self.solver, nn.Module) else other._make_solver()
        other._check_solver(other.solver)
        if isinstance(other.solver, nn.Module):
            other.solver.to(next(self.layers.parameters()).device)
        return other

    def compile(self, **options: Any) -> None:
        """Compile the layers, in place as nn.Module.compile does, when they are first called: one function for all of
        them, whatever their number and the steps (see ``odeformer.compiled``).

        ``options``: those of torch.compile; fullgraph is True unless given. With an explicit one-step solver, and
        gradient "backprop" or no gradients, a step of a layer is one function, else an evaluation of its field. As it
        is written runs what comes before and behind the layers, a layer of experts, a pass with a cache, and all of it
        within torch.func transforms. There are no second derivatives of what is compiled (torch raises), and hooks
        that are set on parts of a layer after its first call are not seen. Copies and ``with_solver`` keep it; files,
        and models made anew from this one (pruned, grown), do not.

        Raises ValueError where the layers are not odeformer's own (``wrap``).
        """
        refuse_wrapped(self, "compile")
        self.compiled = Compiled(options)

    def parameter_report(self, n_tokens: int | None = None) -> Any:
        """Parameters, NFE of a pass and multiply-adds a token, beside the plain Transformer of this width and depth:
        see ``odeformer.accounting``."""
        from odeformer.accounting import parameter_report

        return parameter_report(self, n_tokens)

    def save(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json into folder (made if missing)."""
        from odeformer.models.store import save

        save(self, folder)


def refuse_wrapped(model: Any, what: str) -> None:
    """Raises ValueError where the layers of a model are a user's own (``wrap``)."""
    if not getattr(model, "own_layers", True):
        raise ValueError(f"{what} is for layers of odeformer's own; those of a wrapped model are not")


def check_memory(cross: bool, z: Tensor, memory: Tensor | None, mask: Tensor | None) -> None:
    """Raises ValueError unless layers with cross-attention, and no others, get a memory that goes with z."""
    if not cross:
        if memory is not None or mask is not None:
            raise ValueError("memory is for a decoder with cross-attention, and these layers have none")
        return
    if memory is None:
        raise ValueError("memory must be given: these layers attend to an encoder's states")
    if memory.dim() != 3 or memory.shape[0] != z.shape[0] or memory.shape[2] != z.shape[2] or not memory.shape[1]:
        raise ValueError(f"memory must have the shape (batch = {z.shape[0]}, source, d_model = {z.shape[2]}), got "
                         f"{tuple(memory.shape)}")
    check_mask(mask, memory.shape[:2], "memory_mask")


def check_tokens(tokens: Tensor, vocab_size: int, max_seq_len: int, n_before: int = 0, name: str = "tokens") -> None:
    """Raises TypeError or ValueError unless tokens are ids (batch, tokens) that the model knows.

    ``n_before``: positions taken by earlier tokens.
    """
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be an int64 tensor of ids, got "
                        f"{getattr(tokens, 'dtype', type(tokens).__name__)}")
    if tokens.dim() != 2 or 0 in tokens.shape:
        raise ValueError(f"{name} must have the shape (batch, tokens), neither 0; got {tuple(tokens.shape)}")
    if n_before + tokens.shape[1] > max_seq_len:
        before = f" after {n_before} earlier ones" if n_before else ""
        raise ValueError(f"{name} has {tokens.shape[1]} positions{before}, more than max_seq_len = {max_seq_len}")
    if hidden() or tokens.is_cuda:
        check_that(((tokens >= 0) & (tokens < vocab_size)).all(), f"{name} must be ids in [0, {vocab_size})")
        return
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must be ids in [0, vocab_size = {vocab_size}), got ids from {low} to {high}")


def check_that(holds: Tensor, message: str) -> None:
    """Raises ValueError unless holds, a 0-d bool tensor; on a GPU checked there, so that nothing waits for it."""
    if hidden():
        return
    if holds.is_cuda:
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise ValueError(message)


def hidden() -> bool:
    """Whether the values of tensors cannot be read: under torch.compile, and within a torch.func transform."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
