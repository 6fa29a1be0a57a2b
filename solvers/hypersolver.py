"""Hypersolvers: a cheap method with a small learned correction of its leading error (Poli et al. 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solvers.base import Evaluator, Solver, State, Step, add
from solvers.explicit import METHODS as RUNGE_KUTTA
from solvers.grid import Rescaled
from solvers.learned import Learned
from solvers.splitting import METHODS as SPLITTING
from solvers.splitting import Splitting

BASES = RUNGE_KUTTA | SPLITTING


class Correction(nn.Module):
    """g(z, ψ, l, h): a network with one hidden layer, for each row of ``size`` entries by itself; 0 to begin with.

    g = W (1 + U e) ⊙ tanh(A z + B ψ + C e + c h + b) with e = (sin, cos)(π l / 2^k), k < ``n_frequencies``, which tells
    depths up to 2^n_frequencies apart. Rows with ψ = 0, which f leaves where they are (padding, dropped layers), get
    g = 0. ``size`` None: every entry is a row (real and imaginary parts of complex ones too).
    """

    def __init__(self, size: int | None, width: int, n_frequencies: int, seed: int):
        super().__init__()
        self.size, self.n_frequencies = size, n_frequencies
        d, generator = size or 1, torch.Generator().manual_seed(seed)

        def drawn(*shape: int, fan_in: int) -> nn.Parameter:
            x = torch.rand(shape, generator=generator, device="cpu") * 2 - 1
            return nn.Parameter((x * fan_in**-0.5).to(torch.get_default_device()))

        self.state, self.slope = drawn(width, d, fan_in=2 * d), drawn(width, d, fan_in=2 * d)
        self.depth, self.step = drawn(width, 2 * n_frequencies, fan_in=2 * n_frequencies), drawn(width, fan_in=1)
        self.bias = drawn(width, fan_in=1)
        self.gain = nn.Parameter(torch.zeros(width, 2 * n_frequencies))
        self.out = nn.Parameter(torch.zeros(d, width))

    def embedding(self, l: Tensor) -> Tensor:
        """e, l's shape with an axis of 2 n_frequencies behind."""
        powers = torch.arange(self.n_frequencies, dtype=l.dtype, device=l.device)
        angles = l.unsqueeze(-1) * (math.pi * torch.exp2(-powers))
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, z: Tensor, slope: Tensor, l: Tensor, h: float | Tensor) -> Tensor:
        """Rows (..., d) of states and of ψ to g; l 0-d or (rows,), h a number, 0-d or (rows, 1)."""
        def weight(name: str) -> Tensor:
            return getattr(self, name).to(z.dtype)

        e = self.embedding(l).to(z.dtype)
        known = F.linear(e, weight("depth"), weight("bias")) + h * weight("step")
        hidden = torch.tanh(F.linear(z, weight("state")) + F.linear(slope, weight("slope")) + known)
        return F.linear(hidden * (1 + F.linear(e, weight("gain"))), weight("out"))

    @torch.no_grad()
    def rescale(self, state: Tensor, slope: Tensor, out: Tensor) -> None:
        """Change the units of what goes in and comes out: the same function of z / state and ψ / slope, over out."""
        self.state.mul_(state)
        self.slope.mul_(slope)
        self.out.div_(out)

    def rows(self, x: Tensor) -> Tensor:
        """(..., d): what the network sees as rows. Raises ValueError where the state has none of that size."""
        if self.size is None:
            return (torch.view_as_real(x) if x.is_complex() else x).unsqueeze(-1)
        if x.dim() == 0 or x.shape[-1] != self.size or x.is_complex():
            raise ValueError(f"hypersolver with d_model = {self.size} needs real states whose last axis is that; got "
                             f"{x.dtype} of shape {tuple(x.shape)}")
        return x

    def at(self, z: Tensor, slope: Tensor, l: Tensor, h: float | Tensor) -> Tensor:
        """g shaped like z."""
        g = self(self.rows(z), self.rows(slope), l, h)
        if self.size is None:
            g = g.squeeze(-1)
            g = torch.view_as_complex(g.contiguous()) if z.is_complex() else g
        return g.masked_fill(~moved(slope), 0)


