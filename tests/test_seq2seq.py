"""The encoder-decoder: torch.nn's under Euler, and what only an integrated one can do."""

import copy
import itertools
import json

import pytest
import torch
from seq2seq_models import CROSS, SOURCE, TARGET, TARGET_VOCAB, VOCAB, right_padding, stirred, texts, tiny, wrong
from torch import nn
from torch_transformer import (
    assert_close,
    assert_same_gradients,
    decoder_of_torch,
    draw_both,
    encoder_of_torch,
    future,
    stack_pairs,
)

import odeformer
from odeformer import ATTENTION, COUPLINGS, POSITIONS, BlockConfig, DepthConfig, Seq2SeqConfig
from odeformer.models.seq2seq import Seq2SeqSolution

# torch.nn


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_eqs_13_14_euler_and_lie_are_the_encoder_decoder_of_torch_nn(norm, activation, dtype, tolerance):
    model = tiny(block={"feedforward": activation, "norm": norm, "d_ff": 32}, n_layers=3, n_decoder_layers=2,
                 dtype=dtype).train()
    theirs = nn.Transformer(8, 2, batch_first=True, dtype=dtype,
                            custom_encoder=encoder_of_torch(3, activation, norm, dtype),
                            custom_decoder=decoder_of_torch(2, activation, norm, dtype))

    def pairs():
        yield from stack_pairs(theirs.encoder, model.encoder)
        yield from stack_pairs(theirs.decoder, model.decoder)

    draw_both(pairs())
    source, target = texts(2)
    for source_mask, target_mask in ((None, None), (right_padding(SOURCE, 7, 4), right_padding(TARGET, 3, 6))):
        hidden = (None, None) if source_mask is None else (~source_mask, ~target_mask)
        x = model.encoder.embed(source).detach().requires_grad_()
        y = model.decoder.embed(target).detach().requires_grad_()
        wanted = theirs(x, y, tgt_mask=future(TARGET), src_key_padding_mask=hidden[0], tgt_key_padding_mask=hidden[1],
                        memory_key_padding_mask=hidden[0])
        memory = model.encoder.final_norm(model.encoder.evolve(x, source_mask).z)
        got = model.decoder.evolve(y, target_mask, memory=memory, memory_mask=source_mask).z
        got = model.final_norm(got)
        weight = torch.randn_like(got) * (1 if target_mask is None else target_mask.unsqueeze(-1))
        assert_close(got * weight, wanted * weight, tolerance)
        model.zero_grad(), theirs.zero_grad()
        leaves = [x, y]
        theirs_z = torch.autograd.grad((wanted * weight).sum(), leaves, retain_graph=True)
        ours_z = torch.autograd.grad((got * weight).sum(), leaves, retain_graph=True)
        for a, b in zip(ours_z, theirs_z, strict=True):
            assert_close(a, b, 10 * tolerance)
        (wanted * weight).sum().backward()
        (got * weight).sum().backward()
        assert_same_gradients(pairs(), 10 * tolerance)


def test_logits_are_the_head_of_the_decoders_states_and_the_memory_the_encoders_output():
    model = tiny(depth={"solver": "rk4"})
    source, target = texts()
    real = right_padding(SOURCE, 7, 4, 5)
    logits, solution = model(source, target, real, return_solution=True)
    assert logits.shape == (3, TARGET, TARGET_VOCAB)
    assert torch.equal(model.decoder.head(model.final_norm(solution.z)), logits)
    memory = model.encode(source, real)
    assert torch.equal(memory, model.encoder(source, real))
    assert torch.equal(memory, model.encoder.final_norm(solution.encoder.z))
    assert torch.equal(model.decode(target, memory, real), logits)
    assert torch.equal(model.embed(source), model.encoder.embed(source))


