"""Lyapunov exponents and errors of steps, against closed forms."""

import math

import pytest
import torch
from torch import nn

from odeformer import BlockConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.diagnostics import Trajectory, global_errors, gradient_norms, local_errors, lyapunov, spectral_norm
from odeformer.pretrained.wrapped import wrap
from solvers import SOLVERS

MASK = torch.arange(4) < torch.tensor([[4], [2]])


def linear(matrix, *, batch=1, tokens=1, length=4.0, n=4):
    """z' = A z, token by token, along its exact trajectory."""
    a = torch.as_tensor(matrix, dtype=torch.float64)
    depths = [length * i / n for i in range(n + 1)]
    z = torch.randn(batch, tokens, len(a), dtype=torch.float64)
    states = torch.stack([z @ torch.linalg.matrix_exp(l * a).T for l in depths])
    return Trajectory(lambda z, l: z @ a.T, states, depths)


def solution(mask=None, dtype=torch.float64, n_layers=2, block=(), **depth):
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(vocab_size=11, max_seq_len=4, n_layers=n_layers,
                                  block=BlockConfig(4, 2, **dict(block)), depth=DepthConfig(**depth))).to(dtype).eval()
    return model(torch.randint(11, (2, 4)), mask, return_solution=True)[1]


def unit_vectors(*shape):
    """All directions of a state, (n, *shape)."""
    n = math.prod(shape)
    return torch.eye(n, dtype=torch.float64).view(n, *shape)


# Lyapunov exponents

def test_a_diagonal_field_has_its_diagonal_as_exponents():
    rates = [0.5, -0.2, -1.0]
    found = lyapunov(linear(torch.diag(torch.tensor(rates))), 3, start=unit_vectors(1, 1, 3), n_steps=50)
    assert (found.exponents[0] - torch.tensor(rates)).abs().max() < 1e-7
    assert (found.growth[:, 0] - torch.tensor(rates)).abs().max() < 1e-7  # intervals of length 1
    assert found.exponents.dtype == torch.float64


def test_a_constant_linear_field_has_the_real_parts_of_its_eigenvalues_in_the_long_run():
    a = torch.block_diag(torch.tensor([[0.2, 3.0], [-3.0, 0.2]]), torch.tensor([[-0.5]]), torch.tensor([[-1.5]]))
    a = a.double()
    a[0, 2], a[1, 3] = 1.0, -0.7  # not normal
    found = lyapunov(linear(a, length=40.0, n=40), 4, n_steps=8)
    assert (found.exponents[0] - torch.tensor([0.2, 0.2, -0.5, -1.5])).abs().max() < 0.05


def test_rotations_have_exponents_of_zero_from_any_start():
    skew = torch.randn(4, 4, dtype=torch.float64)
    found = lyapunov(linear(skew - skew.T, batch=2), 4, n_steps=60)
    assert found.exponents.abs().max() < 1e-6


def test_sweeps_turn_the_exponents_to_the_singular_values_of_the_whole_map():
    a = torch.diag(torch.tensor([0.5, -0.1, -0.6, -1.2])) + 0.8 * torch.ones(4, 4).triu(1)
    a = a.double()
    run = linear(a, length=3.0, n=3)
    wanted = torch.linalg.svdvals(torch.linalg.matrix_exp(3 * a)).log() / 3
    assert (lyapunov(run, 3, sweeps=15, n_steps=20).exponents[0] - wanted[:3]).abs().max() < 1e-5
    assert (lyapunov(run, 3, n_steps=20).exponents[0] - wanted[:3]).abs().max() > 1e-3


def test_euler_s_exponents_are_those_of_the_logarithm_of_its_growth():
    run = linear([[0.5, 0.0], [0.0, -0.4]], length=4.0, n=4)  # h = 1
    found = lyapunov(run, 2, solver="euler", start=unit_vectors(1, 1, 2))
    assert (found.exponents[0] - torch.tensor([1.5, 0.6], dtype=torch.float64).log()).abs().max() < 1e-12


