"""Training: resumes bit for bit, survives a kill, leaves whole files on Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import odeformer
from odeformer.cli import main
from odeformer.data import DATA
from odeformer.files import write_atomically, write_json
from odeformer.metrics import accuracy
from odeformer.schedules import SCHEDULES
from odeformer.train import TrainConfig

TINY = ["--d-model", "8", "--heads", "2", "--layers", "2", "--batch-size", "16", "--checkpoint-every", "3",
        "--dropout", "0.1", "--solver", "midpoint"]


def train(out, *arguments):
    return main(["train", "--out", str(out), "--steps", "8", *TINY, *arguments])


def weights(folder):
    return odeformer.load(folder).state_dict()


def test_digits_are_the_1797_images_of_scikit_learn_split_without_overlap():
    images = DATA["digits"]()
    assert len(images.train_x) + len(images.test_x) == 1797
    assert images.train_x.shape[1:] == (1, 8, 8) and images.n_classes == 10
    assert images.train_x.min() == -1 and images.train_x.max() == 1
    rows = {tuple(x.flatten().tolist()) for x in images.train_x}
    assert sum(tuple(x.flatten().tolist()) in rows for x in images.test_x) == 0
    assert torch.equal(images.test_x, DATA["digits"]().test_x)


def test_a_run_that_was_cut_off_and_resumed_ends_with_the_same_bits(tmp_path, capsys):
    assert train(tmp_path / "whole") == 0
    assert train(tmp_path / "cut", "--stop-at", "5") == 130
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    assert train(tmp_path / "cut", "--resume") == 0
    assert "resumed at step 3" in capsys.readouterr().out  # the last checkpoint, as after a kill
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    rows = [json.loads((tmp_path / name / "results.json").read_text())["rows"] for name in ("whole", "cut")]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == list(range(1, 9))
    assert all(row["nfe"] == 4 for row in rows[0])


def test_another_seed_gives_other_weights(tmp_path):
    assert train(tmp_path / "a") == 0 and train(tmp_path / "b", "--seed", "1") == 0
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert any(not torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_readable_checkpoint_and_results(number, tmp_path):
    command = [sys.executable, "-m", "odeformer.cli", "train", "--out", str(tmp_path), "--steps", "100000", *TINY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parent.parent)
    deadline = time.monotonic() + 120
    while not (tmp_path / "results.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "go on with --resume" in out
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert state["step"] == len(results["rows"]) >= 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.previous.pt", "checkpoint.pt", "config.toml",
                                                         "results.json", "train.csv"]
    lines = (tmp_path / "train.csv").read_text().splitlines()
    assert lines[0].startswith("step,loss,nfe,") and len(lines) == state["step"] + 1


def test_training_learns(tmp_path, capsys):
    main(["train", "--out", str(tmp_path), "--steps", "60", "--d-model", "16", "--heads", "2", "--layers", "1",
          "--learning-rate", "0.01"])
    images, model = DATA["digits"](), odeformer.load(tmp_path)
    score = accuracy(model, images.test_x, images.test_y)
    assert score > 0.5  # chance is 0.1
    assert f"test accuracy {score:.4f}" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path), "--solvers", "euler", "rk4:2", "dopri5"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[:4]] == ["solver", "euler", "rk4", "dopri5"]
    assert "solver invariance 0." in table[4] and "against dopri5" in table[4]
    assert table[1].split()[3] == f"{score:.4f}" and table[2].split()[1:3] == ["2", "8"]


@pytest.mark.parametrize(("arguments", "words"), [
    (["--data", "digit"], ["unknown data 'digit'", "did you mean 'digits'"]),
    (["--solver", "rk5"], ["unknown solver 'rk5'", "rk4"]),
    (["--heads", "3"], ["d_model", "n_heads"]),
    (["--steps", "0"], ["steps", "at least 1"]),
    (["--learning-rate", "-1"], ["learning_rate"]),
    (["--weights", "cubic"], ["weights", "shared"]),
])
def test_what_the_user_got_wrong_comes_out_as_one_line(arguments, words, tmp_path, capsys):
    assert train(tmp_path, *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert all(word in error for word in words) and len(error.splitlines()) == 1


def test_checkpoints_that_do_not_fit_are_refused_with_what_to_do(tmp_path, capsys):
    train(tmp_path, "--stop-at", "4")
    assert train(tmp_path, "--resume", "--learning-rate", "0.5") == 2
    assert "learning_rate" in capsys.readouterr().err
    for other in (["--solver", "rk4"], ["--coupling", "parallel"], ["--dropout", "0.2"]):  # equal shapes, other runs
        assert train(tmp_path, "--resume", *other) == 2
        error = capsys.readouterr().err
        assert "was written with model." in error
        assert len(error) < 300
    assert train(tmp_path, "--resume", "--d-model", "16") == 2
    assert "was written with model" in capsys.readouterr().err
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    assert train(tmp_path, "--resume") == 2
    assert "move it away" in capsys.readouterr().err
    path.unlink()
    assert train(tmp_path, "--resume") == 0  # nothing to resume: a run from the start


def test_a_diverging_run_stops_with_advice_and_keeps_its_last_checkpoint(tmp_path, capsys):
    assert train(tmp_path, "--learning-rate", "1e30") == 2
    error = capsys.readouterr().err  # the state or the loss, whichever overflows first
    assert "odeformer train: the state has become infinite or NaN at l = 2" in error or "lower the learning" in error
    assert not (tmp_path / "model.safetensors").exists()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"old": 1})

    def fail(beside):
        beside.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_schedules_against_their_formulas():
    assert SCHEDULES["inverse_sqrt"](1, warmup=4, total=0) == 0.25
    assert SCHEDULES["inverse_sqrt"](4, warmup=4, total=0) == 1
    assert SCHEDULES["inverse_sqrt"](16, warmup=4, total=0) == 0.5
    assert SCHEDULES["cosine"](2, warmup=4, total=12) == 0.5
    assert SCHEDULES["cosine"](8, warmup=4, total=12) == pytest.approx(0.5)
    assert SCHEDULES["cosine"](12, warmup=4, total=12) == pytest.approx(0)
    assert SCHEDULES["constant"](9, warmup=4, total=12) == 1
    for schedule in SCHEDULES.values():
        assert all(0 <= schedule(step, warmup=0, total=5) <= 1 for step in range(1, 8))
    with pytest.raises(ValueError, match="unknown schedule"):
        TrainConfig(steps=1, schedule="linear")


def test_a_folder_that_cannot_be_written_is_found_before_the_first_update(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file" / "run") == 2
    error = capsys.readouterr().err
    assert "cannot write into" in error and "Not a directory" in error
