"""A layer as a vector field: its sublayers are parts, and the coupling says how a step treats them.

The field of a block is dz/dl = Σ f_part(z, l), attention first. ``lie`` and ``strang`` let the parts take turns within
a step (splitting), ``parallel`` evaluates their sum, ``composed`` makes one field of the whole textbook layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from odeformer.attention import ATTENTION
from odeformer.attention.base import Attention
from odeformer.context import Context
from odeformer.feedforward import FEEDFORWARD
from odeformer.norms import NORMS
from odeformer.own import own
from odeformer.tables import at_least, build, check_kinds, known_options, look_up, probability


@dataclass(frozen=True)
class BlockConfig:
    """One layer. ``attention``, ``feedforward``, ``norm``, ``coupling``, ``position`` and ``init`` are table keys (or
    own classes); the ``*_options`` go to the entries they name. ``cross_attention`` is a decoder's to its encoder.
    ``d_ff`` defaults to 4 d_model.

    ``dropout`` acts on each sublayer's output. ``dropout_per`` "solve": one mask for each piece of depth (layer) and
    forward pass, shared by all stages and steps, so that what is integrated is one field; gradient modes that compute
    it again use the same mask. "evaluation": a new mask whenever f is evaluated. Adaptive and implicit solvers refuse
    that, as their error estimates and iterations would chase the noise, and so does gradient="adjoint", the gradient of
    a flow that then does not exist; the other gradient modes draw the same numbers again."""

    d_model: int
    n_heads: int
    d_ff: int | None = field(default=None, kw_only=True)
    attention: str | type = field(default="softmax", kw_only=True)
    cross_attention: str | type = field(default="softmax", kw_only=True)
    feedforward: str | type = field(default="gelu", kw_only=True)
    norm: str | type = field(default="pre", kw_only=True)
    coupling: str | type = field(default="lie", kw_only=True)
    position: str | type = field(default="learned", kw_only=True)
    position_options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    dropout: float = field(default=0.0, kw_only=True)
    dropout_per: str = field(default="solve", kw_only=True)
    attention_options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    cross_attention_options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    feedforward_options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    norm_options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    init: str | Callable = field(default="xavier_uniform", kw_only=True)
    init_options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        check_kinds(self)
        from odeformer.init import INITIALIZERS
        from odeformer.positions import POSITIONS

        at_least("d_model", self.d_model, 1)
        at_least("n_heads", self.n_heads, 1)
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads; got d_model = {self.d_model}, "
                             f"n_heads = {self.n_heads}")
        if self.d_ff is not None:
            at_least("d_ff", self.d_ff, 1)
        probability("dropout", self.dropout)
        if self.dropout_per not in ("solve", "evaluation"):
            raise ValueError(f"dropout_per must be 'solve' or 'evaluation', got {self.dropout_per!r}")
        for table, name in ((ATTENTION, "attention"), (ATTENTION, "cross_attention"),
                            (FEEDFORWARD, "feedforward"), (NORMS, "norm"), (COUPLINGS, "coupling"),
                            (POSITIONS, "position"), (INITIALIZERS, "init")):
            look_up(table, getattr(self, name), name)
        known_options(ATTENTION, self.cross_attention, "cross_attention", self.cross_attention_options, 2)
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Raises ValueError for settings that do not go together."""
        from odeformer.positions import POSITIONS

        if getattr(look_up(ATTENTION, self.attention, "attention"), "for_memory", False):
            raise ValueError(f"attention {self.attention!r} is for cross-attention: its prior is centred on the tokens "
                             "of a memory")
        head_dim = self.d_model // self.n_heads
        if getattr(look_up(POSITIONS, self.position, "position"), "turns", False) and head_dim % 2:
            raise ValueError(f"position {self.position!r} turns pairs of coordinates, so head_dim = d_model / n_heads "
                             f"must be even; got {head_dim}")


class Sublayer(nn.Module):
    """A core (attention, feed-forward) with its norm and dropout; called it gives the increment."""

    def __init__(self, core: nn.Module, placement: nn.Module, dropout: float):
        super().__init__()
        self.core, self.placement, self.dropout = core, placement, dropout

    @property
    def finite(self) -> bool:
        """Whether the increment is at padding, where z is 0."""
        return getattr(self.core, "finite", False) and getattr(self.placement, "finite", False)

    def run(self, x: Tensor, context: Context, layer: int) -> Tensor:
        """The core on its normalised input."""
        return self.core(x)

    def forward(self, z: Tensor, context: Context, layer: int = 0) -> Tensor:
        """dz/dl in a layer, shaped like z (batch, tokens, d_model)."""
        if context.training and self.dropout:
            k = self.placement(z, lambda x: context.drop(self, layer, self.dropout, self.run(x, context, layer)))
        else:
            k = self.placement(z, lambda x: self.run(x, context, layer))
        return context.increment(layer, k, self)


NEEDS = {"rotary": "rotary positions", "slot": "a key/value cache (cache=None goes without)"}


