"""Penalties on the dynamics, against closed forms, dense Jacobians and finite differences."""

from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.linalg import expm

import odeformer.regularizers as module
from odeformer import BlockConfig, DepthConfig, Encoder, EncoderConfig, Seq2Seq, Seq2SeqConfig
from odeformer.regularizers import REGULARIZERS, check_weights, penalties
from odeformer.weights import WEIGHTS
from solvers import solve

F64 = torch.float64
VOCAB, LENGTH = 11, 6
ON_A_PATH = ("kinetic_energy", "jacobian_frobenius", "acceleration")
A = torch.tensor([[-0.3, 1.0, 0.2], [-0.8, 0.1, 0.0], [0.4, 0.3, -0.5]], dtype=F64)
B = torch.tensor([0.5, -0.2, 0.3], dtype=F64)
Z0 = torch.tensor([[[1.0, -0.5, 0.3], [0.2, 0.7, -1.0]]], dtype=F64)
END = 2.0


def run(f, n, solver="rk4", z0=Z0, **options):
    """A stand-in for a model and the Solution of its pass."""
    solution = solve(f, z0, span=(0.0, END), n_steps=n, solver=solver, save_at="steps", **options)
    return (SimpleNamespace(solver=SimpleNamespace(name=solver)),
            SimpleNamespace(states=solution.states, depths=solution.depths, field=f, mask=None))


def linear(z, l):
    return z @ A.T


def tiny(*, n_layers=3, block=(), **depth):
    """A small encoder in float64, its parameters drawn at random so that weights differ along depth."""
    config = EncoderConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers,
                           block=BlockConfig(**{"d_model": 4, "n_heads": 2, "d_ff": 6, "coupling": "parallel"} |
                                             dict(block)), depth=DepthConfig(**depth))
    model = Encoder(config).double().eval()
    with torch.no_grad():
        for p in model.layers.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def passed(model, tokens=None, mask=None):
    return model(torch.randint(VOCAB, (2, LENGTH)) if tokens is None else tokens, mask, return_solution=True)[1]


def penalty(name, model, solution):
    torch.manual_seed(5)  # of the probes
    return REGULARIZERS[name](model, solution)


def exact(density):
    """∫ density(l, z(l)) dl along the flow of f = A z, a mean over entries; density takes numpy rows."""
    rows, a = Z0.reshape(-1, 3).numpy(), A.numpy()
    return quad(lambda l: (density(l, rows @ expm(l * a).T) ** 2).mean(), 0, END, epsabs=1e-12)[0]


def converges(name, f, wanted, ns=(32, 64)):
    errors = [abs(penalty(name, *run(f, n)).item() - wanted) for n in ns]
    assert errors[1] < 1e-2 * wanted
    assert 1.8 < np.log2(errors[0] / errors[1]) < 2.2, errors


# Against closed forms


def test_kinetic_energy_of_a_linear_field_is_its_integral_up_to_second_order_and_from_below():
    wanted = exact(lambda l, z: z @ A.numpy().T)
    converges("kinetic_energy", linear, wanted)
    assert penalty("kinetic_energy", *run(linear, 16)).item() < wanted


def test_kinetic_energy_under_euler_is_the_sum_of_h_f_squared():
    z, h, total = Z0, END / 5, 0
    for _ in range(5):
        total += h * (z @ A.T).square().mean()
        z = z + h * z @ A.T
    assert abs(penalty("kinetic_energy", *run(linear, 5, "euler")) - total) < 1e-14


def test_transport_is_the_squared_way_and_at_most_length_times_kinetic_energy():
    model, solution = run(linear, 20)
    wanted = ((Z0.reshape(-1, 3).numpy() @ (expm(END * A.numpy()) - np.eye(3)).T) ** 2).mean()
    assert penalty("transport", model, solution).item() == pytest.approx(wanted, rel=1e-5)
    assert penalty("transport", model, solution) < END * penalty("kinetic_energy", model, solution)
    straight = run(lambda z, l: B.expand_as(z), 7)
    assert penalty("transport", *straight).item() == pytest.approx(END**2 * B.square().mean().item(), rel=1e-12)
    assert penalty("kinetic_energy", *straight).item() == pytest.approx(END * B.square().mean().item(), rel=1e-12)


