"""The benchmarks that hold weights and change the integration: refinement, calibrated_grids."""

import json
import math
import re
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from real_weights import folder

from benchmarks import calibrated_grids, refinement
from odeformer import BlockConfig, DepthConfig, VisionConfig, VisionEncoder
from odeformer.blocks import LayeredField
from solvers import calibrate_grid

A = [0.3, -0.2, 0.5, -0.6, 0.1, 0.4]  # rates of six layers, dz/dl = a z
T = torch.tensor([[[1.0]]], dtype=torch.float64)


def scalar_layers(rates=A):
    """A stand-in for a model whose layers are linear, and a batch."""
    pieces = [(float(i), i + 1.0, lambda z, l, a=a: a * z) for i, a in enumerate(rates)]
    model = SimpleNamespace(embed=lambda tokens, mask: T, vector_field=lambda z, mask: LayeredField(pieces),
                            config=SimpleNamespace(n_layers=len(rates)))
    return refinement.Counted(model, SimpleNamespace(tokens=None, mask=None))


def two_step_adams(rates):
    """z + h (3/2 f - 1/2 f of the step before), the first step by the midpoint rule."""
    z, before = 1 + rates[0] + rates[0] ** 2 / 2, rates[0]
    for a in rates[1:]:
        f = a * z
        z, before = z + 1.5 * f - 0.5 * before, f
    return z


MIDDLE = (1 + A[2]) * (1 + A[3])
EXPECTED = {  # (line, k): final state from 1, evaluations of a layer
    ("euler", 1): (math.prod(1 + a for a in A), 6),
    ("euler", 4): (math.prod((1 + a / 4) ** 4 for a in A), 24),
    ("midpoint", 2): (math.prod((1 + a / 2 + a * a / 8) ** 2 for a in A), 24),
    ("rk4", 1): (math.prod(1 + a + a**2 / 2 + a**3 / 6 + a**4 / 24 for a in A), 24),
    ("ab2 across layers", 1): (two_step_adams(A), 7),
    ("layers repeated", 2): (math.prod((1 + a) ** 2 for a in A), 12),
    ("long steps", 2): (math.prod(1 + 2 * a for a in A[::2]), 3),
    ("long steps", 3): (math.prod(1 + 3 * a for a in A[::3]), 2),
    ("layers skipped", 3): (math.prod(1 + a for a in A[::3]), 2),
    ("damped loop of the middle", 2): (math.prod(1 + a for a in A[:2] + A[4:]) * (1 + (MIDDLE - 1) / 2) ** 2, 8),
}


def test_each_line_is_what_its_formula_says():
    assert {name for name, _ in EXPECTED} == {name for name, line in refinement.LINES.items() if not line.turns}
    for (name, k), (wanted, nfe) in EXPECTED.items():
        states, counted = scalar_layers().run(refinement.LINES[name], k)
        assert states[-1].item() == pytest.approx(wanted, rel=1e-12), (name, k)
        assert counted == nfe, (name, k)


def test_shown_levels_are_measured_and_the_original_and_the_limit_are_among_them():
    for name, line in refinement.LINES.items():
        assert set(line.shown) <= set(line.levels), name
    assert 1 in refinement.LINES["euler"].shown and max(refinement.LINES["rk4"].levels) == refinement.FINE
    assert [refinement.LINES[name].h(2) for name in ("euler", "long steps", "layers repeated")] == ["1/2", "2", "1"]


def heavy_atoms(smiles):
    return Counter(x.capitalize() for x in re.findall(r"Cl|Br|Mg|Al|Na|[BCNOPSFIK]|[cnos]", smiles))


def test_reactions_are_written_with_known_tokens_and_make_no_atoms():
    words = vocabulary()
    for name, smiles in refinement.REACTIONS.items():
        tokens = refinement.SMILES.findall(smiles)
        assert "".join(tokens) == smiles and set(tokens) <= set(words), name
        before, after = map(heavy_atoms, smiles.split(">>"))
        assert not after - before, (name, after - before)
        assert smiles.count("(") == smiles.count(")"), name
    assert len(refinement.REACTIONS) == 24  # four parts of six


def vocabulary():
    return (folder("rxnmapper") / "vocab.txt").read_text(encoding="utf-8").split("\n")


def theirs(name, kind):
    import transformers as hf

    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    return getattr(hf, kind).from_pretrained(folder(name), local_files_only=True).eval()


@pytest.fixture(scope="module")
def rows():
    """Two reactions, measured; through JSON, as results are."""
    folder("rxnmapper")
    case = {"model": "rxnmapper", "seed": 0, "part": 0, "parts": 1, "examples": 2}
    return [{"case": case, **row} for row in json.loads(json.dumps(refinement.measure(case)))]


def row_of(rows, name, k):
    return next(row for row in rows if (row["method"], row["k"]) == (name, k))


