"""Models of transformers wrapped as they are."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from tiny_transformers import PAIR, TEXT, call, inputs, make

from odeformer.pretrained import parity_report, wrap

STACKS = {"bert words": "bert.encoder.layer", "roberta": "encoder.layer", "distilbert": "transformer.layer",
          "albert words": "albert.encoder.albert_layer_groups", "albert groups": "encoder.albert_layer_groups",
          "gpt2 words": "transformer.h", "smollm2": "model.layers", "mistral": "layers", "qwen2 words": "model.layers",
          "vit classes": "vit.layers", "dinov2": "encoder.layer"}


@pytest.mark.parametrize("name", STACKS)
def test_a_model_of_transformers_gives_its_own_output_under_euler(name):
    model = make(name)
    tensors, mask = inputs(model)
    named = {} if mask is None else {"attention_mask": mask.long()}
    wrapped = wrap(model)
    assert wrapped.config.stack == STACKS[name]
    with torch.no_grad():
        wanted = call(model, tensors, mask)
        output, solution = wrapped(**{model.main_input_name: tensors[0]}, **named, return_solution=True)
        got = output.last_hidden_state if getattr(output, "logits", None) is None else output.logits
        assert type(output) is type(model(**{model.main_input_name: tensors[0]}, **named))
        n = model.config.num_hidden_layers
        assert (got - wanted).abs().max() < (1e-6 if name in ("smollm2", "mistral", "qwen2 words") else 1e-12)
        assert solution.nfe == n and len(solution.states) == n + 1
        fine = wrapped.with_solver("rk4", steps_per_layer=2)
        other, solution = fine(**{model.main_input_name: tensors[0]}, **named, return_solution=True)
        assert solution.nfe == 8 * n
        finer = wrapped.with_solver("rk4", steps_per_layer=4)(**{model.main_input_name: tensors[0]}, **named)
        assert (other[0] - output[0]).abs().max() > 1e-5 and other[0].isfinite().all() and finer[0].isfinite().all()
    report = parity_report(wrapped, model, tensors[0], mask=mask)
    assert report.first_differing is None and len(report.rows) == n + 2


def test_albert_wrapped_is_one_autonomous_field():
    model = make("albert words")
    tokens = inputs(model)[0][0]
    z, field = wrap(model).begin(input_ids=tokens)
    assert getattr(field, "pieces", None) is None
    assert torch.equal(field(z, torch.tensor(0.0)), field(z, torch.tensor(2.9)))
    z, field = wrap(make("albert groups")).begin(input_ids=tokens)
    assert [piece[:2] for piece in field.pieces] == [(i, i + 1) for i in range(4)]


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["bart words", "marian words", "whisper words"])
def test_either_side_of_an_encoder_decoder(name, side):
    model = make(name)
    tensors, _ = inputs(model)
    with pytest.raises(ValueError, match=r"several stacks of layers: model\.encoder\.layers, model\.decoder\.layers"):
        wrap(model)
    wrapped = wrap(model, stack=f"model.{side}.layers")
    names = dict(zip([model.main_input_name, "decoder_input_ids"], tensors, strict=True))
    with torch.no_grad():
        output, solution = wrapped(**names, return_solution=True)
        assert (output.logits - call(model, tensors)).abs().max() < 1e-12
        assert solution.nfe == (2 if side == "encoder" else 3)
        assert wrapped.with_solver("rk4")(**names).logits.isfinite().all()
    report = parity_report(wrapped, model, *tensors)
    assert report.first_differing is None
    assert [row.name for row in report.rows][:2] == [f"{side}.embedding", f"{side}.layers.0"]


def test_layers_with_a_shared_bias_beside_the_state_as_in_t5():
    model = hf.T5EncoderModel(hf.T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=12, num_layers=3, num_heads=2)).eval()
    tokens = torch.randint(3, 40, (2, 11))
    with torch.no_grad():
        wanted = model(input_ids=tokens)[0]
        output, solution = wrap(model)(input_ids=tokens, return_solution=True)
    assert (output[0] - wanted).abs().max() < 1e-5 and solution.nfe == 3


def test_what_a_solve_would_fill_or_repeat_is_refused():
    model = make("gpt2 words")
    tokens, wrapped = inputs(model)[0][0], wrap(make("gpt2 words"))
    for name in ("output_hidden_states", "output_attentions", "use_cache", "cache", "past_key_values"):
        with pytest.raises(ValueError, match=name):
            wrapped(input_ids=tokens, **{name: True})
    with torch.no_grad():
        hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states
        wrap(model)(input_ids=tokens)
        again = model(input_ids=tokens, output_hidden_states=True).hidden_states
    assert len(hidden) == len(again) == 3 and all(torch.equal(a, b) for a, b in zip(hidden, again, strict=True))


def test_layer_drop_of_the_model_itself_is_noticed():
    model = hf.BartModel(hf.BartConfig(**PAIR, encoder_layerdrop=1.0)).train()
    with pytest.raises(ValueError, match="layer drop of the model itself"):
        wrap(model, stack="encoder.layers")(input_ids=torch.ones(1, 4, dtype=torch.int64))


def test_a_copy_of_a_wrapped_model_is_independent():
    model = hf.BertModel(hf.BertConfig(**TEXT)).eval()
    wrapped = wrap(model, solver="rk4")
    other, tokens = copy.deepcopy(wrapped), torch.ones(1, 4, dtype=torch.int64)
    with torch.no_grad():
        before = wrapped(input_ids=tokens)[0]
        other.layers[0].output.dense.bias[0].add_(1)
        assert torch.equal(wrapped(input_ids=tokens)[0], before)
        assert (other(input_ids=tokens)[0] - before).abs().max() > 1e-3
