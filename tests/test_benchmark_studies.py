"""The studies of equal compute and of truncation: what is compared is equal in what it says, and measured right."""

import math
from collections import Counter

import pytest
import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from benchmarks import iso_nfe, truncation
from benchmarks.training import BASELINE, REFERENCE
from odeformer.data.digits import digits
from odeformer.tasks import Classification, Language

TINY = {"nfe": 12, "n_layers": 6, "d_model": 8, "batch_size": 2, "length": 6, "learning_rate": 1e-3, "steps": 2,
        "methods": tuple(iso_nfe.METHODS)}


@pytest.fixture
def short_text(monkeypatch):
    """In place of the documentation: 40 windows of 6 bytes to learn from, 5 held out."""
    ids = torch.randint(256, (300,), generator=torch.Generator().manual_seed(0))
    task = Language("python_docs", ids[:241], ids[-31:], length=6)
    for module in (iso_nfe, truncation):
        monkeypatch.setattr(module, "documentation", lambda length: task)
    iso_nfe.task_of.cache_clear()
    yield task
    iso_nfe.task_of.cache_clear()


def tiny_cases(seeds=1, **options):
    return list(iso_nfe.cases({"tasks": {"python_docs": TINY | options}}, seeds))


def evaluations(model, tokens):
    """Evaluations of whole layers in a pass, counted at the modules: an attention and a feed-forward make one."""
    counts = Counter()
    if hasattr(model.layers, "layers"):  # torch.nn
        parts = [(layer, 1) for layer in model.layers.layers]
    else:
        parts = [(part.core, 1 / 2) for block in model.layers for part in (block.attention, block.feedforward)]
    hooks = [part.register_forward_hook(lambda *_, share=share: counts.update({"all": share}))
             for part, share in parts]
    model.train()(tokens)
    for hook in hooks:
        hook.remove()
    return counts["all"]


def decoder_parameters(n_layers, d, d_ff, length):
    """Of a pre-norm byte model, by hand: four square maps and two of the feed-forward with biases, two norms a layer;
    embeddings of bytes and positions, final norm, head."""
    layer = 4 * (d * d + d) + 2 * d * d_ff + d_ff + d + 2 * 2 * d
    return n_layers * layer + 256 * d + length * d + 2 * d + 256 * d


def test_every_method_makes_the_evaluations_that_its_layers_are_chosen_by():
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    for case in tiny_cases():
        counted, method = evaluations(iso_nfe.make(case), tokens), iso_nfe.METHODS[case["method"]]
        assert counted == method.per_layer * case["n_layers"] + method.first, case
        if "NFE" in " ".join(case["equal"]):
            assert counted == 12, case


def test_what_is_called_equal_is_equal_and_every_method_stands_beside_euler():
    solver_parameters = {"rk2_learned": 2, "rk2_family": 1, "pc_ema": 2, "rk2_gate": 2 * 8 + 1}
    for pair in iso_nfe.PAIRS:
        chosen = {case["method"]: case for case in tiny_cases() if pair in case["equal"]}
        assert tuple(sorted(chosen)) == tuple(sorted(iso_nfe.PAIRS[pair])) and BASELINE in chosen
        counts = {method: sum(p.numel() for p in iso_nfe.make(case).parameters()) for method, case in chosen.items()}
        for method, case in chosen.items():
            by_hand = decoder_parameters(case["n_layers"], case["d_model"], case["d_ff"], 6)
            by_hand += solver_parameters.get(method, 0)
            if method != "dense":  # which has two weights for each earlier layer
                assert counts[method] == by_hand, method
            if pair == "parameters":
                assert (case["n_layers"], case["d_model"], case["d_ff"]) == (6, 8, 32)
            elif pair == "NFE":
                assert (case["d_model"], case["d_ff"]) == (8, 32)
            else:
                assert abs(counts[method] / decoder_parameters(6, 8, 32, 6) - 1) < 0.02, method


def test_the_layers_of_equal_nfe_are_those_of_the_claim():
    layers = {name: method.layers(12) for name, method in iso_nfe.METHODS.items()}
    assert layers == {"euler": 12, "torch.nn": 12, "midpoint": 6, "heun2": 6, "rk4": 3, "ab2": 11, "dense": 12,
                      "abm2": 3, "pc_ema": 4, "rk2_learned": 6, "rk2_gate": 6, "rk2_family": 6, "strang": 4}
    with pytest.raises(ValueError, match=r"nfe must be 0 \+ a multiple of 4 for rk4, got 6"):
        iso_nfe.METHODS["rk4"].layers(6)


