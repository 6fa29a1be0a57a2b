"""odeint against torchdiffeq 0.2.5, closed forms, and the exact gradient."""

import math

import pytest
import torch
import torchdiffeq
from odeint_problem import ADAMS, F64, Net, coupled, start, times
from torchdiffeq._impl.odeint import SOLVERS as THEIR_METHODS

from solvers import SOLVERS, SolverError, get_solver, odeint, odeint_adjoint
from solvers.odeint import DELEGATED

FIXED = ["euler", "midpoint", "heun2", "heun3", "rk4"]
ADAPTIVE = {"dopri8": 1e-7, "dopri5": 1e-7, "bosh3": 1e-6, "fehlberg2": 1e-4, "adaptive_heun": 1e-4}  # rtol
OWN = [name for name, s in SOLVERS.items()
       if not s.is_adaptive and not name.startswith(("imex", "ars")) and name not in FIXED]


class Constant:
    """y' = a + (y - (a t + b))^5, y = a t + b."""

    a, b = 0.2, 3.0

    def __call__(self, t, y):
        return self.a + (y - (self.a * t + self.b)) ** 5

    def exact(self, t):
        return (self.a * t + self.b)[:, None]


class Linear:
    """y' = A y with a skew A: a rotation in ten dimensions, by the matrix exponential."""

    def __init__(self):
        u = torch.linspace(-1, 1, 100, dtype=F64).view(10, 10).sin() * 0.7
        self.matrix = u - u.T

    def __call__(self, t, y):
        return y @ self.matrix.to(y.dtype).T

    def exact(self, t):
        return torch.stack([torch.linalg.matrix_exp(self.matrix * x) @ torch.ones(10, dtype=F64)
                            for x in (t - t[0]).double()])


class Sine:
    """y' = 2 y / t + t^4 sin(2 t) - t^2 + 4 t^3, the textbook problem in closed form."""

    def __call__(self, t, y):
        return 2 * y / t + t**4 * torch.sin(2 * t) - t**2 + 4 * t**3

    def exact(self, t):
        y = -0.5 * t**4 * torch.cos(2 * t) + 0.5 * t**3 * torch.sin(2 * t) + 0.25 * t**2 * torch.cos(2 * t) - t**3
        return (y + 2 * t**4 + (math.pi - 0.25) * t**2)[:, None]


PROBLEMS = {"constant": Constant(), "linear": Linear(), "sine": Sine()}


def nine_points(t):
    inner = t[0] + (t[-1] - t[0]) * torch.linspace(0, 1, 9, dtype=F64)[:-1]
    return torch.cat([inner, t[-1:]])


# Problems with closed forms

@ADAMS
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("method", [*ADAPTIVE, "rk4", "implicit_adams", "scipy_solver", "heun3"])
@pytest.mark.parametrize("name", list(PROBLEMS))
def test_constant_linear_and_sine_problems(name, method, backwards):
    problem, t = PROBLEMS[name], times(backwards)
    exact = problem.exact(t)
    if method in ADAPTIVE:
        # fehlberg's estimate is 1/512 of its weights, so it may be off by as much
        how, allowed = {"rtol": ADAPTIVE[method], "atol": ADAPTIVE[method]}, 200 * ADAPTIVE[method]
        allowed *= 10 if method == "fehlberg2" else 1
    else:
        how = {} if method == "scipy_solver" else {"options": {"step_size": 0.01}}
        allowed = {"scipy_solver": 1e-5, "heun3": 1e-4}.get(method, 1e-5)
    y = odeint(problem, exact[0], t, method=method, **how)
    assert y.shape == exact.shape and (method == "scipy_solver" or torch.equal(y[0], exact[0]))
    assert (y - exact).abs().max() < allowed * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("method", ["dopri5", "rk4", "tsit54"])
def test_every_dtype_is_kept_and_time_has_its_real_one(dtype, method):
    seen = set()

    def f(t, y):
        seen.add(t.dtype)
        return y * (1j if dtype.is_complex else -1.0)

    t = torch.linspace(0, 1, 11, dtype=F64)
    y = odeint(f, torch.ones(3, dtype=dtype), t, method=method, rtol=1e-5, atol=1e-6)
    factor = torch.tensor(1j if dtype.is_complex else -1.0, dtype=torch.complex128)
    assert y.dtype == dtype and seen == {dtype.to_real() if dtype.is_complex else dtype}
    assert (y[:, 0] - torch.exp(factor * t)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["dopri5", "euler"])
