"""Matrices laid out column by column: the same model in other strides."""

import copy

import growing
import pytest
import torch
from torch import nn

import odeformer
from odeformer import WEIGHTS, lay_out

MODELS = {
    "encoder": growing.tiny,
    "decoder": growing.decoder,
    "tied decoder": lambda: growing.decoder(model={"tie_embeddings": True}),
    "seq2seq": growing.seq2seq,
    "vision": growing.vision,
}


def columns(model):
    """The weights of linear maps that lie column by column."""
    return {name for name, x in model.named_parameters() if x.dim() == 2 and x.stride() == (1, len(x)) and len(x) > 1}


def widening(model):
    """The names of the linear maps to at least as many features."""
    return {f"{name}.weight" for name, x in model.named_modules()
            if isinstance(x, nn.Linear) and x.weight.shape[0] >= x.weight.shape[1]}


@pytest.mark.parametrize("kind", MODELS)
def test_no_number_changes_only_the_strides_of_what_widens(kind):
    model = MODELS[kind]()
    given, before = growing.inputs(model), {name: x.clone() for name, x in model.state_dict().items()}
    outputs, z = growing.run(model, given)
    assert lay_out(model) is model
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    if kind == "tied decoder":
        assert model.head.weight is model.token_embedding.weight
        assert columns(model) == widening(model) - {"head.weight"} | {"token_embedding.weight"}
    else:
        assert columns(model) == widening(model)
    again, z_again = growing.run(model, given)
    torch.testing.assert_close(again, outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(z_again, z, rtol=1e-12, atol=1e-12)
    lay_out(model, columns=False)
    assert all(x.is_contiguous() for x in model.parameters())
    assert torch.equal(growing.run(model, given)[0], outputs)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_way_to_share_weights_over_depth_gives_the_same(weights):
    model = growing.tiny(weights=weights)
    given = growing.inputs(model)
    outputs, _ = growing.run(model, given)
    torch.testing.assert_close(growing.run(lay_out(model), given)[0], outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["decoder", "tied decoder"])
def test_it_is_written_with_trained_copied_saved_and_loaded_as_before(kind, tmp_path):
    model = MODELS[kind]()
    other = lay_out(copy.deepcopy(model))
    assert columns(copy.deepcopy(other)) == columns(other)
    tokens = torch.randint(growing.VOCAB, (1, 3))
    assert torch.equal(other.generate(tokens, max_new_tokens=6), model.generate(tokens, max_new_tokens=6))
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            each(tokens).square().mean().backward()
            optimizer.step()
    for (name, x), (_, y) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-12, msg=name)
        assert y.grad.shape == x.grad.shape
    other.save(tmp_path)
    loaded = odeformer.load(tmp_path)
    assert all(x.is_contiguous() for x in loaded.parameters())
    assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), other.parameters(), strict=True))
    assert (loaded.head.weight is loaded.token_embedding.weight) == (kind == "tied decoder")


def test_parameters_over_one_memory_still_share_it():
    a, b = nn.Linear(4, 8), nn.Linear(4, 8)
    b.weight = nn.Parameter(a.weight.data)
    lay_out(nn.ModuleList([a, b]))
    assert a.weight.data_ptr() == b.weight.data_ptr()
    assert a.weight.stride() == b.weight.stride() == (1, 8)


def test_what_cannot_be_laid_out_is_refused_and_left_alone():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        lay_out({})
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3, device="meta"))
    with pytest.raises(ValueError, match="on a CPU, got a Tensor on meta"):
        lay_out(model)
    assert model[0].weight.is_contiguous()
    half = nn.Linear(2, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32 or float64, got torch\.bfloat16"):
        lay_out(half)
    assert lay_out(half, columns=False) is half