def test_euler_with_a_whole_step_is_the_library_s_model(rows):
    words, other = vocabulary(), theirs("rxnmapper", "AlbertForMaskedLM")
    names = sorted(refinement.REACTIONS, key=lambda x: len(refinement.REACTIONS[x]))[:2]
    row, mask_id = row_of(rows, "euler", 1), words.index("[MASK]")
    assert row["examples"] == names and row["nfe"] == 12 and row["agreement"] == pytest.approx([1, 1])
    for i, name in enumerate(names):
        ids = [words.index(x) for x in ("[CLS]", *refinement.SMILES.findall(refinement.REACTIONS[name]), "[SEP]")]
        hits, losses = [], []
        for first in (0, 2, 4):
            hidden = [j for j in range(1, len(ids) - 1) if j % 7 == first]
            tokens = torch.tensor([[mask_id if j in hidden else x for j, x in enumerate(ids)]])
            with torch.no_grad():
                logits = other(input_ids=tokens).logits[0]
            hits += [logits[j].argmax().item() == ids[j] for j in hidden]
            losses += [F.cross_entropy(logits[j], torch.tensor(ids[j])).item() for j in hidden]
        assert row["quality"][i] == pytest.approx(sum(hits) / len(hits), abs=1e-5)
        assert row["loss"][i] == pytest.approx(sum(losses) / len(losses), rel=1e-3)
    assert min(row["quality"]) > row["chance"]


def test_halved_steps_are_a_plain_loop_over_the_library_s_layer(rows):
    sample = refinement.reactions(0, 1, 2, 0)
    other = theirs("rxnmapper", "AlbertForMaskedLM").albert
    layer = other.encoder.albert_layer_groups[0].albert_layers[0]
    bias = torch.zeros(sample.mask.shape).masked_fill(~sample.mask, torch.finfo(torch.float32).min)[:, None, None]
    finals = {}
    with torch.no_grad():
        for k in (1, 2):
            z = other.encoder.embedding_hidden_mapping_in(other.embeddings(sample.tokens))
            for _ in range(12 * k):
                out = layer(z, bias)
                z = z + ((out[0] if isinstance(out, tuple) else out) - z) / k
            finals[k] = z
        work = refinement.Counted(refinement.network("rxnmapper", "composed"), sample)
        states, nfe = work.run(refinement.LINES["euler"], 2)
        fine = work.run(refinement.LINES["rk4"], refinement.FINE)[0][-1]
    real = sample.mask.unsqueeze(-1)
    assert nfe == 24 and ((states[-1] - finals[2]) * real).norm() < 1e-4 * (finals[2] * real).norm()
    row = row_of(rows, "euler", 2)
    means = [(z * real).sum(1) / real.sum(1) for z in (finals[2], finals[1])]
    cosines = F.cosine_similarity(*means, dim=-1).view(2, -1).mean(1)
    off = ((finals[2] - fine) * real).flatten(1).norm(dim=1) / (fine * real).flatten(1).norm(dim=1)
    assert row["agreement"] == pytest.approx(cosines.tolist(), abs=1e-4)
    assert row["distance"] == pytest.approx(off.view(2, -1).mean(1).tolist(), rel=1e-3)
    change = ((states[1] - states[0]).norm(dim=-1) / states[0].norm(dim=-1))[sample.mask].mean().item()
    assert row["steps"][0] == pytest.approx(change, rel=1e-4) and len(row["steps"]) == 24


def test_sublayers_in_turn_are_the_original_at_a_whole_step():
    folder("rxnmapper")
    sample = refinement.reactions(0, 1, 2, 0)
    with torch.no_grad():
        states, nfe = refinement.in_turn("rxnmapper", sample, 1)
        whole, _ = refinement.Counted(refinement.network("rxnmapper", "composed"), sample).run(
            refinement.LINES["euler"], 1)
    assert nfe == 12
    assert ((states[-1] - whole[-1])[sample.mask]).abs().max() < 1e-4 * whole[-1].abs().max()


def test_the_table_and_the_picture_of_the_refinement(rows):
    lines = refinement.summary(rows)
    shown = sum(len(line.shown) for line in refinement.LINES.values())
    assert len(lines) == shown and all(len(line) == len(refinement.COLUMNS) for line in lines)
    labels = {line[1]: dict(zip(refinement.COLUMNS, line, strict=True)) for line in lines}
    assert labels["the original (euler)"]["difference to the original"].startswith("guessing")
    assert labels["fine limit (rk4)"]["distance"] == "0" and labels["fine limit (rk4)"]["NFE"] == "192"
    figure = Figure()
    refinement.draw(rows, figure)
    assert len(figure.axes) == 3 and all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    euler = next(line for line in figure.axes[0].lines if line.get_label() == "euler")
    wanted = [sum(row_of(rows, "euler", k)["quality"]) / 2 for k in (1, 2, 4, 8)]
    assert list(euler.get_xdata()) == [12, 24, 48, 96] and list(euler.get_ydata()) == pytest.approx(wanted)


