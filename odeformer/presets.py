"""The field's own methods as configs of our parts: as published and, where that is wrong, corrected.

>>> from odeformer import BlockConfig, EncoderConfig
>>> config = EncoderConfig(vocab_size=99, max_seq_len=64, n_layers=6, block=BlockConfig(64, 4))
>>> configure(config, "ode_transformer_rk4", corrected=True).depth.solver
'rk4'

``PRESETS[name]`` says what a method is, who published it, and what is wrong with its published form: stages that are
whole layer outputs, so that the skip counts twice, or weights that do not sum to 1. A step of length 1 is a layer.
``order`` of a form: to which order in h it integrates the layers' field, were that smooth in l; 0: it does not.
Forms made of names alone can be saved; others hold classes of this file, which a user can put into the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from odeformer.block import Composed, StrangCoupling
from odeformer.depth import DepthConfig
from odeformer.tables import look_up
from solvers.base import Evaluator, State, Step, add
from solvers.reversible import Momentum

# Parts that only published forms need


class WholeLayer(Composed):
    """z + f(z), a layer's output with its skip, in place of the increment f(z): solvers add the skip once more."""

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        return z + super().__call__(z, l)


class Macaron(StrangCoupling):
    """Half a step of feed-forward, one of attention (to a memory as well, one after the other), half of feed-forward.

    As published (solver "euler") each half has a feed-forward of its own; here both are the layer's.
    """

    def __init__(self, parts: Any):
        *attention, feedforward = parts
        super().__init__([feedforward, attention[0] if len(attention) == 1 else Composed(attention)])


@dataclass(frozen=True, kw_only=True)
class FromRest(Momentum):
    """``momentum`` with v = 0 at the start, as in the paper's code."""

    name: str = "momentum_from_rest"

    def step(self, f: Evaluator, z: State, step: Step, memory: State | None) -> tuple[State, State]:
        if memory is not None:
            return super().step(f, z, step, memory)
        k = f(z, step.at[0])
        v = add(k, -self.gamma, k)
        return add(z, step.h, v), v


@dataclass(frozen=True)
class FixedStep:
    """What the solvers below have in common: all of them remember the step before, across layers."""

    name: str

    embedded_order = None
    is_implicit = False
    is_adaptive = False
    is_reversible = False
    remembers_states = True  # so that splitting, which moves states in between, leaves them whole
    across_pieces = True
    gradients = ("backprop",)
    n_stages = 1

    def nfe(self, n_steps: int) -> int:
        """One evaluation a step."""
        return n_steps

    def init(self, memory: Any) -> Any:
        """What the layer before left."""
        return memory


@dataclass(frozen=True)
class TwoStreams(FixedStep):
    """x' = x + h f_1(y, l), y' = y + h f_2(x', l + h), with f_1 the attention(s) and f_2 the feed-forward.

    x and y start as z, and their mean is the state: d(x + y)/2 = (f_1 + f_2) / 2, so it integrates half of the field
    and has order 0. The memory is half their difference. Raises ValueError for a field without parts.
    """

    name: str = "two_streams"

    order = 0
    nodes = (0.0, 1.0)

    def step(self, f: Evaluator, z: State, step: Step, memory: State | None) -> tuple[State, State]:
        """The mean at step.l + step.h."""
        if len(f.parts) < 2:
            raise ValueError(f"solver {self.name!r} needs a field with two parts or more: coupling 'parallel'")
        *first, last = f.parts
        x, y = (z, z) if memory is None else (add(z, 1.0, memory), add(z, -1.0, memory))
        for k in [part(y, step.at[0]) for part in first]:
            x = add(x, step.h, k)
        y = add(y, step.h, last(x, step.at[1]))
        half = add(x, -1.0, y) * 0.5
        return add(y, 1.0, half), half


