"""What goes wrong in a run: each is a sentence that says what to do, and nothing is lost."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_run import STEPS, TEXT, equal, state, trainer

from odeformer import checkpoint
from odeformer.cli import main
from odeformer.data import DATA
from odeformer.tasks import Language
from odeformer.train import TrainConfig, Trainer

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = trainer(tmp_path_factory.mktemp("whole"))
    assert run.run(progress=False)
    assert 1 < run.best.step < run.step and run.best.misses  # so that a best model that is forgotten shows
    return run.rows, run.validations, state(run)


def finish(run, undisturbed):
    """Go on to the end; the run is then the undisturbed one."""
    assert run.run(progress=False)
    assert run.rows == undisturbed[0] and run.validations == undisturbed[1]
    assert equal(state(run), undisturbed[2])
    lines = [int(line.split(",")[0]) for line in (run.out / "train.csv").read_text().splitlines()[1:]]
    assert lines == list(range(1, run.step + 1))


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_run_that_is_left_anywhere_goes_on_bit_for_bit(stop, tmp_path, undisturbed):
    assert not trainer(tmp_path).run(stop_at=stop, progress=False)
    torch.manual_seed(99)
    run = trainer(tmp_path)
    kept = max(step for step in (0, 3, 6, 9, 10) if step < stop)  # at 10 the learning rate begins to fall
    assert run.resume() == (kept > 0) and run.step == kept
    finish(run if kept else trainer(tmp_path), undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_under_way_and_saves(number, tmp_path, undisturbed, capfd):
    run = trainer(tmp_path)
    criterion, calls = run.task.criterion, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 9:  # in the first part of step 5
            os.kill(os.getpid(), number)
        return criterion(*arguments)

    run.task.criterion = interrupted
    before = signal.getsignal(number)
    assert not run.run(progress=False) and run.step == 5
    assert signal.getsignal(number) is before
    assert "saving after this step" in capfd.readouterr().err
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 5
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 5
    again = trainer(tmp_path)
    assert again.resume() and again.step == 5
    finish(again, undisturbed)


def test_a_second_ctrl_c_leaves_at_once_and_the_checkpoint_is_whole(tmp_path, undisturbed):
    run = trainer(tmp_path)
    criterion, calls = run.task.criterion, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) in (15, 16):
            os.kill(os.getpid(), signal.SIGINT)
        return criterion(*arguments)

    run.task.criterion = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.run(progress=False)
    again = trainer(tmp_path)
    assert again.resume() and again.step == 6
    finish(again, undisturbed)


# ---- checkpoints that cannot be taken up


@pytest.mark.parametrize("damage", [lambda data: data[:1000], lambda data: data[: len(data) - 40], lambda data: b"",
                                    lambda data: b"nonsense" * 100])
def test_a_damaged_checkpoint_is_passed_over_where_the_one_before_is_whole(damage, tmp_path, undisturbed):
    trainer(tmp_path).run(stop_at=8, progress=False)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(damage(path.read_bytes()))
    run = trainer(tmp_path)
    with pytest.warns(UserWarning, match=r"checkpoint\.pt is damaged .*going on from the checkpoint of step 3"):
        assert run.resume()
    finish(run, undisturbed)


def test_between_the_two_renames_of_a_save_the_previous_checkpoint_is_found(tmp_path, undisturbed):
    trainer(tmp_path).run(stop_at=8, progress=False)
    os.replace(tmp_path / "checkpoint.pt", tmp_path / "checkpoint.previous.pt")
    run = trainer(tmp_path)
    assert run.resume() and run.step == 6
    finish(run, undisturbed)


def test_where_all_checkpoints_are_damaged_the_sentence_says_what_to_do(tmp_path):
    trainer(tmp_path).run(stop_at=8, progress=False)
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged .*; move it away to start anew$"):
        trainer(tmp_path).resume()
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"PK"


def test_a_checkpoint_of_another_version_is_named(tmp_path):
    torch.save({"step": 3}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="of this version: it lacks config, model, optimizer"):
        trainer(tmp_path).resume()


@pytest.mark.parametrize(("options", "words"), [
    ({"learning_rate": 0.5}, "learning_rate = 0.05, this run has 0.5"), ({"accumulate": 4}, "accumulate = 2"),
    ({"ema": None}, "ema = 0.9"), ({"schedule_options": {"decay": 0.5}}, "schedule_options.decay = None"),
    ({"seed": 1}, "seed = 0"), ({"batch_size": 5}, "batch_size = 4"),
])
def test_a_checkpoint_of_another_configuration_is_refused_and_left_alone(options, words, tmp_path):
    trainer(tmp_path).run(stop_at=8, progress=False)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match=f"was written with {words}.*use the same setting or another out folder"):
        trainer(tmp_path, **options).resume()
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_other_options_of_the_data_are_another_configuration(tmp_path, capsys):
    command = ["train", "--out", str(tmp_path), "--steps", "6", "--d-model", "8", "--heads", "2",
               "--checkpoint-every", "2"]
    assert main([*command, "--stop-at", "3"]) == 130
    assert main([*command, "--resume", "--data_options.n_test", "100"]) == 2
    assert "was written with n_train = 1437, this run has 1697" in capsys.readouterr().err


def test_without_a_folder_there_is_nothing_to_resume(tmp_path):
    assert not trainer(tmp_path).resume()
    with pytest.raises(ValueError, match="out must name a folder"):
        trainer(None).resume()


# ---- longer runs


def test_a_finished_run_is_lengthened_where_the_schedule_has_no_end(tmp_path):
    for schedule in ("constant", "inverse_sqrt"):
        whole = trainer(None, steps=9, schedule=schedule)
        assert whole.run(progress=False)
        assert trainer(tmp_path / schedule, steps=6, schedule=schedule).run(progress=False)
        longer = trainer(tmp_path / schedule, steps=9, schedule=schedule)
        assert longer.resume() and longer.step == 6 and longer.run(progress=False)
        # all but the validation at step 6, which a run of 6 steps and one of 9 both have
        assert longer.rows == whole.rows and equal(state(longer), state(whole))


def test_a_wsd_run_is_lengthened_from_before_its_fall(tmp_path):
    options = {"schedule_options": {"decay": 0.5}}
    whole = trainer(None, steps=20, **options)
    assert whole.run(progress=False)
    assert trainer(tmp_path, steps=10, **options).run(progress=False)
    longer = trainer(tmp_path, steps=20, **options)
    with pytest.warns(UserWarning, match="going on from the checkpoint of step 5"):
        assert longer.resume()
    assert longer.run(progress=False)
    assert longer.rows == whole.rows and equal(state(longer), state(whole))


def test_a_cosine_run_is_not_made_longer_and_no_run_shorter(tmp_path):
    assert trainer(tmp_path, schedule="cosine").run(progress=False)
    with pytest.raises(ValueError, match=r"steps = 12, where schedule 'cosine'.*keep steps, or start anew"):
        trainer(tmp_path, schedule="cosine", steps=20).resume()
    with pytest.raises(ValueError, match="has done 12 steps, more than steps = 5"):
        trainer(tmp_path, schedule="cosine", steps=5).resume()
    again = trainer(tmp_path, schedule="cosine")
    assert again.resume() and again.run(progress=False)  # nothing is left to do


# ---- disks


def test_a_disk_that_fills_up_costs_no_checkpoint(tmp_path, undisturbed, monkeypatch):
    run = trainer(tmp_path)
    save, calls = torch.save, []

    def full(value, file):
        calls.append(1)
        if len(calls) == 3:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(value, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left on device.*make room.*--resume: the last checkpoint is whole"):
        run.run(progress=False)
    assert not list(tmp_path.glob(".*.part"))
    again = trainer(tmp_path)
    assert again.resume() and again.step == 6
    finish(again, undisturbed)


def test_a_file_size_limit_comes_out_as_one_line_and_the_run_goes_on_after_it(tmp_path):
    command = ["train", "--steps", "8", "--d-model", "8", "--heads", "2", "--checkpoint-every", "3",
               "--batch-size", "8"]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    assert main([*command, "--out", str(tmp_path / "cut"), "--stop-at", "5"]) == 130
    limited = subprocess.run(
        [sys.executable, "-m", "odeformer.cli", *command, "--out", str(tmp_path / "cut"), "--resume"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)))
    error = limited.stderr.strip().splitlines()[-1]
    assert limited.returncode == 2 and "File too large" in error and "--resume" in error, limited.stderr
    assert main([*command, "--out", str(tmp_path / "cut"), "--resume"]) == 0
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert a == b


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    (tmp_path / ".checkpoint.pt.123.part").write_bytes(b"half")
    trainer(tmp_path)
    assert not list(tmp_path.glob(".*"))


# ---- losses


class Diverging(Language):
    """Its loss is multiplied by ``factor`` from the fifth batch on."""

    factor, n = 1.0, 0

    def criterion(self, outputs, batch):
        self.n += 1
        return super().criterion(outputs, batch) * (self.factor if self.n > 4 else 1.0)


@pytest.mark.parametrize(("factor", "words"), [(float("nan"), "the loss became nan at step 5"),
                                               (float("inf"), "the loss became inf at step 5")])
def test_a_loss_that_is_not_finite_updates_nothing_and_keeps_the_checkpoint(factor, words, tmp_path):
    run = trainer(None)
    task = Diverging("noise", TEXT, TEXT[:50], length=10)
    task.factor = factor
    run = Trainer(run.model, task, TrainConfig(steps=9, batch_size=4, checkpoint_every=2), tmp_path)
    with pytest.raises(FloatingPointError, match=f"{words}: lower the learning rate.*the checkpoint of step 4 is kept"):
        run.run(progress=False)
    assert run.step == 4 and all(p.isfinite().all() for p in run.model.parameters())
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 4


def test_a_gradient_that_is_not_finite_updates_nothing_though_the_loss_is():
    class Steep(Language):
        def criterion(self, outputs, batch):
            return (outputs.sum() * 0).sqrt() + super().criterion(outputs, batch)  # the slope of sqrt at 0 is infinite

    run = trainer(None)
    before = [p.detach().clone() for p in run.model.parameters()]
    run = Trainer(run.model, Steep("noise", TEXT, TEXT[:50], length=10), TrainConfig(steps=9, batch_size=4))
    with pytest.raises(FloatingPointError, match="gradient's norm became nan at step 1"):
        run.run(progress=False)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))


# ---- data


def command(tmp_path, *arguments):
    return main(["train", "--out", str(tmp_path / "out"), "--steps", "1", *arguments])


@pytest.mark.parametrize(("content", "words"), [
    (b"", ["a.txt is empty", "give"]), (b"caf\xe9 au lait", ["a.txt is not UTF-8", "0xe9", "offset 3", "iconv"]),
    (b"short", ["too few for"]),
])
def test_text_that_cannot_be_read_is_named_with_what_to_do(content, words, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(content)
    assert command(tmp_path, "--data", "text_files", "--data_options.paths", str(tmp_path / "a.txt")) == 2
    error = capsys.readouterr().err.strip()
    assert all(word in error for word in words) and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("data", "package", "words"), [
    ("digits", "sklearn.datasets", "pip install 'odeformer-depth[data]'"),
    ("huggingface", "datasets", "pip install datasets"),
])
def test_a_missing_package_is_named_with_the_command_that_installs_it(data, package, words, tmp_path, capsys,
                                                                      monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    options = {"huggingface": ["--data_options.name", "x/y"]}.get(data, [])
    assert data in DATA and command(tmp_path, "--data", data, *options) == 2
    assert words in capsys.readouterr().err


def test_tensorboard_is_written_where_asked_for_and_its_absence_is_a_sentence(tmp_path, monkeypatch):
    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def close(self):
            written.append("closed")

    written = []
    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    trainer(tmp_path / "a", tensorboard=True).run(stop_at=2, progress=False)
    assert written[0] == (str(tmp_path / "a" / "tensorboard"), 1) and written[-1] == "closed"
    assert {("train/loss", 1), ("train/nfe", 2), ("valid/bits_per_byte", 2)} <= set(written[1:-1])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'odeformer-depth\[log\]'"):
        trainer(tmp_path / "b", tensorboard=True).run(progress=False)


def test_minutes_bring_checkpoints_as_well(tmp_path, monkeypatch):
    clock = iter(range(0, 100_000, 40))  # 40 seconds a look
    monkeypatch.setattr("odeformer.train.time.monotonic", lambda: next(clock))
    steps = []
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda folder, state, **options: (
        steps.append(state["step"]), write(folder, state, **options)))
    trainer(tmp_path, checkpoint_every=100, checkpoint_minutes=2.0, schedule="constant").run(progress=False)
    assert len(steps) >= 3 and steps[-1] == STEPS and steps[0] < 6
