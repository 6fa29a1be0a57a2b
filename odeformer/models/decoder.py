"""Decoder: a causal language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from odeformer.cache import Cache, make_cache
from odeformer.generate import generate, stream
from odeformer.models.text import TextConfig, TextModel
from odeformer.tables import check_kinds


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TextConfig):
    """As TextConfig; ``tie_embeddings``: the head uses the token embedding's matrix. ``head_bias``: whether it has a
    bias. ``with_head``: False for a model that gives its states after the final norm."""

    tie_embeddings: bool = False
    head_bias: bool = False
    with_head: bool = True

    def __post_init__(self) -> None:
        check_kinds(self)
        for name in ("tie_embeddings", "head_bias"):
            if getattr(self, name) and not self.with_head:
                raise ValueError(f"{name} is for a model with a head, and with_head is False")
        if self.tie_embeddings and self.embedding.width is not None:
            raise ValueError(f"tie_embeddings needs embeddings of the width d_model, got width {self.embedding.width}")


class Decoder(TextModel):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab_size), no token seeing a later one."""

    causal = True

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.head = None
        if not config.with_head:
            return
        self.head = nn.Linear(config.block.d_model, config.vocab_size, bias=config.head_bias)
        nn.init.normal_(self.head.weight, std=config.block.d_model**-0.5)
        if config.head_bias:
            nn.init.zeros_(self.head.bias)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def read_out(self, z: Tensor) -> Tensor:
        """Logits; the normed states where there is no head."""
        states = self.final_norm(z)
        return states if self.head is None else self.head(states)

    def check_head(self) -> None:
        """Raises ValueError where there is no head, and so nothing to choose a token by."""
        if self.head is None:
            raise ValueError("this decoder has no head (with_head=False) and gives states, from which no token can be "
                             "chosen")

    def new_cache(self, policy: str | type = "exact", **options: Any) -> Cache:
        """An empty cache, to be passed with each further piece of a text; ``policy`` is a key of CACHES."""
        return make_cache(policy, options)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, cache: Cache | None = None,
                return_solution: bool = False, save_states: bool = True, **memory: Any) -> Any:
        """Logits (batch, tokens, vocab_size).

        With a cache the tokens go on where the last call ended, ``mask`` is that of these tokens, and (logits, cache)
        comes back, the cache being the one passed, longer now. With ``return_solution`` the Solution comes last, whose
        z is before the final norm, with the state at every step unless ``save_states`` is False.
        """
        solution = self.run(tokens, mask, save=return_solution and save_states, cache=cache, **memory)
        output = self.read_out(solution.z)
        results = (output,) + (() if cache is None else (cache,)) + ((solution,) if return_solution else ())
        return results if len(results) > 1 else output

    def generate(self, tokens: Tensor, mask: Tensor | None = None, *, max_new_tokens: int, **options: Any) -> Tensor:
        """Prompt and continuation (batch, tokens + at most max_new_tokens), greedy unless told; see ``generate``."""
        self.check_head()
        return generate(self, tokens, mask, max_new_tokens=max_new_tokens, **options)

    def stream(self, tokens: Tensor, mask: Tensor | None = None, *, max_new_tokens: int, **options: Any) -> Any:
        """An iterator over the new tokens (batch,), one after the other; options as of ``generate`` without beams."""
        self.check_head()
        return stream(self, tokens, mask, max_new_tokens=max_new_tokens, **options)
