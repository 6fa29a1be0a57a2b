"""Settings of a run: TOML files, overrides from the command line, the file that a run leaves."""

import subprocess
import sys
import time
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import odeformer
from odeformer.block import BlockConfig
from odeformer.cli import main
from odeformer.depth import DepthConfig
from odeformer.settings import (
    DEFAULTS,
    RunConfig,
    dotted,
    listed,
    merged,
    nested,
    parsed,
    run_config,
    to_dict,
    to_toml,
)
from odeformer.train_config import TrainConfig

SMALL = {"block": {"d_model": 8, "n_heads": 2, "d_ff": 16}, "model": {"n_layers": 2}, "train": {
    "steps": 4, "batch_size": 16, "checkpoint_every": 3, "warmup": 2}}


def run(out, *arguments, **tables):
    path = Path(f"{out}.toml")
    path.write_text(to_toml(merged(SMALL, tables)), encoding="utf-8")
    return main(["train", "--config", str(path), "--out", str(out), *arguments])


def same(a, b):
    a, b = odeformer.load(a).state_dict(), odeformer.load(b).state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("value", [
    {"a": 1, "b": True, "c": 1e-8, "d": "x"}, {"s": 'say "hi" \\ \n\t\x7f ü 😀'}, {"t": {"u": {"v": [1, [2.5, "w"]]}}},
    {"key with space": 1, "1": {"a.b": {"c": "d"}}}, {"list": [{"a": 1}, {"b": [True]}]}, {"inf": float("inf")},
    {"empty": {}, "text": ""}, {"a": 1, "b": {"c": 2}, "d": {"e": {"f": 3}}},
])
def test_what_is_written_as_toml_is_read_as_the_same(value):
    assert tomllib.loads(to_toml(value)) == value


def test_every_field_of_the_dataclasses_can_be_set_by_its_dotted_name():
    names = {f"{table}.{f.name}" for table, kind in (("block", BlockConfig), ("depth", DepthConfig),
                                                     ("train", TrainConfig)) for f in fields(kind)}
    assert names == {name for name, _ in listed()}
    usual = run_config({})
    for name, default in listed():
        if default:
            assert run_config(nested(name, parsed(default))) == usual, name
        with pytest.raises(ValueError, match="unknown setting"):
            run_config(nested(f"{name}x", 1))
    assert to_dict(run_config(to_dict(usual))) == to_dict(usual)


def test_values_on_the_command_line_are_written_as_in_toml_and_strings_without_quotes():
    rest, settings = dotted(["--out", "x.y", "--train.clip", "0.5", "--depth.solver_options.across-pieces=true",
                             "--block.attention=window", "--train.learning_rate", "1e-3", "--data_options.paths",
                             '["a"]'])
    assert rest == ["--out", "x.y"]
    assert settings == {"train": {"clip": 0.5, "learning_rate": 1e-3}, "block": {"attention": "window"},
                        "depth": {"solver_options": {"across_pieces": True}}, "data_options": {"paths": ["a"]}}
    assert parsed("2020-01-01") == "2020-01-01" and parsed("a b") == "a b" and parsed('"3"') == "3"
    with pytest.raises(ValueError, match=r"--train\.clip needs a value"):
        dotted(["--train.clip"])


@pytest.mark.parametrize(("arguments", "words"), [
    (["--train.learning_rat", "1"], ["train.learning_rat", "did you mean 'learning_rate'"]),
    (["--trian.clip", "1"], ["trian", "did you mean 'train'"]),
    (["--model.patch_sise", "2"], ["model.patch_sise", "'patch_size'"]),
    (["--data_options.n_tset", "2"], ["data_options.n_tset", "'n_test'"]),
    (["--task.vaild", "0.1"], ["task.vaild", "'valid'"]),
    (["--length", "32"], ["model.max_seq_len", "patch_size"]),
    (["--tokenizer", "bytes"], ["tokenizer is for text"]),
    (["--train.clip", "much"], ["train.clip must be a number", "'much'"]),
    (["--train.tensorboard", "1"], ["train.tensorboard must be true or false"]),
    (["--block.d_model", "8.5"], ["block.d_model must be a whole number"]),
    (["--depth.solver_options", "x"], ["depth.solver_options must be a table"]),
    (["--depth.layer_drop", "2"], ["layer_drop"]),
    (["--train", "3"], ["did you mean"]),
    (["--data", "text_files"], ["--data_options.paths"]),
    (["--config", "nowhere.toml"], ["no settings file nowhere.toml"]),
    (["--device", "gpu"], ["--device", "'gpu'"]),
])
def test_what_is_unknown_or_does_not_fit_is_named_with_a_guess(arguments, words, tmp_path, capsys):
    try:
        status = main(["train", "--out", str(tmp_path / "out"), *arguments])
    except SystemExit as error:
        status = error.code
    error = capsys.readouterr().err
    assert status == 2 and all(word in error for word in words), error
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_toml_is_named_with_the_place(tmp_path, capsys):
    (tmp_path / "a.toml").write_text("[train]\nsteps = = 3\n")
    assert main(["train", "--out", str(tmp_path), "--config", str(tmp_path / "a.toml")]) == 2
    assert "a.toml is no TOML" in (error := capsys.readouterr().err) and "line 2" in error


