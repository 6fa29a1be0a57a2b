"""Layer drop (eq. 31) and pruning: what is drawn, what a dropped layer is, what evaluation scales, what prune cuts."""

import copy
import math

import pytest
import torch
from torch import nn

import odeformer
import odeformer.models.base
from odeformer import (
    NORMS,
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
    prune,
)
from odeformer.layer_drop import draw, survival
from solvers import SOLVERS

VOCAB, LENGTH, D = 17, 6, 8
COUPLINGS = sorted(odeformer.COUPLINGS)


def tiny(kind=Encoder, config=EncoderConfig, *, n_layers=3, block=(), more=(), **depth):
    """A small model in float64, in training mode."""
    torch.manual_seed(0)
    return kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, block=BlockConfig(D, 2, **dict(block)),
                       depth=DepthConfig(**depth), **dict(more))).double().train()


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def seeded(model, seed=3, ids=None):
    torch.manual_seed(seed)
    return model(tokens() if ids is None else ids)


def forced(monkeypatch, *factors):
    """Every forward pass draws these factors."""
    monkeypatch.setattr(odeformer.models.base, "draw", lambda *_: [torch.tensor(float(x)) for x in factors])


def layer_norm(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize(("schedule", "rho"), [("constant", [0.7, 0.7, 0.7]), ("linear", [0.9, 0.8, 0.7])])
def test_eq_31_evaluation_multiplies_each_sublayer_by_the_odds_of_its_layer(schedule, rho):
    model = tiny(layer_drop=0.3, layer_drop_schedule=schedule, block={"norm": "res"}).eval()
    z = wanted = model.embed(tokens())
    for block, p in zip(model.layers, rho, strict=True):
        for sublayer in block.sublayers:
            wanted = p * layer_norm(sublayer.core(wanted), sublayer.placement.norm) + wanted
    assert (model.evolve(z, None).z - wanted).abs().max() < 1e-12
    assert survival(0.3, schedule, 3) == pytest.approx(rho)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize("per", ["sample", "batch"])
def test_layers_are_kept_as_often_as_their_odds_say(per, schedule):
    torch.manual_seed(0)
    z, p, n = torch.zeros(50, 2, D), 0.4, 200
    draws = [draw(p, per, schedule, 4, z, True) for _ in range(n)]
    shape, rows = ((50, 1, 1), 50) if per == "sample" else ((), 1)
    for i in range(4):
        kept = torch.stack([factors[i] for factors in draws])
        assert kept.shape == (n, *shape) and set(kept.unique().tolist()) == {0.0, 1.0}
        rho = 1 - (p if schedule == "constant" else p * (i + 1) / 4)
        assert abs(kept.mean() - rho) < 4 * math.sqrt(rho * (1 - rho) / (n * rows))
    first, second = (torch.stack([factors[i] for factors in draws]).flatten() for i in (2, 3))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 4 / math.sqrt(n * rows)


def test_training_is_right_on_average():
    """E[z + keep F(z)] = z + ρ F(z): the mean over 4000 rows is within 5 standard errors of evaluation."""
    model = tiny(n_layers=1, layer_drop=0.4, block={"coupling": "parallel"})
    z = model.embed(tokens(batch=1)).detach().expand(4000, -1, -1)
    with torch.no_grad():
        torch.manual_seed(0)
        drawn = model.evolve(z, None).z
        whole = model.eval().evolve(z[:1], None).z
    error = drawn.std(0) / math.sqrt(4000)
    assert ((drawn.mean(0) - whole[0]).abs() <= 5 * error + 1e-12).all()
    assert (error > 0).all()


ONE_STEP = ("euler", "rk4", "yoshida4", "ab3", "leapfrog", "alf", "backward_euler", "dopri5")


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_dropped_layer_leaves_the_state_as_it_was_bit_for_bit(norm, coupling, monkeypatch):
    model = tiny(layer_drop=0.5, block={"norm": norm, "coupling": coupling})
    with torch.no_grad():
        for p in model.layers.parameters():
            p.add_(0.1 * torch.randn_like(p))
    forced(monkeypatch, 1, 0, 1)
    _, solution = model(tokens(), return_solution=True)
    assert torch.equal(solution.states[1], solution.states[2])
    assert not torch.equal(solution.states[2], solution.states[3])


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("solver", ONE_STEP)
def test_a_dropped_layer_is_dropped_at_every_stage_of_every_step_of_every_kind_of_solver(solver, coupling, monkeypatch):
    model = tiny(solver=solver, layer_drop=0.5, weights="shared", block={"coupling": coupling},
                 **({} if SOLVERS[solver].is_adaptive else {"steps_per_layer": 2}))
    with torch.no_grad():
        for p in model.layers.parameters():
            p.mul_(0.3)
    forced(monkeypatch, 1, 0, 1)
    _, solution = model(tokens(), return_solution=True)
    one, two = (solution.states[solution.depths.index(l)] for l in (1, 2))
    assert (one - two).abs().max() <= (1e-14 if SOLVERS[solver].is_adaptive or SOLVERS[solver].is_implicit else 0)
    assert (two - solution.z).abs().max() > 1e-3


def test_draws_come_from_torchs_generator_and_once_a_forward_pass():
    model = tiny(layer_drop=0.5, solver="rk4")
    ids = tokens(batch=16)
    assert torch.equal(seeded(model, 3, ids), seeded(model, 3, ids))
    assert not torch.equal(seeded(model, 3, ids), seeded(model, 4, ids))
    torch.manual_seed(5)
    draw(0.5, "sample", "constant", 3, model.embed(ids), True)
    after = torch.rand(1)
    seeded(model, 5, ids)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(model.eval()(ids), model(ids))
    before = set(dir(model)) | set(dir(model.layers))
    model.train()(ids)
    assert set(dir(model)) | set(dir(model.layers)) == before


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("gradient", ["checkpoint", "checkpoint_recursive", "reversible"])
def test_gradient_modes_that_compute_again_drop_the_same_layers(gradient, coupling):
    model, grads = tiny(layer_drop=0.4, block={"coupling": coupling, "dropout": 0.2}), []
    for mode in ("backprop", gradient):
        model.zero_grad()
        out = seeded(model.with_solver("reversible_midpoint", gradient=mode, steps_per_layer=2))
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (grads[0] - grads[1]).abs().max() < 1e-9 * grads[0].abs().max()


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_data_parallel_training_meets_every_parameter_in_every_step(per, tmp_path):
    """One process of DistributedDataParallel, which refuses a second step if some parameter had no gradient."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = tiny(layer_drop=0.6, layer_drop_per=per)
        alone = copy.deepcopy(model)
        parallel = nn.parallel.DistributedDataParallel(model)
        for seed in range(4):
            for x in (parallel, alone):
                x.zero_grad()
                seeded(x, seed).square().sum().backward()
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["piecewise", "shared"])
def test_layer_drop_compiles_to_one_graph_with_the_same_draws(weights):
    model = tiny(layer_drop=0.5, weights=weights, block={"dropout": 0.2})
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for seed in (3, 4):
        assert torch.equal(seeded(compiled, seed), seeded(model, seed))


def test_a_shared_field_becomes_one_piece_a_layer():
    model = tiny(weights="shared", layer_drop=0.3)
    context = odeformer.block.Context(keep=[0.7, 0.7, 0.7])
    assert len(model.layers.field("lie", context).pieces) == 3
    wrong(lambda: tiny(weights="shared", layer_drop=0.3, n_steps=4), "n_steps", "n_layers = 3", "4")
    tiny(weights="shared", n_steps=4)(tokens())


def test_a_fusion_after_a_norm_scales_after_the_norm_as_eq_31_does():
    model = tiny(layer_drop=0.3, fusion="residual", fusion_options={"form": "post", "stride": 2}).eval()
    with torch.no_grad():
        for p in model.fusion.parameters():
            p.add_(torch.randn_like(p))
    z = model.embed(tokens())
    solution = model.evolve(z, None, save=True)

    def f(block, z, rho=1.0):
        a, b = block.attention, block.feedforward
        y = z + rho * a.core(a.placement.norm(z))
        return y + rho * b.core(b.placement.norm(y)) - z

    one = z + f(model.layers[0], z, 0.7)
    two = one + 0.7 * layer_norm(f(model.layers[1], one), model.fusion.form.norms["1"])
    assert (solution.states[1] - one).abs().max() < 1e-12
    assert (solution.states[2] - two).abs().max() < 1e-12


def test_a_dropped_layer_contributes_nothing_to_a_fusion(monkeypatch):
    forced(monkeypatch, 1, 0, 1)
    for form in ("plain", "post"):
        model = tiny(layer_drop=0.3, fusion="learned", fusion_options={"form": form})
        _, solution = model(tokens(), return_solution=True)
        assert torch.equal(solution.states[1], solution.states[2])


# prune

@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_pruned_model_is_the_network_that_was_drawn_without_the_other_layers(norm, coupling, monkeypatch, tmp_path):
    model = tiny(n_layers=4, layer_drop=0.5, layer_drop_schedule="linear", block={"norm": norm, "coupling": coupling},
                 solver="rk4")
    with torch.no_grad():
        for p in model.layers.parameters():
            p.add_(0.1 * torch.randn_like(p))
    forced(monkeypatch, 0, 1, 0, 1)
    wanted = model(tokens())
    monkeypatch.undo()
    pruned = prune(model, keep=[1, 3])
    assert pruned.config.n_layers == 2 and pruned.config.depth.layer_drop == 0 and pruned.training
    assert torch.equal(pruned(tokens()), wanted) and torch.equal(pruned.eval()(tokens()), wanted)
    pruned.save(tmp_path)
    assert torch.equal(odeformer.load(tmp_path)(tokens()), wanted)
    assert model.config.n_layers == 4 and len(model.layers) == 4


def test_pruning_copies_and_keeps_ties_dtypes_and_what_is_frozen():
    model = tiny(Decoder, DecoderConfig, layer_drop=0.2, more={"tie_embeddings": True}).float().eval()
    model.layers[2].requires_grad_(False)
    state = torch.get_rng_state()
    pruned = prune(model, keep=[0, 2])
    assert torch.equal(torch.get_rng_state(), state)
    assert pruned.head.weight is pruned.token_embedding.weight
    assert not pruned.training and not pruned.layers.training
    assert not any(p.requires_grad for p in pruned.layers[1].parameters())
    assert {p.dtype for p in pruned.parameters()} == {torch.float32}
    assert not {p.data_ptr() for p in pruned.parameters()} & {p.data_ptr() for p in model.parameters()}
    whole = prune(model, keep=range(3))
    plain = tiny(Decoder, DecoderConfig, more={"tie_embeddings": True}).float().eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(whole(tokens()), plain(tokens()))


@pytest.mark.parametrize(("weights", "n_knots", "keep", "blocks"), [
    ("shared", None, [1, 4], 1), ("cycle", 3, [0, 1, 2], 3), ("cycle", 2, [1, 2, 3, 4], 2),
    ("sequence", 3, [0, 1, 3], 2), ("sequence", 2, [0, 5], 2), ("cycle_rev", 3, [1, 2, 3, 4], 2)])
def test_pruned_models_share_blocks_as_the_kept_layers_did(weights, n_knots, keep, blocks, monkeypatch, tmp_path):
    options = {} if n_knots is None else {"n_knots": n_knots}
    model = tiny(n_layers=6, layer_drop=0.3, weights=weights, weights_options=options, solver="rk4")
    forced(monkeypatch, *(float(i in keep) for i in range(6)))
    wanted = model(tokens())
    monkeypatch.undo()
    pruned = prune(model, keep=keep)
    assert len(pruned.layers) == blocks and pruned.config.n_layers == len(keep)
    assert (pruned(tokens()) - wanted).abs().max() < 1e-12
    pruned.save(tmp_path)
    assert torch.equal(odeformer.load(tmp_path)(tokens()), pruned.eval()(tokens()))


def test_both_sides_of_an_encoder_decoder_are_pruned(tmp_path):
    model = tiny(Seq2Seq, Seq2SeqConfig, layer_drop=0.3, more={"n_decoder_layers": 4, "share_embeddings": True,
                                                               "tie_embeddings": True}).eval()
    pruned = prune(model, keep=[2], decoder_keep=[0, 3])
    assert (pruned.config.n_layers, pruned.config.n_decoder_layers) == (1, 2)
    assert pruned.decoder.head.weight is pruned.encoder.token_embedding.weight
    out = pruned(tokens(), tokens())
    pruned.save(tmp_path)
    assert torch.equal(odeformer.load(tmp_path)(tokens(), tokens()), out)
    assert prune(model, keep=[0, 1]).config.n_decoder_layers == 4


def test_learned_solvers_and_numbers_of_steps_go_along():
    model = tiny(solver="rk2_gate")
    with torch.no_grad():
        model.solver.weight.add_(1)
    assert prune(model, keep=[0, 1]).solver.weight.equal(model.solver.weight)
    shared = tiny(n_layers=4, weights="shared", n_steps=6)
    assert prune(shared, keep=[0, 1]).config.depth.n_steps == 3
    wrong(lambda: prune(shared, keep=[0]), "n_steps = 6", "4 layers")
    fixed = tiny(fusion="fixed", fusion_options={"a": [1], "b": [3 / 2, -1 / 2]})
    assert prune(fixed, keep=[0, 1]).fusion.n_layers == 2


def wrong(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_what_cannot_be_pruned_is_refused_with_a_reason():
    model = tiny()
    for keep in ([], [1, 0], [0, 0], [3], [-1], [0.0]):
        wrong(lambda keep=keep: prune(model, keep=keep), "keep", "0 to 2")
    wrong(lambda: prune(model, keep=[0], decoder_keep=[0]), "decoder_keep", "Encoder")
    wrong(lambda: prune(nn.Linear(2, 2), keep=[0]), "Linear", error=TypeError)
    wrong(lambda: prune(tiny(fusion="learned"), keep=[0, 1]), "fusion", "learned")
    wrong(lambda: prune(tiny(solver="dense", block={"coupling": "composed"}), keep=[0, 1]), "dense", "each step")
    wrong(lambda: prune(tiny(n_layers=6, weights="sequence", weights_options={"n_knots": 3}), keep=[0, 2, 3, 4]),
          "[0, 1, 1, 2]", "sequence", "[0, 0, 1, 2]")
    smooth = tiny()
    smooth.layers.by_layer = False
    wrong(lambda: prune(smooth, keep=[0]), "weights", "within layers")


def test_wrong_options_are_refused():
    for value in (1.0, -0.1, "much"):
        wrong(lambda value=value: DepthConfig(layer_drop=value), "layer_drop", str(value))
    wrong(lambda: DepthConfig(layer_drop_per="token"), "layer_drop_per", "token", "sample, batch")
    wrong(lambda: DepthConfig(layer_drop_schedule="cosine"), "layer_drop_schedule", "cosine", "linear")
    rows = {"solver": "dopri54", "solver_options": {"per_sample": True}}
    wrong(lambda: tiny(layer_drop=0.1, **rows), "dopri54", "compact")
    tiny(layer_drop=0.1, solver="dopri54", solver_options={"per_sample": True, "compact": False})(tokens())
