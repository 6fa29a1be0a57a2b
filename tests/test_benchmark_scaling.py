"""The benchmark of scaling: slopes, what is within 20 %, and training steps in several processes."""

import json
import math
from multiprocessing import active_children, forkserver
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from benchmarks import process_scaling, scaling
from odeformer.processes import Processes

SMALL = {"factor": "processes", "solver": "euler", "n_layers": 1, "d_model": 8, "n_tokens": 4, "batch": 4,
         "counts": [1, 2], "rounds": 1}
MACHINE = SimpleNamespace(reference=0.5)


def made(factor, amount, cost, predicted):
    """A row as a run would have it, in which all that is measured against a factor costs the same."""
    names = [name for costs in scaling.costs_of(factor) for name in costs]
    names += [] if factor == "processes" else list(scaling.KEPT)
    row = {"case": {"factor": factor, **scaling.BASE, factor: amount}, "nfe": amount, "processes": amount}
    return row | dict.fromkeys(names, cost) | {f"{name}_predicted": predicted for name in names}


ROWS = [made("solver", 4, 1.0, 1.0), made("solver", 8, 2.0, 2.2), made("batch", 2, 3.0, 4.5),
        made("batch", 4, 12.0, 12.0), made("processes", 1, 8.0, 8.0), made("processes", 2, 4.0, 6.0),
        made("processes", 4, 2.0, 2.0)]


def test_a_slope_is_the_power_with_which_cost_grows():
    rows = [made("d_model", n, 3.0 * n**1.5, 1.0) for n in (64, 128, 512)]
    assert scaling.slope(rows, "step") == pytest.approx(1.5)
    assert math.isnan(scaling.slope(rows[:1], "step"))


def test_the_table_has_a_line_for_each_factor_and_cost_and_what_holds_for_one_process():
    lines = list(scaling.summary(ROWS))
    assert all(len(line) == len(scaling.COLUMNS) for line in lines)
    one = [line for line in lines if line[0] == "NFE"]
    assert [line[2] for line in one] == ["forward pass", "training step", "a token written", "step, memory"]
    assert one[0] == ("NFE", "4 8", "forward pass", "1.00", f"{math.log2(2.2):.2f}", "1.00-1.10", "2 of 2")
    several = [line for line in lines if line[0] == "processes"]
    assert [line[2] for line in several] == list(process_scaling.COSTS.values())
    assert several[0][1:4] == ("1 2 4", "step, wall, batch shared", "-1.00")
    assert several[0][5:] == ("1.00-1.50", "2 of 3")
    assert [line[2:] for line in lines if line[0] == "all"] == [
        ("time", "", "", "1.00-1.50", "9 of 12"), ("memory", "", "", "1.00-1.50", "6 of 8"),
        ("step, memory as malloc keeps it", "", "", "1.00-1.50", "3 of 4")]


def test_the_picture_has_a_panel_of_times_for_each_factor_and_of_memory_where_there_is_some():
    figure = Figure()
    scaling.draw(ROWS, figure)
    shown = {(axes.get_xlabel(), axes.get_subplotspec().rowspan.start): axes for axes in figure.axes
             if axes.get_visible()}
    assert set(shown) == {("NFE", 0), ("NFE", 1), ("batch", 0), ("batch", 1), ("processes", 0)}
    points, line = shown["processes", 0].lines[:2]
    assert list(points.get_xdata()) == [1, 2, 4] and list(points.get_ydata()) == [8000.0, 4000.0, 2000.0]
    assert list(line.get_ydata()) == [8000.0, 6000.0, 2000.0]


def test_there_are_no_more_processes_than_cores(monkeypatch):
    for cores, wanted in ((1, []), (2, [[1, 2]]), (3, [[1, 2]]), (16, [[1, 2, 4]])):
        monkeypatch.setattr(process_scaling.os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        cases = list(scaling.cases(scaling.PRESETS["quick"], 1))
        assert [case["counts"] for case in cases if case["factor"] == "processes"] == wanted
        assert [json.loads(json.dumps(case)) for case in cases] == cases


def test_a_prediction_is_the_estimate_of_ones_share_as_busy_as_the_machine_is_and_the_sum_of_gradients(monkeypatch):
    monkeypatch.setattr(process_scaling, "estimate", lambda make, machine, *, batch, n_tokens: SimpleNamespace(
        step=SimpleNamespace(seconds=float(batch))))
    seconds = {"strong": [3.0, 9.0, 4.0], "weak": [7.0, 8.0, 6.0], "reduce": [0.25, 0.5, 0.125],
               "reference": [1.0, 0.75, 2.0]}
    row = process_scaling.row({"batch": 5, "n_tokens": 4}, 2, seconds, scaling.make, MACHINE)
    assert (row["strong"], row["weak"], row["reduce"], row["busy"]) == (4.0, 7.0, 0.25, 2.0)
    assert row["strong_predicted"] == 2.0 * 3 + 0.25 and row["weak_predicted"] == 2.0 * 5 + 0.25
    one = process_scaling.row({"batch": 5, "n_tokens": 4}, 1, {name: seconds[name] for name in ("strong", "reference")},
                              scaling.make, MACHINE)
    assert (one["strong"], one["weak"], one["reduce"], one["weak_predicted"]) == (4.0, 4.0, 0.0, 10.0)


def test_a_step_is_a_training_step_on_a_batch_of_the_size_asked_for():
    assert set(process_scaling.calls_of(SMALL, Processes(), scaling.make)) == {"strong", "reference"}
    calls = process_scaling.calls_of(SMALL, SimpleNamespace(n=2), scaling.make)
    assert calls.keys() == {"strong", "reference", "weak", "reduce"}
    assert [calls[name]()["count"] for name in ("strong", "weak")] == [4, 8]


@pytest.fixture(scope="module")
def context():
    yield scaling.fresh()
    forkserver._forkserver._stop()
    scaling.fresh.cache_clear()


def test_one_and_two_processes_are_timed_and_leave(context, monkeypatch):
    monkeypatch.setattr(process_scaling, "TURN", 0.01)
    begun = set(active_children())
    machine = SimpleNamespace(reference=1.0)
    monkeypatch.setattr(process_scaling, "estimate", lambda *given, batch, **options: SimpleNamespace(
        step=SimpleNamespace(seconds=0.01 * batch)))
    one, two = process_scaling.measure(SMALL, scaling.make, machine, context)
    assert (one["processes"], two["processes"], one["reduce"]) == (1, 2, 0.0)
    assert 0 < two["reduce"] < two["strong"] and two["weak"] > 0 < one["strong"] == one["weak"]
    assert two["strong_predicted"] == pytest.approx(two["busy"] * 0.02 + two["reduce"])
    assert json.loads(json.dumps([one, two])) == [one, two]
    assert set(active_children()) <= begun


def test_a_process_that_fails_or_is_killed_ends_the_benchmark_and_the_others(context, monkeypatch):
    begun = set(active_children())
    with pytest.raises(RuntimeError, match="one of 2 processes failed: KeyError: 'd_model'"), process_scaling.groups(
            {k: v for k, v in SMALL.items() if k != "d_model"} | {"counts": [2]}, scaling.make, context):
        pass
    with (pytest.raises(RuntimeError, match="one of 1 processes failed: it was killed"),
          process_scaling.groups(SMALL, scaling.make, context) as found):
        found[1].children[0].kill()
        found[1].children[0].join()
        found[1].turn("strong")
    assert set(active_children()) <= begun
