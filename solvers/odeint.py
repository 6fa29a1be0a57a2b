"""Drop-in for torchdiffeq's ``odeint``: its signature, shapes, method names and time conventions, our integrators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from solvers.base import HALF, Evaluator, Solver, State, Step, Work, cast, depth_dtype, tensors
from solvers.checks import check_finite, check_state
from solvers.explicit import ExplicitRungeKutta
from solvers.grid import make_pieces, read_points
from solvers.registry import SOLVERS, get_solver

RENAMED = {"rk4": "rk38"}  # torchdiffeq's "rk4" is Kutta's 3/8 rule
DELEGATED = {  # methods that torchdiffeq itself runs, with their options
    "explicit_adams": ("step_size", "grid_constructor", "interp", "perturb", "max_order", "max_iters"),
    "implicit_adams": ("step_size", "grid_constructor", "interp", "perturb", "max_order", "max_iters"),
    "fixed_adams": ("step_size", "grid_constructor", "interp", "perturb", "max_order", "max_iters"),
    "scipy_solver": ("solver", "min_step", "max_step"),
}
FIXED_OPTIONS = ("step_size", "grid_constructor", "interp", "perturb")
RUN_OPTIONS = ("step_t", "jump_t", "max_num_steps", "dtype")  # of an adaptive solve, besides those of its solver
CONTROL = {"ifactor": "max_factor", "dfactor": "min_factor"}  # torchdiffeq's words for ours
CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")
MAX_STEPS = 100_000
EVENTS = ("event_fn is not supported: use torchdiffeq.odeint_event, or solve over spans of your own and stop where the "
          "event has happened")


def odeint(func: Callable[[Tensor, State], State], y0: State, t: Tensor, *, rtol: Any = 1e-7, atol: Any = 1e-9,
           method: str | Solver | None = None, options: dict | None = None,
           event_fn: Callable | None = None) -> State:
    """Solve dy/dt = func(t, y), y(t[0]) = y0; the states at all of t, (len(t), *y0.shape), a tuple where y0 is one.

    func: takes a 0-d tensor t first. t: one axis, strictly increasing or decreasing. method (default ``dopri5``): every
        name of torchdiffeq 0.2.5, every name of SOLVERS, or a solver object. As there, ``rk4`` is the 3/8 rule
        (``rk38`` in SOLVERS); ``get_solver("rk4")`` is the classical one. Adams methods of torchdiffeq's names and
        ``scipy_solver`` are run by torchdiffeq (its explicit_adams goes up to order 11, which is hardly ever stable:
        set ``max_order``, or take ``ab4``).
    rtol, atol: for adaptive methods; numbers, tensors, or tuples of them beside a tuple state. Fixed-step methods do
        not use them.
    options of fixed-step methods, whose grid is t: ``step_size``, ``grid_constructor(func, y0, t)``, ``interp``
        ("linear", "cubic"), ``perturb``. Of adaptive ones: ``first_step``, ``min_step``, ``max_step``, ``safety``,
        ``ifactor``, ``dfactor``, ``norm``, ``step_t``, ``jump_t``, ``max_num_steps`` (default 100,000, a bound on the
        evaluations that as many steps take), ``dtype`` (torch.float64, which time always has).

    What differs from torchdiffeq: the default error norm is the maximum over rows of the root mean square over a row,
    so that rows do not hide each other's errors; a step_size that divides the span makes no extra step; half-precision
    states are carried in float32; failures are SolverError, unknown options ValueError, events are refused.

    Gradients reach y0, t and all that func depends on. Those of t are exact for explicit Runge-Kutta methods with
    fixed steps, else those of the exact flow (func at t, one more evaluation a point).
    """
    if event_fn is not None:
        raise ValueError(EVENTS)
    method = "dopri5" if method is None else method
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must map names to values, got {options!r}")
    options = dict(options or {})
    check_t(t)
    if isinstance(method, str) and method in DELEGATED:
        return _delegate(func, y0, t, rtol, atol, method, options)
    dtypes = check_state(y0)
    solver = read_method(method)
    field = TimeFirst(func)
    t = _beside(t, y0)
    half = any(dtype in HALF for dtype in dtypes)
    z = cast(y0, [torch.float32 if d in HALF else d for d in dtypes]) if half else y0
    if len(t) == 1:
        states = [y0]
    elif solver.is_adaptive:
        run = _configure(solver, options)
        states = run.integrate(field, z, t, _tolerance("rtol", rtol, y0), _tolerance("atol", atol, y0),
                               dtypes if half else None)
    else:
        _check_options(options, FIXED_OPTIONS, solver.name)
        states = _fixed(solver, field, z, t, options, dtypes if half else None)
    if half:
        states = [cast(state, dtypes) for state in states]
    if isinstance(y0, Tensor):
        return torch.stack(states)
    return tuple(map(torch.stack, zip(*states, strict=True)))


def read_method(method: str | Solver) -> Solver:
    """The solver for a method of odeint. Raises ValueError, TypeError."""
    if isinstance(method, str):
        name = RENAMED.get(method, method)
        if name not in SOLVERS:
            known = sorted({*SOLVERS, *DELEGATED})
            raise ValueError(f"unknown method {method!r}; known: {', '.join(known)}, or a solver object")
        method = name
    solver = get_solver(method)
    if getattr(solver, "to_equilibrium", False):
        raise ValueError(f"method {solver.name!r} has no states at times; use solvers.solve")
    return solver


class TimeFirst:
    """func(t, y) as a field f(z, l); torchdiffeq's callbacks and our ``parts`` and ``select`` go along.

    Raises ValueError for a func with ``pieces`` or ``breakpoints``, which odeint has no way to step at.
    """

    def __init__(self, func: Callable):
        if not callable(func):
            raise TypeError(f"func must be callable as func(t, y), got {type(func).__name__}")
        for name in ("pieces", "breakpoints"):
            if getattr(func, name, None):
                raise ValueError(f"func.{name}: odeint does not step at them; use solvers.solve, or an adaptive method "
                                 "with options={'jump_t': ...}")
        self.func = func
        for name in CALLBACKS:
            if hasattr(func, name):
                setattr(self, name, _positive(getattr(func, name)))
        if hasattr(func, "select"):  # for per-sample methods
            self.select = lambda rows: TimeFirst(func.select(rows))

    def __call__(self, z: State, l: Tensor) -> State:
        k = self.func(l, z)
        return tuple(k) if isinstance(k, list) else k

    @property
    def parts(self) -> tuple[TimeFirst, ...] | None:
        """The parts of func, for splitting methods."""
        parts = getattr(self.func, "parts", None)
        return tuple(map(TimeFirst, parts)) if parts else None


def _positive(callback: Callable) -> Callable:
    """torchdiffeq's callbacks see the size of a step, whichever way time runs."""
    return lambda l, z, h: callback(l, z, h.abs())


