"""Training in two real processes (gloo) against one, and what becomes of the other when one ends."""

import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from parallel_run import (
    ADAPTIVE,
    CASES,
    EXPERTS,
    IMPLICIT,
    STEPS,
    Ragged,
    checks,
    decoder,
    failing,
    finish,
    killed,
    trainer,
    two,
    vision,
)

import odeformer
from odeformer.cli import main
from odeformer.order import BatchOrder
from odeformer.processes import joined, own_device, started
from odeformer.sharded_checkpoint import NEWEST, PREVIOUS

ROOT = Path(__file__).parent.parent
WAYS = ("ddp", "fsdp")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def launch():
    """Runs a function in two processes, for ``seconds`` at most, and gives their exit codes and what they found."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT)]))
    patch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parallel_run"])
    children = []

    def run(work, folder, seconds):
        port, end = free_port(), time.monotonic() + seconds
        pair = [context.Process(target=two, args=(rank, port, work, str(folder))) for rank in range(2)]
        for child in pair:
            child.start()
            children.append(child)
        for child in pair:
            child.join(max(0.1, end - time.monotonic()))
            assert not child.is_alive(), "the processes hang"
        return [child.exitcode for child in pair], [
            torch.load(path) if path.exists() else None for path in (Path(folder) / f"{rank}.pt" for rank in range(2))]

    yield run
    for child in children:
        child.kill()
        child.join()
    forkserver._forkserver._stop()
    patch.undo()


def alone(way, folder):
    """A run of one process that is left at step 2 with a checkpoint."""
    run = trainer(way, settings={"ema": 0.9}, block=EXPERTS if way == "experts" else {}, out=folder)
    run.run(stop_at=2, progress=False)
    run.save()


@pytest.fixture(scope="module")
def pair(launch, tmp_path_factory):
    """What two processes found, and the folder that they left."""
    folder = tmp_path_factory.mktemp("pair")
    for way in (*WAYS, "experts"):
        alone(way, folder / f"one {way}")
    codes, found = launch(checks, folder, 150)
    for one in found:
        assert "error" not in one, one
    assert codes == [0, 0]
    return found, folder


def near(ours, theirs, tolerance=1e-10):
    """Whether two runs gave the same losses, norms, validations and weights."""
    for part in ("rows", "validations"):
        assert len(ours[part]) == len(theirs[part])
        for a, b in zip(ours[part], theirs[part], strict=True):
            assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
    assert ours["model"].keys() == theirs["model"].keys()
    for name, x in theirs["model"].items():
        assert ours["model"][name].shape == x.shape and (ours["model"][name] - x).abs().max() < tolerance, name


@pytest.mark.filterwarnings("ignore:gradient=")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_run_of_one(pair, way, name):
    depth, settings = CASES[name]
    whole = finish(trainer("none", depth, {**settings, "accumulate": 1}))
    for ours in pair[0]:
        near(ours[f"{way}, {name}"], whole)


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_is_the_mean_over_the_tokens_of_all_processes_and_its_norm_is_clipped_once(pair, way):
    """Against AdamW written out (Loshchilov & Hutter 2019, algorithm 2)."""
    model, task = decoder(), Ragged()
    decayed = {name for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name
               and "position" not in name}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for step, row in enumerate(pair[0][0][f"{way}, euler, piecewise"]["rows"], 1):
        tokens, mask = task.batch(BatchOrder(12, 6, 0).rows(step - 1))
        real = mask[:, 1:]
        loss = F.cross_entropy(model(tokens[:, :-1], mask[:, :-1])[real], tokens[:, 1:][real])
        grads = dict(zip(moments, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        norm = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
        assert (row["loss"], row["norm"]) == pytest.approx((loss.item(), norm), rel=1e-10)
        assert row["count"] == real.sum() and norm > 0.05
        with torch.no_grad():
            for name, p in model.named_parameters():
                m, v = moments[name]
                g = grads[name] * 0.05 / (norm + 1e-6)
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.001)
                p.mul_(1 - 0.01 * 0.01 if name in decayed else 1)
                p.sub_(0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
    for name, p in model.named_parameters():
        assert (pair[0][0][f"{way}, euler, piecewise"]["model"][name] - p).abs().max() < 1e-10, name


def test_a_sublayer_is_gathered_alone_only_where_layers_are_blocks_and_none_is_evaluated_again(pair):
    alone = {"euler, piecewise", "midpoint, cycle", "learned"}
    found = pair[0][0]["units"]
    assert {name for name, n in found.items() if n} == alone
    assert found["euler, piecewise"] == 6 and found["midpoint, cycle"] == 4  # two sublayers a block


def test_experts_spread_over_processes_make_the_run_of_one(pair):
    whole = finish(trainer("none", block=EXPERTS))
    for ours in pair[0]:
        near(ours["experts, experts"], whole)


def test_experts_in_each_process_make_the_run_of_one_in_as_many_parts(pair):
    whole = finish(trainer("none", settings={"accumulate": 2}, block=EXPERTS))
    for ours in pair[0]:
        for way in WAYS:
            near(ours[f"{way}, experts"], whole)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_numbers_are_trained_too(pair, way):
    whole = finish(trainer("none", block={"norm": "rezero"}))
    assert any(x.dim() == 0 and x.abs() > 1e-3 for x in whole["model"].values())
    for ours in pair[0]:
        near(ours[f"{way}, rezero"], whole)


@pytest.mark.parametrize("way", WAYS)
def test_processes_whose_solves_take_unequal_numbers_of_steps_do_not_wait_for_each_other_within(pair, way):
    task, parts = vision("none", 4, **ADAPTIVE), BatchOrder(8, 8, 0).rows(0).tensor_split(2)
    first, second = (task.loss(task.task.batch(rows))[1].nfe for rows in parts)
    assert first != second
    a, b = (found[f"{way}, adaptive"] for found in pair[0])
    assert a["rows"] == b["rows"] and a["rows"][0]["nfe"] == (first + second) / 2
    near(a, b, 1e-15)
    whole = finish(vision("none", 4, solver="dopri5", rtol=1e-9, atol=1e-12))
    assert [row["loss"] for row in a["rows"]] == pytest.approx([row["loss"] for row in whole["rows"]], rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_by_the_implicit_function_theorem_are_those_of_one_process(pair, way):
    whole = finish(vision("none", **IMPLICIT))
    for ours in pair[0]:
        near(ours[f"{way}, implicit"] | {"rows": []}, whole | {"rows": []}, 1e-6)  # the iteration's tolerance


def test_gradients_are_exchanged_after_the_last_part_of_a_batch_alone(pair):
    a, b = (found["ddp, held back"] for found in pair[0])
    assert not torch.allclose(a[0], b[0]) and torch.equal(a[1], b[1])
    a, b = (found["fsdp, held back"] for found in pair[0])
    assert a[0] is b[0] is None and torch.equal(a[1], b[1])


@pytest.mark.parametrize("way", [*WAYS, "experts"])
def test_a_run_of_one_process_is_gone_on_with_by_two_and_the_other_way_round(pair, way):
    block = EXPERTS if way == "experts" else {}
    whole = finish(trainer("none", settings={"ema": 0.9}, block=block))
    for ours in pair[0]:
        assert ours[f"{way}, others"]["resumed"] and ours[f"{way}, others"]["step"] == 2
        near(ours[f"{way}, others"], whole)
    run = trainer(way, settings={"ema": 0.9}, block=block, out=pair[1] / f"two {way}")
    assert run.resume() and run.step == 2
    near(finish(run), whole)


@pytest.mark.parametrize("way", WAYS)
def test_layer_drop_and_dropout_differ_between_processes_which_keep_the_same_weights(pair, way):
    a, b = (found[f"{way}, noise"] for found in pair[0])
    assert all(x != y for x, y in zip(a["drawn"], b["drawn"], strict=True))
    assert a["whole"]["rows"] == b["whole"]["rows"] and len(a["whole"]["validations"]) == STEPS
    assert all(torch.equal(x, b["whole"]["model"][name]) for name, x in a["whole"]["model"].items())
    still = finish(trainer("none", settings={"ema": 0.9, "validate_every": 1}))
    assert a["whole"]["rows"][0]["loss"] != pytest.approx(still["rows"][0]["loss"], rel=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_two_that_was_cut_off_and_resumed_ends_with_the_same_bits(pair, way):
    for found in pair[0]:
        noise = found[f"{way}, noise"]
        assert noise["resumed"] and noise["step"] == 2
        assert noise["whole"]["rows"] == noise["cut"]["rows"]
        assert noise["whole"]["validations"] == noise["cut"]["validations"]
        assert all(torch.equal(x, noise["cut"]["model"][name]) for name, x in noise["whole"]["model"].items())


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_to_one_process_stops_both_after_the_same_step_with_a_checkpoint(pair, way):
    assert [found[f"{way}, signal"] for found in pair[0]] == [{"ended": False, "step": 3}] * 2
    run = trainer(way, out=pair[1] / f"signal {way}")
    assert run.resume() and run.step == 3
    near(finish(run), finish(trainer("none")))


@pytest.mark.parametrize("way", WAYS)
def test_the_first_process_alone_writes_logs_and_results(pair, way):
    folder = pair[1] / f"noise {way}"
    assert [line.split(",")[0] for line in (folder / "train.csv").read_text().splitlines()] == [
        "step", *map(str, range(1, STEPS + 1))]
    assert len((folder / "valid.csv").read_text().splitlines()) == STEPS + 1
    assert len(json.loads((folder / "results.json").read_text())["rows"]) == STEPS
    kinds = {"ddp": ["checkpoint.previous.pt", "checkpoint.pt"], "fsdp": [NEWEST, PREVIOUS]}
    assert sorted(path.name for path in folder.iterdir()) == [*kinds[way], "results.json", "train.csv", "valid.csv"]


WORDS = {
    "none": ["parallel = 'none'", "there are 2"],
    "batch_size": ["batch_size", "= 4, got 3"],
    "n_train": ["= 14 examples", "only 12"],
    "no experts": ["feedforward 'experts'"],
    "divided": ["multiple of the number of processes, got 3 and 2"],
    "adjoint": ["parallel = 'experts' cannot be used with gradient 'adjoint'"],
    "idle": ["extra.weight, extra.bias", "requires_grad_(False)"],
    "idle in ddp": ["extra.weight, extra.bias", "requires_grad_(False)"],
}


@pytest.mark.parametrize("name", WORDS)
def test_what_two_processes_cannot_train_is_refused_with_the_reason(pair, name):
    for found in pair[0]:
        assert all(word in found["refused"].get(name, "") for word in WORDS[name]), found["refused"].get(name)


def test_a_process_that_fails_ends_the_other_with_its_error(launch, tmp_path):
    codes, found = launch(failing, tmp_path, 60)
    assert codes == [0, 0]
    assert found[1]["error"].startswith("ValueError: invalid literal")
    assert found[0]["error"].startswith("ConnectionError: process 0 ends: process 1 failed (ValueError: invalid")


def test_a_process_that_is_killed_ends_the_other_which_leaves_a_whole_checkpoint(launch, tmp_path):
    codes, found = launch(killed, tmp_path, 60)
    assert codes == [0, -9] and found[1] is None
    assert "was killed or took too long" in found[0]["error"] and "--resume" in found[0]["error"]
    assert (tmp_path / "0.pt").stat().st_mtime - float((tmp_path / "moment").read_text()) < 15
    run = trainer("ddp", out=tmp_path / "run")
    assert run.resume() and run.step == 2
    near(finish(run), finish(trainer("none")))


def sharded_run(folder):
    run = trainer("fsdp", out=folder)
    run.run(stop_at=STEPS - 1, progress=False)
    run.save()
    return run


@pytest.mark.parametrize("harm", [
    lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.unlink()], ids=["cut short", "missing"])
@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata", "run.pt"])
def test_a_damaged_sharded_checkpoint_is_passed_over_for_the_one_before(pattern, harm, tmp_path):
    sharded_run(tmp_path)
    harm(next((tmp_path / NEWEST).glob(pattern)))
    run = trainer("fsdp", out=tmp_path)
    with pytest.warns(UserWarning, match=r"damaged.*going on from the checkpoint of step 2"):
        assert run.resume()
    near(finish(run), finish(trainer("none")))
    for name in (NEWEST, PREVIOUS):
        harm(next((tmp_path / name).glob(pattern)))
    with pytest.raises(ValueError, match="move it away to start anew"):
        trainer("fsdp", out=tmp_path).resume()


def test_a_sharded_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    run = sharded_run(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", full)
    with pytest.raises(OSError, match=r"No space left on device.*the last checkpoint is whole"):
        run.save()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_checkpoints_of_the_other_kind_are_not_taken_for_none(tmp_path):
    sharded_run(tmp_path / "shards")
    with pytest.raises(ValueError, match="written with parallel = 'fsdp'"):
        trainer("ddp", out=tmp_path / "shards").resume()
    alone("ddp", tmp_path / "file")
    with pytest.raises(ValueError, match="written without shards"):
        trainer("fsdp", out=tmp_path / "file").resume()


def test_a_run_that_others_of_its_kind_wait_for_is_asked_to_join_them(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes.*within odeformer.processes.joined\(\)"):
        trainer("ddp")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"MASTER_ADDR.*start them with torchrun"), joined("cpu"):
        pass
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number"):
        started()
    with pytest.raises(ValueError, match=r"auto, cpu or cuda .* got 'cuda:1'"):
        own_device("cuda:1")
    with pytest.raises(ValueError, match="there is no GPU for the process with LOCAL_RANK 7"):
        monkeypatch.setenv("LOCAL_RANK", "7")
        own_device("cuda")


@pytest.mark.slow
def test_torchrun_trains_with_the_command_of_one_process(tmp_path):
    settings = ["train", "--steps", "6", "--d-model", "8", "--heads", "2", "--batch-size", "8", "--weights",
                "piecewise", "--train.parallel", "fsdp", "--train.ema", "0.9"]
    both = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
                           str(free_port()), "-m", "odeformer.cli", *settings, "--out", str(tmp_path / "two")],
                          cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=120)
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("test accuracy") == 1 and both.stdout.count("model in") == 1
    assert both.stderr.count("| 0/6") == 1  # one progress bar
    assert main([*settings, "--out", str(tmp_path / "one")]) == 0
    a, b = (odeformer.load(tmp_path / name).state_dict() for name in ("one", "two"))
    assert all((a[name] - b[name]).abs().max() < 1e-4 for name in a)  # float32, and Adam divides small by small
    assert (tmp_path / "two" / NEWEST / "run.pt").is_file()
