"""The benchmark of speed: its targets, its ratios, and that the peers compute what ours does."""

import gc
import json
import math

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from benchmarks import speed
from benchmarks.speed import adaptive, attention, depth, fixed, generating, model, peers, start, timing
from benchmarks.tables import table
from odeformer.attention import ATTENTION
from solvers import solve


def made(group="fixed", label="a", value=0.5, target=1.0, note=""):
    """A row as a run would have it, with the quartiles a tenth to each side."""
    quartiles = None if value is None else [value * 0.9, value * 1.1]
    return {"case": {"group": group}, "label": label, "what": "x / y", "value": value, "quartiles": quartiles,
            "target": target, "note": note}


def test_targets_are_the_promised_ones():
    assert fixed.BARE == {"forward": (1.08, 1.02, 1.01), "forward + backward": (1.10, 1.03, 1.02)}
    assert fixed.TORCHDIFFEQ == (0.80, 0.95, 1.00)
    assert fixed.SHAPES == [(1, 8, 32), (8, 32, 64), (8, 64, 256)]
    assert model.TORCH_NN == {"forward": (0.98, 0.98, 1.01), "forward + backward": (0.85, 0.95, 1.00)}
    assert (model.PLAIN, model.RK4, model.N_LAYERS) == (1.02, 4.05, 6)
    assert model.SHAPES == [(1, 16, 64), (8, 32, 128), (8, 128, 256)]
    assert (adaptive.WRAPPER, adaptive.PER_SAMPLE, adaptive.STIFF, adaptive.ROWS) == (1.02, 0.7, 0.2, 64)
    assert (depth.MEMORY, depth.TIME, depth.WEIGHTS, depth.D_MODEL) == (1.10, 2.2, 1.10, 256)
    assert (depth.SHALLOW, depth.DEEP) == (12, 96)
    assert (attention.RELATIVE, attention.TOKENS) == (1.35, 512)
    assert (generating.PLAIN, generating.GPT2, generating.RK4) == (1.02, 1.0, 4.1)


@pytest.mark.parametrize("preset", speed.PRESETS)
def test_cases_are_plain_and_each_another_one(preset):
    cases = list(speed.cases(speed.PRESETS[preset], 1))
    keys = [json.dumps(case, sort_keys=True) for case in cases]
    assert len(set(keys)) == len(keys)
    assert {case["group"] for case in cases} == set(speed.GROUPS)
    assert [json.loads(key) for key in keys] == cases


def test_the_cpu_preset_has_every_size_pass_and_padding():
    cases = list(speed.cases(speed.PRESETS["cpu"], 1))
    models = {(tuple(c["shape"]), c["kind"], c["padded"], c["pass"]) for c in cases
              if c["group"] == "model" and c["kind"] != "rk4"}
    assert len(models) == 3 * 2 * 2 * 2
    solved = {(c["field"], tuple(c["shape"]), c["pass"]) for c in cases if c["group"] == "fixed"}
    assert len(solved) == 2 * 3 * 2 and {shape for _, shape, _ in solved} == set(fixed.SHAPES)
    assert {c["size"] for c in cases if c["group"] == "generating"} == {"small", "gpt2"}


def test_a_ratio_is_the_median_over_rounds_of_ours_over_the_peer():
    times = timing.Times({"ours": [1.0, 2.0, 9.0, 4.0, 5.0], "peer": [2.0, 2.0, 3.0, 2.0, 1.0]})
    row = times.ratio("label", "ours", "peer", 1.5)  # ratios 0.5, 1, 3, 2, 5
    assert row["value"] == 2.0 and row["quartiles"] == [1.0, 3.0] and row["target"] == 1.5
    assert (row["ours_ms"], row["peer_ms"]) == (4000.0, 2000.0)
    assert times.ratio("label", "ours", "peer", times=0.5)["value"] == 1.0


def test_calls_take_turns_and_the_collector_and_the_threads_are_as_before():
    order, threads = [], torch.get_num_threads()

    def call(name):
        assert torch.get_num_threads() == 1
        order.append(name)
        sum(range(2000))

    times = timing.interleaved({"a": lambda: call("a"), "b": lambda: call("b")}, 3, 0.0)
    assert order == ["a"] * timing.WARM_UP + ["b"] * timing.WARM_UP + ["a", "b"] * 3
    assert [len(x) for x in times.seconds.values()] == [3, 3]
    assert gc.isenabled() and torch.get_num_threads() == threads


def test_long_rounds_are_fewer(monkeypatch):
    monkeypatch.setattr(timing, "repeated", lambda call, n: 2.0 * n)
    assert len(timing.interleaved({"a": int}, 20, 0.1).seconds["a"]) == 6  # of 2 s each
    monkeypatch.setattr(timing, "repeated", lambda call, n: 60.0 * n)
    assert len(timing.interleaved({"a": int}, 20, 0.1).seconds["a"]) == timing.LEAST


