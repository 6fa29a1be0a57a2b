"""Where tokens stand: ``POSITIONS[name](max_seq_len, d_model, **options)``, called ``(n_tokens)``.

What a call returns is added to the embedding; ``rotary(n_tokens, head_dim, device, dtype)`` is what attention turns
queries and keys by, or None.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from odeformer.rope import LAYOUTS, SCALINGS, Rope, Rotary, apply_rope
from odeformer.tables import at_least, build

__all__ = ["LAYOUTS", "POSITIONS", "SCALINGS", "LearnedPosition", "NoPosition", "Rotary", "RotaryPosition",
           "SinusoidalPosition", "TablePosition", "apply_rope"]


class NoPosition(nn.Module):
    """Nothing is added, nothing turned."""

    def __init__(self, max_seq_len: int, d_model: int):
        super().__init__()

    def forward(self, n_tokens: int) -> float | Tensor:
        """What is added to the embedding: 0, or (n_tokens, d_model)."""
        return 0.0

    def rotary(self, n_tokens: int, head_dim: int, device: torch.device,
               dtype: torch.dtype = torch.float32) -> Rotary | None:
        """What attention turns queries and keys of a dtype by, at positions 0 to n_tokens - 1."""
        return None

    def check(self, head_dim: int) -> None:
        """Raises ValueError where heads of this size cannot be turned; here all can."""


class LearnedPosition(NoPosition):
    """A table with one learned row a position.

    ``offset``: rows before that of the first position, which are of no use here (RoBERTa and BART have 2 of them).
    Raises TypeError or ValueError unless offset is at least 0.
    """

    def __init__(self, max_seq_len: int, d_model: int, *, offset: int = 0):
        super().__init__(max_seq_len, d_model)
        at_least("offset", offset, 0)
        self.offset = offset
        self.table = nn.Parameter(torch.empty(offset + max_seq_len, d_model).normal_(std=d_model**-0.5))

    def forward(self, n_tokens: int) -> Tensor:
        """(n_tokens, d_model)."""
        return self.table[self.offset:self.offset + n_tokens]


class TablePosition(NoPosition):
    """A table that is not trained, and saved with the model: all sines of a position first, then all cosines, with the
    wavelengths of ``sinusoidal`` (Marian; Whisper's encoder). A checkpoint brings its own numbers.

    ``stretch``: the exponents of the wavelengths go from 0 to 1, both included (tensor2tensor, Whisper), not to
    1 - 2 / d_model.
    """

    def __init__(self, max_seq_len: int, d_model: int, *, stretch: bool = False):
        super().__init__(max_seq_len, d_model)
        exponent = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
        if stretch and len(exponent) > 1:
            exponent = exponent / exponent[-1]
        angle = torch.arange(max_seq_len, dtype=torch.float64)[:, None] * 10000.0**-exponent
        table = torch.cat([angle.sin(), angle.cos()], -1)[:, :d_model]
        self.register_buffer("table", table.to(torch.get_default_dtype()))

    def forward(self, n_tokens: int) -> Tensor:
        """(n_tokens, d_model)."""
        return self.table[:n_tokens]


class SinusoidalPosition(NoPosition):
    """sin and cos of position / 10000^(2i / d_model), in turn (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, max_seq_len: int, d_model: int):
        super().__init__(max_seq_len, d_model)
        self.d_model = d_model
        self.register_buffer("zero", torch.zeros(()))  # knows where the model is and its dtype; saved with it

    def forward(self, n_tokens: int) -> Tensor:
        """(n_tokens, d_model), computed in float64 and rounded once."""
        device = self.zero.device
        pair = torch.arange(0, self.d_model, 2, dtype=torch.float64, device=device)
        position = torch.arange(n_tokens, dtype=torch.float64, device=device)
        angle = position[:, None] * 10000.0 ** (-pair / self.d_model)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :self.d_model].to(self.zero.dtype)


class RotaryPosition(NoPosition):
    """Rotary position embedding (Su et al. 2021): attention sees positions only through j - i.

    ``base``: pair i of d coordinates turns by base^(-2i / d) a position. ``layout``: a key of LAYOUTS, which
    coordinates make a pair. ``fraction``: how much of head_dim is turned. ``scaling``: a key of SCALINGS, for contexts
    longer than those of training, with its options: ``factor``, by how much longer; for ntk_by_parts and yarn also
    ``original_max_len``, ``beta_fast`` (32) and ``beta_slow`` (1). ``single``: angles are float32, as in Hugging Face's
    models. The tables are made anew in each pass from these numbers, so that casting a model does not touch them.

    Raises ValueError for what is unknown, missing or out of range.
    """

    turns = True  # attention must take ``rotary``, and head_dim must be even

    def __init__(self, max_seq_len: int, d_model: int, *, base: float = 10000.0, layout: str | type = "half",
                 fraction: float = 1.0, scaling: str | type = "none", factor: float | None = None,
                 original_max_len: int | None = None, beta_fast: float | None = None, beta_slow: float | None = None,
                 single: bool = False):
        super().__init__(max_seq_len, d_model)
        options = {"base": base, "factor": factor, "original_max_len": original_max_len, "beta_fast": beta_fast,
                   "beta_slow": beta_slow, "single": single or None}
        given = {name: value for name, value in options.items() if value is not None}
        frequencies = build(SCALINGS, scaling, "scaling", options=given)
        self.rope = Rope(frequencies=frequencies, layout=layout, fraction=fraction)

    def extra_repr(self) -> str:
        """The settings, for print(model)."""
        return str(self.rope)

    def check(self, head_dim: int) -> None:
        """Raises ValueError unless pairs of coordinates are turned, as many as the scaling needs."""
        self.rope.frequencies(self.rope.turned(head_dim))

    def rotary(self, n_tokens: int, head_dim: int, device: torch.device,
               dtype: torch.dtype = torch.float32) -> Rotary:
        """Tables (n_tokens, turned coordinates / 2), float64 for a dtype of float64, else float32."""
        return self.rope.tables(torch.arange(n_tokens, device=device), head_dim, dtype)


POSITIONS = {
    "none": NoPosition,
    "learned": LearnedPosition,
    "sinusoidal": SinusoidalPosition,
    "sinusoidal_table": TablePosition,
    "rope": RotaryPosition,
}
