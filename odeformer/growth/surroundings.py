"""How what a model has beside its layers grows in width: what makes the first state, fusion, solver, norm and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from odeformer import fusion, grid_positions, heads, positions
from odeformer.growth.maps import Copies
from odeformer.growth.rules import Axes, Rule, Width, affine, linear, prefixed, rule_for, scales
from odeformer.models.base import DepthModel
from odeformer.models.series import SeriesEncoder


def around(old: DepthModel, new: DepthModel, width: Width) -> Axes:
    """The axes of everything but the layers. What has no rule is left out, and refused where parameters are filled."""
    state = width.state
    if isinstance(old, SeriesEncoder) and not state.plain:
        raise ValueError(f"d_model must stay {state.size} in a SeriesEncoder: the waves of its times follow from "
                         "d_model, and those of a larger one are no copies")
    axes: Axes = {}
    for name, module in old.named_children():
        made = getattr(new, name)
        if name in MODULES:
            axes |= prefixed(name, MODULES[name](module, made, width))
        elif name in TABLES:
            axes |= prefixed(name, rule_for(TABLES[name], module, name)(module, made, width))
    axes |= {name: (state.writes,) for name, _ in old.named_parameters(recurse=False) if name in VECTORS}
    return axes | tied(old, new, width)


def tied(old: DepthModel, new: DepthModel, width: Width) -> Axes:
    """Where the head's matrix is the embedding's, it is copied and not divided; then the norm before it is."""
    if not getattr(old.config, "tie_embeddings", False) or getattr(old, "head", None) is None:
        return {}
    head = isinstance(old.head, heads.MaskedLanguageModelling)
    path, norm = ("head.norm", old.head.norm) if head else ("final_norm", old.final_norm)
    units = grown(old.token_embedding.embedding_dim, new.token_embedding.embedding_dim, width)
    if isinstance(norm, nn.Identity) and not units.plain:
        raise ValueError(f"d_model must stay {units.size} under tie_embeddings in a model that ends without a norm: "
                         f"the tied matrix is copied as an embedding, so as a head it would read the state "
                         f"{units.ratio:g} times; untie it first")
    return affine(norm, units.reads, path)


def embedding(old: Any, new: Any, width: Width) -> Axes:
    """A table (rows, features)."""
    return {"weight": (None, grown(old.weight.shape[1], new.weight.shape[1], width).writes)}


def grown(old: int, new: int, width: Width) -> Copies:
    """How features grow that either are the state's or stay."""
    return Copies.make(old, old) if old == new else width.state


def normed(old: Any, new: Any, width: Width) -> Axes:
    """A norm over features."""
    if isinstance(old, nn.Identity):
        return {}
    units = grown(old.weight.shape[0], new.weight.shape[0], width)
    if not units.plain:
        width.need_even("a norm")
    return affine(old, units.writes)


def to_state(old: Any, new: Any, width: Width) -> Axes:
    """A linear map from what stays to the state."""
    return linear(old, width.state.writes, None)


def convolution(old: Any, new: Any, width: Width) -> Axes:
    """(d_model, channels, 3); the channels are those of the state or stay."""
    state = width.state
    channels = grown(old.in_channels, new.in_channels, width)
    return {"weight": (state.writes, channels.reads, None), "bias": (state.writes,)}


def pooler(old: Any, new: Any, width: Width) -> Axes:
    """An activation of a linear map."""
    return linear(old.transform, width.state.writes, width.state.reads, "transform")


def solver(old: Any, new: Any, width: Width) -> Axes:
    """Learned coefficients: numbers, but where they look at features.

    Raises ValueError for a solver with other weights of the size of d_model.
    """
    axes: Axes = {name: (None,) * p.dim() for name, p in old.named_parameters()}
    sides = {"in": width.state.reads, "out": width.state.writes, "": None}
    featured = {name: tuple(sides[side] for side in kinds) for name, kinds in FEATURED.get(old.name, {}).items()
                if name in axes}
    after = dict(new.named_parameters())
    for name, p in old.named_parameters():
        if after[name].shape != p.shape and name not in featured:
            raise ValueError(f"solver {old.name!r} has learned weights over features ({name}), for which growth has no "
                             "rule; take another solver first (with_solver)")
    return axes | featured


# heads


def linear_head(old: Any, new: Any, width: Width) -> Axes:
    """From the state, or several beside one another."""
    terms = old.in_features // width.state.size
    return linear(old, None, Copies.make(terms, terms).reads.within(width.state.reads))


def output_head(old: Any, new: Any, width: Width) -> Axes:
    """A linear map from states."""
    return linear(old.output, None, width.state.reads, "output")