def test_half_precision_states_arrive(dtype, method):
    # a bf16 state under dopri5 comes back as it was from torchdiffeq
    how = {"rtol": 1e-2, "atol": 1e-2} if method == "dopri5" else {"options": {"step_size": 1 / 256}}
    y = odeint(lambda t, y: torch.ones_like(y), torch.ones(2, 2, dtype=dtype), torch.tensor([0.0, 1.0]), method=method,
               **how)
    assert y.dtype == dtype and (y[1].float() - 2).abs().max() < 0.02


@ADAMS
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("method", ["dopri5", "rk4", "ab3", "implicit_adams"])
def test_shapes_are_time_first(shape, method):
    y = odeint(lambda t, y: -y, torch.ones(shape, dtype=F64), times(), method=method)
    assert y.shape == (6, *shape)
    assert odeint(lambda t, y: -y, torch.ones(shape, dtype=F64), times(n=1), method=method).shape == (1, *shape)


@pytest.mark.parametrize("method", ["dopri5", "rk4", "ab3", "implicit_adams", "scipy_solver"])
def test_tuple_states_come_back_as_tuples(method):
    y0 = (torch.ones(2, 3, dtype=F64), torch.tensor(2.0, dtype=F64))
    y = odeint(lambda t, y: (-y[0], y[1] * t), y0, torch.linspace(0, 1, 41, dtype=F64), method=method)
    assert isinstance(y, tuple) and [x.shape for x in y] == [(41, 2, 3), (41,)]
    assert (y[0][-1] - math.exp(-1)).abs().max() < 1e-3 and abs(y[1][-1] - 2 * math.exp(0.5)) < 1e-3


# Against torchdiffeq

@ADAMS
def test_every_method_name_of_torchdiffeq_is_accepted():
    for name in THEIR_METHODS:
        options = {"max_order": 4} if name.endswith("adams") else {}  # 12 by default, where explicit_adams is unstable
        how = {"rtol": 1e-4, "atol": 1e-4} if name in ADAPTIVE else {}
        y = odeint(lambda t, y: -y, torch.ones(1, dtype=F64), torch.linspace(0, 1, 101, dtype=F64), method=name,
                   options=options, **how)
        assert abs(y[-1, 0] - math.exp(-1)) < (1e-2 if name == "fehlberg2" else 3e-3), name


@pytest.mark.parametrize("method", OWN)
def test_every_name_of_ours_is_accepted(method):
    y = odeint(lambda t, y: torch.stack([y[1], -y[0]]), torch.tensor([1.0, 0.0]), torch.linspace(0, 1, 33),
               method=method)
    if SOLVERS[method].order > 0:  # the momentum method stands for another equation at coarse steps
        allowed = 0.2 if method == "momentum" else 0.05
        assert (y[-1] - torch.tensor([math.cos(1), -math.sin(1)])).abs().max() < allowed


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("options", [{}, {"step_size": 0.07}, {"step_size": 0.07, "interp": "cubic"}, {"perturb": True},
                                     {"grid_constructor": lambda f, y, t: nine_points(t)}])
@pytest.mark.parametrize("method", FIXED)
def test_fixed_methods_give_torchdiffeqs_numbers_and_gradients(method, options, backwards):
    # rounding apart: the sums are taken in another order
    results = []
    for solve in (odeint, torchdiffeq.odeint):
        torch.manual_seed(0)
        net, y0, t = Net(), start().requires_grad_(), times(backwards).requires_grad_()
        y = solve(lambda t, y, net=net: net(t, y) + coupled(t, y), y0, t, method=method, options=dict(options))
        (y.sin() * torch.arange(1.0, 7.0, dtype=F64)[:, None, None]).sum().backward()
        results.append([y.detach(), y0.grad, t.grad, net.layer.weight.grad])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * max(1.0, theirs.abs().max().item())


