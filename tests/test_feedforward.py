"""Feed-forward networks against their formulas."""

import math

import pytest
import torch

from odeformer.feedforward import FEEDFORWARD

D, D_FF = 6, 10

# x -> activation, each written out: GELU with erf (Hendrycks & Gimpel 2016), SiLU x / (1 + e^-x)
RELU = lambda x: x * (x > 0)  # noqa: E731
GELU = lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2  # noqa: E731
SILU = lambda x: x / (1 + torch.exp(-x))  # noqa: E731


def made(name, **options):
    return FEEDFORWARD[name](D, D_FF, **options).double()


def affine(linear, x):
    """x W + b with the seed's W (in, out)."""
    y = torch.einsum("...i,io->...o", x, linear.weight.T)
    return y if linear.bias is None else y + linear.bias


@pytest.mark.parametrize(("name", "activation"), [("relu", RELU), ("gelu", GELU)])
@pytest.mark.parametrize("bias", [True, False])
def test_eq_48_is_activation_of_x_w_plus_b_times_w_plus_b(name, activation, bias):
    f, x = made(name, bias=bias), torch.randn(2, 5, D, dtype=torch.float64)
    wanted = affine(f.output, activation(affine(f.hidden, x)))
    assert (f(x) - wanted).abs().max() < 1e-14
    assert (f.hidden.bias is None) == (not bias)


@pytest.mark.parametrize(("name", "activation"), [("swiglu", SILU), ("geglu", GELU), ("reglu", RELU)])
@pytest.mark.parametrize("bias", [True, False])
def test_eq_48_gated_is_shazeers_activation_of_x_w_times_x_v_times_w2(name, activation, bias):
    """Shazeer (2020), eqs. 5-6: FFN(x) = (activation(x W) ⊙ x V) W_2, W being the gate."""
    f, x = made(name, bias=bias), torch.randn(2, 5, D, dtype=torch.float64)
    wanted = affine(f.output, activation(affine(f.gate, x)) * affine(f.hidden, x))
    assert (f(x) - wanted).abs().max() < 1e-14
    assert sum(p.dim() == 2 for p in f.parameters()) == 3


def test_a_gated_network_with_two_thirds_of_d_ff_has_as_many_weights_as_a_plain_one():
    plain, gated = FEEDFORWARD["relu"](32, 96, bias=False), FEEDFORWARD["swiglu"](32, 64, bias=False)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in gated.parameters()) == 2 * 32 * 96


@pytest.mark.parametrize("name", FEEDFORWARD)
def test_every_network_keeps_the_shape_and_gives_every_parameter_a_gradient(name):
    f, x = FEEDFORWARD[name](8, 16), torch.randn(3, 40, 8, requires_grad=True)
    y = f(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    assert x.grad.abs().sum() > 0
    for key, p in f.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", ["relu", "gelu", "swiglu", "geglu", "reglu"])
def test_every_dense_network_treats_tokens_one_by_one(name):
    f, x = made(name), torch.randn(2, 5, D, dtype=torch.float64)
    assert (f(x)[1, 3] - f(x[1, 3])).abs().max() < 1e-14


@pytest.mark.parametrize("name", FEEDFORWARD)
@pytest.mark.parametrize(("sizes", "error", "argument"), [((0, 4), ValueError, "d_model"), ((4, 0), ValueError, "d_ff"),
                                                          ((4, 2.5), TypeError, "d_ff")])
def test_sizes_below_one_are_refused(name, sizes, error, argument):
    with pytest.raises(error, match=argument):
        FEEDFORWARD[name](*sizes)