def test_acceleration_of_a_field_that_moves_with_depth_is_its_integral():
    """f = A z + l b: z'' = A f + b."""
    augmented = np.zeros((5, 5))  # (z, l, 1)
    augmented[:3, :3], augmented[:3, 3], augmented[3, 4] = A, B, 1

    def density(l):
        y = np.concatenate([Z0.reshape(-1, 3).numpy(), np.tile([0.0, 1.0], (2, 1))], 1) @ expm(l * augmented).T
        turn = (y[:, :3] @ A.numpy().T + l * B.numpy()) @ A.numpy().T + B.numpy()
        return (turn**2).mean()

    converges("acceleration", lambda z, l: z @ A.T + l * B, quad(density, 0, END, epsabs=1e-12)[0])
    assert penalty("acceleration", *run(lambda z, l: B.expand_as(z), 4)) == 0


def test_jacobian_of_a_field_entry_by_entry_needs_no_luck():
    """(ε_i a_i)² = a_i²: every probe is exact. z' = a z, a = (1, -2, 0.5): ∫ |a|² dl / d."""
    a = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    got = penalty("jacobian_frobenius", *run(lambda z, l: a * z, 9)).item()
    assert got == pytest.approx(END * a.square().mean().item(), rel=1e-12)
    converges("jacobian_frobenius", lambda z, l: z.sin(), quad_of_sine())


def quad_of_sine():
    """∫ cos² z dl with z' = sin z: tan(z / 2) grows like e^l."""
    starts = np.tan(Z0.reshape(-1).numpy() / 2)
    return quad(lambda l: (np.cos(2 * np.arctan(starts * np.exp(l))) ** 2).mean(), 0, END, epsabs=1e-12)[0]


def test_hutchinson_over_many_probes_is_the_frobenius_norm_of_a_matrix():
    torch.manual_seed(0)
    got = module.jacobian_frobenius(*run(linear, 1), n_probes=20_000 // 6).item()
    gram = (A @ A.T).numpy()
    wanted = END * np.trace(gram) / 3
    spread = END / 3 * np.sqrt(2 * ((gram**2).sum() - (np.diag(gram) ** 2).sum()) / 20_000)
    assert abs(got - wanted) < 4 * spread


@pytest.mark.parametrize("weights", ["piecewise", "spline"])
def test_all_probes_together_give_the_norm_of_the_dense_jacobian_of_a_model(weights, monkeypatch):
    """Over every vector of signs the estimate is no estimate."""
    model = tiny(n_layers=2, weights=weights, block={"d_model": 2, "n_heads": 1, "position": "learned"}, solver="rk4")
    solution = passed(model, torch.randint(VOCAB, (1, 3)))
    signs = iter([torch.tensor(e, dtype=F64).view(1, 3, 2) for e in product((-1.0, 1.0), repeat=6)])
    monkeypatch.setattr(module, "_signs", lambda x: next(signs))
    got, wanted = module.jacobian_frobenius(model, solution, n_probes=64), 0
    for i, (a, b) in enumerate(pairwise(solution.states)):
        l = torch.tensor(i + 0.5, dtype=F64)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            dense = torch.autograd.functional.jacobian(lambda z, l=l: solution.field(z, l), (a + b) / 2)
        wanted = wanted + dense.square().sum() / 6
    assert abs(got - wanted) < 1e-12 * wanted


def test_one_draw_of_probes_serves_all_depths_of_a_pass(monkeypatch):
    drawn = []
    monkeypatch.setattr(module, "_signs", lambda x: drawn.append(x.shape) or torch.ones_like(x))
    module.jacobian_frobenius(*run(linear, 5), n_probes=2)
    assert drawn == [Z0.shape] * 2


# Smoothness of weights


def rough(weights, **options):
    return tiny(n_layers=4, weights=weights, weights_options=options).layers


def test_weight_smoothness_of_layers_is_the_sum_of_squared_differences_of_neighbours():
    for weights, order in {"piecewise": [0, 1, 2, 3], "cycle": [0, 1, 0, 1], "sequence": [0, 0, 1, 1],
                           "cycle_rev": [0, 1, 1, 0]}.items():
        layers = rough(weights)
        flat = [torch.cat([p.flatten() for p in block.parameters()]) for block in layers]
        wanted = sum((flat[a] - flat[b]).square().sum() for a, b in pairwise(order))
        got = REGULARIZERS["weight_smoothness"](SimpleNamespace(layers=layers), None)
        assert abs(got - wanted) < 1e-10 * wanted, weights
    assert REGULARIZERS["weight_smoothness"](SimpleNamespace(layers=rough("shared")), None) == 0


def test_weight_smoothness_of_lines_between_knots_is_exact_wherever_the_knots_are():
    """|Δθ|² / Δl a stretch; three knots over four layers, and four, which are no whole l."""
    for n_knots in (3, 4):
        layers = rough("linear", n_knots=n_knots)
        flat = [torch.cat([p.flatten() for p in block.parameters()]) for block in layers]
        wanted = sum((a - b).square().sum() for a, b in pairwise(flat)) * (n_knots - 1) / 4
        got = REGULARIZERS["weight_smoothness"](SimpleNamespace(layers=layers), None)
        assert abs(got - wanted) < 1e-10 * wanted


@pytest.mark.parametrize("weights", [name for name, kind in WEIGHTS.items() if not kind.by_layer])
def test_weight_smoothness_of_functions_of_depth_is_that_of_fine_differences(weights):
    layers, n = rough(weights), 400
    rows = []
    with torch.no_grad():
        for i in range(n + 1):
            theta = layers.theta(torch.tensor(4 * i / n, dtype=F64))
            rows.append(torch.cat([p.flatten() for p in theta.values()]))
    wanted = sum((a - b).square().sum() for a, b in pairwise(rows)) * n / 4
    got = REGULARIZERS["weight_smoothness"](SimpleNamespace(layers=layers), None)
    near = 2e-2 if weights in ("modulated", "hyper") else 1e-3  # whose embeddings oscillate once a layer here
    assert wanted > 0 and abs(got - wanted) < near * wanted


# Gradients


@pytest.mark.parametrize("weights", ["piecewise", "spline", "modulated"])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_gradients_are_those_of_finite_differences(name, weights):
    model, tokens = tiny(weights=weights, solver="midpoint", n_layers=2), torch.randint(VOCAB, (2, LENGTH))
    parameters = [p for p in model.parameters() if p.requires_grad]
    penalty(name, model, passed(model, tokens)).backward()
    way = [torch.randn_like(p) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, way, strict=True) if p.grad is not None)
    values, step = [], 1e-5
    for side in (-step, step):
        with torch.no_grad():
            for p, d in zip(parameters, way, strict=True):
                p.add_(side * d)
            values.append(penalty(name, model, passed(model, tokens)))
            for p, d in zip(parameters, way, strict=True):
                p.sub_(side * d)
    assert abs(slope - (values[1] - values[0]) / (2 * step)) < 1e-6 * abs(slope) + 1e-8


