"""Experts within models: losses and reports of a forward pass, frozen choices, causality, caches."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig, load
from odeformer.experts import Experts
from odeformer.routing import Router

VOCAB, LENGTH = 11, 10


def tiny(kind=Encoder, *, n_layers=2, feedforward="experts", coupling="lie", experts=(), **depth):
    """A small model in float64 with four experts a layer."""
    config = DecoderConfig if kind is Decoder else EncoderConfig
    options = {"n_experts": 4, "top_k": 2, "activation": "gelu", **dict(experts)}
    block = BlockConfig(8, 2, feedforward=feedforward, feedforward_options=options, coupling=coupling)
    return kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, block=block,
                       depth=DepthConfig(**depth))).double().eval()


def tokens(batch=3, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


def padding(batch=3, length=LENGTH):
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, 6:], mask[1, :2] = False, False
    return mask


def watch(model):
    """What each evaluation of each layer's router is given and chooses: layer -> [(x, indices), ...]."""
    seen = {}
    for i, block in enumerate(model.layers):
        def hook(router, arguments, route, i=i):
            seen.setdefault(i, []).append((arguments[0], route.indices))
        block.feedforward.core.router.register_forward_hook(hook)
    return seen


@pytest.mark.parametrize("solver", ["euler", "rk4", "ab2"])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_losses_are_means_over_evaluations_and_then_layers_with_padding_left_out(kind, solver):
    model = tiny(kind, solver=solver)
    seen, mask = watch(model), padding()
    _, solution = model(tokens(), mask, return_solution=True, save_states=False)
    balances, squares, loads = [], [], []
    for i, block in enumerate(model.layers):
        assert len(seen[i]) == {"euler": 1, "rk4": 4, "ab2": 2}[solver]  # ab2 begins with midpoint
        each = []
        for x, _ in seen[i]:
            logits = (x @ block.feedforward.core.router.weight.T)[mask]
            p = logits.softmax(-1)
            f = F.one_hot(logits.topk(2).indices, 4).sum((0, 1)) / (2 * mask.sum())
            each.append((4 * (f * p.mean(0)).sum(), logits.exp().sum(-1).log().square().mean(), f))
        balance, square, share = (torch.stack(values).mean(0) for values in zip(*each, strict=True))
        balances, squares, loads = [*balances, balance], [*squares, square], [*loads, share]
    report = solution.routing
    losses = solution.losses
    for got, wanted in ((losses["balance"], sum(balances) / 2), (losses["router_z"], sum(squares) / 2),
                        (report.balance, torch.stack(balances)), (report.router_z, torch.stack(squares)),
                        (report.load, torch.stack(loads)), (report.dropped, torch.zeros(2))):
        assert got.shape == wanted.shape and (got - wanted).abs().max() < 1e-6


def test_a_model_without_experts_has_no_losses():
    plain = Encoder(EncoderConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2, block=BlockConfig(8, 2)))
    for model in (plain, tiny(feedforward="expert_slices", experts={"gate": "none", "top_k": 4})):
        _, solution = model(tokens(), return_solution=True)
        assert solution.losses == {} and solution.routing is None


@pytest.mark.parametrize("weights", ["piecewise", "shared"])
@pytest.mark.parametrize("coupling", ["lie", "strang", "parallel", "composed"])
def test_the_balance_loss_reaches_the_routers_of_all_layers_under_every_coupling(coupling, weights):
    model = tiny(coupling=coupling, weights=weights, solver="midpoint").train()
    _, solution = model(tokens(), return_solution=True)
    solution.losses["balance"].backward()
    for block in model.layers:
        assert block.feedforward.core.router.weight.grad.abs().max() > 0


def total(model, ids):
    states, solution = model(ids, return_solution=True)
    return states.square().mean() + 0.1 * solution.losses["balance"] + 0.01 * solution.losses["router_z"]


@pytest.mark.parametrize("options", [{}, {"noise": True, "jitter": 0.1}, {"routing": "solve"}, {"routing": "step"},
                                     {"capacity_factor": 0.5}])
