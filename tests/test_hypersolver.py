"""Hypersolvers (Poli et al. 2020): a base method and a learned correction; what a fit learns, on fields and models."""

import copy
import math

import pytest
import torch
from convergence import orbit, orbit_exact
from scipy.linalg import expm

import odeformer
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig, Seq2Seq, Seq2SeqConfig
from odeformer.hypersolver import fit_hypersolver as fit_model
from solvers import LieTrotter, LinearMultistep, Strang, fit_hypersolver, get_solver, solve

F64 = torch.float64
VOCAB, LENGTH = 11, 6
QUIET = {"progress": False}
BASES = {"euler": "euler", "midpoint": "midpoint", "rk4": "rk4", "lie": "lie", "strang": "strang",
         "an object": LieTrotter("heun2")}


def oscillator(z, l):
    """Van der Pol's, driven: neither linear nor autonomous."""
    x, v = z.unbind(-1)
    return torch.stack([v, 0.5 * (1 - x * x) * v - x + 0.3 * torch.cos(l)], -1)


def starts(n=64, seed=0):
    return 4 * torch.rand(n, 2, dtype=F64, generator=torch.Generator().manual_seed(seed)) - 2


def drawn(size=0.3, **options):
    """A hypersolver with a correction that is not 0."""
    solver = get_solver("hypersolver", **options).double()
    with torch.no_grad():
        for p in solver.parameters():
            p.add_(size * torch.randn_like(p))
    return solver


def wrong(call, kind, *words):
    with pytest.raises(kind) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


# The method


@pytest.mark.parametrize("base", BASES)
def test_it_starts_as_its_base_at_the_same_cost(base):
    solver, options = BASES[base], {"n_steps": 5, "save_at": "steps"}
    plain = solve(orbit, orbit_exact(0.0), solver=solver, **options)
    got = solve(orbit, orbit_exact(0.0), solver=get_solver("hypersolver", d_model=2, base=solver), **options)
    assert torch.equal(got.states, plain.states) and got.nfe == plain.nfe
    assert get_solver("hypersolver", base=solver).order == get_solver(solver).order


@pytest.mark.parametrize(("base", "order"), [("euler", 1), ("midpoint", 2), ("heun3", 3)])
def test_a_step_is_that_of_the_base_and_a_power_of_h_times_the_network(base, order):
    """z + h ψ + h^(p+1) W (1 + U e) tanh(A z + B ψ + C e + c h + b), written out for one row."""
    solver, z, l, h = drawn(d_model=2, base=base, width=5, n_frequencies=3), starts(1)[0], 0.7, 0.25
    g = solver.correction
    after = solve(oscillator, z, span=(l, l + h), solver=base, n_steps=1).z
    psi = (after - z) / h
    angles = [math.pi * l / 2**k for k in range(3)]
    e = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=F64)
    hidden = torch.tanh(g.state @ z + g.slope @ psi + g.depth @ e + g.step * h + g.bias) * (1 + g.gain @ e)
    got = solve(oscillator, z, span=(l, l + h), solver=solver, n_steps=1).z
    assert (got - (after + h ** (order + 1) * (g.out @ hidden))).abs().max() < 1e-14
    back, plain = (solve(oscillator, z, span=(l, l - h), solver=x, n_steps=1).z for x in (solver, base))
    hidden = torch.tanh(g.state @ z + g.slope @ (z - plain) / h + g.depth @ e - g.step * h + g.bias) * (1 + g.gain @ e)
    assert (back - (plain + (-h) ** (order + 1) * (g.out @ hidden))).abs().max() < 1e-14


@pytest.mark.parametrize("base", ["euler", "midpoint"])
def test_no_correction_lowers_the_order(base):
    solver, exact = drawn(d_model=2, base=base), orbit_exact(2.0)
    errors = [(solve(orbit, orbit_exact(0.0), span=(0.0, 2.0), solver=solver, n_steps=n).z - exact).abs().max().item()
              for n in (256, 512)]
    assert abs(math.log2(errors[0] / errors[1]) - solver.order) < 0.2


