"""The same checks for every library: what an adaptive integrator must get right, and which ones do.

A library is ``integrate(f, z0, span, rtol, atol) -> (final state, evaluations)`` with f(z, l). A check gets one and
returns a measured number, or raises AssertionError. The DETEST problems are those of Enright & Pryce 1987; the
references are closed forms or scipy's DOP853 at rtol 1e-13. An evaluation limit ends what would not end by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from solvers import SolverError, get_solver, solve
from solvers.detest import DETEST

F64 = torch.float64
LIMIT = 50_000
Integrate = Callable[..., tuple[Tensor, int]]

COLUMNS = ("check", "library", "result", "measured", "note")
PRESETS = {"quick": {"seeds": 1}, "cpu": {"seeds": 1}}
WORKERS = 8
SIZE = (9, 5)


class Counted:
    """f that counts its calls and stops after LIMIT."""

    def __init__(self, f: Callable):
        self.f, self.calls = f, 0

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        self.calls += 1
        assert self.calls <= LIMIT, f"no end after {LIMIT} evaluations"
        return self.f(z, l)


def ours(name: str, **options: Any) -> Integrate:
    """solve() with an adaptive method."""

    def integrate(f: Callable, z0: Tensor, span: tuple[float, float], rtol: float, atol: float) -> tuple[Tensor, int]:
        if options.get("per_sample") and z0.dim() == 1:
            one = solve(lambda z, l: f(z[0], l.reshape(())).unsqueeze(0), z0.unsqueeze(0), span=span, rtol=rtol,
                        atol=atol, solver=get_solver(name, **options))
            return one.z[0], one.nfe
        solution = solve(f, z0, span=span, solver=get_solver(name, **options), rtol=rtol, atol=atol)
        return solution.z, solution.nfe

    return integrate


def torchdiffeq(name: str) -> Integrate:
    def integrate(f: Callable, z0: Tensor, span: tuple[float, float], rtol: float, atol: float) -> tuple[Tensor, int]:
        from torchdiffeq import odeint

        f = Counted(f)
        times = torch.tensor(span, dtype=z0.dtype)
        return odeint(lambda t, y: f(y, t), z0, times, method=name, rtol=rtol, atol=atol)[-1], f.calls

    return integrate


def torchode(name: str) -> Integrate:
    def integrate(f: Callable, z0: Tensor, span: tuple[float, float], rtol: float, atol: float) -> tuple[Tensor, int]:
        import torchode as to

        f, batched = Counted(f), z0.dim() > 1
        y0 = z0 if batched else z0.unsqueeze(0)
        term = to.ODETerm(lambda t, y: f(y, t.unsqueeze(-1)) if batched else f(y[0], t[0]).unsqueeze(0))
        adjoint = to.AutoDiffAdjoint(getattr(to, name)(term=term), to.IntegralController(atol, rtol, term=term),
                                     max_steps=LIMIT // 6)
        ends = torch.tensor([span] * len(y0), dtype=z0.dtype)
        out = adjoint.solve(to.InitialValueProblem(y0=y0, t_start=ends[:, 0], t_end=ends[:, 1], t_eval=ends))
        if (out.status != 0).any():
            raise RuntimeError(f"status {out.status.tolist()}")
        return (out.ys[:, -1] if batched else out.ys[0, -1]), f.calls

    return integrate


def scipy(name: str) -> Integrate:
    def integrate(f: Callable, z0: Tensor, span: tuple[float, float], rtol: float, atol: float) -> tuple[Tensor, int]:
        from scipy.integrate import solve_ivp

        f = Counted(f)

        def field(l: float, z: Any) -> Any:
            return f(torch.from_numpy(z).view(z0.shape), torch.tensor(l, dtype=F64)).flatten().numpy()

        out = solve_ivp(field, span, z0.flatten().double().numpy(), method=name, rtol=rtol, atol=atol)
        if not out.success:
            raise RuntimeError(out.message)
        return torch.from_numpy(out.y[:, -1]).view(z0.shape), f.calls

    return integrate


LIBRARIES: dict[str, Integrate] = {
    "solvers dopri5": ours("dopri5"), "solvers dopri8": ours("dopri8"), "solvers tsit54": ours("tsit54", adaptive=True),
    "solvers dopri54 per sample": ours("dopri54", per_sample=True), "torchdiffeq dopri5": torchdiffeq("dopri5"),
    "torchdiffeq dopri8": torchdiffeq("dopri8"), "torchode Dopri5": torchode("Dopri5"),
    "scipy RK45": scipy("RK45"), "scipy DOP853": scipy("DOP853"),
}


def closed_form(f: Callable, exact: Callable[[float], Tensor], span: tuple[float, float]) -> Callable:
    """The error at the end of the span relative to max(1, |z|), within 100 tolerances."""

    def check(integrate: Integrate) -> float:
        z, _ = integrate(f, exact(span[0]), span, 1e-8, 1e-8)
        error = ((z - exact(span[1])).abs().max() / exact(span[1]).abs().max().clamp(min=1)).item()
        assert error < 1e-6, f"error {error:.1e}"
        return error

    return check


def detest(letter: str) -> Callable:
    """The largest error over the class, relative to max(1, |z|), within 1000 tolerances."""

    def check(integrate: Integrate) -> float:
        worst = 0.0
        for name, problem in DETEST.items():
            if name.startswith(letter):
                z, _ = integrate(problem.f, problem.z0, problem.span, 1e-8, 1e-8)
                reference = problem.reference
                worst = max(worst, ((z - reference).abs().max() / reference.abs().max().clamp(min=1)).item())
        assert worst < 1e-5, f"error {worst:.1e}"
        return worst

    return check


def must_fail(f: Callable, z0: Tensor, span: tuple[float, float]) -> Callable:
    """The integrator must raise, and before 10,000 evaluations."""

    def check(integrate: Integrate) -> float:
        counted = Counted(f)
        try:
            z, _ = integrate(counted, z0, span, 1e-6, 1e-6)
        except (RuntimeError, ValueError, AssertionError) as error:
            assert counted.calls <= 10_000, f"{counted.calls} evaluations, then: {str(error)[:60]}"
            return counted.calls
        raise AssertionError(f"returned {z.flatten()[:2].tolist()} without a word")

    return check


def rows_apart(integrate: Integrate) -> float:
    """A fast row, z' = -30 (z - cos 3 l), beside 63 rows that do not move must be as accurate as alone."""
    rates = torch.zeros(64, 1, dtype=F64)
    rates[0] = -30.0
    z0 = torch.ones(64, 1, dtype=F64)
    z, _ = integrate(lambda z, l: (rates if len(z) == 64 else rates[:1]) * (z - torch.cos(3 * l)), z0, (0.0, 1.0), 1e-4,
                     1e-4)
    exact = (900 * math.cos(3) + 90 * math.sin(3) + 9 * math.exp(-30)) / 909
    error = (z[0] - exact).abs().item()
    assert error < 3e-4, f"error {error:.1e} at tolerance 1e-4"
    return error


