"""Layer fusion (eqs. 23-30): a layer's output is made from its increment and the states of all earlier layers.

``FUSIONS[name](n_layers, d_model, **options)`` acts where layers meet. Layer l is integrated from Z to some z_hat by
the model's solver; F^l = z_hat - Z is its increment (with Euler, h = 1, exactly the field), and φ makes z^l from it and
from z^0, ..., z^{l-1}. The seed lets φ see z^1, ..., z^{l-1}; here the embedding z^0 is among them, since the first
layer has nothing else (Wang et al. 2019 and Huang et al. 2017 do so too).

Option ``form`` says where a layer norm stands (``FORMS``; where the last layer ends in one, the model has no other at
its end); ``stride``: only every stride-th layer is fused, the others are plain; ``window``: φ sees the last so many
states only, z^{l-1} among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.context import Context
from odeformer.tables import at_least, build


class LayerNorm(nn.LayerNorm):
    """Layer norm in the precision of its input, which may be above that of its parameters: the state between layers is
    float32 even where these are not."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Form(nn.Module):
    """z^l = φ(F^l(z^{l-1}), z^0, ..., z^{l-1}): no layer norm (eqs. 30 and 38)."""

    normed = False  # whether there is a layer norm, one a fused layer
    leaves_normed = False  # whether z^l comes out of one
    takes_increments = True  # whether φ sees F^l
    drops_layers = True  # whether a layer with the increment 0 leaves the state to φ, as layer drop wants it

    def __init__(self, d_model: int, layers: Sequence[int]):
        super().__init__()
        self.norms = nn.ModuleDict({str(layer): LayerNorm(d_model) for layer in layers if self.normed})

    def start(self, phi: Fusion, layer: int, states: Sequence[Tensor]) -> Tensor:
        """From where the layer is integrated."""
        return states[0]

    def context(self, context: Context, layers: Sequence[int]) -> Context:
        """What the fields are to know; ``layers``: those that are fused."""
        return context

    def increment(self, layer: int, increment: Tensor, context: Context) -> Tensor:
        """What φ is given as F^l."""
        return increment

    def state(self, phi: Fusion, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        """z^l."""
        return phi(layer, increments, states)

    def norm(self, layer: int, x: Tensor) -> Tensor:
        """The layer norm of a layer."""
        return self.norms[str(layer)](x)


class InputForm(Form):
    """z^l = LN(F^l(Z)), Z = φ(z^0, ..., z^{l-1}) (eqs. 24-25)."""

    normed = leaves_normed = True
    takes_increments = drops_layers = False

    def start(self, phi: Fusion, layer: int, states: Sequence[Tensor]) -> Tensor:
        return phi(layer, (), states)

    def state(self, phi: Fusion, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        return self.norm(layer, increments[0])


class PreForm(Form):
    """z^l = LN(φ(F^l(z^{l-1}), z^0, ..., z^{l-1})) (eqs. 26-27)."""

    normed = leaves_normed = True

    def state(self, phi: Fusion, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        return self.norm(layer, phi(layer, increments, states))


class PostForm(Form):
    """z^l = φ(LN(F^l(z^{l-1})), z^0, ..., z^{l-1}) (eqs. 28-29). Layer drop scales after the norm, as in eq. 31."""

    normed = True

    def context(self, context: Context, layers: Sequence[int]) -> Context:
        if context.keep is None:
            return context
        keep = [1.0 if layer in layers else factor for layer, factor in enumerate(context.keep)]
        return replace(context, keep=keep)

    def increment(self, layer: int, increment: Tensor, context: Context) -> Tensor:
        return context.increment(layer, self.norm(layer, increment))


FORMS: dict[str, type[Form]] = {"plain": Form, "input": InputForm, "pre": PreForm, "post": PostForm}


class Fusion(nn.Module):
    """What all fusions share. A subclass gives φ as ``forward(layer, increments, states)``.

    ``forms``: those in which its φ makes sense. Raises ValueError for another form and for a stride beyond n_layers.
    """

    forms: ClassVar[Mapping[str, str | None]] = dict.fromkeys(FORMS)  # form -> why it is refused, None: it is not
    n_increments = 1  # how many increments φ looks at
    n_states = 1  # how many states φ looks at
    starter: str | None = None
    late: Sequence[int] = ()  # layers that have too little history for φ

    def __init__(self, n_layers: int, d_model: int, *, form: str = "plain", stride: int = 1):
        super().__init__()
        for name, value in (("n_layers", n_layers), ("d_model", d_model), ("stride", stride)):
            at_least(name, value, 1)
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
        if self.forms[form] is not None:
            raise ValueError(f"form {form!r} is not for fusion {type(self).__name__}: {self.forms[form]}")
        if stride > n_layers:
            raise ValueError(f"stride = {stride} leaves no fused layer among n_layers = {n_layers}")
        self.n_layers = n_layers
        self.linked = range(stride - 1, n_layers, stride)
        self.form = FORMS[form](d_model, self.linked)

    @property
    def acts(self) -> bool:
        """Whether any layer differs from a plain one."""
        return len(self.linked) > 0

    @property
    def leaves_normed(self) -> bool:
        """Whether the last layer's state comes out of a layer norm, so that the model needs none at its end."""
        return self.form.leaves_normed and self.n_layers - 1 in self.linked

    def context(self, context: Context) -> Context:
        """What the layers' fields are to know of a forward pass."""
        return self.form.context(context, self.linked)

    def start(self, layer: int, states: Sequence[Tensor]) -> Tensor:
        """From where the layer is integrated: z^{l-1}, or Z of eq. 25. ``states``: z^{l-1}, ..., z^0."""
        return self.form.start(self, layer, states) if layer in self.linked else states[0]

    def finish(self, layer: int, start: Tensor, end: Tensor, increments: Sequence[Tensor], states: Sequence[Tensor],
               context: Context) -> tuple[Tensor, Tensor]:
        """z^l, and F^l for later layers.

        ``start``, ``end``: the ends of the layer's integration; ``increments``, ``states``: what came before, newest
        first.
        """
        increment = end - start
        if layer not in self.linked:
            return end, increment
        increment = self.form.increment(layer, increment, context)
        return self.form.state(self, layer, (increment, *increments), states), increment

    def forward(self, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        """φ in layer ``layer`` (from 0), all (batch, tokens, d_model), newest first. ``increments`` is empty in the
        form "input"."""
        raise NotImplementedError


NO_INCREMENT = "φ there takes earlier states alone (eq. 25), and this one adds the increment"


class Residual(Fusion):
    """φ = F^l + z^{l-1} (eq. 30): in the form "plain" exactly the layer without fusion, solved as one without.

    "pre" gives LN(F + z), a post-norm layer; "post" gives LN(F) + z.
    """

    forms: ClassVar = {**Fusion.forms, "input": NO_INCREMENT}

    def __init__(self, n_layers: int, d_model: int, *, form: str = "plain", stride: int = 1):
        super().__init__(n_layers, d_model, form=form, stride=stride)
        if not self.form.normed:
            if stride > 1:
                raise ValueError(f"stride = {stride} does nothing here: all layers of the form 'plain' are plain")
            self.linked = range(0)

    def forward(self, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        return states[0] + increments[0]


class Fixed(Fusion):
    """φ = Σ a_i z^{l-i} + Σ b_i F^{l-i+1} with given weights, newest first (eq. 37 over whole layers, h = 1).

    ``a`` = (1,), ``b`` = (3/2, -1/2) is ``ab2`` over layers: with Euler, one step a layer, and a coupling that does not
    split, the model equals that of solver "ab2" with across_pieces=True. Weights that are not consistent are allowed.

    A layer with too little history for all its terms takes φ = F^l + z^{l-1}. In the form "plain" it is integrated a
    second time, by ``starter``, whose state goes on (F^l is the model's solver's all the same), as multistep methods
    start: by default where (a, b) has a higher order than the model's solver (one without learned coefficients), the
    Runge-Kutta method of that order which solver LinearMultistep(a, b) starts with; "euler" starts as the formula says.
    """

    forms: ClassVar = {**Fusion.forms, "input": NO_INCREMENT}

    def __init__(self, n_layers: int, d_model: int, *, a: Sequence[float] = (1.0,), b: Sequence[float] = (1.0,),
                 starter: str | None = None, form: str = "plain", stride: int = 1):
        super().__init__(n_layers, d_model, form=form, stride=stride)
        self.a, self.b = _weights("a", a), _weights("b", b)
        self.n_states, self.n_increments = len(self.a), len(self.b)
        self.n_history = max(self.n_states, self.n_increments) - 1
        late = [layer for layer in self.linked if layer < self.n_history]
        if len(late) == len(self.linked):
            raise ValueError(f"a and b look back over {self.n_history + 1} layers, which no fused layer among "
                             f"n_layers = {n_layers} can")
        if starter is not None and (self.form.normed or not late):
            raise ValueError(f"starter {starter!r} has no layer to start: " + (
                f"it is for form 'plain', got {form!r}" if self.form.normed else "every fused layer has its history"))
        self.starter, self.late = starter, () if self.form.normed else tuple(late)

    def extra_repr(self) -> str:
        """The weights, for print(model)."""
        return f"a={self.a}, b={self.b}"

    def forward(self, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        if layer < self.n_history:
            return states[0] + increments[0]
        return _combination((*self.a, *self.b), (*states[:len(self.a)], *increments[:len(self.b)]))


def _weights(name: str, values: Any) -> tuple[float, ...]:
    """Raises ValueError unless values is a sequence of at least one finite number."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values or not all(
            isinstance(x, int | float) and math.isfinite(x) for x in values):
        raise ValueError(f"{name} must be a sequence of at least one finite number, newest first; got {values!r}")
    return tuple(map(float, values))


def _combination(weights: Sequence[Any], terms: Sequence[Tensor]) -> Tensor:
    """Σ w x; weights are numbers or 0-d tensors."""
    total = weights[0] * terms[0]
    for weight, term in zip(weights[1:], terms[1:], strict=True):
        total = total + weight * term
    return total


class Windowed(Fusion):
    """A fusion that looks at all earlier states, or at the last ``window`` of them. Raises ValueError below 1."""

    def __init__(self, n_layers: int, d_model: int, *, form: str = "plain", window: int | None = None,
                 stride: int = 1):
        super().__init__(n_layers, d_model, form=form, stride=stride)
        if window is not None:
            at_least("window", window, 1)
        self.n_states = n_layers if window is None else min(window, n_layers)

    def reach(self, layer: int) -> int:
        """How many states a layer looks at."""
        return min(layer + 1, self.n_states)

    def extra_repr(self) -> str:
        """How far back, for print(model)."""
        return f"n_states={self.n_states}"


class Mean(Windowed):
    """φ = the mean of all that it is given: with form="input" of the states z^0, ..., z^{l-1} (after eq. 25), in the
    other forms of F^l and the states, which keeps no state as it was even where F^l = 0 ([z + 0] / 2 = z / 2)."""

    def forward(self, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        given = (*increments[:1], *states[:self.reach(layer)])
        return sum(given[1:], given[0]) / len(given)


class Learned(Windowed):
    """φ = Σ a_i z^{l-i} + b F^l, every layer with weights of its own (eq. 38; DLCL, Wang et al. 2019).

    Starts as the plain layer: a = (1, 0, ...), b = 1. Parameters ``a.<layer>`` (newest first) and ``b.<layer>``; the
    form "input", whose φ takes no increment, has no b. (Solver ``dense`` weighs earlier increments as well.)
    """

    def __init__(self, n_layers: int, d_model: int, *, form: str = "plain", window: int | None = None,
                 stride: int = 1):
        super().__init__(n_layers, d_model, form=form, window=window, stride=stride)
        self.a = nn.ParameterDict({str(layer): torch.eye(self.reach(layer))[0].clone() for layer in self.linked})
        with_b = self.linked if self.form.takes_increments else ()
        self.b = nn.ParameterDict({str(layer): torch.ones(()) for layer in with_b})

    def forward(self, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        weights, terms = self.a[str(layer)].unbind(), states[:self.reach(layer)]
        if increments:
            weights, terms = (*weights, self.b[str(layer)]), (*terms, increments[0])
        return _combination(weights, terms)


class Concat(Windowed):
    """φ = W [F^l; z^{l-1}; ...; z^0], a projection of what is put side by side, W its own in every layer.

    Starts as the plain layer. W = (I, I, 0, ..., 0) + D (form "input": (I, 0, ..., 0) + D), and D is the parameter,
    ``weight.<layer>`` (d_model, number of terms x d_model), from 0: φ adds D [...] to z^{l-1} + F^l, so that a low
    precision of the product does not reach the state, and weight decay pulls towards the plain layer.
    """

    def __init__(self, n_layers: int, d_model: int, *, form: str = "plain", window: int | None = None,
                 stride: int = 1):
        super().__init__(n_layers, d_model, form=form, window=window, stride=stride)
        extra = int(self.form.takes_increments)
        self.weight = nn.ParameterDict({str(layer): torch.zeros(d_model, (self.reach(layer) + extra) * d_model)
                                        for layer in self.linked})

    def forward(self, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        weight = self.weight[str(layer)]
        given = torch.cat([*increments[:1], *states[:self.reach(layer)]], -1)
        plain = states[0] + increments[0] if increments else states[0]
        return plain + F.linear(given.to(weight.dtype), weight)


class Attention(Windowed):
    """φ = F^l + Σ_j w_j z^j: attention over depth, each token to its own earlier states (so nothing is seen of others).

    w = softmax_j(u(z^{l-1})ᵀ W u(z^j) / sqrt(d_model) + c_j), u(z) = z / rms(z), with W and c of each layer's own
    (``weight.<layer>``, ``bias.<layer>``, newest first; none where there is one state only). F^l, no state but a
    step, is added whole; the form "input" has no F^l. W starts at 0 and c so that all older states together have e^-4
    times the weight of z^{l-1}: close to the plain layer, and exactly it where F = 0.
    """

    START = -4.0

    def __init__(self, n_layers: int, d_model: int, *, form: str = "plain", window: int | None = None,
                 stride: int = 1):
        super().__init__(n_layers, d_model, form=form, window=window, stride=stride)
        several = [layer for layer in self.linked if self.reach(layer) > 1]
        self.weight = nn.ParameterDict({str(layer): torch.zeros(d_model, d_model) for layer in several})
        self.bias = nn.ParameterDict({str(layer): self._bias(self.reach(layer) - 1) for layer in several})

    def _bias(self, n_older: int) -> Tensor:
        return torch.tensor([0.0, *[self.START - math.log(n_older)] * n_older])

    def weights(self, layer: int, states: Sequence[Tensor]) -> Tensor:
        """w (batch, tokens, states), newest first."""
        states = states[:self.reach(layer)]
        if len(states) == 1:
            return torch.ones_like(states[0][..., :1])
        weight, size = self.weight[str(layer)], states[0].shape[-1:]
        units = [F.rms_norm(z, size, eps=1e-6) for z in states]
        query = F.linear(units[0].to(weight.dtype), weight.T)
        scores = torch.stack([(query * unit).sum(-1) for unit in units], -1) / math.sqrt(size[0])
        return (scores + self.bias[str(layer)]).softmax(-1)

    def forward(self, layer: int, increments: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        weights = self.weights(layer, states).unsqueeze(-2).unbind(-1)  # each (batch, tokens, 1)
        z = _combination(weights, states[:self.reach(layer)])
        return z + increments[0] if increments else z


FUSIONS = {
    "residual": Residual,
    "fixed": Fixed,
    "mean": Mean,
    "learned": Learned,
    "concat": Concat,
    "attention": Attention,
}


def make_fusion(name: str | type | None, n_layers: int, d_model: int, options: Mapping[str, Any]) -> Fusion | None:
    """The fusion of a model; None where there is none."""
    return None if name is None else build(FUSIONS, name, "fusion", n_layers, d_model, options=options)