def test_a_library_that_fails_is_a_row_that_says_how_and_ours_is_an_error():
    def broken():
        raise ImportError("no such thing " + "x" * 500)

    times = timing.interleaved({"ours": int, "torchdyn": peers.later(broken)}, 2, 0.0)
    row = times.ratio("label", "ours", "torchdyn", 1.0)
    assert row["value"] is None and row["note"].startswith("ImportError: no such thing") and len(row["note"]) <= 100
    assert speed.verdict(row) == "not measured"
    with pytest.raises(ImportError, match="no such thing"):
        timing.interleaved({"ours": broken}, 2, 0.0)
    assert gc.isenabled()


def test_the_table_shows_the_worst_of_each_promise_and_reports_come_last():
    rows = [made(label="a", value=0.5), made(label="a", value=0.8, note="Decoder"), made(label="b", value=1.2),
            made(label="c", value=0.1, target=None), made(label="d", value=None, note="gone")]
    lines = list(speed.summary(rows))
    assert [line[1] for line in lines] == ["a", "b", "d", "c"]
    assert lines[0] == ("fixed", "a", "x / y", "0.80", "0.72-0.88", "1", "met", "worst of 2; Decoder")
    assert [line[6] for line in lines] == ["met", "missed", "not measured", ""]
    assert all(len(line) == len(speed.COLUMNS) for line in lines)
    assert "| met" in table(speed.COLUMNS, lines)
    assert speed.finding(rows) == "1 of 3 targets of speed are met; missed by most: b, 1.20 of at most 1."
    assert speed.finding(rows[:2]) == "1 of 1 targets of speed are met."


def test_the_picture_shows_what_is_measured_over_its_target():
    figure = Figure()
    speed.draw([made(label="a", value=0.5, target=2.0), made(label="b", value=1.2), made(label="c", value=None),
                made(label="d", value=0.3, target=None), made(label="e", value=0.0, target=0.0)], figure)
    (axes,) = figure.axes
    points = sorted(float(x) for line in axes.lines if line.get_marker() in "os" for x in line.get_xdata())
    assert points == pytest.approx([0.25, 1.2])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fixed: a (0.50 of 2)", "fixed: b (1.20 of 1)"]
    assert "target" in axes.get_xlabel()


