"""ViT (Dosovitskiy et al. 2021) and DINOv2 (Oquab et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.models.vision import VisionConfig, VisionEncoder
from odeformer.pretrained.family import Family, depth_config
from odeformer.pretrained.rules import ClassAndPatches, Reshaped, Rule, activation, layers, modules, only, rule

ATTENTION = {"attention.q_proj": "attention.core.query", "attention.k_proj": "attention.core.key",
             "attention.v_proj": "attention.core.value", "attention.o_proj": "attention.core.output"}
PLAIN = {"mlp.fc1": "feedforward.core.hidden", "mlp.fc2": "feedforward.core.output"}
GATED = {"mlp.gate_proj": "feedforward.core.gate", "mlp.up_proj": "feedforward.core.hidden",
         "mlp.down_proj": "feedforward.core.output"}


def one(name: str, value: Any) -> int:
    """A side of a square. Raises ValueError for sides of two lengths."""
    sides = {*value} if isinstance(value, list | tuple) else {value}
    if len(sides) > 1:
        raise ValueError(f"{name} must be that of a square, got {value!r}")
    return sides.pop()


class VitFamily(Family):
    """Pre-norm encoders of patches with a class token."""

    base = "vit"
    architectures = ("ViTModel", "ViTForImageClassification")
    inputs = ("pixel_values",)
    norms: ClassVar[Mapping[str, str]] = {"layernorm_before": "attention.placement.norm",
                                          "layernorm_after": "feedforward.placement.norm"}
    where = "layers.{i}"  # of a layer
    pooling = "class_token"

    def extra(self, theirs: Any) -> dict[str, Any]:
        """Of the layer: norm, its options, feed-forward, d_ff."""
        return {"norm": "pre", "norm_options": {"eps": theirs.layer_norm_eps}, "d_ff": theirs.intermediate_size,
                "feedforward": activation(theirs, "hidden_act")}

    def make(self, theirs: Any, architecture: str, state: Mapping[str, Tensor], depth: Mapping[str, Any],
             block: Mapping[str, Any], origin: Mapping[str, Any]) -> nn.Module:
        only(theirs, pooler_act="tanh", pooler_output_size=(theirs.hidden_size, None))
        head, at = not self.headless(architecture), self.at(architecture)
        bias = True if theirs.qkv_bias else ["output"]
        return VisionEncoder(VisionConfig(
            image_size=one("image_size", theirs.image_size), patch_size=one("patch_size", theirs.patch_size),
            channels=theirs.num_channels, n_classes=theirs.num_labels if head else None,
            n_layers=theirs.num_hidden_layers, pooling=self.pooling, class_position=True,
            mask_token=f"{at}embeddings.mask_token" in state, pooler=f"{at}pooler.dense.weight" in state,
            block=BlockConfig(theirs.hidden_size, theirs.num_attention_heads, attention_options={"bias": bias},
                              position="learned", **self.extra(theirs), **block),
            depth=depth_config(depth, weights="piecewise"), origin=origin))

    def layer(self, model: nn.Module) -> dict[str, str]:
        """Names inside a layer."""
        gated = hasattr(model.layers[0].feedforward.core, "gate")
        return {**self.norms, **ATTENTION, **(GATED if gated else PLAIN)}

    def rules(self, model: nn.Module, theirs: Any, architecture: str) -> list[Rule]:
        at, config = self.at(architecture), model.config
        d, p, c, side = config.block.d_model, config.patch_size, config.channels, config.image_size // config.patch_size
        found = [rule(f"{at}embeddings.cls_token", "class_token", shape=Reshaped((1, 1, d), (d,))),
                 rule(f"{at}embeddings.position_embeddings", "class_position", "position.table",
                      shape=ClassAndPatches(side)),
                 rule(f"{at}embeddings.patch_embeddings.projection.weight", "patch_embedding.weight",
                      shape=Reshaped((d, c, p, p), (d, c * p * p))),
                 rule(f"{at}embeddings.patch_embeddings.projection.bias", "patch_embedding.bias")]
        if model.mask_token is not None:
            found += [rule(f"{at}embeddings.mask_token", "mask_token", shape=Reshaped(self.mask_shape(d), (d,)))]
        found += modules(model, layers(config.n_layers, self.layer(model).items(), self.where, "layers.{i}"), at)
        found += modules(model, [("layernorm", "final_norm")], at)
        if model.pooler is not None:
            found += modules(model, [("pooler.dense", "pooler.transform")], at)
        return found if model.head is None else found + modules(model, [("classifier", "head")])

    def mask_shape(self, d_model: int) -> tuple[int, ...]:
        """Of their mask token."""
        return 1, 1, d_model

    def stacks(self, architecture: str) -> dict[str, tuple[str, str]]:
        at = self.at(architecture)
        return {"": (at + self.where.removesuffix(".{i}"), f"{at}layernorm")}

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        if model.head is not None:
            return {}
        return {"add_pooling_layer": model.pooler is not None, "use_mask_token": model.mask_token is not None}


class Dinov2Family(VitFamily):
    """The same with LayerScale, and SwiGLU in the largest; the classifier also sees the mean over the patches."""

    base = "dinov2"
    architectures = ("Dinov2Model", "Dinov2ForImageClassification")
    norms: ClassVar[Mapping[str, str]] = {"norm1": "attention.placement.norm", "norm2": "feedforward.placement.norm"}
    where = "encoder.layer.{i}"
    pooling = "class_and_mean"

    def extra(self, theirs: Any) -> dict[str, Any]:
        d_ff = int(theirs.hidden_size * theirs.mlp_ratio)
        options = {"norm": "layerscale", "norm_options": {"eps": theirs.layer_norm_eps,
                                                          "start": theirs.layerscale_value}}
        if theirs.use_swiglu_ffn:
            return {**options, "d_ff": (int(d_ff * 2 / 3) + 7) // 8 * 8, "feedforward": "swiglu"}
        return {**options, "d_ff": d_ff, "feedforward": activation(theirs, "hidden_act")}

    def rules(self, model: nn.Module, theirs: Any, architecture: str) -> list[Rule]:
        at = self.at(architecture)
        return super().rules(model, theirs, architecture) + [
            rule(f"{at}encoder.layer.{i}.layer_scale{k}.lambda1", f"layers.{i}.{name}.placement.scale")
            for i in range(model.config.n_layers) for k, name in ((1, "attention"), (2, "feedforward"))]

    def mask_shape(self, d_model: int) -> tuple[int, ...]:
        return 1, d_model

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        return {}
