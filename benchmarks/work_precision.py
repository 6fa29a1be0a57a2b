"""Error against NFE: every method of the registry and its peers on problems with known answers, in float64.

Each row is one solve: a problem, a library, a method, a step count or a tolerance; the error is that of the final state
against the problem's reference, relative to its largest entry. Fixed-step rows of one method give its measured order.
Peers: torchdiffeq and scipy, torchode where it is installed. A solve that fails is a row that says how.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from solvers import SOLVERS, get_solver, solve
from solvers.learned import Learned
from solvers.problems import PROBLEMS

COLUMNS = ("problem", "library", "method", "stated order", "measured order", "NFE", "error", "note")
NON_STIFF = ("noncommuting", "lotka_volterra", "van_der_pol", "attention", "kepler")
STIFF = ("prothero_robinson", "kaps", "hires")
PRESETS = {
    "quick": {"seeds": 1, "steps": (32, 64, 128, 256), "tolerances": (1e-3, 1e-5, 1e-7, 1e-9)},
    "cpu": {"seeds": 1, "steps": (32, 64, 128, 256, 512, 1024, 2048),
            "tolerances": (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11)},
}
TORCHDIFFEQ = {"fixed": ("euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams"),
               "adaptive": ("adaptive_heun", "fehlberg2", "bosh3", "dopri5", "dopri8")}
SCIPY = {False: ("RK23", "RK45", "DOP853", "LSODA"), True: ("Radau", "BDF", "LSODA")}
TORCHODE = ("Heun", "Dopri5", "Tsit5")
WORKERS = 8
SIZE = (14, 9)


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Problem x library x method; the steps or tolerances make the rows of a case."""
    for problem in (*NON_STIFF, *STIFF):
        for library, method, adaptive in methods(problem in STIFF):
            yield {"problem": problem, "library": library, "method": method,
                   "settings": list(settings["tolerances" if adaptive else "steps"]), "adaptive": adaptive}


def methods(stiff: bool) -> Iterator[tuple[str, str, bool]]:
    """(library, method, adaptive): for stiff problems the implicit ones, for others all."""
    for name, solver in SOLVERS.items():
        if name.startswith(("lie", "strang", "yoshida", "imex", "ars")) or isinstance(solver, Learned):
            continue  # for fields with parts, or with learned coefficients
        if getattr(solver, "to_equilibrium", False):
            continue  # which goes to another place
        if solver.is_implicit or not stiff:
            yield "solvers", name, solver.is_adaptive
    if not stiff:
        for name in ("tsit54", "dopri54"):
            yield "solvers per sample", name, True
        for kind, names in TORCHDIFFEQ.items():
            for name in names:
                yield "torchdiffeq", name, kind == "adaptive"
        for name in TORCHODE:
            yield "torchode", name, True
    for name in SCIPY[stiff]:
        yield "scipy", name, True


class Counted:
    """f(z, l) that counts its calls."""

    def __init__(self, f: Callable):
        self.f, self.calls = f, 0

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        self.calls += 1
        return self.f(z, l)


def by_solvers(f: Counted, problem: Any, method: str, setting: float, adaptive: bool, **options: Any) -> tuple:
    amount = {"rtol": setting, "atol": setting * 1e-2, "max_nfe": 100_000} if adaptive else {"n_steps": setting}
    solution = solve(f, problem.z0, span=problem.span, solver=get_solver(method, **options), **amount)
    return solution.z, solution.nfe


def per_sample(f: Counted, problem: Any, method: str, setting: float, adaptive: bool) -> tuple:
    z0 = problem.z0.unsqueeze(0)  # one row, so its l is one number
    solution = solve(lambda z, l: f(z, l.reshape(())), z0, span=problem.span,
                     solver=get_solver(method, per_sample=True), rtol=setting, atol=setting * 1e-2, max_nfe=100_000)
    return solution.z[0], solution.nfe


def by_torchdiffeq(f: Counted, problem: Any, method: str, setting: float, adaptive: bool) -> tuple:
    import torchdiffeq

    if adaptive:
        times = torch.tensor(problem.span, dtype=torch.float64)
        z = torchdiffeq.odeint(lambda t, y: f(y, t), problem.z0, times, method=method, rtol=setting,
                               atol=setting * 1e-2, options={"max_num_steps": 20_000})
    else:
        times = torch.linspace(*problem.span, setting + 1, dtype=torch.float64)
        z = torchdiffeq.odeint(lambda t, y: f(y, t), problem.z0, times, method=method)
    return z[-1], f.calls


def by_torchode(f: Counted, problem: Any, method: str, setting: float, adaptive: bool) -> tuple:
    import torchode

    shape = problem.z0.shape
    term = torchode.ODETerm(lambda t, y: f(y.view(shape), t[0]).reshape(1, -1))
    stepper = getattr(torchode, method)(term=term)
    controller = torchode.IntegralController(atol=setting * 1e-2, rtol=setting, term=term)
    ends = torch.tensor([problem.span], dtype=torch.float64)
    out = torchode.AutoDiffAdjoint(stepper, controller, max_steps=20_000).solve(
        torchode.InitialValueProblem(y0=problem.z0.reshape(1, -1), t_start=ends[:, 0], t_end=ends[:, 1], t_eval=ends))
    if out.status.item() != 0:
        raise RuntimeError(f"torchode status {out.status.item()}")
    return out.ys[0, -1].view(shape), f.calls