def test_checkpointing_gives_the_gradients_of_backprop_losses_included(options):
    ids, gradients = tokens(), []
    for mode in ("backprop", "checkpoint"):
        torch.manual_seed(0)
        model = tiny(solver="rk4", gradient=mode, steps_per_layer=2, experts=options).train()
        torch.manual_seed(1)
        total(model, ids).backward()
        gradients.append([p.grad for p in model.layers.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None) and (a is None or (a - b).abs().max() < 1e-12)


@pytest.mark.parametrize(("solver", "gradient"), [("reversible_midpoint", "reversible"), ("backward_euler", "implicit"),
                                                  ("rk4", "checkpoint_recursive")])
def test_losses_are_refused_where_they_would_have_no_gradient(solver, gradient):
    model = tiny(n_layers=1, solver=solver, gradient=gradient, coupling="parallel", n_steps=4, weights="shared",
                 experts={"routing": "solve"})
    states, solution = model(tokens(), return_solution=True)
    states.sum().backward()  # the experts themselves work
    assert model.layers[0].feedforward.core.router.weight.grad.abs().max() > 0
    with pytest.raises(ValueError, match=f"no gradient under gradient='{gradient}'.*'backprop' or 'checkpoint'"):
        solution.losses["balance"]
    assert torch.isfinite(solution.routing.load).all()
    with torch.no_grad():
        _, solution = model(tokens(), return_solution=True)
    assert solution.losses["balance"] > 0


# -- frozen choices

def choices(routing, solver="rk4", **options):
    """Which choices (numbered as they come) the evaluations of a layer use, with two steps a layer."""
    model = tiny(n_layers=1, solver=solver, steps_per_layer=2, experts={"routing": routing}, **options)
    with torch.no_grad():
        model.layers[0].feedforward.core.router.weight.mul_(20)
        model.layers[0].feedforward.core.output.weight.mul_(20)
    seen = watch(model)
    model(tokens())
    known = []
    for _, indices in seen[0]:
        if not any(torch.equal(indices, k) for k in known):
            known.append(indices)
    return [next(i for i, k in enumerate(known) if torch.equal(indices, k)) for _, indices in seen[0]]


@pytest.mark.parametrize("coupling", ["lie", "strang", "parallel", "composed"])
def test_a_choice_lasts_for_an_evaluation_a_step_or_a_solve(coupling):
    assert len(set(choices("evaluation", coupling=coupling))) == 8
    assert choices("step", coupling=coupling) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert choices("solve", coupling=coupling) == [0] * 8


def test_a_frozen_choice_keeps_its_weights_moving_and_belongs_to_one_pass():
    model = tiny(solver="rk4", experts={"routing": "solve"})
    gates = []
    model.layers[0].feedforward.core.router.register_forward_hook(lambda *call: gates.append(call[2].gates))
    ids = tokens()
    first = model(ids)
    assert all(not torch.equal(gates[0], g) for g in gates[1:4])
    model(tokens())
    assert torch.equal(model(ids), first)


def errors(routing, top_k, steps, reference=256):
    """Errors at l = 1 against a solve with many steps."""
    torch.manual_seed(0)
    model = tiny(n_layers=1, coupling="parallel", solver="rk4", experts={"routing": routing, "top_k": top_k})
    with torch.no_grad():
        model.layers[0].feedforward.core.router.weight.mul_(3)
        z = 3 * model.embed(torch.arange(LENGTH)[None])
        exact = model.with_solver("rk4", n_steps=reference).evolve(z).z
        return [(model.with_solver("rk4", n_steps=n).evolve(z).z - exact).norm().item() for n in steps]


def slope(steps, errors):
    return -math.log(errors[-1] / errors[0]) / math.log(steps[-1] / steps[0])


@pytest.mark.parametrize(("routing", "top_k", "low", "high"), [
    ("evaluation", 4, 3.8, 4.2),  # all chosen: the mixture is smooth
    ("solve", 1, 3.8, 4.2), ("solve", 2, 3.8, 4.2),  # smooth, but another field
    ("evaluation", 1, 0.5, 1.5), ("step", 1, 0.5, 1.5),  # f jumps within some step, wherever the choice is made
])
def test_measured_order_of_rk4_under_each_routing(routing, top_k, low, high):
    steps = (4, 8, 16, 32)
    assert low < slope(steps, errors(routing, top_k, steps)) < high


def test_adaptive_solvers_need_a_frozen_choice():
    nfe = {}
    for routing in ("evaluation", "solve"):
        torch.manual_seed(0)
        model = tiny(n_layers=1, coupling="parallel", solver="dopri5", rtol=1e-4, atol=1e-6,
                     experts={"routing": routing, "top_k": 1})
        nfe[routing] = model(torch.arange(LENGTH)[None], return_solution=True)[1].nfe
    assert nfe["evaluation"] > 3 * nfe["solve"]


@pytest.mark.parametrize("change", [{"solver": "dopri5", "rtol": 1e-3}, {"solver": "rk4",
                                                                         "gradient": "checkpoint_recursive"}])
def test_choices_a_step_are_refused_where_steps_are_not_taken_one_by_one(change):
    with pytest.raises(ValueError, match="routing='step' cannot be used with"):
        tiny(experts={"routing": "step"}, coupling="parallel", **change)
    model = tiny(experts={"routing": "step"}, coupling="parallel")
    with pytest.raises(ValueError, match="routing='step' cannot be used with"):
        model.with_solver(**change)


def test_noise_is_drawn_once_a_solve_for_each_layer():
    model = tiny(solver="rk4", n_layers=2, weights="shared", experts={"noise": True}).train()
    nn.init.zeros_(model.layers[0].feedforward.core.router.weight)  # logits are then the noise alone
    seen = watch(model)
    model(tokens())
    assert all(torch.equal(indices, seen[0][0][1]) for _, indices in seen[0])


# -- causality, padding, caches

@pytest.mark.parametrize("capacity_factor", [None, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("solver", ["euler", "rk4", "ab2"])
def test_causal_experts_let_nothing_of_the_future_or_of_batch_mates_through(solver, capacity_factor):
    model = tiny(Decoder, solver=solver, experts={"capacity_factor": capacity_factor, "top_k": 1})
    ids = tokens(4)
    whole, solution = model(ids, return_solution=True)
    assert (solution.routing.dropped > 0).all() == (capacity_factor in (0.25, 0.5, 1.0))
    for t in range(1, LENGTH):
        other = ids.clone()
        other[:, t:] = (other[:, t:] + 1 + torch.arange(LENGTH - t)) % VOCAB
        assert (model(other)[:, :t] - whole[:, :t]).abs().max() < 1e-12
        assert (model(ids[:, :t]) - whole[:, :t]).abs().max() < 1e-12
    for row, out in zip(ids, whole, strict=True):
        assert (model(row[None])[0] - out).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_padding_changes_nothing(kind, capacity_factor):
    model = tiny(kind, solver="midpoint", experts={"capacity_factor": capacity_factor})
    ids, mask = tokens(1, 6), torch.ones(1, LENGTH, dtype=torch.bool)
    mask[0, 6:] = False
    padded = torch.cat([ids, tokens(1, LENGTH - 6)], 1)
    (a, short), (b, long) = model(ids, return_solution=True), model(padded, mask, return_solution=True)
    assert (a - b[:, :6]).abs().max() < 1e-12
    assert (short.losses["balance"] - long.losses["balance"]).abs() < 1e-12
    assert (short.routing.dropped - long.routing.dropped).abs().max() < 1e-12


def test_cached_is_uncached_and_a_capacity_refuses_a_cache():
    model = tiny(Decoder, solver="rk4", experts={"routing": "solve"})
    ids = tokens(2)
    whole, cache = model(ids), model.new_cache()
    parts = []
    with torch.no_grad():
        for chunk in ids.split([4, 1, 5], 1):
            logits, cache = model(chunk, cache=cache)
            parts.append(logits)
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-12
    limited = tiny(Decoder, experts={"capacity_factor": 1.0})
    with pytest.raises(ValueError, match="capacity_factor cannot be used with a cache"), torch.no_grad():
        limited(ids, cache=limited.new_cache())
    text = limited.generate(ids[:, :4], max_new_tokens=5, cache=None)
    assert torch.equal(text[:, 4:], limited(text[:, :-1])[:, 3:].argmax(-1))  # a prefix is served as in the whole


# -- models

def test_zero_outputs_make_the_model_the_identity_and_every_expert_trains():
    model = tiny(solver="rk4").train()
    ids = tokens(8)
    total(model, ids).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.layers.parameters())
    for name, p in model.layers.named_parameters():
        if ".output." in name:
            nn.init.zeros_(p)
    _, solution = model(ids, return_solution=True)
    assert (solution.z - model.embed(ids)).abs().max() < 1e-14


@pytest.mark.parametrize(("init", "hidden", "output"), [
    ("gpt2", 0.02, 0.02 / 2), ("xavier_uniform", (2 / 96) ** 0.5, (2 / 96) ** 0.5)])
def test_initialisers_draw_each_expert_as_a_matrix_of_its_own(init, hidden, output):
    block = BlockConfig(32, 2, d_ff=64, feedforward="experts", init=init)
    model = Encoder(EncoderConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2, block=block))
    core = model.layers[1].feedforward.core
    for stack, std in ((core.hidden, hidden), (core.output, output)):
        assert (stack.weight.std((1, 2)) / std - 1).abs().max() < 0.1
        assert not stack.bias.any()


def test_saved_and_loaded_the_outputs_are_the_same_bit_for_bit(tmp_path):
    model = tiny(Decoder, solver="rk4", experts={"activation": "swiglu", "capacity_factor": 1.0}).float()
    model.save(tmp_path)
    other = load(tmp_path)
    ids = tokens()
    assert torch.equal(other(ids), model(ids))
    assert isinstance(other.layers[0].feedforward.core, Experts)


def test_a_model_with_experts_compiles_to_one_graph():
    model = tiny(solver="midpoint", n_layers=1, experts={"routing": "solve"})
    ids = tokens()
    compiled = torch.compile(lambda ids: model(ids), backend="eager", fullgraph=True)
    assert (compiled(ids) - model(ids)).abs().max() < 1e-12


def test_the_router_stays_float32_in_a_model_under_autocast():
    model = tiny(solver="rk4").float()
    kinds = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda router, arguments, route: kinds.append(route.gates.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        _, solution = model(tokens(), return_solution=True)
    assert set(kinds) == {torch.float32} and solution.losses["balance"].dtype == torch.float32
    _, solution = model.bfloat16()(tokens(), return_solution=True)
    assert solution.losses["balance"].dtype == torch.float32