class _Run(NamedTuple):
    """An adaptive solve as odeint's options describe it."""

    solver: Solver
    jumps: list[float]
    limit: float

    def integrate(self, field: TimeFirst, z: State, t: Tensor, rtol: Any, atol: Any,
                  dtypes: tuple[torch.dtype, ...] | None) -> list[State]:
        """The states at t."""
        times = t.tolist()
        work, ends = Work(self.limit), (times[0], times[-1])
        pieces = make_pieces(field, ends, ends, self.jumps, work, dtypes)
        moving = t.requires_grad and torch.is_grad_enabled()
        start = _shift(z, t[0], field, dtypes, -1.0) if moving else z
        _, record = self.solver.integrate(start, pieces, times, rtol=rtol, atol=atol, mask=None, work=work)
        states = [z, *record.states[1:]]
        if moving:
            states[1:] = [_shift(state, at, field, dtypes, 1.0) for state, at in zip(states[1:], t[1:], strict=True)]
        return states


def _shift(z: State, t: Tensor, field: TimeFirst, dtypes: tuple[torch.dtype, ...] | None, sign: float) -> State:
    """z, with the gradient to t that a state has which moves along the flow."""
    l = t.detach().to(depth_dtype(z))
    k = field(z if dtypes is None else cast(z, dtypes), l)
    moved = sign * (t - t.detach())
    result = tuple(x + moved.to(x.abs().dtype) * y for x, y in zip(tensors(z), tensors(k), strict=True))
    return result[0] if isinstance(z, Tensor) else result


def _configure(solver: Solver, options: dict) -> _Run:
    """The solver with its options, the depths to step at, and the bound on evaluations."""
    own = [f.name for f in fields(solver) if f.init and f.name not in ("tableau", "name", *CONTROL.values())]
    _check_options(options, (*own, *CONTROL, *RUN_OPTIONS), solver.name)
    if options.get("dtype", torch.float64) != torch.float64:
        raise ValueError(f"dtype must be torch.float64, in which adaptive methods keep time; got {options['dtype']}")
    jumps = [x for name in ("step_t", "jump_t") if options.get(name) is not None
             for x in read_points(name, options[name])]
    steps = options.get("max_num_steps", MAX_STEPS)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"max_num_steps must be an int of at least 1, got {steps!r}")
    chosen = {CONTROL.get(name, name): value if name in ("norm", "compact") or value is None else float(value)
              for name, value in options.items() if name not in RUN_OPTIONS}
    limit = steps * (solver.tableau.with_fsal().n_stages - 1) + 2 + len(jumps)
    return _Run(replace(solver, **chosen) if chosen else solver, jumps, limit)


