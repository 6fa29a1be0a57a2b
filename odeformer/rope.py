"""Rotary position embedding (RoPE, Su et al. 2021): pairs of coordinates turned by angles that grow with the position.

Seen as a complex number, pair i of a query or key at position t is multiplied by exp(1j t θ_i), so that a query and a
key meet through the difference of their positions alone. ``SCALINGS`` names the frequencies θ, plain and for contexts
longer than those of training; ``LAYOUTS`` says which coordinates make a pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from odeformer.tables import at_least, finite, look_up


class Half:
    """Coordinate i makes a pair with i + d / 2: GPT-NeoX, and Llama in Hugging Face's format."""

    @staticmethod
    def split(x: Tensor) -> tuple[Tensor, ...]:
        """(..., d) -> the two parts of each pair, (..., d / 2)."""
        return x.chunk(2, -1)

    @staticmethod
    def join(a: Tensor, b: Tensor) -> Tensor:
        """The reverse of ``split``."""
        return torch.cat([a, b], -1)


class Interleaved:
    """Coordinate 2i makes a pair with 2i + 1: RoFormer, GPT-J, and Llama in Meta's format."""

    @staticmethod
    def split(x: Tensor) -> tuple[Tensor, ...]:
        """(..., d) -> the two parts of each pair, (..., d / 2)."""
        return x.unflatten(-1, (-1, 2)).unbind(-1)

    @staticmethod
    def join(a: Tensor, b: Tensor) -> Tensor:
        """The reverse of ``split``."""
        return torch.stack([a, b], -1).flatten(-2)


LAYOUTS = {
    "half": Half,
    "interleaved": Interleaved,
}


class Rotary(NamedTuple):
    """Tables of cos and sin (positions, turned / 2), float32 or float64: what turns the first ``turned`` coordinates.

    ``layout``: a key of LAYOUTS. ``scale``: what all coordinates are multiplied by (YaRN's attention temperature).
    """

    cos: Tensor
    sin: Tensor
    layout: str | type = "half"
    scale: float = 1.0

    def turn(self, x: Tensor) -> Tensor:
        """x (..., tokens, head_dim) turned, in float32 or finer; its last token stands at the last position.

        Raises ValueError for more tokens than positions.
        """
        n, rows, turned = x.shape[-2], self.cos.shape[-2], 2 * self.cos.shape[-1]
        if n > rows:
            raise ValueError(f"x must have at most as many tokens as there are positions, {rows}; got {n}")
        cos, sin = self.cos[..., rows - n:, :], self.sin[..., rows - n:, :]
        layout = look_up(LAYOUTS, self.layout, "layout")
        y = x.to(torch.promote_types(x.dtype, cos.dtype))
        a, b = layout.split(y[..., :turned])
        rest = y[..., turned:]
        y = layout.join(a * cos - b * sin, a * sin + b * cos)
        if rest.shape[-1]:
            y = torch.cat([y, rest], -1)
        return (y if self.scale == 1 else y * self.scale).to(x.dtype)

    def back(self, x: Tensor) -> Tensor:
        """What ``turn`` made x of."""
        return self._replace(sin=-self.sin, scale=1 / self.scale).turn(x)


@dataclass(frozen=True, kw_only=True)
class Frequencies:
    """θ_i = base^(-2i / d) radians a position for pair i of d turned coordinates (Su et al. 2021).

    ``single``: θ and the angles are float32, as Hugging Face's models have them (at position 1000 such an angle is off
    by up to 1e-4), else float64.

    Raises ValueError unless base is above 1.
    """

    base: float = 10000.0
    single: bool = False

    scale = 1.0  # what queries and keys are multiplied by beside being turned

    def __post_init__(self) -> None:
        finite("base", self.base, above=1)

    def falling(self, base: float, d: int, device: torch.device | None) -> Tensor:
        """base^(-2i / d) for each pair (d / 2,); in float32 in the order of operations of Hugging Face's models."""
        exponent = torch.arange(0, d, 2, dtype=self.dtype, device=device) / d
        return 1 / base**exponent if self.single else base**-exponent

    @property
    def dtype(self) -> torch.dtype:
        """Of θ and of the angles."""
        return torch.float32 if self.single else torch.float64

    def __call__(self, d: int, device: torch.device | None = None) -> Tensor:
        """(d / 2,)."""
        return self.falling(self.base, d, device)


@dataclass(frozen=True, kw_only=True)
class Extension(Frequencies):
    """Frequencies for a context ``factor`` times longer than that of training.

    Raises ValueError unless factor is at least 1.
    """

    factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor is None:
            raise ValueError("factor must be given for this scaling, how many times longer than in training texts are; "
                             "got None")
        finite("factor", self.factor, least=1)


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Extension):
    """Position interpolation (Chen et al. 2023): all positions divided by ``factor``."""

    def __call__(self, d: int, device: torch.device | None = None) -> Tensor:
        return super().__call__(d, device) / self.factor


@dataclass(frozen=True, kw_only=True)
class NtkScaling(Extension):
    """NTK-aware interpolation (bloc97 2023; Peng et al. 2023, section 3.1): base becomes base factor^(d / (d - 2)).

    The slowest pair is slowed down by ``factor``, the fastest not at all.
    """

    def __call__(self, d: int, device: torch.device | None = None) -> Tensor:
        if d < 4:
            raise ValueError(f"scaling 'ntk' needs at least 4 turned coordinates a head, got {d}")
        return self.falling(self.base * self.factor ** (d / (d - 2)), d, device)