@pytest.mark.parametrize(("solver", "mode", "weights"), [
    ("rk4", "checkpoint", "piecewise"), ("rk4", "checkpoint_recursive", "piecewise"), ("rk4", "adjoint", "piecewise"),
    ("reversible_heun", "reversible", "piecewise"), ("gauss4", "implicit", "piecewise"), ("rk4", "adjoint", "spline"),
    ("midpoint", "checkpoint_recursive", "spline")])
def test_every_gradient_mode_gives_penalties_the_gradient_of_backprop(solver, mode, weights):
    """Within tolerance for the adjoint, which is the gradient of the continuous problem."""
    model, tokens = tiny(weights=weights, block={"dropout": 0.1}, n_layers=2).train(), torch.randint(VOCAB, (2, LENGTH))
    steps, tolerance = {"adjoint": (8, 2e-2), "implicit": (1, 1e-5)}.get(mode, (1, 1e-7))
    for name in ON_A_PATH[:2] if mode == "implicit" or weights == "spline" else (*ON_A_PATH, "transport"):
        grads = []
        for gradient in ("backprop", mode):
            model.zero_grad()
            torch.manual_seed(1)
            chosen = model.with_solver(solver, steps_per_layer=steps, gradient=gradient)
            solution = passed(chosen, tokens)
            (penalty(name, chosen, solution) + solution.z.square().sum()).backward()
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert (grads[0] - grads[1]).abs().max() < tolerance * grads[0].abs().max(), name


@pytest.mark.parametrize("name", REGULARIZERS)
def test_without_gradients_the_value_is_the_same_and_has_no_graph(name):
    model, tokens = tiny(solver="rk4"), torch.randint(VOCAB, (2, LENGTH))
    tracked = penalty(name, model, passed(model, tokens))
    with torch.no_grad():
        plain = penalty(name, model, passed(model, tokens))
    assert tracked.requires_grad and not plain.requires_grad
    assert tracked.dim() == 0 and abs(tracked - plain) < 1e-12 * tracked


