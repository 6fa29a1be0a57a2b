"""odeint_adjoint: gradients of the flow, what they reach, their own settings and what is refused."""

import pytest
import torch
import torchdiffeq
from odeint_problem import F64, Net, coupled, start, times
from torch import nn

from solvers import odeint, odeint_adjoint


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("method", ["dopri5", "tsit54", "rk4", "fixed_adams"])
def test_the_adjoint_gives_the_gradient_of_the_flow(method, backwards):
    fine = {} if method == "dopri5" else {"options": {"step_size": 0.01}}
    results = []
    for solve, how in ((odeint, {}), (odeint_adjoint, {"method": method, **fine})):
        torch.manual_seed(0)
        net, y0, t = Net(), start().requires_grad_(), times(backwards, n=3).requires_grad_()
        y = solve(net, y0, t, **how)
        (y.sin() * torch.arange(1.0, 4.0, dtype=F64)[:, None, None]).sum().backward()
        results.append([y0.grad, t.grad, net.layer.weight.grad, net.layer.bias.grad])
    for exact, adjoint in zip(*results, strict=True):
        assert (exact - adjoint).abs().max() < 1e-5


def test_the_adjoint_agrees_with_torchdiffeqs():
    results = []
    for solve in (odeint_adjoint, torchdiffeq.odeint_adjoint):
        torch.manual_seed(0)
        net, y0, t = Net(), start().requires_grad_(), times(n=3).requires_grad_()
        y = solve(net, y0, t, method="rk4", options={"step_size": 0.05})
        y[1:].sin().sum().backward()
        results.append([y.detach(), y0.grad, t.grad, net.layer.weight.grad])
    for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
        # ours takes df/dt0 from the flow, theirs integrates it; both solve the rest with the same steps
        assert (ours - theirs).abs().max() < (1e-6 if i == 2 else 1e-12)


def test_tensors_that_func_closes_over_get_their_gradient():
    # torchdiffeq gives them None, or an error that asks for adjoint_params
    encoder, hidden = nn.Linear(2, 2).double(), torch.randn(1, 2, dtype=F64)
    scale = torch.tensor(0.7, dtype=F64, requires_grad=True)
    results = []
    for solve in (odeint, odeint_adjoint):
        context = encoder(hidden)  # not a leaf
        y = solve(lambda t, y, context=context: torch.tanh(scale * y + context), start(), times(n=3), rtol=1e-9,
                  atol=1e-9)
        results.append(torch.autograd.grad(y.square().sum(), (scale, *encoder.parameters())))
    for exact, adjoint in zip(*results, strict=True):
        assert exact.abs().max() > 1e-3 and (exact - adjoint).abs().max() < 1e-6


def test_an_input_that_was_made_from_another_is_counted_once():
    w = torch.tensor([0.3, -0.2], dtype=F64, requires_grad=True)
    results = []
    for solve in (odeint, odeint_adjoint):
        made = w.square() + 1
        y = solve(lambda t, y, made=made: torch.tanh(w * y) * made, start(), times(n=2), rtol=1e-9, atol=1e-9)
        results.append(torch.autograd.grad(y.square().sum(), w)[0])
    assert (results[0] - results[1]).abs().max() < 1e-6


def test_functional_parameters_get_their_gradient():
    net = Net()
    swapped = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}

    def f(t, y):
        return torch.func.functional_call(net, swapped, (t, y))

    exact, adjoint = (torch.autograd.grad(solve(f, start(), times(n=2), rtol=1e-9, atol=1e-9).sum(),
                                          tuple(swapped.values())) for solve in (odeint, odeint_adjoint))
    for x, y in zip(exact, adjoint, strict=True):
        assert (x - y).abs().max() < 1e-6


def test_adjoint_params_that_leave_something_out_are_an_error():
    net = Net()
    y = odeint_adjoint(net, start(), times(n=2), adjoint_params=(net.layer.weight,))
    with pytest.raises(RuntimeError, match="would be lost"):
        y.sum().backward()
    y = odeint_adjoint(net, start().requires_grad_(), times(n=2), adjoint_params=tuple(net.parameters()))
    y.sum().backward()
    assert net.layer.bias.grad is not None


def test_second_derivatives_of_the_adjoint_are_refused():
    y0 = start().requires_grad_()
    (g,) = torch.autograd.grad(odeint_adjoint(coupled, y0, times(n=2)).sum(), y0, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        g.sum().backward()


@pytest.mark.parametrize("norm", ["seminorm", lambda x: max(v.abs().max() for v in x)])
def test_the_backward_solve_has_its_own_settings(norm):
    told = []

    class Field(Net):
        def callback_step_adjoint(self, t, y, dt):
            told.append((len(y), float(dt)))

    net, y0 = Field(), start().requires_grad_()
    options = {"norm": norm, "max_step": 0.25}
    y = odeint_adjoint(net, y0, times(n=2), adjoint_method="bosh3", adjoint_rtol=1e-6, adjoint_atol=1e-6,
                       adjoint_options=options)
    y.sum().backward()
    assert {n for n, _ in told} == {5} and max(h for _, h in told) <= 0.25  # (t, y, adjoint, weight, bias)
    exact = torch.autograd.grad(odeint(net, y0, times(n=2)).sum(), y0)[0]
    assert (y0.grad - exact).abs().max() < 1e-4
    with pytest.raises(ValueError, match="adjoint_options must be given"):
        odeint_adjoint(net, y0, times(n=2), options={"max_step": 1.0}, adjoint_method="bosh3")
    with pytest.raises(ValueError, match="seminorm"):
        odeint_adjoint(net, y0, times(n=2), adjoint_options={"norm": "semi"})


def test_the_adjoint_takes_tuples_and_a_norm_of_the_state():
    w = torch.tensor(1.5, dtype=F64, requires_grad=True)
    y0 = (torch.ones(2, 3, dtype=F64, requires_grad=True), torch.ones(4, dtype=F64))

    def f(t, y):
        return -w * y[0], torch.sin(w * t) * y[1]

    def norm(y):
        return max(x.abs().max() for x in y)

    grads = [torch.autograd.grad(sum(x[-1].sum() for x in solve(f, y0, times(n=3), options={"norm": norm})),
                                 (w, y0[0])) for solve in (odeint, odeint_adjoint)]
    for x, y in zip(*grads, strict=True):
        assert (x - y).abs().max() < 1e-5


def test_half_precision_weights_get_gradients_in_their_dtype():
    net = nn.Linear(2, 2).bfloat16()
    y0 = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    y = odeint_adjoint(lambda t, y: torch.tanh(net(y)), y0, torch.tensor([0.0, 1.0]), rtol=1e-2, atol=1e-2)
    y[-1].sum().backward()
    assert y.dtype == y0.grad.dtype == net.weight.grad.dtype == torch.bfloat16
    assert torch.isfinite(net.weight.grad).all() and net.weight.grad.any()
