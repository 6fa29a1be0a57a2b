"""Penalties on the dynamics of a model: REGULARIZERS[name](model, solution) -> a 0-d tensor to be added to a loss.

``solution`` is that of a forward pass with its states kept: ``_, solution = model(x, return_solution=True)``. Integrals
over depth are sums over the intervals between its states (for fixed steps each step, for adaptive solvers each layer),
accurate to second order in their length. "Per entry" is the mean over the entries of real tokens; padding has no part
in it. The states carry the gradients of the gradient mode in use, so those of "adjoint" are approximate here, too.
Layers with fusion are integrated one by one, and what fusion does between them is no motion. For a model of two stacks
of layers (Seq2Seq) the penalties of both are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from odeformer.models.base import refuse_wrapped
from odeformer.models.parts import parts_of
from odeformer.tables import at_least, finite, look_up

Regularizer = Callable[[Any, Any], Tensor]


class Interval(NamedTuple):
    """What lies between two states: they, the depth where it starts, its length, and the field within."""

    before: Tensor
    after: Tensor
    l: float
    h: float
    f: Callable[[Tensor, Tensor], Tensor]

    def at(self, l: float) -> Tensor:
        """A depth as f takes it; with a gradient, so that weights that are functions of l are made anew: those that a
        pass keeps are for its own way back."""
        kind = torch.promote_types(self.before.dtype, torch.float32)
        return torch.full((), l, dtype=kind, device=self.before.device, requires_grad=torch.is_grad_enabled())

    def middle(self) -> tuple[Tensor, Tensor]:
        """A state in the middle, which gives integrals the midpoint rule, and f there, twice differentiable in it."""
        with torch.enable_grad(), _plain_attention():
            z = (self.before + self.after) / 2
            z = z if z.requires_grad else z.requires_grad_()
            return z, self.f(z, self.at(self.l + self.h / 2))


def kinetic_energy(model: Any, solution: Any) -> Tensor:
    """∫ |dz/dl|² dl per entry, in squared units of the state a unit of depth (Finlay et al. 2020, eq. 4).

    Σ |z_{n+1} - z_n|² / h_n, the energy of straight lines from state to state: under Euler exactly Σ h |f_n|², in
    general ∫ |f|² dl up to O(h²), from below. Needs no evaluation of f.
    """
    return _mean(model, solution, lambda one: (one.after - one.before).square() / one.h)


def transport(model: Any, solution: Any) -> Tensor:
    """|z(L) - z(0)|² per entry: the cost of transport of which L times the kinetic energy is an upper bound, reached by
    motion along straight lines at constant speed (Benamou & Brenier 2000; Onken et al. 2021)."""
    parts = []
    for _, one in _stacks(model, solution):
        _check_states(one)
        parts.append(_per_entry((one.states[-1] - one.states[0]).square(), one.mask))
    return sum(parts)


def jacobian_frobenius(model: Any, solution: Any, *, n_probes: int = 1) -> Tensor:
    """∫ |∂f/∂z|_F² dl per entry of f, in units of one over depth (Finlay et al. 2020, eqs. 5-6).

    Hutchinson's estimate E |εᵀ ∂f/∂z|², ε = ±1 with even odds (Hutchinson 1990), from ``n_probes`` draws that all
    depths of the pass share. Costs an evaluation of f an interval and a product with its Jacobian a probe, and their
    derivatives in backward.
    """
    at_least("n_probes", n_probes, 1)
    probes: dict[torch.Size, list[Tensor]] = {}
    if torch.is_inference_mode_enabled():
        raise ValueError("jacobian_frobenius needs derivatives of f, which torch.inference_mode rules out; use "
                         "torch.no_grad()")
    wanted = torch.is_grad_enabled()

    def density(one: Interval) -> Tensor:
        z, k = one.middle()
        if not k.requires_grad:
            return torch.zeros_like(z)
        if k.shape not in probes:
            probes[k.shape] = [_signs(k) for _ in range(n_probes)]
        rows = [torch.autograd.grad(k, z, e, create_graph=wanted, retain_graph=True, materialize_grads=True)[0].square()
                for e in probes[k.shape]]
        return sum(rows) * (one.h / n_probes)

    return _mean(model, solution, density)


def acceleration(model: Any, solution: Any) -> Tensor:
    """∫ |d²z/dl²|² dl per entry within layers, in squared units of the state over depth cubed (Kelly et al. 2020, R_2):
    0 where the motion is straight and even; the error of Euler's method is made of it.

    Σ |f_{n+1} - f_n|² / h_n with f at both ends of an interval: two evaluations of f. (d²z/dl² itself is
    ∂f/∂z f + ∂f/∂l, whose gradients torch gets wrong where there is a layer norm.) The jumps of f from layer to layer
    are not in it.
    """
    def density(one: Interval) -> Tensor:
        return (one.f(one.after, one.at(one.l + one.h)) - one.f(one.before, one.at(one.l))).square() / one.h

    return _mean(model, solution, density)


def weight_smoothness(model: Any, solution: Any = None) -> Tensor:
    """∫ |dθ/dl|² dl over all parameters θ of a layer, in squared units of the weights a layer (Haber & Ruthotto 2017).

    Weights that are constant in a layer: Σ_i |θ_{i+1} - θ_i|² over neighbouring layers, 0 where they share a block.
    Functions of l: by differences in at least 16 intervals between whole l and kinks, exact for lines and of fourth
    order in the intervals' length.
    """
    parts = [part for part, _ in _stacks(model, solution)]
    for part in parts:
        refuse_wrapped(part, "weight_smoothness")
    return sum((_differences if part.layers.by_layer else _slopes)(part.layers) for part in parts)


REGULARIZERS: dict[str, Regularizer] = {
    "kinetic_energy": kinetic_energy,
    "transport": transport,
    "jacobian_frobenius": jacobian_frobenius,
    "acceleration": acceleration,
    "weight_smoothness": weight_smoothness,
}


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises ValueError or TypeError unless these are factors of at least 0 of entries of REGULARIZERS."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"regularize must be a mapping from names of REGULARIZERS to factors, got {weights!r}")
    for name, weight in weights.items():
        look_up(REGULARIZERS, name, "regularizer")
        finite(f"regularize[{name!r}]", weight, least=0)


def penalties(model: Any, solution: Any, weights: Mapping[str, float]) -> dict[str, Tensor]:
    """Name -> factor times penalty; those with the factor 0 are left out."""
    return {name: weight * look_up(REGULARIZERS, name, "regularizer")(model, solution)
            for name, weight in weights.items() if weight}


# Solutions


def _stacks(model: Any, solution: Any) -> list[tuple[Any, Any]]:
    """The stacks of layers of a model, each with its Solution."""
    return [(part, getattr(solution, name, None) if name else solution) for name, part in parts_of(model).items()]


def _check_states(solution: Any) -> None:
    if solution.states is None:
        raise ValueError("solution must hold its states: call the model with return_solution=True and save_states=True")


def _intervals(model: Any, solution: Any) -> Iterator[Interval]:
    """All intervals of a pass. Raises ValueError for a Solution without states, or without a path along depth."""
    _check_states(solution)
    if getattr(model.solver, "to_equilibrium", False):
        raise ValueError(f"solver {model.solver.name!r} goes to an equilibrium and follows no path along depth; only "
                         "'transport' and 'weight_smoothness' are for it")
    for one in getattr(solution, "layers", None) or (solution,):
        if one.states is None:
            raise ValueError(f"solver {model.solver.name!r} keeps no states within layers with fusion; take one of "
                             "fixed steps")
        for (a, b), (l, end) in zip(pairwise(one.states), pairwise(one.depths), strict=True):
            yield Interval(a, b, l, end - l, _field_at(solution.field, (l + end) / 2))


def _field_at(f: Any, l: float) -> Any:
    """The piece of f that holds l."""
    return next((piece for start, end, piece in getattr(f, "pieces", None) or () if start <= l < end), f)


def _mean(model: Any, solution: Any, density: Callable[[Interval], Tensor]) -> Tensor:
    """Σ over intervals of what ``density`` gives for them, a mean over entries; the stacks' sum."""
    return sum(_per_entry(sum(map(density, _intervals(part, one))), one.mask)
               for part, one in _stacks(model, solution))


