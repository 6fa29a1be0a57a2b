"""Decoder: a causal language model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from odeformer.models.encoder import Encoder, EncoderConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(EncoderConfig):
    """As EncoderConfig; ``tie_embeddings``: the head uses the token embedding's matrix."""

    tie_embeddings: bool = False


class Decoder(Encoder):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab_size), no token seeing a later one."""

    causal = True

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.head = nn.Linear(config.block.d_model, config.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=config.block.d_model**-0.5)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def read_out(self, z: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.final_norm(z))
