"""Small models whose weights are functions of depth, what goes in, and the formulas of the expansions."""

import math

import numpy as np
import torch
from scipy.interpolate import BSpline

from odeformer import BlockConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.norms import Placement

VOCAB, LENGTH, D = 17, 6, 8
EXPANSIONS = ("linear", "spline", "fourier", "chebyshev")


def tiny(kind=Encoder, config=EncoderConfig, *, n_layers=4, block=(), moved=0.0, **depth):
    """A model in float64; ``moved``: how far its parameters are taken from the constant weights that it starts with."""
    torch.manual_seed(0)
    model = kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers,
                        block=BlockConfig(D, 2, **{"coupling": "parallel"} | dict(block)),
                        depth=DepthConfig(**depth))).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.layers.parameters():
            p.add_(moved * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def tokens(batch=2):
    return torch.randint(VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def state(batch=2):
    return torch.randn(batch, LENGTH, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def final(model, z, **options):
    """The state at the end, from z."""
    return model.with_solver(options.pop("solver"), **options).evolve(z).z


def stacked(model, name):
    return np.stack([block.get_parameter(name).detach().numpy() for block in model.layers])


FORMULAS = {  # of coefficients (K, ...), l and L
    "linear": lambda c, l, L: np.apply_along_axis(
        lambda column: np.interp(l, np.linspace(0, L, len(c)), column), 0, c),
    "spline": lambda c, l, L: BSpline(np.r_[[0.0] * 3, np.linspace(0, L, len(c) - 2), [L] * 3], c, 3)(l),
    "fourier": lambda c, l, L: sum(
        c[k] * (1 if k == 0 else math.cos((k + 1) // 2 * math.pi * l / L) if k % 2 else
                math.sin(k // 2 * math.pi * l / L)) for k in range(len(c))),
    "chebyshev": lambda c, l, L: np.polynomial.chebyshev.chebval(2 * l / L - 1, c),
}


class Bare(Placement):
    """No norm: f = F(z)."""

    def __init__(self, d_model):
        super().__init__()

    def forward(self, z, branch):
        return branch(z)


def gap(mine, theirs):
    """The largest difference over the largest entry; a tensor without a gradient has none in either."""
    assert [x is None for x in mine] == [x is None for x in theirs]
    pairs = [(x, y) for x, y in zip(mine, theirs, strict=True) if x is not None]
    return (max((x - y).abs().max() for x, y in pairs) / max(y.abs().max() for _, y in pairs)).item()
