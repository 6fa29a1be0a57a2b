"""Seq2Seq: an encoder and a decoder that attends to it, each integrated over its own depth (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.cache import Cache, make_cache
from odeformer.depth import DepthConfig, DepthSolution
from odeformer.generate import evaluating, generate, is_id
from odeformer.masks import check_mask
from odeformer.models.base import DepthModel
from odeformer.models.decoder import Decoder, DecoderConfig
from odeformer.models.encoder import Encoder, EncoderConfig
from odeformer.models.text import EmbeddingConfig
from odeformer.routing import Withheld
from odeformer.tables import at_least, check_kinds


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """An encoder-decoder. What the decoder does not say for itself is as in the encoder.

    ``target_vocab_size``, ``n_decoder_layers``, ``decoder_block``, ``decoder_depth``: None, or the decoder's own.
    ``tie_embeddings``: the head uses the target embedding's matrix; ``share_embeddings``: source and target have one.
    ``embedding``: of both; ``head_bias``, ``with_head``: see DecoderConfig; ``origin``: see TextConfig.
    """

    vocab_size: int
    max_seq_len: int
    n_layers: int
    block: BlockConfig
    depth: DepthConfig = field(default_factory=DepthConfig)
    target_vocab_size: int | None = None
    n_decoder_layers: int | None = None
    decoder_block: BlockConfig | None = None
    decoder_depth: DepthConfig | None = None
    tie_embeddings: bool = False
    share_embeddings: bool = False
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    head_bias: bool = False
    with_head: bool = True
    origin: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_kinds(self)
        for name in ("target_vocab_size", "n_decoder_layers"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.decoder_block is not None and self.decoder_block.d_model != self.block.d_model:
            raise ValueError(f"decoder_block must have the encoder's d_model = {self.block.d_model}, got "
                             f"{self.decoder_block.d_model}")
        if self.share_embeddings and self.target_vocab_size not in (None, self.vocab_size):
            raise ValueError(f"share_embeddings needs one vocabulary; got vocab_size = {self.vocab_size}, "
                             f"target_vocab_size = {self.target_vocab_size}")

    def encoder(self) -> EncoderConfig:
        """The encoder's config."""
        n, m = self.n_layers, self.n_decoder_layers or self.n_layers
        block = with_deepnorm(self.block, 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16))
        return EncoderConfig(vocab_size=self.vocab_size, max_seq_len=self.max_seq_len, n_layers=n, block=block,
                             depth=self.depth, embedding=self.embedding)

    def decoder(self) -> DecoderConfig:
        """The decoder's config."""
        m = self.n_decoder_layers or self.n_layers
        block = with_deepnorm(self.decoder_block or self.block, (3 * m) ** (1 / 4), (12 * m) ** (-1 / 4))
        return DecoderConfig(vocab_size=self.target_vocab_size or self.vocab_size, max_seq_len=self.max_seq_len,
                             n_layers=m, block=block, depth=self.decoder_depth or self.depth,
                             tie_embeddings=self.tie_embeddings, embedding=self.embedding,
                             head_bias=self.head_bias, with_head=self.with_head)


def with_deepnorm(block: BlockConfig, alpha: float, gain: float) -> BlockConfig:
    """The block with DeepNet's numbers for an encoder-decoder (Wang et al. 2022, table 1), unless it has its own."""
    if block.norm == "deepnorm":
        block = replace(block, norm_options={"alpha": alpha, **block.norm_options})
    if block.init == "deepnorm":
        block = replace(block, init_options={"gain": gain, **block.init_options})
    return block


@dataclass(frozen=True, eq=False)
class Seq2SeqSolution(DepthSolution):
    """The decoder's Solution, with both beside it; ``losses`` are averaged over the layers of both."""

    encoder: DepthSolution | None = None
    decoder: DepthSolution | None = None

    @classmethod
    def of(cls, encoder: DepthSolution, decoder: DepthSolution) -> Self:
        """Both solutions as one."""
        values = {f.name: getattr(decoder, f.name) for f in fields(DepthSolution)}
        return cls(**values | {"losses": joint_losses(encoder, decoder)}, encoder=encoder, decoder=decoder)


def joint_losses(*parts: DepthSolution) -> Mapping[str, Tensor]:
    """The losses of several parts, averaged over all their layers with experts; withheld where one's are."""
    reports = [part.routing for part in parts if part.routing is not None]
    for part in parts:
        if isinstance(part.losses, Withheld):
            return part.losses
    return {name: torch.cat([getattr(report, name) for report in reports]).mean()
            for name in ("balance", "router_z") if reports}


class CrossDecoder(Decoder):
    """A decoder whose layers hold a cross-attention between self-attention and feed-forward."""

    cross = True

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        for layer in self.layers:
            if getattr(layer.cross_attention.core, "window", None) is not None:
                raise ValueError(f"cross_attention {config.block.cross_attention!r} must have no window: the tokens of "
                                 "a memory have no distance to the queries")
            if getattr(layer.cross_attention.core, "reads_target_length", False):
                raise ValueError(f"cross_attention {config.block.cross_attention!r} places its centre by the target's "
                                 "length, which a decoder must not know; give cross_attention_options={'ratio': "
                                 "source tokens per target token}")