@dataclass(frozen=True, kw_only=True)
class NtkByPartsScaling(Extension):
    """NTK-by-parts (Peng et al. 2023, section 3.2): fast pairs keep their θ, slow ones are divided by ``factor``.

    Pairs that turn ``beta_slow`` to ``beta_fast`` times over ``original_max_len``, the length of training, are between:
    the share of the kept θ grows linearly with the number of turns. With beta_fast = 4 this is Llama 3.1's scaling.

    Raises ValueError unless 0 < beta_slow < beta_fast, and where original_max_len is missing.
    """

    original_max_len: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_max_len is None:
            raise ValueError("original_max_len must be given, the number of positions of training; got None")
        at_least("original_max_len", self.original_max_len, 1)
        finite("beta_slow", self.beta_slow, above=0)
        finite("beta_fast", self.beta_fast, above=self.beta_slow)

    def kept(self, d: int, device: torch.device | None) -> Tensor:
        """The share in [0, 1] of its own θ that each pair keeps (d / 2,)."""
        turns = self.original_max_len / (2 * math.pi) * super().__call__(d, device)
        return ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)

    def __call__(self, d: int, device: torch.device | None = None) -> Tensor:
        kept = self.kept(d, device)
        return super().__call__(d, device) * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnScaling(NtkByPartsScaling):
    """YaRN (Peng et al. 2023) as its authors released it and published checkpoints use it.

    As NtkByPartsScaling, but the share of the kept θ falls linearly with the index of the pair, from the one that turns
    ``beta_fast`` times to the one that turns ``beta_slow`` times, both rounded outwards; and queries and keys are
    multiplied by 0.1 ln(factor) + 1, so that the scores have the temperature of the paper's section 3.4.
    """

    @property
    def scale(self) -> float:
        """0.1 ln(factor) + 1."""
        return 0.1 * math.log(self.factor) + 1

    def index(self, turns: float, d: int) -> float:
        """Which pair, a fraction perhaps, turns that often over ``original_max_len``."""
        return d * math.log(self.original_max_len / (2 * math.pi * turns)) / (2 * math.log(self.base))

    def kept(self, d: int, device: torch.device | None) -> Tensor:
        first, last = math.floor(self.index(self.beta_fast, d)), math.ceil(self.index(self.beta_slow, d))
        first, last = max(first, 0), min(last, d - 1)
        width = max(last - first, 0.001)  # as in the released code, a jump instead of a division by 0
        pair = torch.arange(d // 2, dtype=self.dtype, device=device)
        return 1 - ((pair - first) / width).clamp(0, 1)


SCALINGS = {
    "none": Frequencies,
    "linear": LinearScaling,
    "ntk": NtkScaling,
    "ntk_by_parts": NtkByPartsScaling,
    "yarn": YarnScaling,
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How queries and keys are turned.

    ``frequencies``: an object of a class of SCALINGS. ``layout``: a key of LAYOUTS. ``fraction``: how much of head_dim
    is turned, the first coordinates (GPT-J, GPT-NeoX).

    Raises ValueError for an unknown layout and a fraction outside (0, 1].
    """

    frequencies: Frequencies = Frequencies()
    layout: str | type = "half"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        look_up(LAYOUTS, self.layout, "layout")
        finite("fraction", self.fraction, above=0)
        if self.fraction > 1:
            raise ValueError(f"fraction must be at most 1, got {self.fraction!r}")

    def turned(self, head_dim: int) -> int:
        """How many coordinates are turned, int(fraction head_dim). Raises ValueError unless even and at least 2."""
        turned = int(self.fraction * head_dim)
        if turned < 2 or turned % 2:
            raise ValueError(f"fraction of head_dim must turn pairs of coordinates; got {turned} coordinates from "
                             f"fraction = {self.fraction}, head_dim = {head_dim}")
        return turned

    def tables(self, positions: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> Rotary:
        """Tables for positions (..., tokens) and inputs of a dtype: float64 for float64, else float32.

        Angles are float64 (float32 where the frequencies are ``single``), never bfloat16, in which one of 4000 is off
        by up to 8.
        """
        theta = self.frequencies(self.turned(head_dim), positions.device)
        angle = positions.to(theta.dtype)[..., None] * theta
        dtype = torch.promote_types(dtype, torch.float32)
        return Rotary(angle.cos().to(dtype), angle.sin().to(dtype), self.layout, self.frequencies.scale)


PLAIN = Frequencies()


def apply_rope(x: Tensor, positions: Tensor, *, layout: str = "half", frequencies: Frequencies = PLAIN,
               fraction: float = 1.0) -> Tensor:
    """x (batch, ..., tokens, head_dim) turned by its positions (tokens,) or (batch, tokens), whole or not.

    ``layout``, ``frequencies``, ``fraction``: see Rope. Computed in float32 (float64 for float64); dtype and shape are
    those of x. Raises TypeError unless x is a floating-point tensor, ValueError for other positions, an odd head_dim
    and an unknown layout.

    >>> apply_rope(torch.tensor([[1.0, 0.0]]), torch.tensor([torch.pi / 2])).round(decimals=3) + 0
    tensor([[0., 1.]])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    positions = torch.as_tensor(positions, device=x.device)
    wanted = [tuple(x.shape[-2:-1])] + ([(x.shape[0], x.shape[-2])] if x.dim() > 2 else [])
    if tuple(positions.shape) not in wanted:
        raise ValueError(f"positions must have the shape {' or '.join(map(str, wanted))}, got "
                         f"{tuple(positions.shape)}")
    if positions.dim() == 2:
        positions = positions.view(x.shape[0], *[1] * (x.dim() - 3), x.shape[-2])
    rope = Rope(frequencies=frequencies, layout=layout, fraction=fraction)
    return rope.tables(positions, x.shape[-1], x.dtype).turn(x)
