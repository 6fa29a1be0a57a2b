"""Normalisation placements: one Euler step is the textbook formula, and the models made of them are torch.nn's."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import odeformer
import solvers
from benchmarks.norm_gradients import gradient_norms
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.norms import NORMS, WeightedNorm, make_norm

D, VOCAB, LENGTH = 8, 13, 7
NORMED = [name for name in NORMS if name not in ("rezero", "none")]  # which have a norm, and so kind and eps
WEIGHTINGS = [{"beta": b, "gamma": g, "mode": mode} for b, g in [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]
              for mode in ("fixed", "learned", "predicted")]


def state():
    return torch.randn(3, 5, D, dtype=torch.float64)


def core():
    """A nonlinear F."""
    a, b = (torch.randn(D, D, dtype=torch.float64) for _ in range(2))
    return lambda x: torch.tanh(x @ a) @ b


def placement(name, **options):
    """In float64, with parameters away from where they start."""
    made = NORMS[name](D, **options).double()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return made


def norm(module, x):
    """What a norm module does, by torch.nn.functional."""
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, (D,), module.weight, module.eps)
    return F.layer_norm(x, (D,), module.weight, module.bias, module.eps)


def weighted(p, z, f):
    beta, gamma = p.factors.beta, p.factors.gamma
    return norm(p.norm, f(z) + beta * z) + gamma * z


# the sublayer z^{l-1} -> z^l that each placement is, and by how much its Euler step may miss it
TEXTBOOK = {
    "pre": ({}, lambda p, z, f: f(norm(p.norm, z)) + z, 0),
    "post": ({}, lambda p, z, f: norm(p.norm, f(z) + z), 1e-12),
    "res": ({}, lambda p, z, f: norm(p.norm, f(z)) + z, 0),
    "weighted": ({"beta": 0.7, "gamma": 0.4}, weighted, 1e-12),
    "deepnorm": ({"n_layers": 12}, lambda p, z, f: norm(p.norm, 24**0.25 * z + f(z)), 1e-12),
    "rezero": ({}, lambda p, z, f: z + p.alpha * f(z), 0),
    "layerscale": ({}, lambda p, z, f: z + p.scale * f(norm(p.norm, z)), 0),
    "sandwich": ({}, lambda p, z, f: z + norm(p.output_norm, f(norm(p.norm, z))), 0),
    "none": ({}, lambda p, z, f: z + f(z), 0),
    "completep": ({"n_layers": 6, "base_layers": 2}, lambda p, z, f: z + f(norm(p.norm, z)) / 3, 1e-15),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_eqs_13_14_17_31_38_an_euler_step_with_h_1_is_the_textbook_sublayer(name, kind):
    """Exactly where the formula ends in + z; where it does not, z + (... - z) rounds, and 1e-12 is held."""
    options, textbook, tolerance = TEXTBOOK[name]
    options = options | ({"kind": kind} if name in NORMED else {})
    p, f, z = placement(name, **options), core(), 3 * state()
    got = solvers.solve(lambda z, l: p(z, f), z, solver="euler", n_steps=1).z
    wanted = textbook(p, z, f)
    assert (got - wanted).abs().max() <= tolerance
    assert (got - z).abs().max() > 1e-3


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_an_layer_norm_is_gamma_times_y_minus_mu_over_sqrt_sigma2_plus_eps_plus_beta(eps):
    y, made = state(), make_norm(D, "layer", eps).double()
    assert torch.equal(made.weight, torch.ones_like(made.weight)) and not made.bias.any()
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    got = made(y)
    for row, out in zip(y.reshape(-1, D).tolist(), got.reshape(-1, D).tolist(), strict=True):
        mu = sum(row) / D
        sigma2 = sum((x - mu) ** 2 for x in row) / D
        for j in range(D):
            wanted = made.weight[j].item() * (row[j] - mu) / math.sqrt(sigma2 + eps) + made.bias[j].item()
            assert abs(out[j] - wanted) < 1e-13


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_an_rms_norm_divides_by_the_root_of_the_mean_square_and_shifts_nothing(eps):
    y, made = state(), make_norm(D, "rms", eps).double()
    nn.init.normal_(made.weight)
    got = made(y)
    for row, out in zip(y.reshape(-1, D).tolist(), got.reshape(-1, D).tolist(), strict=True):
        rms = math.sqrt(sum(x * x for x in row) / D + eps)
        for j in range(D):
            assert abs(out[j] - made.weight[j].item() * row[j] / rms) < 1e-13


@pytest.mark.parametrize("mode", ["fixed", "learned", "predicted"])
@pytest.mark.parametrize(("beta", "gamma", "same"), [(1.0, 0.0, "post"), (0.0, 1.0, "res")])
def test_eq_17_is_bit_for_bit_post_norm_at_1_0_and_res_norm_at_0_1(beta, gamma, same, mode):
    other, f, z = placement(same), core(), 3 * state()
    p = NORMS["weighted"](D, beta=beta, gamma=gamma, mode=mode).double()
    p.norm.load_state_dict(other.norm.state_dict())
    assert torch.equal(p(z, f), other(z, f))
    assert torch.equal(NORMS["weighted"](D).double()(z, f), NORMS["post"](D).double()(z, f))  # the defaults are (1, 0)


def test_eq_17_learned_weights_are_two_parameters_with_the_gradients_of_the_formula():
    p, f, z = NORMS["weighted"](D, beta=0.7, gamma=0.4, mode="learned").double(), core(), state()
    start = torch.tensor([0.7, 0.4], dtype=torch.float64)
    torch.nn.init.constant_(p.factors.start[0:1], 0.7)  # exactly, where float32 had rounded it
    torch.nn.init.constant_(p.factors.start[1:2], 0.4)
    weight = torch.randn_like(z)
    (p(z, f) * weight).sum().backward()
    beta, gamma = (x.clone().requires_grad_() for x in start)
    wanted = F.layer_norm(f(z) + beta * z, (D,)) + (gamma - 1) * z
    (wanted * weight).sum().backward()
    assert (p.factors.start.grad - torch.stack([beta.grad, gamma.grad])).abs().max() < 1e-12
    assert p.factors.start.grad.abs().min() > 1e-3


def test_eq_17_predicted_weights_are_a_function_of_each_token_that_starts_at_the_given_values():
    p, f, z = NORMS["weighted"](D, beta=0.5, gamma=0.25, mode="predicted").double(), core(), state()
    beta, gamma = p.factors(z)
    assert torch.equal(beta, torch.full_like(beta, 0.5)) and torch.equal(gamma, torch.full_like(gamma, 0.25))
    p(z, f).square().sum().backward()
    assert p.factors.weight.grad.abs().max() > 1e-3  # it leaves that start
    nn.init.normal_(p.factors.weight)
    got = p(z, f)
    w = p.factors.weight.detach()
    for i in range(3):
        for t in range(5):
            x = z[i, t]
            unit = x / (x.square().mean() + 1e-6).sqrt()
            beta, gamma = 0.5 + torch.tanh(w[0] @ unit), 0.25 + torch.tanh(w[1] @ unit)
            wanted = F.layer_norm(f(x) + beta * x, (D,)) + (gamma - 1) * x
            assert (got[i, t] - wanted).abs().max() < 1e-12
    assert p.factors(z)[0].std() > 0.1


@pytest.mark.parametrize("name", NORMS)
def test_identity_at_zero_says_whether_a_silent_core_gives_no_increment(name):
    z = 3 * state()
    variants = [{}] if name != "weighted" else WEIGHTINGS
    for options in variants:
        p = NORMS[name](D, **options).double()
        k = p(z, torch.zeros_like)
        assert (k.abs().max() == 0) == p.identity_at_zero, options


@pytest.mark.parametrize("name", NORMS)
def test_a_model_ends_with_a_norm_where_the_state_leaves_the_layers_without_one(name):
    model = tiny(block={"norm": name, "norm_options": {"kind": "rms"} if name in NORMED else {}})
    assert isinstance(model.final_norm, nn.RMSNorm if NORMS[name](D).final else nn.Identity)
    if name in NORMED:
        states = model(tokens())
        assert (states.square().mean(-1) - 1).abs().max() < 1e-3  # either way they come out normed


def test_eq_17_without_a_share_of_z_outside_the_norm_needs_no_norm_at_the_end():
    assert not WeightedNorm(D).final and not WeightedNorm(D, beta=0.3, gamma=0).final
    assert WeightedNorm(D, gamma=0.1).final and WeightedNorm(D, mode="learned").final


# --- gradients through depth ---


def layer_norm_jacobian(v):
    """∂LN_i / ∂v_j = (δ_ij - 1/d - y_i y_j / d) / σ, y = LN(v)."""
    sigma = (v.var(unbiased=False) + 1e-5).sqrt()
    y = (v - v.mean()) / sigma
    return (torch.eye(D, dtype=v.dtype) - 1 / D - torch.outer(y, y) / D) / sigma


def test_eq_15_the_gradient_of_post_norm_is_a_product_over_layers_of_the_norms_and_the_sublayers():
    w = [0.4 * torch.randn(D, D, dtype=torch.float64) for _ in range(5)]
    p = NORMS["post"](D).double()
    z = start = torch.randn(D, dtype=torch.float64, requires_grad=True)
    visited = []
    for matrix in w:
        visited.append(z.detach())
        z = z + p(z, lambda x, m=matrix: x @ m)
    g = torch.randn(D, dtype=torch.float64)
    (got,) = torch.autograd.grad(z @ g, start)
    wanted = g
    for matrix, x in zip(reversed(w), reversed(visited), strict=True):
        wanted = (torch.eye(D) + matrix) @ (layer_norm_jacobian(x @ matrix + x) @ wanted)
    assert (got - wanted).abs().max() < 1e-12


def test_eq_16_the_gradient_of_pre_norm_is_that_at_the_top_plus_a_sum_over_layers():
    w = [0.4 * torch.randn(D, D, dtype=torch.float64) for _ in range(5)]
    p = NORMS["pre"](D).double()
    z = start = torch.randn(D, dtype=torch.float64, requires_grad=True)
    total = torch.zeros(D, D, dtype=torch.float64)  # Σ ∂F^k(LN(z^k)) / ∂z^l
    for matrix in w:
        reached = torch.eye(D) + total  # ∂z^k / ∂z^l
        total = total + matrix.T @ layer_norm_jacobian(z.detach()) @ reached
        z = z + p(z, lambda x, m=matrix: x @ m)
    g = torch.randn(D, dtype=torch.float64)
    (got,) = torch.autograd.grad(z @ g, start)
    assert (got - (g + total.T @ g)).abs().max() < 1e-12


# --- in models ---


def tiny(kind=Encoder, config=EncoderConfig, *, n_layers=2, block=(), **depth):
    return kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, depth=DepthConfig(**depth),
                       block=BlockConfig(D, 2, **dict(block)))).double().eval()


def tokens():
    return torch.randint(VOCAB, (2, LENGTH))


def copy_layer(theirs: nn.TransformerEncoderLayer, ours):
    attention, feedforward = ours.attention, ours.feedforward
    for i, part in enumerate((attention.core.query, attention.core.key, attention.core.value)):
        part.weight.data = theirs.self_attn.in_proj_weight.data.chunk(3)[i].clone()
        part.bias.data = theirs.self_attn.in_proj_bias.data.chunk(3)[i].clone()
    attention.core.output.load_state_dict(theirs.self_attn.out_proj.state_dict())
    feedforward.core.hidden.load_state_dict(theirs.linear1.state_dict())
    feedforward.core.output.load_state_dict(theirs.linear2.state_dict())
    attention.placement.norm.load_state_dict(theirs.norm1.state_dict())
    feedforward.placement.norm.load_state_dict(theirs.norm2.state_dict())


@pytest.mark.parametrize(("name", "options", "first"), [("pre", {}, True), ("post", {}, False),
                                                        ("weighted", {"beta": 1.0, "gamma": 0.0}, False),
                                                        ("deepnorm", {"alpha": 1.0}, False)])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_eqs_13_14_17_euler_and_lie_are_the_transformer_of_torch_nn_with_its_gradients(kind, name, options, first):
    config = DecoderConfig if kind is Decoder else EncoderConfig
    model = tiny(kind, config, n_layers=3, block={"norm": name, "norm_options": options, "feedforward": "relu"}).train()
    layers = [nn.TransformerEncoderLayer(D, 2, 4 * D, dropout=0.0, batch_first=True, norm_first=first,
                                         dtype=torch.float64) for _ in range(3)]
    for theirs, ours in zip(layers, model.layers, strict=True):
        for p in theirs.parameters():
            nn.init.normal_(p, std=0.5) if p.dim() > 1 else nn.init.uniform_(p, 0.5, 1.5)
        copy_layer(theirs, ours)
    z = model.embed(tokens()).detach().requires_grad_()
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64) if kind is Decoder else None
    wanted = z
    for layer in layers:
        wanted = layer(wanted, src_mask=causal, is_causal=kind is Decoder)
    got = model.evolve(z, None).z
    assert (got - wanted).abs().max() <= 1e-11 * wanted.abs().max()
    weight = torch.randn_like(got)
    theirs = torch.autograd.grad((wanted * weight).sum(), [z, layers[0].linear1.weight, layers[2].norm1.weight])
    blocks = model.layers
    ours = torch.autograd.grad((got * weight).sum(), [z, blocks[0].feedforward.core.hidden.weight,
                                                      blocks[2].attention.placement.norm.weight])
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).abs().max() <= 1e-10 * y.abs().max()


def test_options_that_scale_with_depth_are_filled_in_by_the_model():
    model = tiny(n_layers=8, block={"norm": "deepnorm"})
    assert model.layers[0].attention.placement.alpha == 2.0  # (2 * 8)^(1/4), Wang et al. 2022
    assert tiny(block={"norm": "deepnorm", "norm_options": {"alpha": 1.5}}).layers[0].feedforward.placement.alpha == 1.5
    assert tiny(n_layers=8, block={"norm": "completep"}).layers[3].attention.placement.scale == 1 / 8
    assert NORMS["completep"](D, n_layers=16, base_layers=4, alpha=0.5).scale == 0.5


@pytest.mark.parametrize(("n_layers", "start"), [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (36, 1e-6)])
def test_layerscale_starts_as_cait_does_by_depth(n_layers, start):
    """Touvron et al. 2021, section 2: 0.1 up to depth 18, 1e-5 for 24, 1e-6 for deeper networks."""
    scale = NORMS["layerscale"](D, n_layers=n_layers).scale
    assert scale.shape == (D,) and torch.equal(scale, torch.full((D,), start))
    assert torch.equal(NORMS["layerscale"](D, n_layers=n_layers, start=0.3).scale, torch.full((D,), 0.3))


def test_rezero_starts_as_the_identity_and_its_alpha_alone_gets_the_first_gradient():
    model = tiny(block={"norm": "rezero"})
    ids = tokens()
    z = model.embed(ids)
    assert torch.equal(model.evolve(z, None).z, z)
    model(ids).pow(3).sum().backward()
    assert all(layer.attention.placement.alpha.grad.abs() > 0 for layer in model.layers)
    assert not model.layers[0].attention.core.value.weight.grad.any()


def test_completep_is_pre_norm_with_depth_rescaled_to_1():
    """Dey et al. 2025: (1 / L) F(LN(z)) over L layers is F(LN(z)) over a depth of 1 in steps of 1 / L."""
    ours = tiny(n_layers=4, block={"norm": "completep"}, weights="shared", solver="rk4")
    pre = tiny(n_layers=1, block={"norm": "pre"}, weights="shared", solver="rk4", n_steps=4)
    pre.load_state_dict(ours.state_dict())
    z = ours.embed(tokens())
    assert (ours.evolve(z, None).z - pre.evolve(z, None).z).abs().max() < 1e-13


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("solver", ["euler", "rk4", "ab2"])
def test_every_placement_trains_saves_and_loads_bit_for_bit_and_ignores_padding(name, solver, tmp_path):
    options = {"mode": "predicted", "beta": 0.5, "gamma": 0.5} if name == "weighted" else {}
    model = tiny(block={"norm": name, "norm_options": options}, solver=solver)
    with torch.no_grad():
        for p in model.layers.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ids, mask = tokens(), torch.arange(LENGTH).expand(2, -1) < 5
    out = model(ids)
    out.pow(3).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.layers.parameters())
    alone = model(ids[:, :5])
    assert (model(ids, mask)[:, :5] - alone).abs().max() < 1e-12 * alone.abs().max()
    model.save(tmp_path)
    assert torch.equal(odeformer.load(tmp_path)(ids), out)


@pytest.mark.parametrize("name", NORMS)
def test_a_silent_model_is_the_identity_where_its_placement_says_so(name):
    model = tiny(block={"norm": name, "coupling": "parallel"})
    with torch.no_grad():
        for key, p in model.layers.named_parameters():
            if ".output." in key:
                p.zero_()
        z = 3 * model.embed(tokens())
        moved = {solver: (model.with_solver(solver).evolve(z, None).z - z).abs().max() < 1e-14
                 for solver in ("euler", "rk4", "ab3")}
    assert all(still == NORMS[name](D).identity_at_zero for still in moved.values()), moved


@pytest.mark.parametrize("name", NORMS)
def test_every_placement_is_traced_vmapped_and_run_under_bfloat16(name):
    p, f, z = placement(name), core(), state()
    wanted = p(z, f)
    assert (torch.vmap(lambda x: p(x, f))(z) - wanted).abs().max() < 1e-14
    _, tangent = torch.func.jvp(lambda x: p(x, f), (z,), (z,))
    eps = 1e-6
    assert (tangent - (p((1 + eps) * z, f) - p((1 - eps) * z, f)) / (2 * eps)).abs().max() < 1e-5
    torch.compiler.reset()  # or the placements before count as recompilations
    compiled = torch.compile(lambda x: p(x, f), backend="eager", fullgraph=True)
    assert torch.equal(compiled(z), wanted)
    half = NORMS[name](D)
    linear = nn.Linear(D, D)
    x = torch.randn(4, 3, D)
    with torch.autocast("cpu", torch.bfloat16):
        got = half(x, linear)
    exact = half(x, linear)
    assert (got - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("name", ["pre", "post", "weighted"])
def test_eqs_15_16_17_the_benchmarks_gradient_norms_are_those_of_a_plain_loop_over_layers(name):
    model = tiny(Decoder, DecoderConfig, n_layers=3, block={"norm": name})
    ids = torch.randint(VOCAB, (2, LENGTH + 1))
    states = [model.embed(ids[:, :-1])]
    for block in model.layers:
        z = states[-1] + block.attention.placement(states[-1], lambda x, b=block: b.attention.core(x, causal=True))
        states.append(z + block.feedforward.placement(z, block.feedforward.core))
    loss = F.cross_entropy(model.read_out(states[-1]).flatten(0, 1), ids[:, 1:].flatten())
    wanted = [g.norm().item() for g in torch.autograd.grad(loss, states)]
    assert gradient_norms(model, ids) == pytest.approx(wanted, rel=1e-10)


def test_eq_17_weights_that_are_learned_or_predicted_start_with_the_gradients_of_fixed_ones():
    ids, norms = torch.randint(VOCAB, (2, LENGTH + 1)), []
    for mode in ("fixed", "learned", "predicted"):
        torch.manual_seed(1)
        options = {"beta": 0.5, "gamma": 0.5, "mode": mode}
        norms.append(gradient_norms(tiny(Decoder, DecoderConfig, block={"norm": "weighted", "norm_options": options}),
                                    ids))
    assert norms[1] == pytest.approx(norms[0], rel=1e-12) and norms[2] == pytest.approx(norms[0], rel=1e-12)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: NORMS["pre"](D, eps=0.0), ("eps", "above 0", "0.0")),
    (lambda: NORMS["pre"](D, eps=float("nan")), ("eps", "nan")),
    (lambda: NORMS["post"](D, kind="batch"), ("batch", "layer, rms")),
    (lambda: NORMS["post"](0), ("d_model", "0")),
    (lambda: NORMS["weighted"](D, beta=float("inf")), ("beta", "inf")),
    (lambda: NORMS["weighted"](D, gamma="1"), ("gamma", "'1'")),
    (lambda: NORMS["weighted"](D, mode="guessed"), ("mode", "fixed, learned, predicted")),
    (lambda: NORMS["deepnorm"](D, alpha=-1.0), ("alpha", "-1.0")),
    (lambda: NORMS["deepnorm"](D, n_layers=0), ("n_layers", "0")),
    (lambda: NORMS["layerscale"](D, start=float("nan")), ("start", "nan")),
    (lambda: NORMS["completep"](D, base_layers=0), ("base_layers", "0")),
    (lambda: NORMS["completep"](D, alpha=True), ("alpha", "True")),
    (lambda: tiny(block={"norm": "nrom"}), ("nrom", "known")),
    (lambda: tiny(block={"norm": "none", "norm_options": {"kind": "rms"}}), ("kind", "none")),
    (lambda: tiny(block={"norm": "weighted", "norm_options": {"bta": 1.0}}), ("bta", "known: beta, gamma")),
])
def test_what_cannot_be_is_refused_when_it_is_made(make, words):
    with pytest.raises(ValueError) as error:
        make()
    for word in words:
        assert word in str(error.value)
