"""Initialisers whose draw follows from a matrix's shape, role and layer. L is the number of layers, l counts from 1.

η = gain sqrt(6 / (d_in + d_out)) throughout (eq. 18). The default of every model is ``xavier_uniform``: of the seed's
two forms, (19) and (20), it is the one that all sources agree upon.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from odeformer.init.draw import Draw, apply, rescale
from odeformer.init.matrix import Matrix, embeddings, matrices, n_layers
from odeformer.tables import at_least, finite

# what a sublayer's output is linear in, or nearly; a gate is not among them, so that its network is not scaled thrice
BRANCH = ("value", "output", "hidden")


def eta(matrix: Matrix, gain: float = 1.0) -> float:
    """η of eq. 18."""
    return gain * math.sqrt(6 / (matrix.d_in + matrix.d_out))


def uniform(matrix: Matrix, gain: float = 1.0) -> Draw:
    """U(-η, η) (eq. 19)."""
    return Draw("uniform", eta(matrix, gain) / math.sqrt(3), gain)


def normal(matrix: Matrix, gain: float = 1.0) -> Draw:
    """N(0, η² / 3), with the variance of eq. 19."""
    return Draw("normal", eta(matrix, gain) / math.sqrt(3), gain)


def xavier_uniform(model: nn.Module, *, gain: float = 1.0) -> None:
    """W ~ U(-η, η) (eqs. 18-19; Glorot & Bengio 2010). The default."""
    finite("gain", gain, above=0)
    apply(model, "xavier_uniform", lambda m: uniform(m, gain))


def xavier_normal(model: nn.Module, *, gain: float = 1.0) -> None:
    """W ~ N(0, η² / 3): Glorot & Bengio's variance 2 gain² / (d_in + d_out), that of the uniform form. What eq. 20
    usually is; take this one unless you mean to follow its letter."""
    finite("gain", gain, above=0)
    apply(model, "xavier_normal", lambda m: normal(m, gain))


def xavier_normal_seed(model: nn.Module, *, gain: float = 1.0) -> None:
    """W ~ N(0, η²), eq. 20 as written: three times the variance of eq. 19."""
    finite("gain", gain, above=0)
    apply(model, "xavier_normal_seed", lambda m: Draw("normal", eta(m, gain), gain))


def depth_gain(model: nn.Module, *, a: float = 1.0, b: float = 0.25) -> None:
    """Xavier uniform with gain = a L^b (eq. 21), equal in all layers.

    The seed says a and b are mostly positive, so that deeper models start larger; the published schemes for matrices in
    a branch have a negative b, as a = 0.67, b = -1/4 in T-Fixup.
    """
    gain = finite("a", a, above=0) * n_layers(model) ** finite("b", b)
    apply(model, "depth_gain", lambda m: uniform(m, gain))


def ds_init(model: nn.Module, *, a: float = 1.0, b: float = 0.5) -> None:
    """Xavier uniform with gain = a / l^b (eq. 22); a = 1, b = 1/2 is DS-Init (Zhang et al. 2019). Both sublayers of a
    layer have its l; a matrix that several layers share has that of the first."""
    finite("a", a, above=0)
    finite("b", b)
    apply(model, "ds_init", lambda m: uniform(m, a / m.layer**b))


def gpt2(model: nn.Module, *, std: float = 0.02) -> None:
    """W ~ N(0, std²), output projections divided by sqrt(2 L) (Radford et al. 2019)."""
    finite("std", std, above=0)
    gain = {"output": 1 / math.sqrt(2 * n_layers(model))}
    apply(model, "gpt2", lambda m: Draw("normal", std * gain.get(m.role, 1.0), gain.get(m.role, 1.0)))


def deepnorm(model: nn.Module, *, gain: float | None = None) -> None:
    """Xavier normal, with a gain on value, output and feed-forward matrices; for norm="deepnorm" (Wang et al. 2022).

    ``gain``: (8 L)^(-1/4) if None, the value for an encoder or a decoder alone. An encoder-decoder model has others
    there: 0.87 (N^4 M)^(-1/16) for an encoder of N layers, (12 M)^(-1/4) for a decoder of M.
    """
    gain = (8 * n_layers(model)) ** -0.25 if gain is None else finite("gain", gain, above=0)
    apply(model, "deepnorm", lambda m: normal(m, gain if m.role in BRANCH else 1.0))


def tfixup(model: nn.Module, *, decoder: bool | None = None) -> None:
    """Xavier uniform, with a gain on value, output and feed-forward matrices: 0.67 L^(-1/4) in an encoder, (9 L)^(-1/4)
    in a decoder; for norm="none" (Huang et al. 2020).

    Embeddings and learned positions are drawn from N(0, 1 / d_model) with the gain (9 L)^(-1/4) in both; a linear map
    of patches or values is Xavier uniform with that gain. ``decoder``: which it is; if None, a causal model is one.
    """
    decoder = getattr(model, "causal", False) if decoder is None else decoder
    outer = (9 * n_layers(model)) ** -0.25
    inner = outer if decoder else 0.67 * n_layers(model) ** -0.25

    def rule(m: Matrix) -> Draw:
        if m.layer:
            return uniform(m, inner if m.role in BRANCH else 1.0)
        return uniform(m, outer) if m.role == "projection" else Draw("normal", outer * m.d_in**-0.5, outer)

    apply(model, "tfixup", rule, beyond=embeddings(model))


def completep(model: nn.Module, *, std: float = 0.02, base_width: int = 256) -> None:
    """W ~ N(0, std² base_width / d_model), std being the value at the width base_width; for norm="completep", which
    does the scaling with depth (Dey et al. 2025). Learning rates are the optimizer's: by base_width / d_model too."""
    finite("std", std, above=0)
    at_least("base_width", base_width, 1)
    gain = math.sqrt(base_width / model.config.block.d_model)
    apply(model, "completep", lambda m: Draw("normal", std * gain, gain))


def lipschitz(model: nn.Module, *, bound: float = 1.0) -> None:
    """Xavier uniform, then every matrix whose spectral norm is above ``bound`` is scaled down to it, so that the
    Lipschitz constant of each linear map is at most bound.

    Starting from a Lipschitz bound is the idea of Xu et al. (2020), who narrow the range of the draw to that end; here
    the norm itself is computed. Attention as a whole has no global Lipschitz constant, whatever its matrices.
    """
    finite("bound", bound, above=0)
    apply(model, "lipschitz", uniform)
    for matrix in matrices(model):
        norm = torch.linalg.matrix_norm(matrix.tensor.double(), 2).item()
        rescale(model, matrix, min(1.0, bound / norm))
