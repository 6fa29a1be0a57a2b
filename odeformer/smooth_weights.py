"""Weights as functions of depth, θ(l), that can be evaluated anywhere; entries of ``odeformer.weights.WEIGHTS``.

All start as constants: until trained, such a model computes what one with weights "shared" does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from odeformer.bases import BASES, Basis, Fourier
from odeformer.block import COUPLINGS, Block, Sublayer
from odeformer.blocks import Blocks, LayeredField
from odeformer.context import Context
from odeformer.init.matrix import Matrix, matrices
from odeformer.norms import KINDS
from odeformer.own import own
from odeformer.tables import at_least, look_up
from odeformer.theta import At, Remembered, combine, spread


class SmoothBlocks(Blocks):
    """Blocks that are no layers, but hold what θ(l) is made of.

    ``kinks``: depths at which a derivative of θ jumps. The first block stands for the structure of all.
    """

    by_layer = False
    kinks: tuple[float, ...] = ()

    def bind(self, part: str) -> At:
        """l -> the parameters of a sublayer ("attention", "feedforward") that depend on l, as they are now."""
        raise NotImplementedError

    def theta(self, l: Tensor) -> dict[str, Tensor]:
        """All parameters of a layer at depth l (a 0-d tensor), under their names in a block."""
        fixed = dict(self[0].named_parameters())
        return fixed | {f"{part}.{name}": x for part in self[0].parts for name, x in self.bind(part)(l).items()}

    def field(self, coupling: str | type, context: Context) -> Any:
        """The field over [0, n_layers]: one piece, where no layer is dropped."""
        weights = [(own(sublayer), Remembered(self.bind(part), self)) for part, sublayer in self[0].parts.items()]
        if context.keep is None:
            return self._at(coupling, context, 0, weights)
        return LayeredField([(float(i), float(i + 1), self._at(coupling, context, i, weights))
                             for i in range(self.n_layers)])

    def _at(self, coupling: str | type, context: Context, layer: int,
            weights: list[tuple[Sublayer, Remembered]]) -> Any:
        parts = [SmoothPart(sublayer, at, context, layer) for sublayer, at in weights]
        if context.compiled is not None:
            parts = [context.compiled.smooth(part) for part in parts]
        field = look_up(COUPLINGS, coupling, "coupling")(parts)
        field.kinks = self.kinks
        return field

    def index(self, layer: int) -> int:
        """Raises TypeError: no layer is a block."""
        raise TypeError(f"{type(self).__name__} has no block for layer {layer}: its weights are functions of l")

    def layer_of(self, block: int) -> int:
        """1."""
        return 1

    def settle(self, model: nn.Module) -> None:
        """Make θ(l) constant: the first block's parameters."""
        raise NotImplementedError


class SmoothPart:
    """One sublayer as a vector field f(z, l), with its weights at l."""

    def __init__(self, sublayer: Sublayer, weights: Remembered, context: Context, layer: int):
        self.sublayer, self.weights, self.context, self.layer = sublayer, weights, context, layer

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        return functional_call(self.sublayer, self.weights(l), (z, self.context, self.layer))


def expand(blocks: SmoothBlocks, basis: Callable[[Tensor], Tensor], part: str) -> At:
    """l -> Σ φ_k(l) θ_k of a sublayer's parameters, block k holding θ_k."""
    tables = [dict(getattr(block, part).named_parameters()) for block in blocks]
    names, columns = list(tables[0]), [list(table.values()) for table in tables]
    return lambda l: dict(zip(names, combine(spread(basis, l), columns), strict=True))


class Expansion(SmoothBlocks):
    """θ(l) = Σ φ_k(l) θ_k, block k holding θ_k, for all parameters of a layer."""

    def __init__(self, n_layers: int, make_block: Callable[[], Block], basis: Basis):
        super().__init__(n_layers, make_block, basis.size)
        self.basis = basis

    @property
    def kinks(self) -> tuple[float, ...]:
        """Those of the basis."""
        return self.basis.kinks

    def bind(self, part: str) -> At:
        return expand(self, self.basis, part)

    def layer_of(self, block: int) -> int:
        """The layer, from 1, in which the block's node stands."""
        return min(int(self.basis.nodes[block]), self.n_layers - 1) + 1

    def settle(self, model: nn.Module) -> None:
        """Constant θ(l), but for matrices whose initialiser has a gain that depends on the layer: these have it at the
        nodes of the basis, times one draw for all depths."""
        with torch.no_grad():
            first, *others = (list(block.parameters()) for block in self)
            for c, block in zip(self.basis.constant[1:], others, strict=True):
                for p, start in zip(block, first, strict=True):
                    p.copy_(c * start)
            self._follow_gains(model)

    def _follow_gains(self, model: nn.Module) -> None:
        draws, rows = getattr(model, "draws", {}), {}
        for matrix in matrices(model):
            head, _, rest = matrix.name.removeprefix("layers.").partition(".")
            if head.isdigit() and matrix.name in draws:
                rows.setdefault(rest, [None] * len(self))[int(head)] = matrix
        values = self.basis.at(self.basis.nodes)
        for row in rows.values():
            self._follow(row, draws, values)

    def _follow(self, row: list[Matrix], draws: dict, values: Tensor) -> None:
        scheme, draw = draws[row[0].name]
        ratios = [draws[matrix.name][1].std / draw.std for matrix in row] if draw.std else [1.0] * len(row)
        coefficients = list(self.basis.constant)
        if max(ratios) - min(ratios) > 1e-12:
            coefficients = torch.linalg.solve(values, torch.tensor(ratios, dtype=torch.float64)).tolist()
            start = row[0].tensor.clone()
            for c, matrix in zip(coefficients, row, strict=True):
                matrix.tensor.copy_(c * start)
        for c, matrix in zip(coefficients, row, strict=True):
            draws[matrix.name] = scheme, type(draw)(draw.distribution, abs(c) * draw.std, c * draw.gain)


