"""What a trajectory is; steps, tokens, gradients, attention, weights and limits against plain formulas."""

import math

import pytest
import torch
from torch import nn

from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.attention import ATTENTION
from odeformer.diagnostics import (
    Trajectory,
    attention_entropies,
    attention_maps,
    check_weights,
    curvatures,
    depth_scaling,
    effective_rank,
    effective_ranks,
    effective_steps,
    gradient_norms,
    increment_scaling,
    layer_weights,
    path_ratio,
    solver_invariance,
    token_cosines,
    update_cosines,
    weight_smoothness,
)
from odeformer.smooth_weights import SMOOTH

LENGTH = 5
MASK = torch.arange(LENGTH) < torch.tensor([[LENGTH], [3]])


def make(kind=Encoder, config=EncoderConfig, *, n_layers=3, block=(), **depth):
    torch.manual_seed(0)
    return kind(config(vocab_size=11, max_seq_len=LENGTH, n_layers=n_layers, block=BlockConfig(8, 2, **dict(block)),
                       depth=DepthConfig(**depth))).double().eval()


def solution(model, mask=None, **options):
    torch.manual_seed(1)
    return model(torch.randint(11, (2, LENGTH)), mask, return_solution=True, **options)[1]


def along(states, f=lambda z, l: -z, mask=None):
    """A trajectory through states (points, d_model) of one token, or (points, batch, tokens, d_model)."""
    states = torch.as_tensor(states, dtype=torch.float64)
    states = states[:, None, None] if states.dim() == 2 else states
    return Trajectory(f, states, list(range(len(states))), mask)


# trajectories

def test_a_solution_without_states_says_how_to_have_them():
    with pytest.raises(ValueError, match=r"holds no states.*save_states=False"):
        effective_steps(solution(make(), save_states=False))


def test_what_is_no_solution_is_named():
    with pytest.raises(TypeError, match="Solution or a Trajectory, got Tensor"):
        token_cosines(torch.zeros(3))


@pytest.mark.parametrize(("change", "words"), [
    ({"states": torch.zeros(3, 2, 5)}, r"shape \(points, batch, tokens, d_model\)"),
    ({"states": torch.zeros(3, 1, 2, 4).bfloat16()}, "float32 or float64, got torch.bfloat16"),
    ({"depths": [0, 1]}, "same number of points"), ({"depths": [0, 2, 1]}, "must increase"),
    ({"mask": torch.ones(1, 3, dtype=torch.bool)}, r"\(batch, tokens\) = \(1, 2\)"),
    ({"states": torch.full((3, 1, 2, 4), math.nan)}, "finite"), ({"states": torch.ones(1, 1, 2, 4), "depths": [0]},
                                                                 "at least 2")])
def test_what_does_not_fit_together_is_refused(change, words):
    given = {"f": lambda z, l: z, "states": torch.ones(3, 1, 2, 4), "depths": [0, 1, 2]}
    with pytest.raises(ValueError, match=words):
        Trajectory(**given | change)


def test_padding_may_hold_nan_but_real_tokens_may_not():
    states = torch.randn(3, 2, LENGTH, 4, dtype=torch.float64)
    states[:, 1, 3:] = math.nan
    for number in (token_cosines, effective_ranks):
        plain = number(along(states[:, 1:, :3]))
        assert (number(along(states, mask=MASK))[:, 1:] - plain).abs().max() < 1e-12
    with pytest.raises(ValueError, match="finite"):
        along(states)


@pytest.mark.parametrize("weights", ["piecewise", "shared", "linear"])
def test_weights_that_are_not_finite_are_named(weights):
    model = make(weights=weights)
    run = solution(model)
    name = next(name for name, _ in model.layers.named_parameters() if name.endswith("core.value.weight"))
    with torch.no_grad():
        model.layers.get_parameter(name)[0, 0] = math.nan
    with pytest.raises(ValueError, match=rf"not: layers.{name}"):
        check_weights(model)
    if weights != "linear":  # whose field holds what weights were made of, elsewhere
        with pytest.raises(ValueError, match=r"layer 0, SoftmaxAttention: core.value.weight|core.value.weight"):
            effective_steps(run)