def test_rows_that_f_leaves_where_they_are_stay_there():
    def f(z, l):
        return z.sin() * torch.tensor([1.0, 0.0, 1.0], dtype=F64)[:, None]

    z0 = torch.randn(4, 3, 2, dtype=F64)
    for options in ({"d_model": 2}, {}):
        z = solve(f, z0, solver=drawn(**options), n_steps=3).z
        assert torch.equal(z[:, 1], z0[:, 1]) and (z != z0)[:, ::2].all()


def test_making_one_leaves_the_random_state_alone_and_gives_the_same_hidden_weights():
    before = torch.get_rng_state()
    first, second, third = (get_solver("hypersolver", d_model=3, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.correction.state, second.correction.state)
    assert not torch.equal(first.correction.state, third.correction.state)


def test_tuples_complex_and_single_numbers_are_corrected_entry_by_entry():
    solver, z0 = drawn(), torch.randn(3, 2, dtype=F64)

    def rotate(z, l):
        return 1j * z

    whole = solve(lambda z, l: z.sin(), z0, solver=solver, n_steps=3).z
    pair = solve(lambda z, l: (z[0].sin(), z[1].sin()), (z0[:2], z0[2]), solver=solver, n_steps=3).z
    assert (torch.cat([pair[0], pair[1][None]]) - whole).abs().max() < 1e-14
    alone = solve(lambda z, l: z.sin(), z0[0, 0], solver=solver, n_steps=3).z
    assert (alone - whole[0, 0]).abs() < 1e-14
    turned = solve(rotate, torch.complex(z0, 2 * z0), solver=solver, n_steps=3).z
    plain = solve(rotate, torch.complex(z0, 2 * z0), solver="euler", n_steps=3).z
    assert turned.is_complex() and (turned - plain).abs().min() > 1e-6


# Transformations


def test_it_works_under_vmap_jvp_vjp_and_jacrev_and_compiles_to_one_graph():
    z = starts(4)
    for options in ({"d_model": 2}, {}):
        solver = drawn(base="midpoint", **options)

        def run(z, solver=solver):
            return solve(oscillator, z, solver=solver, n_steps=3).z

        assert (torch.func.vmap(run)(z) - run(z)).abs().max() < 1e-12
        jacobian = torch.func.jacrev(run)(z[0])
        _, forward = torch.func.jvp(run, (z[0],), (torch.ones(2, dtype=F64),))
        assert (jacobian.sum(1) - forward).abs().max() < 1e-12
    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(z), run(z))


def test_gradients_reach_state_field_and_correction_in_both_modes():
    solver, z0 = drawn(d_model=2, base="midpoint", width=3), starts(3).requires_grad_()
    w = torch.tensor(0.8, dtype=F64, requires_grad=True)
    inputs = [z0, w, *solver.parameters()]
    assert torch.autograd.gradcheck(
        lambda *_: solve(lambda z, l: oscillator(w * z, l), z0, solver=solver, n_steps=2).z, inputs)
    grads = [torch.autograd.grad(solve(lambda z, l: oscillator(w * z, l), z0, solver=solver, n_steps=4,
                                       gradient=mode).z.square().sum(), inputs) for mode in ("backprop", "checkpoint")]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*grads, strict=True))
    wrong(lambda: solve(oscillator, z0, solver=solver, n_steps=2, gradient="adjoint"), ValueError, "checkpoint")


def test_a_span_with_gradients_gives_the_same_state_and_the_slope_in_its_ends():
    solver, z0 = drawn(d_model=2), starts(3)
    ends = [torch.tensor(x, dtype=F64, requires_grad=True) for x in (0.3, 1.7)]

    def total(a, b):
        return solve(oscillator, z0, span=(a, b), solver=solver, n_steps=3).z.sum()

    value = total(*ends)
    assert abs(value - total(0.3, 1.7)) < 1e-12
    slopes, d = torch.autograd.grad(value, ends), 1e-6
    assert slopes[0].item() == pytest.approx((total(0.3 + d, 1.7) - total(0.3 - d, 1.7)).item() / (2 * d), rel=1e-7)
    assert slopes[1].item() == pytest.approx((total(0.3, 1.7 + d) - total(0.3, 1.7 - d)).item() / (2 * d), rel=1e-7)


# The fit


