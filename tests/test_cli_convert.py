"""The command odeformer convert: both ways, parity, and folders that are never half there."""

import json

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from safetensors.torch import load_file, save_file
from tiny_transformers import call, inputs, make

from odeformer import load
from odeformer.cli import main

NAMES = ["bert words", "roberta words", "albert words", "gpt2 words", "smollm2", "vit classes", "dinov2",
         "whisper words", "marian words", "bart words"]


def folder(path, name, dtype=torch.float32):
    """A Hugging Face folder with a tiny model."""
    theirs = make(name, dtype)
    theirs.save_pretrained(path)
    return theirs


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_every_tensor_of_the_file_is_the_same_bit_for_bit(name, tmp_path, capsys):
    theirs = folder(tmp_path / "theirs", name)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "first layer that differs: none" in said and "a model of ours" in said
    tensors, _ = inputs(theirs)
    with torch.no_grad():
        assert (load(tmp_path / "ours")(*tensors) - call(theirs, tensors)).abs().max() < 1e-5
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert "format of Hugging Face" in capsys.readouterr().out
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[key]) and x.dtype == after[key].dtype for key, x in before.items())
    again = getattr(hf, type(theirs).__name__).from_pretrained(tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(call(again.eval(), tensors), call(theirs, tensors))
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours", "back"}


def test_half_precision_goes_there_and_back(tmp_path, capsys):
    folder(tmp_path / "theirs", "llama words", torch.bfloat16)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "back"))
    assert all(x.dtype == torch.bfloat16 and torch.equal(x, after[key]) for key, x in before.items())


def test_the_solver_is_that_of_the_command_line_and_stays_behind_on_the_way_back(tmp_path, capsys):
    theirs = folder(tmp_path / "theirs", "gpt2 words")
    options = ["--solver", "rk4", "--depth.steps_per_layer", "2", "--depth.gradient", "checkpoint"]
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), *options]) == 0
    said = capsys.readouterr().out
    assert "first layer that differs: none" in said  # under Euler, which is what theirs is
    ours = load(tmp_path / "ours")
    assert (ours.config.depth.solver, ours.config.depth.steps_per_layer) == ("rk4", 2)
    assert ours.config.depth.gradient == "checkpoint"
    tokens = inputs(theirs)[0][0]
    with torch.no_grad():
        logits, solution = ours(tokens, return_solution=True)
        assert solution.nfe == 2 * 2 * 4 and (logits - call(theirs, [tokens])).abs().max() > 1e-4
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "back"))
    assert all(torch.equal(x, after[key]) for key, x in before.items())


def test_the_difference_and_the_first_layer_that_differs_are_printed(tmp_path, capsys, monkeypatch):
    """A copy of the original is changed behind the converter's back."""
    from odeformer.pretrained import convert
    from odeformer.pretrained import folder as reading

    assert convert.read_folder is reading.read_folder  # from_huggingface has its own name for it, which stays
    folder(tmp_path / "theirs", "bert words")
    read = reading.read_folder

    def changed(*arguments):
        model, left_out = read(*arguments)
        with torch.no_grad():
            model.bert.encoder.layer[1].output.dense.bias[0] += 0.1
        return model, left_out

    monkeypatch.setattr(reading, "read_folder", changed)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 1
    assert "layers.1" in capsys.readouterr().out


def test_a_folder_that_is_there_is_refused_and_an_empty_one_is_taken(tmp_path, capsys):
    folder(tmp_path / "theirs", "bert")
    out = tmp_path / "ours"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    assert main(["convert", str(tmp_path / "theirs"), str(out)]) == 2
    assert "new or empty" in capsys.readouterr().err and [p.name for p in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    assert main(["convert", str(tmp_path / "theirs"), str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    file = tmp_path / "file"
    file.write_text("")
    assert main(["convert", str(tmp_path / "theirs"), str(file)]) == 2 and file.is_file()


def test_what_fails_leaves_nothing_half_there(tmp_path, capsys):
    theirs = tmp_path / "theirs"
    folder(theirs, "bert words")
    state = load_file(theirs / "model.safetensors")
    lost = "bert.encoder.layer.1.output.dense.bias"
    save_file({k: v for k, v in state.items() if k != lost}, theirs / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "deep" / "ours"
    assert main(["convert", str(theirs), str(out)]) == 2
    assert lost in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []
    assert main(["convert", str(theirs), str(out), "--solver", "rk5"]) == 2
    assert "unknown solver 'rk5'" in capsys.readouterr().err
    assert main(["convert", str(theirs), str(out), "--depth.weights", "shared"]) == 2
    assert "depth.weights" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path, capsys, monkeypatch):
    from odeformer import pretrained

    folder(tmp_path / "theirs", "bert")

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrained, "parity_report", stop)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 130
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_folders_that_are_no_models_are_named(tmp_path, capsys):
    import odeformer

    assert main(["convert", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"something": 1}))
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "model_type" in capsys.readouterr().err
    own = odeformer.Encoder(odeformer.EncoderConfig(vocab_size=9, max_seq_len=4, n_layers=1,
                                                    block=odeformer.BlockConfig(8, 2)))
    own.save(tmp_path / "own")
    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "out")]) == 2
    assert "from_huggingface" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "out"), "--solver", "rk4"]) == 2
    assert "--solver" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
