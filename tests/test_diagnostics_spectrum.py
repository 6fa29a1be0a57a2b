"""Eigenvalues, norms, numerical range, stability: closed forms, and dense Jacobians by torch.func.jacrev."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.diagnostics import (
    WHICH,
    Jacobian,
    Trajectory,
    dense_jacobians,
    departure_from_normality,
    leading_eigenvalues,
    lipschitz,
    log_norm,
    log_norm_interval,
    non_normality,
    numerical_range,
    secant_lipschitz,
    spectral_norm,
    spectral_radius,
    spectrum,
    stability,
    stiffness_index,
    stiffness_ratio,
)
from odeformer.norms import NORMS

N = 4  # tokens, and d_model
MASK = torch.arange(N) < torch.tensor([[N], [2]])
KEYS = {"magnitude": abs, "right": lambda x: x.real, "left": lambda x: -x.real, "imaginary": lambda x: abs(x.imag)}


def linear(matrix, *, batch=1, steps=1, h=1.0):
    """z' = A z with one token of len(A) numbers, at states that do not matter."""
    a = torch.as_tensor(matrix, dtype=torch.float64)
    states = torch.randn(steps + 1, batch, 1, len(a), dtype=torch.float64)
    return Trajectory(lambda z, l: z @ a.T, states, [h * i for i in range(steps + 1)])


def diagonal(values, **options):
    return linear(torch.diag(torch.tensor(values, dtype=torch.float64)), **options)


def solution(kind=Encoder, config=EncoderConfig, mask=None, dtype=torch.float64, **block):
    torch.manual_seed(0)
    model = kind(config(vocab_size=11, max_seq_len=N, n_layers=2, block=BlockConfig(N, 2, **block),
                        depth=DepthConfig())).to(dtype).eval()
    return model(torch.randint(11, (2, N)), mask, return_solution=True)[1]


def jacrev_of(run, layer, row):
    """The Jacobian of one layer's field by reverse mode, for one row's real tokens: (n, n)."""
    f, z = run.field.pieces[layer][2], run.states[layer].detach()
    real = torch.ones(N, dtype=torch.bool) if run.mask is None else run.mask[row]

    def own(x):
        return f(torch.cat([z[:row], x[None], z[row + 1:]]), torch.tensor(float(layer), dtype=z.dtype))[row]

    n = int(real.sum()) * z.shape[-1]
    return torch.func.jacrev(own)(z[row])[real][:, :, real].reshape(n, n).detach()