def test_rk4_is_the_three_eighths_rule_as_there_and_an_object_is_the_classical_one():
    t = torch.tensor([0.0, 1.0], dtype=F64)
    values = {name: odeint(coupled, start(), t, method=method)[-1]
              for name, method in (("rk4", "rk4"), ("rk38", "rk38"), ("classical", get_solver("rk4")))}
    assert torch.equal(values["rk4"], values["rk38"])
    assert (values["rk4"] - values["classical"]).abs().max() > 1e-5


def test_a_step_size_that_divides_the_span_makes_no_extra_step():
    # torchdiffeq takes N + 1 steps for N = 61 and 109 in float32, 49 and 98 in float64
    for dtype in (torch.float32, F64):
        for n in range(1, 130):
            calls = []
            odeint(lambda t, y, calls=calls: calls.append(1) or y, torch.ones((), dtype=dtype),
                   torch.tensor([0.0, 1.0], dtype=dtype), method="euler", options={"step_size": 1 / n})
            assert len(calls) == n


def test_perturb_calls_func_inside_the_step():
    seen = []

    def f(t, y):
        seen.append(t.item())
        return torch.where(t < 1.0, 1.0, -1.0) * torch.ones_like(y)

    y = odeint(f, torch.zeros(1, dtype=F64), torch.tensor([0.0, 1.0, 2.0], dtype=F64), method="heun2",
               options={"perturb": True})
    assert y[:, 0].tolist() == [0.0, 1.0, 0.0]
    assert seen[0] > 0 and seen[1] < 1 < seen[2] and seen[3] < 2


@pytest.mark.parametrize("method", list(ADAPTIVE))
def test_adaptive_methods_agree_with_torchdiffeq_within_tolerances(method):
    # fehlberg's estimate is 1/512 of its weights; torchdiffeq's dopri8 and bosh3 are 100 tolerances off between steps
    rtol, t = ADAPTIVE[method], times()
    ours = odeint(coupled, start(), t, method=method, rtol=rtol, atol=rtol)
    theirs = torchdiffeq.odeint(coupled, start(), t, rtol=1e-11, atol=1e-11)
    allowed = rtol * (3e4 if method == "fehlberg2" else 100)
    assert (ours - theirs).abs().max() < allowed
    assert (ours - torchdiffeq.odeint(coupled, start(), t, method=method, rtol=rtol, atol=rtol)).abs().max() < (
        1e-3 if method in ("dopri8", "bosh3") else 2 * allowed)


@pytest.mark.parametrize("method", ["explicit_adams", "implicit_adams", "fixed_adams"])
def test_methods_that_torchdiffeq_runs_give_its_numbers(method):
    t, options = times(n=40), {"max_order": 5}
    ours, theirs = (solve(coupled, start(), t, method=method, options=options)
                    for solve in (odeint, torchdiffeq.odeint))
    assert torch.equal(ours, theirs)


# Gradients of odeint

@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("method", ["dopri5", "dopri8", "ab3", "implicit_midpoint"])
def test_gradients_reach_y0_and_every_time(method, backwards):
    def run(y0, t):
        return odeint(lambda t, y: torch.sin(y) * t, y0, t, method=method, rtol=1e-9, atol=1e-9,
                      **({} if SOLVERS[method].is_adaptive else {"options": {"step_size": 0.05}}))

    y0 = torch.tensor([[0.3, -0.8]], dtype=F64, requires_grad=True)
    t = times(backwards, n=3).requires_grad_()
    if SOLVERS[method].is_adaptive:
        assert torch.autograd.gradcheck(run, (y0, t), eps=1e-4, atol=1e-4, rtol=1e-4)
        return
    # at fixed steps these methods give the gradient of the flow: compare with dopri5's, to the error of their order
    weight = torch.randn(3, 1, 2, dtype=F64)
    got = torch.autograd.grad((run(y0, t) * weight).sum(), (y0, t))
    exact = odeint(lambda t, y: torch.sin(y) * t, y0, t, rtol=1e-10, atol=1e-10)
    wanted = torch.autograd.grad((exact * weight).sum(), (y0, t))
    for x, y in zip(got, wanted, strict=True):
        assert (x - y).abs().max() < 1e-2


