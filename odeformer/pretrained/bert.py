"""BERT (Devlin et al. 2019), and what its relatives share with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.models.encoder import Encoder, EncoderConfig
from odeformer.models.text import EmbeddingConfig
from odeformer.pretrained.family import Family, depth_config
from odeformer.pretrained.rules import Rule, activation, layers, modules, only, rule

KINDS = {"Model": None, "ForMaskedLM": "masked_lm", "ForSequenceClassification": "pooled_classification",
         "ForTokenClassification": "tagging"}  # end of the class's name -> our head

Names = Mapping[str, str]  # theirs -> ours


class BertFamily(Family):
    """Post-norm encoders of text. A subclass has other names, in these tables of (theirs, ours)."""

    name = "Bert"
    base = "bert"
    architectures = tuple(f"Bert{kind}" for kind in KINDS)
    side = ("bert.pooler.", "cls.seq_relationship.")
    embedding: ClassVar[Names] = {
        "embeddings.word_embeddings": "token_embedding",
        "embeddings.token_type_embeddings": "token_type_embedding",
        "embeddings.LayerNorm": "embedding_norm",
    }
    layer: ClassVar[Names] = {
        "attention.self.query": "attention.core.query",
        "attention.self.key": "attention.core.key",
        "attention.self.value": "attention.core.value",
        "attention.output.dense": "attention.core.output",
        "attention.output.LayerNorm": "attention.placement.norm",
        "intermediate.dense": "feedforward.core.hidden",
        "output.dense": "feedforward.core.output",
        "output.LayerNorm": "feedforward.placement.norm",
    }
    where = "encoder.layer.{i}"  # of a layer
    pooler = "pooler.dense"
    heads: ClassVar[Mapping[str, Names]] = {
        "masked_lm": {
            "cls.predictions.transform.dense": "head.transform",
            "cls.predictions.transform.LayerNorm": "head.norm",
            "cls.predictions.decoder": "head.output",
        },
        "pooled_classification": {
            "bert.pooler.dense": "head.pooler.transform",
            "classifier": "head.output",
        },
        "tagging": {
            "classifier": "head.output",
        },
    }
    second_bias = "cls.predictions.bias"  # a second name of the language model's head's bias

    def kind(self, architecture: str) -> str | None:
        """Our head for a class."""
        return KINDS[architecture.removeprefix(self.name)]

    def make(self, theirs: Any, architecture: str, state: Mapping[str, Tensor], depth: Mapping[str, Any],
             block: Mapping[str, Any], origin: Mapping[str, Any]) -> nn.Module:
        self.check(theirs)
        head = self.kind(architecture)
        options = {}
        if head == "masked_lm":
            options = {"activation": activation(theirs, self.names["act"]), "eps": self.eps(theirs),
                       **self.lm_options(theirs)}
        elif head == "pooled_classification":
            options = {"activation": self.pooled_activation}
        n_outputs = theirs.num_labels if head in ("pooled_classification", "tagging") else None
        return Encoder(EncoderConfig(
            vocab_size=theirs.vocab_size, n_layers=theirs.num_hidden_layers, **self.position(theirs),
            block=BlockConfig(theirs.hidden_size, theirs.num_attention_heads, d_ff=getattr(theirs, self.names["d_ff"]),
                              norm="post", norm_options={"eps": self.eps(theirs)},
                              feedforward=activation(theirs, self.names["act"]), position="learned",
                              position_options={"offset": self.offset(theirs)}, **block),
            depth=depth_config(depth, **self.weights(theirs)), embedding=self.embeddings(theirs),
            head=head, n_outputs=n_outputs, head_options=options,
            tie_embeddings=head == "masked_lm" and bool(theirs.tie_word_embeddings),
            pooler=head is None and f"{self.pooler}.weight" in state, origin=origin))

    # what differs between relatives
    names: ClassVar[Names] = {"act": "hidden_act", "d_ff": "intermediate_size"}
    pooled_activation = "tanh"

    def check(self, theirs: Any) -> None:
        """Raises ValueError for settings that we do not have."""
        only(theirs, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)

    def eps(self, theirs: Any) -> float:
        """Of all norms."""
        return theirs.layer_norm_eps

    def offset(self, theirs: Any) -> int:
        """Rows of the position table before that of the first token."""
        return 0

    def position(self, theirs: Any) -> dict[str, int]:
        """The longest sequence."""
        return {"max_seq_len": theirs.max_position_embeddings - self.offset(theirs)}

    def weights(self, theirs: Any) -> dict[str, Any]:
        """How layers share weights."""
        return {"weights": "piecewise"}

    def embeddings(self, theirs: Any) -> EmbeddingConfig:
        """What makes the state at l = 0."""
        return EmbeddingConfig(norm=True, n_token_types=theirs.type_vocab_size)

    def lm_options(self, theirs: Any) -> dict[str, Any]:
        """Of the language model's head."""
        return {}

    def rules(self, model: nn.Module, theirs: Any, architecture: str) -> list[Rule]:
        at, head = self.at(architecture), self.kind(architecture)
        found = modules(model, [(a, b) for a, b in self.embedding.items() if model.get_submodule(b) is not None], at)
        found += [rule(f"{at}embeddings.position_embeddings.weight", "position.table")]
        found += modules(model, layers(len(model.layers), self.layer.items(), self.where, "layers.{i}"), at)
        if model.pooler is not None:
            found += modules(model, [(self.pooler, "pooler.transform")], at)
        if head is not None:
            found += modules(model, self.heads[head].items())
        if head == "masked_lm" and self.second_bias:
            found += [rule(self.second_bias, "head.output.bias")]
        return found

    def stacks(self, architecture: str) -> dict[str, tuple[str, str]]:
        return {"": (self.at(architecture) + self.where.split(".{")[0], "")}

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        return {"add_pooling_layer": model.pooler is not None} if model.config.head is None else {}


