"""SpeechSeq2Seq: spectrograms to text, by an encoder behind two convolutions (Radford et al. 2022, Whisper)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.depth import DepthConfig
from odeformer.models.base import DepthModel
from odeformer.models.decoder import DecoderConfig
from odeformer.models.seq2seq import Seq2Seq
from odeformer.positions import POSITIONS
from odeformer.tables import at_least, build, check_kinds


@dataclass(frozen=True, kw_only=True)
class SpeechConfig:
    """``n_mels`` bands a frame; at most ``max_frames`` frames, of which the encoder's states are half as many.

    ``vocab_size``, ``max_seq_len``: of the text. ``n_decoder_layers``, ``decoder_block``, ``decoder_depth``: None, or
    the decoder's own. ``tie_embeddings``, ``with_head``: see DecoderConfig; ``origin``: see TextConfig.
    """

    n_mels: int
    max_frames: int
    vocab_size: int
    max_seq_len: int
    n_layers: int
    block: BlockConfig
    depth: DepthConfig = field(default_factory=DepthConfig)
    n_decoder_layers: int | None = None
    decoder_block: BlockConfig | None = None
    decoder_depth: DepthConfig | None = None
    tie_embeddings: bool = False
    with_head: bool = True
    origin: Mapping[str, Any] | None = None

    share_embeddings: ClassVar[bool] = False  # frames have none

    def __post_init__(self) -> None:
        check_kinds(self)
        at_least("n_mels", self.n_mels, 1)
        at_least("max_frames", self.max_frames, 1)
        if self.n_decoder_layers is not None:
            at_least("n_decoder_layers", self.n_decoder_layers, 1)

    def decoder(self) -> DecoderConfig:
        """The decoder's config."""
        return DecoderConfig(vocab_size=self.vocab_size, max_seq_len=self.max_seq_len,
                             n_layers=self.n_decoder_layers or self.n_layers, block=self.decoder_block or self.block,
                             depth=self.decoder_depth or self.depth, tie_embeddings=self.tie_embeddings,
                             with_head=self.with_head)


class SpeechEncoder(DepthModel):
    """Features (batch, n_mels, frames) to states (batch, frames / 2, d_model); see SpeechConfig.

    Frames have no mask: a short recording is filled up with silence, as the published models were trained.
    """

    def __init__(self, config: SpeechConfig):
        super().__init__(config)
        block, d_model = config.block, config.block.d_model
        self.bands = nn.Conv1d(config.n_mels, d_model, 3, padding=1)
        self.halving = nn.Conv1d(d_model, d_model, 3, stride=2, padding=1)
        self.position = build(POSITIONS, block.position, "position", (config.max_frames + 1) // 2, d_model,
                              options=block.position_options)
        self.position.check(d_model // block.n_heads)
        self.initialize()

    def check(self, features: Tensor, mask: Tensor | None = None, n_before: int = 0,
              names: tuple[str, str] = ("features", "mask")) -> None:
        """Raises TypeError or ValueError unless these are features that the model can read, without a mask."""
        config, name = self.config, names[0]
        if mask is not None:
            raise ValueError(f"{names[1]} must be None: frames have no mask, fill recordings up with silence")
        if not isinstance(features, Tensor) or not features.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got "
                            f"{getattr(features, 'dtype', type(features).__name__)}")
        if features.dim() != 3 or features.shape[1] != config.n_mels or not features.numel():
            raise ValueError(f"{name} must have the shape (batch, n_mels = {config.n_mels}, frames), none of them 0; "
                             f"got {tuple(features.shape)}")
        if features.shape[2] > config.max_frames:
            raise ValueError(f"{name} has {features.shape[2]} frames, more than max_frames = {config.max_frames}")

    def embed(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """The state at l = 0 (batch, frames / 2, d_model)."""
        self.check(features, mask)
        x = F.gelu(self.halving(F.gelu(self.bands(features)))).transpose(1, 2)
        return x + self.position(x.shape[1])

    def forward(self, features: Tensor, mask: Tensor | None = None, *, return_solution: bool = False,
                save_states: bool = True) -> Any:
        """States after the final norm; with ``return_solution`` also the Solution, with the state at every step unless
        ``save_states`` is False."""
        solution = self.evolve(self.embed(features, mask), save=return_solution and save_states)
        states = self.final_norm(solution.z)
        return (states, solution) if return_solution else states


class SpeechSeq2Seq(Seq2Seq):
    """Features (batch, n_mels, frames) and target ids (batch, target) to logits (batch, target, vocab_size).

    As Seq2Seq, with features for a source: ``model(features, tokens)``, ``model.generate(features, start=...)``.
    """

    def make_encoder(self, config: SpeechConfig) -> SpeechEncoder:
        """An encoder of frames."""
        return SpeechEncoder(config)
