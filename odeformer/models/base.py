"""What every model is: an embedding, layers whose field is integrated over depth, and a final norm."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from odeformer.block import COUPLINGS, Block
from odeformer.context import Context
from odeformer.depth import DepthConfig, check_coupling, integrate
from odeformer.init import INITIALIZERS
from odeformer.norms import make_norm
from odeformer.tables import at_least, build, look_up
from odeformer.weights import WEIGHTS


class DepthModel(nn.Module):
    """Shared by all models: ``config`` has n_layers, block and depth; ``causal`` is the class's."""

    causal = False

    def __init__(self, config: Any):
        super().__init__()
        at_least("n_layers", config.n_layers, 1)
        self.config = config
        self.solver = self._make_solver()  # a submodule where it has learned coefficients
        block = config.block
        self.layers = build(WEIGHTS, config.depth.weights, "weights", config.n_layers,
                            lambda: Block(block, config.n_layers), options=config.depth.weights_options)
        final = getattr(self.layers[0].attention.placement, "final", True)
        kind = {name: block.norm_options[name] for name in ("kind", "eps") if name in block.norm_options}
        self.final_norm = make_norm(block.d_model, **kind) if final else nn.Identity()

    def _make_solver(self) -> Any:
        config = self.config
        solver = config.depth.make_solver(d_model=config.block.d_model, n_steps=config.depth.steps(config.n_layers))
        check_coupling(solver, look_up(COUPLINGS, config.block.coupling, "coupling"), config.depth.gradient)
        return solver

    def initialize(self) -> None:
        """Apply the configured initialiser (called at the end of construction)."""
        block = self.config.block
        build(INITIALIZERS, block.init, "init", self, options=block.init_options)

    def evolve(self, z: Tensor, mask: Tensor | None, *, save: bool = False) -> Any:
        """Integrate z (batch, tokens, d_model) from l = 0 to n_layers; a Solution."""
        if mask is not None:
            z = z.masked_fill(~mask.unsqueeze(-1), 0)  # what padding holds, NaN perhaps, must not reach real tokens
        block = self.config.block
        rotary = self.position.rotary(z.shape[1], block.d_model // block.n_heads, z.device)
        context = Context(mask=mask, causal=self.causal, training=self.layers.training, rotary=rotary)
        field = self.layers.field(self.config.block.coupling, context)
        return integrate(field, z, self.solver, self.config.depth, self.config.n_layers, context, save=save)

    def with_solver(self, solver: Any, **options: Any) -> Self:
        """The same parameters under another solver, a name or an object.

        One with learned coefficients brings its own, unless it is the one that the model has.

        Options that DepthConfig has (steps_per_layer, rtol, gradient, ...) go there, others to the solver. What is not
        given stays, as far as the other solver knows it: its steps unless it chooses them itself, its gradient mode or
        else backprop. Training and evaluation mode are those of the shared layers.
        """
        known = {f.name for f in fields(DepthConfig)} - {"solver", "weights", "weights_options"}
        given = {name: value for name, value in options.items() if name in known}
        extra = {name: value for name, value in options.items() if name not in known}
        extra = {**given.pop("solver_options", {}), **extra}
        bare = DepthConfig(solver=solver, solver_options=extra).make_solver()
        depth = {"rtol": None, "atol": None, "solver_options": extra}
        if bare.is_adaptive or "n_steps" in given:
            depth["steps_per_layer"] = 1
        if bare.is_adaptive or "steps_per_layer" in given:
            depth["n_steps"] = None
        if self.config.depth.gradient not in bare.gradients:
            depth["gradient"] = "backprop"
        depth |= given
        other = copy.copy(self)
        other._modules, other._parameters = dict(self._modules), dict(self._parameters)
        other.config = replace(self.config, depth=replace(self.config.depth, solver=solver, **depth))
        other._modules.pop("solver", None)
        same = isinstance(solver, str) and solver == self.config.depth.solver and not extra
        other.solver = self.solver if same and isinstance(self.solver, nn.Module) else other._make_solver()
        if isinstance(other.solver, nn.Module):
            other.solver.to(next(self.layers.parameters()).device)
        return other

    def save(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json into folder (made if missing)."""
        from odeformer.models.store import save

        save(self, folder)


def check_tokens(tokens: Tensor, vocab_size: int, max_seq_len: int, name: str = "tokens") -> None:
    """Raises TypeError or ValueError unless tokens are ids (batch, tokens) that the model knows."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be an int64 tensor of ids, got "
                        f"{getattr(tokens, 'dtype', type(tokens).__name__)}")
    if tokens.dim() != 2 or 0 in tokens.shape:
        raise ValueError(f"{name} must have the shape (batch, tokens), neither 0; got {tuple(tokens.shape)}")
    if tokens.shape[1] > max_seq_len:
        raise ValueError(f"{name} has {tokens.shape[1]} positions, more than max_seq_len = {max_seq_len}")
    if torch.compiler.is_compiling():
        return
    if tokens.is_cuda:  # checked on the device, so that nothing waits for it
        torch._assert_async(((tokens >= 0) & (tokens < vocab_size)).all(), f"{name} outside the vocabulary")
        return
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must be ids in [0, vocab_size = {vocab_size}), got ids from {low} to {high}")