# solvers and couplings


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_step_of_euler_treats_the_three_sublayers_as_the_coupling_says(coupling):
    model = stirred(tiny(n_layers=1, block={"coupling": coupling}))
    source, target = texts()
    memory = model.encode(source)
    z = model.decoder.embed(target)
    layer = model.decoder.layers[0]

    def f(i, z):
        sublayer = layer.sublayers[i]
        x = sublayer.placement.norm(z)
        return (sublayer.core(x, causal=True), sublayer.core(x, memory), sublayer.core(x))[i] if i < 2 else (
            sublayer.core(x))

    wanted = z
    if coupling == "parallel":
        wanted = z + f(0, z) + f(1, z) + f(2, z)
    elif coupling == "strang":
        for i, h in ((0, 0.5), (1, 0.5), (2, 1.0), (1, 0.5), (0, 0.5)):
            wanted = wanted + h * f(i, wanted)
    else:
        for i in range(3):
            wanted = wanted + f(i, wanted)
    assert_close(model.decoder.evolve(z, memory=memory).z, wanted, 1e-13)


def test_couplings_converge_to_the_sum_of_the_three_sublayers_with_their_orders():
    model = tiny(n_layers=1, block={"coupling": "parallel"})
    source, target = texts()
    with torch.no_grad():
        for p in model.decoder.layers.parameters():
            p.mul_(0.5)
        memory, z = model.encode(source), model.decoder.embed(target)
        reference = model.decoder.with_solver("rk4", steps_per_layer=64).evolve(z, memory=memory).z
        for coupling, order in (("lie", 1), ("strang", 2), ("parallel", 4)):
            split = tiny(n_layers=1, block={"coupling": coupling})
            split.load_state_dict(model.state_dict())
            steps = (8, 16) if order == 4 else (16, 32)
            errors = [(split.decoder.with_solver("rk4", steps_per_layer=n).evolve(z, memory=memory).z
                       - reference).abs().max() for n in steps]
            assert abs(torch.log2(errors[0] / errors[1]) - order) < 0.4, coupling


@pytest.mark.parametrize(("solver", "a_layer"), [("euler", 1), ("midpoint", 2), ("rk4", 4)])
@pytest.mark.parametrize("coupling", ["lie", "parallel"])
def test_both_parts_count_their_evaluations(solver, a_layer, coupling):
    model = tiny(n_layers=3, n_decoder_layers=2, depth={"solver": solver}, block={"coupling": coupling})
    calls = {"encoder": 0, "decoder": 0}

    def count(name):
        def hook(*_):
            calls[name] += 1
        return hook

    for name in calls:
        for block in getattr(model, name).layers:
            for sublayer in block.sublayers:
                sublayer.core.register_forward_hook(count(name))
    _, solution = model(*texts(), return_solution=True)
    assert calls == {"encoder": 3 * 2 * a_layer, "decoder": 2 * 3 * a_layer}
    assert solution.encoder.nfe == 3 * a_layer and solution.decoder.nfe == solution.nfe == 2 * a_layer
    assert isinstance(solution, Seq2SeqSolution)
    assert solution.states.shape == (3, 3, TARGET, 8) and solution.encoder.states.shape == (4, 3, SOURCE, 8)
    assert torch.equal(solution.z, solution.decoder.z) and solution.depths == [0, 1, 2]
    _, solution = model(*texts(), return_solution=True, save_states=False)
    assert solution.states is None and solution.encoder.states is None