def test_training_with_a_penalty_lowers_it():
    for name in REGULARIZERS:
        model, tokens = tiny(solver="euler"), torch.randint(VOCAB, (4, LENGTH))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        values = []
        for _ in range(6):
            loss = penalty(name, model, passed(model, tokens))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            values.append(loss.item())
        assert values[-1] < values[0], name


# Padding, fusion, two stacks, refusals


@pytest.mark.parametrize("coupling", ["lie", "composed"])
@pytest.mark.parametrize("name", (*ON_A_PATH, "transport"))
def test_padding_has_no_part_in_a_penalty(name, coupling, monkeypatch):
    model, tokens = tiny(solver="midpoint", block={"coupling": coupling}), torch.randint(VOCAB, (1, 4))
    signs = torch.randint(2, (1, LENGTH, 4)).double() * 2 - 1
    monkeypatch.setattr(module, "_signs", lambda x: signs[:, :x.shape[1]])
    alone = penalty(name, model, passed(model, tokens))
    padded = torch.nn.functional.pad(tokens, (0, 2), value=3)
    mask = torch.arange(LENGTH)[None] < 4
    assert abs(penalty(name, model, passed(model, padded, mask)) - alone) < 1e-12 * alone


def test_adaptive_solves_are_measured_from_layer_to_layer():
    model = tiny(solver="dopri5", rtol=1e-6)
    solution = passed(model)
    wanted = sum((b - a).square().mean() for a, b in pairwise(solution.states))
    assert abs(penalty("kinetic_energy", model, solution) - wanted) < 1e-12 and len(solution.states) == 4


def test_layers_with_fusion_are_measured_one_by_one():
    model = tiny(solver="euler", steps_per_layer=2, fusion="mean")
    solution = passed(model)
    wanted = sum((b - a).square().mean() * 2 for one in solution.layers for a, b in pairwise(one.states))
    assert abs(penalty("kinetic_energy", model, solution) - wanted) < 1e-12
    for name in REGULARIZERS:
        assert penalty(name, model, solution).isfinite()
    adaptive = tiny(solver="dopri5", fusion="mean")
    wrong(lambda: penalty("kinetic_energy", adaptive, passed(adaptive)), ValueError, "dopri5", "fusion", "fixed steps")


def test_the_penalties_of_two_stacks_are_added():
    config = Seq2SeqConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2, block=BlockConfig(4, 2, d_ff=6))
    model = Seq2Seq(config).double().eval()
    source, target = torch.randint(VOCAB, (2, 5)), torch.randint(VOCAB, (2, 4))
    solution = model(source, target, return_solution=True)[1]
    for name in REGULARIZERS:
        torch.manual_seed(5)
        wanted = sum(REGULARIZERS[name](part, one) for part, one in
                     ((model.encoder, solution.encoder), (model.decoder, solution.decoder)))
        assert abs(penalty(name, model, solution) - wanted) < 1e-12 * wanted, name


def test_penalties_are_weighted_by_name_and_those_with_the_factor_0_left_out():
    model = tiny()
    solution = passed(model)
    got = penalties(model, solution, {"kinetic_energy": 0.5, "transport": 2, "jacobian_frobenius": 0})
    assert got.keys() == {"kinetic_energy", "transport"}
    assert abs(got["kinetic_energy"] - 0.5 * penalty("kinetic_energy", model, solution)) < 1e-14


def wrong(call, kind, *words):
    with pytest.raises(kind) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


def test_what_cannot_be_measured_is_refused_with_the_reason():
    model = tiny()
    _, bare = model(torch.randint(VOCAB, (2, LENGTH)), return_solution=True, save_states=False)
    for name in (*ON_A_PATH, "transport"):
        wrong(lambda name=name: penalty(name, model, bare), ValueError, "states", "save_states=True")
    held = tiny(solver="equilibrium", weights="shared", injection=True)
    solution = SimpleNamespace(states=torch.zeros(2, 1, 1, 4), depths=[0.0, 3.0], field=linear, mask=None)
    for name in ON_A_PATH:
        wrong(lambda name=name: penalty(name, held, solution), ValueError, "equilibrium", "no path")
    wrong(lambda: module.jacobian_frobenius(*run(linear, 2), n_probes=0), ValueError, "n_probes", "0")
    wrong(lambda: check_weights({"kinetic": 1.0}), ValueError, "kinetic", "known: acceleration")
    wrong(lambda: check_weights({"transport": -1.0}), ValueError, "regularize['transport']", "-1.0")
    wrong(lambda: check_weights(["transport"]), TypeError, "regularize", "mapping")
    check_weights({name: 0.1 for name in REGULARIZERS})
