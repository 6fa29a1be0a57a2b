"""Encoder: token ids to states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.depth import DepthConfig
from odeformer.masks import check_mask
from odeformer.models.base import DepthModel, check_tokens
from odeformer.positions import POSITIONS
from odeformer.tables import at_least, build


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """An encoder: vocabulary, longest sequence, layers; the layer itself in ``block``, its integration in ``depth``."""

    vocab_size: int
    max_seq_len: int
    n_layers: int
    block: BlockConfig
    depth: DepthConfig = field(default_factory=DepthConfig)


class Encoder(DepthModel):
    """Token ids (batch, tokens) to states (batch, tokens, d_model), every token seeing every other."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        at_least("vocab_size", config.vocab_size, 1)
        at_least("max_seq_len", config.max_seq_len, 1)
        d_model = config.block.d_model
        self.token_embedding = nn.Embedding(config.vocab_size, d_model)
        nn.init.normal_(self.token_embedding.weight, std=d_model**-0.5)
        self.position = build(POSITIONS, config.block.position, "position", config.max_seq_len, d_model,
                              options=config.block.position_options)
        self.initialize()

    def embed(self, tokens: Tensor) -> Tensor:
        """The state at l = 0 (batch, tokens, d_model)."""
        check_tokens(tokens, self.config.vocab_size, self.config.max_seq_len)
        return self.token_embedding(tokens) + self.position(tokens.shape[1])

    def read_out(self, z: Tensor) -> Tensor:
        """What the model returns, from the state at l = n_layers: here the final norm."""
        return self.final_norm(z)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, return_solution: bool = False,
                save_states: bool = True) -> Any:
        """States after the final norm; with ``return_solution`` also the Solution, whose z is before it.

        The Solution holds the state at every step unless ``save_states`` is False.
        """
        z = self.embed(tokens)
        check_mask(mask, tokens.shape)
        solution = self.evolve(z, mask, save=return_solution and save_states)
        output = self.read_out(solution.z)
        return (output, solution) if return_solution else output
