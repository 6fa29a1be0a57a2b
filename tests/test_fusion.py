"""Layer fusion, eqs. 23-30: every φ in every form against formulas written out here, and with every kind of solver."""

import math

import pytest
import torch
from torch import nn

import odeformer
import solvers
from odeformer import FUSIONS, BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.fusion import FORMS, Fusion
from solvers import SOLVERS

VOCAB, LENGTH, D = 17, 6, 8
OPTIONS = {"fixed": {"a": [0.6, 0.4], "b": [0.7, 0.5]}}
PAIRS = [(name, form) for name, entry in FUSIONS.items() for form in FORMS if entry.forms[form] is None]


def tiny(kind=Encoder, config=EncoderConfig, *, n_layers=4, block=(), fusion=None, spread=True, **depth):
    """A small model in float64; ``spread``: what starts at a special value is moved away from it."""
    torch.manual_seed(0)
    model = kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, block=BlockConfig(D, 2, **dict(block)),
                        depth=DepthConfig(fusion=fusion, **depth))).double().eval()
    if spread:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.startswith("fusion.") or ".norm." in name:
                    p.add_(0.3 * torch.randn_like(p))
    return model


def decoder(**options):
    return tiny(Decoder, DecoderConfig, **options)


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def layer_norm(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def increment(block, z, **mask):
    """F of a pre-norm layer whose sublayers follow each other."""
    a, b = block.attention, block.feedforward
    y = z + a.core(a.placement.norm(z), **mask)
    return y + b.core(b.placement.norm(y)) - z


# φ(layer, increments, states) as the equations have it; both lists oldest first
def residual(fusion, layer, fs, zs):
    return fs[-1] + zs[-1]


def fixed(fusion, layer, fs, zs):
    if layer == 0:
        return fs[-1] + zs[-1]
    return 0.6 * zs[-1] + 0.4 * zs[-2] + 0.7 * fs[-1] + 0.5 * fs[-2]


def mean(fusion, layer, fs, zs):
    return torch.stack([*fs[-1:], *zs]).mean(0)


def learned(fusion, layer, fs, zs):
    a = fusion.a[str(layer)]
    z = sum(a[i] * zs[-1 - i] for i in range(len(zs)))
    return z + fusion.b[str(layer)] * fs[-1] if fs else z


def concat(fusion, layer, fs, zs):
    given = torch.cat([*fs[-1:], *zs[::-1]], -1)
    n_plain = 2 if fs else 1
    weight = torch.cat([torch.eye(D)] * n_plain + [torch.zeros(D, D)] * (len(zs) - 1), 1) + fusion.weight[str(layer)]
    return torch.einsum("oi,bti->bto", weight, given)


def attention(fusion, layer, fs, zs):
    if len(zs) == 1:
        z = zs[0]
    else:
        unit = [z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() for z in zs[::-1]]
        scores = [torch.einsum("bti,ij,btj->bt", unit[0], fusion.weight[str(layer)], u) / math.sqrt(D) for u in unit]
        odds = [(s + c).exp() for s, c in zip(scores, fusion.bias[str(layer)], strict=True)]
        z = sum(o[..., None] * z for o, z in zip(odds, zs[::-1], strict=True)) / sum(odds)[..., None]
    return z + fs[-1] if fs else z


PHI = {"residual": residual, "fixed": fixed, "mean": mean, "learned": learned, "concat": concat, "attention": attention}


def by_hand(model, z, name, form, window=None, stride=1):
    """Eqs. 24-29 layer by layer, Euler with h = 1."""
    fs, zs, norms = [], [z], dict(model.fusion.form.norms.items())
    for layer, block in enumerate(model.layers):
        seen = zs if window is None else zs[-window:]
        norm = norms.get(str(layer))
        if (layer + 1) % stride:
            f = increment(block, zs[-1])
            z = zs[-1] + f
        elif form == "input":  # eqs. 24-25
            f = increment(block, PHI[name](model.fusion, layer, [], seen))
            z = layer_norm(f, norm)
        else:
            f = increment(block, zs[-1])
            if form == "post":  # eqs. 28-29
                f = layer_norm(f, norm)
            z = PHI[name](model.fusion, layer, [*fs, f], seen)
            if form == "pre":  # eqs. 26-27
                z = layer_norm(z, norm)
        fs.append(f)
        zs.append(z)
    return zs


def test_every_fusion_has_a_formula_here():
    assert set(PHI) == set(FUSIONS)


@pytest.mark.parametrize(("name", "form", "window", "stride"), [
    (name, form, window, stride) for name, form in PAIRS for window, stride in [(None, 1), (2, 1), (None, 2)]
    if not (name in ("residual", "fixed") and window) and not ((name, form) == ("residual", "plain") and stride > 1)])
def test_eqs_23_to_29_every_fusion_in_every_form_is_its_formula_under_euler(name, form, window, stride):
    options = {"form": form, "stride": stride} | OPTIONS.get(name, {}) | ({"window": window} if window else {})
    model = tiny(fusion=name, fusion_options=options)
    z = model.embed(tokens())
    solution = model.evolve(z, None, save=True)
    wanted = by_hand(model, z, name, form, window, stride)
    for got, want in zip(solution.states, wanted, strict=True):
        assert (got - want).abs().max() < 1e-12 * max(1, want.abs().max())
    assert torch.equal(solution.states[-1], solution.z)


@pytest.mark.parametrize("name", ["euler", "rk4", "ab3", "dopri5", "momentum", "gauss4"])
def test_eq_30_residual_fusion_is_the_plain_layer_bit_for_bit_with_every_solver(name):
    plain = tiny(n_layers=2, block={"coupling": "parallel"})
    fused = tiny(n_layers=2, block={"coupling": "parallel"}, fusion="residual")
    with torch.no_grad():
        for p in (*plain.layers.parameters(), *fused.layers.parameters()):
            p.mul_(0.5)  # mild enough for implicit methods with one step a layer
    x, y = (model.with_solver(name)(tokens(), return_solution=True) for model in (plain, fused))
    assert torch.equal(x[0], y[0])
    assert torch.equal(x[1].states, y[1].states) and x[1].nfe == y[1].nfe


class Plain(Fusion):
    """Eq. 30 once more, which the package does not know to be the plain layer."""

    def forward(self, layer, increments, states):
        return states[0] + increments[0]


# The streams of these go on side by side over the whole depth, and are brought together between fused layers
TWO_STREAMS = ("revnet", "reversible_midpoint", "reversible_rk4")
IMPLICIT = ("bdf3", "am4", "implicit_midpoint", "tr_bdf2", "ars222")  # one of each family, as they are slow
ALONE = [name for name, solver in SOLVERS.items() if not getattr(solver, "across_pieces", False)
         and (name in IMPLICIT or not solver.is_implicit)
         and not getattr(solver, "to_equilibrium", False)]  # which goes past layers


@pytest.mark.parametrize("name", ALONE)
def test_eq_30_layers_solved_one_by_one_give_the_plain_model_and_its_solution_with_every_solver(name):
    options = {} if SOLVERS[name].is_adaptive else {"steps_per_layer": 2}
    plain = tiny(n_layers=2, block={"coupling": "parallel"}, spread=False)
    fused = tiny(n_layers=2, block={"coupling": "parallel"}, fusion=Plain, spread=False)
    with torch.no_grad():
        for p in (*plain.layers.parameters(), *fused.layers.parameters()):
            p.mul_(0.5)
    _, x = plain.with_solver(name, **options)(tokens(), return_solution=True)
    _, y = fused.with_solver(name, **options)(tokens(), return_solution=True)
    loose = SOLVERS[name].is_adaptive or name in TWO_STREAMS
    tolerance = 1e-2 if loose else 1e-8 if SOLVERS[name].is_implicit else 1e-12
    assert (x.z - y.z).abs().max() < tolerance
    assert x.depths == y.depths and x.states.shape == y.states.shape and y.l == 2.0
    assert (x.states - y.states).abs().max() < tolerance
    if SOLVERS[name].is_adaptive:
        assert len(y.steps) == len(y.errors) == y.n_steps and abs(sum(y.steps) - 2) < 1e-9
        assert len(y.layers) == 2 and y.nfe == sum(part.nfe for part in y.layers)
    else:
        assert x.steps == y.steps and x.n_steps == y.n_steps
        assert SOLVERS[name].is_implicit or x.nfe == y.nfe


@pytest.mark.parametrize("coupling", ["composed", "parallel"])
@pytest.mark.parametrize(("a", "b"), [([1], [3 / 2, -1 / 2]), ([1], [23 / 12, -16 / 12, 5 / 12]), ([0, 1], [2]),
                                      ([4 / 3, -1 / 3], [4 / 3, -2 / 3])])
def test_eq_37_fixed_weights_are_the_linear_multistep_method_across_layers_with_its_start(a, b, coupling):
    method = solvers.LinearMultistep(a, b, across_pieces=True)
    if (a, b) == ([1], [3 / 2, -1 / 2]):
        method = solvers.get_solver("ab2", across_pieces=True)
    fused = tiny(n_layers=6, block={"coupling": coupling}, fusion="fixed", fusion_options={"a": a, "b": b})
    other = tiny(n_layers=6, block={"coupling": coupling}, solver=method)
    grads = []
    for model in (fused, other):
        z = model.embed(tokens())
        z = model.evolve(z, None).z
        weight = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view_as(z)
        (z * weight).sum().backward()
        grads.append((z, *(p.grad for p in model.layers.parameters())))
    for x, y in zip(*grads, strict=True):
        assert (x - y).abs().max() < 1e-11 * max(1, y.abs().max())


def test_eq_37_starter_euler_begins_as_the_formula_says_and_is_counted_beside_the_solver():
    options = {"a": [1], "b": [3 / 2, -1 / 2]}
    model = tiny(fusion="fixed", fusion_options=options | {"starter": "euler"}, n_layers=3)
    z0 = model.embed(tokens())
    f1 = increment(model.layers[0], z0)
    z1 = z0 + f1
    f2 = increment(model.layers[1], z1)
    z2 = z1 + 1.5 * f2 - 0.5 * f1
    z3 = z2 + 1.5 * increment(model.layers[2], z2) - 0.5 * f2
    assert (model.evolve(z0, None).z - z3).abs().max() < 1e-12
    auto = tiny(fusion="fixed", fusion_options=options, n_layers=3)
    assert auto.evolve(z0, None).nfe == 5  # three of Euler, two of midpoint in the first layer
    assert auto.with_solver("rk4").evolve(z0, None).nfe == 12  # accurate enough to start by itself


@pytest.mark.parametrize("name", ["learned", "concat"])
@pytest.mark.parametrize("form", ["plain", "pre", "post", "input"])
def test_learned_and_concat_start_as_the_residual_fusion_of_their_form(name, form):
    z = tiny(spread=False).embed(tokens())
    model = tiny(fusion=name, fusion_options={"form": form}, spread=False)
    if form == "input":
        wanted = z
        for block in model.layers:
            wanted = nn.functional.layer_norm(increment(block, wanted), (D,))
    else:
        wanted = tiny(fusion="residual", fusion_options={"form": form}, spread=False).evolve(z, None).z
    assert (model.evolve(z, None).z - wanted).abs().max() < 1e-12


def test_attention_over_depth_starts_with_e_to_minus_4_for_all_older_states_together():
    fusion = FUSIONS["attention"](5, D)
    states = [torch.randn(2, LENGTH, D) for _ in range(5)]
    weights = fusion.weights(4, states)
    assert weights.shape == (2, LENGTH, 5)
    assert (weights[..., 0] - 1 / (1 + math.exp(-4))).abs().max() < 1e-6
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    assert FUSIONS["attention"](5, D).weights(0, states[:1]).eq(1).all()


@pytest.mark.parametrize("name", FUSIONS)
def test_a_silent_layer_leaves_equal_states_as_they_are_or_halves_them_under_the_mean(name):
    """φ(0, z, ..., z) = z for weights of states that sum to 1, as at the start."""
    fusion = FUSIONS[name](3, D)
    z = torch.randn(1, LENGTH, D)
    for layer in range(3):
        got = fusion(layer, (torch.zeros_like(z),) * 2, (z,) * (layer + 1))
        wanted = z * (layer + 1) / (layer + 2) if name == "mean" else z
        assert (got - wanted).abs().max() < 1e-6


CASES = [(name, form, solver, coupling) for i, (name, form) in enumerate(PAIRS)
         for solver, coupling in [[("euler", "lie"), ("rk4", "strang"), ("ab3", "parallel")][i % 3],
                                  [("dopri5", "lie"), ("leapfrog", "composed"), ("backward_euler", "parallel"),
                                   ("rk2_gate", "composed")][i % 4]]]


@pytest.mark.parametrize(("name", "form", "solver", "coupling"), CASES)
def test_every_fusion_trains_with_every_kind_of_solver_and_is_saved_bit_for_bit(name, form, solver, coupling, tmp_path):
    model = tiny(n_layers=3, fusion=name, fusion_options={"form": form} | OPTIONS.get(name, {}), solver=solver,
                 block={"coupling": coupling})
    with torch.no_grad():
        for p in model.layers.parameters():
            p.mul_(0.25)  # mild enough for implicit methods with one step a layer
    out = model(tokens())
    (out * torch.randn_like(out)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.abs().sum() > 0 for p in model.fusion.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.01 * p.grad)
    model.save(tmp_path)
    again = odeformer.load(tmp_path)
    assert again.config == model.config and torch.equal(again(tokens()), model(tokens()))


@pytest.mark.parametrize(("name", "form"), PAIRS)
@pytest.mark.parametrize(("solver", "coupling"), [("euler", "lie"), ("rk4", "parallel")])
def test_a_fused_decoder_sees_no_later_token_and_a_cache_gives_the_same(name, form, solver, coupling):
    model = decoder(fusion=name, fusion_options={"form": form} | OPTIONS.get(name, {}), solver=solver,
                    block={"coupling": coupling}, n_layers=3)
    before = tokens()
    after = before.clone()
    after[:, -1] = (after[:, -1] + 1) % VOCAB
    x, y = model(before), model(after)
    assert (x[:, :-1] - y[:, :-1]).abs().max() < 1e-13 < 1e-6 < (x[:, -1] - y[:, -1]).abs().max()
    with torch.no_grad():
        cache = model.new_cache()
        pieces = []
        for piece in before.split([3, 1, 2], 1):
            logits, cache = model(piece, cache=cache)
            pieces.append(logits)
    assert (torch.cat(pieces, 1) - x).abs().max() < 1e-12


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_padding_changes_no_real_token_whatever_it_holds(name, form):
    model = tiny(fusion=name, fusion_options={"form": form} | OPTIONS.get(name, {}), n_layers=3)
    short, mask = tokens(length=4), torch.arange(LENGTH).expand(2, -1) < 4
    alone = model.evolve(model.embed(short), None).z
    z = torch.cat([model.embed(short), torch.full((2, 2, D), math.nan, dtype=torch.float64)], 1)
    together = model.evolve(z, mask).z
    assert (alone - together[:, :4]).abs().max() < 1e-12


@pytest.mark.parametrize("gradient", ["checkpoint", "checkpoint_recursive", "reversible"])
@pytest.mark.parametrize(("name", "form"), [("attention", "pre"), ("learned", "post"), ("concat", "input"),
                                            ("fixed", "plain")])
def test_gradient_modes_act_within_layers_and_agree_with_backprop(name, form, gradient):
    options, grads = {"form": form} | OPTIONS.get(name, {}), []
    model = tiny(fusion=name, fusion_options=options, n_layers=3, solver="reversible_midpoint", steps_per_layer=2,
                 block={"coupling": "parallel", "dropout": 0.2}, layer_drop=0.0 if form == "input" else 0.3).train()
    for mode in ("backprop", gradient):
        torch.manual_seed(3)
        model.zero_grad()
        out, solution = model.with_solver("reversible_midpoint", gradient=mode)(tokens(), return_solution=True)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (grads[0] - grads[1]).abs().max() < 1e-9 * grads[0].abs().max()
    assert solution.nfe == 3 * 2 * 2 * 2  # layers, steps, there and back, stages
    if gradient == "reversible":
        assert solution.nfe_backward > solution.nfe and solution.reconstruction_error < 1e-9


def test_the_solution_of_a_fused_model_holds_the_states_of_all_steps():
    model = tiny(fusion="learned", solver="rk4", steps_per_layer=2, n_layers=2)
    z = model.embed(tokens())
    solution = model.evolve(z, None, save=True)
    assert solution.depths == [0.0, 0.5, 1.0, 1.5, 2.0] and solution.steps == [0.5] * 4 and solution.nfe == 16
    first = solvers.solve(model.layers.field("lie", odeformer.block.Context()), z, span=(0.0, 1.0), n_steps=2,
                          solver=solvers.LieTrotter("rk4"), save_at="steps")
    a, b = model.fusion.a["0"], model.fusion.b["0"]
    assert (solution.states[1] - first.states[1]).abs().max() < 1e-12
    assert (solution.states[2] - (a[0] * z + b * (first.z - z))).abs().max() < 1e-12
    assert (solution.layers[0].z - first.z).abs().max() < 1e-12
    assert model.evolve(z, None).states is None


def test_a_fused_per_sample_solve_lists_the_steps_of_each_row():
    model = tiny(fusion="mean", solver="dopri54", solver_options={"per_sample": True}, rtol=1e-4, n_layers=2)
    _, solution = model(tokens(batch=3), return_solution=True)
    assert len(solution.steps) == len(solution.errors) == 3
    assert all(abs(sum(row) - 2) < 1e-9 for row in solution.steps)
    assert solution.n_steps == max(map(len, solution.steps))


def test_the_state_between_layers_is_float32_in_a_bfloat16_model():
    """64 increments of 2^-10 to a state of 1, whose neighbours in bfloat16 are 2^-7 apart: they would all vanish."""
    for name in ("fixed", "learned", "concat"):
        model = tiny(n_layers=32, fusion=name, spread=False)
        with torch.no_grad():
            for key, p in model.layers.named_parameters():
                if ".output." in key:
                    p.fill_(2**-10 if key.endswith("bias") else 0)
        model = model.bfloat16()
        _, solution = model(tokens(), return_solution=True)
        z = torch.ones(1, LENGTH, D, dtype=torch.bfloat16)
        got = model.evolve(z, None).z
        assert got.dtype == solution.z.dtype == solution.states.dtype == torch.bfloat16
        assert (got - (1 + 64 * 2**-10)).abs().max() <= 2**-8, name


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_a_fused_model_runs_in_bfloat16_and_under_autocast(name, form):
    model = tiny(n_layers=3, fusion=name, fusion_options={"form": form} | OPTIONS.get(name, {})).float()
    wanted = model(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        out, solution = model(tokens(), return_solution=True)
    assert solution.z.dtype == torch.float32
    assert (out - wanted).norm() < 0.03 * wanted.norm()
    half = model.bfloat16()(tokens())
    assert half.dtype == torch.bfloat16 and (half.float() - wanted).norm() < 0.05 * wanted.norm()


def test_an_adaptive_solver_in_bfloat16_keeps_the_coarse_default_tolerance():
    nfe = [tiny(n_layers=2, solver="dopri5", fusion=name).bfloat16()(tokens(), return_solution=True)[1].nfe
           for name in (None, Plain)]
    assert nfe[1] <= 2 * nfe[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("attention", {"form": "post"}), ("fixed", {"b": [3 / 2, -1 / 2]})])
def test_a_fused_model_compiles_to_one_graph(name, options):
    model = tiny(fusion=name, fusion_options=options, n_layers=3, block={"coupling": "composed"})
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert (compiled(tokens()) - model(tokens())).abs().max() < 1e-12


@pytest.mark.parametrize("name", FUSIONS)
def test_torch_func_differentiates_a_fused_model(name):
    model = tiny(fusion=name, fusion_options=OPTIONS.get(name, {}), n_layers=3)
    parameters, ids = dict(model.named_parameters()), tokens()

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (ids,)).cos().sum()

    got = torch.func.grad(loss)(parameters)
    wanted = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for x, y in zip(got.values(), wanted, strict=True):
        assert (x - y).abs().max() < 1e-11


