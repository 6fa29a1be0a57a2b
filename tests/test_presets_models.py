"""Models of the field's methods: silent layers, gradients, files, other kinds of model, and what a preset sets."""

import copy
from dataclasses import replace

import pytest
import torch
from preset_models import FORMS, LAYERS, LENGTH, VOCAB, build, config, each_form, ids, looped, turn, whole
from torch import nn

from odeformer import (
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
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