def half(n_layers: int, least: int) -> int:
    """How many knots unless told: half of the layers."""
    return max(least, (n_layers + 1) // 2)


class _Knotted(Expansion):
    kind: type[Basis]

    def __init__(self, n_layers: int, make_block: Callable[[], Block], *, n_knots: int | None = None):
        n_knots = half(n_layers, self.kind.least) if n_knots is None else n_knots
        super().__init__(n_layers, make_block, self.kind(n_knots, n_layers))


class LinearWeights(_Knotted):
    """Straight lines between ``n_knots`` (at least 2) equally spaced knots from l = 0 to n_layers.

    θ has kinks at the knots: a fixed-step method keeps its order where they fall on its steps, and second order
    otherwise. n_knots: half of the layers if None.
    """

    kind = BASES["linear"]


class SplineWeights(_Knotted):
    """A cubic B-spline with ``n_knots`` (at least 4) coefficients: twice differentiable in l.

    n_knots: half of the layers if None, at least 4.
    """

    kind = BASES["spline"]


class FourierWeights(Expansion):
    """θ_0 + θ_1 cos x + θ_2 sin x + θ_3 cos 2x + ..., x = 2π l / period (2 n_layers by default), ``n_basis`` terms."""

    def __init__(self, n_layers: int, make_block: Callable[[], Block], *, n_basis: int | None = None,
                 period: float | None = None):
        n_basis = half(n_layers, 2) if n_basis is None else n_basis
        super().__init__(n_layers, make_block, BASES["fourier"](n_basis, n_layers, period=period))


class ChebyshevWeights(Expansion):
    """Σ T_k(2 l / n_layers - 1) θ_k: polynomials in l, ``n_basis`` terms."""

    def __init__(self, n_layers: int, make_block: Callable[[], Block], *, n_basis: int | None = None):
        n_basis = half(n_layers, 2) if n_basis is None else n_basis
        super().__init__(n_layers, make_block, BASES["chebyshev"](n_basis, n_layers))


class LowRank(SmoothBlocks):
    """Matrices W + A(l) B(l) with W shared and A, B of rank ``rank`` in a basis ("linear", "spline", ...); everything
    else is shared. (Low-rank updates of a shared layer: Bae et al. 2024, who have one for each layer.)

    B starts at random, A at 0.
    """

    def __init__(self, n_layers: int, make_block: Callable[[], Block], *, rank: int = 4, n_knots: int | None = None,
                 basis: str = "linear"):
        super().__init__(n_layers, make_block, 1)
        at_least("rank", rank, 1)
        kind = look_up(BASES, basis, "basis")
        self.rank, self.basis = rank, kind(half(n_layers, kind.least) if n_knots is None else n_knots, n_layers)
        shapes = {name: self[0].get_parameter(name).shape for name in _matrix_names(self[0])}
        for side in ("left", "right"):
            self.add_module(side, nn.ParameterDict({
                name.replace(".", "/"): torch.zeros(self.basis.size, *_factor(shape, rank)[side])
                for name, shape in shapes.items()}))

    @property
    def kinks(self) -> tuple[float, ...]:
        """Those of the basis."""
        return self.basis.kinks

    def bind(self, part: str) -> At:
        block = dict(self[0].named_parameters())
        keys = [key for key in self.left if key.startswith(f"{part}/")]
        shared = {key: block[key.replace("/", ".")] for key in keys}
        factors = [x for key in keys for x in (self.left[key], self.right[key])]
        columns = [[x[k] for x in factors] for k in range(self.basis.size)]

        def at(l: Tensor) -> dict[str, Tensor]:
            pairs = iter(combine(spread(self.basis, l), columns))
            return {key.partition("/")[2].replace("/", "."): torch.add(shared[key], next(pairs) @ next(pairs))
                    for key in keys}

        return at

    def settle(self, model: nn.Module) -> None:
        """A = 0; B constant in l, normal with the variance 1 / d_in."""
        with torch.no_grad():
            for left, right in zip(self.left.values(), self.right.values(), strict=True):
                left.zero_()
                constant = torch.tensor(self.basis.constant, dtype=right.dtype, device=right.device)
                drawn = torch.randn_like(right[0]) * right.shape[-1] ** -0.5
                right.copy_(constant.view(-1, *(1,) * drawn.dim()) * drawn)


def _matrix_names(block: Block) -> list[str]:
    """Weights of linear maps, and stacks of them, that a block holds."""
    found = []
    for path, module in block.named_modules():
        own = getattr(module, "stacked", ("weight",) if isinstance(module, nn.Linear) else ())
        found += [f"{path}.{name}" for name in own if getattr(module, name) is not None]
    return found


def _factor(shape: torch.Size, rank: int) -> dict[str, tuple[int, ...]]:
    return {"left": (*shape[:-1], rank), "right": (*shape[:-2], rank, shape[-1])}


class Embedding(nn.Module):
    """l (0-d) to ``hidden`` numbers."""

    def __init__(self, n_layers: int, d_embedding: int, hidden: int):
        super().__init__()
        at_least("d_embedding", d_embedding, 2)
        at_least("hidden", hidden, 1)
        self.basis = Fourier(d_embedding, n_layers)
        self.linear = nn.Linear(d_embedding, hidden)

    def forward(self, l: Tensor) -> Tensor:
        """(hidden,)."""
        return nn.functional.silu(self.linear(self.basis(l).to(self.linear.weight.dtype)))


class Modulated(SmoothBlocks):
    """One shared block; scale and shift of its norms move with depth by what a small network makes of an embedding of
    l (adaptive layer norm, as Peebles & Xie 2023 have it for diffusion time), which starts at 0.

    ``d_embedding`` terms of a Fourier series in l, ``hidden`` units. Raises ValueError for norms without parameters.
    """

    def __init__(self, n_layers: int, make_block: Callable[[], Block], *, d_embedding: int = 16, hidden: int = 32):
        super().__init__(n_layers, make_block, 1)
        self.names = {part: self._moved(part) for part in self[0].parts}
        if not any(self.names.values()):
            raise ValueError("weights 'modulated' move the scale and shift of norms, and these blocks have none with "
                             "parameters")
        self.add_module("embedding", Embedding(n_layers, d_embedding, hidden))
        sizes = {part: sum(getattr(self[0], part).get_parameter(name).numel() for name in names)
                 for part, names in self.names.items() if names}
        self.add_module("moves", nn.ModuleDict({part: nn.Linear(hidden, size) for part, size in sizes.items()}))

    def _moved(self, part: str) -> list[str]:
        modules = getattr(self[0], part).placement.named_modules(prefix="placement")
        return [f"{path}.{name}" for path, module in modules if isinstance(module, tuple(KINDS.values()))
                for name, _ in module.named_parameters(recurse=False)]

    def bind(self, part: str) -> At:
        if not self.names[part]:
            return lambda l: {}
        table = dict(getattr(self[0], part).named_parameters())  # get_parameter refuses what functional_call put there
        start = {name: table[name] for name in self.names[part]}
        network, last = own(self.embedding), own(self.moves[part])

        def at(l: Tensor) -> dict[str, Tensor]:
            moves = last(network(l)).split([p.numel() for p in start.values()])
            return {name: p + x.view_as(p) for (name, p), x in zip(start.items(), moves, strict=True)}

        return at

    def settle(self, model: nn.Module) -> None:
        """No move."""
        for move in self.moves.values():
            nn.init.zeros_(move.weight)
            nn.init.zeros_(move.bias)


class Hyper(SmoothBlocks):
    """θ(l) = θ_0 + Σ φ_k(l) θ_k, with φ(l) from a small network of an embedding of l, ``n_basis`` of them: a network
    generates all weights, its last layer holding the blocks θ_k (as in Neural ODE Transformers, Tong et al. 2025).

    ``d_embedding`` terms of a Fourier series in l, ``hidden`` units. θ_k starts at 0 for k > 0.
    """

    def __init__(self, n_layers: int, make_block: Callable[[], Block], *, n_basis: int = 3, d_embedding: int = 16,
                 hidden: int = 32):
        at_least("n_basis", n_basis, 1)
        super().__init__(n_layers, make_block, n_basis + 1)
        self.add_module("embedding", Embedding(n_layers, d_embedding, hidden))
        self.add_module("functions", nn.Linear(hidden, n_basis))

    def bind(self, part: str) -> At:
        network, last = own(self.embedding), own(self.functions)

        def basis(l: Tensor) -> Tensor:
            """(1, φ_1(l), ..., φ_n(l))."""
            values = last(network(l))
            return torch.cat([torch.ones_like(values[:1]), values])

        return expand(self, basis, part)

    def settle(self, model: nn.Module) -> None:
        """θ_k = 0 for k > 0."""
        with torch.no_grad():
            for block in list(self)[1:]:
                for p in block.parameters():
                    p.zero_()


SMOOTH = {
    "linear": LinearWeights,
    "spline": SplineWeights,
    "fourier": FourierWeights,
    "chebyshev": ChebyshevWeights,
    "lowrank": LowRank,
    "modulated": Modulated,
    "hyper": Hyper,
}