def by_scipy(f: Counted, problem: Any, method: str, setting: float, adaptive: bool) -> tuple:
    from scipy.integrate import solve_ivp

    shape = problem.z0.shape

    def field(l: float, z: Any) -> Any:
        return f(torch.from_numpy(z).view(shape), torch.tensor(l, dtype=torch.float64)).reshape(-1).numpy()

    out = solve_ivp(field, problem.span, problem.z0.reshape(-1).numpy(), method=method, rtol=setting,
                    atol=setting * 1e-2)
    if not out.success:
        raise RuntimeError(out.message)
    return torch.from_numpy(out.y[:, -1]).view(shape), f.calls


LIBRARIES = {"solvers": by_solvers, "solvers per sample": per_sample, "torchdiffeq": by_torchdiffeq,
             "torchode": by_torchode, "scipy": by_scipy}


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each step count or tolerance."""
    problem, rows = PROBLEMS[case["problem"]], []
    reference = problem.reference
    for setting in case["settings"]:
        f, start = Counted(problem.f), time.perf_counter()
        row = {"setting": setting, "error": None, "nfe": None, "note": ""}
        try:
            with torch.no_grad():
                z, nfe = LIBRARIES[case["library"]](f, problem, case["method"], setting, case["adaptive"])
            error = ((z - reference).abs().max() / reference.abs().max()).item()
            row |= {"error": error, "nfe": nfe} if math.isfinite(error) else {"note": "not finite"}
        except (RuntimeError, ValueError, AssertionError, ImportError) as error:
            row["note"] = " ".join(str(error).split())[:120] or type(error).__name__
        rows.append(row | {"seconds": time.perf_counter() - start})
    return rows


def stated(case: dict[str, Any]) -> int | None:
    """The order that the method claims, where the registry knows it."""
    return SOLVERS[case["method"]].order if case["library"].startswith("solvers") else None


def slope(rows: list[dict[str, Any]]) -> float | None:
    """Measured order from the finest pair of fixed-step rows above rounding."""
    pairs = [(a, b) for a, b in pairwise(rows) if a["error"] and b["error"] and b["error"] > 1e-12 and a["error"] < 0.1]
    if not pairs:
        return None
    a, b = pairs[-1]
    return math.log(a["error"] / b["error"]) / math.log(b["setting"] / a["setting"])


def groups(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(case, its rows)."""
    for key in dict.fromkeys((r["case"]["problem"], r["case"]["library"], r["case"]["method"]) for r in rows):
        mine = [r for r in rows if (r["case"]["problem"], r["case"]["library"], r["case"]["method"]) == key]
        yield mine[0]["case"], mine


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """A line a method and problem: its finest solve."""
    for case, mine in groups(rows):
        order, last = stated(case), mine[-1]
        measured = None if case["adaptive"] else slope(mine)
        yield (case["problem"], case["library"], case["method"], "" if order is None else order,
               "" if measured is None else f"{measured:.2f}", "" if last["nfe"] is None else last["nfe"],
               "" if last["error"] is None else f"{last['error']:.1e}", last["note"])


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """A panel a problem, log-log; fixed methods by order, adaptive ones and peers drawn on top."""
    panels = iter(figure.subplots(2, 4).flat)
    colors = {1: "#999999", 2: "#56B4E9", 3: "#009E73", 4: "#0072B2", 5: "#E69F00", 6: "#D55E00", 7: "#CC79A7",
              8: "#000000"}
    peers = {"torchdiffeq": ("--", "x"), "scipy": (":", "+"), "torchode": ("-.", "1"),
             "solvers per sample": ("-", "s")}
    for problem in (*NON_STIFF, *STIFF):
        axes = next(panels)
        for case, mine in groups([row for row in rows if row["case"]["problem"] == problem]):
            points = [(row["nfe"], max(row["error"], 1e-16)) for row in mine if row["error"] is not None
                      and row["error"] < 10]
            if not points:
                continue
            x, y = zip(*points, strict=True)
            if case["library"] == "solvers":
                axes.plot(x, y, "-", color=colors.get(stated(case), "#999999"),
                          linewidth=2.0 if case["adaptive"] else 0.8, marker="o" if case["adaptive"] else None,
                          markersize=3)
            else:
                style, marker = peers[case["library"]]
                axes.plot(x, y, style, marker=marker, color="#444444", linewidth=0.8, markersize=4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(problem)
        axes.set_xlabel("NFE")
        axes.set_ylabel("relative error of the final state")
        axes.grid(alpha=0.3)
    lines = [figure.axes[0].plot([], [], color=color, label=f"order {order}")[0] for order, color in colors.items()]
    lines += [figure.axes[0].plot([], [], style, marker=marker, color="#444444", label=name)[0]
              for name, (style, marker) in peers.items()]
    lines += figure.axes[0].plot([], [], "-o", color="#444444", linewidth=2, label="solvers, adaptive")
    figure.legend(handles=lines, loc="outside lower center", ncols=7, frameon=False)
