"""Leading eigenvalues from products alone, a batch of operators at a time: Arnoldi's method with restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from odeformer.diagnostics.trajectory import check_bytes
from odeformer.tables import at_least

WHICH: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "magnitude": np.abs,
    "right": lambda x: x.real,
    "left": lambda x: -x.real,
    "imaginary": lambda x: np.abs(x.imag),
}


@dataclass(frozen=True, eq=False)
class Eigenvalues:
    """``values`` (batch, n) complex, the wanted first, nan where an operator has fewer; ``residuals`` (batch, n):
    |A x - λ x| for the unit vectors x found, absolute; ``vectors`` (batch, n, *shape) where asked for, the real parts:
    meant for symmetric operators. On the CPU in float64, vectors in the dtype of the products."""

    values: Tensor
    residuals: Tensor
    vectors: Tensor | None = None


def leading_eigenvalues(apply: Callable[[Tensor], Tensor], like: Tensor, n: int, *, which: str = "magnitude",
                        keep: Tensor | None = None, krylov: int | None = None, tol: float | None = None,
                        max_restarts: int = 100, max_bytes: int = 2**31, seed: int = 0,
                        start: Tensor | None = None, vectors: bool = False) -> Eigenvalues:
    """The n leading eigenvalues of each of a batch of real operators: ``apply(v)`` is A_i v_i for v (batch, *shape).

    ``which``: "magnitude", "right" (largest real part), "left" (smallest), "imaginary" (largest |imaginary part|).
    ``keep``: bool, broadcastable to v; entries that are False are no part of the spaces (padding). ``krylov``: vectors
    kept a row, max(2 n + 10, 30) if None; that many products before the first restart. ``tol``: residual relative to
    the largest |λ| at which to stop, 1e-9 (1e-5 in float32) if None, or after ``max_restarts``: then residuals say how
    far it came. ``start``: the first vectors, random by ``seed`` if None.

    Arnoldi 1951 with the restarts of Stewart 2001 (Krylov-Schur); symmetric operators make it the Lanczos method with
    full orthogonalisation. The subspace holds the vectors of power iteration, so it is never further off.

    Raises ValueError for an unknown ``which``, and for a basis that does not fit into max_bytes, with its size.
    """
    at_least("n", n, 1)
    if which not in WHICH:
        raise ValueError(f"which must be one of {', '.join(WHICH)}, got {which!r}")
    if tol is None:
        tol = 1e-9 if like.dtype == torch.float64 else 1e-5
    run = _Run(apply, like, n, WHICH[which], keep, krylov, max_bytes, seed, start)
    for _ in range(max_restarts + 1):
        run.extend()
        run.solve()
        if run.residual <= tol:
            break
        run.restart()
    return run.result(vectors)


class _Run:
    """Bases and projections of a batch: A Q_m = Q_m T + q_{m+1} b^T for each row."""

    def __init__(self, apply: Callable, like: Tensor, n: int, order: Callable, keep: Tensor | None, krylov: int | None,
                 max_bytes: int, seed: int, start: Tensor | None):
        self.apply, self.like, self.n, self.order = apply, like, n, order
        self.batch = len(like)
        self.keep = torch.ones_like(like, dtype=torch.bool) if keep is None else keep.expand_as(like)
        self.keep = self.keep.reshape(self.batch, -1)
        self.dims = self.keep.sum(1).tolist()  # of each row's space
        largest = max(self.dims)
        self.m = min(max(2 * n + 10, 30) if krylov is None else krylov, largest)
        if krylov is not None and krylov < min(n + 2, largest):
            raise ValueError(f"krylov must be at least n + 2 = {n + 2}, got {krylov}")
        size = self.keep.shape[1]
        check_bytes(2 * self.batch * (self.m + 2) * size * like.element_size(), max_bytes,
                    f"a basis of {self.m} vectors and its copy for {self.batch} rows of {size} numbers",
                    "pass fewer rows or a smaller krylov")
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = torch.arange(self.batch)
        self.q = torch.zeros(self.batch, self.m + 2, size, dtype=like.dtype, device=like.device)
        self.h = np.zeros((self.batch, self.m + 2, self.m + 2))
        self.at = np.zeros(self.batch, dtype=int)  # the column that comes next
        self.active = np.ones(self.batch, dtype=bool)  # rows whose space is not yet exhausted
        self.scale = np.zeros(self.batch)
        first = self._random() if start is None else start.detach().reshape(self.batch, -1) * self.keep
        self.q[:, 0] = first / first.norm(dim=1, keepdim=True).clamp(min=torch.finfo(like.dtype).tiny)

    def _random(self) -> Tensor:
        x = torch.randn(self.keep.shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.like.device, self.like.dtype) * self.keep

    def extend(self) -> None:
        """Add columns until each row has m or, behind a pair that was not torn apart, m + 1."""
        for _ in range(self.m - int(self.at[self.active].min())):
            self._column()

    def _column(self) -> None:
        at = torch.from_numpy(self.at)
        v = self.q[self.rows, at.to(self.q.device)]
        with_shape = self.apply(v.view_as(self.like)).reshape(self.batch, -1).detach() * self.keep
        w, c = self._orthogonal(with_shape)
        size = w.norm(dim=1)
        self.scale = np.maximum(self.scale, with_shape.norm(dim=1).double().cpu().numpy())
        eps = torch.finfo(w.dtype).eps
        lost = size <= 10 * eps * torch.from_numpy(self.scale).to(size) + torch.finfo(w.dtype).tiny
        if bool(lost.any()):  # an invariant subspace: go on in what is left of the space, if anything is
            fresh = self._orthogonal(self._random())[0]
            length = fresh.norm(dim=1)
            fresh = torch.where(length.unsqueeze(1) > 1e4 * eps, fresh, 0.0)  # else it is rounding: nothing is left
            w = torch.where(lost.unsqueeze(1), fresh, w)
        beta = torch.where(lost, 0.0, size)
        length = w.norm(dim=1, keepdim=True)
        rows = np.flatnonzero(self.active)
        column = self.at[rows]
        self.h[rows, :, column] = c.double().cpu().numpy()[rows]
        self.h[rows, column + 1, column] = beta.double().cpu().numpy()[rows]
        unit = torch.where(length > 0, w / length.clamp(min=torch.finfo(w.dtype).tiny), 0.0)
        self.q[torch.from_numpy(rows), torch.from_numpy(column) + 1] = unit[torch.from_numpy(rows)]
        self.at[rows] += 1

    def _orthogonal(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """w without its part in the basis, and that part's coefficients; twice is enough (Kahan, in Parlett 1980)."""
        total = torch.zeros(self.batch, self.q.shape[1], dtype=w.dtype, device=w.device)
        for _ in range(2):
            c = torch.einsum("bmn,bn->bm", self.q, w)
            w = w - torch.einsum("bmn,bm->bn", self.q, c)
            total = total + c
        return w, total

    def solve(self) -> None:
        """Ritz values of each row, best first, with residuals."""
        self.found, self.residual = [], 0.0
        for i in range(self.batch):
            m = min(int(self.at[i]), self.dims[i])
            a = self.h[i, :m, :m]
            b = self.h[i, self.at[i], :m] if m < self.dims[i] else np.zeros(m)
            values, y = np.linalg.eig(a) if m else (np.zeros(0, dtype=complex), np.zeros((0, 0)))
            best = np.argsort(-self.order(values), kind="stable")
            values, y = values[best].astype(complex), y[:, best]
            residual = np.abs(b @ y)
            self.found.append((values, y, residual))
            wanted = residual[:self.n]
            if wanted.size:
                self.residual = max(self.residual, wanted.max() / max(np.abs(values).max(), 1e-300))

    def restart(self) -> None:
        """Keep the best Schur vectors and the last residual vector of each row."""
        keep = self.n + (self.m - self.n) // 2
        q, h = torch.zeros_like(self.q), np.zeros_like(self.h)
        for i in range(self.batch):
            m = int(self.at[i])
            if m >= self.dims[i]:  # its values are exact
                q[i], h[i], self.active[i] = self.q[i], self.h[i], False
                continue
            t, z, p = _ordered_schur(self.h[i, :m, :m], self.order, min(keep, m - 2))
            h[i, :p, :p], h[i, p, :p] = t[:p, :p], self.h[i, m, :m] @ z[:, :p]
            q[i, :p] = torch.from_numpy(z[:, :p].T.copy()).to(self.q) @ self.q[i, :m]
            q[i, p] = self.q[i, m]
            self.at[i] = p
        self.q, self.h = q, h

    def result(self, vectors: bool) -> Eigenvalues:
        """In tensors, nan where a row has fewer than n."""
        values = torch.full((self.batch, self.n), torch.nan, dtype=torch.complex128)
        residuals = torch.full((self.batch, self.n), torch.nan, dtype=torch.float64)
        kept = torch.zeros(self.batch, self.n, self.q.shape[2], dtype=self.q.dtype, device=self.q.device)
        for i, (found, y, residual) in enumerate(self.found):
            n = min(self.n, len(found))
            values[i, :n] = torch.from_numpy(found[:n].copy())
            residuals[i, :n] = torch.from_numpy(residual[:n].copy())
            if vectors:
                kept[i, :n] = torch.from_numpy(np.ascontiguousarray(y[:, :n].real.T)).to(kept) @ self.q[i, :len(y)]
        shaped = kept.view(self.batch, self.n, *self.like.shape[1:]) if vectors else None
        return Eigenvalues(values, residuals, shaped)


def _ordered_schur(a: np.ndarray, order: Callable, n: int) -> tuple[np.ndarray, np.ndarray, int]:
    """T, Z with a = Z T Z^T, the n best eigenvalues leading (n + 1 where a complex pair would be torn apart)."""
    from scipy.linalg import schur
    from scipy.linalg.lapack import dtrsen

    t, z = schur(a, output="real")
    subdiagonal = np.append(np.diag(t, -1), 0.0)
    select, i, count, blocks = np.zeros(len(t), dtype=np.int32), 0, 0, []
    while i < len(t):
        width = 2 if subdiagonal[i] != 0 else 1
        blocks.append((order(np.linalg.eigvals(t[i:i + width, i:i + width])).max(), i, width))
        i += width
    for _, i, width in sorted(blocks, reverse=True):
        if count >= n:
            break
        select[i:i + width] = 1
        count += width
    t, z = dtrsen(select, t, z, job="N", lwork=max(1, len(t)), liwork=1)[:2]
    return t, z, count
