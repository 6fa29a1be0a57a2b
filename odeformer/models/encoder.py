"""Encoder: token ids to states, and by a head to classes, tags or words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from odeformer.heads import HEADS
from odeformer.models.text import TextConfig, TextModel
from odeformer.tables import at_least, build, look_up


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TextConfig):
    """As TextConfig; ``head``: None for the states themselves, or a key of HEADS with ``n_outputs`` outputs.

    ``n_outputs`` is the vocabulary's size if not given for head "masked_lm".
    """

    head: str | type | None = None
    n_outputs: int | None = None
    head_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
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

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, return_solution: bool = False,
                save_states: bool = True) -> Any:
        """States after the final norm, or what the head makes of them; with ``return_solution`` also the Solution.

        The Solution's z is before the final norm; it holds the state at every step unless ``save_states`` is False.
        """
        solution = self.run(tokens, mask, save=return_solution and save_states)
        output = self.final_norm(solution.z)
        if self.head is not None:
            output = self.head(output, mask)
        return (output, solution) if return_solution else output