@pytest.mark.parametrize("kind", model.KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_plain_torch_and_torch_nn_with_our_weights_give_what_ours_gives(kind, padded):
    ours = model.make(kind, [3, 8, 64]).eval()
    tokens, mask = model.batch([3, 8, 64], padded)
    plain, theirs = model.Plain(ours), model.TorchNN(ours).eval()
    model.check(ours, plain, theirs, tokens, mask)
    with torch.no_grad():
        theirs.layers.layers[2].linear1.weight.mul_(1.1)
    with pytest.raises(AssertionError, match="TorchNN"):
        model.check(ours, plain, theirs, tokens, mask)
    if padded:
        assert mask.any(1).all() and not mask.all() and mask.sum(1).tolist() == sorted(mask.sum(1).tolist())
    assert model.batch([1, 8, 64], True)[1].sum() == 6  # a single text has padding, too


def test_the_fast_path_is_what_it_was_before():
    before = torch.backends.mha.get_fastpath_enabled()
    for on in (False, True):
        with model.fast_path(on):
            assert torch.backends.mha.get_fastpath_enabled() is on
        assert torch.backends.mha.get_fastpath_enabled() is before


FIXED = {"torchdiffeq": (peers.torchdiffeq_fixed, "rk4", 12), "torchode": (peers.torchode_heun, "heun2", 24)}


@pytest.mark.parametrize("name", FIXED)
def test_other_libraries_integrate_the_same_field_with_fixed_steps(name):
    pytest.importorskip(name)
    make, solver, n_steps = FIXED[name]
    torch.manual_seed(0)
    f, z0 = fixed.FIELDS["linear"](16), torch.randn(2, 3, 16)
    with torch.no_grad():
        ours = solve(lambda z, l: 0.1 * f(z, l), z0, span=(0.0, float(n_steps)), n_steps=n_steps, solver=solver).z
        theirs = make(lambda z, l: 0.1 * f(z, l), z0, n_steps)().view_as(ours)
    assert torch.allclose(ours, theirs, atol=1e-3)
    assert not torch.allclose(theirs, z0, atol=0.1)


@pytest.mark.parametrize("name", ["torchdiffeq", "torchode"])
def test_other_libraries_integrate_with_steps_of_their_choice(name):
    pytest.importorskip(name)
    z0 = torch.tensor([[1.0], [2.0]])
    z = getattr(peers, f"{name}_adaptive")(lambda z, l: -z, z0, 2.0, 1e-6, 1e-8)()
    assert torch.allclose(z, z0 * math.exp(-2.0), rtol=1e-5)


def test_accepted_steps_of_torchdiffeq_are_counted():
    counted = []

    def f(z, l):
        counted.append(l)
        return -z

    steps = adaptive.accepted(f, torch.ones(4, 3), 3.0)
    assert len(counted) == 2 + 6 * steps  # no step of this problem is rejected


def test_the_twin_in_jax_is_the_layer():
    jnp = pytest.importorskip("jax").numpy
    torch.manual_seed(0)
    f, z = fixed.FIELDS["block"](32), torch.randn(2, 5, 32)
    weights, twin = peers.jax_block(fixed.layer_of(f))
    assert torch.allclose(torch.tensor(twin(weights, jnp.asarray(z.numpy())).tolist()), f(z, torch.tensor(0.0)),
                          atol=1e-5)


def test_rows_of_a_field_are_those_of_the_whole():
    torch.manual_seed(0)
    rows = torch.tensor([3, 21, 40])
    for f in (adaptive.Oscillators(), adaptive.Relaxation.of(50.0)):
        z, l = f.z0(), torch.tensor(0.0)
        assert len(z) == adaptive.ROWS
        assert torch.allclose(f.select(rows)(z[rows], l), f(z, l)[rows], atol=1e-6)
    assert adaptive.Relaxation.of(50.0).rate.tolist().count(50.0) == 1


def test_the_reference_of_a_layer_leaves_its_weights_in_single_precision():
    f = adaptive.Layer()
    exact = adaptive.reference(f, f.z0()[:2], 0.5)
    assert exact.dtype == torch.float64
    assert {p.dtype for part in f.f._parts for p in part.sublayer.parameters()} == {torch.float32}


def test_what_goes_through_the_fused_kernel_is_seen():
    x = attention.state()[:, :16]
    assert attention.is_fused(ATTENTION["softmax"](attention.D_MODEL, 4), x)
    assert not attention.is_fused(ATTENTION["local_multiplicative"](attention.D_MODEL, 4), x)
    found = attention.priors()
    assert {"local_distance", "local_gaussian", "alibi"} <= found.keys()
    assert all(attention.is_fused(module, x) for module in found.values())


def test_imports_are_timed_over_torch_and_help_does_not_load_it(monkeypatch):
    assert start.spent("sum(range(10**6))") > 0
    seconds = {"import torch": 2.0, "import odeformer": 2.25, "help": 0.125}
    monkeypatch.setattr(start, "spent", lambda code: seconds[next(k for k, v in start.CODE.items() if v == code)])
    added, shown, loaded = start.measure({}, 3, 0.0)
    assert (added["value"], shown["value"], loaded["value"]) == (0.25, 0.125, 0.0)
    assert (added["target"], shown["target"], loaded["target"]) == (0.3, 0.3, 0.0)


SMALL = [
    {"group": "fixed", "field": "linear", "shape": [1, 8, 32], "pass": "forward", "jit": False},
    {"group": "fixed", "field": "block", "shape": [1, 8, 32], "pass": "forward + backward", "jit": False},
    {"group": "model", "shape": [1, 16, 64], "kind": "Decoder", "padded": True, "pass": "forward"},
    {"group": "model", "shape": [1, 16, 64], "kind": "rk4"},
    {"group": "adaptive", "what": "wrapper", "field": "linear", "jit": False},
    {"group": "attention", "what": "window", "tokens": [64, 128, 256]},
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case['group']} {case.get('what', case.get('kind', ''))}")
def test_a_case_gives_rows_of_numbers(case, monkeypatch):
    for name in ("torchdyn_fixed", "torchdyn_adaptive"):  # whose import warns, and warnings are errors here
        monkeypatch.setattr(peers, name, lambda *given: (_ for _ in ()).throw(ImportError("left out")))
    monkeypatch.setattr(model, "x_transformers", lambda *given: (_ for _ in ()).throw(ImportError("left out")))
    rows = speed.measure({**case, "rounds": 2, "seconds": 0.0})
    assert rows and json.loads(json.dumps(rows)) == rows
    for row in rows:
        if row["value"] is None:
            assert row["note"].startswith("ImportError") and row["target"] is None
        else:
            assert math.isfinite(row["value"]) and row["quartiles"][0] <= row["value"] <= row["quartiles"][1]


def test_the_plain_model_is_the_textbook_transformer():
    ours = model.make("Encoder", [2, 4, 64]).eval()
    tokens, _ = model.batch([2, 4, 64], False)
    z = ours.token_embedding.weight[tokens] + ours.position.table[:4]
    for layer in ours.layers:
        core, feedforward = layer.attention.core, layer.feedforward.core
        x = F.layer_norm(z, (64,))  # scale and shift are where they start
        q, k, v = (w(x).unflatten(-1, (2, 32)).transpose(1, 2) for w in (core.query, core.key, core.value))
        z = z + core.output(((q @ k.mT / 32**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
        z = z + feedforward.output(F.gelu(feedforward.hidden(F.layer_norm(z, (64,)))))
    assert torch.allclose(model.Plain(ours)(tokens), F.layer_norm(z, (64,)), atol=1e-5)