def test_residuals_are_those_of_the_exact_flow_of_a_linear_field():
    """The local error of Euler's method is exp(h A) z - z - h A z, on the last fifth of the rows of every step."""
    a = torch.tensor([[-0.2, 1.0], [-0.7, 0.1]], dtype=F64)
    z0, h = starts(20), 0.25
    solver = get_solver("hypersolver", d_model=2).double()
    fit = fit_hypersolver(solver, [(lambda z, l: z @ a.T, z0)], n_steps=4, updates=300, **QUIET)
    flow, z, errors = torch.from_numpy(expm(h * a.numpy())), z0, []
    for _ in range(4):
        errors.append((z @ flow.T - z - h * z @ a.T)[16:])
        z = z @ flow.T
    assert fit.base_error == pytest.approx(torch.cat(errors).square().mean().sqrt().item(), rel=1e-6)
    assert (fit.n_rows, fit.n_held_out, len(fit.losses)) == (64, 16, 300)
    left = [solve(lambda z, l: z @ a.T, z @ torch.linalg.matrix_power(flow, i).T, span=(i * h, (i + 1) * h), n_steps=1,
                  solver=solver).z - z @ torch.linalg.matrix_power(flow, i + 1).T for z in [z0] for i in range(4)]
    assert fit.error == pytest.approx(torch.cat([x[16:] for x in left]).square().mean().sqrt().item(), rel=1e-5)
    assert fit.error < fit.base_error / 5


@pytest.mark.parametrize("base", ["euler", "midpoint"])
def test_poli_et_al_a_fit_lowers_the_error_at_equal_nfe_on_new_states_and_keeps_the_order(base):
    solver, span = get_solver("hypersolver", d_model=2, base=base).double(), (0.0, 4.0)
    fit = fit_hypersolver(solver, [(oscillator, starts())], span=span, n_steps=(10, 20, 40), updates=300, **QUIET)
    assert fit.error < fit.base_error / 3 and fit.losses[-1] < 0.2 * fit.losses[0]
    new = starts(32, seed=1)
    exact = solve(oscillator, new, span=span, solver="rk4", n_steps=400).z
    errors = {}
    for chosen in (base, solver):
        for n in (10, 40, 160, 320):
            solution = solve(oscillator, new, span=span, solver=chosen, n_steps=n)
            errors[chosen, n] = (solution.z - exact).square().mean().sqrt().item()
            assert solution.nfe == n * solver.n_stages
    for n in (10, 40):
        assert errors[solver, n] < errors[base, n] / 3
    slope = math.log2(errors[solver, 160] / errors[solver, 320])
    assert slope > solver.order - 0.25 and errors[solver, 320] < errors[base, 320]


def test_a_fit_repeats_bit_for_bit_goes_on_from_where_it_is_and_leaves_all_else_alone():
    first, state = get_solver("hypersolver", d_model=2).double(), torch.get_rng_state()
    second = copy.deepcopy(first)
    layer = torch.nn.Linear(2, 2).double()
    samples, options = [(lambda z, l: torch.tanh(layer(z)), starts())], {"n_steps": 4, "updates": 60, **QUIET}
    torch.set_rng_state(state)
    fits = [fit_hypersolver(solver, samples, **options) for solver in (first, second)]
    assert fits[0] == fits[1] and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(p.grad is None for p in (*first.parameters(), *layer.parameters()))
    more = first.fit(samples, **options)
    assert more.losses[0] < 0.5 * fits[0].losses[0] and more.base_error == fits[0].base_error


def test_a_grid_and_several_samples_are_learned_from():
    grid, solver = [0.0, 0.5, 0.8, 2.0], get_solver("hypersolver", d_model=2).double()
    fit = fit_hypersolver(solver, [(oscillator, starts(10)), (lambda z, l: -z, starts(5, seed=2))], grid=grid,
                          updates=5, **QUIET)
    assert fit.n_rows == 3 * (8 + 4) and fit.n_held_out == 3 * (2 + 1)


