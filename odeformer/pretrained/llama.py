"""Llama (Touvron et al. 2023) and what has its shape: SmolLM2, Mistral, Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.models.decoder import Decoder, DecoderConfig
from odeformer.pretrained.family import Family, depth_config
from odeformer.pretrained.rules import Rule, layers, modules, only

LAYER = {"self_attn.q_proj": "attention.core.query", "self_attn.k_proj": "attention.core.key",
         "self_attn.v_proj": "attention.core.value", "self_attn.o_proj": "attention.core.output",
         "mlp.gate_proj": "feedforward.core.gate", "mlp.up_proj": "feedforward.core.hidden",
         "mlp.down_proj": "feedforward.core.output", "input_layernorm": "attention.placement.norm",
         "post_attention_layernorm": "feedforward.placement.norm"}


class LlamaFamily(Family):
    """Pre-norm decoders with RMSNorm, SwiGLU, rotary positions and fewer heads of keys and values."""

    name = "Llama"
    architectures = ("LlamaModel", "LlamaForCausalLM")

    def bias(self, theirs: Any) -> Any:
        """Which projections of the attention have a bias."""
        return bool(theirs.attention_bias)

    def window(self, theirs: Any) -> int | None:
        """The attention's."""
        return None

    def make(self, theirs: Any, architecture: str, state: Mapping[str, Tensor], depth: Mapping[str, Any],
             block: Mapping[str, Any], origin: Mapping[str, Any]) -> nn.Module:
        only(theirs, hidden_act=("silu", "swish"))
        head_dim = theirs.hidden_size // theirs.num_attention_heads
        only(theirs, head_dim=(head_dim, None))
        head, window = not self.headless(architecture), self.window(theirs)
        attention = {"bias": self.bias(theirs), "n_kv_heads": theirs.num_key_value_heads}
        return Decoder(DecoderConfig(
            vocab_size=theirs.vocab_size, max_seq_len=theirs.max_position_embeddings, n_layers=theirs.num_hidden_layers,
            block=BlockConfig(theirs.hidden_size, theirs.num_attention_heads, d_ff=theirs.intermediate_size,
                              attention_options=attention if window is None else attention | {"window": window},
                              norm="pre", norm_options={"kind": "rms", "eps": theirs.rms_norm_eps},
                              feedforward="swiglu",
                              feedforward_options={"bias": bool(getattr(theirs, "mlp_bias", False))},
                              position="rope", position_options=rope(theirs), **block),
            depth=depth_config(depth, weights="piecewise"), with_head=head,
            tie_embeddings=head and bool(theirs.tie_word_embeddings), origin=origin))

    def rules(self, model: nn.Module, theirs: Any, architecture: str) -> list[Rule]:
        at = self.at(architecture)
        found = modules(model, [("embed_tokens", "token_embedding"), ("norm", "final_norm")], at)
        found += modules(model, layers(len(model.layers), LAYER.items(), "layers.{i}", "layers.{i}"), at)
        return found if model.head is None else found + modules(model, [("lm_head", "head")])

    def stacks(self, architecture: str) -> dict[str, tuple[str, str]]:
        at = self.at(architecture)
        return {"": (f"{at}layers", f"{at}norm")}


class MistralFamily(LlamaFamily):
    """Mistral (Jiang et al. 2023): each token sees the last ``sliding_window`` tokens, itself among them."""

    name = "Mistral"
    architectures = ("MistralModel", "MistralForCausalLM")

    def bias(self, theirs: Any) -> Any:
        return False

    def window(self, theirs: Any) -> int | None:
        return theirs.sliding_window


class Qwen2Family(LlamaFamily):
    """Qwen2 and Qwen2.5 (Yang et al. 2024): queries, keys and values have biases."""

    name = "Qwen2"
    architectures = ("Qwen2Model", "Qwen2ForCausalLM")

    def bias(self, theirs: Any) -> Any:
        return ["query", "key", "value"]

    def window(self, theirs: Any) -> int | None:
        kinds = set(theirs.layer_types)
        if len(kinds) > 1:
            raise ValueError("layer_types must be the same in all layers, got full and sliding attention; layers "
                             "of our decoder have one window")
        return theirs.sliding_window if kinds == {"sliding_attention"} else None


ROPE_SCALINGS = {"default": ("none", {}), "linear": ("linear", {"factor": "factor"}),
                 "llama3": ("ntk_by_parts", {"factor": "factor", "beta_slow": "low_freq_factor",
                                             "beta_fast": "high_freq_factor",
                                             "original_max_len": "original_max_position_embeddings"})}


def rope(theirs: Any) -> dict[str, Any]:
    """Options of our rotary positions. Raises ValueError for a scaling that is not in ROPE_SCALINGS."""
    given = theirs.rope_parameters
    kind = given.get("rope_type", "default")
    if kind not in ROPE_SCALINGS:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_SCALINGS)}, got {kind!r}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1, got {given['partial_rotary_factor']!r}")
    scaling, names = ROPE_SCALINGS[kind]
    options = {"base": float(given["rope_theta"]), "scaling": scaling, "single": True}
    return options | {ours: given[name] for ours, name in names.items()}