def test_sites_are_layers_steps_or_given_depths():
    run = Trajectory.of(solution(make(steps_per_layer=2)))
    assert [float(site.l) for site in run.sites()] == [0, 1, 2]
    assert [float(site.l) for site in run.sites("steps")] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert [float(site.l) for site in run.sites([0.5, 2])] == [0.5, 2]
    assert {site.h for site in run.sites("steps")} == {0.5}
    with pytest.raises(ValueError, match="at must be depths of states"):
        run.sites([0.7])
    with pytest.raises(ValueError, match="at must be 'layers'"):
        run.sites("middle")


# steps

def test_effective_steps_are_those_of_each_sublayer_by_hand():
    model = make()
    run = solution(model, MASK)
    found = effective_steps(run)
    assert found.shape == (3, 2, 2, LENGTH)
    for i, block in enumerate(model.layers):
        z = run.states[i]
        a, b = block.attention, block.feedforward
        for part, k in enumerate((a.core(a.placement.norm(z), mask=MASK), b.core(b.placement.norm(z)))):
            wanted = (k.norm(dim=-1) / z.norm(dim=-1))[MASK]
            assert (found[i, part][MASK] - wanted).abs().max() < 1e-12
    assert found[:, :, ~MASK].isnan().all()


def test_a_circle_has_its_curvature_and_its_turning_angle():
    radius, angle = 3.0, 0.3
    turns = angle * torch.arange(6, dtype=torch.float64)
    run = along(torch.stack([radius * turns.cos(), radius * turns.sin()], -1))
    assert (curvatures(run) - 1 / radius).abs().max() < 1e-12
    assert (update_cosines(run) - math.cos(angle)).abs().max() < 1e-12
    chord, ends = 2 * radius * math.sin(angle / 2), 2 * radius * math.sin(5 * angle / 2)
    assert abs(path_ratio(run).item() - 5 * chord / ends) < 1e-12


def test_a_straight_line_is_not_bent_and_a_way_back_is():
    line = along(torch.outer(torch.tensor([0.0, 1.0, 3.0, 4.0]), torch.randn(5)))
    assert curvatures(line).abs().max() < 1e-6
    assert (update_cosines(line) - 1).abs().max() < 1e-6
    assert (path_ratio(line) - 1).abs().max() < 1e-6
    zigzag = along([[0.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
    assert update_cosines(zigzag).item() == -1


def test_one_step_is_too_few_to_compare_updates():
    for number in (update_cosines, curvatures):
        with pytest.raises(ValueError, match="two steps are needed"):
            number(solution(make(n_layers=1)))


# tokens

def test_token_cosines_are_the_mean_over_pairs():
    z = torch.randn(2, 2, LENGTH, 6, dtype=torch.float64)
    found = token_cosines(along(z, mask=MASK))
    for point in range(2):
        for row, n in enumerate((5, 3)):
            pairs = [torch.cosine_similarity(z[point, row, i], z[point, row, j], dim=0)
                     for i in range(n) for j in range(n) if i != j]
            assert abs(found[point, row] - torch.stack(pairs).mean()) < 1e-12
    same = torch.randn(2, 1, 1, 6, dtype=torch.float64).expand(-1, -1, 4, -1)
    assert (token_cosines(along(same)) - 1).abs().max() < 1e-12


def test_effective_ranks_count_equal_directions():
    assert abs(effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])).item() - 3) < 1e-6
    z = torch.eye(5, dtype=torch.float64).expand(2, 2, -1, -1)
    assert (effective_ranks(along(z, mask=MASK)) - torch.tensor([5.0, 3.0])).abs().max() < 1e-12
    one = torch.outer(torch.arange(1.0, 6), torch.randn(7)).expand(2, 1, -1, -1)
    assert (effective_ranks(along(one)) - 1).abs().max() < 1e-5
    shifted = one + 100
    assert (effective_ranks(along(shifted), centred=True) - 1).abs().max() < 1e-4


# gradients