def test_the_logistic_flow_contracts_as_its_derivative_says():
    """z' = z (1 - z): dz(l) / dz(0) = e^l / (1 + z_0 (e^l - 1))²."""
    depths = torch.linspace(0, 5, 11, dtype=torch.float64)
    start = 0.2
    growth = depths.exp() / (1 + start * (depths.exp() - 1))
    run = Trajectory(lambda z, l: z * (1 - z), (start * growth).view(-1, 1, 1, 1), depths.tolist())
    wanted = math.log(math.exp(5) / (1 + start * (math.exp(5) - 1)) ** 2) / 5
    assert abs(lyapunov(run, 1, n_steps=20).exponents.item() - wanted) < 1e-7


def test_exponents_by_token_are_those_of_the_token_s_own_rate_where_tokens_do_not_meet():
    rates = torch.tensor([0.3, -0.5, 0.0], dtype=torch.float64)
    states = torch.randn(3, 2, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    run = Trajectory(lambda z, l: rates.view(3, 1) * z, states, [0, 1, 2], mask)
    found = lyapunov(run, 2, by_token=True, n_steps=20, sweeps=1)
    assert found.exponents.shape == (2, 3, 2)
    assert (found.exponents[0] - rates.unsqueeze(1)).abs().max() < 1e-6
    assert found.exponents[1, 2].isnan().all()


def test_the_network_s_exponents_are_those_of_the_dense_product_of_its_layers():
    run = solution(MASK)
    z = run.states[0].detach()

    def network(x):  # Euler, attention and feed-forward in turn, of the second row's two real tokens
        x = torch.cat([z[:1], torch.cat([x[None], z[1:, 2:]], 1)])
        for l, _, f in run.field.pieces:
            for part in f.parts:
                x = x + part(x, torch.tensor(l))
        return x[1, :2]

    whole = torch.func.jacrev(network)(z[1, :2]).reshape(8, 8).detach()
    wanted = torch.linalg.svdvals(whole).log() / 2
    found = lyapunov(run, 2, solver="euler", sweeps=25)
    assert (found.exponents[1] - wanted[:2]).abs().max() < 1e-4
    assert abs(lyapunov(run, 8, solver="euler", vectorize=False).exponents[1].sum() * 2
               - torch.linalg.slogdet(whole)[1]) < 1e-8  # all directions: the volume


def test_a_row_has_no_more_exponents_than_numbers():
    found = lyapunov(solution(MASK), 10, solver="euler")
    assert found.exponents[0].isfinite().all()
    assert found.exponents[1, :8].isfinite().all() and found.exponents[1, 8:].isnan().all()


def test_directions_that_would_not_fit_are_refused_with_the_number_of_bytes():
    with pytest.raises(ValueError, match=r"12,288 bytes.*by_token=False.*max_bytes=12288"):
        lyapunov(solution(), 4, by_token=True, max_bytes=12000)
    with pytest.raises(ValueError, match="start must have the shape"):
        lyapunov(solution(), 2, start=torch.zeros(3, 4))


# errors

def test_local_errors_are_those_of_the_pair_by_hand():
    """heun_euler21 on z' = λ z: Euler's step beside Heun's, (h λ)² / 2 apart."""
    run = linear([[-0.7]], length=2.0, n=4)
    found = local_errors(run, "heun_euler21")
    assert (found - (0.5 * 0.7) ** 2 / 2).abs().max() < 1e-12


@pytest.mark.parametrize(("pair", "power"), [("heun_euler21", 2), ("bosh32", 3), ("dopri5", 5)])
def test_local_errors_shrink_with_the_order_of_the_pair(pair, power):
    """The estimate is the local error of the lower of the two orders, which for dopri5 is 4."""
    z = torch.ones(1, 1, 1, dtype=torch.float64)
    big, small = (local_errors(Trajectory(lambda z, l: z * z * torch.cos(l), torch.stack([z, z]), [0, h]), pair).item()
                  for h in (0.02, 0.01))
    assert abs(math.log2(big / small) - power) < 0.2


def test_local_errors_of_a_model_are_by_step_and_token():
    run = solution(MASK, steps_per_layer=2)
    found = local_errors(run, at="steps")
    assert found.shape == (4, 2, 4)
    assert found[:, ~MASK].isnan().all() and (found[:, MASK] > 0).all()
    assert local_errors(run, at="layers").shape == (2, 2, 4)
    with pytest.raises(ValueError, match=r"embedded pair.*'rk4' is not"):
        local_errors(run, "rk4")


@pytest.mark.parametrize("weights", ["piecewise", "shared"])
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("rk4", 4), ("ab2", 2)])
def test_solvers_show_their_order_on_a_smooth_model(solver, order, weights):
    run = solution(MASK, block={"coupling": "parallel"}, weights=weights, n_layers=1 if weights == "piecewise" else 2)
    found = global_errors(run, solver, (8, 16, 32))
    assert (found.orders[-1] - order).abs().max() < 0.3
    assert found.steps_per_layer == (8, 16, 32) and len(found.nfe) == 3
    assert SOLVERS[solver].order == order