def test_compared_runs_see_the_same_batches_by_seed(short_text, monkeypatch):
    seen = []
    batch = Language.batch
    monkeypatch.setattr(Language, "batch", lambda self, rows, split="train": (
        seen.append(rows.tolist()) if split == "train" else None, batch(self, rows, split))[1])

    def batches(measure, case):
        seen.clear()
        measure(case)
        return list(seen)

    cases = {(case["method"], case["seed"]): case for case in tiny_cases(2) if case["equal"] == ["NFE"]}
    first = batches(iso_nfe.measure, cases[BASELINE, 0])
    assert len(first) >= TINY["steps"] and len(set(map(tuple, first))) == TINY["steps"]
    assert all(batches(iso_nfe.measure, cases[name, 0]) == first for name in (REFERENCE, "rk4", "dense"))
    assert batches(iso_nfe.measure, cases["rk4", 1]) != first
    settings = {"layers": [1], "steps": 2, "d_model": 8, "length": 6, "batch_size": 2, "learning_rate": 1e-3,
                "other_rate": 4e-3}
    monkeypatch.setattr(truncation, "truncated", lambda model, task: {})
    for case in truncation.cases(settings, 1):
        assert batches(truncation.measure, case) == first


def test_iso_nfe_is_measured_tabled_and_drawn(short_text):
    methods = (BASELINE, REFERENCE, "midpoint", "rk4", "ab2")
    rows = [{"case": case, **row} for case in tiny_cases(2, methods=methods) for row in iso_nfe.measure(case)]
    assert all(row["nfe"] == 12 for row in rows if "parameters" not in row["case"]["equal"])
    assert all(row["multiply_adds"] == by_hand_multiply_adds(row) for row in rows)
    lines = iso_nfe.summary(rows)
    assert all(len(line) == len(iso_nfe.COLUMNS) for line in lines)
    assert [line[1:3] for line in lines] == [(pair, method) for pair, chosen in iso_nfe.PAIRS.items()
                                             for method in iso_nfe.METHODS if method in chosen and method in methods]
    bits = {(row["case"]["method"], row["case"]["seed"]): row["bits_per_byte"] for row in rows
            if "NFE" in row["case"]["equal"]}
    over = sum(bits["rk4", seed] - bits[BASELINE, seed] for seed in (0, 1)) / 2
    cell = next(line for line in lines if line[1:3] == ("NFE", "rk4"))[-2]
    assert float(cell.split()[0]) == pytest.approx(over, abs=6e-4)
    figure = Figure(figsize=iso_nfe.SIZE)
    iso_nfe.draw(rows, figure)
    assert [axes.get_xlabel() for axes in figure.axes[1:]] == ["NFE of a forward pass", "parameters"]
    assert len(list(iso_nfe.FRONTS.figures(rows))) == 1


def by_hand_multiply_adds(row):
    """A token: matrices of a layer and scores and values over 6 tokens, each evaluation; and the head."""
    d, d_ff = row["case"]["d_model"], row["case"]["d_ff"]
    return row["nfe"] * (4 * d * d + 2 * d * d_ff + 2 * 6 * d) + 256 * d


def test_iso_nfe_makes_classifiers_of_images(monkeypatch):
    options = {name: value for name, value in TINY.items() if name != "length"} | {"nfe": 4, "n_layers": 2}
    cases = list(iso_nfe.cases({"tasks": {"digits": options | {"methods": iso_nfe.MAIN}}}, 1))
    data = digits()
    monkeypatch.setattr(iso_nfe, "task_of", lambda name, length: Classification(data))
    (row,) = iso_nfe.measure(cases[0])
    assert row["nfe"] == 4 and 0 <= row["accuracy"] <= 1 and row["task"] == "digits"
    assert len({case["method"] for case in cases}) == 3


class Pieces:
    """dz/dl = A_i z in layer i."""

    def __init__(self, *matrices):
        self.pieces = [(float(i), i + 1.0, lambda z, l, a=a: z @ a.T) for i, a in enumerate(matrices)]


def test_truncation_of_a_linear_field_is_that_of_the_matrix_exponential():
    torch.manual_seed(0)
    a, b = (0.5 * torch.randn(3, 3, dtype=torch.float64) for _ in range(2))
    z = torch.randn(4, 3, dtype=torch.float64)
    eye = torch.eye(3, dtype=torch.float64)
    methods = {"euler": lambda m: eye + m, "heun2": lambda m: eye + m + m @ m / 2}
    for method in methods.values():
        one = z @ method(a).T
        states = [z, one, one @ method(b).T]
        found = truncation.truncation(Pieces(a, b), states)
        exact = [z @ torch.linalg.matrix_exp(a).T, one @ torch.linalg.matrix_exp(b).T]
        for error, state, wanted in zip(found.layers, states[1:], exact, strict=True):
            assert error == pytest.approx(((state - wanted).norm() / wanted.norm()).item(), rel=1e-4)
        end = exact[0] @ torch.linalg.matrix_exp(b).T
        torch.testing.assert_close(found.exact, end, rtol=1e-6, atol=1e-6)
        assert found.total == pytest.approx(((states[-1] - end).norm() / end.norm()).item(), rel=1e-4)
    with pytest.raises(ValueError, match="states must be one more than the 2 pieces of the field, got 2"):
        truncation.truncation(Pieces(a, b), states[:2])


