"""The commands odeformer and python -m benchmarks."""


import pytest
import torch

import odeformer
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
    with pytest.raises(SystemExit) as caught:
        main(["fly"])
    assert caught.value.code == 2


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


def test_a_report_on_stability_is_written_for_targets_and_for_solvers(tmp_path, capsys):
    for arguments in (["euler", "rk4"], ["--solver", "euler", "rk4"]):
        path = tmp_path / "report.html"
        assert main(["stability", *arguments, "--out", str(path)]) == 0
        text = path.read_text(encoding="utf-8")
        assert text.lstrip().lower().startswith("<!doctype html") and "rk4" in text
        assert str(path) in capsys.readouterr().out
        path.unlink()
    assert main(["stability", "euler", "rk4", "--out", str(tmp_path / "region.svg")]) == 0
    assert (tmp_path / "region.svg").read_bytes().startswith(b"<?xml")


def test_stability_takes_solvers_in_one_place_and_limits_for_a_report_alone(tmp_path, capsys):
    assert main(["stability", "euler", "--solver", "rk4"]) == 2
    assert "not both" in capsys.readouterr().err
    assert main(["stability", "euler", "--samples", "2", "--out", str(tmp_path / "region.png")]) == 2
    assert "--samples" in capsys.readouterr().err
    assert main(["stability", "nothing", "--out", str(tmp_path / "report.html")]) == 2
    assert "'nothing'" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_evaluate_and_generate_run_where_they_are_told_to(tmp_path, capsys, monkeypatch):
    from odeformer import processes
    from odeformer.models.base import DepthModel

    model = odeformer.Decoder(odeformer.DecoderConfig(vocab_size=259, max_seq_len=16, n_layers=1,
                                                      block=odeformer.BlockConfig(8, 2)))
    model.save(tmp_path)
    odeformer.ByteTokenizer().save(tmp_path)
    commands = (["generate", str(tmp_path), "--prompt", "The", "--temperature", "1"],
                ["evaluate", str(tmp_path), "--data", "python_docs", "--samples", "2"])
    for command in commands:
        assert main([*command, "--device", "nowhere"]) == 2
        assert "--device must be one that torch has here, got 'nowhere'" in capsys.readouterr().err
    asked, moved, to = [], [], DepthModel.to
    monkeypatch.setattr(processes, "single_device", lambda name: asked.append(name) or torch.device("cpu"))
    monkeypatch.setattr(DepthModel, "to", lambda self, *place: moved.append(place) or to(self, *place))
    assert main([*commands[0], "--device", "cpu"]) == 0
    assert asked == ["cpu"] and moved == [(torch.device("cpu"),)]