def _fixed(solver: Solver, field: TimeFirst, z: State, t: Tensor, options: dict,
           dtypes: tuple[torch.dtype, ...] | None) -> list[State]:
    """Steps over the grid; states at t by interpolation where a step passes it."""
    interp, perturb = options.get("interp", "linear"), options.get("perturb", False)
    if interp not in ("linear", "cubic"):
        raise ValueError(f"interp must be 'linear' or 'cubic', got {interp!r}")
    grid = _grid(field, z, t, options)
    moving = (grid.requires_grad or t.requires_grad) and torch.is_grad_enabled()
    if moving and not isinstance(solver, ExplicitRungeKutta):
        return _fixed_with_flow(solver, field, z, t, options, dtypes)
    dtype = depth_dtype(z)
    starts, stops = grid[:-1], grid[1:]
    at = _depths(solver.nodes, starts.to(dtype), stops.to(dtype), perturb)
    widths = stops - starts
    points, sizes, times = grid.tolist(), widths.tolist(), t.tolist()
    work, states, memory, start = Work(), [z], solver.init(None), z
    for i, h in enumerate(sizes):
        _tell(field, starts[i], z, widths[i])
        f = Evaluator(_Scaled(field, widths[i].to(dtype)) if moving else field, work, dtypes)
        step = Step(0.0, 1.0, at[i]) if moving else Step(points[i], h, at[i])
        before, slope = z, None
        if isinstance(solver, ExplicitRungeKutta):
            ks = solver.stages(f, z, step)
            z, slope = solver.finish(z, step.h, ks), ks[0]
        else:
            z, memory = solver.step(f, z, step, memory)
        while len(states) < len(times) and (times[len(states)] - points[i + 1]) * h <= 0:
            x = (t[len(states)] - starts[i]) / widths[i] if moving else (times[len(states)] - points[i]) / h
            if times[len(states)] == points[i + 1] and not (moving and grid is not t):
                states.append(z)
            elif interp == "linear":
                states.append(_weigh(((before, 1 - x), (z, x))))
            else:
                slope = f(before, starts[i].to(dtype)) if slope is None else slope
                states.append(_cubic(before, z, slope, f(z, stops[i].to(dtype)), step.h, x))
    check_finite(z, start, None, points[-1], sizes[-1], work)
    return states


def _fixed_with_flow(solver: Solver, field: TimeFirst, z: State, t: Tensor, options: dict,
                     dtypes: tuple[torch.dtype, ...] | None) -> list[State]:
    """As _fixed, with the gradient to t of the exact flow."""
    start = _shift(z, t[0], field, dtypes, -1.0)
    with_points = {name: value for name, value in options.items() if name != "grid_constructor"}
    if "grid_constructor" in options:
        with_points["grid_constructor"] = lambda *args: options["grid_constructor"](*args).detach()
    states = _fixed(solver, field, start, t.detach(), with_points, dtypes)
    return [z, *(_shift(state, at, field, dtypes, 1.0) for state, at in zip(states[1:], t[1:], strict=True))]


class _Scaled:
    """width · f: a step of size 1 of it is a step of size ``width`` of f, with a gradient to the width."""

    def __init__(self, f: Callable, width: Tensor):
        self.f, self.width = f, width

    def __call__(self, z: State, l: Tensor) -> State:
        k = self.f(z, l)
        return tuple(x * self.width for x in k) if isinstance(k, tuple) else k * self.width


