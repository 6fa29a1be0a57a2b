"""Stability of training and swaps of the solver: what the two benchmarks count, on cases whose answer is known."""

import json
import math
from itertools import product

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks import solver_swap as swap
from benchmarks import training_stability as stability
from odeformer.depth import SolverError

BENCHMARKS = (stability, swap)
NFE = {"euler": 1, "momentum": 1, "midpoint": 2, "rk4": 4}  # evaluations a step
FLAT, FALLING = [2.3] * 20, [2.3 - 0.05 * i for i in range(20)]


@pytest.fixture(scope="module", autouse=True)
def _digits():
    pytest.importorskip("sklearn")


# ---- what trains


@pytest.mark.parametrize(("losses", "expected"), [
    (FALLING, True),
    (FLAT, False),  # a guess
    ([2.0] * 18 + [1.8, 1.8], True),  # the last tenth is at the share of 0.9 exactly
    ([2.0] * 18 + [1.8, 1.81], False),
    ([2.0] * 18 + [1.0, 2.5], True),  # mean 1.75
    ([2.0, 4.0] + [1.0] * 18, True),  # twice the first is allowed
    ([2.0, 4.01] + [1.0] * 18, False),  # more is not, whatever comes after it
    ([2.0] + [1.0] * 17 + [math.nan, 1.0], False),
    ([2.0] + [1.0] * 18 + [math.inf], False),
    (FALLING[:19], False),  # stopped early
    ([math.nan], False),
])
def test_a_training_works_if_it_ends_low_and_never_blew_up(losses, expected):
    assert stability.trains(losses, 20) is expected


def test_the_last_tenth_is_one_update_at_least():
    assert stability.trains([2.0, 2.0, 1.0], 3)
    assert not stability.trains([2.0, 1.0, 2.0], 3)


@pytest.mark.parametrize("n", range(1, 12))
def test_bisection_finds_what_trying_every_rung_of_a_monotone_ladder_finds(n):
    for limit in range(-1, n):
        asked = []

        def works(i, limit=limit, asked=asked):
            asked.append(i)
            return i <= limit

        brute_force = max((i for i in range(n) if i <= limit), default=-1)
        assert stability.boundary(works, n) == brute_force
        assert len(asked) == len(set(asked)) <= math.ceil(math.log2(n + 1))


def test_on_any_ladder_bisection_ends_where_a_rung_works_and_the_next_does_not():
    for ladder in product((False, True), repeat=6):
        found = stability.boundary(ladder.__getitem__, 6)
        assert found == -1 or ladder[found]
        assert found == 5 or not ladder[found + 1]


SMALL = {"norm": "pre", "solver": "euler", "n_layers": 1, "warmup": 0, "seed": 0, "updates": 12, "d_model": 16,
         "batch_size": 16}


def test_a_rate_that_blows_up_stops_early_and_is_below_the_ladder_without_a_warning():
    row, = stability.measure(SMALL | {"exponents": [40, 42]})
    assert row["largest_rate"] is None and row["log2_rate"] == 39
    assert [one["rate"] for one in row["tried"]] == [2.0**41, 2.0**40]
    assert all(one["diverged"] and not one["trains"] and one["updates"] <= 3 for one in row["tried"])
    json.dumps(row, allow_nan=False)


def test_a_ladder_that_trains_throughout_ends_at_its_highest_rate():
    row, = stability.measure(SMALL | {"exponents": [-7, -6], "updates": 24})
    assert row["log2_rate"] == -6 and row["largest_rate"] == 2.0**-6
    assert [one["trains"] for one in row["tried"]] == [True, True]
    assert {"task", "model", "solver", "weights", "gradient", "parameters", "multiply_adds", "memory",
            "nfe_backward", "seconds"} <= row.keys()


def test_a_state_or_a_loss_that_is_not_finite_is_the_last_update():
    class Trainer:
        """What comes, loss after loss."""

        model = nn.Identity()

        def __init__(self, coming):
            self.coming = iter(coming)
            self.done = False

        def train_step(self):
            value = next(self.coming)
            if isinstance(value, Exception):
                raise value
            return {"loss": value}

    overflow = SolverError("the state is not finite", l=0.0, h=1.0, nfe=1, advice="take smaller steps")
    for failure in (FloatingPointError("the loss became nan"), overflow):
        found = stability.losses(Trainer([2.0, 1.0, failure, 1.0]))
        assert found[:2] == [2.0, 1.0] and math.isnan(found[2]) and len(found) == 3
    assert stability.losses(Trainer([2.0, 3.9, 4.1, 1.0])) == [2.0, 3.9, 4.1]
    with pytest.raises(RuntimeError, match="anything else"):
        stability.losses(Trainer([2.0, RuntimeError("anything else")]))