@pytest.mark.parametrize("interp", ["linear", "cubic"])
def test_a_time_that_meets_a_point_of_the_grid_still_has_a_gradient(interp):
    # torchdiffeq's linear interpolation hands the state over there, and with it a gradient of 0
    def run(t):
        return odeint(lambda t, y: -y * t, torch.full((1,), 2.0, dtype=F64), t, method="heun2",
                      options={"step_size": 0.125, "interp": interp})[1, 0]

    t = torch.tensor([0.0, 0.5, 1.0], dtype=F64, requires_grad=True)
    (g,) = torch.autograd.grad(run(t), t)
    before = run(torch.tensor([0.0, 0.5 - 1e-6, 1.0], dtype=F64))
    assert g[1].item() == pytest.approx((run(t) - before).item() / 1e-6, rel=1e-4) and abs(g[1]) > 0.5


def test_the_state_at_the_first_time_is_y0_whatever_the_time():
    y0, t = start().requires_grad_(), times().requires_grad_()
    for method in ("dopri5", "rk4", "ab3"):
        grads = torch.autograd.grad(odeint(coupled, y0, t, method=method)[0].sum(), (y0, t), allow_unused=True)
        assert torch.equal(grads[0], torch.ones_like(y0)) and (grads[1] is None or not grads[1].any())


# Options, tolerances, callbacks

def test_a_norm_and_the_step_control_reach_the_solver():
    sizes = []

    def norm(y):
        sizes.append([tuple(x.shape) for x in y])
        return y[0].abs().max()

    options = {"norm": norm, "first_step": 0.25, "max_step": 0.5, "safety": 0.8, "ifactor": 5.0, "dfactor": 0.3,
               "min_step": 1e-9, "dtype": F64}
    told = []

    class Field:
        def __call__(self, t, y):
            return -y[0], -y[1]

        def callback_accept_step(self, t, y, dt):
            told.append((float(t), float(dt)))

    odeint(Field(), (torch.ones(2, 3), torch.ones(4)), torch.tensor([2.0, 0.0]), rtol=1e-2, atol=1e-2, options=options)
    assert sizes[0] == [(2, 3), (4,)]
    assert told[0] == (2.0, 0.25) and all(0 < dt <= 0.5 for _, dt in told)


def test_steps_end_at_step_t_and_at_jump_t():
    # a jump at 1 that torchdiffeq's options name: the error is that of smooth problems
    for name in ("jump_t", "step_t"):
        y = odeint(lambda t, y: torch.where(t < 1.0, 1.0, -5.0) * y, torch.ones(1, dtype=F64),
                   torch.tensor([0.0, 0.5, 2.0], dtype=F64), rtol=1e-9, atol=1e-12, options={name: torch.tensor([1.0])})
        assert y[:, 0].log().tolist() == pytest.approx([0.0, 0.5, -4.0], abs=1e-7)


def test_max_num_steps_bounds_the_work():
    with pytest.raises(SolverError):
        odeint(lambda t, y: -1e4 * (y - t), torch.ones(1, dtype=F64), torch.tensor([0.0, 1.0], dtype=F64),
               options={"max_num_steps": 10})


def test_tolerances_may_be_tensors_or_one_for_each_part():
    def f(t, y):
        return -y[0], torch.cos(20 * t) * y[1]

    y0, t = (torch.ones(2, dtype=F64), torch.ones(3, dtype=F64)), torch.tensor([0.0, 1.0], dtype=F64)
    exact = math.exp(math.sin(20) / 20)
    loose = odeint(f, y0, t, rtol=(1e-3, 1e-1), atol=(1e-3, 1e-1))
    tight = odeint(f, y0, t, rtol=(1e-1, torch.tensor(1e-9)), atol=(1e-1, torch.full((3,), 1e-9)))
    assert (tight[1][-1] - exact).abs().max() < 1e-7 < (loose[1][-1] - exact).abs().max()
    y = odeint(lambda t, y: -y, torch.ones(2, dtype=F64), t, rtol=torch.tensor([1e-8, 1e-8]), atol=torch.tensor(1e-10))
    assert (y[-1] - math.exp(-1)).abs().max() < 1e-7


def test_the_callback_of_fixed_steps_is_called_at_each():
    told = []

    class Field:
        def __call__(self, t, y):
            return -y

        def callback_step(self, t, y, dt):
            told.append((float(t), float(dt)))

    odeint(Field(), torch.ones(1), torch.tensor([1.0, 0.0]), method="rk4", options={"step_size": 0.25})
    assert told == [(1.0, 0.25), (0.75, 0.25), (0.5, 0.25), (0.25, 0.25)]


