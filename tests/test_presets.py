"""The field's methods (eqs. 37-46): each form against a plain loop of its formula, and its order."""

import math
import re

import torch
from preset_models import LAYERS, attend, build, config, each_form, feed, ids, increment, looped, turn, whole
from torch import nn
from torch.func import functional_call

from odeformer import DepthConfig, Encoder, presets
from odeformer.block import COUPLINGS
from odeformer.depth import taking_turns
from odeformer.presets import PRESETS, configure
from solvers import solve
from solvers.learned import Learned


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
