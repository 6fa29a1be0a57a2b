"""Whole models against torch.nn, under every solver, and on disk."""

import json

import pytest
import torch
from torch import nn
from torch_transformer import assert_close, assert_same_gradients, draw_both, encoder_of_torch, future, stack_pairs

import odeformer
from odeformer import (
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    VisionConfig,
    VisionEncoder,
)
from odeformer.models.store import from_dict
from solvers import SOLVERS, imex

VOCAB, LENGTH = 17, 12
FIXED = [name for name, solver in SOLVERS.items() if not (solver.is_adaptive or solver.is_implicit)]


def tiny(kind=Encoder, config=EncoderConfig, *, n_layers=2, block=(), **depth):
    """A small model in float64."""
    return kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, block=BlockConfig(8, 2, **dict(block)),
                       depth=DepthConfig(**depth))).double().eval()


def decoder(**options):
    return tiny(Decoder, DecoderConfig, **options)


def silence(model):
    """Zero every output projection, so that f = 0."""
    for name, p in model.layers.named_parameters():
        if ".output." in name:
            nn.init.zeros_(p)
    return model


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_eqs_13_14_euler_and_lie_are_the_transformer_of_torch_nn(kind, norm, activation, dtype, tolerance):
    config = DecoderConfig if kind is Decoder else EncoderConfig
    model = tiny(kind, config, n_layers=3, block={"feedforward": activation, "norm": norm}).to(dtype).train()
    stack = encoder_of_torch(3, activation, norm, dtype)
    draw_both(stack_pairs(stack, model))
    hidden = future(LENGTH) if kind is Decoder else None
    for mask in (None, torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])):
        z = model.embed(tokens()).detach().requires_grad_()
        wanted = stack(z, mask=hidden, src_key_padding_mask=None if mask is None else ~mask)
        got = model.final_norm(model.evolve(z, mask).z)
        weight = torch.randn_like(got) * (1 if mask is None else mask.unsqueeze(-1))
        assert_close(got * weight, wanted * weight, tolerance)
        model.zero_grad(), stack.zero_grad()
        (theirs_z,) = torch.autograd.grad((wanted * weight).sum(), z, retain_graph=True)
        (ours_z,) = torch.autograd.grad((got * weight).sum(), z, retain_graph=True)
        assert_close(ours_z, theirs_z, 10 * tolerance)
        (wanted * weight).sum().backward()
        (got * weight).sum().backward()
        assert_same_gradients(stack_pairs(stack, model), 10 * tolerance)


def test_eqs_32_33_euler_is_bit_for_bit_the_residual_loop():
    model = decoder(n_layers=3).float()
    z = wanted = model.embed(tokens())
    for block in model.layers:
        for sublayer in (block.attention, block.feedforward):
            x = sublayer.placement.norm(wanted)
            wanted = wanted + (sublayer.core(x, causal=True) if sublayer is block.attention else sublayer.core(x))
    assert torch.equal(model.evolve(z, None).z, wanted)


def test_composed_coupling_under_euler_is_the_textbook_layer_too():
    lie = decoder(n_layers=3)
    composed = decoder(n_layers=3, block={"coupling": "composed"})
    composed.load_state_dict(lie.state_dict())
    ids = tokens()
    assert (composed(ids) - lie(ids)).abs().max() < 1e-12


def test_parallel_coupling_under_euler_adds_both_sublayers_of_the_same_state():
    model = decoder(block={"coupling": "parallel"})
    z = wanted = model.embed(tokens())
    for block in model.layers:
        a, b = block.attention, block.feedforward
        wanted = wanted + a.core(a.placement.norm(wanted), causal=True) + b.core(b.placement.norm(wanted))
    assert (model.evolve(z, None).z - wanted).abs().max() < 1e-12


@pytest.mark.parametrize(("coupling", "weights"), [("lie", "piecewise"), ("strang", "shared"),
                                                   ("parallel", "piecewise"), ("composed", "shared")])