def test_bad_options_and_samples_are_refused_by_name():
    for options, words in (({"base": "ab2"}, ("base 'ab2'", "known by name")), ({"width": 0}, ("width", "0")),
                           ({"n_frequencies": 1.5}, ("n_frequencies", "1.5")), ({"d_model": True}, ("d_model", "True")),
                           ({"base": get_solver("dopri5")}, ("base", "explicit one-step", "dopri5")),
                           ({"base": LinearMultistep([1], [1.5, -0.5])}, ("base", "one-step")),
                           ({"base": get_solver("rk2_gate")}, ("base", "fixed order", "rk2_gate")),
                           ({"base": get_solver("leapfrog")}, ("base", "one-step", "leapfrog"))):
        wrong(lambda options=options: get_solver("hypersolver", **options), ValueError, *words)
    wrong(lambda: get_solver("hypersolver", base=3), TypeError, "base", "3")
    solver, samples = get_solver("hypersolver", d_model=2).double(), [(oscillator, starts(8))]
    wrong(lambda: solver.fit(samples), ValueError, "n_steps and grid")
    wrong(lambda: solver.fit(samples, n_steps=2, updates=0), ValueError, "updates", "0")
    wrong(lambda: solver.fit(samples, n_steps=(2, 0)), ValueError, "n_steps", "0")
    wrong(lambda: solver.fit(samples, n_steps=2, learning_rate=0.0), ValueError, "learning_rate", "0.0")
    wrong(lambda: solver.fit(samples, n_steps=2, fine="dopri9"), ValueError, "dopri9")
    wrong(lambda: solver.fit([], n_steps=2), ValueError, "samples", "none")
    wrong(lambda: solver.fit([(oscillator, starts(3))], n_steps=2), ValueError, "five rows")
    wrong(lambda: solver.fit([(lambda z, l: 0 * z, starts(8))], n_steps=2), ValueError, "five rows")
    wrong(lambda: solver.fit([(lambda z, l: torch.ones_like(z), starts(8))], n_steps=2), ValueError, "nothing to learn")
    wrong(lambda: solver.fit([(lambda z, l: z**9 * 1e30, starts(8))], n_steps=2), ValueError, "not finite")
    wrong(lambda: solve(oscillator, starts(2), n_steps=1, solver=get_solver("hypersolver", d_model=3)), ValueError,
          "d_model = 3", "(2, 2)")


# Models


def tiny(kind=Encoder, config=EncoderConfig, *, n_layers=2, block=(), **depth):
    return kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers,
                       block=BlockConfig(8, 2, d_ff=16, **dict(block)), depth=DepthConfig(**depth))).double().eval()


def tokens(batch=2):
    return torch.randint(VOCAB, (batch, LENGTH))


def stir(model, size=0.3):
    with torch.no_grad():
        for p in model.solver.parameters():
            p.add_(size * torch.randn_like(p))
    return model


@pytest.mark.parametrize("coupling", ["lie", "strang", "parallel", "composed"])
@pytest.mark.parametrize("base", ["euler", "midpoint"])
def test_a_model_starts_as_with_its_base_and_the_parts_of_a_layer_take_turns_within_it(base, coupling):
    model, ids = tiny(solver=base, block={"coupling": coupling}), tokens()
    plain, before = model(ids, return_solution=True)
    corrected = model.with_solver("hypersolver", base=base)
    got, after = corrected(ids, return_solution=True)
    assert torch.equal(got, plain) and after.nfe == before.nfe
    assert corrected.solver.correction.size == 8
    stir(corrected)
    z, field, g = before.states[0], before.field.pieces[0][2], corrected.solver.correction
    step = solve(field, z, span=(0.0, 1.0), n_steps=1,
                 solver={"lie": LieTrotter, "strang": Strang}.get(coupling, get_solver)(base)).z
    wanted = step + g.at(z, step - z, torch.zeros((), dtype=F64), 1.0)  # h = 1, whatever the order
    assert (corrected(ids, return_solution=True)[1].states[1] - wanted).abs().max() < 1e-12


def test_a_model_keeps_it_on_disk_and_trains_it(tmp_path):
    model, ids = stir(tiny(solver="hypersolver", solver_options={"base": "midpoint", "width": 4})), tokens()
    model.save(tmp_path)
    loaded = odeformer.load(tmp_path)
    assert torch.equal(loaded(ids), model(ids)) and loaded.solver.base.name == "midpoint"
    grads, learned = [], dict(model.named_parameters())["solver.correction.out"]
    for mode in ("backprop", "checkpoint"):
        chosen = model.with_solver(model.solver, gradient=mode)
        model.zero_grad()
        chosen(ids).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert learned.grad.any()
    assert (grads[0] - grads[1]).abs().max() < 1e-10 * grads[0].abs().max()


