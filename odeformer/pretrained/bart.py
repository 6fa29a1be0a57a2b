"""BART (Lewis et al. 2020), Marian (Junczys-Dowmunt et al. 2018), mBART and Pegasus: encoder-decoders of one make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.models.seq2seq import Seq2Seq, Seq2SeqConfig
from odeformer.models.text import EmbeddingConfig
from odeformer.pretrained.family import Family, depth_config
from odeformer.pretrained.rules import Reshaped, Rule, activation, layers, modules, only, rule

LAYER = {**{f"self_attn.{a}_proj": f"attention.core.{b}"
            for a, b in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "output"))},
         "self_attn_layer_norm": "attention.placement.norm", "fc1": "feedforward.core.hidden",
         "fc2": "feedforward.core.output", "final_layer_norm": "feedforward.placement.norm"}
CROSS = {a.replace("self_attn", "encoder_attn"): b.replace("attention.", "cross_attention.", 1)
         for a, b in LAYER.items() if a.startswith("self_attn")}
SIDES = {"encoder": LAYER, "decoder": {**LAYER, **CROSS}}


def layer_modules(model: nn.Module, at: str) -> list[Rule]:
    """Rules for the layers of both sides, and their final norms."""
    found = []
    for side, names in SIDES.items():
        part = getattr(model, side)
        pairs = layers(len(part.layers), names.items(), f"{side}.layers.{{i}}", f"{side}.layers.{{i}}")
        norm = [] if isinstance(part.final_norm, nn.Identity) else [(f"{side}.layer_norm", f"{side}.final_norm")]
        found += modules(model, pairs + norm, at)
    return found


class BartFamily(Family):
    """Post-norm, positions in a learned table behind two unused rows, a norm behind the embedding."""

    name = "Bart"
    architectures = ("BartModel", "BartForConditionalGeneration")
    inputs = ("input_ids", "decoder_input_ids")
    norm = "post"
    embedding_norm = True
    position = ("learned", (("offset", 2),))

    def make(self, theirs: Any, architecture: str, state: Mapping[str, Tensor], depth: Mapping[str, Any],
             block: Mapping[str, Any], origin: Mapping[str, Any]) -> nn.Module:
        only(theirs, tie_word_embeddings=True)
        head, shared = not self.headless(architecture), getattr(theirs, "share_encoder_decoder_embeddings", True)
        position, options = self.position

        def side(name: str) -> BlockConfig:
            return BlockConfig(theirs.d_model, getattr(theirs, f"{name}_attention_heads"),
                               d_ff=getattr(theirs, f"{name}_ffn_dim"), norm=self.norm, position=position,
                               position_options=dict(options), feedforward=activation(theirs, "activation_function"),
                               **block)

        return Seq2Seq(Seq2SeqConfig(
            vocab_size=theirs.vocab_size, target_vocab_size=None if shared else theirs.decoder_vocab_size,
            max_seq_len=theirs.max_position_embeddings, n_layers=theirs.encoder_layers,
            n_decoder_layers=theirs.decoder_layers, block=side("encoder"), decoder_block=side("decoder"),
            depth=depth_config(depth, weights="piecewise"), tie_embeddings=head, share_embeddings=shared,
            embedding=EmbeddingConfig(scale=math.sqrt(theirs.d_model) if theirs.scale_embedding else 1.0,
                                      norm=self.embedding_norm),
            head_bias=head, with_head=head, origin=origin))

    def rules(self, model: nn.Module, theirs: Any, architecture: str) -> list[Rule]:
        at = self.at(architecture)
        found = layer_modules(model, at)
        if model.config.share_embeddings:
            found += modules(model, [("shared", "encoder.token_embedding")], at)
        for side in SIDES:
            found += modules(model, [(f"{side}.embed_tokens", f"{side}.token_embedding")], at)
            found += [rule(f"{at}{side}.embed_positions.weight", f"{side}.position.table")]
            if self.embedding_norm:
                found += modules(model, [(f"{side}.layernorm_embedding", f"{side}.embedding_norm")], at)
        if model.config.with_head:
            n = model.decoder.config.vocab_size
            found += [rule("lm_head.weight", "decoder.head.weight"),
                      rule("final_logits_bias", "decoder.head.bias", shape=Reshaped((1, n), (n,)))]
        return found

    def stacks(self, architecture: str) -> dict[str, tuple[str, str]]:
        at = self.at(architecture)
        return {side: (f"{at}{side}.layers", f"{at}{side}.layer_norm" if self.norm == "pre" else "") for side in SIDES}


class MarianFamily(BartFamily):
    """Post-norm, sinusoidal positions, no norm behind the embedding."""

    name = "Marian"
    architectures = ("MarianModel", "MarianMTModel")
    embedding_norm = False
    position = ("sinusoidal_table", ())


class MbartFamily(BartFamily):
    """As BART, but pre-norm."""

    name = "MBart"
    architectures = ("MBartModel", "MBartForConditionalGeneration")
    norm = "pre"


class PegasusFamily(BartFamily):
    """Pre-norm, sinusoidal positions, no norm behind the embedding."""

    name = "Pegasus"
    architectures = ("PegasusModel", "PegasusForConditionalGeneration")
    norm = "pre"
    embedding_norm = False
    position = ("sinusoidal_table", ())
