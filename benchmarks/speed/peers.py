"""Other libraries, each with the field that ours gets; what they need is imported where they are made."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Field = Callable[[Tensor, Tensor], Tensor]  # f(z, l)
Call = Callable[[], Any]


def later(make: Callable[..., Call], *given: Any) -> Call:
    """A call that makes itself when it is first called, so that what fails in making fails there."""
    made: list[Call] = []

    def call() -> Any:
        if not made:
            made.append(make(*given))
        return made[0]()

    return call


def torchdiffeq_fixed(f: Field, z0: Tensor, n_steps: int, method: str = "rk4") -> Call:
    """torchdiffeq's rk4, the 3/8 rule: as many evaluations as the classical one."""
    import torchdiffeq

    times = torch.linspace(0.0, float(n_steps), n_steps + 1)
    return lambda: torchdiffeq.odeint(lambda t, y: f(y, t), z0, times, method=method)[-1]


def torchdyn_fixed(f: Field, z0: Tensor, n_steps: int, method: str = "rk4") -> Call:
    """torchdyn's rk4."""
    from torchdyn.numerics import odeint

    times = torch.linspace(0.0, float(n_steps), n_steps + 1)
    return lambda: odeint(lambda t, y: f(y, t), z0, times, solver=method)[1][-1]


def torchode_heun(f: Field, z0: Tensor, n_steps: int) -> Call:
    """torchode has no rk4: its Heun method with a fixed step, which makes two evaluations a step."""
    import torchode

    shape, rows = z0.shape, len(z0)
    term = torchode.ODETerm(lambda t, y: f(y.view(shape), t[0]).flatten(1))
    solver = torchode.AutoDiffAdjoint(torchode.Heun(term=term), torchode.FixedStepController())
    start, end = torch.zeros(rows), torch.full((rows,), float(n_steps))

    def call() -> Tensor:
        problem = torchode.InitialValueProblem(y0=z0.flatten(1), t_start=start, t_end=end)
        return solver.solve(problem, dt0=torch.ones(rows)).ys[:, -1]

    return call


def torchdiffeq_adaptive(f: Field, z0: Tensor, end: float, rtol: float, atol: float) -> Call:
    """torchdiffeq's dopri5."""
    import torchdiffeq

    times = torch.tensor([0.0, end])
    return lambda: torchdiffeq.odeint(lambda t, y: f(y, t), z0, times, method="dopri5", rtol=rtol, atol=atol)[-1]


def torchdyn_adaptive(f: Field, z0: Tensor, end: float, rtol: float, atol: float) -> Call:
    """torchdyn's dopri5."""
    from torchdyn.numerics import odeint

    times = torch.tensor([0.0, end])
    return lambda: odeint(lambda t, y: f(y, t), z0, times, solver="dopri5", rtol=rtol, atol=atol)[1][-1]


def torchode_adaptive(f: Field, z0: Tensor, end: float, rtol: float, atol: float) -> Call:
    """torchode's Dopri5, in which as in our per-sample engine each row has its own step. f takes rows of any shape."""
    import torchode

    shape, rows = z0.shape[1:], len(z0)
    term = torchode.ODETerm(lambda t, y: f(y.unflatten(1, shape), t).flatten(1))
    controller = torchode.IntegralController(atol=atol, rtol=rtol, term=term)
    solver = torchode.AutoDiffAdjoint(torchode.Dopri5(term=term), controller)
    ends = torch.zeros(rows), torch.full((rows,), end)

    def call() -> Tensor:
        problem = torchode.InitialValueProblem(y0=z0.flatten(1), t_start=ends[0], t_end=ends[1])
        return solver.solve(problem).ys[:, -1].unflatten(1, shape)

    return call


class Counted(nn.Module):
    """A field for torchdiffeq that counts accepted steps."""

    def __init__(self, f: Field):
        super().__init__()
        self.f, self.accepted = f, 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        """dy/dt."""
        return self.f(y, t)

    def callback_accept_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        """One more."""
        self.accepted += 1


def jax() -> Any:
    """jax on one thread. Raises ImportError where it is missing."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("XLA_FLAGS", flags)
    import jax

    return jax


def jax_block(layer: Any) -> tuple[dict[str, Any], Callable]:
    """The weights of a pre-norm layer of ours, and ``f(weights, z)``, its increment, in jax."""
    jnp = jax().numpy
    weights = {name: jnp.asarray(p.detach().numpy()) for name, p in layer.named_parameters()}
    n_heads = layer.attention.core.n_heads

    def linear(w: dict, name: str, x: Any) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(w: dict, name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scale = jax().lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return centred * scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(w: dict, z: Any) -> Any:
        x = norm(w, "attention.placement.norm", z)
        q, k, v = (linear(w, f"attention.core.{name}", x).reshape(*x.shape[:2], n_heads, -1)
                   for name in ("query", "key", "value"))
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        y = jnp.einsum("bhij,bjhd->bihd", jax().nn.softmax(scores), v)
        return linear(w, "attention.core.output", y.reshape(x.shape))

    def f(w: dict, z: Any) -> Any:
        k = attention(w, z)
        x = norm(w, "feedforward.placement.norm", z + k)
        hidden = jax().nn.gelu(linear(w, "feedforward.core.hidden", x), approximate=False)
        return k + linear(w, "feedforward.core.output", hidden)

    return weights, f


def diffrax_rk4() -> Any:
    """The classical method, which diffrax does not have, as one of its explicit Runge-Kutta solvers."""
    import diffrax
    import numpy as np

    class Rk4(diffrax.AbstractERK):
        tableau = diffrax.ButcherTableau(
            c=np.array([0.5, 0.5, 1.0]), b_sol=np.array([1 / 6, 1 / 3, 1 / 3, 1 / 6]), b_error=np.zeros(4),
            a_lower=(np.array([0.5]), np.array([0.0, 0.5]), np.array([0.0, 0.0, 1.0])))
        interpolation_cls = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k

        def order(self, terms: Any) -> int:
            return 4

    return Rk4()


def diffrax_solve(layer: Any, z0: Tensor, end: float, *, backward: bool, **control: Any) -> Call:
    """diffrax under jit on the jax twin of a layer; ``backward``: with the gradient to the layer's weights.

    ``control``: dt0 for steps of 1 with rk4; rtol and atol for dopri5.
    """
    import diffrax

    weights, f = jax_block(layer)
    start = jax().numpy.asarray(z0.numpy())
    fixed = "dt0" in control
    stepper = diffrax.ConstantStepSize() if fixed else diffrax.PIDController(**control)
    method = diffrax_rk4() if fixed else diffrax.Dopri5()

    def solution(w: dict, z: Any) -> Any:
        return diffrax.diffeqsolve(diffrax.ODETerm(lambda t, y, w: f(w, y)), method, 0.0, end, control.get("dt0"), z, w,
                                   stepsize_controller=stepper).ys[-1]

    run = jax().jit(jax().grad(lambda w, z: solution(w, z).sum()) if backward else solution)
    return lambda: jax().block_until_ready(run(weights, start))
