"""Gradient modes of whole models: each against backprop, with dropout, layer drop, shared weights, experts, autocast;
and what a deep reversible model holds for backward."""

import pytest
import torch
from smooth_models import LENGTH, gap, state, tiny, tokens

from odeformer import Decoder, DecoderConfig

MODES = {"checkpoint": "rk4", "checkpoint_recursive": "rk4", "reversible": "reversible_midpoint"}
SETTINGS = {
    "dropout": {"block": {"dropout": 0.3}},
    "layer drop": {"layer_drop": 0.4},
    "both": {"block": {"dropout": 0.2, "coupling": "lie"}, "layer_drop": 0.3},
    "padding": {},
    "an injected input": {"injection": True},
    "fusion": {"fusion": "learned"},
    "a random end": {"steer": 0.5},
}
WEIGHTS = ("piecewise", "shared", "cycle", "spline", "modulated")


def gradients(mode, solver, weights, *, dtype=torch.float64, masked=False, autocast=False, **options):
    model = tiny(solver=solver, gradient=mode, weights=weights, moved=0.1, **options).to(dtype).train()
    z = state().to(dtype).requires_grad_()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 4:] = not masked
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        solution = model.evolve(z, mask if masked else None)
    real = mask.unsqueeze(-1) if masked else torch.ones(2, LENGTH, 1, dtype=torch.bool)
    (solution.z * real).cos().sum().backward()
    return [z.grad, *(p.grad for p in model.layers.parameters())], solution


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_gives_the_gradient_of_backprop(mode, setting, weights):
    options = {**SETTINGS[setting], "masked": setting == "padding"}
    if setting == "fusion" and weights in ("spline", "modulated"):
        pytest.skip("fusion acts between layers")
    mine, solution = gradients(mode, MODES[mode], weights, **options)
    wanted, reference = gradients("backprop", MODES[mode], weights, **options)
    assert (solution.z - reference.z).abs().max() < 1e-12
    assert gap(mine, wanted) < 1e-8
    assert solution.nfe == reference.nfe and solution.nfe_backward > 0 == reference.nfe_backward


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_recursive"])
def test_autocast_is_the_same_on_the_way_back(mode, weights):
    """Recomputed in bf16 as before: equal to backprop to the resolution of bf16, and far from a float32 backward."""
    options = {"dtype": torch.float32, "autocast": True, "block": {"dropout": 0.2}}
    mine, solution = gradients(mode, "midpoint", weights, **options)
    wanted, reference = gradients("backprop", "midpoint", weights, **options)
    assert solution.z.dtype == torch.float32 and torch.equal(solution.z, reference.z)
    assert gap(mine, wanted) < 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_experts_are_routed_alike_on_the_way_back(mode):
    options = {"block": {"feedforward": "experts", "d_ff": 8, "feedforward_options": {"n_experts": 3, "top_k": 1}}}
    mine, _ = gradients(mode, MODES[mode], "piecewise", **options)
    wanted, _ = gradients("backprop", MODES[mode], "piecewise", **options)
    assert all(x is not None for x in wanted)
    assert gap(mine, wanted) < 1e-8


@pytest.mark.filterwarnings("ignore:gradient=.adjoint")
@pytest.mark.parametrize("weights", ["piecewise", "shared", "spline"])
@pytest.mark.parametrize("setting", ["dropout", "layer drop", "padding"])  # an injected input contracts: see adjoint.py
def test_the_adjoint_is_near_backprop_and_nearer_with_more_steps(setting, weights):
    """The gradient of the flow, not of the steps: a tolerance, not an identity."""
    options = {**SETTINGS[setting], "masked": setting == "padding"}
    gaps = [gap(gradients("adjoint", "rk4", weights, steps_per_layer=n, **options)[0],
                gradients("backprop", "rk4", weights, steps_per_layer=n, **options)[0]) for n in (3, 9)]
    assert gaps[1] < gaps[0] / 3 and gaps[1] < 0.05, gaps


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("setting", ["dropout", "layer drop", "padding"])
def test_implicit_solvers_are_differentiated_by_the_implicit_function_theorem(setting, weights):
    options = {**SETTINGS[setting], "masked": setting == "padding", "steps_per_layer": 2,
               "solver_options": {"tol": 1e-10}}
    mine, _ = gradients("implicit", "implicit_midpoint", weights, **options)
    wanted, _ = gradients("backprop", "implicit_midpoint", weights, **options)
    assert gap(mine, wanted) < 1e-6


@pytest.mark.filterwarnings("ignore:gradient=.adjoint")
@pytest.mark.parametrize("weights", [*WEIGHTS, "linear", "hyper", "lowrank"])
@pytest.mark.parametrize("mode", [*MODES, "adjoint"])
def test_parameters_from_functional_call_get_the_gradient(mode, weights):
    """Backward evaluates the field again when the model has its own parameters back: it must see those of the call."""
    torch.manual_seed(0)
    model = tiny(solver=MODES.get(mode, "rk4"), gradient=mode, weights=weights, moved=0.1, steps_per_layer=2)
    other = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, other, (tokens(),)).cos().sum().backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(other[name])
    again = model if mode == "adjoint" else model.with_solver(MODES[mode], gradient="backprop")
    again(tokens()).cos().sum().backward()
    pairs = [(other[name].grad, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    assert gap(*map(list, zip(*pairs, strict=True))) < 1e-8


def held(mode, solver, n_layers, weights):
    """Bytes that autograd keeps for backward, each tensor once, parameters left out; forward only."""
    model = tiny(Decoder, DecoderConfig, n_layers=n_layers, solver=solver, gradient=mode, weights=weights).train()
    parameters, kept = {p.data_ptr() for p in model.parameters()}, {}

    def pack(x):
        if x.data_ptr() not in parameters:
            kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens(4)).sum()
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("weights", ["piecewise", "shared", "spline"])
def test_a_reversible_model_of_48_layers_holds_what_a_few_layers_of_backprop_do(weights):
    deep = held("reversible", "reversible_midpoint", 48, weights)
    assert deep < held("backprop", "reversible_midpoint", 3, weights)
    assert deep < 1.15 * held("reversible", "reversible_midpoint", 6, weights)
    six, twelve = (held("backprop", "reversible_midpoint", n, weights) for n in (6, 12))
    assert twelve > 1.8 * six
