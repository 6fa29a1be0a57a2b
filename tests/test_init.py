"""Initialisers: what every matrix is drawn from, and Hessian blocks against full Hessians."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import odeformer
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.init import INITIALIZERS, Draw, apply, embeddings, matrices, report
from odeformer.init.hessian import Hessian, evolve_loss, twice_differentiable

D, D_FF, L = 64, 256, 4


def model(init="xavier_uniform", *, options=(), kind=Encoder, n_layers=L, depth=(), d_model=D, **block):
    config = DecoderConfig if kind is Decoder else EncoderConfig
    block = BlockConfig(d_model, 4, init=init, init_options=dict(options), **block)
    return kind(config(vocab_size=50, max_seq_len=32, n_layers=n_layers, block=block, depth=DepthConfig(**dict(depth))))


def xavier(role, gain=1.0):
    """sqrt(2 / (d_in + d_out)), for the shapes of this file's model."""
    return gain * math.sqrt(2 / (D + D_FF if role in ("hidden", "output of feedforward") else 2 * D))


def branch(gain):
    """A scheme with a gain on value, output and feed-forward matrices alone."""
    return lambda role, layer: xavier(role, 1.0 if role in ("query", "key") else gain)


# distribution and standard deviation of the matrix with a role in a layer, by each scheme's own formula
WANTED = {
    "xavier_uniform": ({"gain": 1.5}, "uniform", lambda role, layer: xavier(role, 1.5)),
    "xavier_normal": ({"gain": 1.5}, "normal", lambda role, layer: xavier(role, 1.5)),
    "xavier_normal_seed": ({}, "normal", lambda role, layer: math.sqrt(3) * xavier(role)),
    "depth_gain": ({"a": 0.5, "b": 0.25}, "uniform", lambda role, layer: xavier(role, 0.5 * math.sqrt(2))),
    "ds_init": ({}, "uniform", lambda role, layer: xavier(role, 1 / math.sqrt(layer))),
    "gpt2": ({}, "normal", lambda role, layer: 0.02 / (math.sqrt(8) if role.startswith("output") else 1)),
    "deepnorm": ({}, "normal", branch(32**-0.25)),
    "tfixup": ({}, "uniform", branch(0.67 * 4**-0.25)),
    "completep": ({"std": 0.03, "base_width": 16}, "normal", lambda role, layer: 0.015),
}
FOLLOW_DATA = {"lipschitz", "curvature"}  # whose gains are not known beforehand: tested below


def role_of(name):
    part = name.split(".")[-2]
    return "output of feedforward" if "feedforward.core.output" in name else part


def check_distribution(w, distribution, std):
    """Mean 0, that standard deviation, and flat or Gaussian; bounds are 5 standard errors."""
    w = w.flatten().double()
    n = len(w)
    assert abs(w.mean()) < 5 * std / math.sqrt(n)
    fourth = {"uniform": 9 / 5, "normal": 3}[distribution]  # E w^4 / std^4
    assert abs(w.square().mean() / std**2 - 1) < 5 * math.sqrt((fourth - 1) / n)
    assert abs(w.pow(4).mean() / std**4 / fourth - 1) < 0.2
    if distribution == "uniform":
        assert 0.99 < w.abs().max() / (math.sqrt(3) * std) <= 1 + 1e-6


def test_every_scheme_has_a_formula_here_or_a_test_below():
    assert set(INITIALIZERS) == set(WANTED) | FOLLOW_DATA


@pytest.mark.parametrize("name", WANTED)
def test_eqs_18_to_22_every_matrix_is_drawn_as_the_formula_says_and_reported(name):
    options, distribution, std = WANTED[name]
    made = model(name, options=options)
    rows = {row.matrix: row for row in report(made)}
    seen = 0
    for key, p in made.named_parameters():
        if key.startswith("layers.") and p.dim() == 2:
            wanted = std(role_of(key), int(key.split(".")[1]) + 1)
            check_distribution(p.detach(), distribution, wanted)
            assert rows[key].scheme == name and rows[key].layer == int(key.split(".")[1]) + 1
            assert abs(rows[key].wanted / wanted - 1) < 1e-12
            assert abs(rows[key].measured - p.detach().square().mean().sqrt().item()) < 1e-6
            seen += 1
    assert seen == 6 * L


