"""What models of text share: token ids embedded, with their positions, and integrated over depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.cache import Cache
from odeformer.depth import DepthConfig
from odeformer.masks import check_mask
from odeformer.models.base import DepthModel, check_that, check_tokens
from odeformer.norms import make_norm
from odeformer.positions import POSITIONS
from odeformer.tables import at_least, build, check_kinds, finite


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """What makes the state at l = 0 of tokens: their rows times ``scale``, plus positions, plus token types.

    ``norm``: whether a norm follows, of the kind and eps that the layers' have. ``width``: of the tables, d_model if
    None; a linear map leads to d_model otherwise (Lan et al. 2020). ``n_token_types``: kinds of tokens, such as those
    of a first and a second sentence (Devlin et al. 2019), each with a learned vector; 0: none.
    """

    scale: float = 1.0
    norm: bool = False
    width: int | None = None
    n_token_types: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        finite("scale", self.scale, above=0)
        at_least("n_token_types", self.n_token_types, 0)
        if self.width is not None:
            at_least("width", self.width, 1)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Vocabulary, longest sequence, layers; the layer itself in ``block``, its integration in ``depth``, what comes
    before in ``embedding``. ``origin``: of imported weights, what ``to_huggingface`` must know."""

    vocab_size: int
    max_seq_len: int
    n_layers: int
    block: BlockConfig
    depth: DepthConfig = field(default_factory=DepthConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    origin: Mapping[str, Any] | None = None


class TextModel(DepthModel):
    """Token ids (batch, tokens) to states; what is made of them is the subclass's."""

    def __init__(self, config: TextConfig):
        super().__init__(config)
        at_least("vocab_size", config.vocab_size, 1)
        at_least("max_seq_len", config.max_seq_len, 1)
        d_model, embedding = config.block.d_model, config.embedding
        width = embedding.width or d_model
        self.token_embedding = nn.Embedding(config.vocab_size, width)
        nn.init.normal_(self.token_embedding.weight, std=width**-0.5)
        self.position = build(POSITIONS, config.block.position, "position", config.max_seq_len, width,
                              options=config.block.position_options)
        self.position.check(d_model // config.block.n_heads)
        self.token_type_embedding = nn.Embedding(n, width) if (n := embedding.n_token_types) else None
        self.embedding_norm = make_norm(width, **norm_kind(config.block)) if embedding.norm else None
        self.embedding_projection = None if embedding.width is None else nn.Linear(width, d_model)
        self.initialize()

    def check(self, tokens: Tensor, mask: Tensor | None = None, n_before: int = 0,
              names: tuple[str, str] = ("tokens", "mask")) -> None:
        """Raises TypeError or ValueError unless these are ids that the model can read behind n_before earlier ones.

        ``names``: what the messages call the two.
        """
        check_tokens(tokens, self.config.vocab_size, self.config.max_seq_len, n_before, names[0])
        check_mask(mask, tokens.shape, names[1])

    def embed(self, tokens: Tensor, mask: Tensor | None = None, cache: Cache | None = None,
              token_types: Tensor | None = None) -> Tensor:
        """The state at l = 0 (batch, tokens, d_model). Positions count real tokens, wherever the padding is.

        ``token_types``: int64, shaped like tokens; None: all 0.
        """
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"cache must be made by new_cache(), got {type(cache).__name__}")
        start = 0 if cache is None else cache.n_tokens
        self.check(tokens, mask, start)
        z, rows = self.token_embedding(tokens), self.position(start + tokens.shape[1])
        if self.config.embedding.scale != 1:
            z = z * self.config.embedding.scale
        if isinstance(rows, Tensor):
            real = mask if cache is None else cache.joined_mask(mask, *tokens.shape)
            rows = rows[start:] if real is None else rows[real.cumsum(1)[:, start:].sub(1).clamp_(min=0)]
        return self._finish(z + rows, token_types)

    def _finish(self, z: Tensor, token_types: Tensor | None) -> Tensor:
        """What follows the positions: token types, a norm, a map to d_model. Raises ValueError for other types."""
        n = self.config.embedding.n_token_types
        if token_types is not None:
            if not n:
                raise ValueError("token_types are for a model with n_token_types in its embedding, which is 0 here")
            if token_types.dtype != torch.int64 or token_types.shape != z.shape[:2]:
                raise ValueError(f"token_types must be int64 of the shape (batch, tokens) = {tuple(z.shape[:2])}, got "
                                 f"{token_types.dtype}, {tuple(token_types.shape)}")
            check_that(((token_types >= 0) & (token_types < n)).all(), f"token_types must be in [0, {n})")
            z = z + self.token_type_embedding(token_types)
        elif n:
            z = z + self.token_type_embedding.weight[0]
        z = z if self.embedding_norm is None else self.embedding_norm(z)
        return z if self.embedding_projection is None else self.embedding_projection(z)

    def run(self, tokens: Tensor, mask: Tensor | None = None, *, save: bool = False, cache: Cache | None = None,
            token_types: Tensor | None = None, **memory: Any) -> Any:
        """The Solution for tokens; arguments as of ``embed`` and ``evolve``."""
        return self.evolve(self.embed(tokens, mask, cache, token_types), mask, save=save, cache=cache, **memory)


def norm_kind(block: BlockConfig) -> dict[str, Any]:
    """Kind and eps of the layers' norms, where they are given."""
    return {name: block.norm_options[name] for name in ("kind", "eps") if name in block.norm_options}
