"""How the modules of a layer grow in width: tables from a module's class to a rule.

``rule(old, new, width)`` gives the axes of every parameter and buffer that the module has, by name. ``old`` and ``new``
have the sizes before and after; ``width`` knows how the model's state grows. A rule raises ValueError, with the reason,
where no values of the new parameters keep the function. Classes are looked up as they are: a subclass may do anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from odeformer import attention as kinds
from odeformer import feedforward, norms, smooth_weights
from odeformer.attention import head_parameter
from odeformer.experts import Experts, ExpertSlices
from odeformer.growth.maps import Axis, Copies

Axes = dict[str, tuple[Axis | None, ...]]


@dataclass(frozen=True, eq=False)
class Width:
    """How the model's state grows, and other units on demand: the same for all layers.

    ``d_model``, ``head_dim``: before and after. ``unequal``: see Copies.make. ``made``: what there is already.
    """

    d_model: tuple[int, int]
    head_dim: tuple[int, int]
    unequal: float = 0.0
    made: dict[tuple, Copies] = field(default_factory=dict)

    @property
    def state(self) -> Copies:
        """How the features of the state grow."""
        return self.copies("features", *self.d_model)

    def copies(self, what: str, old: int, new: int, *, neighbours: bool = False) -> Copies:
        """How old units, called ``what``, grow to new ones."""
        key = what, old, new, neighbours
        if key not in self.made:
            self.made[key] = Copies.make(old, new, neighbours=neighbours, unequal=self.unequal)
        return self.made[key]

    def need_even(self, what: str) -> None:
        """Raises ValueError where the state's features do not all have as many copies."""
        if not self.state.even:
            old, new = self.state.size, len(self.state.index)
            raise ValueError(f"d_model must grow by a whole factor, got {new} from {old}: {what} averages over the "
                             "features, and copies of some of them but not of others change that average")


Rule = Callable[[nn.Module, nn.Module, Width], Axes]


def rule_for(table: Mapping[type, Rule], module: nn.Module, what: str) -> Rule:
    """The rule for a module's class. Raises ValueError for a class that has none."""
    if type(module) not in table:
        raise ValueError(f"growth has no rule for the {what} {type(module).__name__}; known: "
                         f"{', '.join(kind.__name__ for kind in table)}. Add one to that table of "
                         "odeformer.growth")
    return table[type(module)]


def prefixed(path: str, axes: Axes) -> Axes:
    """The axes of a module, under its path."""
    return {f"{path}.{name}" if path else name: value for name, value in axes.items()}


def linear(layer: nn.Module, rows: Axis | None, columns: Axis | None, path: str = "") -> Axes:
    """A linear map with a weight (d_out, d_in) and a bias, if it has one."""
    axes: Axes = {"weight": (rows, columns)}
    if layer.bias is not None:
        axes["bias"] = (rows,)
    return prefixed(path, axes)


def affine(norm: nn.Module, axis: Axis, path: str = "") -> Axes:
    """The scale and shift of a norm."""
    return prefixed(path, {name: (axis,) for name, _ in norm.named_parameters(recurse=False)})


# attention


def attention(old: Any, new: Any, width: Width) -> Axes:
    """Heads are copied, output columns divided. Coordinates of a head are copied, and queries (or their norm's scale)
    multiplied so that q · k / sqrt(head_dim) stays.

    Heads of key and value that the options number stay as they are: more queries share each of them.
    """
    state, size = width.state, width.copies("coordinates", old.head_dim, new.head_dim)
    own = old.n_kv_heads == old.n_heads and new.n_kv_heads == new.n_heads
    query = width.copies("heads", old.n_heads, new.n_heads, neighbours=not own)
    pair = query if own else width.copies("key heads", old.n_kv_heads, new.n_kv_heads)
    normed = not isinstance(old.query_norm, nn.Identity)
    if normed and not size.even:
        raise ValueError(f"head_dim must grow by a whole factor under qk_norm, which averages over it; got "
                         f"{new.head_dim} from {old.head_dim}")
    rows = size.writes if normed else size.matched
    axes = {**linear(old.query, query.writes.within(rows), state.reads, "query"),
            **linear(old.key, pair.writes.within(size.writes), state.reads, "key"),
            **linear(old.value, pair.writes.within(size.writes), state.reads, "value"),
            **linear(old.output, state.writes, query.reads.within(size.reads), "output")}
    if normed:
        axes |= affine(old.query_norm, size.matched, "query_norm") | affine(old.key_norm, size.writes, "key_norm")
    for path, part in old.named_modules():
        if type(part) in HEAD_PARTS:
            axes |= prefixed(path, HEAD_PARTS[type(part)](part, query, size))
    return axes


