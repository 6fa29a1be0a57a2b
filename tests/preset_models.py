"""Small models of the field's methods, and what a layer of one does with its skip and without."""

import pytest
import torch

from odeformer import BlockConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.presets import PRESETS, configure

VOCAB, LENGTH, LAYERS = 11, 5, 3
FORMS = [(name, form) for name, preset in PRESETS.items() for form in preset.forms]
each_form = pytest.mark.parametrize(("name", "form"), FORMS)


def config(kind=EncoderConfig, n_layers=LAYERS, **depth):
    return kind(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, block=BlockConfig(4, 2, d_ff=6),
                depth=DepthConfig(**depth))


def build(name, form, kind=Encoder, of=EncoderConfig, seed=0):
    """A model in float64, all its parameters at random, those of the solver about where they start."""
    torch.manual_seed(seed)
    model = kind(configure(config(of), name, corrected=form == "corrected")).double().eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p += torch.randn_like(p) * (0.2 if key.startswith("solver") else 0.4)
    return model


def ids(batch=2):
    return torch.randint(VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


# Published formulas, written out. A layer F with its skip is whole(block, z), without it increment(block, z)


def attend(block, z):
    return block.attention.core(block.attention.placement.norm(z))


def feed(block, z):
    return block.feedforward.core(block.feedforward.placement.norm(z))


def whole(block, z):
    z = z + attend(block, z)
    return z + feed(block, z)


def increment(block, z):
    return whole(block, z) - z


def looped(h):
    def formula(model, z):
        for block in model.layers:
            z = z + h * increment(block, z)
            z = z + h * increment(block, z)
        return z
    return formula


# Orders, on a field that depends on l and whose parts do not commute


def turn(z, l):
    return torch.stack([-(1 + l) * z[..., 1], torch.sin(z[..., 0] + l)], -1)