def test_a_solver_object_serves_as_method():
    solver = get_solver("dopri54", per_sample=True)
    y = odeint(lambda t, y: -y * (1 + 0 * t), torch.ones(3, 2, dtype=F64), times(), method=solver)
    assert (y[-1] - math.exp(-1.5)).abs().max() < 1e-7

    class Decay:
        def __init__(self, rate):
            self.rate = rate

        def __call__(self, t, y):
            return -self.rate * y

        def select(self, rows):
            return Decay(self.rate[rows])

    rate = torch.tensor([[1.0], [20.0]], dtype=F64)
    y = odeint(Decay(rate), torch.ones(2, 1, dtype=F64), times(), method=solver)
    assert (y[-1] - torch.exp(-1.5 * rate)).abs().max() < 1e-7


# Refusals

@pytest.mark.parametrize("options, word", [
    ({"step_sise": 0.1}, r"unknown option 'step_sise' for method 'rk38'; known: step_size, grid_constructor"),
    ({"rtol": 0.1}, "unknown option 'rtol'"), ({"step_size": -0.1}, "step_size must be"),
    ({"step_size": 0.1, "grid_constructor": lambda f, y, t: t}, "not both"), ({"interp": "linea"}, "interp"),
    ({"grid_constructor": lambda f, y, t: t[:-1]}, "grid_constructor")])
def test_wrong_options_of_fixed_methods_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        odeint(coupled, start(), times(), method="rk4", options=options)


@pytest.mark.parametrize("options, word", [
    ({"max_stepp": 1}, r"unknown option 'max_stepp' for method 'dopri5'; known:.*max_step.*jump_t"),
    ({"step_size": 0.1}, "unknown option 'step_size'"), ({"dtype": torch.float32}, "float64"),
    ({"max_num_steps": 0}, "max_num_steps"), ({"first_step": -1.0}, "first_step")])
def test_wrong_options_of_adaptive_methods_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        odeint(coupled, start(), times(), options=options)


def test_wrong_arguments_are_refused():
    y0, t = start(), times()
    with pytest.raises(ValueError, match=r"event_fn is not supported.*odeint_event"):
        odeint(coupled, y0, t, event_fn=lambda t, y: y.sum())
    with pytest.raises(ValueError, match="event_fn is not supported"):
        odeint_adjoint(coupled, y0, t, event_fn=lambda t, y: y.sum())
    with pytest.raises(ValueError, match=r"unknown method 'rk5'; known:.*ab3.*implicit_adams"):
        odeint(coupled, y0, t, method="rk5")
    for bad in (torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0.0, 0.0]), torch.zeros(2, 2), torch.zeros(0)):
        with pytest.raises(ValueError, match="t must"):
            odeint(coupled, y0, bad)
    for bad in (torch.tensor([0, 1]), [0.0, 1.0]):
        with pytest.raises(TypeError, match="t must be a floating-point tensor"):
            odeint(coupled, y0, bad)
    with pytest.raises(ValueError, match="rtol"):
        odeint(coupled, y0, t, rtol=-1.0)
    with pytest.raises(ValueError, match="one entry for each tensor"):
        odeint(lambda t, y: y, (y0, y0), t, rtol=(1e-3,))
    with pytest.raises(ValueError, match="shaped like the state"):
        odeint(lambda t, y: y[:1], y0, t, method="rk4")
    with pytest.raises(ValueError, match="scipy_solver gives no gradients"):
        odeint(coupled, y0.requires_grad_(), t, method="scipy_solver")
    field = Constant()
    field.pieces = [(0.0, 3.0, coupled)]
    with pytest.raises(ValueError, match=r"func\.pieces.*solvers\.solve"):
        odeint(field, start(), t)
    assert set(DELEGATED) <= set(THEIR_METHODS)


def test_a_state_that_blows_up_is_an_error():
    with pytest.raises(SolverError, match="infinite or NaN"):
        odeint(lambda t, y: -1e6 * y, torch.ones(2), torch.linspace(0, 1, 100), method="rk4")
    with pytest.raises(SolverError):
        odeint(lambda t, y: y * y, torch.ones(2, 2), torch.tensor([0.0, 2.0]), rtol=1e-5, atol=1e-6)
