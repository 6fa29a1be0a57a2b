"""What models of text share: token ids embedded, with their positions, and integrated over depth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.cache import Cache
from odeformer.depth import DepthConfig
from odeformer.masks import check_mask
from odeformer.models.base import DepthModel, check_tokens
from odeformer.positions import POSITIONS
from odeformer.tables import at_least, build


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Vocabulary, longest sequence, layers; the layer itself in ``block``, its integration in ``depth``."""

    vocab_size: int
    max_seq_len: int
    n_layers: int
    block: BlockConfig
    depth: DepthConfig = field(default_factory=DepthConfig)


class TextModel(DepthModel):
    """Token ids (batch, tokens) to states; what is made of them is the subclass's."""

    def __init__(self, config: TextConfig):
        super().__init__(config)
        at_least("vocab_size", config.vocab_size, 1)
        at_least("max_seq_len", config.max_seq_len, 1)
        d_model = config.block.d_model
        self.token_embedding = nn.Embedding(config.vocab_size, d_model)
        nn.init.normal_(self.token_embedding.weight, std=d_model**-0.5)
        self.position = build(POSITIONS, config.block.position, "position", config.max_seq_len, d_model,
                              options=config.block.position_options)
        self.position.check(d_model // config.block.n_heads)
        self.initialize()

    def check(self, tokens: Tensor, mask: Tensor | None = None, n_before: int = 0,
              names: tuple[str, str] = ("tokens", "mask")) -> None:
        """Raises TypeError or ValueError unless these are ids that the model can read behind n_before earlier ones.

        ``names``: what the messages call the two.
        """
        check_tokens(tokens, self.config.vocab_size, self.config.max_seq_len, n_before, names[0])
        check_mask(mask, tokens.shape, names[1])

    def embed(self, tokens: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The state at l = 0 (batch, tokens, d_model). Positions count real tokens, wherever the padding is."""
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"cache must be made by new_cache(), got {type(cache).__name__}")
        start = 0 if cache is None else cache.n_tokens
        self.check(tokens, mask, start)
        z, rows = self.token_embedding(tokens), self.position(start + tokens.shape[1])
        if not isinstance(rows, Tensor):
            return z + rows
        real = mask if cache is None else cache.joined_mask(mask, *tokens.shape)
        return z + (rows[start:] if real is None else rows[real.cumsum(1)[:, start:].sub(1).clamp_(min=0)])

    def run(self, tokens: Tensor, mask: Tensor | None = None, *, save: bool = False, cache: Cache | None = None,
            **memory: Any) -> Any:
        """The Solution for tokens; arguments as of ``evolve``."""
        return self.evolve(self.embed(tokens, mask, cache), mask, save=save, cache=cache, **memory)