def apart(found, wanted):
    """How far two sets of eigenvalues are from each other."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    distance = np.abs(found[:, None] - wanted[None])
    return max(distance.min(1).max(), distance.min(0).max())


# the engine

@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("krylov", [None, 14])
def test_leading_eigenvalues_are_those_of_numpy_with_restarts_too(which, krylov):
    torch.manual_seed(1)
    a = torch.randn(3, 40, 40, dtype=torch.float64)
    a += 5 * torch.diag_embed(torch.linspace(-1, 1, 40, dtype=torch.float64))
    found = leading_eigenvalues(lambda v: (a @ v.unsqueeze(-1)).squeeze(-1), a[:, 0], 3, which=which, krylov=krylov,
                                max_restarts=500)
    for i in range(3):
        exact = np.linalg.eigvals(a[i].numpy())
        exact = sorted(map(KEYS[which], exact), reverse=True)[:3]
        got = sorted(map(KEYS[which], found.values[i].numpy()), reverse=True)
        assert np.allclose(got, exact, atol=1e-7)
        assert found.residuals[i].max() < 1e-7


def test_residuals_say_how_far_too_few_products_came():
    torch.manual_seed(1)
    a = torch.randn(60, 60, dtype=torch.float64)
    found = leading_eigenvalues(lambda v: v @ a.T, a[:1], 1, krylov=6, max_restarts=0)
    exact = np.linalg.eigvals(a.numpy())
    assert found.residuals[0, 0] > 1e-3
    assert np.abs(exact - found.values[0, 0].item()).min() > 1e-6


def test_an_operator_with_an_invariant_subspace_still_gives_all_its_eigenvalues():
    d = torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]], dtype=torch.float64)
    found = leading_eigenvalues(lambda v: v * d, torch.zeros_like(d), 3)
    assert (found.values.real.sort().values - d.sort().values).abs().max() < 1e-12


@pytest.mark.parametrize(("options", "words"), [({"which": "LM"}, "one of magnitude"), ({"n": 0}, "at least 1"),
                                                ({"krylov": 3, "n": 4}, "at least n"),
                                                ({"max_bytes": 100}, r"would take [\d,]+ bytes.*krylov")])
def test_wrong_arguments_of_the_engine_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        leading_eigenvalues(lambda v: v, torch.zeros(1, 20, dtype=torch.float64), **{"n": 2} | options)


# against dense Jacobians

@pytest.mark.parametrize("norm", NORMS)
def test_dense_jacobians_and_their_eigenvalues_are_those_by_reverse_mode(norm):
    run = solution(norm=norm, mask=MASK)
    dense, λ = dense_jacobians(run), spectrum(run, None).eigenvalues
    for layer, row in product(range(2), range(2)):
        j, block = jacrev_of(run, layer, row), dense[layer, row]
        n = len(j)
        assert (block[:n, :n] - j).abs().max() < 1e-10
        assert block.count_nonzero() == block[:n, :n].count_nonzero()  # padding moves nothing and is not moved
        values = λ[layer, row]
        assert apart(values[~values.isnan()], torch.linalg.eigvals(j)) < 1e-6
        assert values.isnan().sum() == N * N - n


@pytest.mark.parametrize(("norm", "mask"), [("pre", None), ("pre", MASK), ("post", MASK)])
def test_what_products_alone_give_is_that_of_the_dense_jacobian(norm, mask):
    run = solution(norm=norm, mask=mask)
    norms, logs, few, radius = spectral_norm(run), log_norm_interval(run), spectrum(run, 4), spectral_radius(run)
    for layer, row in product(range(2), range(2)):
        j = jacrev_of(run, layer, row)
        size = torch.linalg.eigvals(j).abs().sort(descending=True).values
        assert (few.eigenvalues[layer, row].abs() - size[:4]).abs().max() < 1e-6
        assert abs(radius[layer, row] - size[0]) < 1e-6
        assert abs(norms[layer, row] - torch.linalg.matrix_norm(j, 2)) < 1e-6
        ends = torch.linalg.eigvalsh((j + j.T) / 2)[[0, -1]]
        assert (logs[layer, row] - ends).abs().max() < 1e-6


def test_columns_one_by_one_are_those_that_go_together():
    run = solution(mask=MASK)
    assert (dense_jacobians(run, vectorize=False) - dense_jacobians(run)).abs().max() < 1e-14
    tight = 3 * 2 * (N * N) ** 2 * 8  # leaves room for few tangents at a time
    assert (dense_jacobians(run, max_bytes=2 * tight) - dense_jacobians(run)).abs().max() < 1e-14


@pytest.mark.parametrize("attention", ["softmax", "local_mixture", "relative", "window"])
def test_products_are_those_of_finite_differences(attention):
    run = solution(Decoder, DecoderConfig, attention=attention)
    site = Trajectory.of(run).sites()[1]
    jacobian = Jacobian(site)
    v, w = (torch.randn_like(site.z) for _ in range(2))
    step = 1e-6
    with torch.no_grad():
        difference = (site.f(site.z + step * v, site.l) - site.f(site.z - step * v, site.l)) / (2 * step)
    assert (jacobian.jvp(v) - difference).abs().max() < 1e-7
    assert (jacobian.jvp(v) - torch.func.jvp(lambda z: site.f(z, site.l), (site.z,), (v,))[1]).abs().max() < 1e-12
    jacobian.forget()
    assert (jacobian.jvp(v) - difference).abs().max() < 1e-7
    assert abs((w * jacobian.jvp(v)).sum() - (jacobian.vjp(w) * v).sum()) < 1e-10


def test_float32_is_the_same_up_to_its_rounding():
    fine, coarse = solution(), solution(dtype=torch.float32)
    assert dense_jacobians(coarse).dtype == torch.float32
    for number in (spectral_norm, log_norm, spectral_radius):
        assert (number(fine) - number(coarse)).abs().max() < 2e-3, number


def test_a_part_of_the_field_can_be_looked_at_by_itself():
    run = solution()
    both = dense_jacobians(run)
    assert (dense_jacobians(run, part=0) + dense_jacobians(run, part=1) - both).abs().max() < 1e-12
    with pytest.raises(ValueError, match="below the number of parts"):
        spectrum(run, part=2)


def test_layers_of_torch_with_their_fused_attention_can_be_looked_at():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).double().eval()
    for p in layer.parameters():
        p.requires_grad_(False)  # takes torch's fast path, which has no forward mode
    z = torch.randn(2, 2, 4, 8, dtype=torch.float64)
    run = Trajectory(lambda z, l: layer(z) - z, z, [0, 1])
    with torch.no_grad():
        dense = dense_jacobians(run)[0]
    exact = torch.func.jacrev(lambda x: (layer(x[None]) - x[None])[0], chunk_size=1)(z[0, 1]).reshape(32, 32)
    assert (dense[1] - exact).abs().max() < 1e-10
    assert torch.backends.mha.get_fastpath_enabled()


# closed forms

def test_a_linear_field_has_its_matrix_s_spectrum():
    run = linear([[0.0, 3.0, 0.0], [-3.0, 0.0, 0.0], [0.0, 0.0, -0.5]], batch=2)
    found = spectrum(run, None)
    for row in range(2):
        assert apart(found.eigenvalues[0, row], [3j, -3j, -0.5]) < 1e-12
    assert found.whole and found.steps == (1.0,)
    assert torch.allclose(spectral_radius(run), torch.tensor(3.0, dtype=torch.float64))
    assert torch.allclose(spectral_norm(run), torch.tensor(3.0, dtype=torch.float64))
    assert log_norm(run).abs().max() < 1e-12  # a rotation beside a decay: nothing grows
    assert torch.allclose(lipschitz(run), torch.tensor(3.0, dtype=torch.float64))
    assert (secant_lipschitz(run) <= 3 + 1e-12).all()


def test_the_numerical_range_of_a_jordan_block_is_the_disc_of_radius_one_half():
    found = numerical_range(linear([[0.0, 1.0], [0.0, 0.0]]), 16)
    assert (found.points.abs() - 0.5).abs().max() < 1e-9
    assert (found.points[0, 0] - 0.5 * torch.exp(1j * found.angles)).abs().max() < 1e-7
    assert (found.support - 0.5).abs().max() < 1e-9
    assert abs(found.radius.item() - 0.5) < 1e-9


def test_the_numerical_range_of_a_normal_matrix_is_the_hull_of_its_eigenvalues():
    a = torch.block_diag(torch.tensor([[-1.0, 2.0], [-2.0, -1.0]]), torch.tensor([[1.0]]), torch.tensor([[-4.0]]))
    q, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    corners = torch.tensor([-1 + 2j, -1 - 2j, 1, -4], dtype=torch.complex128)
    found = numerical_range(linear(q @ a.double() @ q.T), 20)
    wanted = torch.stack([(torch.exp(-1j * angle) * corners).real.max() for angle in found.angles])
    assert (found.support[0, 0] - wanted).abs().max() < 1e-9
    inside = (torch.exp(-1j * found.angles[:, None]) * found.points[0, 0][None]).real
    assert (inside <= wanted[:, None] + 1e-9).all()
    assert (inside.diagonal() - wanted).abs().max() < 1e-9


def test_the_numerical_range_of_a_model_holds_its_eigenvalues_and_the_logarithmic_norm():
    run = solution(mask=MASK)
    found, λ = numerical_range(run, 6), spectrum(run, None).eigenvalues
    turned = torch.exp(-1j * found.angles).view(-1, 1) * λ.unsqueeze(-2)
    assert (turned.real.nan_to_num(-torch.inf) <= found.support.unsqueeze(-1) + 1e-7).all()
    assert (found.support[..., 0] - log_norm(run)).abs().max() < 1e-6


def test_post_norm_decays_at_minus_one_and_else_at_one_over_the_deviation_minus_one():
    """f = LN(z) - z ([AN], eq. 13 with F = 0): LN sees neither the mean nor the size of a token."""
    d = 6
    z = torch.randn(2, 1, 1, d, dtype=torch.float64)
    run = Trajectory(lambda z, l: torch.nn.functional.layer_norm(z, (d,), eps=0.0) - z, z, [0, 1])
    found = spectrum(run, None).eigenvalues[0, 0]
    other = 1 / z[0, 0, 0].std(unbiased=False) - 1
    wanted = torch.cat([-torch.ones(2, dtype=torch.float64), other.expand(d - 2)])
    assert (found.real.sort().values - wanted.sort().values).abs().max() < 1e-6
    jacobian = Jacobian(run.sites()[0])
    assert (jacobian.jvp(z[0]) + z[0]).abs().max() < 1e-12


def test_eq_13_post_norm_models_have_the_eigenvalue_minus_one_for_every_token():
    run = solution(norm="post", norm_options={"eps": 1e-14})
    λ = spectrum(run, None, part=1).eigenvalues  # one norm: it takes two of d_model dimensions from each token
    assert ((λ + 1).abs() < 1e-5).sum(-1).eq(2 * N).all()


def test_non_normality_is_zero_for_rotations_and_that_of_its_definition_for_a_jordan_block():
    assert non_normality(linear([[0.3, 2.0], [-2.0, 0.3]])).max() < 1e-12
    jordan = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    assert abs(non_normality(linear(jordan), 500).item() - math.sqrt(2)) < 0.2
    assert abs(departure_from_normality(jordan).item() - 1) < 1e-12  # |A|_F = 1, no eigenvalues
    a = torch.triu(torch.randn(5, 5, dtype=torch.float64))
    assert abs(departure_from_normality(a) - torch.triu(a, 1).norm()) < 1e-9


def test_a_field_that_does_not_depend_on_the_state_has_the_jacobian_zero():
    run = Trajectory(lambda z, l: torch.ones_like(z), torch.randn(2, 2, 1, 3, dtype=torch.float64), [0, 1])
    assert spectral_norm(run).abs().max() == 0 and spectral_radius(run).abs().max() == 0
    assert dense_jacobians(run).abs().max() == 0


# stability

def test_euler_holds_what_is_within_the_disc_around_minus_one():
    found = stability(diagonal([-0.5, -1.9, -2.1, 0.3], h=1.0), "euler", None)
    assert found.share.item() == 0.5
    assert abs(found.decaying_share.item() - 2 / 3) < 1e-12
    assert abs(found.largest_step.item() - 2 / 2.1) < 1e-9
    assert stability(diagonal([-0.5, -1.9, -2.1], h=0.5), "euler", None).share.item() == 1


def test_h_lambda_is_held_against_each_solver_s_own_region():
    rotation = linear([[0.0, 2.0], [-2.0, 0.0]])
    assert stability(rotation, "euler").share.item() == 0
    assert stability(rotation, "rk4").share.item() == 1  # up to 2.83 on the imaginary axis
    assert stability(rotation, "rk4").decaying_share.isnan().all()  # nothing decays
    assert stability(diagonal([-1e6]), "implicit_midpoint").largest_step.item() == math.inf
    assert abs(stability(diagonal([-2.0]), "ab2").largest_step.item() - 0.5) < 1e-6  # its interval is [-1, 0]


def test_the_stiffness_ratio_is_that_of_the_slowest_and_the_fastest_decay():
    run = diagonal([-1000.0, -10.0, -0.5, 3.0], steps=2)
    assert torch.allclose(stiffness_ratio(run, at="steps"), torch.tensor(2000.0, dtype=torch.float64))
    assert stiffness_index(run, at="steps").flatten().tolist() == pytest.approx([2000, 1000])
    fine = diagonal([-50.0, -1.0], steps=4)  # over the same depth, looked at where one says
    end = fine.depths[-1]
    for at, places in (([0.0], [0.0]), ("steps", fine.depths[:-1])):
        assert stiffness_index(fine, at=at).flatten().tolist() == pytest.approx([50 * (end - l) for l in places])
    assert stiffness_ratio(linear([[0.0, 1.0], [-1.0, 0.0]])).isnan().all()


def test_what_would_not_fit_is_refused_with_the_number_of_bytes():
    run = solution()
    needed = 3 * 2 * 16 * 16 * 8
    with pytest.raises(ValueError, match=f"{needed:,} bytes.*leading eigenvalues.*max_bytes={needed}"):
        spectrum(run, None, max_bytes=needed - 1)
    spectrum(run, None, max_bytes=needed)
    with pytest.raises(ValueError, match=r"bytes.*krylov"):
        spectral_norm(run, max_bytes=1000)


def test_padding_that_moves_is_no_part_of_the_jacobian():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    mixing = torch.tensor([[-1.0, 0.5, 0.0], [0.25, -2.0, 4.0], [3.0, -3.0, -5.0]], dtype=torch.float64)
    z = torch.randn(2, 2, 3, 2, dtype=torch.float64)
    run = Trajectory(lambda z, l: torch.einsum("ij,bjd->bid", mixing, z), z, [0, 1], mask)
    assert (Jacobian(run.sites()[0], mask).jvp(torch.ones_like(z[0]))[1, 1:] == 0).all()
    wanted = torch.stack([torch.linalg.matrix_norm(mixing, 2), torch.ones(())])
    assert (spectral_norm(run)[0] - wanted).abs().max() < 1e-9
    right = spectrum(run, 4, which="right").eigenvalues[0, 1]  # the second row: -1 twice, and no zeros of padding
    assert (right[:2] + 1).abs().max() < 1e-12 and right[2:].isnan().all()
    assert (log_norm(run)[0, 1] + 1).abs() < 1e-12
