"""The commands odeformer and python -m benchmarks."""

import json
import re
from types import MappingProxyType

import pytest

import odeformer
from benchmarks import runner
from benchmarks.__main__ import main as benchmarks
from odeformer.cli import main
from odeformer.recipes import task_of
from solvers import SOLVERS


def test_solvers_lists_every_solver(capsys):
    assert main(["solvers"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == list(SOLVERS)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_stability_goes_from_numbers_to_a_picture_on_disk(suffix, tmp_path, capsys):
    path = tmp_path / f"region.{suffix}"
    assert main(["stability", "--solver", "rk4", "ab2", "--out", str(path)]) == 0
    head = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(head)
    assert str(path) in capsys.readouterr().out


def test_wrong_names_come_out_as_one_line(tmp_path, capsys):
    assert main(["stability", "--solver", "rk5", "--out", str(tmp_path / "x.png")]) == 2
    assert "unknown solver 'rk5'" in capsys.readouterr().err
    assert main(["stability", "--out", str(tmp_path / "x.bmpp")]) == 2
    assert "bmpp" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    assert benchmarks(["run", "accuracy"]) == 2
    assert "accuracy_vs_nfe" in capsys.readouterr().err
    assert benchmarks(["run", "overhead", "--preset", "fast"]) == 2
    assert "quick" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["fly"])
    assert caught.value.code == 2


def test_benchmarks_list_and_every_listed_one_has_what_the_runner_needs(capsys):
    assert benchmarks(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(runner.BENCHMARKS)
    for name in runner.BENCHMARKS:
        module = runner.find(name)
        assert {"quick", "cpu"} <= module.PRESETS.keys()
        assert list(module.cases(module.PRESETS["quick"], 1))
        for attribute in ("measure", "summary", "draw", "COLUMNS", "WORKERS"):
            assert hasattr(module, attribute), (name, attribute)


def test_committed_results_can_be_read_tabled_and_drawn():
    from matplotlib.figure import Figure

    for name in runner.BENCHMARKS:
        path = runner.RESULTS / f"{name}.json"
        rows, module = runner.read_rows(path), runner.find(name)
        assert len(list(module.summary(rows))) > 3
        module.draw(rows, Figure())
        meta = json.loads(path.read_text())["meta"]
        assert {"command", "torch", "machine", "revision"} <= meta.keys()


def test_a_stopped_benchmark_keeps_its_rows_and_resumes(tmp_path, monkeypatch, capsys):
    calls = []

    class Module:
        PRESETS = MappingProxyType({"quick": {"seeds": 1}})
        COLUMNS = ("case", "value")
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

    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "find", lambda name: Module)
    assert benchmarks(["run", "toy"]) == 130
    assert "--resume" in capsys.readouterr().err
    assert [row["value"] for row in runner.read_rows(tmp_path / "toy.json")] == [0, 1]
    assert benchmarks(["run", "toy", "--resume"]) == 0
    assert calls == [0, 1, "stop", 2, 3]
    assert [row["value"] for row in runner.read_rows(tmp_path / "toy.json")] == [0, 1, 4, 9]
    assert "| 3    | 9     |" in capsys.readouterr().out
    assert (tmp_path / "toy.png").stat().st_size > 1000


def test_the_tables_in_the_readme_are_those_of_the_committed_results():
    text = (runner.RESULTS.parent.parent / "README.md").read_text(encoding="utf-8")
    assert "<!-- results: accuracy_vs_nfe -->" in text
    assert runner.fill(text) == text
    assert runner.fill(text.replace("| euler", "| eular")) == text


def test_the_readme_names_every_solver():
    text = (runner.RESULTS.parent.parent / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\w+", text))
    for first, last, tail in re.findall(r"`([a-z]+\d)(?:_pec)?` \.\.\. `[a-z]+(\d)(_pec)?`", text):
        names |= {f"{first[:-1]}{i}{tail}" for i in range(int(first[-1]), int(last) + 1)}
    assert set(SOLVERS) <= names, set(SOLVERS) - names


@pytest.mark.parametrize("table", ["ATTENTION", "NORMS", "FEEDFORWARD", "POSITIONS", "INITIALIZERS", "WEIGHTS",
                                   "COUPLINGS", "FUSIONS", "HEADS", "CACHES", "DATA"])
def test_the_readme_names_every_entry_of_a_table(table):
    text = (runner.RESULTS.parent.parent / "README.md").read_text(encoding="utf-8")
    missing = set(getattr(odeformer, table)) - set(re.findall(r"\w+", text))
    assert not missing


def test_a_language_model_is_trained_evaluated_and_writes(tmp_path, capsys):
    """On the standard library's own documentation: nothing is downloaded."""
    run = ["train", "--data", "python_docs", "--out", str(tmp_path), "--steps", "2", "--weights", "piecewise",
           "--layers", "1", "--length", "16", "--batch-size", "2", "--d-model", "8", "--heads", "2"]
    assert main(run) == 0
    assert "test bits_per_byte" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path), "--data", "python_docs", "--solvers", "euler", "rk4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["solver", "steps", "NFE", "bits_per_byte", "bits_per_character", "perplexity",
                                "distance", "agreement"]
    assert [line.split()[2] for line in lines[1:3]] == ["1", "4"]
    assert lines[2].split()[6:] == ["0.0000", "1.0000"] and lines[3].startswith("solver invariance 0.")
    write = ["generate", str(tmp_path), "--prompt", "The", "--max-new-tokens", "5"]
    texts = []
    drawn = ["--temperature", "1", "--seed", "1"]
    for more in ([], ["--cache", "first_stage"], drawn, drawn):
        assert main([*write, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("The") for text in texts)
    assert texts[0] == texts[1]  # under euler both policies are exact
    assert texts[2] == texts[3]
    assert main(["generate", str(tmp_path), "--prompt", ""]) == 2
    assert main(["evaluate", str(tmp_path), "--data", "digits"]) == 2
    assert "does not go with" in capsys.readouterr().err


def test_data_without_a_recipe_are_refused_with_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(odeformer.DATA, "toy", lambda: None)
    assert main(["train", "--data", "toy", "--out", str(tmp_path)]) == 2
    assert "one of Images, Text, Pairs, Series" in capsys.readouterr().err


def test_a_run_in_the_folder_of_another_moves_that_aside_and_takes_nothing_of_it(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 60)
    common = ["train", "--data", "text_files", f"--data_options.paths={tmp_path / 'a.txt'}", "--length", "8",
              "--d-model", "8",
              "--heads", "2", "--layers", "1", "--batch-size", "4", "--out", str(tmp_path / "run")]
    assert main([*common, "--steps", "2"]) == 0
    first = (tmp_path / "run" / "config.toml").read_bytes()
    assert main([*common, "--steps", "3", "--seed", "5", "--stop-at", "1"]) == 130
    assert "from the start" in capsys.readouterr().out
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert "model.safetensors" not in left and not any("checkpoint" in name for name in left)
    assert (tmp_path / "run" / "earlier" / "config.toml").read_bytes() == first
    assert (tmp_path / "run" / "earlier" / "model.safetensors").exists()


def test_data_with_other_classes_than_the_model_was_made_for_are_refused():
    config = odeformer.VisionConfig(image_size=8, patch_size=4, channels=1, n_classes=4, n_layers=1,
                                    block=odeformer.BlockConfig(8, 2))
    with pytest.raises(ValueError, match=r"n_classes = 10.*made for 4"):
        task_of(odeformer.VisionEncoder(config), odeformer.DATA["digits"](), None)

