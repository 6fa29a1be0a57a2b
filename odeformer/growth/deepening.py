"""Deeper models made of the layers of a trained one: layers that change nothing yet, copies, interpolations, and
refinements of the grid over depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import nn

from odeformer import norms
from odeformer.block import COUPLINGS, Composed, Sublayer
from odeformer.growth.lineage import Lineage, Origin, fill, joined, tensors
from odeformer.models.base import DepthModel, to_be_filled
from odeformer.models.parts import check_own_layers
from odeformer.models.seq2seq import Seq2Seq
from odeformer.pruning import options_of, pinned, solver_of
from odeformer.tables import at_least, build, look_up
from odeformer.weights import WEIGHTS

Mix = tuple[tuple[int, Fraction], ...]  # (number of an old layer or block, its weight)


@dataclass(frozen=True)
class Layer:
    """A new layer: the weights Σ weight * those of old layers, its increment times ``scale``.

    ``fresh``: not one that was trained.
    """

    mix: Mix
    scale: Fraction = Fraction(1)
    fresh: bool = False


def copies(layers: Iterator[int]) -> list[Layer]:
    """Layers that are old ones."""
    return [Layer(((layer, Fraction(1)),)) for layer in layers]


def stacked(old: int, new: int) -> list[Layer]:
    """0 1 2 0 1 2 (Gong et al. 2019)."""
    return copies(j % old for j in range(new))


def interleaved(old: int, new: int) -> list[Layer]:
    """0 0 1 1 2 2 (Chang et al. 2018)."""
    return copies(j * old // new for j in range(new))


def interpolated(old: int, new: int) -> list[Layer]:
    """Linear in l between the midpoints of the old layers, at those of the new ones, both over one depth; constant
    beyond the outer midpoints."""
    layers = []
    for j in range(new):
        at = Fraction(2 * j + 1, 2) * old / new - Fraction(1, 2)
        at = min(max(at, Fraction(0)), Fraction(old - 1))
        below = int(at)
        mix = ((below, 1 - (at - below)), (below + 1, at - below))
        layers.append(Layer(tuple((layer, weight) for layer, weight in mix if weight)))
    return layers


def refined(old: int, new: int) -> list[Layer]:
    """0 0 1 1 2 2, the m copies of a layer with 1 / m of its increment: the old depth in smaller steps."""
    layers = interleaved(old, new)
    times = Counter(layer.mix for layer in layers)
    return [replace(layer, scale=Fraction(1, times[layer.mix])) for layer in layers]


SCHEMES: dict[str, Callable[[int, int], list[Layer]]] = {
    "stack": stacked,
    "interleave": interleaved,
    "interpolate": interpolated,
    "refine": refined,
}


def deepen(model: nn.Module, *, scheme: str = "zero", at: int | None = None, n_layers: int | None = None,
           part: str = "both") -> nn.Module:
    """A deeper model with parameters of its own, made of the layers of ``model``. What in a layer was scaled by the
    number of layers stays so.

    ``scheme`` "zero" inserts one layer, which becomes layer ``at`` (None: the last): a copy of the layer that stood
    there with its output projections at 0, or what else its increment is a multiple of (the scale after the core of
    norm "res" and "sandwich", α of "rezero"). It is the identity under every solver, so the function stays; an adaptive
    solver keeps it within its tolerance, as its steps change. The others grow to ``n_layers``, any number above the
    old one: "stack" 0 1 2 0 1 2 (Gong et al. 2019), "interleave" 0 0 1 1 2 2, "interpolate" linear in l at the new
    layers' midpoints. These start close to a good model, but not from its function: they integrate over a longer depth.
    "refine" is "interleave" with the increments divided, so that the depth stays what it was and the steps get smaller:
    the output changes by the solver's truncation error (``refinement_error``).

    ``part``: of a Seq2Seq, "both", "encoder" or "decoder".

    Raises ValueError for arguments of another scheme, and with the reason where it cannot be done: weights that are
    smooth in l (there ``odeformer.refit.prolong``), shared blocks that the new layers would share otherwise, learned
    weights of a fusion or solver that link layers, a grid, a number of steps that does not divide. "zero" and "refine"
    also for increments that are no multiple of a parameter (norm "post", "deepnorm", "weighted" with γ other than 1),
    and where layers act upon others: a solver whose history runs across layers ("zero") or whose correction depends on
    l, fusion, input injection, layer drop that depends on the layer's number; "refine" for coupling "composed", whose
    field holds a whole step.
    """
    if scheme != "zero" and scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of zero, {', '.join(SCHEMES)}, got {scheme!r}")
    wrong, value = ("n_layers", n_layers) if scheme == "zero" else ("at", at)
    if value is not None:
        raise ValueError(f"{wrong} is not for scheme {scheme!r}, got {value!r}")
    if part not in ("both", "encoder", "decoder"):
        raise ValueError(f"part must be 'both', 'encoder' or 'decoder', got {part!r}")
    if part != "both" and not isinstance(model, Seq2Seq):
        raise ValueError(f"part {part!r} is for Seq2Seq, got it with {type(model).__name__}")

    def layers(old: int) -> list[Layer]:
        return with_zero(old, at) if scheme == "zero" else SCHEMES[scheme](old, grown_to(old, n_layers))

    with to_be_filled():
        if isinstance(model, Seq2Seq):
            return _deepen_both(model, scheme, layers, part)
        check_own_layers(model, "deepen")
        return _finish(_emptied(model, scheme, layers), model)


def with_zero(old: int, at: int | None) -> list[Layer]:
    """The old layers and one that does nothing. Raises TypeError or ValueError for a place beyond them."""
    at = old if at is None else at
    at_least("at", at, 0)
    if at > old:
        raise ValueError(f"at must be from 0 to the number of layers, {old}; got {at}")
    layers = copies(iter(range(old)))
    layers.insert(at, Layer(((min(at, old - 1), Fraction(1)),), Fraction(0), fresh=True))
    return layers


def grown_to(old: int, n_layers: int | None) -> int:
    """n_layers. Raises TypeError or ValueError unless it is an int above ``old``."""
    if n_layers is None:
        raise ValueError(f"n_layers must be given, the new number of layers, above {old}")
    at_least("n_layers", n_layers, old + 1)
    return n_layers


def _deepen_both(model: Seq2Seq, scheme: str, layers: Callable[[int], list[Layer]], part: str) -> Seq2Seq:
    made = {}
    for name in ("encoder", "decoder"):
        old = getattr(model, name)
        made[name] = _emptied(old, scheme, layers) if part in ("both", name) else (old, _same(old))
    (encoder, of_encoder), (decoder, of_decoder) = made["encoder"], made["decoder"]
    new = type(model)(replace(model.config, n_layers=encoder.config.n_layers, block=encoder.config.block,
                          depth=encoder.config.depth, n_decoder_layers=decoder.config.n_layers,
                          decoder_block=decoder.config.block, decoder_depth=decoder.config.depth))
    return _finish((new, joined({"encoder.": of_encoder, "decoder.": of_decoder}, new)), model)


def _same(model: DepthModel) -> Lineage:
    return {name: Origin(((name, 1.0),)) for name in tensors(model)}


def _finish(made: tuple[nn.Module, Lineage], model: nn.Module) -> nn.Module:
    new, lineage = made
    fill(new, model, lineage)
    for module in new.modules():
        module.training = model.training
    return new


def _emptied(model: DepthModel, scheme: str, layers: Callable[[int], list[Layer]]) -> tuple[DepthModel, Lineage]:
    """The deeper model, still to be filled, and what with."""
    _check(model, scheme)
    index, plan = model.layers.index, layers(model.config.n_layers)
    plan = [replace(layer, mix=_by_block(layer.mix, index)) for layer in plan]
    new = type(model)(_config(model, plan))
    new.solver = solver_of(model, new, {})
    lineage = {name: origin for name, origin in _same(model).items() if not _in_block(name)}
    for number, layer in enumerate(plan):
        block = new.layers.index(number)
        scaled = _scaled(model, layer) if layer.scale != 1 else set()
        for name in tensors(model.layers[0]):
            sources = tuple((f"layers.{i}.{name}", float(weight)) for i, weight in layer.mix)
            lineage[f"layers.{block}.{name}"] = _origin(sources, layer, name in scaled)
    return new, lineage


def _origin(sources: tuple, layer: Layer, scaled: bool) -> Origin:
    """As an increment is divided, so are the gradients of all that is not divided itself."""
    if layer.fresh:
        return Origin(sources, value=float(layer.scale) if scaled else 1.0, carried=False)
    scale = float(layer.scale)
    return Origin(sources, value=scale if scaled else 1.0, gradient=1.0 if scaled else scale)


def _in_block(name: str) -> bool:
    head, _, rest = name.partition(".")
    return head == "layers" and rest.split(".")[0].isdigit()


def _by_block(mix: Mix, index: Callable[[int], int]) -> Mix:
    total: Counter = Counter()
    for layer, weight in mix:
        total[index(layer)] += weight
    return tuple(total.items())


def _config(model: DepthModel, plan: list[Layer]) -> Any:
    config, old, n_layers = model.config, model.config.n_layers, len(plan)
    depth = config.depth
    n_steps = depth.n_steps
    if n_steps is not None:
        if n_steps * n_layers % old:
            raise ValueError(f"n_steps = {n_steps} over {old} layers gives no whole number of steps over {n_layers}; "
                             "take another number first (with_solver)")
        n_steps = n_steps * n_layers // old
    depth = replace(depth, n_steps=n_steps, weights_options=_sharing(model, plan))
    return replace(config, n_layers=n_layers, block=pinned(config.block, old), depth=depth)


def _sharing(model: DepthModel, plan: list[Layer]) -> dict[str, Any]:
    """The options under which the new layers share blocks only where they are the same: with as few blocks as that
    takes, and at most as many for a layer as before.

    Raises ValueError where there are none.
    """
    depth, old = model.config.depth, model.config.n_layers
    options, distinct = dict(depth.weights_options), list(dict.fromkeys(plan))
    candidates = [options]
    if "n_knots" in options_of(look_up(WEIGHTS, depth.weights, "weights")):
        most = max(len(distinct), -(-len(model.layers) * len(plan) // old))
        candidates = [options | {"n_knots": n} for n in range(len(distinct), most + 1)]
    for chosen in candidates:
        made = build(WEIGHTS, depth.weights, "weights", len(plan), nn.Identity, options=chosen)
        uses: dict[int, set[Layer]] = {}
        for number, layer in enumerate(plan):
            uses.setdefault(made.index(number), set()).add(layer)
        if all(len(layers) == 1 for layers in uses.values()):
            return chosen
    wanted = ", ".join(str(distinct.index(layer)) for layer in plan)
    raise ValueError(f"weights {depth.weights!r} cannot share blocks among {len(plan)} layers as the scheme wants it "
                     f"({wanted}); take another scheme or n_layers, or a model with weights 'piecewise'")


def _check(model: DepthModel, scheme: str) -> None:
    """Raises ValueError where the scheme has no meaning for the model, or not the one that it claims."""
    config, depth, fusion = model.config, model.config.depth, model.fusion
    if not getattr(model.layers, "by_layer", False):
        raise ValueError(f"weights {depth.weights!r} are functions of l, and no layers that could be copied; give them "
                         "more knots instead, with odeformer.refit.prolong")
    if getattr(depth, "grid", None) is not None:
        raise ValueError("grid holds the depths of all steps, which end at the old number of layers; take a number of "
                         "steps first (with_solver)")
    if fusion is not None and any(True for _ in fusion.parameters()):
        raise ValueError(f"fusion {depth.fusion!r} has learned weights that link layers, which say nothing of new ones")
    if scheme not in ("zero", "refine"):
        return
    reasons = {
        f"fusion {depth.fusion!r}, by which layers see those before": fusion is not None and fusion.acts,
        f"solver {model.solver.name!r}, whose learned correction depends on l and h":
            hasattr(model.solver, "correction"),
        "injection, by which every layer draws the state back": getattr(depth, "injection", False),
        "layer_drop_schedule 'linear', by which layers change with their number":
            depth.layer_drop > 0 and depth.layer_drop_schedule == "linear",
        f"solver {model.solver.name!r}, whose history runs across layers: it would hold an increment of 0":
            scheme == "zero" and carries(model.solver),
        "coupling 'composed', whose field holds a whole step of size 1":
            scheme == "refine" and issubclass(look_up(COUPLINGS, config.block.coupling, "coupling"), Composed),
    }
    for reason, found in reasons.items():
        if found:
            raise ValueError(f"scheme {scheme!r} cannot be used with {reason}")


def carries(solver: Any) -> bool:
    """Whether a solver takes what it remembers from one piece of depth into the next."""
    probe = (object(),)
    return hasattr(solver, "init") and solver.init(probe) == probe


def _scaled(model: DepthModel, layer: Layer) -> set[str]:
    """The parameters of a block of which its sublayers' increments are multiples."""
    block = model.layers[layer.mix[0][0]]
    return {f"{name}.{key}" for name, sublayer in block.named_children() for key in factors(sublayer)}


