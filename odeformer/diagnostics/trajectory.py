"""What diagnostics look at: a field, the states along which it was integrated, and where they stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

MAX_BYTES = 2**31  # default bound on what a diagnostic keeps at once
DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Site:
    """A place on a trajectory: the field ``f`` of the layer that begins or goes on there, the state ``z`` (batch,
    tokens, d_model) at depth ``l`` (a 0-d tensor), and the length ``h`` of the step taken from it."""

    f: Any
    z: Tensor
    l: Tensor
    h: float

    def increment(self) -> Tensor:
        """f(z, l), without a graph."""
        with torch.no_grad():
            return self.f(self.z, self.l)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A field f(z, l), ``states`` (points, batch, tokens, d_model) in float32 or float64 at ``depths``, and ``mask``
    (batch, tokens), True = real.

    Every diagnostic takes one, or a model's Solution, from which it makes one. States lose their graph.

    Raises TypeError for what is neither; ValueError for a Solution without states or field, fewer than two states,
    shapes that do not fit, half precision, and numbers that are not finite, with the names of such weights.
    """

    f: Any
    states: Tensor
    depths: Sequence[float]
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        z = self.states
        if not isinstance(z, Tensor) or z.dtype not in DTYPES:
            raise ValueError(f"states must be a tensor in float32 or float64, got "
                             f"{getattr(z, 'dtype', type(z).__name__)}; model.float() makes a model that gives them")
        if z.dim() != 4 or 0 in z.shape:
            raise ValueError(f"states must have the shape (points, batch, tokens, d_model), got {tuple(z.shape)}")
        if len(z) < 2 or len(self.depths) != len(z):
            raise ValueError(f"states and depths must have the same number of points, at least 2; got {len(z)} and "
                             f"{len(self.depths)}")
        if any(b <= a for a, b in pairwise(map(float, self.depths))):
            raise ValueError(f"depths must increase, got {list(self.depths)}")
        mask = self.mask
        if mask is not None and (mask.dtype != torch.bool or mask.shape != z.shape[1:3]):
            raise ValueError(f"mask must be bool with the shape (batch, tokens) = {tuple(z.shape[1:3])}, got "
                             f"{mask.dtype} {tuple(mask.shape)}")
        object.__setattr__(self, "states", z.detach())
        object.__setattr__(self, "depths", tuple(map(float, self.depths)))
        check_field(self.f)
        if not bool(self.real(self.states, 0.0).isfinite().all()):
            raise ValueError("states must be finite at real tokens")

    @classmethod
    def of(cls, source: Any) -> Trajectory:
        """The source itself, or what a Solution holds."""
        if isinstance(source, Trajectory):
            return source
        if not hasattr(source, "states") or not hasattr(source, "depths"):
            raise TypeError(f"source must be a model's Solution or a Trajectory, got {type(source).__name__}; "
                            "model(..., return_solution=True) gives a Solution")
        if getattr(source, "states", None) is None:
            raise ValueError("the Solution holds no states: call the model with return_solution=True and without "
                             "save_states=False")
        if getattr(source, "field", None) is None:
            raise ValueError("the Solution holds no field: it is not a model's; Trajectory(f, states, depths) takes "
                             "f beside it")
        return cls(source.field, source.states, source.depths, source.mask)

    @property
    def n_tokens(self) -> Tensor:
        """Real tokens of each row, int64 (batch,)."""
        batch, n = self.states.shape[1:3]
        if self.mask is None:
            return torch.full((batch,), n, device=self.states.device)
        return self.mask.sum(1)

    def real(self, x: Tensor, fill: float = math.nan) -> Tensor:
        """x (..., batch, tokens) or (..., batch, tokens, d_model) with ``fill`` at padding."""
        if self.mask is None:
            return x
        mask = self.mask.unsqueeze(-1) if x.shape[-3:] == self.states.shape[1:] else self.mask
        return x.masked_fill(~mask, fill)

    def field_at(self, l: float) -> Any:
        """The piece of f that holds l; at a boundary the one that begins there."""
        pieces = getattr(self.f, "pieces", None)
        if not pieces:
            return self.f
        return next((f for start, stop, f in pieces if start <= l < stop), pieces[-1][2])

    def sites(self, at: str | Sequence[float] = "layers", *, part: int | None = None) -> list[Site]:
        """Places along the trajectory, the last state excepted.

        ``at``: "layers", where a piece of f begins (whole l, where f is one piece; all states, if none is there);
        "steps", every state; or depths at which there are states. ``part``: a sublayer's field in place of f.
        """
        z, l = self.states, self.depths
        return [Site(self._part(self.field_at(l[i]), part), z[i], self.depth(l[i]), l[i + 1] - l[i])
                for i in self._places(at)]

    def _places(self, at: str | Sequence[float]) -> list[int]:
        inner = list(enumerate(self.depths[:-1]))
        if at == "steps":
            return [i for i, _ in inner]
        if isinstance(at, str):
            if at != "layers":
                raise ValueError(f"at must be 'layers', 'steps' or depths, got {at!r}")
            pieces = getattr(self.f, "pieces", None)
            wanted = [start for start, _, _ in pieces] if pieces else [l for _, l in inner if l == int(l)]
            at = [l for l in wanted if l in self.depths[:-1]] or [l for _, l in inner]
        known = {l: i for i, l in inner}
        missing = [l for l in at if l not in known]
        if missing:
            raise ValueError(f"at must be depths of states but the last, {', '.join(f'{l:g}' for l in known)}; got "
                             f"{', '.join(f'{l:g}' for l in missing)}")
        return [known[l] for l in at]

    @staticmethod
    def _part(f: Any, part: int | None) -> Any:
        if part is None:
            return f
        parts = getattr(f, "parts", None) or ()
        if not 0 <= part < len(parts):
            raise ValueError(f"part must be None or below the number of parts of the field, {len(parts)}; got {part}")
        return parts[part]

    def depth(self, l: float) -> Tensor:
        """l as a field is given it."""
        return torch.tensor(l, dtype=self.states.dtype, device=self.states.device)


