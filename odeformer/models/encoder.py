"""Encoder: token ids to states, and by a head to classes, tags or words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from odeformer.heads import HEADS, Pooler
from odeformer.models.text import TextConfig, TextModel
from odeformer.tables import at_least, build, check_kinds, look_up


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TextConfig):
    """As TextConfig; ``head``: None for the states themselves, or a key of HEADS with ``n_outputs`` outputs.

    ``n_outputs`` is the vocabulary's size if not given for head "masked_lm". ``tie_embeddings``: that head uses the
    token embedding's matrix. ``pooler``: whether there is a ``Pooler`` beside the states (``model.pooled(states)``).
    """

    head: str | type | None = None
    n_outputs: int | None = None
    head_options: Mapping[str, Any] = field(default_factory=dict)
    tie_embeddings: bool = False
    pooler: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.tie_embeddings and self.head != "masked_lm":
            raise ValueError(f"tie_embeddings is for head 'masked_lm', got head {self.head!r}")
        if self.pooler and self.head is not None:
            raise ValueError(f"pooler is for a model that gives its states, got head {self.head!r}")
        if self.head is None:
            if self.n_outputs is not None or self.head_options:
                raise ValueError(f"n_outputs and head_options are for a head; give one of {', '.join(sorted(HEADS))}")
            return
        look_up(HEADS, self.head, "head")
        if self.n_outputs is not None:
            at_least("n_outputs", self.n_outputs, 1)
        elif self.head != "masked_lm":
            raise ValueError(f"n_outputs must be given for head {self.head!r}")


class Encoder(TextModel):
    """Token ids (batch, tokens) to states (batch, tokens, d_model), every token seeing every other.

    With a head: to what it makes of them, such as logits (batch, n_outputs).
    """

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.head = None
        if config.head is not None:
            self.head = build(HEADS, config.head, "head", config.block.d_model, config.n_outputs or config.vocab_size,
                              options=config.head_options)
        if config.tie_embeddings:
            if self.head.output.weight.shape != self.token_embedding.weight.shape:
                raise ValueError(f"tie_embeddings needs a head as wide as the embeddings, "
                                 f"{tuple(self.token_embedding.weight.shape)}; got a matrix "
                                 f"{tuple(self.head.output.weight.shape)}")
            self.head.output.weight = self.token_embedding.weight
        self.pooler = Pooler(config.block.d_model) if config.pooler else None

    def pooled(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the pooler makes of the states that the model gave: (batch, d_model)."""
        if self.pooler is None:
            raise ValueError("this model has no pooler; EncoderConfig(pooler=True) makes one")
        return self.pooler(states, mask)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, token_types: Tensor | None = None,
                return_solution: bool = False, save_states: bool = True) -> Any:
        """States after the final norm, or what the head makes of them; with ``return_solution`` also the Solution.

        ``token_types``: as of ``embed``. The Solution's z is before the final norm; it holds the state at every step
        unless ``save_states`` is False.
        """
        solution = self.run(tokens, mask, save=return_solution and save_states, token_types=token_types)
        output = self.final_norm(solution.z)
        if self.head is not None:
            output = self.head(output, mask)
        return (output, solution) if return_solution else output
