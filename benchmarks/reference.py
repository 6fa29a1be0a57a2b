"""Plain torch.nn Transformers that train like our models: the reference rows of the training benchmarks.

They give what ``odeformer.tasks`` calls: logits with something that has ``nfe``, here the number of layers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from odeformer import Decoder, DecoderConfig, Seq2Seq, Seq2SeqConfig, VisionConfig, VisionEncoder
from odeformer.block import BlockConfig

OPTIONS = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}


def stack(block: BlockConfig, n_layers: int, kind: str = "Encoder") -> nn.Module:
    """Pre-norm torch.nn layers with a final norm, their matrices drawn like ours."""
    layer = getattr(nn, f"Transformer{kind}Layer")(block.d_model, block.n_heads, block.d_ff or 4 * block.d_model,
                                                   **OPTIONS)
    options = {"enable_nested_tensor": False} if kind == "Encoder" else {}
    made = getattr(nn, f"Transformer{kind}")(layer, n_layers, nn.LayerNorm(block.d_model), **options)
    for name, p in made.named_parameters():
        if name.endswith("in_proj_weight"):
            for part in p.chunk(3):
                nn.init.xavier_uniform_(part)
        elif p.dim() == 2:
            nn.init.xavier_uniform_(p)
    return made


def embedding(vocab_size: int, d_model: int) -> nn.Embedding:
    """With rows of unit length on average, like ours."""
    made = nn.Embedding(vocab_size, d_model)
    nn.init.normal_(made.weight, std=d_model**-0.5)
    return made


def future(n: int) -> Tensor:
    """torch's float mask of a causal model."""
    return nn.Transformer.generate_square_subsequent_mask(n)


class Reference(nn.Module):
    """What all have: a config, and results with a solution where asked. ``ours``: our model of that config."""

    ours: type

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def parameter_report(self) -> dict[str, Any]:
        """Multiply-adds of a textbook Transformer of this config, by formula."""
        return self.ours(self.config).parameter_report()["plain"]

    def result(self, logits: Tensor, return_solution: bool) -> Any:
        """Logits, and the number of layers as NFE."""
        return (logits, SimpleNamespace(nfe=self.config.n_layers)) if return_solution else logits


class TorchDecoder(Reference):
    """A causal language model."""

    ours = Decoder

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        d_model = config.block.d_model
        self.tokens, self.positions = (embedding(n, d_model) for n in (config.vocab_size, config.max_seq_len))
        self.layers = stack(config.block, config.n_layers)
        self.head = nn.Linear(d_model, config.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=d_model**-0.5)

    def forward(self, tokens: Tensor, *, return_solution: bool = False, save_states: bool = False) -> Any:
        n = tokens.shape[1]
        z = self.layers(self.tokens(tokens) + self.positions.weight[:n], mask=future(n), is_causal=True)
        return self.result(self.head(z), return_solution)


class TorchVision(Reference):
    """An image classifier that averages its patches."""

    ours = VisionEncoder

    def __init__(self, config: VisionConfig):
        super().__init__(config)
        d_model, p = config.block.d_model, config.patch_size
        self.patches = nn.Conv2d(config.channels, d_model, p, p)
        self.positions = embedding((config.image_size // p) ** 2, d_model)
        self.layers = stack(config.block, config.n_layers)
        self.head = nn.Linear(d_model, config.n_classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor, *, return_solution: bool = False, save_states: bool = False) -> Any:
        z = self.patches(images).flatten(2).transpose(1, 2) + self.positions.weight
        return self.result(self.head(self.layers(z).mean(1)), return_solution)


class TorchSeq2Seq(Reference):
    """An encoder-decoder, with what ``odeformer.generate`` calls of its decoder."""

    ours = Seq2Seq

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        block, longest = config.block, config.max_seq_len
        vocab = (config.vocab_size, config.target_vocab_size or config.vocab_size)
        self.source, self.target = (embedding(n, block.d_model) for n in vocab)
        self.source_positions, self.target_positions = (embedding(longest, block.d_model) for _ in range(2))
        self.encoder = stack(block, config.n_layers)
        self.decoder = stack(block, config.n_decoder_layers or config.n_layers, "Decoder")
        self.head = nn.Linear(block.d_model, vocab[1], bias=False)
        nn.init.normal_(self.head.weight, std=block.d_model**-0.5)
        if config.share_embeddings:
            self.target.weight = self.source.weight
        if config.tie_embeddings:
            self.head.weight = self.target.weight

    def encode(self, source: Tensor, mask: Tensor) -> Tensor:
        """The memory."""
        z = self.source(source) + self.source_positions.weight[:source.shape[1]]
        return self.encoder(z, src_key_padding_mask=~mask)

    def check(self, tokens: Tensor, mask: Tensor | None = None) -> None:
        """Nothing: the benchmark gives what fits."""

    def run(self, tokens: Tensor, mask: Tensor | None = None, *, memory: Tensor, memory_mask: Tensor,
            cache: None = None) -> Any:
        """States of the target."""
        n = tokens.shape[1]
        z = self.target(tokens) + self.target_positions.weight[:n]
        return SimpleNamespace(z=self.decoder(z, memory, tgt_mask=future(n), tgt_is_causal=True,
                                              memory_key_padding_mask=~memory_mask))

    def read_out(self, z: Tensor) -> Tensor:
        """Logits."""
        return self.head(z)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor, target_mask: Tensor, *,
                return_solution: bool = False, save_states: bool = False) -> Any:
        memory = self.encode(source, source_mask)
        z = self.run(target, memory=memory, memory_mask=source_mask).z
        return self.result(self.head(z), return_solution)

    def generate(self, source: Tensor, source_mask: Tensor, *, start: int, **options: Any) -> Tensor:
        """As Seq2Seq.generate, reading the whole target anew for each token."""
        from odeformer.generate import evaluating, generate

        with evaluating(self):
            memory = {"memory": self.encode(source, source_mask), "memory_mask": source_mask}
        begin = torch.full((len(source), 1), start)
        return generate(self, begin, memory=memory, cache=None, **options)