def test_zero_output_projections_make_every_solver_the_identity(weights, coupling):
    model = silence(tiny(block={"coupling": coupling}, weights=weights))
    ids = tokens()
    for name in SOLVERS:
        if name in imex.METHODS and coupling == "composed":
            continue  # one field without parts, which these methods refuse
        if getattr(SOLVERS[name], "to_equilibrium", False):
            continue  # refused without injection (tests/test_equilibrium.py)
        _, solution = model.with_solver(name)(ids, return_solution=True)
        assert (solution.z - model.embed(ids)).abs().max() < 1e-14, name


@pytest.mark.parametrize("name", ["leapfrog", "bdf2", "reversible_midpoint", "ab3", "dopri5", "gauss4"])
@pytest.mark.parametrize("coupling", ["lie", "strang"])
def test_every_kind_of_solver_converges_to_one_answer_under_a_splitting_coupling(name, coupling):
    model = tiny(n_layers=1, block={"coupling": coupling}, weights="shared")
    with torch.no_grad():
        for p in model.layers.parameters():
            p.mul_(0.5)
        z = model.embed(tokens())
        reference = model.with_solver("dopri8", rtol=1e-9, atol=1e-11).evolve(z, None).z
        amount = {"rtol": 1e-5} if SOLVERS[name].is_adaptive else {"n_steps": 100}
        got = model.with_solver(name, **amount).evolve(z, None).z
        assert (got - reference).norm() < 0.02 * (reference - z).norm()


@pytest.mark.parametrize(("solver", "nfe"), [("euler", 6), ("midpoint", 12), ("rk4", 24)])
@pytest.mark.parametrize("coupling", ["lie", "parallel"])
def test_eqs_42_46_nfe_of_six_layers_counted_by_hooks_on_the_sublayers(solver, nfe, coupling):
    model = tiny(n_layers=6, block={"coupling": coupling}, solver=solver)
    calls = []
    for block in model.layers:
        for sublayer in block.sublayers:
            sublayer.core.register_forward_hook(lambda *_: calls.append(1))
    _, solution = model(tokens(), return_solution=True)
    assert len(calls) / 2 == nfe == solution.nfe
    assert solution.states.shape == (7, 2, LENGTH, 8)
    assert torch.equal(solution.states[-1], solution.z)
    assert solution.depths == [0, 1, 2, 3, 4, 5, 6]


def test_rk4_keeps_order_four_across_layers_whose_weights_jump():
    model = tiny(n_layers=4, block={"coupling": "parallel"})
    with torch.no_grad():
        for p in model.layers.parameters():
            p.mul_(0.5)  # smooth enough that 4 steps a layer are asymptotic
    z = model.embed(tokens())
    reference = model.with_solver("rk4", steps_per_layer=64).evolve(z, None).z
    errors = [(model.with_solver("rk4", steps_per_layer=n).evolve(z, None).z - reference).abs().max() for n in (4, 8)]
    assert torch.log2(errors[0] / errors[1]) >= 3.8


def test_lie_and_strang_couplings_converge_to_the_sum_with_their_orders():
    model = tiny(n_layers=1, block={"coupling": "parallel"})
    with torch.no_grad():
        for p in model.layers.parameters():
            p.mul_(0.5)
    z = model.embed(tokens())
    reference = model.with_solver("rk4", steps_per_layer=128).evolve(z, None).z
    for coupling, order in (("lie", 1), ("strang", 2)):
        split = tiny(n_layers=1, block={"coupling": coupling})
        split.load_state_dict(model.state_dict())
        errors = [(split.with_solver("rk4", steps_per_layer=n).evolve(z, None).z - reference).abs().max()
                  for n in (32, 64)]
        assert abs(torch.log2(errors[0] / errors[1]) - order) < 0.15, coupling