class RobertaFamily(BertFamily):
    """RoBERTa (Liu et al. 2019): positions begin behind the padding token's."""

    name = "Roberta"
    base = "roberta"
    architectures = tuple(f"Roberta{kind}" for kind in KINDS)
    side = ("roberta.pooler.",)
    heads: ClassVar[Mapping[str, Names]] = {
        "masked_lm": {
            "lm_head.dense": "head.transform",
            "lm_head.layer_norm": "head.norm",
            "lm_head.decoder": "head.output",
        },
        "pooled_classification": {
            "classifier.dense": "head.pooler.transform",
            "classifier.out_proj": "head.output",
        },
        "tagging": {
            "classifier": "head.output",
        },
    }
    second_bias = "lm_head.bias"

    def offset(self, theirs: Any) -> int:
        return theirs.pad_token_id + 1

    def lm_options(self, theirs: Any) -> dict[str, Any]:
        return {"activation": "gelu"}  # whatever hidden_act is


class DistilBertFamily(BertFamily):
    """DistilBERT (Sanh et al. 2019): BERT without token types and pooler."""

    name = "DistilBert"
    base = "distilbert"
    architectures = tuple(f"DistilBert{kind}" for kind in KINDS)
    side = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.")
    embedding: ClassVar[Names] = {
        "embeddings.word_embeddings": "token_embedding",
        "embeddings.LayerNorm": "embedding_norm",
    }
    layer: ClassVar[Names] = {
        "attention.q_lin": "attention.core.query",
        "attention.k_lin": "attention.core.key",
        "attention.v_lin": "attention.core.value",
        "attention.out_lin": "attention.core.output",
        "sa_layer_norm": "attention.placement.norm",
        "ffn.lin1": "feedforward.core.hidden",
        "ffn.lin2": "feedforward.core.output",
        "output_layer_norm": "feedforward.placement.norm",
    }
    where = "transformer.layer.{i}"
    heads: ClassVar[Mapping[str, Names]] = {
        "masked_lm": {
            "vocab_transform": "head.transform",
            "vocab_layer_norm": "head.norm",
            "vocab_projector": "head.output",
        },
        "pooled_classification": {
            "pre_classifier": "head.pooler.transform",
            "classifier": "head.output",
        },
        "tagging": {
            "classifier": "head.output",
        },
    }
    second_bias = ""
    names: ClassVar[Names] = {"act": "activation", "d_ff": "hidden_dim"}
    pooled_activation = "relu"

    def check(self, theirs: Any) -> None:
        pass  # sinusoidal positions are a table, too

    def eps(self, theirs: Any) -> float:
        return 1e-12

    def embeddings(self, theirs: Any) -> EmbeddingConfig:
        return EmbeddingConfig(norm=True)

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        return {}


class AlbertFamily(BertFamily):
    """ALBERT (Lan et al. 2020): one layer for all depths, an autonomous field; narrower embeddings."""

    name = "Albert"
    base = "albert"
    architectures = tuple(f"Albert{kind}" for kind in KINDS)
    side = ("albert.pooler.", "sop_classifier.")
    embedding: ClassVar[Names] = {**BertFamily.embedding, "encoder.embedding_hidden_mapping_in": "embedding_projection"}
    layer: ClassVar[Names] = {
        "attention.query": "attention.core.query",
        "attention.key": "attention.core.key",
        "attention.value": "attention.core.value",
        "attention.dense": "attention.core.output",
        "attention.LayerNorm": "attention.placement.norm",
        "ffn": "feedforward.core.hidden",
        "ffn_output": "feedforward.core.output",
        "full_layer_layer_norm": "feedforward.placement.norm",
    }
    where = "encoder.albert_layer_groups.{i}.albert_layers.0"
    pooler = "pooler"
    heads: ClassVar[Mapping[str, Names]] = {
        "masked_lm": {
            "predictions.dense": "head.transform",
            "predictions.LayerNorm": "head.norm",
            "predictions.decoder": "head.output",
        },
        "pooled_classification": {
            "albert.pooler": "head.pooler.transform",
            "classifier": "head.output",
        },
        "tagging": {
            "classifier": "head.output",
        },
    }
    second_bias = "predictions.bias"

    def check(self, theirs: Any) -> None:
        super().check(theirs)
        only(theirs, inner_group_num=1)

    def weights(self, theirs: Any) -> dict[str, Any]:
        n, groups = theirs.num_hidden_layers, theirs.num_hidden_groups
        if groups == 1:
            return {"weights": "shared"}
        if any(int(i / (n / groups)) != i * groups // n for i in range(n)):  # theirs, ours
            raise ValueError(f"num_hidden_groups = {groups} does not divide {n} layers into groups of neighbours")
        return {"weights": "sequence", "weights_options": {"n_knots": groups}}

    def embeddings(self, theirs: Any) -> EmbeddingConfig:
        return EmbeddingConfig(norm=True, n_token_types=theirs.type_vocab_size, width=theirs.embedding_size)

    def lm_options(self, theirs: Any) -> dict[str, Any]:
        return {"width": theirs.embedding_size}

    def stacks(self, architecture: str) -> dict[str, tuple[str, str]]:
        return {"": (self.at(architecture) + "encoder.albert_layer_groups", "")}
