"""kill -9 at random moments: resuming always works, and the end is that of an undisturbed run, bit for bit."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from training_run import equal, state, to_the_end, trainer

from odeformer.cli import main

KILLS = 20
OPTIONS = {"steps": 300, "checkpoint_every": 4, "validate_every": 6, "patience": 10_000}
ROOT = Path(__file__).parent.parent


@pytest.fixture
def processes(monkeypatch):
    """A context whose processes start at once, from a server that has imported torch; all are gone afterwards."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT)]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training_server"])
    yield context
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    forkserver._forkserver._stop()


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_bit(tmp_path, processes):
    whole = trainer(None, **OPTIONS)
    assert whole.run(progress=False)
    draws, kills, steps = random.Random(0), 0, [0]
    deadline = time.monotonic() + 300
    while not (tmp_path / "end.pt").exists():
        assert time.monotonic() < deadline, f"{kills} kills, steps {steps}"
        child = processes.Process(target=to_the_end, args=(tmp_path,), kwargs=OPTIONS)
        child.start()
        killed = kills < KILLS
        if killed:
            MOMENTS[kills % len(MOMENTS)](tmp_path, child, draws)
            assert child.is_alive()
            child.kill()
            kills += 1
        child.join(120)
        assert child.exitcode == (-signal.SIGKILL if killed else 0)
        steps.append(max(last_step(tmp_path), steps[-1]))
    assert kills == KILLS and len(set(steps)) > 10
    assert equal(torch.load(tmp_path / "end.pt", weights_only=True), state(whole))
    lines = [int(line.split(",")[0]) for line in (tmp_path / "train.csv").read_text().splitlines()[1:]]
    assert lines == list(range(1, OPTIONS["steps"] + 1))
    assert not list(tmp_path.glob(".*"))


def last_step(folder):
    """The step of the newest row, 0 where there is none; the last line may be half written."""
    path = folder / "train.csv"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((int(line.split(",")[0]) for line in lines[1:-1]), default=0)


def until(holds, child):
    """Wait for it, while the child lives, for 20 seconds at most."""
    deadline = time.monotonic() + 20
    while child.is_alive() and time.monotonic() < deadline and not holds():
        time.sleep(0.0005)


def at_any_time(folder, child, draws):
    """Soon, perhaps before anything has begun."""
    child.join(draws.uniform(0, 0.25))


def between_updates(folder, child, draws):
    """After a few further updates."""
    goal = last_step(folder) + draws.randint(2, 9)
    until(lambda: last_step(folder) >= goal, child)
    child.join(draws.uniform(0, 0.02))


def while_saving(folder, child, draws):
    """While a checkpoint is being written."""
    between_updates(folder, child, draws)
    until(lambda: list(folder.glob(".checkpoint.pt.*.part")), child)
    child.join(draws.uniform(0, 0.002))


MOMENTS = (at_any_time, between_updates, while_saving, between_updates, while_saving)


@pytest.mark.slow
def test_the_command_line_survives_a_kill(tmp_path):
    settings = ["train", "--steps", "60", "--d-model", "8", "--heads", "2",
                "--checkpoint-every", "5", "--batch-size", "8", "--dropout", "0.1"]
    command = [sys.executable, "-m", "odeformer.cli", *settings]
    options = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stdout": subprocess.DEVNULL,
               "stderr": subprocess.DEVNULL}
    assert main([*settings, "--out", str(tmp_path / "whole")]) == 0
    with subprocess.Popen([*command, "--out", str(tmp_path / "cut")], **options) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "cut" / "checkpoint.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        process.kill()
    subprocess.run([*command, "--out", str(tmp_path / "cut"), "--resume"], check=True, timeout=120, **options)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert a == b
