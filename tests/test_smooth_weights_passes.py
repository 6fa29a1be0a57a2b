"""Passes through models with weights that are functions of depth: gradients, what is made once, caches, precision."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from smooth_models import EXPANSIONS, LENGTH, VOCAB, D, gap, state, tiny, tokens

import odeformer.theta
from odeformer import (
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Seq2Seq,
    Seq2SeqConfig,
    VisionConfig,
    VisionEncoder,
)
from odeformer.smooth_weights import SMOOTH
from odeformer.theta import KEPT

# Gradients

MODES = {"checkpoint": ("rk4", {}), "checkpoint_recursive": ("rk4", {}), "reversible": ("reversible_midpoint", {}),
         "implicit": ("implicit_midpoint", {"tol": 1e-12})}


def gradients(name, solver, gradient, options=(), *, block=(), training=False, steps=8, batch=2):
    model = tiny(weights=name, moved=0.1, solver=solver, gradient=gradient, n_steps=steps, block=block,
                 solver_options=dict(options)).train(training)
    z = state(batch).requires_grad_()
    torch.manual_seed(3)
    model.evolve(z).z.cos().sum().backward()
    return [z.grad, *(p.grad for p in model.layers.parameters())]


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("mode", MODES)
def test_every_gradient_mode_gives_the_gradient_of_backprop(name, mode):
    solver, options = MODES[mode]
    wanted = gradients(name, solver, "backprop", options)
    assert all(x is not None for x in wanted)
    assert gap(gradients(name, solver, mode, options), wanted) < (1e-6 if mode == "implicit" else 1e-9)


@pytest.mark.parametrize("name", SMOOTH)
def test_the_continuous_adjoint_is_near_it_within_the_error_of_its_grid(name):
    gaps = [gap(gradients(name, "rk4", "adjoint", steps=n), gradients(name, "rk4", "backprop", steps=n))
            for n in (12, 48)]
    assert 1e-12 < gaps[1] < gaps[0] / 30 < 1e-2 / 30, gaps  # of fourth order, too


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_recursive", "reversible"])
def test_gradient_modes_replay_dropout_and_layers_that_share_weights(name, mode):
    solver = MODES[mode][0]
    wanted = gradients(name, solver, "backprop", block={"dropout": 0.3}, training=True)
    assert gap(gradients(name, solver, mode, block={"dropout": 0.3}, training=True), wanted) < 1e-9


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_those_of_finite_differences(name):
    model = tiny(weights=name, moved=0.2, solver="midpoint", n_steps=3)
    z = state()
    model.evolve(z).z.cos().sum().backward()
    generator = torch.Generator().manual_seed(7)
    for p in model.layers.parameters():
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p.add_(step * direction)
                values.append(model.evolve(z).z.cos().sum().item())
                p.sub_(step * direction)
        assert (p.grad * direction).sum().item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-6)


# How often θ(l) is made


@pytest.fixture
def made(monkeypatch):
    """(grad mode, l) of every θ(l) that is made, for each sublayer."""
    log = []
    remembered = odeformer.theta.Remembered.__init__

    def init(self, at, blocks):
        def counted(l):
            log.append((id(self), torch.is_grad_enabled(), float(l)))
            return at(l)

        remembered(self, counted, blocks)

    monkeypatch.setattr(odeformer.theta.Remembered, "__init__", init)
    return log


@pytest.mark.parametrize("coupling", ["parallel", "lie", "composed"])
@pytest.mark.parametrize(("solver", "mode"), [("rk4", "backprop"), ("ssprk3", "backprop"), ("ab3", "backprop"),
                                              ("rk4", "checkpoint")])
def test_weights_are_made_once_for_each_depth_of_a_pass(made, coupling, solver, mode):
    model = tiny(weights="spline", solver=solver, gradient=mode, n_steps=5, block={"coupling": coupling})
    model.evolve(state()).z.sum().backward()
    forward = len(set(made))
    if mode == "backprop":
        assert len(made) == forward
    else:  # those of a step are made again with it
        assert len(made) <= 2 * forward
    depths = {l for _, _, l in made}
    wanted = {"rk4": 11}.get(solver)
    assert wanted is None or len(depths) == wanted  # 5 steps, their middles, the end
    assert len({key for key, _, _ in made}) == 2


def test_the_way_back_of_a_reversible_solve_makes_them_once_more(made):
    model = tiny(weights="spline", solver="reversible_midpoint", gradient="reversible", n_steps=6)
    loss = model.evolve(state()).z.sum()
    forward = len(made)
    loss.backward()
    back = made[forward:]
    assert len(back) <= 2 * len(set(back)) and len(set(back)) <= 2 * len({x[::2] for x in made[:forward]})


def test_a_field_can_be_used_again_after_a_backward_pass_through_it():
    model = tiny(weights="spline", moved=0.1, solver="rk4", n_steps=2)
    solution = model.evolve(state())
    solution.z.sum().backward()
    l = torch.tensor(2.0, dtype=torch.float64)
    first, second = [], []
    for grads in (first, second):
        model.zero_grad()
        solution.field(state(), l).cos().sum().backward()
        grads += [p.grad.clone() for p in model.layers.parameters() if p.grad is not None]
    assert first and all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("name", SMOOTH)
def test_passes_in_threads_do_not_see_each_others_weights(name):
    model = tiny(weights=name, moved=0.2, solver="rk4", n_steps=3)
    inputs = [state() * (i + 1) for i in range(4)]

    def run(z):
        with torch.no_grad():
            return model.evolve(z).z

    wanted = [run(z) for z in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, inputs * 5))
    assert all(torch.equal(x, wanted[i % 4]) for i, x in enumerate(found))


def test_a_model_made_under_inference_mode_runs():
    with torch.inference_mode():
        model = tiny(weights="linear", solver="rk4", n_steps=2)
        assert model.evolve(state()).z.isfinite().all()


def test_a_field_kept_while_parameters_change_has_the_new_ones_at_every_depth():
    model = tiny(weights="linear", moved=0.2)
    f, ls = model.vector_field(state()), [torch.tensor(l, dtype=torch.float64) for l in (1.0, 1.5)]
    with torch.no_grad():
        f(state(), ls[0])
        for p in model.layers.parameters():
            p.mul_(1.5)
        assert all(torch.equal(f(state(), l), model.vector_field(state())(state(), l)) for l in ls)


@pytest.mark.parametrize("mode", ["checkpoint", "reversible"])
def test_hooks_stay_off_the_tensors_of_the_caller(mode):
    model = tiny(weights="linear", solver="reversible_midpoint", gradient=mode, n_steps=4)
    other = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    moved = {name: 1 * p for name, p in other.items()}
    for _ in range(2):
        torch.func.functional_call(model, moved, (tokens(),)).sum()
    assert not any(p._backward_hooks for p in moved.values())


@pytest.mark.parametrize("name", EXPANSIONS)
def test_half_precision_weights_are_summed_in_float32(name):
    model = tiny(weights=name, moved=0.3)
    l = torch.tensor(1.37)
    wanted = model.layers.theta(l.double())
    half = model.bfloat16().layers
    exact = tiny(weights=name, moved=0.3)
    for p, q in zip(exact.layers.parameters(), half.parameters(), strict=True):
        p.data = q.double()
    rounded = {key: x.bfloat16() for key, x in exact.layers.theta(l.double()).items()}
    key = "attention.core.query.weight"
    assert half.theta(l)[key].dtype == torch.bfloat16
    off = (half.theta(l)[key].double() - rounded[key].double()).abs() / wanted[key].abs().clamp(min=0.1)
    assert off.max() <= 2**-7  # one rounding, of a number that float32 may put on the other side of a tie


def test_what_is_remembered_does_not_grow_with_depth():
    model = tiny(weights="linear", solver="euler", n_steps=50)
    with torch.no_grad():
        solution = model.evolve(state())
    for part in solution.field.parts:
        assert len(part.weights.kept) <= KEPT


# Within a model


def test_a_cached_decoder_says_what_one_without_does():
    for name in SMOOTH:
        model = tiny(Decoder, DecoderConfig, weights=name, solver="rk4", n_steps=3, moved=0.2)
        x = tokens(1)
        with torch.no_grad():
            whole, cache, rows = model(x), model.new_cache(), []
            for i in range(LENGTH):
                logits, cache = model(x[:, i : i + 1], cache=cache)
                rows.append(logits)
        assert (torch.cat(rows, 1) - whole).abs().max() < 1e-12, name


def test_a_cached_translator_keeps_the_memory_of_every_evaluation():
    for name in SMOOTH:
        torch.manual_seed(0)
        model = Seq2Seq(Seq2SeqConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=3, block=BlockConfig(D, 2),
                                      depth=DepthConfig(weights=name, solver="midpoint", n_steps=2))).double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
            source, target = tokens(), tokens().flip(1)
            memory, cache, rows = model.encode(source), model.new_cache(), []
            for i in range(LENGTH):
                logits, cache = model.decode(target[:, i : i + 1], memory, cache=cache)
                rows.append(logits)
            assert (torch.cat(rows, 1) - model(source, target)).abs().max() < 1e-12, name


@pytest.mark.parametrize("name", SMOOTH)
def test_a_compiled_model_is_one_graph_with_equal_results(name):
    model = tiny(weights=name, solver="rk4", n_steps=2, moved=0.2)
    compiled = torch.compile(lambda z: model.evolve(z).z, fullgraph=True, backend="eager")
    assert (compiled(state()) - model.evolve(state()).z).abs().max() < 1e-12


@pytest.mark.parametrize("name", SMOOTH)
def test_torch_func_and_derivatives_in_depth(name):
    model = tiny(weights=name, moved=0.2)
    z, direction, l = state(), state().flip(0), torch.tensor(1.3, dtype=torch.float64)
    f = model.vector_field(z)
    _, tangent = torch.func.jvp(lambda z: f(z, l), (z,), (direction,))
    with torch.no_grad():
        difference = (f(z + 1e-6 * direction, l) - f(z - 1e-6 * direction, l)) / 2e-6
        in_depth = (f(z, l + 1e-6) - f(z, l - 1e-6)) / 2e-6
    assert (tangent - difference).abs().max() < 1e-6
    _, tangent = torch.func.jvp(lambda l: f(z, l), (l,), (torch.ones_like(l),))
    assert (tangent - in_depth).abs().max() < 1e-6
    moving = l.clone().requires_grad_()
    (grad,) = torch.autograd.grad((f(z, moving) * direction).sum(), moving)
    assert grad.item() == pytest.approx((in_depth * direction).sum().item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", SMOOTH)
def test_dropped_layers_are_stretches_of_depth(name):
    model = tiny(weights=name, moved=0.1, solver="rk4", layer_drop=0.5, steps_per_layer=2).train()
    torch.manual_seed(1)
    solution = model.evolve(state(), save=True)
    keep = [f.parts[0].context.keep[i] for i, (_, _, f) in enumerate(solution.field.pieces)]
    for i, kept in enumerate(keep):
        before, after = solution.states[2 * i], solution.states[2 * i + 2]
        moved = (after - before).abs().amax((1, 2)) > 1e-9
        assert torch.equal(moved, kept.view(-1) > 0)
    assert any((kept == 0).any() for kept in keep) and any((kept > 0).any() for kept in keep)


def test_weights_stay_in_full_precision_under_autocast():
    model = tiny(weights="lowrank", moved=0.2).float()
    model.layers.left.requires_grad_(False)
    l = torch.tensor(1.5)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        made = odeformer.theta.Remembered(model.layers.bind("attention"), model.layers)(l)
    assert made["core.query.weight"].dtype == torch.float32
    assert torch.equal(made["core.query.weight"], model.layers.bind("attention")(l)["core.query.weight"])


def test_a_vision_model_takes_them_too():
    config = VisionConfig(image_size=4, patch_size=2, n_classes=3, channels=1, n_layers=4, block=BlockConfig(D, 2),
                          depth=DepthConfig(weights="hyper", solver="rk4"))
    model = VisionEncoder(config)
    model(torch.randn(2, 1, 4, 4)).sum().backward()
    assert all(p.grad is not None for p in model.layers[0].parameters())