def test_each_part_has_its_own_solver():
    model = tiny()
    source, target = texts()
    both = model.with_solver("rk4", steps_per_layer=2)
    encoder = model.with_solver("dopri5", part="encoder", rtol=1e-4)
    decoder = encoder.with_solver("ab2", part="decoder", steps_per_layer=3)
    solvers = [(m.encoder.config.depth.solver, m.decoder.config.depth.solver) for m in (model, both, encoder, decoder)]
    assert solvers == [("euler", "euler"), ("rk4", "rk4"), ("dopri5", "euler"), ("dopri5", "ab2")]
    assert decoder.config.depth.rtol == 1e-4 and decoder.config.decoder_depth.steps_per_layer == 3
    for other in (both, encoder, decoder):
        assert [p.data_ptr() for p in other.parameters()] == [p.data_ptr() for p in model.parameters()]
        memory = model.encoder.with_solver(other.config.depth.solver, **(
            {"rtol": 1e-4} if other is not both else {"steps_per_layer": 2}))(source)
        wanted = model.decoder.with_solver(other.decoder.config.depth.solver,
                                           steps_per_layer=other.decoder.config.depth.steps_per_layer)
        assert_close(other(source, target), wanted(target, memory=memory), 1e-13)
    wrong(lambda: model.with_solver("rk4", part="both "), "part", "'encoder'")
    wrong(lambda: model.with_solver("dopri5")(source, target), "dopri5", "causal")
    own = tiny(decoder_depth=DepthConfig(solver="rk4", weights="shared"), n_decoder_layers=3,
               decoder_block=BlockConfig(8, 4, coupling="composed", norm="post"))
    _, solution = own(source, target, return_solution=True)
    assert (solution.encoder.nfe, solution.nfe) == (2, 12) and len(own.decoder.layers) == 1


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("gradient", ["checkpoint", "reversible"])
def test_every_exact_gradient_mode_reaches_the_encoder_as_backprop_does(coupling, gradient):
    model = tiny(block={"coupling": coupling})
    source, target = texts()
    grads = []
    for mode in ("backprop", gradient):
        chosen = model.with_solver("reversible_midpoint", gradient=mode, steps_per_layer=2)
        model.zero_grad()
        chosen(source, target, right_padding(SOURCE, 7, 4, 5)).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert_close(grads[1], grads[0], 1e-9)


def test_the_adjoint_gradient_reaches_the_encoder_and_converges_to_that_of_backprop():
    model = tiny(n_layers=1, block={"coupling": "parallel"})
    source, target = texts()
    grads = []
    for mode in ("backprop", "adjoint"):
        chosen = model.with_solver("rk4", gradient=mode, steps_per_layer=32)
        model.zero_grad()
        chosen(source, target).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.encoder.parameters()]))
    assert grads[0].abs().max() > 0.01
    assert_close(grads[1], grads[0], 1e-5)


def test_gradients_reach_every_parameter_and_stay_finite_where_a_source_is_all_padding():
    model = tiny(block={"attention": "local_gaussian", "attention_options": {"sigma_mode": "learned"},
                        "cross_attention": "cross_gaussian"}, depth={"solver": "rk4"})
    source, target = texts()
    model(source, target).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    untouched = [name for name, p in model.named_parameters() if p.grad.abs().max() == 0]
    assert not untouched, untouched
    model.zero_grad()
    logits = model(source, target, right_padding(SOURCE, 7, 0, 3), right_padding(TARGET, 0, 6, 6))
    assert logits.isfinite().all()
    logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_losses_of_experts_are_averaged_over_the_layers_of_both_parts_and_fusion_works_in_both():
    experts = {"feedforward": "experts", "feedforward_options": {"n_experts": 4}}
    model, (source, target) = tiny(block=experts, n_decoder_layers=3), texts()
    _, solution = model(source, target, return_solution=True)
    for name in ("balance", "router_z"):
        each = [*getattr(solution.encoder.routing, name), *getattr(solution.decoder.routing, name)]
        assert len(each) == 5 and abs(solution.losses[name] - sum(each) / 5) < 1e-12
    plain = tiny(block=experts, decoder_block=BlockConfig(8, 2))
    _, solution = plain(source, target, return_solution=True)
    assert solution.losses["balance"] == solution.encoder.losses["balance"]
    _, solution = tiny()(source, target, return_solution=True)
    assert solution.losses == {}
    _, solution = model.with_solver("reversible_midpoint", gradient="reversible", part="encoder")(
        source, target, return_solution=True)
    wrong(lambda: solution.losses["balance"], "gradient")
    fused = tiny(depth={"fusion": "learned", "solver": "midpoint", "gradient": "checkpoint"})
    logits, solution = fused(source, target, return_solution=True)
    logits.sum().backward()
    assert solution.nfe == 4 and solution.nfe_backward == solution.decoder.nfe_backward == 4