def work_is_even(integrate: Integrate) -> float:
    """z' = -20 (z - cos l) over [0, 5] at loose tolerance: no more evaluations than stability asks for, times three."""
    _, calls = integrate(lambda z, l: -20 * (z - torch.cos(l)), torch.ones(1, dtype=F64), (0.0, 5.0), 1e-3, 1e-3)
    assert calls < 3 * 100 / 3.3 * 7, f"{calls} evaluations"
    return calls


CHECKS: dict[str, Callable[[Integrate], float]] = {
    "constant": closed_form(lambda z, l: torch.full_like(z, 0.2), lambda l: torch.tensor([0.2 * l + 1], dtype=F64),
                            (1.0, 8.0)),
    "sine": closed_form(lambda z, l: 2 * z / l + l**4 * torch.sin(2 * l) - l**2 + 4 * l**3,
                        lambda l: torch.tensor([-0.5 * l**4 * math.cos(2 * l) + 0.5 * l**3 * math.sin(2 * l)
                                                + 0.25 * l**2 * math.cos(2 * l) - l**3 + 2 * l**4
                                                + (math.pi - 0.25) * l**2], dtype=F64), (1.0, 8.0)),
    "rotation": closed_form(lambda z, l: torch.stack([z[..., 1], -z[..., 0]], -1),
                            lambda l: torch.tensor([math.sin(l), math.cos(l)], dtype=F64), (0.0, 8.0)),
    "rotation backwards": closed_form(lambda z, l: torch.stack([z[..., 1], -z[..., 0]], -1),
                                      lambda l: torch.tensor([math.sin(l), math.cos(l)], dtype=F64), (8.0, 0.0)),
    **{f"DETEST {letter}": detest(letter) for letter in "ABCDE"},
    "past a pole": must_fail(lambda z, l: z * z, torch.ones(1, dtype=F64), (0.0, 2.0)),
    "NaN at the start": must_fail(lambda z, l: -z, torch.full((1,), math.nan, dtype=F64), (0.0, 1.0)),
    "NaN from f": must_fail(lambda z, l: z * math.nan, torch.ones(1, dtype=F64), (0.0, 1.0)),
    "wrong shape": must_fail(lambda z, l: z[:1], torch.ones(3, dtype=F64), (0.0, 1.0)),
    "rows apart": rows_apart,
    "bounded by stability": work_is_even,
}


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Library x check."""
    for library in LIBRARIES:
        for check in CHECKS:
            yield {"library": library, "check": check}


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Pass or fail, the measured number, and how it failed."""
    start, row = time.perf_counter(), {"passed": False, "measured": None, "note": ""}
    try:
        with torch.no_grad():
            row |= {"measured": CHECKS[case["check"]](LIBRARIES[case["library"]]), "passed": True}
    except ImportError as error:
        row["note"] = f"not installed: {error}"
    except (AssertionError, RuntimeError, ValueError, SolverError) as error:
        row["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
    return [row | {"seconds": time.perf_counter() - start}]


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """A line a check and library."""
    for check in CHECKS:
        for row in rows:
            if row["case"]["check"] == check:
                measured = row["measured"]
                yield (check, row["case"]["library"], "pass" if row["passed"] else "FAIL",
                       "" if measured is None else f"{measured:.3g}", row["note"])


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """Which library passes which check."""
    axes = figure.subplots()
    grid = [[next((r["passed"] for r in rows if r["case"] == {**r["case"], "library": library, "check": check}), False)
             for library in LIBRARIES] for check in CHECKS]
    axes.imshow(grid, cmap="cividis", vmin=-0.5, vmax=1.2, aspect="auto")
    axes.set_xticks(range(len(LIBRARIES)), list(LIBRARIES), rotation=30, ha="right")
    axes.set_yticks(range(len(CHECKS)), list(CHECKS))
    for i, row in enumerate(grid):
        for j, passed in enumerate(row):
            axes.text(j, i, "pass" if passed else "fail", ha="center", va="center",
                      color="black" if passed else "white", fontsize=8)