def pooled_head(old: Any, new: Any, width: Width) -> Axes:
    """The same behind a pooler."""
    return output_head(old, new, width) | prefixed("pooler", pooler(old.pooler, new.pooler, width))


def masked_lm(old: Any, new: Any, width: Width) -> Axes:
    """BERT's, with a norm of its own."""
    units = grown(old.transform.out_features, new.transform.out_features, width)
    return {**linear(old.transform, units.writes, width.state.reads, "transform"),
            **prefixed("norm", normed(old.norm, new.norm, width)), **linear(old.output, None, units.reads, "output")}


# positions


def learned_table(old: Any, new: Any, width: Width) -> Axes:
    """(..., features)."""
    units = grown(old.table.shape[-1], new.table.shape[-1], width)
    return {"table": (*[None] * (old.table.dim() - 1), units.writes)}


def nothing(old: Any, new: Any, width: Width) -> Axes:
    """No parameters."""
    return {}


def sinusoidal(old: Any, new: Any, width: Width) -> Axes:
    """Sines of another width are other numbers."""
    if old.d_model != new.d_model:
        raise ValueError(f"d_model must stay {old.d_model} under sinusoidal positions: their values follow from "
                         "d_model, and those of a larger one are no copies")
    return {}


def turning(old: Any, new: Any, width: Width) -> Axes:
    """Angles follow from head_dim."""
    before, after = width.head_dim
    if before != after:
        raise ValueError(f"head_dim must stay {before} under rotary positions, got {after}: their angles follow from "
                         "head_dim. Let n_heads grow with d_model (the default)")
    return {}


# fusion


def fusion_norms(old: Any, new: Any, width: Width) -> Axes:
    """The norms of a form, and numbers that weigh states."""
    axes = prefixed("form", scales(old.form, new.form, width))
    return axes | {name: (None,) * p.dim() for name, p in old.named_parameters() if not name.startswith("form.")}


def concat(old: Any, new: Any, width: Width) -> Axes:
    """(d_model, terms d_model)."""
    state, axes = width.state, fusion_norms(old, new, width)
    for name, p in old.weight.items():
        terms = p.shape[1] // state.size
        axes[f"weight.{name}"] = state.writes, Copies.make(terms, terms).reads.within(state.reads)
    return axes


def depth_attention(old: Any, new: Any, width: Width) -> Axes:
    """u^T W u / sqrt(d_model) with a root mean square of 1: it would shrink by the root of the factor."""
    width.need_even("the root mean square of a state")
    state, axes = width.state, fusion_norms(old, new, width)
    root = state.ratio**0.5
    return axes | {f"weight.{name}": (state.reads.scaled(root, 1 / root), state.reads) for name in old.weight}


POSITIONS: dict[type, Rule] = {
    positions.NoPosition: nothing,
    positions.LearnedPosition: learned_table,
    positions.TablePosition: learned_table,
    positions.SinusoidalPosition: sinusoidal,
    positions.RotaryPosition: turning,
    grid_positions.NoGrid: nothing,
    grid_positions.LearnedGrid: learned_table,
    grid_positions.SinusoidalGrid: sinusoidal,
    grid_positions.RotaryGrid: turning,
}
HEADS: dict[type, Rule] = {
    nn.Linear: linear_head,
    heads.Classification: output_head,
    heads.Tagging: output_head,
    heads.PooledClassification: pooled_head,
    heads.MaskedLanguageModelling: masked_lm,
}
FUSIONS: dict[type, Rule] = {
    fusion.Residual: fusion_norms,
    fusion.Fixed: fusion_norms,
    fusion.Mean: fusion_norms,
    fusion.Learned: fusion_norms,
    fusion.Concat: concat,
    fusion.Attention: depth_attention,
}
TABLES = {"position": POSITIONS, "head": HEADS, "fusion": FUSIONS}  # parts of a model that an option chooses
MODULES: dict[str, Callable[[Any, Any, Width], Axes]] = {  # the others, by their names
    "token_embedding": embedding,
    "token_type_embedding": embedding,
    "embedding_norm": normed,
    "embedding_projection": to_state,
    "patch_embedding": to_state,
    "value_embedding": to_state,
    "bands": convolution,
    "halving": convolution,
    "final_norm": normed,
    "pooler": pooler,
    "solver": solver,
}
VECTORS = ("class_token", "class_position", "mask_token")  # parameters (d_model,) of a model's own
FEATURED = {  # learned solvers: the axes of their parameters that go over features
    "rk2_gate": {"weight": ("", "in")},
    "hypersolver": {"correction.state": ("", "in"), "correction.slope": ("", "in"), "correction.out": ("out", "")},
}