@pytest.mark.parametrize("norm", ["pre", "post"])
def test_eqs_15_16_gradient_norms_are_those_of_autograd_by_hand(norm):
    model = make(block={"norm": norm})
    run = solution(model, MASK)
    weight = torch.randn(2, LENGTH, 8, dtype=torch.float64) * MASK.unsqueeze(-1)
    states = [run.states[0].detach().requires_grad_()]
    for block in model.layers:
        z = states[-1]
        for sub in (block.attention, block.feedforward):
            core, norm_of = sub.core, sub.placement.norm
            seen = {"mask": MASK} if sub is block.attention else {}
            z = z + core(norm_of(z), **seen) if norm == "pre" else norm_of(core(z, **seen) + z)
            z = z.masked_fill(~MASK.unsqueeze(-1), 0)
        states.append(z)
    wanted = torch.autograd.grad((states[-1].sin() * weight).sum(), states)
    found = gradient_norms(run, lambda z: (z.sin() * weight).sum(), model.solver)
    assert found.depths == (0, 1, 2, 3)
    for got, g in zip(found.norms, wanted, strict=True):
        assert (got - g.norm(dim=-1))[MASK].abs().max() < 1e-10
    assert found.norms[:, ~MASK].isnan().all()
    assert abs(found.rows[0, 1] - wanted[0][1, :3].norm()) < 1e-10


def test_gradients_of_a_linear_flow_are_powers_of_the_step():
    """z' = λ z by Euler: each step of h multiplies the gradient by 1 + h λ."""
    states = torch.ones(4, 1, 1, 2, dtype=torch.float64)
    run = Trajectory(lambda z, l: -0.3 * z, states, [0, 1, 2, 3])
    found = gradient_norms(run, lambda z: z[..., 0].sum())
    assert torch.allclose(found.norms.flatten(), torch.tensor([0.7**3, 0.7**2, 0.7, 1.0], dtype=torch.float64))


def test_gradients_at_steps_agree_with_those_at_layers():
    model = make(steps_per_layer=2, solver="rk4")
    run = solution(model)
    layers, steps = (gradient_norms(run, lambda z: z.square().sum(), model.solver, at=at) for at in ("layers", "steps"))
    assert (steps.norms[::2] - layers.norms).abs().max() < 1e-10 * layers.norms.max()


@pytest.mark.parametrize(("loss", "error"), [(lambda z: z.sum(-1), ValueError), (lambda z: 3.0, TypeError)])
def test_a_loss_that_is_no_number_is_refused(loss, error):
    with pytest.raises(error, match="loss must give"):
        gradient_norms(solution(make()), loss)


def test_adaptive_solvers_are_refused_where_fixed_steps_are_needed():
    with pytest.raises(ValueError, match="chooses its own steps"):
        gradient_norms(solution(make()), lambda z: z.sum(), "dopri5")


# attention

@pytest.mark.parametrize("name", [name for name, cls in ATTENTION.items() if not getattr(cls, "for_memory", False)])
def test_attention_maps_are_those_of_the_module_at_the_layer_s_state(name):
    model = make(block={"attention": name})
    run = solution(model, MASK)
    for i, (block, maps) in enumerate(zip(model.layers, attention_maps(run), strict=True)):
        attention = block.attention
        wanted = attention.core.probabilities(attention.placement.norm(run.states[i]), mask=MASK)
        assert len(maps) == 1 and (maps[0] - wanted).abs().max() < 1e-12
    entropies = attention_entropies(run)
    assert entropies.shape == (3, 1, 2, 2, LENGTH)
    assert entropies[..., 1, :, 3:].isnan().all()
    assert (entropies[..., 1, :, :3] <= math.log(3) + 1e-12).all()


@pytest.mark.parametrize("weights", [name for name in SMOOTH if name not in ("hyper",)])
def test_attention_of_weights_that_are_functions_of_depth_is_found(weights):
    assert attention_entropies(solution(make(weights=weights))).isfinite().all()


def test_even_attention_has_the_entropy_of_the_number_of_keys():
    model = make(Decoder, DecoderConfig)
    for block in model.layers:
        nn.init.zeros_(block.attention.core.query.weight)
        nn.init.zeros_(block.attention.core.query.bias)
    run = solution(model)
    wanted = torch.log(torch.arange(1.0, LENGTH + 1, dtype=torch.float64))  # causal: query i sees i + 1 keys
    assert (attention_entropies(run) - wanted).abs().max() < 1e-12
    relative = attention_entropies(run, relative=True)
    assert (relative[..., 1:] - 1).abs().max() < 1e-12 and relative[..., 0].isnan().all()


def test_attention_of_layers_of_torch_is_found():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).double().eval()
    z = torch.randn(2, 2, 4, 8, dtype=torch.float64)
    (maps,) = attention_maps(Trajectory(lambda z, l: layer(z) - z, z, [0, 1]))
    x = layer.norm1(z[0])
    _, wanted = layer.self_attn(x, x, x, average_attn_weights=False)
    assert len(maps) == 1 and (maps[0] - wanted).abs().max() < 1e-12


