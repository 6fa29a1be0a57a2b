"""Pruning by layers: after training with layer drop a shallower model can be cut out (Fan et al. 2020)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from odeformer.attention import ATTENTION
from odeformer.block import BlockConfig
from odeformer.feedforward import FEEDFORWARD
from odeformer.models.base import DepthModel, to_be_filled
from odeformer.models.parts import check_own_layers
from odeformer.models.seq2seq import Seq2Seq
from odeformer.norms import NORMS
from odeformer.rebuild import carry_over
from odeformer.tables import look_up
from odeformer.weights import WEIGHTS

ENTRIES = {"attention": ATTENTION, "cross_attention": ATTENTION, "feedforward": FEEDFORWARD, "norm": NORMS}


def prune(model: nn.Module, keep: Sequence[int], *, decoder_keep: Sequence[int] | None = None) -> nn.Module:
    """A shallower model of the layers ``keep`` (increasing numbers from 0), with copies of their parameters.

    Its config has n_layers = len(keep) and layer_drop = 0: it is the network that training with layer drop saw whenever
    it drew these layers and no others, without the factors ρ of eq. 31. What in a layer was scaled by the number of
    layers stays so. A ``Seq2Seq`` takes ``decoder_keep`` for its decoder, all layers if None.

    Raises ValueError where no config gives the kept layers: weights that are smooth in l; shared blocks of which the
    kept layers use others in turn than such sharing can say; a fusion or a solver whose learned weights link layers;
    a number of steps that does not divide.
    """
    memo: dict[int, Any] = {}  # one for the whole model, so that tied parameters stay tied
    with to_be_filled():
        if isinstance(model, Seq2Seq):
            return _prune_both(model, keep, decoder_keep, memo)
        check_own_layers(model, "prune")
        if decoder_keep is not None:
            raise ValueError(f"decoder_keep is for Seq2Seq, got it with {type(model).__name__}")
        return _prune(model, keep, memo)


def _prune_both(model: Seq2Seq, keep: Sequence[int], decoder_keep: Sequence[int] | None, memo: dict) -> Seq2Seq:
    decoder_keep = range(model.decoder.config.n_layers) if decoder_keep is None else decoder_keep
    encoder, decoder = _prune(model.encoder, keep, memo), _prune(model.decoder, decoder_keep, memo)
    new = Seq2Seq(replace(model.config, n_layers=encoder.config.n_layers, block=encoder.config.block,
                          depth=encoder.config.depth, n_decoder_layers=decoder.config.n_layers,
                          decoder_block=decoder.config.block, decoder_depth=decoder.config.depth))
    new.encoder, new.decoder, new.training = encoder, decoder, model.training
    return new


def _prune(model: DepthModel, keep: Sequence[int], memo: dict) -> DepthModel:
    keep = _read(keep, model.config.n_layers)
    blocks = _blocks(model, keep)
    new = type(model)(_config(model, keep, blocks))
    _check_sharing(model, new, blocks)
    new.solver = solver_of(model, new, memo)
    for at, block in enumerate(blocks):
        new.layers[new.layers.index(at)] = copy.deepcopy(model.layers[block], memo)
    carry_over(model, new, memo)
    return new


def _read(keep: Sequence[int], n_layers: int) -> list[int]:
    keep = list(keep) if isinstance(keep, Sequence | range) else [keep]
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in keep)
    if not keep or not whole or keep != sorted(set(keep)) or not 0 <= keep[0] <= keep[-1] < n_layers:
        raise ValueError(f"keep must hold increasing layer numbers from 0 to {n_layers - 1}, got {keep}")
    return keep


def _blocks(model: DepthModel, keep: list[int]) -> list[int]:
    """The block of each kept layer."""
    if not getattr(model.layers, "by_layer", False):
        raise ValueError(f"weights {model.config.depth.weights!r} vary within layers, so that none of them can be kept "
                         "by itself")
    if model.fusion is not None and any(True for _ in model.fusion.parameters()):
        raise ValueError(f"fusion {model.config.depth.fusion!r} has learned weights that link layers, which leave no "
                         "meaning to those of the kept ones")
    return [model.layers.index(layer) for layer in keep]


def _config(model: DepthModel, keep: list[int], blocks: list[int]) -> Any:
    config, n_layers = model.config, model.config.n_layers
    depth = config.depth
    n_steps = depth.n_steps
    if depth.grid is not None:
        raise ValueError(f"prune cannot tell which steps of a grid over {n_layers} layers to keep; give a number of "
                         "steps first: model.with_solver(solver, steps_per_layer=1)")
    if n_steps is not None:
        if n_steps * len(keep) % n_layers:
            raise ValueError(f"n_steps = {n_steps} over {n_layers} layers gives no whole number of steps over "
                             f"{len(keep)}; take another solver or number of steps first (with_solver)")
        n_steps = n_steps * len(keep) // n_layers
    options = dict(depth.weights_options)
    if "n_knots" in options_of(look_up(WEIGHTS, depth.weights, "weights")):
        options["n_knots"] = len(set(blocks))
    depth = replace(depth, n_steps=n_steps, weights_options=options, layer_drop=0.0)
    return replace(config, n_layers=len(keep), block=pinned(config.block, n_layers), depth=depth)


def pinned(block: BlockConfig, n_layers: int) -> BlockConfig:
    """The block's config with the number of layers that its entries were built for."""
    changes = {}
    for name, table in ENTRIES.items():
        options = getattr(block, f"{name}_options")
        if "n_layers" in options_of(look_up(table, getattr(block, name), name)):
            changes[f"{name}_options"] = {"n_layers": n_layers, **options}
    return replace(block, **changes)


def options_of(entry: Any) -> Any:
    return inspect.signature(entry).parameters


def _check_sharing(model: DepthModel, new: DepthModel, blocks: list[int]) -> None:
    """Raises ValueError unless the new layers share blocks exactly as the kept ones do."""
    made = [new.layers.index(at) for at in range(len(blocks))]
    pairs = set(zip(blocks, made, strict=True))
    if not len(pairs) == len(set(blocks)) == len(set(made)) == len(new.layers):
        raise ValueError(f"the kept layers use the blocks {blocks}, and weights {model.config.depth.weights!r} of "
                         f"{len(blocks)} layers would use {made}; keep others")


def solver_of(model: DepthModel, new: DepthModel, memo: dict) -> Any:
    """The new model's solver, with the learned coefficients of the old one's."""
    if not isinstance(model.solver, nn.Module):
        return new.solver
    old, made = ({name: x.shape for name, x in solver.state_dict().items()} for solver in (model.solver, new.solver))
    if old != made:
        raise ValueError(f"solver {model.solver.name!r} has learned weights for each step, which link the layers; take "
                         "another solver first (with_solver)")
    return copy.deepcopy(model.solver, memo)