def check_field(f: Any) -> None:
    """Raises TypeError unless f can be called or has pieces; ValueError where weights of it are not finite."""
    if not callable(f) and not getattr(f, "pieces", None):
        raise TypeError(f"f must be callable as f(z, l), got {type(f).__name__}")
    names = [f"{where}: {name}" for where, module in modules_of(f) for name in _not_finite(module)]
    if names:
        raise ValueError(f"weights must be finite, and these are not: {_listed(names)}")


def check_weights(model: nn.Module) -> None:
    """Raises ValueError where parameters of a model are not finite, with their names."""
    names = _not_finite(model)
    if names:
        raise ValueError(f"weights must be finite, and these are not: {_listed(names)}")


def modules_of(f: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a field calls: (where, module), each once."""
    seen: set[int] = set()
    for i, (_, _, piece) in enumerate(getattr(f, "pieces", None) or [(0, 0, f)]):
        parts = getattr(piece, "parts", None) or getattr(piece, "_parts", None) or (piece,)
        for part in parts:
            for module in _held(part):
                if id(module) not in seen:
                    seen.add(id(module))
                    yield f"layer {i}, {type(getattr(module, 'core', module)).__name__}", module


def _held(part: Any, levels: int = 3) -> Iterator[nn.Module]:
    """Modules among the attributes of a field, and of what these hold."""
    if isinstance(part, nn.Module):
        yield part
    elif levels and hasattr(part, "__dict__"):
        for value in vars(part).values():
            if isinstance(value, nn.Module) or type(value).__module__.startswith("odeformer"):
                yield from _held(value, levels - 1)


def _not_finite(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if not p.is_meta and not bool(p.detach().isfinite().all())]


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_bytes(needed: int, max_bytes: int, what: str, advice: str) -> None:
    """Raises ValueError where ``what`` takes more than max_bytes."""
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(f"max_bytes must be an int of at least 1, got {max_bytes!r}")
    if needed > max_bytes:
        raise ValueError(f"{what} would take {needed:,} bytes and max_bytes is {max_bytes:,}: {advice}, or pass "
                         f"max_bytes={needed}")


def bar(items: Iterable, progress: bool, name: str, total: int | None = None) -> Iterable:
    """The items, with a progress bar on stderr if asked for."""
    return tqdm(items, desc=name, total=total, disable=not progress)
