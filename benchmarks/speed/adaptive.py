"""Point 3: step sizes chosen on the way, over torchdiffeq, and row by row over torchode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import peers
from benchmarks.speed.fixed import FIELDS, layer_of
from benchmarks.speed.timing import interleaved, without_grad
from solvers import get_solver, solve

SHAPE, ROWS = (8, 32, 64), 64
WRAPPER, PER_SAMPLE, STIFF = 1.02, 0.7, 0.2
RTOL, ATOL = 1e-5, 1e-7
LOOSER = (48.0, 32.0, 24.0, 16.0, 12.0, 8.0, 6.0, 4.0, 3.0, 2.0, 1.5)  # multiples of the tolerance, tried until our
# error is no more than a peer's
MOST = 1_000_000  # evaluations: no solve here is meant to stop for want of them


class Oscillators:
    """Van der Pol's z1'' = mu (1 - z1²) z1' - z1 in each row (rows, 2): the cheapest field with rows of their own."""

    start, end = (2.0, 0.0), 6.0

    def __init__(self, mu: Tensor | None = None):
        self.mu = torch.linspace(0.5, 2.0, ROWS) if mu is None else mu

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        x, v = z[:, 0], z[:, 1]
        return torch.stack([v, self.mu.to(z.dtype) * (1 - x * x) * v - x], 1)

    def select(self, rows: Tensor) -> Oscillators:
        """The field of these rows."""
        return Oscillators(self.mu[rows])

    def z0(self) -> Tensor:
        """(rows, 2)."""
        return torch.tensor(self.start).repeat(ROWS, 1)


class Relaxation:
    """z' = rate (tanh(z W) - z) with a rate for each row (rows, tokens, d_model), 1 but for one: a stiff row among
    others, in a field whose cost goes with the rows."""

    end = 4.0

    def __init__(self, weight: Tensor, rate: Tensor):
        self.weight, self.rate = weight, rate

    @classmethod
    def of(cls, rate: float) -> Relaxation:
        """One row with this rate."""
        rates = torch.ones(ROWS)
        rates[ROWS // 3] = rate
        return cls(torch.randn(64, 64) * 64**-0.5, rates)

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        return self.rate.to(z.dtype)[:, None, None] * (torch.tanh(z @ self.weight.to(z.dtype)) - z)

    def select(self, rows: Tensor) -> Relaxation:
        """The field of these rows."""
        return Relaxation(self.weight, self.rate[rows])

    def z0(self) -> Tensor:
        """(rows, tokens, d_model)."""
        return torch.randn(ROWS, 32, 64)


class Layer:
    """A pre-norm layer, the same for every row."""

    end = 3.0

    def __init__(self) -> None:
        self.f = FIELDS["block"](32)

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        return self.f(z, l)

    def z0(self) -> Tensor:
        """(rows, tokens, d_model)."""
        return torch.randn(ROWS, 8, 32)


ROW_FIELDS: dict[str, Callable[[], Any]] = {"van der Pol": Oscillators, "block": Layer}


def cases(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The wrapper on two fields, the per-sample engine on two, the stiff row."""
    for field in FIELDS:
        yield {"what": "wrapper", "field": field, "jit": settings["jit"]}
    for field in ROW_FIELDS:
        yield {"what": "per sample", "field": field}
    yield {"what": "stiff row", "rate": settings["rate"]}