def fixed_by_head(part: Any, query: Copies, size: Copies) -> Axes:
    """A number for each head in a buffer."""
    return {} if part.value is None else {"value": (query.writes,)}


def learned_by_head(part: Any, query: Copies, size: Copies) -> Axes:
    """A parameter for each head."""
    return {"raw": (query.writes,)}


def head_network(part: Any, query: Copies, size: Copies) -> Axes:
    """w^T tanh(W q + b), of queries that ``Copies.matched`` has scaled."""
    scale = size.matched.value
    source = Axis(size.index, size.share / scale, scale, size.size)
    return {**linear(part.hidden, size.writes, source, "hidden"), **linear(part.last, None, size.reads, "last")}


HEAD_PARTS = {
    head_parameter.Fixed: fixed_by_head,
    head_parameter.Learned: learned_by_head,
    head_parameter.Predicted: learned_by_head,
    head_parameter.HeadNetwork: head_network,
}


def relative(old: Any, new: Any, width: Width) -> Axes:
    """The tables, shared by the heads, grow as queries, keys and values do."""
    size = width.copies("coordinates", old.head_dim, new.head_dim)
    tables = {"query_table": size.matched, "key_table": size.writes, "value_table": size.writes}
    return attention(old, new, width) | {name: (None, axis) for name, axis in tables.items()
                                         if getattr(old, name) is not None}


def alibi(old: Any, new: Any, width: Width) -> Axes:
    """As any, but for the slopes, which follow from the number of heads."""
    if old.n_heads != new.n_heads:
        raise ValueError(f"n_heads must stay {old.n_heads} for attention 'alibi', got {new.n_heads}: its slopes follow "
                         "from the number of heads, and those of copied heads would change. Let head_dim grow, or take "
                         "attention 'local_distance' with the slopes as gamma")
    return attention(old, new, width)


def l2(old: Any, new: Any, width: Width) -> Axes:
    """Keys are the queries, so both have the root of the factor. Values are made of W^Q^T W^V, whose sum over features
    holds their shares in W^Q already."""
    state, size = width.state, width.copies("coordinates", old.head_dim, new.head_dim)
    query = width.copies("heads", old.n_heads, new.n_heads)
    root = size.matched.value.sqrt()
    rows = query.writes.within(Axis(size.index, root, size.share / root, size.size))
    return {"query.weight": (rows, state.reads), "value.weight": (query.writes.within(size.writes), state.writes),
            "output.weight": (state.writes, query.reads.within(size.reads))}


# feed-forward


def hidden_units(old: Any, new: Any, width: Width) -> Axes:
    """Hidden units are copied, output columns divided (Chen, Goodfellow & Shlens 2016, Net2WiderNet)."""
    state, units = width.state, width.copies("units", old.hidden.out_features, new.hidden.out_features)
    axes = linear(old.output, state.writes, units.reads, "output")
    for name in ("hidden", "gate"):
        if hasattr(old, name):
            axes |= linear(getattr(old, name), units.writes, state.reads, name)
    return axes


def router(old: nn.Module | None, width: Width) -> Axes:
    """Logits stay what they are, and so does what is drawn for them."""
    if old is None:
        return {}
    names = ("weight",) if old.noise is None else ("weight", "noise")
    return {f"router.{name}": (None, width.state.reads) for name in names}