def test_the_last_norm_is_left_out_where_the_last_layer_ends_in_one():
    def final(**options):
        return isinstance(tiny(n_layers=3, fusion="residual", fusion_options=options).final_norm, nn.LayerNorm)

    assert final(form="post") and final() and final(form="pre", stride=2)
    assert not final(form="pre") and not final(form="pre", stride=3)


def test_with_solver_shares_the_fusion():
    model = tiny(fusion="attention")
    assert model.with_solver("rk4").fusion is model.fusion
    wrong(lambda: model.with_solver("dense"), "fusion", "dense", "history")
    wrong(lambda: model.with_solver("rk4", fusion="mean"), "fusion", "rk4")


def wrong(call, *words):
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_what_a_fusion_cannot_do_is_refused_when_the_model_is_made():
    wrong(lambda: DepthConfig(fusion="means"), "fusion", "means", "known:", "residual")
    wrong(lambda: DepthConfig(fusion_options={"form": "pre"}), "fusion_options", "None")
    wrong(lambda: tiny(fusion="mean", fusion_options={"windows": 2}), "windows", "known:")
    wrong(lambda: tiny(fusion="mean", fusion_options={"form": "middle"}), "form", "middle", "post")
    wrong(lambda: tiny(fusion="residual", fusion_options={"form": "input"}), "input", "eq. 25")
    wrong(lambda: tiny(fusion="fixed", fusion_options={"form": "input"}), "input", "eq. 25")
    wrong(lambda: tiny(fusion="residual", fusion_options={"stride": 2}), "stride", "nothing")
    wrong(lambda: tiny(fusion="mean", fusion_options={"window": 0}), "window", "at least 1")
    wrong(lambda: tiny(fusion="mean", fusion_options={"stride": 5}), "stride = 5", "n_layers = 4")
    wrong(lambda: tiny(fusion="fixed", fusion_options={"b": []}), "b must", "[]")
    wrong(lambda: tiny(fusion="fixed", fusion_options={"a": [math.nan]}), "a must", "nan")
    wrong(lambda: tiny(fusion="fixed", fusion_options={"b": [1, 2, 3, 4, 5]}), "look back over 5", "n_layers = 4")
    wrong(lambda: tiny(fusion="fixed", fusion_options={"starter": "rk4"}), "starter", "rk4")
    wrong(lambda: tiny(fusion="fixed", fusion_options={"b": [1.5, -0.5], "starter": "dopri5"}), "starter", "dopri5")
    wrong(lambda: tiny(fusion="mean", solver="dense"), "dense", "history", "fusion")
    wrong(lambda: tiny(fusion="mean", solver="momentum"), "momentum", "history")
    wrong(lambda: tiny(fusion="mean", solver="ab2", solver_options={"across_pieces": True}), "ab2", "history")
    wrong(lambda: tiny(fusion="mean", n_steps=6, weights="shared"), "n_steps", "n_layers = 4", "6")
    wrong(lambda: tiny(fusion="mean", layer_drop=0.1, fusion_options={"form": "input"}), "layer_drop", "input")
    tiny(fusion="residual", solver="dense", block={"coupling": "composed"})(tokens())  # plain, so nothing to refuse