def _grid(field: TimeFirst, z: State, t: Tensor, options: dict) -> Tensor:
    """The points of the steps: t, every step_size, or what grid_constructor gives."""
    step_size, constructor = options.get("step_size"), options.get("grid_constructor")
    if step_size is not None and constructor is not None:
        raise ValueError("step_size and grid_constructor must not both be given")
    if constructor is not None:
        grid = constructor(field.func, z, t)
        if not isinstance(grid, Tensor) or grid.dim() != 1 or grid[0] != t[0] or grid[-1] != t[-1]:
            raise ValueError("grid_constructor must return a 1-d tensor from t[0] to t[-1]")
        check_t(grid, "the grid of grid_constructor")
        return grid.to(t.device)
    if step_size is None:
        return t
    step_size = float(step_size)
    if not 0 < step_size < float("inf"):
        raise ValueError(f"step_size must be a finite number above 0, got {step_size}")
    length = float((t[-1] - t[0]).detach())
    ratio = abs(length) / step_size
    n = max(1, -int(-ratio * (1 - 8 * torch.finfo(t.dtype).eps) // 1))  # rounded up, rounding errors apart
    steps = torch.arange(n, dtype=t.dtype, device=t.device) * (step_size if length > 0 else -step_size)
    return torch.cat([t[0] + steps, t[-1:]])


def _depths(nodes: Sequence[float], starts: Tensor, stops: Tensor, perturb: bool) -> list[tuple[Tensor, ...]]:
    """The depth tensors of each step; with ``perturb`` those at its ends are moved inside by one number."""
    first, last = starts, stops
    if perturb:
        with torch.no_grad():
            inner = torch.nextafter(starts, stops), torch.nextafter(stops, starts)
        first, last = (x + (end - end.detach()) for x, end in zip(inner, (starts, stops), strict=True))
    columns = [first if c == 0 else last if c == 1 else starts + c * (stops - starts) for c in nodes]
    return list(zip(*(column.unbind() for column in columns), strict=True))


def _tell(field: TimeFirst, t: Tensor, z: State, width: Tensor) -> None:
    callback = getattr(field, "callback_step", None)
    if callback is not None:
        callback(t.detach(), z, width.detach())


def _weigh(terms: Sequence[tuple[State, Any]]) -> State:
    """Σ w z."""
    if isinstance(terms[0][0], tuple):
        return tuple(_weigh([(z[i], w) for z, w in terms]) for i in range(len(terms[0][0])))
    return sum(w * z for z, w in terms)


def _cubic(z0: State, z1: State, k0: State, k1: State, h: float, x: Any) -> State:
    """The cubic through z0, z1 with slopes k0, k1 at the fraction x of the step."""
    y = 1 - x
    return _weigh(((z0, (1 + 2 * x) * y * y), (k0, h * x * y * y), (z1, x * x * (3 - 2 * x)), (k1, -h * x * x * y)))


def _delegate(func: Callable, y0: State, t: Tensor, rtol: Any, atol: Any, method: str, options: dict) -> State:
    """Let torchdiffeq run a method of its own."""
    import torchdiffeq

    _check_options(options, DELEGATED[method], method)
    if method == "scipy_solver" and torch.is_grad_enabled():
        wanted = [*tensors(y0), t, *(func.parameters() if isinstance(func, nn.Module) else ())]
        if any(x.requires_grad for x in wanted):
            raise ValueError("scipy_solver gives no gradients: call it under torch.no_grad(), or use odeint_adjoint")
    return torchdiffeq.odeint(func, y0, t, rtol=rtol, atol=atol, method=method, options=options)


def _check_options(options: dict, known: Sequence[str], method: str) -> None:
    for name in options:
        if name not in known:
            raise ValueError(f"unknown option {name!r} for method {method!r}; known: {', '.join(known)}")


def check_t(t: Any, name: str = "t") -> None:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {getattr(t, 'dtype', type(t).__name__)}")
    if t.dim() != 1 or len(t) == 0:
        raise ValueError(f"{name} must have one axis and at least one point, got shape {tuple(t.shape)}")
    steps = t[1:] > t[:-1]
    if not bool(torch.isfinite(t).all()) or not (bool(steps.all()) or bool((t[1:] < t[:-1]).all())):
        raise ValueError(f"{name} must be finite and strictly increasing or decreasing, got {t.tolist()}")


def _beside(t: Tensor, y0: State) -> Tensor:
    device = tensors(y0)[0].device
    if t.device != device:
        warnings.warn(f"t is on {t.device} and y0 on {device}; t is moved", UserWarning, stacklevel=3)
    return t.to(device)


def _tolerance(name: str, value: Any, y0: State) -> Any:
    """A number, or a tensor that broadcasts against the state as the engine has it (flat for a tuple)."""
    if isinstance(y0, tuple) and isinstance(value, tuple | list):
        if len(value) != len(y0):
            raise ValueError(f"{name} must hold one entry for each tensor of y0 ({len(y0)}), got {len(value)}")
        parts = [torch.as_tensor(v, device=x.device).expand(x.shape).reshape(-1)
                 for v, x in zip(value, y0, strict=True)]
        value = torch.cat([part.to(torch.float64) for part in parts])
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(f"{name} must not require a gradient")
        if not bool((value >= 0).all()):
            raise ValueError(f"{name} must be at least 0")
        return value.item() if value.dim() == 0 else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, or a tensor of them, got {value!r}")
    return value
