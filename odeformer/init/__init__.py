"""Initialisers: ``INITIALIZERS[name](model, **options)``, applied last, to every matrix of the layers; biases are 0.

``matrices`` says what a model's matrices are, ``Draw`` how one is drawn, ``report`` what came out.
"""

from odeformer.init.draw import Draw, apply
from odeformer.init.hessian import curvature
from odeformer.init.matrix import Matrix, embeddings, matrices
from odeformer.init.schemes import (
    completep,
    deepnorm,
    depth_gain,
    ds_init,
    gpt2,
    lipschitz,
    tfixup,
    xavier_normal,
    xavier_normal_seed,
    xavier_uniform,
)
from odeformer.init.summary import report

INITIALIZERS = {
    "xavier_uniform": xavier_uniform,
    "xavier_normal": xavier_normal,
    "xavier_normal_seed": xavier_normal_seed,
    "depth_gain": depth_gain,
    "ds_init": ds_init,
    "gpt2": gpt2,
    "deepnorm": deepnorm,
    "tfixup": tfixup,
    "completep": completep,
    "lipschitz": lipschitz,
    "curvature": curvature,
}

__all__ = ["INITIALIZERS", "Draw", "Matrix", "apply", "embeddings", "matrices", "report"]