def experts(old: Any, new: Any, width: Width) -> Axes:
    """Each expert's hidden units, all experts alike; their number stays."""
    state, units = width.state, width.copies("units", old.d_ff, new.d_ff)
    sides = {"hidden": (state.reads, units.writes), "gate": (state.reads, units.writes),
             "output": (units.reads, state.writes)}
    axes = router(old.router, width)
    for name, (rows, columns) in sides.items():
        stack = getattr(old, name)
        if stack is not None:
            axes[f"{name}.weight"] = None, rows, columns
            if stack.bias is not None:
                axes[f"{name}.bias"] = None, columns
    return axes


def expert_slices(old: Any, new: Any, width: Width) -> Axes:
    """Hidden units within each slice; the number of slices stays."""
    n, state = old.n_experts, width.state
    units, slices = width.copies("units", old.d_ff // n, new.d_ff // n), Copies.make(n, n)
    return {**router(old.router, width),
            **linear(old.hidden, slices.writes.within(units.writes), state.reads, "hidden"),
            **linear(old.output, state.writes, slices.reads.within(units.reads), "output")}


# norms


def scales(old: Any, new: Any, width: Width) -> Axes:
    """Norms over the state; numbers stay, vectors (LayerScale) are copied, and what looks at the state is divided."""
    axes = {}
    for path, part in old.named_modules():
        if isinstance(part, (nn.LayerNorm, nn.RMSNorm)):
            width.need_even("a norm")
            axes |= affine(part, width.state.writes, path)
        elif isinstance(part, norms.Predicted):
            width.need_even("the root mean square from which β and γ are predicted")
            axes[f"{path}.weight"] = None, width.state.reads
    for name, p in old.named_parameters():
        axes.setdefault(name, (width.state.writes,) if name == "scale" else (None,) * p.dim())
    return axes


# weights that are functions of l, beside their blocks


def low_rank(old: Any, block: Axes, width: Width) -> Axes:
    """A has the rows of the matrix that A B is added to, B its columns."""
    axes: Axes = {}
    for key in old.left:
        *stack, rows, columns = block[key.replace("/", ".")]
        axes[f"left.{key}"], axes[f"right.{key}"] = (None, *stack, rows, None), (None, *stack, None, columns)
    return axes


def modulated(old: Any, block: Axes, width: Width) -> Axes:
    """The moves of norms, side by side."""
    axes = untouched(old, block, width)
    for part, layer in old.moves.items():
        terms = layer.out_features // width.state.size
        rows = Copies.make(terms, terms).writes.within(width.state.writes)
        axes |= linear(layer, rows, None, f"moves.{part}")
    return axes


def untouched(old: Any, block: Axes, width: Width) -> Axes:
    """Networks of l alone."""
    return {name: (None,) * p.dim() for name, p in old.named_parameters() if not name.split(".")[0].isdigit()}


CORES: dict[type, Rule] = {
    kinds.SoftmaxAttention: attention,
    kinds.WindowAttention: attention,
    kinds.LocalDistanceAttention: attention,
    kinds.LocalGaussianAttention: attention,
    kinds.LocalMixtureAttention: attention,
    kinds.LocalMultiplicativeAttention: attention,
    kinds.CrossGaussianAttention: attention,
    kinds.RelativeAttention: relative,
    kinds.AlibiAttention: alibi,
    kinds.L2Attention: l2,
    **{kind: hidden_units for kind in feedforward.FEEDFORWARD.values()  # other activations
       if kind.forward in (feedforward.FeedForward.forward, feedforward.GatedFeedForward.forward)},
    Experts: experts,
    ExpertSlices: expert_slices,
}
PLACEMENTS: dict[type, Rule] = dict.fromkeys(
    (norms.PreNorm, norms.PostNorm, norms.ResNorm, norms.WeightedNorm, norms.DeepNorm, norms.ReZero, norms.LayerScale,
     norms.SandwichNorm, norms.NoNorm, norms.CompleteP), scales)
BESIDE_BLOCKS: dict[type, Callable[[nn.Module, Axes, Width], Axes]] = {
    smooth_weights.LowRank: low_rank,
    smooth_weights.Modulated: modulated,
    smooth_weights.Hyper: untouched,
}
