"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.models.decoder import Decoder, DecoderConfig
from odeformer.pretrained.family import Family, depth_config
from odeformer.pretrained.rules import TRANSPOSED, Fused, Rule, activation, layers, modules, only, rule

NORMS = {"ln_1": "attention.placement.norm", "ln_2": "feedforward.placement.norm"}
MATRICES = {"attn.c_proj": "attention.core.output", "mlp.c_fc": "feedforward.core.hidden",
            "mlp.c_proj": "feedforward.core.output"}
QKV = tuple(f"attention.core.{name}" for name in ("query", "key", "value"))


class Gpt2Family(Family):
    """Pre-norm decoders with learned positions; matrices are stored transposed."""

    architectures = ("GPT2Model", "GPT2LMHeadModel")
    base = "transformer"

    def make(self, theirs: Any, architecture: str, state: Mapping[str, Tensor], depth: Mapping[str, Any],
             block: Mapping[str, Any], origin: Mapping[str, Any]) -> nn.Module:
        only(theirs, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
        head = not self.headless(architecture)
        return Decoder(DecoderConfig(
            vocab_size=theirs.vocab_size, max_seq_len=theirs.n_positions, n_layers=theirs.n_layer,
            block=BlockConfig(theirs.n_embd, theirs.n_head, d_ff=theirs.n_inner or 4 * theirs.n_embd, norm="pre",
                              norm_options={"eps": theirs.layer_norm_epsilon}, position="learned",
                              feedforward=activation(theirs, "activation_function"), **block),
            depth=depth_config(depth, weights="piecewise"), with_head=head,
            tie_embeddings=head and bool(theirs.tie_word_embeddings), origin=origin))

    def rules(self, model: nn.Module, theirs: Any, architecture: str) -> list[Rule]:
        at, n = self.at(architecture), len(model.layers)
        found = [rule(f"{at}wpe.weight", "position.table")]
        found += modules(model, [("wte", "token_embedding"), ("ln_f", "final_norm")], at)
        found += modules(model, layers(n, NORMS.items(), "h.{i}", "layers.{i}"), at)
        for a, b in layers(n, MATRICES.items(), f"{at}h.{{i}}", "layers.{i}"):
            found += [rule(f"{a}.weight", f"{b}.weight", shape=TRANSPOSED), rule(f"{a}.bias", f"{b}.bias")]
        for i in range(n):
            found += [rule(f"{at}h.{i}.attn.c_attn.{part}", *(f"layers.{i}.{name}.{part}" for name in QKV),
                           shape=Fused(3)) for part in ("weight", "bias")]
        return found if model.head is None else found + modules(model, [("lm_head", "head")])

    def stacks(self, architecture: str) -> dict[str, tuple[str, str]]:
        at = self.at(architecture)
        return {"": (f"{at}h", f"{at}ln_f")}
