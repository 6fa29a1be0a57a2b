"""Small encoder-decoder models and what goes in."""

import pytest
import torch

from odeformer import ATTENTION, BlockConfig, DepthConfig, Seq2Seq, Seq2SeqConfig

VOCAB, TARGET_VOCAB, LENGTH, SOURCE, TARGET = 13, 11, 12, 7, 6


def tiny(*, block=(), n_layers=2, dtype=torch.float64, depth=(), **config):
    return Seq2Seq(Seq2SeqConfig(**{
        "vocab_size": VOCAB, "target_vocab_size": TARGET_VOCAB, "max_seq_len": LENGTH, "n_layers": n_layers,
        "block": BlockConfig(8, 2, **{"d_ff": 16, **dict(block)}), "depth": DepthConfig(**dict(depth)),
        **config})).to(dtype).eval()


def stirred(model, by=0.3):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn_like(p))
    return model


def texts(batch=3):
    return torch.randint(VOCAB, (batch, SOURCE)), torch.randint(TARGET_VOCAB, (batch, TARGET))


def right_padding(length, *real):
    return torch.arange(length) < torch.tensor(real)[:, None]


def wrong(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


CROSS = {name: {"center_mode": "ratio", "ratio": 1.2} if name == "cross_gaussian" else {} for name in ATTENTION
         if name != "window"}
