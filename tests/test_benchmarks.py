"""The benchmark runner: results on disk, tables, the README and the report."""

import json
import re
from types import MappingProxyType

import pytest
from browser import Reader, answer, needs_browser
from matplotlib.figure import Figure

import odeformer
from benchmarks import runner, store
from benchmarks.__main__ import main as benchmarks
from benchmarks.findings import FINDINGS, findings, tally
from benchmarks.fronts import Fronts
from benchmarks.tables import fill
from odeformer.plots import pareto_front
from solvers import SOLVERS

DRAWN = ("accuracy_vs_nfe", "speed", "work_precision")
TRAINED = ("accuracy_vs_nfe", "images", "iso_nfe", "language", "translation", "truncation")


def test_benchmarks_list_and_every_listed_one_has_what_the_runner_needs(capsys):
    assert benchmarks(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(runner.BENCHMARKS)
    for name in runner.BENCHMARKS:
        module = runner.find(name)
        assert {"quick", "cpu"} <= module.PRESETS.keys()
        assert list(module.cases(module.PRESETS["quick"], 1))
        for attribute in ("measure", "summary", "draw", "COLUMNS", "SIZE", "WORKERS"):
            assert hasattr(module, attribute), (name, attribute)


def test_committed_results_can_be_read_tabled_and_drawn():
    for name in runner.BENCHMARKS:
        path = store.RESULTS / f"{name}.jsonl"
        rows, module, figure = store.read_rows(path), runner.find(name), Figure()
        assert list(module.summary(rows))
        module.draw(rows, figure)
        figure.draw_without_rendering()  # all its words, too
        assert all({"command", "torch", "machine", "revision", "python", "date"} <= row["run"].keys() for row in rows)


def test_a_stopped_benchmark_keeps_its_rows_and_resumes(tmp_path, monkeypatch, capsys):
    calls = []

    class Module:
        PRESETS = MappingProxyType({"quick": {"seeds": 1}})
        COLUMNS = ("case", "value")
        SIZE = (4, 3)
        WORKERS = 1

        @staticmethod
        def cases(settings, seeds):
            return [{"n": n} for n in range(4)]

        @staticmethod
        def measure(case):
            if case["n"] == 2 and len(calls) < 3:
                calls.append("stop")
                raise KeyboardInterrupt
            calls.append(case["n"])
            return [{"value": case["n"] ** 2}]

        @staticmethod
        def summary(rows):
            return [(row["case"]["n"], row["value"]) for row in rows]

        @staticmethod
        def draw(rows, figure):
            figure.subplots().plot([row["value"] for row in rows])

    monkeypatch.setattr(store, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "find", lambda name: Module)
    assert benchmarks(["run", "toy"]) == 130
    assert "--resume" in capsys.readouterr().err
    assert [row["value"] for row in store.read_rows(tmp_path / "toy.part.jsonl")] == [0, 1]
    assert not (tmp_path / "toy.jsonl").exists()
    assert benchmarks(["run", "toy", "--resume"]) == 0
    assert calls == [0, 1, "stop", 2, 3]
    assert [row["value"] for row in store.read_rows(tmp_path / "toy.jsonl")] == [0, 1, 4, 9]
    assert "| 3    | 9     |" in capsys.readouterr().out
    assert (tmp_path / "toy.png").stat().st_size > 1000
    assert not (tmp_path / "toy.part.jsonl").exists()
    del calls[:]
    assert benchmarks(["run", "toy"]) == 130  # a run that is stopped leaves what an earlier one found
    assert [row["value"] for row in store.read_rows(tmp_path / "toy.jsonl")] == [0, 1, 4, 9]


def test_the_tables_in_the_readme_are_those_of_the_committed_results():
    text = (store.RESULTS.parent.parent / "README.md").read_text(encoding="utf-8")
    assert "<!-- results: accuracy_vs_nfe -->" in text
    assert fill(text) == text
    assert fill(text.replace("| euler", "| eular")) == text


def test_the_readme_names_every_solver():
    text = (store.RESULTS.parent.parent / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\w+", text))
    for first, last, tail in re.findall(r"`([a-z]+\d)(?:_pec)?` \.\.\. `[a-z]+(\d)(_pec)?`", text):
        names |= {f"{first[:-1]}{i}{tail}" for i in range(int(first[-1]), int(last) + 1)}
    assert set(SOLVERS) <= names, set(SOLVERS) - names


@pytest.mark.parametrize("table", ["ATTENTION", "NORMS", "FEEDFORWARD", "POSITIONS", "INITIALIZERS", "WEIGHTS",
                                   "COUPLINGS", "FUSIONS", "HEADS", "CACHES", "DATA"])
def test_the_readme_names_every_entry_of_a_table(table):
    text = (store.RESULTS.parent.parent / "README.md").read_text(encoding="utf-8")
    missing = set(getattr(odeformer, table)) - set(re.findall(r"\w+", text))
    assert not missing


def test_every_row_stands_alone_with_what_made_it(tmp_path):
    rows = [{"case": {"preset": "quick", "seed": 0}, "accuracy": 0.5, "run": store.environment()}]
    store.write_rows(tmp_path / "x.jsonl", rows * 2)
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows * 2
    assert {"torch", "torchdiffeq", "python", "machine", "revision", "date"} <= json.loads(lines[0])["run"].keys()
    (tmp_path / "x.jsonl").write_text(lines[0] + "\n" + lines[1][:20])
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        store.read_rows(tmp_path / "x.jsonl")


@pytest.mark.parametrize("name", TRAINED)
def test_rows_of_trained_models_hold_every_factor(name):
    rows = store.read_rows(store.path_of(name))
    assert any(runner.find(name).FRONTS.score in row for row in rows)
    for row in rows:
        factors = {"task", "model", "solver", "n_steps", "weights", "gradient", "nfe", "nfe_backward", "parameters",
                   "multiply_adds", "seconds", "memory"}
        assert factors <= row.keys(), factors - row.keys()
        assert "seed" in row["case"]


def test_wrong_names_come_out_as_one_line(capsys):
    assert benchmarks(["run", "accuracy"]) == 2
    assert "accuracy_vs_nfe" in capsys.readouterr().err
    assert benchmarks(["run", "speed", "--preset", "fast"]) == 2
    assert "quick" in capsys.readouterr().err
    assert benchmarks(["run", "speed", "--seeds", "0"]) == 2
    assert "--seeds must be at least 1" in capsys.readouterr().err


def test_a_report_without_results_says_how_to_make_some(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    assert benchmarks(["report", "--out", str(tmp_path / "r.html")]) == 2
    assert "python -m benchmarks run NAME" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report with the figures of DRAWN, and empty ones of the same size for the other studies."""
    path, drawn = tmp_path_factory.mktemp("report") / "report.html", runner.figure_of

    def figure_of(name):
        return drawn(name) if name in DRAWN else Figure(figsize=runner.find(name).SIZE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "figure_of", figure_of)
        assert benchmarks(["report", "--out", str(path)]) == 0
    return path


@pytest.mark.slow
def test_the_report_shows_every_study_with_its_command_and_loads_nothing(report):
    text = report.read_text(encoding="utf-8")
    page = Reader(text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert not page.loads()
    assert sum(name == "svg" for name, _ in page.elements) >= len(runner.BENCHMARKS)
    for name in runner.BENCHMARKS:
        assert name in ids
        assert store.read_rows(store.path_of(name))[0]["run"]["command"] in page.text


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_is_as_wide_as_a_phone_and_its_tables_sort_in_a_real_browser(report, width, tmp_path):
    found = answer(report, """
      var table = document.querySelector("h2#accuracy_vs_nfe ~ .scroll table");
      var names = Array.from(table.tHead.rows[0].cells).map(function(c){return c.textContent});
      var at = names.findIndex(function(n){return n.indexOf("accuracy") === 0});
      table.tHead.rows[0].cells[at].querySelector("button").click();
      return {sorted: Array.from(table.tBodies[0].rows).map(function(r){return parseFloat(r.cells[at].textContent)}),
              page: document.documentElement.scrollWidth, window: window.innerWidth};""", tmp_path, width=width)
    assert found["sorted"] == sorted(found["sorted"])
    assert len(found["sorted"]) > 10
    assert found["page"] <= found["window"] == width


def test_fronts_put_a_point_a_configuration_and_mark_what_nothing_dominates():
    rows = [{"case": {"seed": seed, "solver": solver, "n": n}, "nfe": n, "seconds": 0.1 * n, "parameters": 7,
             "score": gain * n + seed} for solver, gain in (("euler", 1.0), ("rk4", 2.0)) for n in (1, 2)
            for seed in (0, 1)]
    (title, figure), = Fronts(score="score", label="accuracy", higher=True).figures(rows)
    assert title == "accuracy against cost"
    points = Fronts(score="score", label="accuracy", higher=True)._points(rows, "nfe")
    assert points == {"euler": ([1, 2], [1.5, 2.5]), "rk4": ([1, 2], [2.5, 4.5])}
    swapped = [{"case": {"seed": seed}, "solver": "rk4", "steps": n, "nfe": 4 * n, "score": n + seed} for n in (1, 2)
               for seed in (0, 1)]  # rows of one case
    swaps = Fronts(score="score", label="accuracy", higher=True)._points(swapped, "nfe")
    assert swaps == {"rk4": ([4, 8], [1.5, 2.5])}
    assert list(pareto_front([1, 2, 1, 2], [1.5, 2.5, 2.5, 4.5])) == [False, False, True, True]
    assert [axes.get_xlabel() for axes in figure.axes] == ["NFE of a forward pass", "CPU time of an update (s)",
                                                           "parameters"]


def test_findings_are_at_most_25_lines_one_for_each_study_that_has_something_to_say():
    lines = findings().splitlines()
    assert set(FINDINGS) <= set(runner.BENCHMARKS)
    assert len(lines) == len(FINDINGS) <= 25
    assert all(re.match(r"\* \*\*\w+\*\*: \S", line) for line in lines)


def test_findings_of_results_that_hold_too_little_say_so(tmp_path, monkeypatch):
    rows = [row for row in store.read_rows(store.path_of("depth_weights")) if row["case"]["weights"] != "piecewise"]
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    store.write_rows(tmp_path / "depth_weights.jsonl", rows)
    preset = rows[0]["run"]["preset"]
    assert findings() == (f"* **depth_weights**: the results of preset {preset} that are there do not hold all that is "
                          "compared here.")


def test_a_tally_counts_verdicts():
    assert tally(["better", "tie", "tie", "worse", "tie"]) == "1 win, 3 ties, 1 loss"
    assert tally([]) == "0 wins, 0 ties, 0 losses"


def test_a_smaller_preset_does_not_replace_the_results_of_a_larger_one(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    assert store.place("toy", "quick") == tmp_path / "toy.jsonl"
    for there, asked, folder in (("quick", "quick", "."), ("quick", "cpu", "."), ("cpu", "quick", "quick"),
                                 ("cpu", "cpu", "."), ("gpu", "cpu", "cpu"), ("mine", "quick", ".")):
        store.write_rows(tmp_path / "toy.jsonl", [{"case": {"preset": there}, "run": {"preset": there}}])
        assert store.place("toy", asked) == tmp_path / folder / "toy.jsonl"