def test_the_settings_that_a_run_leaves_give_the_same_run(tmp_path):
    depth = {"solver": "ab2", "solver_options": {"across_pieces": True}, "weights": "piecewise", "layer_drop": 0.2}
    train = {"regularize": {"kinetic_energy": 0.1}, "schedule": "wsd", "schedule_options": {"decay": 0.5}, "ema": 0.9}
    assert run(tmp_path / "a", "--train.accumulate", "2", depth=depth, train=train,
               block={"attention": "window", "attention_options": {"window": 2}, "dropout": 0.1},
               data_options={"n_test": 400}) == 0
    written = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert written["data_options"] == {"n_test": 400} and written["train"]["accumulate"] == 2
    assert written["depth"]["solver_options"] == {"across_pieces": True}
    assert written["block"]["attention_options"] == {"window": 2}
    assert main(["train", "--config", str(tmp_path / "a" / "config.toml"), "--out", str(tmp_path / "b")]) == 0
    assert same(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "config.toml").read_bytes() == (tmp_path / "b" / "config.toml").read_bytes()


def test_resuming_needs_no_settings_again(tmp_path, capsys):
    assert run(tmp_path / "whole") == 0
    assert run(tmp_path / "cut", "--stop-at", "4") == 130
    assert main(["train", "--out", str(tmp_path / "cut"), "--resume"]) == 0
    assert "resumed at step 3" in capsys.readouterr().out and same(tmp_path / "whole", tmp_path / "cut")


def test_short_names_stand_for_dotted_ones(tmp_path):
    assert run(tmp_path / "a", "--learning-rate", "0.01", "--depth-steps", "3", "--solver", "heun2") == 0
    assert run(tmp_path / "b", "--train.learning-rate", "0.01", "--depth.n_steps", "3", "--depth.solver=heun2") == 0
    assert same(tmp_path / "a", tmp_path / "b")


def test_validation_holds_out_a_tenth_of_the_training_images_and_says_so(tmp_path):
    assert run(tmp_path / "a", "--train.validate_every", "2") == 0
    assert tomllib.loads((tmp_path / "a" / "config.toml").read_text())["task"] == {"valid": 0.1}
    lines = (tmp_path / "a" / "valid.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "2", "4"]


def test_text_files_series_and_translations_are_trained_from_the_command_line(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("all work and no play makes Jack a dull boy\n" * 40)
    text = ["--data", "text_files", "--data_options.paths", str(tmp_path / "text"), "--length", "16"]
    assert run(tmp_path / "t", *text) == 0
    assert "bits_per_character" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "t")]) == 0  # on the data that the run's settings name
    assert "bits_per_byte" in capsys.readouterr().out
    for side, word in (("source", "say"), ("target", "sage")):
        (tmp_path / side).write_text("".join(f"{word} {i}\n" for i in range(200)))
    pairs = ["--data", "parallel_files", *(x for side in ("source", "target")
                                           for x in (f"--data_options.{side}", str(tmp_path / side)))]
    assert run(tmp_path / "p", *pairs, "--tokenizer_options.vocab_size", "300", "--model.max_seq_len", "12") == 0
    out = capsys.readouterr().out
    assert "chrf" in out and "bleu_signature nrefs:1|" in out
    series = "@problemName S\n@classLabel true a b\n@data\n1,2,3:a\n1,5:b\n"
    (tmp_path / "s.ts").write_text(series)
    files = [x for side in ("train", "test") for x in (f"--data_options.{side}", str(tmp_path / "s.ts"))]
    assert run(tmp_path / "s", "--data", "series_files", *files) == 0
    assert "test accuracy" in capsys.readouterr().out


def test_parameters_are_listed_with_their_kinds_on_request(capsys):
    assert main(["train", "--list-parameters", "--d-model", "8", "--heads", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["parameter", "shape", "kind", "decayed"]
    assert any(line.split()[0] == "position.table" and line.endswith("no") for line in lines)


def test_help_is_quick_and_lists_every_setting(capsys):
    command = [sys.executable, "-m", "odeformer.cli", "--help"]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True, cwd=Path(__file__).parent.parent)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    page = capsys.readouterr().out
    assert all(f"--{name}" in page for name, _ in listed())


def test_the_defaults_are_fields_of_the_settings():
    assert {f.name for f in fields(RunConfig)} >= set(DEFAULTS)
