"""Wider models that compute what the narrower one did (eq. 47; Chen, Goodfellow & Shlens 2016, Net2Net; Chen et al.
2022, bert2BERT)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from odeformer.block import BlockConfig
from odeformer.growth.lineage import Lineage, Origin, fill, joined
from odeformer.growth.maps import Copies
from odeformer.growth.rules import BESIDE_BLOCKS, CORES, PLACEMENTS, Axes, Width, prefixed, rule_for
from odeformer.growth.surroundings import around
from odeformer.models import MODELS
from odeformer.models.base import DepthModel, to_be_filled
from odeformer.models.seq2seq import CrossDecoder, Seq2Seq
from odeformer.tables import at_least, finite, probability

BY_HEAD = ("gamma", "sigma", "beta")  # options of attention that may hold a number for each head


def widen(model: nn.Module, *, d_model: int | None = None, d_ff: int | None = None, n_heads: int | None = None,
          noise: float = 0.0, unequal: float = 0.0) -> nn.Module:
    """A wider model with parameters of its own that computes what ``model`` does, up to rounding, under every solver.

    Units are copied, and what reads them divided, so that d_model grows by tiles W / k (eq. 47, ρ = k). ``d_model``,
    ``d_ff``, ``n_heads``: the new sizes. None: d_ff stays, or is 4 d_model where the config leaves it open; n_heads
    grows with d_model, so that head_dim stays. d_ff may be any larger number, and so may n_heads and head_dim where
    heads are not told apart; d_model grows by a whole factor, unless the model has no norm. For a Seq2Seq they are
    those of both parts. Dropout and layer drop draw other numbers.

    Twins, copies of one unit, stay alike in training as long as all that they meet is divided evenly. Two ways out:
    ``unequal`` in [0, 1): shares of twins are uneven by up to that much, and the function stays exact (Wang et al.
    2024, LEMON). ``noise``: to every copied entry of a matrix is added noise times the root mean square of the matrix
    times N(0, 1); the function is then kept approximately: the final states change by about noise times their size (0.6
    to 1.6 noise, measured for noise up to 0.1 in models of 2 and 6 layers and d_model 64 as they are initialised).

    Raises ValueError where nothing, or something smaller, is asked for, and with the reason where the function cannot
    be kept: a norm over features of which some are copied more often, sinusoidal positions and times of series (another
    d_model), rotary positions (another head_dim), ALiBi (other heads), a tied head without a norm before it, own
    classes that ``odeformer.growth.rules`` does not know.
    """
    finite("noise", noise, least=0)
    probability("unequal", unequal)
    if d_model is n_heads is d_ff is None:
        raise ValueError("one of d_model, d_ff and n_heads must be given, to grow to")
    kinds = (*MODELS.values(), CrossDecoder)
    if type(model) not in kinds:
        raise ValueError(f"model must be one of {', '.join(kind.__name__ for kind in kinds)}, got "
                         f"{type(model).__name__}")
    config = model.config
    changes = {name: wider(getattr(config, name), d_model, d_ff, n_heads) for name in ("block", "decoder_block")
               if getattr(config, name, None) is not None}
    with to_be_filled():
        new = type(model)(replace(config, **changes))
    shared: dict[tuple, Copies] = {}
    lineage = joined({path: grown(old_part, new_part, unequal, shared)
                      for path, old_part, new_part in parts(model, new)}, new)
    fill(new, model, lineage)
    stir(new, lineage, noise)
    for name, part in new.named_modules():
        part.training = model.get_submodule(name).training
    return new


def parts(old: nn.Module, new: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The models that a model is made of, with their paths."""
    if not isinstance(old, Seq2Seq):
        yield "", old, new
        return
    yield "encoder.", old.encoder, new.encoder
    yield "decoder.", old.decoder, new.decoder


def wider(block: BlockConfig, d_model: int | None, d_ff: int | None, n_heads: int | None) -> BlockConfig:
    """The block's config with the new sizes. Raises TypeError or ValueError for sizes that are none, or smaller."""
    head_dim = block.d_model // block.n_heads
    d_model = block.d_model if d_model is None else d_model
    at_least("d_model", d_model, 1)
    if n_heads is None:
        if d_model % head_dim:
            raise ValueError(f"n_heads must be given where d_model = {d_model} is no multiple of head_dim = {head_dim}")
        n_heads = d_model // head_dim
    for name, value, before in (("d_model", d_model, block.d_model), ("n_heads", n_heads, block.n_heads),
                                ("d_ff", d_ff, block.d_ff or 4 * block.d_model)):
        if value is None:
            continue
        at_least(name, value, 1)
        if value < before:
            raise ValueError(f"{name} must be at least {before}, what the model has; got {value}")
    if d_model % n_heads or d_model // n_heads < head_dim:
        raise ValueError(f"n_heads = {n_heads} over d_model = {d_model} makes head_dim = {d_model / n_heads:g}, which "
                         f"must be a whole number of at least {head_dim}, what the model has: let d_model grow, too")
    options = {name: by_head(getattr(block, name), block.n_heads, n_heads)
               for name in ("attention_options", "cross_attention_options")}
    return replace(block, d_model=d_model, n_heads=n_heads, d_ff=block.d_ff if d_ff is None else d_ff, **options)


def by_head(options: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """Options of attention, with numbers for each head copied as the heads are."""
    index = Copies.make(old, new, neighbours=options.get("n_kv_heads") is not None).index.tolist()
    return {name: [value[head] for head in index] if name in BY_HEAD and isinstance(value, list | tuple) else value
            for name, value in options.items()}


def grown(old: DepthModel, new: DepthModel, unequal: float, shared: dict) -> Lineage:
    """Where the parameters of a grown model come from. ``shared``: copies that several models have alike."""
    before, after = old.config.block, new.config.block
    head_dims = before.d_model // before.n_heads, after.d_model // after.n_heads
    width = Width((before.d_model, after.d_model), head_dims, unequal, shared)
    axes = around(old, new, width)
    for i, (block, made) in enumerate(zip(old.layers, new.layers, strict=True)):
        axes |= prefixed(f"layers.{i}", in_block(block, made, width))
    if type(old.layers) in BESIDE_BLOCKS:
        first = in_block(old.layers[0], new.layers[0], width)
        axes |= prefixed("layers", BESIDE_BLOCKS[type(old.layers)](old.layers, first, width))
    return {name: Origin(((name, 1.0),), value) for name, value in axes.items()}


def in_block(old: nn.Module, new: nn.Module, width: Width) -> Axes:
    """The axes of a block."""
    axes = {}
    for name, sublayer in old.named_children():
        made = getattr(new, name)
        for part, table, what in (("core", CORES, name), ("placement", PLACEMENTS, "norm")):
            rule = rule_for(table, getattr(sublayer, part), what)
            axes |= prefixed(f"{name}.{part}", rule(getattr(sublayer, part), getattr(made, part), width))
    return axes


@torch.no_grad()
def stir(new: nn.Module, lineage: Lineage, noise: float) -> None:
    """Add noise to the copied entries of matrices."""
    if not noise:
        return
    for name, p in new.named_parameters():
        copied = torch.zeros((), dtype=torch.bool)
        for at, axis in enumerate(lineage[name].axes):
            if axis is not None:
                copied = copied | axis.again.view(-1, *[1] * (p.dim() - 1 - at))
        if p.dim() >= 2 and copied.any():
            scale = noise * p.square().mean().sqrt()
            p.add_(torch.randn_like(p) * scale * copied.to(p.device))