def moved(slope: Tensor) -> Tensor:
    """bool, (..., 1): which vectors along the last axis are not 0."""
    return slope != 0 if slope.dim() == 0 else (slope != 0).any(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Corrected:
    """z' = z + h ψ + h^(p+1) g(z, ψ, l, h) for a base method z + h ψ of order p."""

    base: Solver
    correction: Correction

    name = "hypersolver"
    embedded_order = None
    is_implicit = False
    is_adaptive = False
    is_reversible = False
    gradients = Learned.gradients

    @property
    def order(self) -> int:
        """The base's, whatever g is: h^(p+1) g is of the size of its error."""
        return self.base.order

    @property
    def n_stages(self) -> int:
        """The base's."""
        return self.base.n_stages

    @property
    def nodes(self) -> tuple[float, ...]:
        """The base's."""
        return self.base.nodes

    @property
    def remembers_states(self) -> bool:
        """Whether splitting must leave it alone, as the base takes the parts of f by itself."""
        return isinstance(self.base, Splitting)

    def nfe(self, n_steps: int) -> int | float:
        """The base's."""
        return self.base.nfe(n_steps)

    def init(self, memory: Any) -> Any:
        """The base's."""
        return self.base.init(memory)

    def step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        """The state at step.l + step.h."""
        after, memory = self.base.step(f, z, step, memory)
        l, h = clock(f, step, self.nodes)
        if isinstance(z, Tensor):
            return self._corrected(z, after, l, h), memory
        return tuple(self._corrected(x, y, l, h) for x, y in zip(z, after, strict=True)), memory

    def fit(self, samples: Any, **options: Any) -> Any:
        """See ``residual_fit.fit_hypersolver``."""
        from solvers.residual_fit import fit_hypersolver

        return fit_hypersolver(self, samples, **options)

    def _corrected(self, z: Tensor, after: Tensor, l: Tensor, h: float | Tensor) -> Tensor:
        g = self.correction.at(z, (after - z) * (1 / h), l, h)
        power = h ** (self.order + 1)
        return after + power * g if isinstance(h, Tensor) else add(after, power, g)


def clock(f: Evaluator, step: Step, nodes: tuple[float, ...]) -> tuple[Tensor, float | Tensor]:
    """The depth at which a step starts, and its size, in the units of f (a span with gradients is mapped to [0, 1])."""
    l, field = step.at[nodes.index(0.0)], f.f
    if not isinstance(field, Rescaled):
        return l, step.h
    width = torch.as_tensor(field.b - field.a, dtype=l.dtype, device=l.device)
    return field.a + l * width, step.h * width


class Hypersolver(Learned):
    """z' = z + h ψ + h^(p+1) g(z, ψ, l, h) (Poli et al. 2020): ``base``, a method of order p, gives ψ at its usual
    cost, and g, a small network, what it misses of the solution. g starts at 0, so that the method starts as its base;
    ``fit`` trains it.

    The order is the base's whatever g is; a good g lowers the error at every h it has learned from. g sees one row of
    ``d_model`` entries (a token) at a time, its ψ included, in which all tokens have a part: a causal f stays so. It is
    added where f is not 0. Without ``d_model`` g sees single entries.

    ``base``: a Runge-Kutta or splitting method, by name or as an object. ``width``: hidden units. ``n_frequencies``:
    see Correction. ``seed``: of the hidden weights; the global random state is left alone.

    Raises ValueError or TypeError: a base that is not an explicit one-step method of a fixed order, other numbers than
    positive ints.
    """

    name = "hypersolver"

    def __init__(self, d_model: int | None = None, base: str | Solver = "euler", width: int = 32,
                 n_frequencies: int = 6, seed: int = 0):
        super().__init__(d_model=d_model, base=base, width=width, n_frequencies=n_frequencies, seed=seed)
        for option, value in (("d_model", d_model), ("width", width), ("n_frequencies", n_frequencies)):
            if (option, value) != ("d_model", None):
                check_positive(option, value)
        self.correction = Correction(d_model, width, n_frequencies, seed)
        self.method = Corrected(as_base(base), self.correction)
        self.n_stages, self.nodes = self.method.n_stages, self.method.nodes
        self.remembers_states = self.method.remembers_states

    @property
    def base(self) -> Solver:
        """The method that is corrected."""
        return self.method.base

    def rebased(self, base: Solver) -> Corrected:
        """The same correction on another base, such as this one with the parts of f taking turns."""
        return Corrected(base, self.correction)

    def attained_order(self) -> int:
        return self.base.order

    def nfe(self, n_steps: int) -> int | float:
        """The base's."""
        return self.base.nfe(n_steps)

    def init(self, memory: Any) -> Any:
        """The base's."""
        return self.base.init(memory)

    def step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        return self.method.step(f, z, step, memory)

    def fit(self, samples: Any, **options: Any) -> Any:
        """See ``residual_fit.fit_hypersolver``."""
        return self.method.fit(samples, **options)


def as_base(base: str | Solver) -> Solver:
    """The base method. Raises ValueError or TypeError for one that is not explicit, one-step and of fixed order."""
    if isinstance(base, str):
        if base not in BASES:
            raise ValueError(f"unknown base {base!r}; known by name: {', '.join(sorted(BASES))} (other explicit "
                             "one-step solvers as objects)")
        return BASES[base]
    if isinstance(base, type) or not hasattr(base, "is_adaptive"):
        raise TypeError(f"base must be a name or a solver object, got {base!r}")
    own_memory = getattr(base, "n_history", 0) or getattr(base, "remembers_states", False) or base.is_reversible
    if base.is_adaptive or base.is_implicit or own_memory or isinstance(base, nn.Module) or base.order < 1:
        raise ValueError(f"base must be an explicit one-step method of a fixed order of at least 1, got {base.name!r}")
    return base


def check_positive(name: str, value: Any) -> None:
    """Raises ValueError unless value is a positive int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")


METHODS: dict[str, Hypersolver] = {Hypersolver.name: Hypersolver()}