@pytest.mark.parametrize("norm", stability.NORMS)
@pytest.mark.parametrize("solver", stability.SOLVERS)
def test_every_norm_and_solver_of_the_study_makes_a_model_of_the_stated_nfe(norm, solver):
    case = SMALL | {"norm": norm, "solver": solver, "n_layers": 3}
    starter = 2 if solver.startswith("ab2") else 0  # whose first step is one of midpoint
    assert stability.nfe(case) == (4 if starter else 3 * NFE[solver])
    assert torch.equal(stability.model(case).patch_embedding.weight, stability.model(case).patch_embedding.weight)


def stability_rows(rates, **factors):
    """Rows with log2 rates by (norm, solver, layers), one a seed."""
    return [{"case": {"norm": norm, "solver": solver, "n_layers": n, "warmup": 0, "seed": seed, "exponents": [-10, -3],
                      **factors}, "log2_rate": value, "nfe": n}
            for (norm, solver, n), values in rates.items() for seed, value in enumerate(values)]


def test_the_table_gives_medians_spread_and_the_paired_difference_to_pre_norm_under_euler():
    rates = {("pre", "euler", 2): [-5, -5, -3], ("pre", "euler", 6): [-7, -6, -6], ("pre", "euler", 12): [-9, -9, -9],
             ("post", "rk4", 2): [-6, -7, -7], ("post", "rk4", 6): [-9, -8, -8]}
    rows = stability_rows(rates) + stability_rows({("pre", "euler", 6): [-3, -3, -3]}, warmup=15)
    base, other = [dict(zip(stability.COLUMNS, line, strict=True)) for line in stability.summary(rows)]
    assert (base["norm"], base["solver"], base["NFE"]) == ("pre", "euler", "6")  # 6 layers: the deepest that all have
    assert base["layers: largest rate"] == "2: 2^-5, 6: 2^-6, 12: 2^-9"
    assert base["spread"] == "x2" and base["verdict"] == "" and base["with warm-up"] == "6: 2^-3 or more"
    assert base["deepest at 2^-7"] == "6" and other["deepest at 2^-7"] == "2"
    assert other["log2 against pre, euler"].startswith("-2.0") and other["verdict"] == "worse"
    assert stability.shown(stability_rows({("pre", "euler", 2): [-11, -11, -4]})) == "below 2^-10"


def test_a_model_trains_as_deep_as_any_of_the_ladder_in_the_median_over_seeds():
    found = {("pre", "euler", n): stability_rows({("pre", "euler", n): values})
             for n, values in {2: [-4, -4, -8], 6: [-7, -8, -8], 12: [-8, -7, -8]}.items()}
    assert stability.deepest(found, ("pre", "euler"), [2, 6, 12]) == 6  # 6, 12 and none


# ---- swaps


TINY = {"data": "digits", "weights": "piecewise", "training": "euler", "seed": 0, "n_layers": 2, "updates": 4,
        "d_model": 16, "batch_size": 8, "learning_rate": 3e-3}


@pytest.mark.parametrize("training", swap.TRAININGS)
def test_the_training_solver_itself_changes_nothing(training):
    case = TINY | {"training": training}
    rows = [{"case": case} | row for row in swap.measure(case)]
    same, = (row for row in rows if row["evaluated"] == row["trained"])
    assert same["change"] == 0
    solver, steps = same["trained"].split(":")
    assert same["evaluated_nfe"] == NFE[solver] * int(steps) * 2
    assert {"task", "model", "solver", "n_steps", "nfe", "nfe_backward", "parameters", "loss"} <= same.keys()
    json.dumps(rows, allow_nan=False)
    change = swap.changes(rows)[same["evaluated"]]
    assert (change.mean, change.low, change.high) == (0, 0, 0)


def test_trainings_but_the_textbook_one_have_equal_nfe_and_every_evaluation_its_own():
    for name, training in swap.TRAININGS.items():
        assert NFE[training["solver"]] * training["steps"] == (1 if name == "one step" else 4)
    assert {NFE[solver] * steps for solver, steps in swap.EQUAL.items()} == {4}
    case = TINY | {"weights": "shared"}
    model = swap.model(case)
    for solver, steps in (*swap.EVALUATIONS, *swap.HALVES):
        _, solution = swap.task_of("digits", None).forward(swap.swapped(model, solver, steps),
                                                           swap.task_of("digits", None).batch(torch.arange(2)))
        assert solution.nfe == NFE[solver] * steps * 2


