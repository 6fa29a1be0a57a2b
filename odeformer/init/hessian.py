"""Initialisation by curvature: Hessian traces and top eigenvalues, matrix by matrix, from Hessian-vector products."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from odeformer.init.draw import apply, rescale
from odeformer.init.matrix import Matrix, matrices
from odeformer.init.schemes import uniform
from odeformer.tables import at_least, finite, look_up

SAMPLES, TOKENS = 2, 16  # size of the random input, at most


class Hessian:
    """Products with the Hessian of a scalar loss, of which only the blocks of single matrices are looked at.

    ``loss`` is evaluated once; it must be twice differentiable by torch. ``seed``: of the random vectors.
    """

    def __init__(self, loss: Tensor, parts: Sequence[Matrix], seed: int = 0):
        self.parts = list(parts)
        self.parameters = list({id(m.parameter): m.parameter for m in self.parts}.values())
        self.gradients = torch.autograd.grad(loss, self.parameters, create_graph=True, materialize_grads=True)
        self.generator = torch.Generator(loss.device).manual_seed(seed)

    def times(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H v, one tensor a parameter like ``vectors``."""
        curved = [(g, v) for g, v in zip(self.gradients, vectors, strict=True) if g.requires_grad]
        if not curved:
            return [torch.zeros_like(p) for p in self.parameters]
        gradients, weights = zip(*curved, strict=True)
        return list(torch.autograd.grad(gradients, self.parameters, weights, retain_graph=True, materialize_grads=True))

    def traces(self, n_products: int) -> list[float]:
        """The trace of each matrix's block: the mean of v · H v over random signs v (Hutchinson 1990)."""
        total = torch.zeros(len(self.parts), dtype=torch.float64)
        for _ in range(n_products):
            signs = [torch.randint(0, 2, p.shape, generator=self.generator, device=p.device).to(p.dtype) * 2 - 1
                     for p in self.parameters]
            products = {id(p): v * hv for p, v, hv in zip(self.parameters, signs, self.times(signs), strict=True)}
            total += torch.stack([m.of(products[id(m.parameter)]).sum().double().cpu() for m in self.parts])
        return (total / n_products).tolist()

    def tops(self, n_products: int) -> list[float]:
        """The eigenvalue of the largest size of each matrix's block, by power iteration."""
        return [self._top(m, n_products) for m in self.parts]

    def _top(self, m: Matrix, n_products: int) -> float:
        place = next(i for i, p in enumerate(self.parameters) if p is m.parameter)
        vectors = [torch.zeros_like(p) for p in self.parameters]
        v = torch.randn(m.of(m.parameter).shape, generator=self.generator, device=m.parameter.device)
        value, v = 0.0, v.to(m.parameter.dtype)
        for _ in range(n_products):
            v = v / v.norm()
            m.of(vectors[place]).copy_(v)
            product = m.of(self.times(vectors)[place])
            value, v = (v * product).sum().item(), product
            if not v.any():
                break
        return value


MEASURES = {"trace": Hessian.traces, "top": Hessian.tops}


def evolve_loss(model: nn.Module, seed: int = 0) -> Tensor:
    """Half the mean squared distance of the model's normed state at l = n_layers from its present value, on random
    states at l = 0 (and a random memory, where its layers attend to one), through the model's own field and solver.

    It is 0 here, and its Hessian is the Gauss-Newton matrix JᵀJ / size: no block has a negative eigenvalue, and a trace
    says how much the output moves with the matrix.
    """
    like, config = next(model.layers.parameters()), model.config
    places = getattr(config, "max_seq_len", TOKENS)
    if hasattr(config, "image_size"):
        places = (config.image_size // config.patch_size) ** 2
    generator = torch.Generator(like.device).manual_seed(seed)
    z, memory = torch.randn(2, SAMPLES, min(TOKENS, places), config.block.d_model, generator=generator,
                            device=like.device, dtype=like.dtype)
    model = copy.copy(model)
    model.config = replace(config, depth=replace(config.depth, gradient="backprop"))  # it has second derivatives
    beside = {"memory": memory} if getattr(model, "cross", False) else {}
    output = model.final_norm(model.evolve(z, None, **beside).z)
    return (output - output.detach()).square().mean() / 2


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, gradients on, and the plain attention kernel, which alone has second derivatives."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for module in training:
            module.training = True


def curvature(model: nn.Module, *, closure: Callable[[nn.Module], Tensor] | None = None, measure: str = "trace",
              n_products: int = 16, least: float = 0.5, most: float = 2.0, seed: int = 0) -> None:
    """Xavier uniform, then for each matrix a gain by which all matrices come to bear alike on the curvature of a loss.

    To second order a matrix with entries of variance std² adds ½ κ to the loss, κ = std² |trace H|, where H is its
    block of the Hessian; along its sharpest direction κ = std² |top eigenvalue| (``measure``: "trace" or "top"). The
    gain is (geometric mean of all κ / κ)^(1/4), clipped to [least, most], and 1 where κ is 0. The fourth root, because
    a branch holds two matrices one after the other (value and output, hidden and output): H of either grows with the
    square of the other, so that κ of both is scaled by both gains squared. It is one pass, and evens the κ out in
    part; in the pre-norm encoder of the test the spread of log κ falls to less than half.

    ``closure``: called with the model, gives the loss, twice differentiable; if None, ``evolve_loss``. ``n_products``:
    Hessian-vector products: in all for "trace", for each matrix for "top".

    Raises ValueError where the loss has no finite curvature.
    """
    evaluate = look_up(MEASURES, measure, "measure")
    at_least("n_products", n_products, 1)
    finite("least", least, above=0)
    if finite("most", most, above=0) < least:
        raise ValueError(f"most must be at least least = {least}, got {most}")
    apply(model, "curvature", uniform)
    found = matrices(model)
    with twice_differentiable(model):
        loss = evolve_loss(model, seed) if closure is None else closure(model)
        sizes = [abs(x) for x in evaluate(Hessian(loss, found, seed), n_products)]
    kappa = [model.draws[m.name][1].std ** 2 * size for m, size in zip(found, sizes, strict=True)]
    if not all(map(math.isfinite, kappa)):
        raise ValueError(f"the loss must have a finite curvature, got a {measure} of "
                         f"{next(x for x in sizes if not math.isfinite(x))}")
    logs = [math.log(x) for x in kappa if x > 0]
    mean = math.exp(sum(logs) / len(logs)) if logs else 0.0
    for matrix, x in zip(found, kappa, strict=True):
        rescale(model, matrix, min(max((mean / x) ** 0.25, least), most) if x > 0 else 1.0)
