"""The field's methods (eqs. 37-46): each form against a plain loop of its formula, its order, its silent layers."""

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call

from odeformer import (
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
    VisionConfig,
    load,
    presets,
)
from odeformer.block import COUPLINGS, Block
from odeformer.depth import taking_turns
from odeformer.presets import PRESETS, configure
from odeformer.regularizers import penalties
from solvers import SOLVERS, solve
from solvers.learned import Learned

VOCAB, LENGTH, LAYERS = 11, 5, 3
FORMS = [(name, form) for name, preset in PRESETS.items() for form in preset.forms]
each_form = pytest.mark.parametrize(("name", "form"), FORMS)


def config(kind=EncoderConfig, n_layers=LAYERS, **depth):
    return kind(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, block=BlockConfig(4, 2, d_ff=6),
                depth=DepthConfig(**depth))


def build(name, form, kind=Encoder, of=EncoderConfig, seed=0):
    """A model in float64, all its parameters at random, those of the solver about where they start."""
    torch.manual_seed(seed)
    model = kind(configure(config(of), name, corrected=form == "corrected")).double().eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p += torch.randn_like(p) * (0.2 if key.startswith("solver") else 0.4)
    return model


def ids(batch=2):
    return torch.randint(VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


# Published formulas, written out. A layer F with its skip is whole(block, z), without it increment(block, z)


def attend(block, z):
    return block.attention.core(block.attention.placement.norm(z))


def feed(block, z):
    return block.feedforward.core(block.feedforward.placement.norm(z))


def whole(block, z):
    z = z + attend(block, z)
    return z + feed(block, z)


def increment(block, z):
    return whole(block, z) - z


def rk2(F, weights):
    def formula(model, z):
        for block in model.layers:
            k1 = F(block, z)
            k2 = F(block, z + k1)
            a, b = weights(model.solver, k1, k2)
            z = z + a * k1 + b * k2
        return z
    return formula


def halves(solver, k1, k2):
    return 0.5, 0.5


def gammas(solver, k1, k2):
    return solver.gamma


def gate(solver, k1, k2):
    g = torch.sigmoid((torch.cat([k1, k2], -1) * solver.weight.flatten()).sum(-1, keepdim=True) + solver.bias)
    return g, 1 - g


def rk4(F):
    def formula(model, z):
        for block in model.layers:
            k1 = F(block, z)
            k2 = F(block, z + k1 / 2)
            k3 = F(block, z + k2 / 2)
            k4 = F(block, z + k3)
            z = z + (k1 + 2 * k2 + 2 * k3 + k4) / 6
        return z
    return formula


def rk2_of_order_2(model, z):
    c = 0.25 + 0.75 * torch.sigmoid(model.solver.theta[0] + math.log(0.25 / 0.5))  # in (1/4, 1), 1/2 at θ = 0
    for block in model.layers:
        k1 = increment(block, z)
        k2 = increment(block, z + c * k1)
        z = z + (1 - 1 / (2 * c)) * k1 + 1 / (2 * c) * k2
    return z


def dlcl(F):
    def formula(model, z):
        a, b = list(model.solver.a), list(model.solver.b)
        states, outputs = [z], []
        for n, block in enumerate(model.layers):
            outputs.append(F(block, states[-1]))
            w, v = ([x.pop(0) for _ in range(n + 1)] for x in (a, b))
            states.append(sum(x * s for x, s in zip(w, states, strict=True))
                          + sum(x * y for x, y in zip(v, outputs, strict=True)))
        return states[-1]
    return formula


def macaron(model, z):
    for block in model.layers:
        z = z + feed(block, z) / 2
        z = z + attend(block, z)
        z = z + feed(block, z) / 2
    return z


def macaron_of_order_2(model, z):
    def midpoint(f, block, z, h):
        return z + h * f(block, z + h / 2 * f(block, z))

    for block in model.layers:
        z = midpoint(feed, block, z, 0.5)
        z = midpoint(attend, block, z, 1.0)
        z = midpoint(feed, block, z, 0.5)
    return z


def pcformer(model, z):
    alpha, gamma = model.solver.alpha, model.solver.gamma
    for block in model.layers:
        k1 = increment(block, z)
        k2 = increment(block, z + k1)
        predicted = z + alpha * (1 - alpha) * k1 + alpha * k2
        z = z + gamma * (1 - gamma) * k1 + gamma * increment(block, predicted)
    return z


def shu_osher_3(model, z):
    for block in model.layers:  # z + k is a step of Euler: the form in which Shu & Osher print it
        first = z + increment(block, z)
        second = 3 / 4 * z + (first + increment(block, first)) / 4
        z = z / 3 + 2 / 3 * (second + increment(block, second))
    return z


def diffeqformer(model, z):
    blocks = list(model.layers)
    for step in range(LAYERS):
        x = math.pi * step / LAYERS  # 2 π l / period, the period being twice the depth 1
        waves = [1.0] + [math.sin(k // 2 * x) if k % 2 == 0 else math.cos((k // 2 + 1) * x) for k in range(1, 16)]
        hidden = nn.functional.silu(model.layers.embedding.linear(torch.tensor(waves, dtype=torch.float64)))
        phi = [1.0, *model.layers.functions(hidden)]
        theta = {key: sum(x * dict(block.named_parameters())[key] for x, block in zip(phi, blocks, strict=True))
                 for key, _ in blocks[0].named_parameters()}
        z = z + functional_call(Both(blocks[0]), {f"block.{key}": x for key, x in theta.items()}, (z,)) / LAYERS
    return z


class Both(nn.Module):
    """attention + feed-forward of the same state."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, z):
        return attend(self.block, z) + feed(self.block, z)


def transported(F):
    def formula(model, z):
        for _ in range(LAYERS):
            z = z + F(model.layers[0], z) / LAYERS
        return z
    return formula


def universal(model, z):
    block = model.layers[0]
    for _ in range(LAYERS):
        z = block.attention.placement.norm(z + block.attention.core(z))
        z = block.feedforward.placement.norm(z + block.feedforward.core(z))
    return z


def momentum(first):
    def formula(model, z):
        v = None
        for block in model.layers:
            f = increment(block, z)
            v = first(f) if v is None else 0.9 * v + 0.1 * f
            z = z + v
        return z
    return formula


def reformer(model, z):
    x = y = z
    for block in model.layers:
        x = x + attend(block, y)
        y = y + feed(block, x)
    return (x + y) / 2


def revnet(model, z):
    x = y = z
    for block in model.layers:
        x = x + increment(block, y)
        y = y + increment(block, x)
    return (x + y) / 2


def bdia(model, z):
    """In training; the first layer is a plain one."""
    states = [z]
    for n, block in enumerate(model.layers):
        f = increment(block, states[-1])
        if n:
            gamma = torch.randint(2, (len(z), 1, 1)) - 0.5
            states.append(gamma * states[-2] + (1 - gamma) * states[-1] + (1 + gamma) * f)
        else:
            states.append(z + f)
    return states[-1]


def looped(h):
    def formula(model, z):
        for block in model.layers:
            z = z + h * increment(block, z)
            z = z + h * increment(block, z)
        return z
    return formula


REFERENCES = {
    "ode_transformer_rk2": {"published": rk2(whole, halves), "corrected": rk2(increment, halves)},
    "ode_transformer_rk4": {"published": rk4(whole), "corrected": rk4(increment)},
    "ode_transformer_learned": {"published": rk2(whole, gammas), "corrected": rk2_of_order_2},
    "ode_transformer_gate": {"published": rk2(whole, gate), "corrected": rk2(increment, gate)},
    "dlcl": {"published": dlcl(whole), "corrected": dlcl(increment)},
    "macaron": {"published": macaron, "corrected": macaron_of_order_2},
    "pcformer": {"published": pcformer, "corrected": shu_osher_3},
    "diffeqformer": {"published": diffeqformer},
    "ot_transformer": {"published": transported(whole), "corrected": transported(increment)},
    "universal_transformer": {"published": universal},
    "momentum": {"published": momentum(lambda f: 0.1 * f), "corrected": momentum(lambda f: f)},
    "revnet": {"published": reformer, "corrected": revnet},
    "bdia": {"published": bdia},
    "training_free_loop": {"published": looped(1.0), "corrected": looped(0.5)},
}


@each_form
def test_eqs_37_to_46_every_form_is_a_plain_loop_of_its_formula(name, form):
    model = build(name, form)
    z = model.embed(ids()).detach()
    torch.manual_seed(3)
    got = model.evolve(z).z
    torch.manual_seed(3)
    wanted = REFERENCES[name][form](model, z)
    assert (wanted - z).abs().max() > 0.1
    assert (got - wanted).abs().max() < 1e-12 * wanted.abs().max()


def test_published_weights_start_where_the_papers_have_them():
    def solver(name):
        return Encoder(configure(config(), name)).solver

    assert solver("ode_transformer_learned").gamma.tolist() == [1.0, 1.0]
    assert not solver("ode_transformer_gate").weight.any()
    assert solver("pcformer").alpha == solver("pcformer").gamma == 0.5
    states, increments = solver("dlcl").matrices()
    mean = torch.tensor([[1 / 2, 0, 0], [1 / 3, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4]])
    assert (increments - mean).abs().max() < 1e-7
    assert (states - mean[:, :1] * torch.tensor([1.0, 0, 0])).abs().max() < 1e-7


# Orders, on a field that depends on l and whose parts do not commute


def turn(z, l):
    return torch.stack([-(1 + l) * z[..., 1], torch.sin(z[..., 0] + l)], -1)


def bend(z, l):
    return torch.stack([0.5 * torch.cos(l * z[..., 1]), z[..., 0] * (0.3 - l) + 0.2], -1)


def composed(z, l):
    k = turn(z, l)
    return k + bend(z + k, l)


def both(z, l):
    return turn(z, l) + bend(z, l)


def exact(f, z, n=600):
    """By the classical Runge-Kutta method over [0, 1]."""
    h = 1 / n
    for i in range(n):
        l = torch.tensor(i * h, dtype=torch.float64)
        k1 = f(z, l)
        k2 = f(z + h / 2 * k1, l + h / 2)
        k3 = f(z + h / 2 * k2, l + h / 2)
        k4 = f(z + h * k3, l + h)
        z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return z


def error(form, n, truth, z):
    """Of the state at l = 1 after n steps; learned coefficients away from their start, but for weights over depth."""
    depth = {key: x for key, x in form.depth.items() if key in ("solver", "solver_options")}
    solver = DepthConfig(**depth).make_solver(d_model=2, n_steps=n)
    if isinstance(solver, Learned) and solver.name != "dense":
        generator = torch.Generator().manual_seed(0)
        for p in solver.parameters():
            p.data += 0.4 * torch.randn(p.shape, generator=generator)
    again = form.sized(1).get("n_layers", 1)  # times that each layer is passed
    field = COUPLINGS.get(form.block["coupling"], form.block["coupling"])(
        [lambda z, l: turn(z, l / again), lambda z, l: bend(z, l / again)])
    end = solve(field, z, span=(0.0, float(again)), solver=taking_turns(solver, field), n_steps=n * again).z
    return (end - truth).detach().abs().max().item()


def check_order(found):
    z = torch.tensor([[[0.3, -0.6]], [[0.9, 0.1]]], dtype=torch.float64)
    truth = exact(composed if found.block["coupling"] in ("composed", presets.WholeLayer) else both, z)
    n = 64 if found.order < 2 else 24
    coarse, fine = (error(found, m, truth, z) for m in (n, 2 * n))
    if found.order == 0:
        assert fine > 0.05
        assert coarse / fine < 1.3
    else:
        assert abs(math.log2(coarse / fine) - found.order) < 0.35


@each_form
def test_every_form_has_the_order_that_it_states(name, form):
    with torch.no_grad():
        check_order(PRESETS[name].forms[form])


def test_bdia_has_order_1_with_random_signs_too():
    torch.manual_seed(0)
    check_order(PRESETS["bdia"].published)


def test_what_is_inconsistent_or_counts_the_skip_twice_has_a_corrected_form_of_order_1_or_more():
    for name, preset in PRESETS.items():
        assert set(preset.forms) <= {"published", "corrected"}
        if preset.published.order == 0:
            assert preset.corrected is not None, name
        if preset.corrected is not None:
            assert preset.corrected.order >= max(1, preset.published.order), name
            assert preset.corrected.block["coupling"] is not presets.WholeLayer, name
        assert re.search(r"\b(19|20)\d\d\b", preset.reference), name
        assert preset.what and preset.note, name


# Silent sublayers, and a constant field: the numbers in the notes


def silenced(model):
    for key, p in model.layers.named_parameters():
        if ".output." in key:
            nn.init.zeros_(p)
    return model


GROWTH = {"ode_transformer_rk2": 2.5, "ode_transformer_rk4": 65 / 24, "ode_transformer_learned": 4.0,
          "ode_transformer_gate": 2.5, "dlcl": 1.0, "ot_transformer": (4 / 3) ** 3}  # the last in all, others a layer


@pytest.mark.parametrize(("name", "form"), [one for one in FORMS if one[0] != "universal_transformer"])  # post-norm
def test_silent_layers_are_the_identity_but_for_published_forms_that_count_the_skip_twice(name, form):
    model = silenced(Encoder(configure(config(), name, corrected=form == "corrected")).double().eval())
    z = model.embed(ids()).detach()
    factor = 1.0
    if PRESETS[name].forms[form].block["coupling"] is presets.WholeLayer:
        factor = GROWTH[name] ** model.config.n_layers
    assert (model.evolve(z).z - factor * z).abs().max() < 1e-6 * factor


ADVANCES = {("dlcl", "published"): sum(1 / k for k in range(2, 8)), ("pcformer", "published"): 0.75 * 6,
            ("momentum", "published"): 6 - 9 * (1 - 0.9**6), ("revnet", "published"): 3.0,
            ("training_free_loop", "published"): 12.0}  # of 6 layers under f = 1; the others advance by 6


@pytest.mark.parametrize(("name", "form"), [
    (name, form) for name, form in FORMS
    if name == "dlcl" or PRESETS[name].forms[form].block["coupling"] is not presets.WholeLayer])  # those grow
def test_a_constant_field_moves_the_state_as_far_as_the_notes_say(name, form):
    found = PRESETS[name].forms[form]
    coupling = found.block["coupling"]
    depth = DepthConfig(**{key: x for key, x in found.depth.items() if key != "weights"})
    solver, again = depth.make_solver(d_model=1, n_steps=6), found.sized(1).get("n_layers", 1)
    half = [lambda z, l: torch.full_like(z, 0.5)] * 2
    field = COUPLINGS.get(coupling, coupling)(half)
    n = 6 * again
    z = solve(field, torch.zeros(1, 1, 1, dtype=torch.float64), span=(0.0, float(n)), n_steps=n * depth.steps_per_layer,
              solver=taking_turns(solver, field)).z
    assert abs(z.item() - ADVANCES.get((name, form), 6.0)) < 1e-6


@pytest.mark.parametrize(("name", "number"), [("momentum", ADVANCES["momentum", "published"]),
                                              ("dlcl", ADVANCES["dlcl", "published"]),
                                              ("ode_transformer_rk4", 65 / 24), ("ode_transformer_rk2", 2.5)])
def test_notes_hold_the_measured_numbers(name, number):
    assert f"{number:.3g}" in PRESETS[name].note


# Gradients, files, other models


@each_form
def test_gradients_agree_with_central_differences(name, form):
    model = build(name, form)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(2, LENGTH, 4, generator=generator, dtype=torch.float64)
    parameters = list(model.parameters())
    ways = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]

    def loss():
        torch.manual_seed(3)
        return (model(ids()) * weight).sum()

    gradients = torch.autograd.grad(loss(), parameters)
    along = sum((g * w).sum() for g, w in zip(gradients, ways, strict=True)).item()
    values = []
    for side in (1e-6, -2e-6):
        for p, w in zip(parameters, ways, strict=True):
            p.data += side * w
        values.append(loss().item())
    assert abs((values[0] - values[1]) / 2e-6 - along) < 1e-5 * max(1.0, abs(along))
    assert all(g.abs().max() > 0 for (key, _), g in zip(model.named_parameters(), gradients, strict=True)
               if "key.bias" not in key)  # which softmax does not see


BY_NAME = [(name, form) for name, form in FORMS
           if isinstance(PRESETS[name].forms[form].block["coupling"], str)
           and isinstance(PRESETS[name].forms[form].depth.get("solver", ""), str)]


@each_form
def test_forms_come_back_from_disk_bit_for_bit_own_classes_once_in_the_tables(name, form, tmp_path, monkeypatch):
    model = build(name, form)
    with torch.no_grad():
        wanted = model(ids())
    if (name, form) not in BY_NAME:
        with pytest.raises(ValueError, match=r"must be a name or a plain value to be saved"):
            model.save(tmp_path)
        block, depth = model.config.block, model.config.depth
        if not isinstance(block.coupling, str):
            monkeypatch.setitem(COUPLINGS, "mine", block.coupling)
            block = replace(block, coupling="mine")
        if not isinstance(depth.solver, str):
            monkeypatch.setitem(SOLVERS, "mine", depth.solver)
            depth = replace(depth, solver="mine")
        model.config = replace(model.config, block=block, depth=depth)
    model.save(tmp_path)
    again = load(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids()), wanted)


def test_every_corrected_form_but_macaron_is_made_of_names():
    assert {name for name, form in FORMS if form == "corrected" and (name, form) not in BY_NAME} == {"macaron"}


@each_form
def test_decoders_see_no_later_token_and_generate_the_same_with_a_cache(name, form):
    model = build(name, form, Decoder, DecoderConfig)
    first, second = ids(), ids()
    second[:, 3:] = (second[:, 3:] + 1) % VOCAB
    with torch.no_grad():
        a, b = model(first), model(second)
        assert (a[:, :3] - b[:, :3]).abs().max() < 1e-12
        assert (a[:, 3:] - b[:, 3:]).abs().max() > 1e-6
        cached, plain = (model.generate(first[:, :2], max_new_tokens=3, **how) for how in ({}, {"cache": None}))
    assert torch.equal(cached, plain)


@each_form
def test_padding_moves_no_real_token(name, form):
    model = build(name, form)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [3]])
    with torch.no_grad():
        padded, alone = model(ids(), mask), model(ids()[1:, :3])
    assert (padded[1:, :3] - alone).abs().max() < 1e-12


@each_form
def test_both_stacks_of_an_encoder_decoder_have_the_form(name, form):
    start = replace(config(Seq2SeqConfig), n_decoder_layers=2, target_vocab_size=VOCAB)
    found = configure(start, name, corrected=form == "corrected")
    form = PRESETS[name].forms[form]
    assert found.block.coupling == found.decoder_block.coupling == form.block["coupling"]
    assert found.depth.weights == found.decoder_depth.weights
    assert (found.n_layers, found.n_decoder_layers) == tuple(form.sized(n).get("n_layers", n) for n in (3, 2))
    model = Seq2Seq(found).double().eval()
    with torch.no_grad():
        assert model(ids(), ids()).isfinite().all()


def test_macaron_attends_once_to_itself_and_once_to_the_memory():
    model = build("macaron", "published", Decoder, DecoderConfig)
    block = Block(replace(model.config.block, d_ff=6), cross=True).double()
    visits = []
    parts = [lambda z, l, name=name: visits.append(name) or torch.zeros_like(z) for name in block.parts]
    field = presets.Macaron(parts)
    solve(field, torch.zeros(1, 2, 4), solver=taking_turns(DepthConfig().make_solver(), field), n_steps=1)
    assert visits == ["feedforward", "attention", "cross_attention", "feedforward"]


# What presets do to a config


def test_a_preset_keeps_width_and_training_options_and_sets_the_rest_of_depth():
    start = replace(config(solver="rk4", steps_per_layer=3, layer_drop=0.1, gradient="checkpoint", weights="shared"),
                    block=BlockConfig(4, 2, d_ff=6, attention="local_gaussian", dropout=0.2))
    found = configure(start, "ode_transformer_rk2", corrected=True)
    assert found.block == replace(start.block, coupling="composed")
    assert found.depth == DepthConfig(solver="heun2", layer_drop=0.1, gradient="checkpoint")
    assert replace(found, block=start.block, depth=start.depth) == start
    with pytest.raises(ValueError, match=r"gradient must be one of backprop for solver 'bdia'"):
        configure(start, "bdia")


def test_vision_configs_are_configured_too():
    start = VisionConfig(image_size=4, patch_size=2, n_classes=3, n_layers=2, block=BlockConfig(4, 2))
    assert configure(start, "pcformer").depth.solver == "pc_ema"


def test_bad_requests_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"unknown preset 'dclc' \(did you mean 'dlcl'\?\); known: bdia, diffeqf"):
        configure(config(), "dclc")
    with pytest.raises(ValueError, match=r"preset 'bdia' has no corrected form"):
        configure(config(), "bdia", corrected=True)
    with pytest.raises(TypeError, match=r"config must be that of a model, with block and depth; got BlockConfig"):
        configure(BlockConfig(4, 2), "bdia")
    two = presets.TwoStreams()
    with pytest.raises(ValueError, match=r"needs a field with two parts or more: coupling 'parallel'"):
        solve(turn, torch.zeros(1, 2), solver=two, n_steps=1)


def test_every_config_makes_a_solver_of_its_own_where_coefficients_are_learned():
    chosen = configure(config(), "ode_transformer_learned")
    first, second = Encoder(chosen), Encoder(chosen)
    assert first.solver.gamma is not second.solver.gamma
    assert "solver.gamma" in dict(first.named_parameters())


@pytest.mark.parametrize("form", ["published", "corrected"])
def test_the_loop_runs_a_trained_model_as_it_is(form):
    trained = Encoder(config()).double().eval()
    looped_model = Encoder(configure(config(), "training_free_loop", corrected=form == "corrected")).double().eval()
    looped_model.load_state_dict(trained.state_dict())
    z = trained.embed(ids()).detach()
    wanted = looped(1.0 if form == "published" else 0.5)(trained, z)
    assert (looped_model.evolve(z).z - wanted).abs().max() < 1e-12


def test_ot_transformer_adds_the_mean_square_of_its_field_along_the_path():
    model = build("ot_transformer", "published")
    _, solution = model(ids(), return_solution=True, save_states=True)
    found = penalties(model, solution, PRESETS["ot_transformer"].regularize)
    z, wanted = model.embed(ids()), 0.0
    for _ in range(LAYERS):
        f = whole(model.layers[0], z)
        wanted = wanted + f.square().mean() / LAYERS
        z = z + f / LAYERS
    assert abs(found["kinetic_energy"] - wanted) < 1e-12
    torch.autograd.grad(found["kinetic_energy"], list(model.layers.parameters()), allow_unused=True)


def test_bdia_draws_a_sign_for_each_row_in_training_and_is_euler_without_gradients():
    model = build("bdia", "published")
    plain = Encoder(replace(model.config, depth=DepthConfig())).double().eval()
    plain.load_state_dict(model.state_dict())
    z = model.embed(ids(1)).detach().expand(64, -1, -1)
    with torch.no_grad():
        assert (model.evolve(z).z - plain.evolve(z).z).abs().max() < 1e-12
    ends = {tuple(row.flatten().round(decimals=9).tolist()) for row in model.evolve(z).z.detach()}
    assert len(ends) == 4  # two signs in the second layer and two in the third


def test_momentum_from_rest_can_be_reversed():
    model = build("momentum", "published")
    other = copy.deepcopy(model)
    other.config = replace(model.config, depth=replace(model.config.depth, gradient="reversible"))
    gradients = [torch.autograd.grad(one(ids()).square().sum(), list(one.layers.parameters()))
                 for one in (model, other)]
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() < 1e-9 * max(1.0, a.abs().max())