@pytest.mark.parametrize("weights", ["piecewise", "shared"])
def test_invariance_is_one_minus_the_mean_relative_distance_from_the_fine_reference(weights):
    """Over the evaluations that all weights have, so that their scores can be compared."""
    task, model = swap.task_of("digits", None), swap.model(TINY | {"weights": weights})
    for p in model.layers.parameters():
        nn.init.normal_(p, std=0.3)
    rows = swap.evaluations(model, task, {"trained": "euler:4"})
    images = task.data.test_x[:swap.SAMPLES]
    ends = {}
    for solver, steps in swap.EVALUATIONS:
        with torch.no_grad():
            ends[f"{solver}:{steps}"] = model.with_solver(solver, steps_per_layer=steps).evolve(model.embed(images)).z
    fine = ends["rk4:8"].double()
    distances = {}
    for name, z in ends.items():
        ratios = [min(1.0, ((a - b).pow(2).sum().sqrt() / b.pow(2).sum().sqrt()).item())
                  for a, b in zip(z.double(), fine, strict=True)]
        distances[name] = sum(ratios) / len(ratios)
    others = [value for name, value in distances.items() if name != "rk4:8"]
    assert min(others) > 0
    for row in rows:
        if row["evaluated"] not in distances:
            continue
        assert row["distance"] == pytest.approx(distances[row["evaluated"]], abs=1e-6)
        assert row["invariance"] == pytest.approx(1 - sum(others) / len(others), abs=1e-6)


def test_a_model_whose_layers_do_nothing_is_the_same_under_every_solver():
    model = swap.model(TINY | {"weights": "shared"})
    for p in model.layers.parameters():
        nn.init.zeros_(p)
    nn.init.normal_(model.head.weight)
    rows = swap.evaluations(model, swap.task_of("digits", None), {"trained": "euler:4"})
    assert all(row["change"] == 0 and row["distance"] == 0 and row["invariance"] == 1 for row in rows)
    assert all(row["agreement"] == 1 for row in rows)


def test_half_of_a_step_a_layer_is_for_smooth_weights_alone_and_is_half_the_steps():
    for weights, options in swap.FAMILIES.items():
        case = TINY | {"weights": weights, "n_layers": 4}
        model, task = swap.model(case), swap.task_of("digits", None)
        names = {row["evaluated"] for row in swap.evaluations(model, task, {"trained": "rk4:1"})}
        assert ("rk4:0.5" in names) is (weights in swap.SMOOTH), options
    assert swap.swapped(model, "rk4", 0.5).config.depth.steps(4) == 2


def test_a_drawn_training_takes_every_solver_in_an_order_that_the_seed_decides():
    class Task:
        name = "fake"

        def __init__(self):
            self.seen = []

        def loss(self, model, batch, **options):
            self.seen.append((model.config.depth.solver, model.config.depth.steps_per_layer))
            return batch, None

    model, seen = swap.model(TINY), []
    for seed in (0, 0, 1):
        task = Task()
        drawn = swap.Drawn(task, seed)
        for _ in range(40):
            torch.rand(seed + 1)  # what else is drawn has no part in it
            assert drawn.loss(model, 3)[0] == 3
        seen.append(task.seen)
    assert seen[0] == seen[1] != seen[2] and drawn.name == "fake"
    assert set(seen[0]) == set(swap.EQUAL.items())


def swap_rows(values, trained="euler:4", metric="accuracy"):
    """Rows of one model: {evaluation: [value a seed]}."""
    return [{"case": {"data": "digits", "weights": "piecewise", "training": "euler", "seed": seed}, "trained": trained,
             "evaluated": name, "evaluated_nfe": 4, "nfe": 16, "metric": metric, "value": value, "invariance": 0.5}
            for name, per_seed in values.items() for seed, value in enumerate(per_seed)]