# padding and causality


@pytest.mark.parametrize("solver", ["euler", "rk4", "ab2", "dopri5"])
def test_padded_source_tokens_change_nothing_at_all(solver):
    for cross, options in (("softmax", {}), ("cross_gaussian", {}), ("cross_gaussian", {"center_mode": "ratio",
                                                                                          "ratio": 1.2})):
        model = stirred(tiny(block={"cross_attention": cross, "cross_attention_options": options}))
        model = model.with_solver(solver, part="encoder" if solver == "dopri5" else "both")
        source, target = texts()
        mask = right_padding(SOURCE, 7, 4, 1)
        other = torch.where(mask, source, (source + torch.randint(1, VOCAB, source.shape)) % VOCAB)
        a, one = model(source, target, mask, return_solution=True)
        b, two = model(other, target, mask, return_solution=True)
        assert torch.equal(a, b) and one.encoder.nfe == two.encoder.nfe
        if solver == "dopri5":  # its steps are those of the batch's hardest row
            continue
        for i, n in enumerate((7, 4, 1)):
            assert_close(a[i:i + 1], model(source[i:i + 1, :n], target[i:i + 1]), 1e-12)


def test_what_padding_holds_in_a_memory_does_not_matter_not_even_nan():
    model, (source, target) = tiny(depth={"solver": "rk4"}), texts()
    mask = right_padding(SOURCE, 7, 4, 1)
    memory = model.encode(source, mask)
    wanted = model.decode(target, memory, mask)
    spoilt = memory.masked_fill(~mask.unsqueeze(-1), float("nan"))
    assert torch.equal(model.decode(target, spoilt, mask), wanted)
    got, _ = model.decode(target, spoilt, mask, cache=model.new_cache())
    assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize("position", POSITIONS)
def test_padded_targets_change_no_real_one_on_either_side(position):
    model, (source, target) = stirred(tiny(block={"position": position}, depth={"solver": "midpoint"})), texts()
    for mask in (right_padding(TARGET, 6, 4, 2), right_padding(TARGET, 6, 4, 2).flip(1)):
        got = model(source, target, None, mask)
        other = torch.where(mask, target, (target + 1) % TARGET_VOCAB)
        assert torch.equal(model(source, other, None, mask)[mask], got[mask])
        for i, row in enumerate(mask):
            alone = model(source[i:i + 1], target[i:i + 1, row])
            assert_close(got[i:i + 1, row], alone, 1e-12)


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "window"])
def test_cross_priors_count_real_target_tokens_from_the_first(name):
    """With padding on the left of the target, cached and not, each row equals its run alone."""
    model = stirred(tiny(block={"cross_attention": name, "cross_attention_options": CROSS[name]}))
    (source, target), mask = texts(), right_padding(TARGET, 6, 4, 2).flip(1)
    with torch.no_grad():
        full, cache = model(source, target, None, mask), model.new_cache()
        memory, cached = model.encode(source), []
        for piece, seen in zip(target.split((3, 2, 1), 1), mask.split((3, 2, 1), 1), strict=True):
            cached.append(model.decode(piece, memory, None, seen, cache=cache)[0])
        cached = torch.cat(cached, 1)
        for i, row in enumerate(mask):
            alone = model(source[i:i + 1], target[i:i + 1, row])
            assert_close(full[i:i + 1, row], alone, 1e-12)
            assert_close(cached[i:i + 1, row], alone, 1e-12)