def factors(sublayer: Sublayer) -> list[str]:
    """The parameters of which a sublayer's increment is a multiple. Raises ValueError where there are none."""
    placement = sublayer.placement
    if type(placement) not in INCREMENTS:
        raise ValueError(f"norm {type(placement).__name__} is not known to have an increment that can be scaled; "
                         f"known: {', '.join(kind.__name__ for kind in INCREMENTS)}")
    found = INCREMENTS[type(placement)]
    if isinstance(placement, norms.WeightedNorm):
        fixed = isinstance(placement.factors, norms.Fixed)
        if not fixed or placement.factors.gamma != 1:
            found = None
    if found is None:
        raise ValueError(f"norm {type(placement).__name__} has an increment that is no multiple of a parameter, so "
                         "that none makes it smaller or 0: the state itself passes its norm. Schemes 'stack', "
                         "'interleave' and 'interpolate' do not need that")
    names = [name for name, _ in sublayer.named_parameters() if f"{name}.".startswith(f"{found}.")]
    if not names:
        raise ValueError(f"{type(sublayer.core).__name__} has no {found.removeprefix('core.')} projection, so nothing "
                         "makes its increment smaller or 0")
    return names


INCREMENTS: dict[type, str | None] = {
    norms.PreNorm: "core.output",
    norms.PostNorm: None,
    norms.ResNorm: "placement.norm",
    norms.WeightedNorm: "placement.norm",
    norms.DeepNorm: None,
    norms.ReZero: "placement.alpha",
    norms.LayerScale: "core.output",
    norms.SandwichNorm: "placement.output_norm",
    norms.NoNorm: "core.output",
    norms.CompleteP: "core.output",
}