def test_truncation_of_a_model_is_its_distance_from_many_steps_and_what_reading_those_out_changes(short_text):
    case = {"block": "rk2", "n_layers": 2, "d_model": 8, "length": 6}
    torch.manual_seed(0)
    model = truncation.make(case)
    found = truncation.truncated(model, short_text)
    windows = short_text.test[:30].view(5, 6)
    targets = short_text.test[1:31].view(5, 6)
    with torch.no_grad():
        own = model.run(windows).z
        fine = model.embed(windows)
        for block in model.layers:  # the classical rule, 64 steps, of the increment of a textbook layer
            def f(z, block=block):
                masked = {"causal": True}
                k = block.attention.core(block.attention.placement.norm(z), **masked)
                return k + block.feedforward.core(block.feedforward.placement.norm(z + k))
            for _ in range(64):
                h = 1 / 64
                k1 = f(fine)
                k2 = f(fine + h / 2 * k1)
                k3 = f(fine + h / 2 * k2)
                fine = fine + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(fine + h * k3))
        losses = [cross_entropy(model.read_out(z).flatten(0, 1), targets.flatten()).item() for z in (own, fine)]
    assert found["truncation"] == pytest.approx(((own - fine).norm() / fine.norm()).item(), rel=1e-3)
    assert found["bits_change"] == pytest.approx((losses[1] - losses[0]) / math.log(2), abs=1e-4)
    assert len(found["truncation_layers"]) == 2 and found["gamma"] is None


def test_truncation_blocks_cost_what_their_residual_match_costs_and_are_trained_alike():
    for preset in truncation.PRESETS.values():
        cases = list(truncation.cases(preset, 1))
        assert len({(case["block"], case["n_layers"]) for case in cases}) == len(cases)
        nfe = {}
        for case in cases:
            tiny = case | {"d_model": 8, "length": 6}
            nfe[case["block"], case["n_layers"]] = evaluations(truncation.make(tiny), torch.zeros(1, 6, dtype=int))
            rate = preset["other_rate" if case["block"] == truncation.CONTROL else "learning_rate"]
            assert case["learning_rate"] == rate
        assert all(nfe[truncation.RESIDUAL, n] == n for block, n in nfe if block == truncation.RESIDUAL)
        assert all((truncation.RESIDUAL, value) in nfe for value in nfe.values())
        assert {nfe[block, 1] for block in truncation.BLOCKS if "rk2" in block} == {2} and nfe["rk4", 1] == 4


def test_truncation_table_compares_with_equal_layers_and_with_equal_nfe():
    values = {("residual", 1): (1, 4.0), ("residual", 2): (2, 3.0), ("residual", 4): (4, 2.5), ("rk2", 1): (2, 3.5),
              ("rk4", 1): (4, 2.5)}
    rows = [{"case": {"block": block, "n_layers": n, "seed": seed}, "nfe": nfe, "parameters": 10 * n,
             "multiply_adds": 100 * nfe, "bits_per_byte": bits + seed, "perplexity": 2.0, "truncation_layer": 0.25,
             "truncation": 0.5, "bits_change": 0.125}
            for (block, n), (nfe, bits) in values.items() for seed in range(3)]
    lines = {line[1]: line for line in truncation.summary(rows)}
    assert all(len(line) == len(truncation.COLUMNS) for line in lines.values())
    assert lines["rk2"][8:12] == ("-0.500 [-0.500, -0.500]", "better", "+0.500 [+0.500, +0.500]", "worse")
    assert lines["rk4"][8:12] == ("-1.500 [-1.500, -1.500]", "better", "+0.000 [+0.000, +0.000]", "tie")
    assert lines["residual"][8:12] == ("", "", "", "")
    assert lines["residual, 4 layers"][8:12] == ("-1.500 [-1.500, -1.500]", "better", "", "")
    assert lines["rk2"][2:8] == ("2", "10", "200", "2.00", "4.500", "1.000")
    assert lines["rk2"][12:] == ("2.5e-01", "5.0e-01", "+0.125 ± 0.000")


def test_truncation_is_measured_and_drawn(short_text):
    settings = {"layers": [1], "steps": 3, "d_model": 8, "length": 6, "batch_size": 2, "learning_rate": 1e-3,
                "other_rate": 4e-3}
    rows = [{"case": case, **row} for case in truncation.cases(settings, 1) for row in truncation.measure(case)]
    assert len(truncation.summary(rows)) == len(truncation.BLOCKS) + 2
    for row in rows:
        assert row["perplexity"] == pytest.approx(2 ** row["bits_per_byte"], rel=1e-6)  # a token is a byte
        assert row["truncation"] > 0 and math.isfinite(row["bits_change"])
        assert (row["gamma"] is not None) == (row["case"]["block"] == "rk2, learned γ")
    figure = Figure(figsize=truncation.SIZE)
    truncation.draw(rows, figure)
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "log", "symlog"]
    assert len(list(truncation.FRONTS.figures(rows))) == 1