@pytest.mark.parametrize("name", INITIALIZERS)
def test_every_scheme_overwrites_every_matrix_and_bias_of_the_layers_and_nothing_else(name):
    made = model(attention="local_gaussian", d_model=16, feedforward="swiglu", n_layers=2)
    skipped = {row.name for row in embeddings(made)} if name == "tfixup" else set()
    others = {key: p.clone() for key, p in made.named_parameters()
              if key not in skipped and (not key.startswith("layers.") or "norm" in key)}
    with torch.no_grad():
        for module in made.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.fill_(torch.nan)
                module.bias.fill_(1.0)
    INITIALIZERS[name](made)
    for module in made.layers.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.isfinite().all() and module.weight.std() > 0 and not module.bias.any()
    assert all(torch.equal(p, others[key]) for key, p in made.named_parameters() if key in others)
    assert len(report(made)) == 2 * 7 + len(skipped)


@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_eqs_18_19_the_default_is_bit_for_bit_torch_nn_init_xavier_uniform(kind):
    made, other = model(kind=kind), model(kind=kind)
    torch.manual_seed(5)
    made.initialize()
    torch.manual_seed(5)
    for module in other.layers.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    assert all(torch.equal(x, y) for x, y in zip(made.layers.parameters(), other.layers.parameters(), strict=True))
    assert BlockConfig(8, 2).init == "xavier_uniform"


def test_eq_20_as_written_has_three_times_the_variance_of_eq_19():
    usual, written = report(model("xavier_normal")), report(model("xavier_normal_seed"))
    for a, b in zip(usual, written, strict=True):
        assert abs(b.wanted**2 / a.wanted**2 - 3) < 1e-12
        assert abs(b.measured**2 / a.measured**2 - 3) < 0.3


def test_published_gains():
    """DeepNorm of 18 layers: 144^(-1/4). T-Fixup, 6 layers: 0.67 6^(-1/4), a decoder's 54^(-1/4)."""
    def gain(name, kind=Encoder, n_layers=6):
        made = model(name, kind=kind, n_layers=n_layers, d_model=16)
        return {row.matrix.split(".", 2)[-1]: row.gain for row in report(made)}

    assert gain("deepnorm", n_layers=18)["attention.core.value.weight"] == pytest.approx(0.288675, abs=1e-6)
    assert gain("deepnorm", n_layers=18)["attention.core.key.weight"] == 1
    assert gain("tfixup")["attention.core.output.weight"] == pytest.approx(0.428092, abs=1e-6)
    assert gain("tfixup", Decoder)["feedforward.core.hidden.weight"] == pytest.approx(0.368894, abs=1e-6)
    assert gain("ds_init", n_layers=9)["attention.core.query.weight"] == pytest.approx(1 / 3)  # the last one listed


def test_t_fixup_scales_embeddings_and_learned_positions_too():
    made = model("tfixup", position="learned")
    for p in (made.token_embedding.weight, made.position.table):
        check_distribution(p.detach(), "normal", 36**-0.25 / 8)  # (9 L)^(-1/4) d_model^(-1/2)
    assert [row.matrix for row in report(made)][:2] == ["token_embedding.weight", "position.table"]
    decoder = model("tfixup", kind=Decoder)
    inner = {row.gain for row in report(decoder) if row.layer and "query" not in row.matrix and "key" not in row.matrix}
    assert inner == {36**-0.25}
    assert {row.gain for row in report(model("tfixup", options={"decoder": True})) if "value" in row.matrix} == inner


def test_a_gated_network_is_scaled_as_often_as_a_plain_one():
    rows = {row.matrix: row.gain for row in report(model("deepnorm", feedforward="swiglu"))}
    core = "layers.0.feedforward.core."
    assert [rows[f"{core}{name}.weight"] for name in ("hidden", "gate", "output")] == [32**-0.25, 1, 32**-0.25]


def test_the_networks_that_predict_a_priors_parameters_are_matrices_but_no_branch():
    made = model("deepnorm", attention="local_gaussian", attention_options={"sigma_mode": "predicted"}, n_layers=2)
    rows = [row for row in report(made) if "attention" in row.matrix and "hidden" in row.matrix]
    assert len(rows) == 2 and {row.gain for row in rows} == {1.0}