def attend(core: nn.Module, x: Tensor, arguments: dict[str, Any]) -> Tensor:
    """The core with these arguments. Raises ValueError where an own class has none for what the pass needs."""
    if not isinstance(core, Attention) and (needed := NEEDS.keys() & arguments.keys()):
        taken = inspect.signature(core.forward).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        for name in () if open_ended else needed - taken.keys():
            raise ValueError(f"attention {type(core).__name__} does not take {NEEDS[name]}: derive it from "
                             f"odeformer.attention.base.Attention, or give its forward an argument {name!r}")
    return core(x, **arguments)


class AttentionSublayer(Sublayer):
    """Self-attention under the masks of the forward pass."""

    def run(self, x: Tensor, context: Context, layer: int) -> Tensor:
        arguments, core = context.attention(layer), self.core
        sight = context.sight
        if sight is not None and getattr(core, "takes_sight", False) and getattr(self.placement, "finite", False):
            arguments["sight"] = sight
        return attend(core, x, arguments)


class CrossAttentionSublayer(AttentionSublayer):
    """Attention to the memory of the forward pass, an encoder's output."""

    def run(self, x: Tensor, context: Context, layer: int) -> Tensor:
        arguments = context.cross_attention(self)
        if isinstance(self.core, Attention):
            arguments["first"] = context.first
        return attend(self.core, x, arguments)


class RoutedSublayer(Sublayer):
    """A layer of experts, which is told of the forward pass and reports to it."""

    def run(self, x: Tensor, context: Context, layer: int) -> Tensor:
        return self.core(x, context.visit(self.core, layer))


class Block(nn.Module):
    """The sublayers of one layer, in order: attention, attention to a memory if ``cross``, feed-forward.

    ``n_layers``: the model's depth, for entries that scale with it.
    """

    def __init__(self, config: BlockConfig, n_layers: int = 1, *, cross: bool = False):
        super().__init__()
        d_model, shape = config.d_model, {"n_layers": n_layers}

        def placement() -> nn.Module:
            return build(NORMS, config.norm, "norm", d_model, options=config.norm_options, shape=shape)

        attention = build(ATTENTION, config.attention, "attention", d_model, config.n_heads,
                          options=config.attention_options, shape=shape)
        feedforward = build(FEEDFORWARD, config.feedforward, "feedforward", d_model, config.d_ff or 4 * d_model,
                            options=config.feedforward_options, shape=shape)
        self.attention = AttentionSublayer(attention, placement(), config.dropout)
        self.cross_attention = None
        if cross:
            core = build(ATTENTION, config.cross_attention, "cross_attention", d_model, config.n_heads,
                         options=config.cross_attention_options, shape=shape)
            self.cross_attention = CrossAttentionSublayer(core, placement(), config.dropout)
        kind = RoutedSublayer if getattr(feedforward, "routed", False) else Sublayer
        self.feedforward = kind(feedforward, placement(), config.dropout)

    @property
    def parts(self) -> dict[str, Sublayer]:
        """The sublayers by name, in the order in which a textbook layer applies them."""
        return {name: child for name, child in self.named_children() if isinstance(child, Sublayer)}

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """The same without names."""
        return tuple([child for child in self._modules.values() if isinstance(child, Sublayer)])


class Part:
    """One sublayer of a layer as a vector field f(z, l) within a forward pass."""

    def __init__(self, sublayer: Sublayer, context: Context, layer: int = 0):
        self.sublayer, self.context, self.layer = sublayer, context, layer

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        return self.sublayer(z, self.context, self.layer)


class Sum:
    """dz/dl = Σ f_part(z, l): what ``parallel`` evaluates, and what splitting methods converge to as h -> 0."""

    splitting: str | None = None

    def __init__(self, parts: Sequence[Callable[[Tensor, Tensor], Tensor]]):
        self.parts = tuple(parts)

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        first, *rest = self.parts
        k = first(z, l)
        for part in rest:
            k = k + part(z, l)
        return k


class Lie(Sum):
    """Each sublayer in turn over the whole step: with Euler and h = 1 the textbook Transformer layer (order 1)."""

    splitting = "lie"


class StrangCoupling(Sum):
    """Half a step of attention, one of feed-forward, half a step of attention (order 2)."""

    splitting = "strang"


class Parallel(Sum):
    """All sublayers from the same state (as in GPT-J), integrated at the solver's full order."""


class Composed(Sum):
    """One field of the whole layer: f(z) = Σ_i f_i(z + f_1 + ... + f_{i-1}), the increment of the textbook layer.

    Its evaluation counts as one; Euler with h = 1 is the textbook layer, other solvers keep their full order.
    """

    has_parts = False

    def __init__(self, parts: Sequence[Callable[[Tensor, Tensor], Tensor]]):
        self._parts = tuple(parts)
        self.parts = None

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        first, *rest = self._parts
        k = first(z, l)
        for part in rest:
            k = k + part(z + k, l)
        return k


COUPLINGS = {
    "lie": Lie,
    "strang": StrangCoupling,
    "parallel": Parallel,
    "composed": Composed,
}


def block_field(block: Block, coupling: str | type, context: Context, layer: int = 0) -> Any:
    """The vector field of a block in a forward pass, as the given layer."""
    sublayers = map(own, block.sublayers) if context.replayed else block.sublayers
    coupling = look_up(COUPLINGS, coupling, "coupling")
    if context.compiled is not None:
        return context.compiled.field(coupling, sublayers, context, layer)
    return coupling([Part(sublayer, context, layer) for sublayer in sublayers])