@pytest.mark.parametrize("name", CROSS)
def test_no_target_token_sees_a_later_one_and_all_see_the_whole_source(name):
    for coupling, solver in zip(COUPLINGS, itertools.cycle(("rk4", "euler", "midpoint"))):
        model = stirred(tiny(block={"coupling": coupling, "cross_attention": name,
                                    "cross_attention_options": CROSS[name]}, depth={"solver": solver}), 0.1)
        source, target = texts()
        before = model(source, target)
        later = target.clone()
        later[:, -2] = (later[:, -2] + 1) % TARGET_VOCAB
        moved = (model(source, later) - before).abs().amax((0, 2))
        assert moved[:-2].max() < 1e-13 and moved[-2:].min() > 1e-7
        for i in (0, SOURCE - 1):
            changed = source.clone()
            changed[:, i] = (changed[:, i] + 1) % VOCAB
            assert (model(changed, target) - before).abs().amax((0, 2)).min() > 1e-7


# sharing, copies, files


@pytest.mark.parametrize(("share", "tie"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_and_copied_models_give_the_same_logits_and_keep_what_is_shared(share, tie, dtype, tmp_path):
    target_vocab = VOCAB if share else TARGET_VOCAB
    model = tiny(share_embeddings=share, tie_embeddings=tie, target_vocab_size=target_vocab, dtype=dtype,
                 depth={"solver": "rk4"}, decoder_depth=DepthConfig(solver="ab2", steps_per_layer=2),
                 block={"position": "sinusoidal", "cross_attention": "cross_gaussian"})
    n_embeddings = 3 - share - tie
    source, target = texts()
    logits = model(source, target)
    model.save(tmp_path / "model")
    again = odeformer.load(tmp_path / "model")
    assert again.config == model.config
    for other in (model, again, copy.deepcopy(model), model.with_solver("rk4", part="encoder")):
        assert torch.equal(other(source, target), logits)
        matrices = {p.data_ptr() for p in (other.encoder.token_embedding.weight, other.decoder.token_embedding.weight,
                                           other.decoder.head.weight)}
        assert len(matrices) == n_embeddings
        assert len(list(other.parameters())) == len(list(model.parameters()))
        assert (other.encoder.token_embedding.weight is other.decoder.token_embedding.weight) == share
        assert (other.decoder.head.weight is other.decoder.token_embedding.weight) == tie
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert abs((tmp_path / "model" / "model.safetensors").stat().st_size - size) < 20_000 and size > 5_000


def test_a_saved_config_says_what_the_model_is(tmp_path):
    model = tiny(decoder_block=BlockConfig(8, 4, norm="post"), n_decoder_layers=3)
    model.save(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model"] == "seq2seq" and stored["config"]["decoder_block"]["norm"] == "post"
    assert stored["config"]["decoder_depth"] is None
    assert odeformer.load(tmp_path).config == model.config


def test_a_tied_embedding_gets_the_gradients_of_all_its_uses():
    model = tiny(share_embeddings=True, tie_embeddings=True, target_vocab_size=None)
    source, target = texts()[0], torch.randint(VOCAB, (3, TARGET))
    weight = model.encoder.token_embedding.weight
    (tied,) = torch.autograd.grad(model(source, target).square().sum(), weight)
    loose = copy.deepcopy(model)
    loose.decoder.token_embedding.weight = nn.Parameter(weight.detach().clone())
    loose.decoder.head.weight = nn.Parameter(weight.detach().clone())
    parts = torch.autograd.grad(loose(source, target).square().sum(), [
        loose.encoder.token_embedding.weight, loose.decoder.token_embedding.weight, loose.decoder.head.weight])
    assert_close(tied, sum(parts), 1e-12)
    assert all(part.abs().max() > 0 for part in parts)


# errors


def test_wrong_configurations_name_the_argument():
    block = BlockConfig(8, 2)
    given = {"vocab_size": 5, "max_seq_len": 4, "n_layers": 1, "block": block}
    wrong(lambda: Seq2SeqConfig(**given, target_vocab_size=0), "target_vocab_size", "0")
    wrong(lambda: Seq2SeqConfig(**given, n_decoder_layers=0), "n_decoder_layers", "0")
    wrong(lambda: Seq2SeqConfig(**given, decoder_block=BlockConfig(16, 2)), "decoder_block", "d_model = 8", "16")
    wrong(lambda: Seq2SeqConfig(**given, share_embeddings=True, target_vocab_size=6), "share_embeddings", "5", "6")
    by_length = {"cross_attention": "cross_gaussian", "cross_attention_options": {"center_mode": "ratio"}}
    wrong(lambda: tiny(block=by_length), "cross_gaussian", "length", "ratio")
    wrong(lambda: tiny(block={"cross_attention": "window"}), "cross_attention", "window")
    wrong(lambda: tiny(block={"cross_attention_options": {"window": 3}}), "cross_attention", "window")
    wrong(lambda: tiny(block={"cross_attention": "softmaxx"}), "cross_attention", "softmaxx")
    wrong(lambda: tiny(block={"cross_attention_options": {"gama": 1}}), "gama", "cross_attention")


def test_wrong_inputs_name_source_or_target_and_say_what_came():
    model, (source, target) = tiny(), texts()
    mask = torch.ones(3, SOURCE, dtype=torch.bool)
    wrong(lambda: model(source.float(), target), "source", "float32", error=TypeError)
    wrong(lambda: model(source, target.float()), "target", "float32", error=TypeError)
    wrong(lambda: model(source[0], target), "source", "(7,)")
    wrong(lambda: model(source, target[0]), "target", "(6,)")
    wrong(lambda: model(source + VOCAB, target), "source", "vocab_size = 13")
    wrong(lambda: model(source, target + TARGET_VOCAB), "target", "vocab_size = 11")
    wrong(lambda: model(source.repeat(1, 2), target), "source", "14", "max_seq_len = 12")
    wrong(lambda: model(source, target.repeat(1, 3)), "target", "18", "max_seq_len = 12")
    wrong(lambda: model(source, target[:2]), "source and target", "3 and 2")
    wrong(lambda: model(source, target, mask[:, 1:]), "source_mask", "(3, 7)", "(3, 6)")
    wrong(lambda: model(source, target, mask.float()), "source_mask", "bool", error=TypeError)
    wrong(lambda: model(source, target, mask, mask), "target_mask", "(3, 6)", "(3, 7)")
    wrong(lambda: model.encode(source, mask[:2]), "source_mask", "(2, 7)")
    memory = model.encode(source)
    wrong(lambda: model.decode(target[:2], memory), "memory", "batch = 2", "(3, 7, 8)")
    wrong(lambda: model.decode(target, memory[..., :4]), "memory", "d_model = 8", "(3, 7, 4)")
    wrong(lambda: model.decode(target, memory, mask[:, 1:]), "source_mask", "(3, 6)")
    wrong(lambda: model.decode(target, memory, mask, mask), "target_mask", "(3, 7)")
    wrong(lambda: model.decode(target + TARGET_VOCAB, memory), "target", "vocab_size = 11")
    wrong(lambda: model.decoder(target), "memory must be given")
    wrong(lambda: model.encoder.evolve(model.embed(source), memory=memory), "memory", "cross-attention")


def test_wrong_beginnings_name_start():
    model, (source, target) = tiny(), texts()
    for start in (TARGET_VOCAB, -1, 1.5, "a", None, True):
        wrong(lambda: model.generate(source, start=start, max_new_tokens=2), "start", "target_vocab_size = 11",  # noqa: B023
              repr(start))
    wrong(lambda: model.generate(source, start=target[0], max_new_tokens=2), "start", "(6,)")
    wrong(lambda: model.generate(source, start=target[:2], max_new_tokens=2), "source and start", "3 and 2")
    wrong(lambda: model.generate(source, start=target + TARGET_VOCAB, max_new_tokens=2), "start", "vocab_size")
    wrong(lambda: model.generate(source, start=target, start_mask=right_padding(TARGET, 6, 4, 5), max_new_tokens=2),
          "mask", "left")
    wrong(lambda: model.generate(source, right_padding(6, 1, 2, 3), start=1, max_new_tokens=2), "source_mask", "(3, 6)")
    wrong(lambda: model.generate(source + VOCAB, start=1, max_new_tokens=2), "source", "vocab_size")