def test_no_later_token_batch_mate_or_padding_moves_an_earlier_token():
    model, ids = stir(tiny(Decoder, DecoderConfig, solver="hypersolver")), tokens()
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % VOCAB
    assert (model(other) - model(ids))[:, :-1].abs().max() < 1e-12
    assert (model(ids[:1]) - model(ids)[:1]).abs().max() < 1e-12
    mask = torch.arange(LENGTH).expand(2, -1) < 4
    _, solution = model(ids, mask, return_solution=True)
    assert (solution.z[:, :4] - model(ids[:, :4], return_solution=True)[1].z).abs().max() < 1e-12
    assert not solution.z[:, 4:].any()  # padding stands still


def test_a_half_precision_model_carries_its_state_in_float32():
    model, ids = stir(tiny(solver="hypersolver", weights="shared"), 0.01).float(), tokens()
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half(ids).dtype == torch.bfloat16 and (half(ids).float() - model(ids)).abs().max() < 0.2


def trained(coupling):
    """A model that has learned to tell whether a sequence holds a given token twice, in a few updates."""
    torch.manual_seed(0)
    model = tiny(n_layers=3, block={"coupling": coupling}).train()
    head = torch.nn.Linear(8, 2).double()
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(25):
        ids = tokens(32)
        target = ((ids == 3).sum(1) + (ids == 4).sum(1) > 1).long()
        loss = torch.nn.functional.cross_entropy(head(model(ids).mean(1)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize(("coupling", "base"), [("lie", "euler"), ("composed", "midpoint")])
def test_on_a_trained_model_a_fit_lowers_the_error_at_equal_nfe_on_new_text(coupling, base):
    model = trained(coupling)
    before = [p.clone() for p in model.parameters()]
    corrected = model.with_solver("hypersolver", base=base)
    fit = fit_model(corrected, [tokens(64), (tokens(64), torch.arange(LENGTH).expand(64, -1) < 5)], n_steps=(3, 6),
                    updates=200, **QUIET)
    assert fit.error < 0.8 * fit.base_error
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    new = tokens(64)
    with torch.no_grad():
        exact = model.with_solver("dopri5", rtol=1e-8, atol=1e-9)(new, return_solution=True)[1].z
        for steps in (1, 2):
            errors, work = [], []
            for chosen, name in ((model, base), (corrected, "hypersolver")):
                solution = chosen.with_solver(name, steps_per_layer=steps)(new, return_solution=True)[1]
                errors.append((solution.z - exact).square().mean().sqrt().item())
                work.append(solution.nfe)
            assert errors[1] < 0.8 * errors[0] and work[0] == work[1], errors


def test_both_stacks_of_a_seq2seq_are_fitted_and_the_steps_of_the_model_are_the_default():
    config = Seq2SeqConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2, block=BlockConfig(8, 2, d_ff=16),
                           depth=DepthConfig(steps_per_layer=2))
    model = Seq2Seq(config).double().eval().with_solver("hypersolver", base="lie")
    fits = fit_model(model, [(tokens(4), tokens(4))], updates=5, **QUIET)
    assert fits.keys() == {"encoder", "decoder"}
    for fit in fits.values():
        assert fit.n_rows + fit.n_held_out == 4 * LENGTH * 4
    only = Seq2Seq(config).double().with_solver("hypersolver", part="decoder")
    assert fit_model(only, [(tokens(4), tokens(4))], updates=2, **QUIET).keys() == {"decoder"}


def test_models_that_cannot_be_fitted_are_refused_with_the_reason():
    wrong(lambda: fit_model(tiny(), [tokens()]), ValueError, "hypersolver", "with_solver")
    wrong(lambda: fit_model(tiny(solver="hypersolver", fusion="mean"), [tokens()]), ValueError, "fusion", "mean")
    routed = tiny(solver="hypersolver", block={"feedforward": "experts", "feedforward_options": {"routing": "step"}})
    wrong(lambda: fit_model(routed, [tokens()]), ValueError, "routing='step'")
    wrong(lambda: fit_model(tiny(solver="hypersolver"), []), ValueError, "none")