@dataclass(frozen=True)
class Bidirectional(FixedStep):
    """z_{n+1} = γ z_{n-1} + (1 - γ) z_n + (1 + γ) h f_n, where autograd records; else, and in the first step, Euler.

    The sign of ``gamma`` (0.5) is drawn for each row and step, so that it is 0 on average. Order 1 for all signs, as
    it stands z_n + h f_n + γ (z_{n-1} - z_n + h f_n). The published training also rounds states, to be reversible.
    """

    name: str = "bdia"
    gamma: float = 0.5

    order = 1
    nodes = (0.0,)

    def step(self, f: Evaluator, z: State, step: Step, memory: State | None) -> tuple[State, State]:
        """The state at step.l + step.h; the memory is the state before."""
        k = f(z, step.at[0])
        new = add(z, step.h, k)
        if memory is None or not torch.is_grad_enabled():
            return new, z
        sign = 2 * torch.randint(2, (len(z), *(1,) * (z.dim() - 1)), device=z.device) - 1
        return new + (memory - z + step.h * k) * (self.gamma * sign), z


# Forms


KEPT = ("gradient", "layer_drop", "layer_drop_per", "layer_drop_schedule", "steer")  # what stays as a config has it


@dataclass(frozen=True, kw_only=True)
class Form:
    """Options of BlockConfig and DepthConfig, and the ``order`` that results.

    ``sized``: the number of layers -> further options of DepthConfig, "n_layers" among them where the model's changes.
    """

    order: int
    block: Mapping[str, Any] = field(default_factory=lambda: {"coupling": "composed"})
    depth: Mapping[str, Any] = field(default_factory=dict)
    sized: Callable[[int], Mapping[str, Any]] = lambda n_layers: {}

    def changed(self, config: Any) -> Any:
        """A config of a model with this form in all its stacks of layers."""
        changes = self._stack(config, "")
        if any(f.name == "decoder_depth" for f in fields(config)):
            changes |= self._stack(config, "decoder_")
        return replace(config, **changes)

    def _stack(self, config: Any, prefix: str) -> dict[str, Any]:
        counter = f"n_{prefix}layers"
        n_layers = getattr(config, counter) or config.n_layers
        block, depth = (getattr(config, f"{prefix}{name}", None) or getattr(config, name) for name in
                        ("block", "depth"))
        kept, sized = {name: getattr(depth, name) for name in KEPT}, dict(self.sized(n_layers))
        changes = {counter: sized.pop("n_layers", n_layers),
                   f"{prefix}depth": DepthConfig(**kept, **self.depth, **sized)}
        if hasattr(config, f"{prefix}block"):
            changes[f"{prefix}block"] = replace(block, **self.block)
        return changes


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published method. ``note``: what is wrong with its published form, or where ours differs from it.

    ``regularize``: terms of the loss that belong to it, as ``TrainConfig(regularize=...)`` takes them.
    ``after_training``: its forms are for a plain model that has been trained.
    """

    reference: str
    what: str
    published: Form
    corrected: Form | None = None
    note: str
    regularize: Mapping[str, float] = field(default_factory=dict)
    after_training: bool = False

    @property
    def forms(self) -> dict[str, Form]:
        """Those that there are, by name: "published", "corrected"."""
        return {name: form for name in ("published", "corrected") if (form := getattr(self, name)) is not None}


def configure(config: Any, name: str, *, corrected: bool = False) -> Any:
    """The config of a model (EncoderConfig, Seq2SeqConfig, ...) with a preset's block and depth options.

    Width, layers, attention and so on stay; depth options are the preset's, but for ``KEPT``. Two presets change the
    number of layers: "ot_transformer" has one, and takes as many steps as there were layers; "training_free_loop" as
    published has each layer twice (same weights, so that the trained model's state_dict fits).

    Raises ValueError for an unknown name, and for ``corrected`` where there is nothing to correct; TypeError for what
    is no config of a model.
    """
    if not (hasattr(config, "block") and hasattr(config, "depth")):
        raise TypeError(f"config must be that of a model, with block and depth; got {type(config).__name__}")
    preset = look_up(PRESETS, name, "preset")
    form = preset.corrected if corrected else preset.published
    if form is None:
        having = ", ".join(other for other, one in PRESETS.items() if one.corrected)
        raise ValueError(f"preset {name!r} has no corrected form, as its published one is consistent; having one: "
                         f"{having}")
    return form.changed(config)


def _unit_depth(n_layers: int) -> dict[str, Any]:
    """Depth 1, in as many steps as there were layers."""
    return {"n_layers": 1, "n_steps": n_layers}


def _twice(n_layers: int) -> dict[str, Any]:
    """Each layer twice."""
    return {"n_layers": 2 * n_layers, "weights": "sequence", "weights_options": {"n_knots": n_layers}}


WHOLE, PLAIN, PARALLEL = {"coupling": WholeLayer}, {"coupling": "lie"}, {"coupling": "parallel"}
LI_2022 = "Li et al. 2022, ODE Transformer"

PRESETS: dict[str, Preset] = {
    "ode_transformer_rk2": Preset(
        reference=f"{LI_2022}, RK2-block; its code",
        what="Two evaluations of a layer: z' = z + (F_1 + F_2) / 2, F_1 = F(z), F_2 = F(z + F_1).",
        published=Form(order=0, block=WHOLE, depth={"solver": "heun2"}),
        corrected=Form(order=2, depth={"solver": "heun2"}),
        note="In the code F is a whole layer with its skip: where sublayers are silent a layer multiplies z by 2.5. "
             "Corrected, F is the increment, as the paper prints it: Heun's method."),
    "ode_transformer_rk4": Preset(
        reference=f"{LI_2022}, RK4-block; its code",
        what="Four evaluations of a layer with the weights 1/6, 1/3, 1/3, 1/6.",
        published=Form(order=0, block=WHOLE, depth={"solver": "rk4"}),
        corrected=Form(order=4, depth={"solver": "rk4"}),
        note="As above; a silent layer multiplies z by 65/24 = 2.71."),
    "ode_transformer_learned": Preset(
        reference=f"{LI_2022}, RK2-block with learned γ from 1; its code",
        what="z' = z + γ_1 F_1 + γ_2 F_2, both γ learned, one pair for all layers.",
        published=Form(order=0, block=WHOLE, depth={"solver": "rk2_learned"}),
        corrected=Form(order=2, depth={"solver": "rk2_family"}),
        note="γ = (1, 1) sums to 2, and the skip counts twice: a silent layer multiplies z by 4. Corrected: one "
             "learned number, every value of which has order 2."),
    "ode_transformer_gate": Preset(
        reference=f"{LI_2022}, RK2-block with a gate; its code",
        what="z' = z + g F_1 + (1 - g) F_2, g = sigmoid(W [F_1; F_2] + b) for each token.",
        published=Form(order=0, block=WHOLE, depth={"solver": "rk2_gate"}),
        corrected=Form(order=1, depth={"solver": "rk2_gate"}),
        note="A silent layer multiplies z by 3 - g, 2.5 at g = 1/2. Corrected, F is the increment: order 1, and 2 only "
             "at g = 1/2 (ode_transformer_learned keeps it)."),
    "dlcl": Preset(
        reference="Wang et al. 2019, Learning Deep Transformer Models (DLCL); its code",
        what="Every layer sees a learned combination of all earlier layers' outputs, which starts as their mean.",
        published=Form(order=0, block=WHOLE, depth={"solver": "dense", "solver_options": {"initial": "average"}}),
        corrected=Form(order=1, depth={"solver": "dense"}),
        note="Under f = 1 the mean advances by 1/2, 1/3, 1/4, ...: 1.59 in 6 layers. Corrected: combinations of states "
             "and increments that start as the plain layer (eq. 38). The layer norm of each output is left out."),
    "macaron": Preset(
        reference="Lu et al. 2019, Macaron Net, eqs. 13-15",
        what="z + FFN/2, then + attention, then + FFN/2: Strang splitting.",
        published=Form(order=1, block={"coupling": Macaron}),
        corrected=Form(order=2, block={"coupling": Macaron}, depth={"solver": "midpoint"}),
        note="The paper claims Strang's higher order, but its Euler sub-steps leave order 1. Corrected: midpoint "
             "sub-steps. Its two feed-forwards a layer are one here."),
    "pcformer": Preset(
        reference="Li et al. 2024, PCformer, second-order predictor",
        what="Predict with α (1 - α) F_1 + α F_2, α learned from 1/2; correct with F at the prediction.",
        published=Form(order=0, depth={"solver": "pc_ema"}),
        corrected=Form(order=3, depth={"solver": "ssprk3"}),
        note="The weights sum to 1 - (1 - α)² = 3/4, so it integrates 0.75 f. Corrected: three evaluations too, at z, "
             "z + F_1 and z + (F_1 + F_2) / 4, with the weights 1/6, 1/6, 2/3 (Shu & Osher 1988), not learned. Its "
             "code also has layer norms of outputs, and a corrector over all earlier layers (solver 'dense')."),
    "diffeqformer": Preset(
        reference="Tong et al. 2025, Neural ODE Transformers; its code",
        what="z' = z + h (attention + FFN), depth 1 in steps of 1 / n_layers, all weights made by a network of l.",
        published=Form(order=1, block=PARALLEL, depth={"weights": "hyper"}, sized=_unit_depth),
        note="Consistent. Its networks, one a matrix, are one network with three blocks here; θ is read at the start "
             "of a step, there at its end."),
    "ot_transformer": Preset(
        reference="Kan et al. 2025, OT-Transformer; its code",
        what="One layer as the field, depth 1 in as many Euler steps as there were layers; the loss has λ ∫ |f|² dl.",
        published=Form(order=0, block=WHOLE, depth={"weights": "shared"}, sized=_unit_depth),
        corrected=Form(order=1, depth={"weights": "shared"}, sized=_unit_depth),
        note="In the code f is a whole layer with its skip: where sublayers are silent z grows by (1 + 1/n)^n, up to "
             "2.72. Corrected, f is the increment. Its layer norm of f is left out, its several layers in f are one.",
        regularize={"kinetic_energy": 1.0}),
    "universal_transformer": Preset(
        reference="Dehghani et al. 2019, Universal Transformers; Lan et al. 2020, ALBERT",
        what="One layer, post-norm, at all depths.",
        published=Form(order=1, block=PLAIN | {"norm": "post"}, depth={"weights": "shared"}),
        note="Consistent. The embedding of the step that Universal Transformers add before each layer, and halting, "
             "are left out."),
    "momentum": Preset(
        reference="Sander et al. 2021, Momentum Residual Networks, eq. 2; its code",
        what="v' = γ v + (1 - γ) f, z' = z + v', γ = 0.9, v from 0.",
        published=Form(order=1, depth={"solver": FromRest()}),
        corrected=Form(order=1, depth={"solver": "momentum"}),
        note="From rest a constant f moves z only 1.78 in 6 layers instead of 6. Corrected: v starts as f."),
    "revnet": Preset(
        reference="Gomez et al. 2017, RevNet; Kitaev et al. 2020, Reformer, for Transformers",
        what="Two streams that start equal: x + attention(y), y + FFN(x), and their mean at the end.",
        published=Form(order=0, block=PARALLEL, depth={"solver": TwoStreams()}),
        corrected=Form(order=2, depth={"solver": "revnet"}),
        note="Each stream gets one sublayer only, so the mean integrates half of the field. Corrected: both get the "
             "whole field, at two evaluations a layer."),
    "bdia": Preset(
        reference="Zhang et al. 2024, BDIA-transformer; its code",
        what="z_{n+1} = γ z_{n-1} + (1 - γ) z_n + (1 + γ) f_n, γ = ±1/2 at random in training, 0 afterwards.",
        published=Form(order=1, depth={"solver": Bidirectional()}),
        note="Consistent for every γ. Signs are drawn wherever autograd records. States are not rounded."),
    "training_free_loop": Preset(
        reference="Chen et al. 2026, Training-Free Looped Transformers, layer-wise, over all layers",
        what="The layers of a trained model, each repeated (K = 2) without training.",
        published=Form(order=0, sized=_twice),
        corrected=Form(order=1, depth={"steps_per_layer": 2}),
        note="Repeated whole, layers integrate 2 f, which the paper finds harmful. Corrected, as it proposes: damped "
             "sub-steps, h = 1/K.",
        after_training=True),
}