@pytest.mark.parametrize("depth", [{"solver": "rk4"}, {"steps_per_layer": 3}, {"solver": "ab3", "steps_per_layer": 2}])
@pytest.mark.parametrize("name", ["depth_gain", "ds_init", "gpt2", "deepnorm", "tfixup"])
def test_eqs_21_22_depth_counts_layers_never_stages_or_steps(name, depth):
    assert [row.gain for row in report(model(name, depth=depth))] == [row.gain for row in report(model(name))]


@pytest.mark.parametrize(("weights", "options", "firsts"), [
    ("shared", {}, [1]), ("cycle", {"n_knots": 3}, [1, 2, 3]), ("cycle_rev", {"n_knots": 3}, [1, 2, 3]),
    ("sequence", {"n_knots": 3}, [1, 3, 5])])
def test_eq_22_a_matrix_that_layers_share_has_the_l_of_the_first(weights, options, firsts):
    made = model("ds_init", n_layers=6, depth={"weights": weights, "weights_options": options}, d_model=16)
    rows = [row for row in report(made) if row.matrix.endswith("query.weight")]
    assert [row.layer for row in rows] == firsts
    assert [row.gain for row in rows] == pytest.approx([layer**-0.5 for layer in firsts])
    assert {row.gain for row in report(model("depth_gain", options={"a": 1.0, "b": 0.5}, n_layers=6, d_model=16,
                                             depth={"weights": weights, "weights_options": options}))} == {6**0.5}


# --- matrices that lie in one parameter ---


class FusedAttention(nn.Module):
    """Its three projections are one linear map; ``parts`` marks it otherwise than by its name."""

    def __init__(self, d_model, n_heads, *, name="qkv", parts=None, rows=None):
        super().__init__()
        linear = nn.Linear(d_model, rows or 3 * d_model)
        if parts is not None:
            linear.fused = parts
        self.add_module(name, linear)
        self.name, self.output = name, nn.Linear(d_model, d_model)

    def forward(self, x, memory=None, *, mask=None, causal=False, **_):
        return self.output(getattr(self, self.name)(x)[..., : x.shape[-1]])


class TorchAttention(nn.Module):
    """torch.nn's own."""

    def __init__(self, d_model, n_heads, *, kdim=None):
        super().__init__()
        self.inner = nn.MultiheadAttention(d_model, n_heads, batch_first=True, kdim=kdim)

    def forward(self, x, memory=None, *, mask=None, causal=False, **_):
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(("attention", "options", "key"), [
    (FusedAttention, {}, "qkv.weight"), (FusedAttention, {"name": "in_proj"}, "in_proj.weight"),
    (FusedAttention, {"name": "x", "parts": ("query", "key", "value")}, "x.weight"),
    (TorchAttention, {}, "inner.in_proj_weight")])
@pytest.mark.parametrize("name", WANTED)
def test_a_fused_qkv_matrix_is_initialised_as_three(name, attention, options, key):
    settings, distribution, std = WANTED[name]
    made = model(name, options=settings, attention=attention, attention_options=options)
    for layer in range(L):
        parts = made.get_parameter(f"layers.{layer}.attention.core.{key}").detach().chunk(3)
        for role, part in zip(("query", "key", "value"), parts, strict=True):
            check_distribution(part, distribution, std(role, layer + 1))
    rows = [row for row in report(made) if row.matrix.startswith(f"layers.1.attention.core.{key}[")]
    assert [row.matrix.rsplit("[")[-1] for row in rows] == ["query]", "key]", "value]"]
    output = next(row for row in report(made) if "layers.1.attention" in row.matrix and "out" in row.matrix)
    assert abs(output.wanted / std("output", 2) - 1) < 1e-12
    bias = {key: p for key, p in made.named_parameters() if "attention.core" in key and "bias" in key}
    assert bias and not any(p.any() for p in bias.values())