def test_the_table_pairs_before_and_after_and_calls_free_what_cannot_lose_more_than_the_margin():
    rows = swap_rows({"euler:4": [0.5, 0.7, 0.9], "midpoint:2": [0.5, 0.7, 0.9], "rk4:1": [0.4, 0.6, 0.8],
                      "euler:2": [0.495, 0.695, 0.895], "rk4:8": [0.6, 0.8, 0.89]})
    found = swap.swaps(rows)
    assert found["equal NFE"].mean == pytest.approx(-0.1)  # rk4, the worse of the two
    assert found["equal NFE"].low == pytest.approx(-0.1) and found["equal NFE"].verdict() == "worse"
    assert found["half"].mean == pytest.approx(-0.005) and found["fine"].mean == pytest.approx(0.19 / 3)
    line = dict(zip(swap.COLUMNS, swap.summary(rows)[0], strict=True))
    assert line["metric"] == "0.700" and line["spread"] == "0.200" and line["invariance"] == "0.500"
    assert line["half the steps"].endswith("worse") and line["fine reference"].endswith("tie")
    assert line["free"] == "half, fine"  # a loss of 0.005 for sure is within the margin, as is -0.01 at worst
    rows = swap_rows({"euler:4": [0.5, 0.7, 0.9], "midpoint:2": [0.5, 0.7, 0.9], "rk4:1": [0.5, 0.7, 0.9],
                      "euler:2": [0.48, 0.7, 0.9], "rk4:8": [0.4, 0.6, 0.8]})
    line = dict(zip(swap.COLUMNS, swap.summary(rows)[0], strict=True))
    assert line["free"] == "equal NFE"  # half: a tie with a mean of -0.007, but its interval reaches -0.02
    assert line["half the steps"].endswith("tie")


def test_for_bits_a_byte_the_worst_swap_is_the_largest_rise():
    rows = swap_rows({"midpoint:2": [2.0, 2.1], "euler:4": [2.5, 2.6], "rk4:1": [1.9, 2.0], "rk4:8": [2.0, 2.1]},
                     "midpoint:2", "bits_per_byte")
    found = swap.swaps(rows)
    assert found["equal NFE"].mean == pytest.approx(0.5) and found["equal NFE"].verdict(False) == "worse"
    assert found["half"] is None  # was not measured
    assert dict(zip(swap.COLUMNS, swap.summary(rows)[0], strict=True))["free"] == "fine"
    assert not swap.is_free(swap.swaps(swap_rows({"euler:4": [1.0], "midpoint:2": [1.0], "rk4:1": [1.0],
                                                  "rk4:8": [1.0]}))["fine"], True)  # one seed says nothing


# ---- both


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda module: module.__name__.split(".")[1])
def test_presets_give_each_case_once_in_plain_values(benchmark):
    for settings in benchmark.PRESETS.values():
        cases = [json.dumps(case, sort_keys=True) for case in benchmark.cases(settings, settings["seeds"])]
        assert len(cases) == len(set(cases)) and len(cases) % settings["seeds"] == 0
    assert benchmark.PRESETS["quick"]["seeds"] >= 3 and benchmark.PRESETS["cpu"]["seeds"] >= 5


SHRUNK = {
    stability: {"layers": {"euler": [1, 2], "rk4": [1]}, "few": ["pre, RMSNorm"], "warm": [2], "updates": 4,
                "d_model": 16, "batch_size": 8, "exponents": [-8, -8]},
    swap: {"n_layers": 2, "trainings": {"piecewise": ["drawn"], "spline": ["one step"]},
           "tasks": {"digits": {"updates": 2, "d_model": 16, "batch_size": 8, "learning_rate": 1e-3},
                     "python_docs": {"updates": 2, "d_model": 16, "batch_size": 2, "learning_rate": 1e-3,
                                     "length": 64}}},
}


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda module: module.__name__.split(".")[1])
def test_a_shrunk_preset_runs_to_the_table_and_the_picture(benchmark, monkeypatch):
    monkeypatch.setattr(swap, "TEST_BYTES", 200)
    swap.task_of.cache_clear()
    rows = [{"case": case} | row for case in benchmark.cases(SHRUNK[benchmark], 2) for row in benchmark.measure(case)]
    swap.task_of.cache_clear()
    json.dumps(rows, allow_nan=False)
    table = benchmark.summary(rows)
    assert all(len(line) == len(benchmark.COLUMNS) and all(isinstance(cell, str) for cell in line) for line in table)
    figure = Figure(figsize=benchmark.SIZE, layout="constrained")
    benchmark.draw(rows, figure)
    figure.draw_without_rendering()
    panels = {stability: len(stability.NORMS), swap: 2 * 2}
    assert len(figure.axes) == panels[benchmark]
    assert len(table) == {stability: 2 * len(stability.NORMS) - 1, swap: 2 * 2}[benchmark]
