"""Configs, arguments and results of the wrong kind are refused by name, and early."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from torch import nn

from odeformer import (
    BlockConfig,
    DecoderConfig,
    DepthConfig,
    EmbeddingConfig,
    EncoderConfig,
    Seq2SeqConfig,
    SeriesConfig,
    SpeechConfig,
    TrainConfig,
    VisionConfig,
    lay_out,
)
from odeformer.cli import main
from odeformer.tokenizers import ByteTokenizer, pad_batch
from solvers import SOLVERS, get_solver, odeint, odeint_adjoint, solve
from solvers.adaptive import Adaptive

BLOCK = BlockConfig(8, 2)
TEXT = {"vocab_size": 7, "max_seq_len": 5, "n_layers": 1, "block": BLOCK}
CONFIGS = {
    BlockConfig: {"d_model": 8, "n_heads": 2}, DepthConfig: {}, EmbeddingConfig: {}, EncoderConfig: TEXT,
    DecoderConfig: TEXT, Seq2SeqConfig: TEXT,
    VisionConfig: {"image_size": 8, "patch_size": 4, "channels": 1, "n_classes": 2, "n_layers": 1, "block": BLOCK},
    SeriesConfig: {"n_channels": 2, "n_outputs": 2, "n_layers": 1, "block": BlockConfig(8, 2, position="none")},
    SpeechConfig: {**TEXT, "n_mels": 4, "max_frames": 8},
}
FIELDS = [(kind, f.name, f.type) for kind in CONFIGS for f in fields(kind)]


@pytest.mark.parametrize(("kind", "name", "declared"),
                         [x for x in FIELDS if x[2] == "bool" or x[2].startswith("Mapping[")],
                         ids=lambda x: getattr(x, "__name__", x))
def test_flags_and_options_of_every_config_are_checked_when_it_is_made(kind, name, declared):
    kind(**CONFIGS[kind])
    wrong, words = ((1, "yes", None), "a bool") if declared == "bool" else (("x", [1], 3), "map names to values")
    for value in wrong:
        with pytest.raises(TypeError, match=f"{name} must .*{words}, got"):
            kind(**CONFIGS[kind] | {name: value})


def test_options_of_cross_attention_are_checked_before_there_is_one():
    with pytest.raises(ValueError, match="unknown option 'nonsense' for cross_attention 'local_gaussian'"):
        BlockConfig(8, 2, cross_attention="local_gaussian", cross_attention_options={"nonsense": 3})


@pytest.mark.parametrize("value", [True, -1.0, math.nan, "1e-3"])
@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_tolerances_are_numbers(name, value):
    for call in (lambda **given: DepthConfig(solver="dopri5", **given),
                 lambda **given: solve(lambda z, l: -z, torch.ones(1), solver="dopri5", **given)):
        with pytest.raises(ValueError, match=f"{name} must be a finite number of at least 0, got"):
            call(**{name: value})


def test_a_seed_that_torch_cannot_take_is_refused():
    with pytest.raises(ValueError, match=r"seed must be below 2\*\*63"):
        TrainConfig(steps=1, seed=2**63)


def test_an_increment_of_another_kind_is_told_from_the_state():
    z = (torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError, match=r"z is a tuple of .*, f\(z, l\) is a list of"):
        solve(lambda z, l: [-x for x in z], z, n_steps=1)
    with pytest.raises(ValueError, match=r"f\(z, l\) is a tuple of \[\(1,\), 'NoneType'\]"):
        solve(lambda z, l: (-z[0], None), z, n_steps=1)


def test_lay_out_refuses_a_weight_that_is_computed():
    model = nn.Sequential(nn.Linear(2, 4), nn.utils.parametrizations.weight_norm(nn.Linear(2, 4)))
    with pytest.raises(ValueError, match="that of 1 is computed from others"):
        lay_out(model)
    assert model[0].weight.is_contiguous()


@pytest.mark.parametrize("name", [name for name, solver in SOLVERS.items() if isinstance(solver, Adaptive)])
def test_adaptive_solvers_say_that_functional_transforms_cannot_pass(name):
    one = torch.ones(2, dtype=torch.float64)

    def closed_over(a):
        return solve(lambda z, l: -a * z, one, solver=name).z.sum()

    def of_state(z):
        return solve(lambda z, l: -z, z, solver=name).z

    for call in (lambda: torch.func.grad(closed_over)(one), lambda: torch.func.vmap(of_state)(one.expand(3, 2)),
                 lambda: torch.func.jvp(of_state, (one,), (one,)), lambda: torch.func.jacrev(of_state)(one)):
        with pytest.raises(NotImplementedError, match=r"through adaptive solvers .* torch\.autograd, or per_sample"):
            call()


def test_per_sample_solvers_pass_functional_transforms():
    one = torch.ones(2, 1, dtype=torch.float64)

    def end(z):
        return solve(lambda z, l: -z * z, z, solver=get_solver("dopri5", per_sample=True), rtol=1e-10, atol=1e-12).z

    slope = torch.full_like(one, 0.25)  # of z / (1 + z) at 1
    torch.testing.assert_close(torch.func.grad(lambda z: end(z).sum())(one), slope, rtol=1e-7, atol=0)
    torch.testing.assert_close(torch.func.jvp(end, (one,), (torch.ones_like(one),))[1], slope, rtol=1e-7, atol=0)


@dataclass(frozen=True)
class OwnConfig(BlockConfig):
    """With annotations that are classes, not strings, as this module has no ``from __future__``."""

    extra: int = 0
    flag: bool = False
    more_options: Mapping[str, Any] = field(default_factory=dict)


def test_subclasses_of_configs_from_other_modules_are_checked_alike():
    assert OwnConfig(8, 2, extra=3).extra == 3
    with pytest.raises(TypeError, match="flag must be a bool, got 1"):
        OwnConfig(8, 2, flag=1)
    with pytest.raises(TypeError, match="more_options must map names to values"):
        OwnConfig(8, 2, more_options=[1])


@pytest.mark.parametrize(("flag", "words"), [
    (["--batch-size", "0"], "batch-size must be at least 1, got 0"),
    (["--tokens", "1000"], "n_tokens must be at most max_seq_len = 5")])
def test_estimate_looks_at_the_sizes_before_it_measures_the_machine(flag, words, tmp_path, capsys, monkeypatch):
    import odeformer
    from odeformer.commands import estimate

    odeformer.Decoder(DecoderConfig(**TEXT)).save(tmp_path)
    monkeypatch.setattr(estimate, "machine", lambda path: pytest.fail("measured"))
    assert main(["estimate", str(tmp_path), *flag]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["alf", "revnet", "lie", "dense"])
def test_a_method_without_a_stability_region_says_what_to_ask_about(name):
    from solvers.stability import is_stable

    with pytest.raises(ValueError, match=r"no stability region .* Ask about the method that it is made of"):
        is_stable(get_solver(name), -0.1)


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda f, y, t: odeint_adjoint(f, y, t, adjoint_params=[1.0]), TypeError, "adjoint_params must hold tensors, got"),
    (lambda f, y, t: odeint_adjoint(f, y, [0.0, 1.0]), TypeError, "t must be"),
    (lambda f, y, t: odeint_adjoint(f, y, t[0]), ValueError, "t must have one axis"),
    (lambda f, y, t: odeint(f, y, t, options=[1]), TypeError, "options must map names to values"),
    (lambda f, y, t: ByteTokenizer().decode([1.5]), TypeError, "ids must be ints"),
    (lambda f, y, t: ByteTokenizer().decode(torch.zeros(2, 2, dtype=torch.int64)), TypeError, "ids must be ints"),
    (lambda f, y, t: pad_batch([[1.5]], pad=0), TypeError, "ids must be rows of ints"),
    (lambda f, y, t: pad_batch([[[1]]], pad=0), TypeError, "ids must be rows of ints"),
])
def test_other_arguments_of_the_wrong_kind(call, error, words):
    with pytest.raises(error, match=words):
        call(lambda t, y: -y, torch.ones(1), torch.tensor([0.0, 1.0]))