def _per_entry(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over real tokens of x (batch, tokens, d_model), in float32 at least; 0 where there are none."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        return x.mean()
    return x.masked_fill(~mask.unsqueeze(-1), 0).sum() / (mask.sum() * x.shape[-1]).clamp(min=1)


def _signs(x: Tensor) -> Tensor:
    """±1 with even odds, shaped like x."""
    return torch.randint(2, x.shape, device=x.device).to(x.dtype) * 2 - 1


def _plain_attention() -> Any:
    """torch's fused attention has no second derivatives; its plain form has. (Compiled code chooses by itself.)"""
    return nullcontext() if torch.compiler.is_compiling() else sdpa_kernel(SDPBackend.MATH)


# Weights


def _differences(layers: Any) -> Tensor:
    """Σ |θ_{i+1} - θ_i|²."""
    blocks = [layers[layers.index(i)] for i in range(layers.n_layers)]
    total = next(layers.parameters()).new_zeros(())
    for a, b in pairwise(blocks):
        if a is not b:
            total = total + sum(_square(x - y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    return total


LEAST = 16  # intervals of depth, since embeddings of l oscillate


def _slopes(layers: Any) -> Tensor:
    """∫ |dθ/dl|² dl. With d and e the differences over the halves of an interval 2 h long,
    (8 (|d|² + |e|²) - |d + e|²) / 6 h: sums of squared differences over h and over 2 h, extrapolated to 0."""
    like, n = next(layers.parameters()), layers.n_layers
    kind = torch.promote_types(like.dtype, torch.float32)

    def theta(l: float) -> list[Tensor]:
        return list(layers.theta(torch.full((), l, dtype=kind, device=like.device)).values())

    even = (n * i / LEAST for i in range(LEAST + 1))
    ends = sorted({*map(float, range(n + 1)), *layers.kinks, *even})
    total, right = like.new_zeros((), dtype=kind), theta(0.0)
    for a, b in pairwise(ends):
        left, middle, right = right, theta((a + b) / 2), theta(b)
        for x, y, z in zip(left, middle, right, strict=True):
            if x is not y:  # a parameter that does not depend on l
                total = total + (8 * (_square(y - x) + _square(z - y)) - _square(z - x)) / (3 * (b - a))
    return total


def _square(x: Tensor) -> Tensor:
    """Σ x², in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum()