class Seq2Seq(nn.Module):
    """Source ids (batch, source) and target ids (batch, target) to logits (batch, target, target_vocab_size).

    The logits at a target token are those of the next one. ``encoder`` and ``decoder`` are models of their own.
    """

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        self.config = config
        self.encoder = self.make_encoder(config)
        self.decoder = CrossDecoder(config.decoder())
        if config.share_embeddings:
            self.decoder.token_embedding.weight = self.encoder.token_embedding.weight
            if config.tie_embeddings:
                self.decoder.head.weight = self.encoder.token_embedding.weight

    def make_encoder(self, config: Any) -> DepthModel:
        """The encoder."""
        return Encoder(config.encoder())

    @property
    def final_norm(self) -> nn.Module:
        """The decoder's."""
        return self.decoder.final_norm

    def embed(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The encoder's state at l = 0."""
        return self.encoder.embed(tokens, mask)

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """The memory (batch, source, d_model)."""
        self.encoder.check(source, source_mask, names=("source", "source_mask"))
        return self.encoder(source, source_mask)

    def decode(self, target: Tensor, memory: Tensor, source_mask: Tensor | None = None,
               target_mask: Tensor | None = None, *, cache: Cache | None = None) -> Any:
        """Logits for target tokens given the memory; with a cache (logits, cache), see ``Decoder.forward``.

        With a cache the memory of its first pass stands for all.
        """
        self.decoder.check(target, target_mask, 0 if cache is None else cache.n_tokens, ("target", "target_mask"))
        check_mask(source_mask, memory.shape[:2], "source_mask")
        return self.decoder(target, target_mask, cache=cache, memory=memory, memory_mask=source_mask)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None,
                target_mask: Tensor | None = None, *, return_solution: bool = False, save_states: bool = True) -> Any:
        """Logits; with ``return_solution`` also the decoder's Solution, with ``.encoder`` and ``.decoder`` beside it.

        Masks: bool, True = real token. Raises ValueError where source and target are batches of different sizes.
        """
        self.encoder.check(source, source_mask, names=("source", "source_mask"))
        self.decoder.check(target, target_mask, names=("target", "target_mask"))
        if len(source) != len(target):
            raise ValueError(f"source and target must be batches of one size, got {len(source)} and {len(target)}")
        options = {"return_solution": True, "save_states": save_states and return_solution}
        memory, encoded = self.encoder(source, source_mask, **options)
        logits, decoded = self.decoder(target, target_mask, memory=memory, memory_mask=source_mask, **options)
        return (logits, Seq2SeqSolution.of(encoded, decoded)) if return_solution else logits

    def new_cache(self, policy: str | type = "exact", **options: Any) -> Cache:
        """An empty cache for ``decode``."""
        return make_cache(policy, options)

    def generate(self, source: Tensor, source_mask: Tensor | None = None, *, start: int | Tensor,
                 start_mask: Tensor | None = None, max_new_tokens: int, **options: Any) -> Tensor:
        """Target texts (batch, start + at most max_new_tokens), greedy unless told; options as of ``generate``.

        ``start``: the token that targets begin with, or beginnings (batch, tokens), with ``start_mask`` where they are
        padded on the left.
        """
        self.decoder.check_head()
        self.encoder.check(source, source_mask, names=("source", "source_mask"))
        vocab_size = self.decoder.config.vocab_size
        if is_id(start, vocab_size):
            start = torch.full((len(source), 1), start, dtype=torch.int64, device=source.device)
        elif not isinstance(start, Tensor):
            raise ValueError(f"start must be an id in [0, target_vocab_size = {vocab_size}) or a tensor of ids (batch, "
                             f"tokens), got {start!r}")
        self.decoder.check(start, start_mask, names=("start", "start_mask"))
        if len(source) != len(start):
            raise ValueError(f"source and start must be batches of one size, got {len(source)} and {len(start)}")
        with evaluating(self):
            memory = {"memory": self.encode(source, source_mask), "memory_mask": source_mask}
        return generate(self.decoder, start, start_mask, max_new_tokens=max_new_tokens, memory=memory, **options)

    def with_solver(self, solver: Any, *, part: str = "both", **options: Any) -> Self:
        """The same parameters under another solver, in "both" parts or the "encoder" or the "decoder" alone."""
        if part not in ("both", "encoder", "decoder"):
            raise ValueError(f"part must be 'both', 'encoder' or 'decoder', got {part!r}")
        other = type(self).__new__(type(self))
        nn.Module.__init__(other)
        other.training = self.training
        changed = {"both": ("encoder", "decoder")}.get(part, (part,))
        for name in ("encoder", "decoder"):
            model = getattr(self, name)
            setattr(other, name, model.with_solver(solver, **options) if name in changed else model)
        other.config = replace(self.config, depth=other.encoder.config.depth, decoder_depth=other.decoder.config.depth)
        return other

    def compile(self, **options: Any) -> None:
        """Compile the layers of both parts; see ``DepthModel.compile``."""
        for part in (self.encoder, self.decoder):
            part.compile(**options)

    def parameter_report(self, n_tokens: int | None = None) -> Any:
        """As of other models, for both parts together and for each; see ``odeformer.accounting``."""
        from odeformer.accounting import parameter_report

        return parameter_report(self, n_tokens)

    def save(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json into folder (made if missing)."""
        from odeformer.models.store import save

        save(self, folder)