def measure(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """By what is asked."""
    torch.manual_seed(0)
    return MEASURES[case["what"]](case, rounds, seconds)


def ours(f: Any, z0: Tensor, end: float, solver: Any = "dopri5", rtol: float = RTOL, atol: float = ATOL) -> Any:
    """Our Solution."""
    return solve(f, z0, span=(0.0, end), solver=solver, rtol=rtol, atol=atol, max_nfe=MOST)


def measure_wrapper(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A step of dopri5 over one of torchdiffeq's, which runs it; whole solves over other libraries'."""
    f, z0, end = FIELDS[case["field"]](SHAPE[-1]), torch.randn(SHAPE), 3.0
    calls = {"ours": lambda: ours(f, z0, end),
             "torchdiffeq": peers.later(peers.torchdiffeq_adaptive, f, z0, end, RTOL, ATOL),
             "torchdyn": peers.later(peers.torchdyn_adaptive, f, z0, end, RTOL, ATOL)}
    pairs = ["torchdyn"]
    if case["jit"] and case["field"] == "block":
        calls["diffrax, jit"] = peers.later(lambda: peers.diffrax_solve(layer_of(f), z0, end, backward=False, rtol=RTOL,
                                                                        atol=ATOL))
        pairs.append("diffrax, jit")
    times = interleaved({name: without_grad(call) for name, call in calls.items()}, rounds, seconds)
    label = f"dopri5 over torchdiffeq, a step, {case['field']}"
    if "torchdiffeq" in times.failed:
        rows = [times.ratio(label, "ours", "torchdiffeq", WRAPPER)]
    else:
        with torch.no_grad():
            steps = ours(f, z0, end).n_steps
            taken = accepted(f, z0, end)
        rows = [times.ratio(label, "ours", "torchdiffeq", WRAPPER, times=taken / steps,
                            note=f"steps {steps} and {taken}")]
    return rows + [times.ratio(f"dopri5 over {name}, {case['field']}", "ours", name) for name in pairs]


def accepted(f: peers.Field, z0: Tensor, end: float) -> int:
    """Steps that torchdiffeq accepts."""
    import torchdiffeq

    counted = peers.Counted(f)
    torchdiffeq.odeint(counted, z0, torch.tensor([0.0, end]), method="dopri5", rtol=RTOL, atol=ATOL)
    return counted.accepted


def measure_per_sample(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Rows that step by themselves, over torchode's: at the same tolerance, and with ours as loose as our error stays
    within theirs. The notes have both errors."""
    f = ROW_FIELDS[case["field"]]()
    z0, end, rows = f.z0(), f.end, get_solver("dopri5", per_sample=True)
    exact = reference(f, z0, end)

    def at(looser: float) -> Callable[[], Tensor]:
        return without_grad(lambda: ours(f, z0, end, rows, looser * RTOL, looser * ATOL).z)

    def error(call: Callable[[], Tensor]) -> float:
        return (call().double() - exact).abs().max().item()

    theirs = without_grad(peers.later(peers.torchode_adaptive, f, z0, end, RTOL, ATOL))
    found, looser = [], 1.0
    for what in ("tolerance", "error"):
        times, note = interleaved({"ours, per sample": at(looser), "torchode": theirs}, rounds, seconds), ""
        if "torchode" not in times.failed:
            bound = error(theirs)
            note = f"tolerance x {looser:g}, errors {error(at(looser)):.1e} and {bound:.1e}"
            looser = next((x for x in LOOSER if error(at(x)) <= bound), 1.0)
        found.append(times.ratio(f"per sample over torchode, {case['field']}, equal {what}", "ours, per sample",
                                   "torchode", PER_SAMPLE, note=note))
    return found


def reference(f: Any, z0: Tensor, end: float) -> Tensor:
    """The solution to far more digits than a tolerance of RTOL leaves."""
    double = getattr(f, "f", None)
    if double is not None:  # a layer: its weights, too
        for part in double._parts:
            part.sublayer.double()
    with torch.no_grad():
        exact = ours(f, z0.double(), end, get_solver("dopri8", per_sample=True), 1e-9, 1e-11).z
    if double is not None:
        for part in double._parts:
            part.sublayer.float()
    return exact


def measure_stiff_row(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One stiff row among many, row by row over the whole batch in step with it."""
    f = Relaxation.of(case["rate"])
    z0, rows = f.z0(), get_solver("dopri5", per_sample=True)
    calls = {"ours, per sample": without_grad(lambda: ours(f, z0, f.end, rows, 1e-4, 1e-6).z),
             "ours, whole batch": without_grad(lambda: ours(f, z0, f.end, "dopri5", 1e-4, 1e-6).z)}
    times = interleaved(calls, rounds, seconds)
    return [times.ratio(f"one stiff row among {ROWS}, per sample over whole batch", *calls, STIFF,
                        note=f"rate {case['rate']:g}")]


MEASURES = {"wrapper": measure_wrapper, "per sample": measure_per_sample, "stiff row": measure_stiff_row}
