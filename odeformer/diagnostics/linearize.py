"""The Jacobian of a field at a state, by its products alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from odeformer.diagnostics.trajectory import Site, Trajectory, check_bytes

SPARE = 16  # states that one tangent is taken to need while it goes through f


@contextmanager
def elementary() -> Iterator[None]:
    """torch's fused attention kernels have no forward mode: within this, layers of others use elementary operations."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel([SDPBackend.MATH]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class Jacobian:
    """J = df/dz of the field of a site at its state: one square matrix for each row of the batch, over the real tokens'
    d_model numbers; padding neither moves nor is moved.

    Rows of a batch are taken not to see each other (experts of limited capacity do). Products come back without a
    graph. f is evaluated once, and its graph is kept: ``vjp`` goes back through it; ``jvp`` is the derivative of
    u -> J^T u, two more ways back (Pearlmutter 1994 in reverse; about three times quicker than torch's forward mode,
    whose layer norm is slow). f must be twice differentiable by autograd, and by forward mode for ``dense``.
    """

    def __init__(self, site: Site, mask: Tensor | None = None):
        self.f, self.z, self.l = site.f, site.z.detach(), site.l
        self.keep = None if mask is None else mask.unsqueeze(-1)

    @classmethod
    def along(cls, run: Trajectory, at: object = "layers", part: int | None = None) -> list[Jacobian]:
        """Those of a trajectory's sites."""
        return [cls(site, run.mask) for site in run.sites(at, part=part)]

    def _masked(self, v: Tensor) -> Tensor:
        return v if self.keep is None else v.masked_fill(~self.keep, 0)

    @cached_property
    def _back(self) -> tuple[Tensor, ...] | None:
        """u, J^T u, z and f(z), with their graph; None where f does not depend on z."""
        with elementary(), torch.enable_grad():
            z = self.z.clone().requires_grad_()
            k = self.f(z, self.l)
            if not k.requires_grad:
                return None
            u = torch.zeros_like(k, requires_grad=True)
            (back,) = torch.autograd.grad(k, z, u, create_graph=True, allow_unused=True)
        return None if back is None or not back.requires_grad else (u, back, z, k)

    def jvp(self, v: Tensor) -> Tensor:
        """J v, shaped like z (batch, tokens, d_model)."""
        if self._back is None:
            return torch.zeros_like(v)
        u, back, _, _ = self._back
        (product,) = torch.autograd.grad(back, u, self._masked(v), retain_graph=True)
        return self._masked(product)

    def vjp(self, v: Tensor) -> Tensor:
        """J^T v, shaped like z."""
        if self._back is None:
            return torch.zeros_like(v)
        _, _, z, k = self._back
        return self._masked(torch.autograd.grad(k, z, self._masked(v), retain_graph=True)[0])

    def forget(self) -> None:
        """Let go of the graph; the next product makes it anew."""
        vars(self).pop("_back", None)

    def _push(self, v: Tensor) -> Tensor:
        return torch.func.jvp(lambda z: self.f(z, self.l), (self.z,), (v,))[1]

    def symmetric(self, v: Tensor) -> Tensor:
        """(J + J^T) v / 2."""
        return (self.jvp(v) + self.vjp(v)) / 2

    def gram(self, v: Tensor) -> Tensor:
        """J^T J v."""
        return self.vjp(self.jvp(v))

    def dense(self, *, max_bytes: int = 2**31, vectorize: bool = True) -> Tensor:
        """(batch, n, n) with n = tokens d_model, 0 at padding: n tangents, several at a time (``vectorize``, by
        torch.vmap) as far as they fit. Raises ValueError where the matrices do not fit into max_bytes."""
        batch, n = len(self.z), self.z[0].numel()
        size = self.z.element_size()
        check_bytes(3 * batch * n * n * size, max_bytes, f"{batch} Jacobians of {n} x {n} numbers, their copies and "
                    "eigenvalues", "pass fewer rows or tokens, or ask for leading eigenvalues (n=10)")
        left = max_bytes - 2 * batch * n * n * size
        chunk = max(1, min(n, left // (SPARE * batch * n * size))) if vectorize else 1
        out = torch.empty(batch, n, n, dtype=self.z.dtype, device=self.z.device)
        with elementary(), torch.enable_grad():
            for i in range(0, n, chunk):
                width = min(chunk, n - i)
                v = torch.zeros(width, 1, n, dtype=self.z.dtype, device=self.z.device)
                v[torch.arange(width), 0, torch.arange(i, i + width)] = 1
                v = self._masked(v.expand(-1, batch, -1).reshape(width, *self.z.shape))
                columns = torch.func.vmap(self._push)(v) if vectorize else torch.stack([self._push(x) for x in v])
                out[:, :, i:i + width] = self._masked(columns.detach()).flatten(2).permute(1, 2, 0)
        return out

    def dims(self) -> Tensor:
        """bool (batch, n): the numbers of real tokens."""
        keep = torch.ones_like(self.z, dtype=torch.bool) if self.keep is None else self.keep.expand_as(self.z)
        return keep.flatten(1)
