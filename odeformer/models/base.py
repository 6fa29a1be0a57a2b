"""What every model is: an embedding, layers whose field is integrated over depth, and a final norm."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from odeformer.block import Block
from odeformer.context import Context
from odeformer.depth import DepthConfig, integrate
from odeformer.init import INITIALIZERS
from odeformer.norms import NORMS, make_norm
from odeformer.tables import at_least, build, look_up
from odeformer.weights import WEIGHTS


class DepthModel(nn.Module):
    """Shared by all models: ``config`` has n_layers, block and depth; ``causal`` is the class's."""

    causal = False

    def __init__(self, config: Any):
        super().__init__()
        at_least("n_layers", config.n_layers, 1)
        self.config = config
        self.solver = config.depth.make_solver()  # a submodule where it has learned coefficients
        block = config.block
        self.layers = build(WEIGHTS, config.depth.weights, "weights", config.n_layers, lambda: Block(block),
                            options=config.depth.weights_options)
        final = getattr(look_up(NORMS, block.norm, "norm"), "final", True)
        kind = {name: block.norm_options[name] for name in ("kind", "eps") if name in block.norm_options}
        self.final_norm = make_norm(block.d_model, **kind) if final else nn.Identity()

    def initialize(self) -> None:
        """Apply the configured initialiser (called at the end of construction)."""
        initialise = look_up(INITIALIZERS, self.config.block.init, "init")
        initialise(self, **self.config.block.init_options)

    def evolve(self, z: Tensor, mask: Tensor | None, *, save: bool = False) -> Any:
        """Integrate z (batch, tokens, d_model) from l = 0 to n_layers; a Solution."""
        context = Context(mask=mask, causal=self.causal, training=self.training)
        field = self.layers.field(self.config.block.coupling, context)
        return integrate(field, z, self.solver, self.config.depth, self.config.n_layers, context, save=save)

    def with_solver(self, solver: Any, **options: Any) -> Self:
        """The same parameters under another solver (a name or an object; one with learned coefficients brings its own).

        Options that DepthConfig has (steps_per_layer, rtol, gradient, ...) go there, others to the solver.
        """
        known = {f.name for f in fields(DepthConfig)} - {"solver", "weights", "weights_options"}
        depth = {"rtol": None, "atol": None, "solver_options": {}}
        if "n_steps" in options:
            depth["steps_per_layer"] = 1
        if "steps_per_layer" in options:
            depth["n_steps"] = None
        depth |= {name: value for name, value in options.items() if name in known}
        extra = {name: value for name, value in options.items() if name not in known}
        if extra:
            depth["solver_options"] = {**depth["solver_options"], **extra}
        other = copy.copy(self)
        other._modules, other._parameters = dict(self._modules), dict(self._parameters)
        other.config = replace(self.config, depth=replace(self.config.depth, solver=solver, **depth))
        other._modules.pop("solver", None)
        other.solver = other.config.depth.make_solver()
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