@pytest.mark.parametrize("name", FIXED)
def test_changing_the_last_token_moves_no_earlier_output(name):
    model = decoder(n_layers=2).with_solver(name, steps_per_layer=2)
    before = tokens()
    after = before.clone()
    after[:, -1] = (after[:, -1] + 1) % VOCAB
    x, y = model(before), model(after)
    assert (x[:, :-1] - y[:, :-1]).abs().max() < 1e-13
    assert (x[:, -1] - y[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("name", [name for name in SOLVERS if name not in FIXED])
def test_adaptive_and_implicit_solvers_refuse_a_causal_model_and_say_why(name):
    with pytest.raises(ValueError, match="later tokens move earlier outputs"):
        decoder().with_solver(name)(tokens())


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("solver", ["euler", "rk4", "ab2", "dopri5"])
def test_padding_changes_no_state_of_a_real_token(kind, solver):
    if kind == "decoder" and SOLVERS[solver].is_adaptive:
        pytest.skip("refused, see above")
    model = (decoder() if kind == "decoder" else tiny()).with_solver(solver)
    short = tokens(length=7)
    padded = torch.cat([short, tokens(length=5)], 1)
    mask = torch.arange(LENGTH).expand(2, -1) < 7
    alone, a = model(short, return_solution=True)
    together, b = model(padded, mask, return_solution=True)
    assert (alone - together[:, :7]).abs().max() < 1e-12
    assert a.nfe == b.nfe


def test_a_row_without_a_single_real_token_stays_finite_with_its_gradients():
    for model in (tiny(), decoder()):
        mask = torch.ones(2, LENGTH, dtype=torch.bool)
        mask[0] = False
        mask[1, :3] = False  # left padding: under a causal mask these rows see nothing
        out = model(tokens(), mask)
        assert out.isfinite().all()
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_dropout_draws_one_mask_a_solve_which_all_stages_and_steps_share():
    model = tiny(n_layers=2, block={"dropout": 0.5, "coupling": "parallel"}, weights="shared").train()
    seen = []
    model.layers[0].attention.core.register_forward_hook(
        lambda _, __, y: seen.append(y))
    drawn = []
    original = odeformer.block.Context.drop

    def spy(self, site, *rest):
        y = original(self, site, *rest)
        if site is model.layers[0].attention:
            drawn.append((y != 0).flatten())
        return y

    odeformer.block.Context.drop = spy
    try:
        model.with_solver("rk4", steps_per_layer=2)(tokens())
    finally:
        odeformer.block.Context.drop = original
    assert len(drawn) == 16
    assert all(torch.equal(drawn[0], mask) for mask in drawn)
    assert 0.3 < drawn[0].float().mean() < 0.7
    x, y = model(tokens()), model(tokens())
    assert not torch.equal(x, y)
    model.eval()
    ids = tokens()
    assert torch.equal(model(ids), model(ids))


def test_with_solver_shares_the_parameters_and_leaves_the_model_as_it_was():
    model = tiny()
    other = model.with_solver("rk4", steps_per_layer=3)
    assert model.config.depth.solver == "euler" and other.config.depth.solver == "rk4"
    assert [p.data_ptr() for p in model.parameters()] == [p.data_ptr() for p in other.parameters()]
    back = other.with_solver("dopri5", rtol=1e-4).with_solver("ab2", across_pieces=True)
    assert back.config.depth.rtol is None and back.config.depth.solver_options == {"across_pieces": True}
    _, solution = back.with_solver("ab2", across_pieces=True, steps_per_layer=1)(tokens(), return_solution=True)
    assert solution.nfe == 3  # the starter's two, then one a step


def test_eq_38_ab2_across_layers_is_the_dense_two_term_fusion():
    model = tiny(n_layers=4, block={"coupling": "composed"}).with_solver("ab2", across_pieces=True)
    z = model.embed(tokens())

    def f(block, z):
        a, b = block.attention, block.feedforward
        y = z + a.core(a.placement.norm(z))
        return y + b.core(b.placement.norm(y)) - z

    first = f(model.layers[0], z)
    z1 = z + f(model.layers[0], z + first / 2)  # starter: midpoint
    history = [first]
    for block in model.layers[1:]:
        k = f(block, z1)
        z1 = z1 + 1.5 * k - 0.5 * history[-1]
        history.append(k)
    assert (model.evolve(z, None).z - z1).abs().max() < 1e-11


@pytest.mark.parametrize("gradient", ["backprop", "checkpoint"])
def test_gradient_modes_agree_under_dropout(gradient):
    ids = tokens()
    grads = []
    for mode in ("backprop", gradient):
        torch.manual_seed(1)
        model = tiny(block={"dropout": 0.3}, gradient=mode, solver="rk4").train()
        torch.manual_seed(2)
        model(ids).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (grads[0] - grads[1]).abs().max() < 1e-12 * grads[0].abs().max()


@pytest.mark.parametrize("coupling", ["lie", "strang", "parallel", "composed"])
@pytest.mark.parametrize("gradient", ["checkpoint", "checkpoint_recursive", "reversible"])
def test_every_exact_gradient_mode_equals_backprop_in_a_whole_model(gradient, coupling):
    ids, grads = tokens(), []
    model = tiny(n_layers=3, block={"coupling": coupling})
    for mode in ("backprop", gradient):
        chosen = model.with_solver("reversible_midpoint", gradient=mode, steps_per_layer=2)
        model.zero_grad()
        chosen(ids).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (grads[0] - grads[1]).abs().max() < 1e-9 * grads[0].abs().max()


@pytest.mark.parametrize("name", ["rk2_learned", "rk2_gate", "rk4_family", "dense"])
def test_learned_coefficients_belong_to_the_model_are_trained_and_saved(name, tmp_path):
    model = tiny(solver=name, block={"coupling": "composed"})
    learned = [p for key, p in model.named_parameters() if key.startswith("solver.")]
    assert learned
    model(tokens()).square().sum().backward()
    assert any(p.grad.abs().sum() > 0 for p in learned)
    with torch.no_grad():
        for p in learned:
            p.add_(0.01)
    model.save(tmp_path)
    ids = tokens()
    assert torch.equal(odeformer.load(tmp_path)(ids), model(ids))
    plain = model.with_solver("euler")
    assert not any(key.startswith("solver.") for key, _ in plain.named_parameters())
    assert any(key.startswith("solver.") for key, _ in model.named_parameters())


def test_learned_solvers_by_name_take_the_shape_of_the_model():
    model = tiny(n_layers=3, solver="dense", block={"coupling": "composed"})
    assert model.solver.n_steps == 3
    assert tiny(solver="rk2_gate").solver.weight.shape == (2, 8)


def test_with_solver_keeps_what_the_other_solver_knows_and_drops_the_rest():
    model = tiny(solver="rk4", steps_per_layer=3, gradient="checkpoint")
    assert model.with_solver("euler").config.depth.gradient == "checkpoint"
    adaptive = model.with_solver("dopri5")
    assert adaptive.config.depth.gradient == "backprop" and adaptive.config.depth.steps_per_layer == 1
    assert adaptive(tokens()).shape == (2, LENGTH, 8)
    model.train()
    other = model.with_solver("rk4").eval()
    assert not model.layers.training and not other.layers.training  # the layers are shared
    wrong(lambda: DepthConfig(solver="dopri5", n_steps=4), ValueError, "n_steps", "dopri5")
    wrong(lambda: DepthConfig(solver="dopri5", steps_per_layer=2), ValueError, "steps_per_layer", "dopri5")
    wrong(lambda: DepthConfig(solver="dopri5", rtol=-1.0), ValueError, "rtol", "-1.0")
    wrong(lambda: tiny(block={"init_options": {"gian": 2.0}}), ValueError, "gian", "known: gain")


def test_with_solver_keeps_the_learned_coefficients_of_the_solver_that_the_model_has():
    model = tiny(solver="rk2_learned")
    with torch.no_grad():
        model.solver.gamma.fill_(0.4)
    again = model.with_solver("rk2_learned", steps_per_layer=2)
    assert again.solver is model.solver
    assert model.with_solver("rk2_learned", start=(0.5, 0.5)).solver is not model.solver


def test_a_gradient_mode_that_the_coupling_rules_out_is_refused_when_the_model_is_made():
    wrong(lambda: tiny(solver="alf", gradient="reversible"), ValueError, "gradient", "alf", "lie", "parallel")
    tiny(solver="alf", gradient="reversible", block={"coupling": "parallel"})
    tiny(solver="reversible_midpoint", gradient="reversible")
    tiny(solver="leapfrog", gradient="reversible")


def test_states_are_kept_only_where_asked_for():
    model = tiny(solver="rk4")
    _, solution = model(tokens(), return_solution=True, save_states=False)
    assert solution.states is None and solution.nfe == 8


def test_nan_in_padding_reaches_no_real_token_and_causal_queries_end_with_the_keys():
    model = tiny()
    z = model.embed(tokens())
    mask = torch.arange(LENGTH).expand(2, -1) < 9
    clean = model.evolve(z, mask).z
    z = z.masked_fill(~mask.unsqueeze(-1), float("nan"))
    assert torch.equal(model.evolve(z, mask).z[mask], clean[mask])
    attention = odeformer.ATTENTION["softmax"](8, 2).double()
    x, memory = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(1, 5, 8, dtype=torch.float64)
    full = attention(x, memory, mask=torch.ones(1, 5, dtype=torch.bool), causal=True)
    assert (attention(x, memory, causal=True) - full).abs().max() < 1e-14


def test_a_model_of_mixed_precision_is_loaded_as_it_was(tmp_path):
    model = tiny().float()
    model.layers.bfloat16()
    model.save(tmp_path)
    again = odeformer.load(tmp_path)
    assert {k: v.dtype for k, v in again.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}


def test_bfloat16_weights_and_autocast_keep_the_depth_state_in_float32():
    model = tiny(n_layers=6).float()
    ids = tokens()
    wanted = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        _, solution = model(ids, return_solution=True)
    assert solution.z.dtype == torch.float32
    assert (model.final_norm(solution.z) - wanted).norm() < 0.02 * wanted.norm()
    half = model.bfloat16()
    assert half(ids).dtype == torch.bfloat16
    assert (half(ids).float() - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("kind", ["encoder", "decoder", "tied", "vision", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_and_loaded_models_give_the_same_outputs_bit_for_bit(kind, dtype, tmp_path):
    block = BlockConfig(8, 2, attention_options={"bias": False}, norm_options={"kind": "rms"})
    if kind == "vision":
        model = VisionEncoder(VisionConfig(image_size=4, patch_size=2, channels=1, n_classes=3, n_layers=2,
                                           block=block))
        nn.init.normal_(model.head.weight)
        x = torch.randn(2, 1, 4, 4, dtype=dtype)
    else:
        config = {"vocab_size": VOCAB, "max_seq_len": LENGTH, "n_layers": 2, "block": block}
        depth = DepthConfig(solver="rk4", weights="shared" if kind == "shared" else "piecewise")
        model = (Encoder(EncoderConfig(**config, depth=depth)) if kind == "encoder" else
                 Decoder(DecoderConfig(**config, depth=depth, tie_embeddings=kind == "tied")))
        x = tokens()
    model = model.to(dtype).eval()
    model.save(tmp_path / "model")
    again = odeformer.load(tmp_path / "model")
    assert torch.equal(model(x), again(x))
    assert again.config == model.config
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_loading_says_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        odeformer.load(tmp_path)
    folder = tmp_path / "model"
    tiny().save(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged or cut short"):
        odeformer.load(folder)
    (folder / "model.safetensors").write_bytes(whole)
    stored = json.loads((folder / "config.json").read_text())
    stored["config"]["n_layers"] = 3
    (folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="does not fit"):
        odeformer.load(folder)
    stored["config"]["layers"] = 3
    (folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="unknown key 'layers'"):
        odeformer.load(folder)
    for broken in ({"model": "encoder", "config": None}, {"model": ["x"], "config": {}},
                   {"model": "encoder", "config": {**stored["config"], "n_layers": "x"}}):
        (folder / "config.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"config\.json"):
            odeformer.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a model's config"):
        odeformer.load(folder)


def test_a_config_that_json_cannot_hold_is_refused_on_saving(tmp_path):
    model = tiny(solver=SOLVERS["rk4"])
    with pytest.raises(ValueError, match=r"config\.depth\.solver must be a name"):
        model.save(tmp_path)


def test_an_own_class_works_wherever_a_name_does():
    class Twice(nn.Module):
        def __init__(self, d_model, d_ff):
            super().__init__()
            self.output = nn.Linear(d_model, d_model)

        def forward(self, x):
            return 2 * self.output(x)

    model = tiny(block={"feedforward": Twice}, solver=SOLVERS["midpoint"])
    assert model(tokens()).shape == (2, LENGTH, 8)


def wrong(call, error, *words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_wrong_configurations_name_the_argument_and_list_what_is_known():
    wrong(lambda: BlockConfig(10, 3), ValueError, "d_model", "n_heads", "10", "3")
    wrong(lambda: BlockConfig(8, 2, attention="softmaxx"), ValueError, "attention", "softmaxx",
          "did you mean 'softmax'")
    wrong(lambda: BlockConfig(8, 2, norm="batch"), ValueError, "norm", "batch", "known:", "pre")
    wrong(lambda: BlockConfig(8, 2, coupling="li"), ValueError, "coupling", "composed")
    wrong(lambda: BlockConfig(8, 2, dropout=1.0), ValueError, "dropout")
    wrong(lambda: BlockConfig(8.0, 2), TypeError, "d_model")
    wrong(lambda: tiny(block={"attention_options": {"biass": True}}), ValueError, "biass", "attention", "known:")
    wrong(lambda: DepthConfig(solver="rk5"), ValueError, "unknown solver 'rk5'", "rk4")
    wrong(lambda: DepthConfig(steps_per_layer=0), ValueError, "steps_per_layer")
    wrong(lambda: DepthConfig(n_steps=4, steps_per_layer=2), ValueError, "n_steps", "steps_per_layer")
    wrong(lambda: DepthConfig(weights="sharde"), ValueError, "weights", "shared")
    wrong(lambda: DepthConfig(gradient="exact"), ValueError, "gradient", "backprop")
    wrong(lambda: DepthConfig(rtol=1e-3), ValueError, "rtol", "euler")
    wrong(lambda: tiny().with_solver("rk4", steps=3), ValueError, "steps", "rk4")
    wrong(lambda: tiny(n_layers=0), ValueError, "n_layers")
    wrong(lambda: tiny(n_layers=2, n_steps=3)(tokens()), ValueError, "n_steps", "multiple")
    wrong(lambda: VisionConfig(image_size=9, patch_size=2, n_classes=2, n_layers=1, block=BlockConfig(8, 2)),
          ValueError, "image_size", "patch_size")
    wrong(lambda: from_dict(EncoderConfig, {"vocab": 3}), ValueError, "vocab", "vocab_size")


def test_wrong_inputs_name_the_argument():
    model = tiny()
    wrong(lambda: model(tokens().float()), TypeError, "tokens", "float32")
    wrong(lambda: model(tokens()[0]), ValueError, "tokens", "(batch, tokens)")
    wrong(lambda: model(tokens() + VOCAB), ValueError, "tokens", "vocab_size")
    wrong(lambda: model(tokens() - VOCAB), ValueError, "tokens", "vocab_size")
    wrong(lambda: model(tokens(length=LENGTH + 1)), ValueError, "tokens", "max_seq_len")
    wrong(lambda: model(tokens(), torch.ones(2, LENGTH)), TypeError, "mask", "bool")
    wrong(lambda: model(tokens(), torch.ones(2, 3, dtype=torch.bool)), ValueError, "mask", "(2, 3)")
    vision = VisionEncoder(VisionConfig(image_size=4, patch_size=2, channels=1, n_classes=3, n_layers=1,
                                        block=BlockConfig(8, 2)))
    wrong(lambda: vision(torch.zeros(1, 1, 5, 4)), ValueError, "images", "multiples of patch_size = 2", "5 x 4")
    wrong(lambda: vision(torch.zeros(1, 3, 4, 4)), ValueError, "images", "channels = 1", "(1, 3, 4, 4)")
    wrong(lambda: vision(torch.zeros(1, 1, 4, 4, dtype=torch.int64)), TypeError, "images", "int64")


class PlainAttention(torch.nn.Module):
    """An own class with the plain call."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.output = torch.nn.Linear(d_model, d_model)

    def forward(self, x, memory=None, *, mask=None, causal=False):
        return self.output(x)


def test_an_own_attention_class_without_caches_or_rotary_positions_is_told_so():
    model = tiny(Decoder, DecoderConfig, block={"attention": PlainAttention})
    prompt = tokens()[:, :4]
    assert model.generate(prompt, max_new_tokens=2, cache=None).shape[1] == 6
    with pytest.raises(ValueError, match="PlainAttention does not take a key/value cache"):
        model.generate(prompt, max_new_tokens=2)
    with pytest.raises(ValueError, match="PlainAttention does not take rotary positions"):
        tiny(block={"attention": PlainAttention, "position": "rope"})(tokens())