def test_the_observed_order_and_the_verdicts_are_those_of_made_up_rows():
    case = {"model": "rxnmapper", "seed": 0}
    common = {"examples": ["a", "b", "c"], "loss": [1.0] * 3, "agreement": [1.0] * 3, "step": 0.1, "chance": 0.1,
              "unrelated": 0.5}
    made = [{"case": case, "method": "euler", "k": k, "nfe": 12 * k, "quality": [0.9 / k, 0.8 / k, 0.7 / k],
             "distance": [0.4 / k, 0.2 / k, 0.3 / k], **common} for k in (1, 2, 4, 8)]
    lines = [dict(zip(refinement.COLUMNS, line, strict=True)) for line in refinement.summary(made)]
    assert [line["order"] for line in lines] == ["", "1.00", "1.00"]
    assert [line["verdict"] for line in lines] == ["", "worse", "worse"]
    assert lines[1]["difference to the original"].startswith("-0.400 [")


@pytest.mark.slow
def test_minilm_finds_the_other_half_of_a_paragraph_as_the_library_s_model_does():
    other = theirs("minilm", "BertModel")
    sample = refinement.topics(0, 3, 6, 0)
    assert len(sample.names) == 6 and sample.tokens.shape == (12, refinement.HALF + 2) and sample.mask.all()
    model = refinement.network("minilm", "composed")
    with torch.no_grad():
        z = other(input_ids=sample.tokens, attention_mask=sample.mask.long()).last_hidden_state
        quality, loss = sample.score(model, z)
        states, nfe = refinement.Counted(model, sample).run(refinement.LINES["euler"], 1)
    assert nfe == 6 and (states[-1] - z).abs().max() < 1e-4
    unit = F.normalize(z.mean(1), dim=-1)
    for i in range(6):
        rows = [[(unit[2 * i] @ unit[2 * j + 1]).item() for j in range(6)],
                [(unit[2 * i + 1] @ unit[2 * j]).item() for j in range(6)]]
        assert quality[i] == sum(max(row) == row[i] for row in rows) / 2
        wanted = sum(math.log(sum(math.exp((x - row[i]) / 0.05) for x in row)) for row in rows) / 2
        assert loss[i].item() == pytest.approx(wanted, rel=1e-4)


def test_prose_is_sentences_not_code():
    sentence = "word " * 19 + "end."
    assert refinement.prose(f"{sentence}\n\nx = [1, 2] # 3\n\ntoo short\n\n{'x=1 ' * 30}") == [sentence.strip()]


