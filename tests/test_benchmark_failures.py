"""Runs of a benchmark that diverge: they are said, and stop no others."""

import json
from typing import ClassVar

import pytest

from benchmarks import runner, store
from benchmarks.__main__ import main as benchmarks
from benchmarks.images import images
from benchmarks.tables import fill
from benchmarks.training import train
from odeformer import BlockConfig, VisionConfig, VisionEncoder
from odeformer.tasks import Classification
from solvers import SolverError

ERRORS = {"loss": FloatingPointError("the loss became nan at step 3"),
          "state": SolverError("the state has become infinite or NaN", l=1.0, h=0.5, nfe=8, advice="take more steps")}


class Module:
    PRESETS: ClassVar = {"quick": {"seeds": 2}}
    COLUMNS = ("solver", "seed", "value")
    SIZE = (4, 3)
    WORKERS = 1
    diverge: ClassVar = {("rk4", 1): "loss", ("euler", 0): "state"}
    calls: ClassVar = []

    @staticmethod
    def cases(settings, seeds):
        return [{"solver": solver, "seed": seed} for solver in ("euler", "rk4") for seed in range(seeds)]

    @classmethod
    def measure(cls, case):
        cls.calls.append((case["solver"], case["seed"]))
        if what := cls.diverge.get((case["solver"], case["seed"])):
            raise ERRORS[what]
        return [{"value": 7 + case["seed"]}, {"value": 9}]

    @staticmethod
    def summary(rows):
        return [(row["case"]["solver"], row["case"]["seed"], row["value"]) for row in rows]

    @staticmethod
    def draw(rows, figure):
        figure.subplots().plot([row["value"] for row in rows])


@pytest.fixture
def toy(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "find", lambda name: Module)
    monkeypatch.setattr(Module, "calls", [])
    return tmp_path / "toy.jsonl"


def test_a_run_that_diverges_is_told_and_left_out_and_the_others_go_on(toy, capsys):
    assert benchmarks(["run", "toy"]) == 0
    said = capsys.readouterr().out
    assert "2 of 4 runs failed and are left out: solver euler, seed 0: the state has become infinite or NaN" in said
    assert "solver rk4, seed 1: the loss became nan at step 3" in said
    assert [row["value"] for row in store.read_rows(toy)] == [8, 9, 7, 9]
    written = [json.loads(line) for line in toy.read_text().splitlines()]
    assert [row.get("failed", "").split(" at ")[0] for row in written] == [
        "the state has become infinite or NaN", "", "", "", "", "the loss became nan"]
    assert all(row["run"]["benchmark"] == "toy" for row in written)
    assert len(Module.calls) == 4
    assert benchmarks(["run", "toy", "--resume"]) == 0  # it would fail again
    assert len(Module.calls) == 4
    block = fill("<!-- results: toy -->\n<!-- end -->")
    assert "| rk4    | 0    | 9     |\n\n2 of 4 runs failed" in block


def test_where_no_run_gives_numbers_the_command_fails_and_keeps_what_was_said(toy, capsys, monkeypatch):
    toy.write_text("what was there before")
    monkeypatch.setattr(store, "place", lambda name, preset: toy)
    monkeypatch.setattr(Module, "diverge", {(solver, seed): "loss" for solver in ("euler", "rk4") for seed in (0, 1)})
    assert benchmarks(["run", "toy"]) == 2
    told = capsys.readouterr()
    assert "4 of 4 runs failed" in told.out
    assert "no run gave numbers" in told.err
    assert "loss became nan" in toy.with_suffix(".part.jsonl").read_text()
    assert toy.read_text() == "what was there before"


def test_other_errors_still_stop_a_benchmark(toy, monkeypatch):
    monkeypatch.setitem(ERRORS, "loss", ZeroDivisionError("a mistake in the study"))
    with pytest.raises(ZeroDivisionError):
        benchmarks(["run", "toy"])


def test_a_training_at_an_absurd_rate_becomes_such_a_row():
    def measure(case):
        made = VisionConfig(image_size=8, patch_size=4, channels=1, n_classes=10, n_layers=1, block=BlockConfig(8, 2))
        return [train(lambda: VisionEncoder(made), Classification(images("digits")), steps=4, batch_size=4, **case)[1]]

    row, = runner.attempt(measure, {"seed": 0, "learning_rate": 1e-3})
    assert row["loss"] > 0
    row, = runner.attempt(measure, {"seed": 0, "learning_rate": 1e30})
    assert list(row) == ["failed"]