def test_a_field_without_attention_says_so():
    with pytest.raises(ValueError, match="no attention"):
        attention_entropies(along(torch.ones(2, 3)))


# weights and limits

def test_weight_smoothness_is_that_of_its_formula():
    layers = [nn.Linear(2, 2) for _ in range(3)]
    with torch.no_grad():
        for layer, scale in zip(layers, (1.0, 2.0, -2.0), strict=True):
            layer.weight.copy_(scale * torch.eye(2))
    found = weight_smoothness(layers)
    assert list(found.changes) == ["weight"]
    assert found.changes["weight"].tolist() == pytest.approx([1 / 1.5, 2])
    assert found.cosines["weight"].tolist() == pytest.approx([1, -1])
    assert found.mean.tolist() == pytest.approx([1 / 1.5, 2])
    assert set(weight_smoothness(layers, matrices_only=False).changes) == {"weight", "bias"}


def test_shared_weights_do_not_change_and_smooth_ones_are_read_in_the_middle_of_layers():
    shared = weight_smoothness(make(weights="shared"))
    assert all(x.abs().max() == 0 for x in shared.changes.values())
    model = make(weights="linear")
    with torch.no_grad():
        for p in model.layers.parameters():
            p.add_(torch.randn_like(p))
    name = "attention.core.query.weight"
    for i, row in enumerate(layer_weights(model)):
        wanted = model.layers.theta(torch.tensor(i + 0.5, dtype=torch.float64))[name]
        assert (row[name] - wanted).abs().max() < 1e-12


def test_one_layer_is_too_few_to_compare_weights():
    with pytest.raises(ValueError, match="two layers are needed"):
        weight_smoothness(make(n_layers=1))


@pytest.mark.parametrize(("kind", "exponent"), [("ode", 1.0), ("sde", 0.5), ("neither", 0.0)])
def test_smooth_brownian_and_independent_paths_are_told_apart(kind, exponent):
    torch.manual_seed(0)
    noise = torch.randn(64, 200, dtype=torch.float64)
    t = torch.linspace(0, 1, 64, dtype=torch.float64).unsqueeze(1)
    path = {"ode": torch.sin(t + torch.arange(20)), "sde": noise.cumsum(0), "neither": noise}[kind]
    found = increment_scaling(path)
    assert found.limit == kind
    assert abs(found.exponent - exponent) < 0.1
    if kind == "sde":
        assert torch.allclose(found.mean_squares, 200.0 * torch.tensor(found.lags, dtype=torch.float64), rtol=0.15)


def test_a_path_that_stands_still_is_constant():
    assert increment_scaling(torch.ones(8, 3)).limit == "constant"
    with pytest.raises(ValueError, match="at least 4 points"):
        increment_scaling(torch.ones(3, 3))


@pytest.mark.parametrize(("kind", "variation", "largest"), [("ode", -1.0, -1.0), ("sde", 0.0, -0.5),
                                                           ("neither", 1.0, 0.0)])
def test_scaling_of_increments_with_depth_tells_the_limits_of_cohen_et_al_2021_apart(kind, variation, largest):
    torch.manual_seed(0)
    paths = {}
    for n in (16, 32, 64, 128):
        noise, t = torch.randn(n + 1, 400, dtype=torch.float64), torch.linspace(0, 1, n + 1, dtype=torch.float64)
        paths[n] = {"ode": torch.stack([t.sin(), t.exp()], 1), "sde": noise.cumsum(0) / math.sqrt(n),
                    "neither": noise}[kind]
    found = depth_scaling(paths)
    assert found.limit == kind
    assert abs(found.variation_exponent - variation) < 0.1
    assert abs(found.largest_exponent - largest) < 0.1
    with pytest.raises(ValueError, match="at least two n_layers"):
        depth_scaling({16: paths[16]})


def test_a_model_that_does_not_move_is_the_same_under_all_solvers():
    model = make(Decoder, DecoderConfig)
    run = solution(model)
    assert solver_invariance(run, model.read_out).score < 0.99
    for name, p in model.layers.named_parameters():
        if ".output." in name:
            nn.init.zeros_(p)
    still = solver_invariance(run, model.read_out)
    assert still.score == 1 and still.agreement["euler"] == 1