def test_parts_that_take_turns_bring_the_order_down_to_that_of_the_splitting():
    found = global_errors(solution(n_layers=1, block={"coupling": "lie"}), "rk4", (16, 32))
    assert (found.orders[-1] - 1).abs().max() < 0.15


def test_global_errors_of_a_linear_field_are_those_of_the_powers_of_the_step():
    run = linear([[-0.5]], length=2.0, n=2)
    found = global_errors(run, "euler", (1, 2))
    for n, error in zip((2, 4), found.errors, strict=True):
        assert abs(error.item() - abs((1 - 1.0 / n) ** n - math.exp(-1)) / math.exp(-1)) < 1e-9
    near = global_errors(run, "euler", (1, 2), reference=4096)
    assert (near.errors - found.errors).abs().max() < 1e-3


@pytest.mark.parametrize(("options", "words"), [({"solver": "dopri5"}, "chooses its own steps"),
                                                ({"steps_per_layer": (2, 1)}, "must increase"),
                                                ({"steps_per_layer": (0, 1)}, "at least 1")])
def test_wrong_arguments_of_global_errors_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        global_errors(solution(), **{"solver": "rk4"} | options)


# layers of others

def test_wrapped_layers_give_the_same_numbers_as_the_map_they_make():
    layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True, dropout=0.0)
                           for _ in range(2)).double().eval()
    z = torch.randn(1, 3, 4, dtype=torch.float64)
    run = wrap(layers)(z, return_solution=True)[1]
    whole = torch.func.jacrev(lambda x: layers[1](layers[0](x)), chunk_size=1)(z).reshape(12, 12).detach()
    found = lyapunov(run, 12, solver="euler", sweeps=20)
    assert abs(found.exponents[0, 0] - torch.linalg.svdvals(whole)[0].log() / 2) < 1e-4
    assert abs(found.exponents[0].sum() - torch.linalg.slogdet(whole)[1] / 2) < 1e-9
    first = torch.func.jacrev(layers[0], chunk_size=1)(z).reshape(12, 12).detach() - torch.eye(12)
    assert (spectral_norm(run)[0] - torch.linalg.matrix_norm(first, 2)).abs().max() < 1e-9
    assert local_errors(run).shape == (2, 1, 3)
    (end,) = torch.autograd.grad(layers[1](layers[0](z.requires_grad_())).sin().sum(), z)
    norms = gradient_norms(run, lambda z: z.sin().sum()).norms
    assert (norms[0] - end.norm(dim=-1)).abs().max() < 1e-9


def test_progress_is_shown_where_asked_for(capsys):
    lyapunov(solution(), 1, n_steps=1)
    assert capsys.readouterr().err == ""
    lyapunov(solution(), 1, n_steps=1, progress=True)
    assert "Lyapunov: 100%" in capsys.readouterr().err