def test_fused_parts_of_unequal_size_and_separate_projections_of_torch_nn():
    made = model("deepnorm", attention=FusedAttention, attention_options={
        "name": "qkv", "rows": 96, "parts": {"query": 64, "key": 16, "value": 16}})
    rows = {row.matrix.split("core.")[-1]: row for row in report(made)}
    assert rows["qkv.weight[key]"].wanted == pytest.approx(math.sqrt(2 / 80))
    assert rows["qkv.weight[value]"].wanted == pytest.approx(math.sqrt(2 / 80) * 32**-0.25)
    apart = TorchAttention(D, 4, kdim=D // 2)
    holder = SimpleNamespace(layers=nn.ModuleList([apart]), config=SimpleNamespace(n_layers=1))
    assert [(m.role, m.d_out, m.d_in) for m in matrices(holder)] == [
        ("query", D, D), ("key", D, D // 2), ("value", D, D), ("output", D, D)]
    plain = model(attention=FusedAttention, attention_options={"parts": ()})
    assert report(plain)[0].wanted == pytest.approx(math.sqrt(2 / (4 * D)))  # one matrix (3 d, d), as it says


class Stack(nn.Module):
    """Experts' matrices in one parameter, in either order."""

    def __init__(self, order):
        super().__init__()
        shapes = {"in,out": (D, D_FF), "out,in": (D_FF, D)}
        self.hidden = nn.Parameter(torch.empty(3, *shapes[order]))
        self.bias = nn.Parameter(torch.ones(3, D_FF))
        self.stacked = {"hidden": order}


@pytest.mark.parametrize("order", ["in,out", "out,in"])
def test_a_stack_of_experts_is_initialised_matrix_by_matrix(order):
    stack = Stack(order)
    holder = nn.Module()
    holder.layers, holder.config = nn.ModuleList([nn.Linear(4, 4), stack]), SimpleNamespace(n_layers=2)
    INITIALIZERS["deepnorm"](holder)
    for w in stack.hidden.detach():
        check_distribution(w, "normal", math.sqrt(2 / (D + D_FF)) * 16**-0.25)
    assert not stack.bias.any()
    found = [m for m in matrices(holder) if m.role == "hidden"]
    assert [(m.name, m.d_out, m.d_in, m.layer) for m in found] == [
        (f"layers.1.hidden[{i}]", D_FF, D, 2) for i in range(3)]
    found[1].tensor.fill_(7.0)  # a view: it writes through
    assert (stack.hidden[1] == 7).all() and not (stack.hidden[0] == 7).any()


@pytest.mark.parametrize("name", ["xavier_uniform", "gpt2", "lipschitz"])
def test_the_experts_of_a_mixture_are_initialised_each_as_a_matrix_of_its_own(name):
    made = model(name, feedforward="experts", feedforward_options={"n_experts": 3, "activation": "swiglu"}, n_layers=1)
    rows = {row.matrix.split("core.")[-1]: row for row in report(made) if "feedforward" in row.matrix}
    assert sum("[" in key for key in rows) == 9  # hidden, gate and output of three experts
    assert all(abs(row.measured / row.wanted - 1) < 0.1 for row in rows.values())
    hidden, output = rows["hidden.weight[2]"], rows["output.weight[2]"]
    assert output.gain == pytest.approx(hidden.gain / math.sqrt(2) if name == "gpt2" else hidden.gain, rel=0.05)


def test_a_matrix_that_two_modules_share_is_drawn_once():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    holder = SimpleNamespace(layers=nn.ModuleList([a, b]), config=SimpleNamespace(n_layers=2))
    assert [m.name for m in matrices(holder)] == ["layers.0.weight"]


@pytest.mark.parametrize(("mark", "words"), [
    (lambda m: setattr(m, "fused", {"query": 3, "key": 2}), ("fused", "4 rows")),
    (lambda m: setattr(m, "stacked", {"weight": "in,out"}), ("stacked", "layers.0.weight")),
    (lambda m: setattr(m, "stacked", {"nothing": "in,out"}), ("stacked", "layers.0.nothing")),
])
def test_marks_that_do_not_fit_are_refused(mark, words):
    linear = nn.Linear(4, 4)
    mark(linear)
    with pytest.raises(ValueError) as error:
        matrices(SimpleNamespace(layers=nn.ModuleList([linear]), config=SimpleNamespace(n_layers=1)))
    assert all(word in str(error.value) for word in words)


# --- own initialisers, reports, options ---


def halves(made, *, std=0.5):
    """An own initialiser that uses the toolkit's."""
    apply(made, "halves", lambda matrix: Draw("normal", std))


def constant(made):
    """One that does not."""
    for matrix in matrices(made):
        matrix.tensor.fill_(0.25)


def test_own_callables_work_wherever_a_name_does():
    made = model(halves, options={"std": 0.1})
    assert {(row.scheme, row.wanted) for row in report(made)} == {("halves", 0.1)}
    assert all(abs(row.measured - 0.1) < 0.01 for row in report(made))
    rows = report(model(constant))
    assert {(row.scheme, row.gain, row.wanted, row.measured) for row in rows} == {("constant", None, None, 0.25)}
    with pytest.raises(ValueError, match="unknown option 'sdt'"):
        model(halves, options={"sdt": 0.1})


def test_the_report_prints_as_a_table_and_follows_what_was_done_last():
    made = model("ds_init", n_layers=2, d_model=16)
    lines = str(report(made)).splitlines()
    assert lines[0].split() == ["matrix", "layer", "scheme", "gain", "wanted", "measured"]
    assert len(lines) == 13 and lines[7].split()[:4] == ["layers.1.attention.core.query.weight", "2", "ds_init",
                                                          "0.7071"]
    INITIALIZERS["gpt2"](made)
    assert {row.scheme for row in report(made)} == {"gpt2"}
    with torch.no_grad():
        made.layers[0].attention.core.query.weight.mul_(3)
    assert report(made)[0].measured == pytest.approx(3 * 0.02, rel=0.2) and report(made)[0].wanted == 0.02
    assert len(report(made.with_solver("rk4"))) == 12


def test_an_encoder_decoder_is_reported_whole_and_initialised_part_by_part():
    config = odeformer.Seq2SeqConfig(vocab_size=20, max_seq_len=8, n_layers=2, n_decoder_layers=3,
                                     block=BlockConfig(16, 2, init="tfixup"))
    rows = report(odeformer.Seq2Seq(config))
    gains = {row.matrix: row.gain for row in rows}
    assert gains["encoder.layers.1.attention.core.value.weight"] == pytest.approx(0.67 * 2**-0.25)
    assert gains["decoder.layers.2.cross_attention.core.value.weight"] == pytest.approx(27**-0.25)
    with pytest.raises(TypeError, match=r"model\.encoder and model\.decoder"):
        INITIALIZERS["gpt2"](odeformer.Seq2Seq(config))


@pytest.mark.parametrize(("name", "options", "words"), [
    ("xavier_uniform", {"gain": 0.0}, ("gain", "above 0")), ("xavier_normal", {"gain": -1.0}, ("gain", "-1.0")),
    ("depth_gain", {"a": -1.0}, ("a must", "-1.0")), ("ds_init", {"b": math.nan}, ("b must", "nan")),
    ("gpt2", {"std": 0}, ("std", "above 0")), ("deepnorm", {"gain": 0.0}, ("gain",)),
    ("lipschitz", {"bound": 0.0}, ("bound", "above 0")), ("completep", {"base_width": 0}, ("base_width",)),
    ("curvature", {"measure": "norm"}, ("measure", "trace")), ("curvature", {"n_products": 0}, ("n_products",)),
    ("curvature", {"least": 2.0, "most": 1.0}, ("most", "2.0")), ("xavier_uniform", {"gian": 1.0}, ("gian", "gain")),
    ("uniform", {}, ("uniform", "known")),
])
def test_wrong_options_are_refused(name, options, words):
    with pytest.raises(ValueError) as error:
        model(name, options=options)
    assert all(word in str(error.value) for word in words)


# --- bounds and curvature ---


@pytest.mark.parametrize("bound", [0.5, 1.0, 1.9, 10.0])
def test_lipschitz_bounds_the_spectral_norm_of_every_matrix_and_leaves_smaller_ones_alone(bound):
    torch.manual_seed(3)
    plain = model()
    torch.manual_seed(3)
    made = model("lipschitz", options={"bound": bound})
    for before, after, row in zip(matrices(plain), matrices(made), report(made), strict=True):
        norm = np.linalg.norm(before.tensor.numpy(), 2)
        assert np.linalg.norm(after.tensor.numpy(), 2) <= bound * (1 + 1e-6)
        assert row.gain == pytest.approx(min(1.0, bound / norm), rel=1e-5)
        assert torch.allclose(after.tensor, before.tensor * row.gain, rtol=1e-5)
        assert row.wanted == pytest.approx(row.gain * math.sqrt(2 / sum(before.tensor.shape)))


def full_hessian(loss, w):
    """(numel, numel), by torch.func on a function of one matrix."""
    h = torch.func.hessian(loss)(w)
    return h.reshape(w.numel(), w.numel())


class Toy(nn.Module):
    """A fused, a stacked and a plain matrix, and a loss that is quadratic in none of them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(3, 9)
        self.stack = nn.Module()
        self.stack.weight = nn.Parameter(torch.randn(2, 3, 4))
        self.stack.stacked = {"weight": "in,out"}
        self.out = nn.Linear(4, 2)
        self.x = torch.randn(6, 3, dtype=torch.float64)
        self.double()

    def loss(self, qkv=None, stack=None, out=None):
        qkv = self.qkv.weight if qkv is None else qkv
        stack = self.stack.weight if stack is None else stack
        out = self.out.weight if out is None else out
        q, k, v = (self.x @ qkv.T).chunk(3, -1)
        h = torch.tanh(q * k + v)
        return (torch.tanh(h @ stack[0]) * (h @ stack[1]) @ out.T).square().mean()


def toy():
    holder = nn.Module()
    holder.layers, holder.config = nn.ModuleList([Toy()]), SimpleNamespace(n_layers=1)
    return holder


def columns(hessian):
    """The Hessian over all matrices together, column by column from products, with each matrix's place in it."""
    places, columns, at = [], [], 0
    for m in hessian.parts:
        n = m.tensor.numel()
        places.append(slice(at, at + n))
        at += n
        for i in range(n):
            vectors = [torch.zeros_like(p) for p in hessian.parameters]
            place = next(j for j, p in enumerate(hessian.parameters) if p is m.parameter)
            m.of(vectors[place]).copy_(torch.eye(n, dtype=torch.float64)[i].view_as(m.tensor))
            products = dict(zip(map(id, hessian.parameters), hessian.times(vectors), strict=True))
            columns.append(torch.cat([m.of(products[id(m.parameter)]).flatten() for m in hessian.parts]))
    return torch.stack(columns, 1), places


def check_measures(hessian, whole, places, n_products):
    """Traces within 5 standard errors of Hutchinson's estimator, of variance Σ_ij (1 + [j in the block]) H_ij² over
    i in the block and j != i; tops as eigvalsh has them."""
    squares = whole.square() - whole.diag().square().diag()
    for trace, top, at in zip(hessian.traces(n_products), hessian.tops(n_products), places, strict=True):
        block = whole[at, at]
        error = math.sqrt((squares[at].sum() + squares[at, at].sum()) / n_products)
        assert abs(trace - block.trace()) < 5 * error
        values = torch.linalg.eigvalsh(block)
        assert abs(top - values[values.abs().argmax()]) < 0.01 * values.abs().max()


def test_hessian_products_traces_and_tops_of_parts_of_parameters_agree_with_the_full_hessian():
    holder = toy()
    inner = holder.layers[0]
    blocks = {}
    h = full_hessian(lambda w: inner.loss(qkv=w), inner.qkv.weight.detach())
    for i, part in enumerate(("query", "key", "value")):
        blocks[f"layers.0.qkv.weight[{part}]"] = h[9 * i:9 * i + 9, 9 * i:9 * i + 9]
    h = torch.func.hessian(lambda w: inner.loss(stack=w))(inner.stack.weight.detach())
    for i in range(2):  # stored (in, out)
        blocks[f"layers.0.stack.weight[{i}]"] = h[i, :, :, i].permute(1, 0, 3, 2).reshape(12, 12)
    blocks["layers.0.out.weight"] = full_hessian(lambda w: inner.loss(out=w), inner.out.weight.detach())
    found = matrices(holder)
    assert [m.name for m in found] == list(blocks)
    hessian = Hessian(inner.loss(), found)
    whole, places = columns(hessian)
    for at, h in zip(places, blocks.values(), strict=True):
        assert (whole[at, at] - h).abs().max() < 1e-12
    check_measures(hessian, whole, places, 100)


def test_the_default_loss_has_the_hessian_of_the_final_states_distance_from_itself():
    made = model(d_model=4, n_layers=1, d_ff=4, depth={"solver": "midpoint"}, position="none").double()
    made.train()
    z = torch.randn(2, 2, 16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[0]
    whole_model = Evolved(made)
    with twice_differentiable(made):
        hessian = Hessian(evolve_loss(made), matrices(made))
        fixed = whole_model(z).detach()
        whole, places = columns(hessian)
        for m, at in zip(hessian.parts, places, strict=True):
            def loss(w, key=f"made.{m.name}"):
                out = torch.func.functional_call(whole_model, {key: w}, (z,))
                return (out - fixed).square().mean() / 2

            h = full_hessian(loss, m.tensor)
            assert (whole[at, at] - h).abs().max() < 1e-12 * h.abs().max()
        assert torch.linalg.eigvalsh(whole).min() > -1e-10  # Gauss-Newton: no negative curvature
        check_measures(hessian, whole, places, 40)
    assert made.training and made.layers[0].attention.training


class Evolved(nn.Module):
    """A model from states to normed final states."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, z):
        return self.made.final_norm(self.made.evolve(z, None).z)


def quadratic(made):
    """½ Σ a_k |W_k|², whose blocks are a_k I."""
    return sum((k + 1) ** 2 * m.of(m.parameter).square().sum() / 2 for k, m in enumerate(matrices(made)))


@pytest.mark.parametrize("measure", ["trace", "top"])
def test_curvature_gains_of_a_quadratic_are_those_of_its_known_hessian(measure):
    made = model("curvature", options={"closure": quadratic, "measure": measure, "n_products": 2, "least": 0.1,
                                       "most": 1.5}, n_layers=2, d_model=16)
    std = [math.sqrt(2 / (m.d_in + m.d_out)) for m in matrices(made)]
    size = [m.d_in * m.d_out if measure == "trace" else 1 for m in matrices(made)]
    kappa = [s**2 * (k + 1) ** 2 * n for k, (s, n) in enumerate(zip(std, size, strict=True))]
    mean = math.exp(sum(map(math.log, kappa)) / len(kappa))
    gains = [min(max((mean / x) ** 0.25, 0.1), 1.5) for x in kappa]
    assert max(gains) == 1.5 and min(gains) > 0.1
    for row, gain, plain in zip(report(made), gains, std, strict=True):
        assert row.gain == pytest.approx(gain, rel=1e-5)
        assert row.wanted == pytest.approx(gain * plain, rel=1e-5)
        assert row.measured == pytest.approx(gain * plain, rel=0.2)


def test_curvature_evens_out_what_the_matrices_contribute():
    def spread(made):
        with twice_differentiable(made):
            traces = Hessian(evolve_loss(made, seed=1), matrices(made), seed=1).traces(50)
        logs = [math.log(m.tensor.square().mean().item() * abs(t)) for m, t in zip(matrices(made), traces, strict=True)]
        return np.std(logs)

    torch.manual_seed(1)
    before = spread(model(d_model=16))
    torch.manual_seed(1)
    assert spread(model("curvature", options={"n_products": 50}, d_model=16)) < 0.5 * before


def test_curvature_draws_nothing_more_from_torchs_seed_and_leaves_a_matrix_without_curvature_as_it_is():
    torch.manual_seed(2)
    plain = model(d_model=16)
    after = torch.rand(1)
    torch.manual_seed(2)
    made = model("curvature", d_model=16, norm="rezero")  # α = 0: the loss does not depend on the cores
    assert torch.equal(torch.rand(1), after)
    assert {row.gain for row in report(made)} == {1.0}
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(matrices(plain), matrices(made), strict=True))


def test_curvature_works_under_every_gradient_mode_and_refuses_a_loss_without_finite_curvature():
    for depth in ({"gradient": "checkpoint"}, {"solver": "reversible_midpoint", "gradient": "reversible"}):
        made = model("curvature", depth=depth, d_model=16, n_layers=2)
        assert len({row.gain for row in report(made)}) > 6 and made.config.depth.gradient == depth["gradient"]
    with pytest.raises(ValueError, match="finite curvature"):
        model("curvature", options={"closure": lambda made: quadratic(made) * torch.inf}, d_model=16)