def test_a_grid_for_a_problem_is_judged_on_other_starts_by_the_exact_solution():
    case = {"target": "logistic", "seed": 3, "updates": None}
    rows = calibrated_grids.measure(case)
    draws = torch.randn(32, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    sample, z0 = (0.1 + 0.01 * 0.1 * draws).split(16)
    exact = z0 / (z0 + (1 - z0) * math.exp(-5))
    for row in rows:
        n = row["nfe"] // {"euler": 1, "midpoint": 2, "rk4": 4}[row["method"]]
        grids = {"equal": [5 * i / n for i in range(n + 1)], "calibrated": row["grid"]}
        assert row["grid"] == pytest.approx(
            calibrate_grid(lambda z, l: z * (1 - z), sample, span=(0.0, 5.0), n_steps=n), rel=1e-9)
        assert max(abs(a - b) for a, b in zip(*grids.values(), strict=True)) > 1e-3
        for kind, grid in grids.items():
            wanted = ((logistic_by_hand(row["method"], z0, grid) - exact) / exact).abs().mean().item()
            assert row[f"{kind}_error"] == pytest.approx(wanted, rel=1e-5), (row["method"], kind)
    assert {(row["method"], row["nfe"]) for row in rows} == {(m, n) for m in ("euler", "midpoint", "rk4")
                                                            for n in (16, 64)}


def logistic_by_hand(method, z, grid):
    def f(z):
        return z * (1 - z)

    for a, b in pairwise(grid):
        h, k1 = b - a, f(z)
        k2 = f(z + h / 2 * k1)
        k3 = f(z + h / 2 * k2)
        z = z + h * {"euler": k1, "midpoint": k2, "rk4": (k1 + 2 * k2 + 2 * k3 + f(z + h * k3)) / 6}[method]
    return z


def test_equal_steps_of_a_model_are_a_plain_loop_over_its_field(monkeypatch):
    target = "digits, shared"
    block = BlockConfig(8, 2, d_ff=8, coupling="parallel")
    model = VisionEncoder(VisionConfig(image_size=4, patch_size=2, channels=1, n_classes=3, n_layers=1, block=block,
                                       depth=DepthConfig(weights="shared"))).double().eval()
    x, y = torch.randn(20, 1, 4, 4, dtype=torch.float64), torch.randint(3, (20,))
    monkeypatch.setattr(calibrated_grids, "NFE", {target: (4,)})
    monkeypatch.setattr(calibrated_grids, "METHODS", ("euler",))
    (method, nfe, numbers), = calibrated_grids.judged(model, x[:8], (x, y), target)
    assert (method, nfe) == ("euler", 4) and len(numbers["grid"]) == 5
    (_, _, others), = calibrated_grids.judged(model, x[:8], (3 * x, y), target)
    assert others["grid"] == numbers["grid"] and others["equal_error"] != numbers["equal_error"]

    def end(grid):
        z = model.embed(x)
        f, l = model.vector_field(z), torch.tensor(0.0)
        for a, b in pairwise(grid):
            z = z + (b - a) * f(z, l)
        return z

    with torch.no_grad():
        fine = end([i / 20000 for i in range(0, 20001, 10)])
        for kind, grid in (("equal", [0, 0.25, 0.5, 0.75, 1]), ("calibrated", numbers["grid"])):
            off = (end(grid) - fine).flatten(1).norm(dim=1) / fine.flatten(1).norm(dim=1)
            assert numbers[f"{kind}_error"] == pytest.approx(off.mean().item(), rel=0.05), kind
        hits = (model.with_solver("euler", n_steps=4)(x).argmax(-1) == y).double().mean().item()
    assert numbers["equal_accuracy"] == hits


def test_a_trained_decoder_and_a_trained_classifier_give_all_rows():
    for target in ("digits, shared", "python_docs, piecewise"):
        case = {"target": target, "seed": 0, "updates": 2}
        model, sample, (unseen, right), row = calibrated_grids.trained(case)
        assert {p.dtype for p in model.parameters()} == {torch.float64} and row["parameters"] > 0
        assert model(unseen[:2]).shape[:-1] == right[:2].shape and sample.shape[1:] == unseen.shape[1:]
        assert not torch.equal(sample[:1], unseen[:1])


def made_up(ratios, equal=1e-2):
    return [{"case": {"target": "kepler", "seed": seed}, "method": method, "nfe": 1600, "equal_error": equal,
             "calibrated_error": ratio * equal, "grid": [0.0, 1.0, 20.0]}
            for method, row in ratios.items() for seed, ratio in enumerate(row)]


def test_ratios_are_geometric_means_with_a_verdict_by_seed():
    rows = made_up({"euler": [0.5, 0.125, 0.25], "midpoint": [2, 8, 4], "rk4": [0.5, 2, 1]})
    cells = [dict(zip(calibrated_grids.COLUMNS, line, strict=True)) for line in calibrated_grids.summary(rows)]
    assert [line["verdict"] for line in cells] == ["better", "worse", "tie"]
    assert [line["ratio"].split()[0] for line in cells] == ["0.25", "4", "1"]
    lost = calibrated_grids.summary(made_up({"euler": [0.9, 0.8]}, equal=1.0))
    assert lost[0][calibrated_grids.COLUMNS.index("verdict")] == "both lost"
    assert cells[0]["spread"] == "2.00" and cells[0]["error, calibrated"] == "2.5e-03"


def test_the_picture_of_calibrated_grids_has_every_ratio():
    figure = Figure()
    calibrated_grids.draw(made_up({"euler": [0.5, 0.125], "midpoint": [2, 8], "rk4": [0.5, 2]}), figure)
    left, right = figure.axes
    assert left.get_xlabel() and right.get_xlabel() and right.get_ylabel() and left.get_xscale() == "log"
    drawn = [container[0].get_xdata()[0] for container in left.containers]
    assert drawn == pytest.approx([0.25, 4, 1])
    assert list(right.lines[0].get_xdata()) == pytest.approx([0, 0.05, 1])


def test_unequal_evaluations_are_refused_and_lost_solutions_count_as_one():
    with pytest.raises(ValueError, match="17 evaluations, and 16"):
        calibrated_grids.check_nfe(17, 16, "kepler", "euler")
    fine = torch.tensor([[1.0], [1.0], [2.0]])
    assert calibrated_grids.off(torch.tensor([[torch.nan], [9.0], [1.0]]), fine) == pytest.approx(2.5 / 3)


def test_cases_of_both_are_told_apart_and_every_target_is_known():
    for module in (refinement, calibrated_grids):
        for settings in module.PRESETS.values():
            cases = list(module.cases(settings, 2))
            assert len({json.dumps(case, sort_keys=True) for case in cases}) == len(cases)
    assert set(calibrated_grids.PRESETS["quick"]["targets"]) <= set(calibrated_grids.NFE)
