"""Whisper (Radford et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.models.speech import SpeechConfig, SpeechSeq2Seq
from odeformer.pretrained.bart import SIDES, layer_modules
from odeformer.pretrained.family import Family, depth_config
from odeformer.pretrained.rules import Rule, activation, modules, only, rule

BIAS = {"bias": ["query", "value", "output"]}  # keys have none
MODULES = [("encoder.conv1", "encoder.bands"), ("encoder.conv2", "encoder.halving"),
           ("decoder.embed_tokens", "decoder.token_embedding")]


class WhisperFamily(Family):
    """Pre-norm; frames have fixed sinusoidal positions, tokens learned ones."""

    architectures = ("WhisperModel", "WhisperForConditionalGeneration")
    inputs = ("input_features", "decoder_input_ids")

    def make(self, theirs: Any, architecture: str, state: Mapping[str, Tensor], depth: Mapping[str, Any],
             block: Mapping[str, Any], origin: Mapping[str, Any]) -> nn.Module:
        only(theirs, tie_word_embeddings=True, scale_embedding=False)
        head = not self.headless(architecture)

        def side(name: str, **position: Any) -> BlockConfig:
            return BlockConfig(theirs.d_model, getattr(theirs, f"{name}_attention_heads"),
                               d_ff=getattr(theirs, f"{name}_ffn_dim"), norm="pre", attention_options=BIAS,
                               cross_attention_options=BIAS, feedforward=activation(theirs, "activation_function"),
                               **position, **block)

        return SpeechSeq2Seq(SpeechConfig(
            n_mels=theirs.num_mel_bins, max_frames=2 * theirs.max_source_positions, vocab_size=theirs.vocab_size,
            max_seq_len=theirs.max_target_positions, n_layers=theirs.encoder_layers,
            n_decoder_layers=theirs.decoder_layers, depth=depth_config(depth, weights="piecewise"),
            block=side("encoder", position="sinusoidal_table", position_options={"stretch": True}),
            decoder_block=side("decoder", position="learned"), tie_embeddings=head, with_head=head, origin=origin))

    def rules(self, model: nn.Module, theirs: Any, architecture: str) -> list[Rule]:
        at = self.at(architecture)
        found = layer_modules(model, at) + modules(model, MODULES, at)
        found += [rule(f"{at}{side}.embed_positions.weight", f"{side}.position.table") for side in SIDES]
        if model.config.with_head:
            found.append(rule("proj_out.weight", "decoder.head.weight"))
        return found

    def stacks(self, architecture: str) -> dict[str, tuple[str, str]]:
        at = self.at(architecture)
        return {side: (f"{at}{side}.layers", f"{at}{side}.layer_norm") for side in SIDES}
