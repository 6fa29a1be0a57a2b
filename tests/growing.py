"""Small models with nothing at 0, for the tests of growth."""

import torch

from odeformer import (
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
    VisionConfig,
    VisionEncoder,
)

VOCAB, LENGTH = 13, 10


def shaken(model):
    """In float64 and evaluation mode, every parameter moved off its start."""
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    return model


def tiny(kind=Encoder, config=EncoderConfig, *, d_model=8, n_heads=2, n_layers=2, block=(), model=(), **depth):
    return shaken(kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers,
                              block=BlockConfig(d_model, n_heads, **dict(block)), depth=DepthConfig(**depth),
                              **dict(model))))


def decoder(**options):
    return tiny(Decoder, DecoderConfig, **options)


def seq2seq(**options):
    return tiny(Seq2Seq, Seq2SeqConfig, **options)


def vision(*, block=(), model=(), **depth):
    return shaken(VisionEncoder(VisionConfig(image_size=8, patch_size=4, channels=1, n_layers=2,
                                             block=BlockConfig(8, 2, **dict(block)), depth=DepthConfig(**depth),
                                             **{"n_classes": 3, **dict(model)})))


def inputs(model):
    """What a model is called with: arguments and named ones, with padding where it knows any."""
    if isinstance(model, VisionEncoder):
        return (torch.randn(2, 1, 8, 8, dtype=torch.float64),), {}
    tokens = torch.randint(VOCAB, (3, LENGTH))
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [6], [1]])
    if isinstance(model, Seq2Seq):
        return (tokens, torch.randint(VOCAB, (3, 7))), {"source_mask": mask}
    return (tokens,), {"mask": mask}


def run(model, given):
    """Outputs and final state."""
    args, named = given
    with torch.no_grad():
        outputs, solution = model(*args, **named, return_solution=True)
    return outputs, solution.z
