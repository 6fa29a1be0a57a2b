"""Models of transformers as ours: outputs, round trips, files, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from safetensors.torch import load_file, save_file
from tiny_transformers import CASES, GPT, LABELS, LLAMA, LLAMA3, PAIR, TEXT, call, inputs, make

from odeformer import load, prune
from odeformer.pretrained import FAMILIES, from_huggingface, parity_report, to_huggingface
from solvers import SOLVERS

ONE_EACH = ["bert", "roberta words", "distilbert", "albert words", "gpt2 words", "smollm2", "mistral", "qwen2 words",
            "vit", "dinov2", "whisper words", "bart", "marian words", "mbart", "pegasus"]

SINGLE = ("llama", "mistral", "qwen2")  # their RMSNorm computes in float32, whatever the model's dtype


def mask_of(model, mask):
    """The argument that ours has for a mask."""
    return {} if mask is None else {"source_mask" if hasattr(model, "decoder") else "mask": mask}


def real(x, mask):
    """Of a tensor (batch, tokens, ...) what stands at real tokens."""
    return x[mask] if mask is not None and x.shape[:2] == mask.shape else x


def test_every_class_that_is_read_is_tested():
    tested = {(CASES[name][0]) for name in CASES}
    assert tested == {name for family in FAMILIES.values() for name in family.architectures}
    assert {make(name, torch.float32).config.model_type for name in ONE_EACH} == {*FAMILIES}


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_original_under_euler_with_and_without_padding(name):
    theirs = make(name)
    ours = from_huggingface(theirs)
    tensors, mask = inputs(theirs)
    with torch.no_grad():
        for hidden in (None, mask) if mask is not None else (None,):
            wanted = call(theirs, tensors, hidden)
            got = ours(*tensors, **mask_of(ours, hidden))
            assert got.shape == wanted.shape
            where = hidden if not theirs.config.is_encoder_decoder else None
            tolerance = 1e-5 if theirs.config.model_type in SINGLE else 1e-12
            assert (real(got, where) - real(wanted, where)).abs().max() < tolerance


@pytest.mark.parametrize("name", ONE_EACH)
def test_in_float32_logits_are_within_1e_5(name):
    theirs = make(name, torch.float32)
    tensors, _ = inputs(theirs)
    with torch.no_grad():
        assert (from_huggingface(theirs)(*tensors) - call(theirs, tensors)).abs().max() < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_every_tensor_is_the_same_bit_for_bit(name):
    theirs = make(name, torch.float32)
    back = to_huggingface(from_huggingface(theirs))
    before, after = theirs.state_dict(), back.state_dict()
    assert type(back) is type(theirs) and before.keys() == after.keys()
    for key, x in before.items():
        assert x.dtype == after[key].dtype and torch.equal(x, after[key]), key
    tensors, _ = inputs(theirs)
    with torch.no_grad():
        assert torch.equal(call(theirs, tensors), call(back, tensors))
    a, b = theirs.config.to_dict(), back.config.to_dict()
    assert {k: v for k, v in a.items() if k != "dtype"} == {k: v for k, v in b.items() if k != "dtype"}


def test_half_precision_and_mixed_dtypes_come_back_as_they_were():
    theirs = make("llama words", torch.bfloat16)
    theirs.model.norm.float()
    after = to_huggingface(from_huggingface(theirs)).state_dict()
    for key, x in theirs.state_dict().items():
        assert x.dtype == after[key].dtype and torch.equal(x, after[key]), key


@pytest.mark.parametrize("name", ONE_EACH)
def test_solvers_solutions_files_and_the_way_back_work_on_what_was_read(name, tmp_path):
    theirs = make(name)
    ours = from_huggingface(theirs)
    tensors, _ = inputs(theirs)
    with torch.no_grad():
        out, solution = ours(*tensors, return_solution=True)
        n = ours.config.n_layers if not hasattr(ours, "decoder") else ours.decoder.config.n_layers
        assert solution.nfe == n and len(solution.states) == n + 1
        fine, finer = ours.with_solver("rk4"), ours.with_solver("rk4", steps_per_layer=2)
        (a, first), b = fine(*tensors, return_solution=True), finer(*tensors)
        assert first.nfe == 4 * n and a.isfinite().all() and b.isfinite().all()
        assert (a - out).abs().max() > 1e-6 and (a - b).abs().max() > 1e-9
        fine.save(tmp_path)
        again = load(tmp_path)
        assert torch.equal(again(*tensors), a)
    for key, x in to_huggingface(again).state_dict().items():
        assert torch.equal(x, theirs.state_dict()[key])


@pytest.mark.parametrize("name", ["bert", "albert words", "dinov2 classes"])
def test_adaptive_and_implicit_solvers_and_other_couplings_run_where_nothing_is_causal(name):
    theirs = make(name)
    tensors, _ = inputs(theirs)
    with torch.no_grad():
        model = from_huggingface(theirs, coupling="parallel", solver="rk4", steps_per_layer=16)
        wanted = model(*tensors)
        for solver, options in (("dopri5", {"rtol": 1e-8, "atol": 1e-8}), ("gauss4", {"steps_per_layer": 8})):
            assert (model.with_solver(solver, **options)(*tensors) - wanted).abs().max() < 1e-3, solver


def test_a_causal_model_refuses_what_would_leak():
    with pytest.raises(ValueError, match="later tokens move earlier outputs"):
        from_huggingface(make("gpt2 words"), solver="dopri5")
    with pytest.raises(ValueError, match="later tokens move earlier outputs"):
        from_huggingface(make("marian words"), solver=SOLVERS["gauss4"])


def test_albert_is_one_layer_an_autonomous_field_of_one_piece():
    ours = from_huggingface(make("albert words"))
    tokens = inputs(make("albert words"))[0][0]
    _, solution = ours(tokens, return_solution=True)
    assert len(ours.layers) == 1 and ours.config.n_layers == 3 and ours.config.depth.weights == "shared"
    z = solution.states[0]
    f = [solution.field(z, torch.tensor(l, dtype=torch.float64)) for l in (0.0, 0.5, 2.9)]
    assert torch.equal(f[0], f[1]) and torch.equal(f[0], f[2])
    assert ours.with_solver("euler", n_steps=7)(tokens, return_solution=True)[1].nfe == 7  # steps across layers


def test_llamas_parts_are_those_of_the_paper():
    ours = from_huggingface(make("smollm2"))
    attention = ours.layers[0].attention
    assert isinstance(attention.placement.norm, torch.nn.RMSNorm) and attention.core.n_kv_heads == 2
    assert ours.head.weight is ours.token_embedding.weight
    assert from_huggingface(make("mistral")).layers[0].attention.core.window == 4
    biased = from_huggingface(make("qwen2")).layers[0].attention.core
    assert [getattr(biased, n).bias is None for n in ("query", "key", "value", "output")] == [False] * 3 + [True]


@pytest.mark.parametrize("name", ["bert words", "albert", "llama 3.1", "vit classes", "marian words"])
def test_gradients_are_those_of_the_original(name):
    theirs = make(name)
    ours = from_huggingface(theirs)
    tensors, _ = inputs(theirs)
    wanted = call(theirs, tensors)
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    (ours(*tensors) * weight).sum().backward()
    with torch.no_grad():
        for p in ours.parameters():
            p.data = torch.zeros_like(p) if p.grad is None else p.grad  # so that the way back carries gradients
    after = dict(to_huggingface(ours).named_parameters())
    for key, p in theirs.named_parameters():
        if p.grad is not None:
            tolerance = 1e-5 if theirs.config.model_type in SINGLE else 1e-9
            assert (after[key] - p.grad).abs().max() < tolerance * max(1, p.grad.abs().max()), key


@pytest.mark.parametrize("scaling", [{"rope_type": "default", "rope_theta": 10000.0}, {**LLAMA3, "rope_theta": 1e4}])
def test_far_from_the_first_token_rotary_angles_are_those_of_the_original(scaling):
    theirs = hf.LlamaModel(hf.LlamaConfig(**{**LLAMA, "max_position_embeddings": 4096, "rope_parameters": scaling}))
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.5)
        tokens = torch.randint(3, 40, (1, 1500))
        assert (from_huggingface(theirs)(tokens) - call(theirs.eval(), [tokens])).abs().max() < 1e-5


def test_token_types_of_a_second_sentence():
    theirs = make("bert words")
    tokens, types = inputs(theirs)[0][0], torch.arange(11).ge(6).long().expand(2, -1)
    ours = from_huggingface(theirs)
    with torch.no_grad():
        wanted = call(theirs, [tokens], token_type_ids=types)
        assert (ours(tokens, token_types=types) - wanted).abs().max() < 1e-12
        assert (ours(tokens) - wanted).abs().max() > 1e-3
    for wrong in (types.int(), types[:, :5], types + 1):
        with pytest.raises(ValueError, match="token_types"):
            ours(tokens, token_types=wrong)
    with pytest.raises(ValueError, match="n_token_types"):
        from_huggingface(make("distilbert"))(tokens, token_types=types)


def test_poolers_are_those_of_the_original():
    for name in ("bert", "albert", "vit"):
        theirs = make(name)
        ours = from_huggingface(theirs)
        tensors, _ = inputs(theirs)
        with torch.no_grad():
            wanted = theirs(**{theirs.main_input_name: tensors[0]}).pooler_output
            assert (ours.pooled(ours(*tensors)) - wanted).abs().max() < 1e-12
    for name in ("bert without pooler", "vit without pooler"):
        with pytest.raises(ValueError, match="no pooler"):
            from_huggingface(make(name)).pooled(torch.zeros(1, 2, 8))


def test_roberta_counts_real_tokens_wherever_the_padding_is():
    theirs = make("roberta")
    ours, pad = from_huggingface(theirs), theirs.config.pad_token_id
    tokens = inputs(theirs)[0][0]
    mask = torch.arange(11) >= torch.tensor([[0], [4]])
    tokens = tokens.masked_fill(~mask, pad)
    with torch.no_grad():
        assert (ours(tokens, mask) - call(theirs, [tokens], mask))[mask].abs().max() < 1e-12


def test_images_of_another_size_and_hidden_patches():
    theirs = make("dinov2", torch.float32)  # theirs interpolates in float32
    ours, images = from_huggingface(theirs), torch.randn(2, 3, 8, 16)
    hidden = torch.rand(2, 8) < 0.5
    with torch.no_grad():
        assert (ours(images) - call(theirs, [images])).abs().max() < 1e-5
        wanted = call(theirs, [images], bool_masked_pos=hidden)
        assert (ours(images, hidden=hidden) - wanted).abs().max() < 1e-5
    with pytest.raises(ValueError, match="mask token"):
        from_huggingface(make("vit", torch.float32))(images, hidden=hidden)


@pytest.mark.parametrize("name", ["gpt2 words", "llama words", "mistral words", "qwen2 words"])
def test_greedy_generation_with_a_cache_is_that_of_the_original(name):
    theirs = make(name)
    prompt = torch.randint(3, 40, (2, 5))
    wanted = theirs.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(from_huggingface(theirs).generate(prompt, max_new_tokens=8), wanted)


@pytest.mark.parametrize("name", ["marian words", "bart words", "whisper words"])
def test_greedy_decoding_is_the_original_applied_again_and_again(name):
    theirs = make(name)
    ours = from_huggingface(theirs)
    source = inputs(theirs)[0][0]
    target = torch.full((2, 1), 5)
    with torch.no_grad():
        for _ in range(6):
            target = torch.cat([target, call(theirs, [source, target])[:, -1:].argmax(-1)], 1)
    assert torch.equal(ours.generate(source, start=5, max_new_tokens=6), target)


def test_models_without_a_head_do_not_generate():
    with pytest.raises(ValueError, match="no head"):
        from_huggingface(make("gpt2")).generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=1)
    with pytest.raises(ValueError, match="no head"):
        from_huggingface(make("bart")).generate(torch.ones(1, 2, dtype=torch.int64), start=1, max_new_tokens=1)


@pytest.mark.parametrize("name", ["bert", "marian words"])
def test_what_was_read_compiles_to_one_graph_and_its_field_has_jacobians(name):
    theirs = make(name)
    model, (tensors, _) = from_huggingface(theirs, solver="midpoint"), inputs(theirs)
    torch.compiler.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(*tensors), model(*tensors))
    part = model if len(tensors) == 1 else model.encoder
    z, l, h = part.embed(tensors[0]).detach(), torch.tensor(0.5, dtype=torch.float64), 1e-6
    f, direction = part.vector_field(z), torch.randn_like(z)
    _, tangent = torch.func.jvp(lambda y: f(y, l), (z,), (direction,))
    secant = (f(z + h * direction, l) - f(z - h * direction, l)) / (2 * h)
    assert (tangent - secant).abs().max() < 1e-6


def test_reading_moves_no_random_state_and_leaves_the_original_alone():
    theirs = make("bert", torch.float32).train()
    before, state = {k: v.clone() for k, v in theirs.state_dict().items()}, torch.get_rng_state()
    ours = from_huggingface(theirs)
    back = to_huggingface(ours)
    assert torch.equal(torch.get_rng_state(), state) and theirs.training and not ours.training and not back.training
    with torch.no_grad():
        for p in (*ours.parameters(), *back.parameters()):
            p.zero_()
    assert all(torch.equal(v, before[k]) for k, v in theirs.state_dict().items())


# parity


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_parity_report_has_a_row_a_layer_and_none_differs(name):
    theirs = make(name)
    tensors, mask = inputs(theirs)
    report = parity_report(from_huggingface(theirs), theirs, *tensors, mask=mask)
    assert report.first_differing is None and report.largest < (1e-5 if theirs.config.model_type in SINGLE else 1e-12)
    names = [row.name for row in report.rows]
    sides = {"encoder.": 2, "decoder.": 3} if len(tensors) > 1 else {"": theirs.config.num_hidden_layers}
    for at, n in sides.items():
        assert [x for x in names if x.startswith(f"{at}layers.")] == [f"{at}layers.{i}" for i in range(n)]
        assert f"{at}embedding" in names
    assert names[-1] == "output" and "first differing: None" in str(report)


CHANGES = [("bert words", "bert.encoder.layer.1.output.dense.bias", "layers.1"),
           ("bert words", "bert.embeddings.LayerNorm.bias", "embedding"),
           ("bert words", "cls.predictions.bias", "output"),
           ("gpt2 words", "transformer.h.1.attn.c_attn.weight", "layers.1"),
           ("llama words", "model.norm.weight", "final_norm"), ("albert", "encoder.albert_layer_groups.0.albert_layers."
                                                                "0.ffn.bias", "layers.0"),
           ("dinov2", "encoder.layer.2.layer_scale2.lambda1", "layers.2"),
           ("whisper words", "model.encoder.layers.1.fc1.bias", "encoder.layers.1"),
           ("marian words", "model.decoder.layers.2.encoder_attn.v_proj.weight", "decoder.layers.2")]


@pytest.mark.parametrize(("name", "key", "where"), CHANGES)
def test_the_first_layer_that_differs_is_named(name, key, where):
    theirs = make(name)
    ours = from_huggingface(theirs)
    with torch.no_grad():
        theirs.get_parameter(key).add_(torch.randn_like(theirs.get_parameter(key)) * 1e-2)
    report = parity_report(ours, theirs, *inputs(theirs)[0])
    assert report.first_differing == where and where in str(report)


def test_a_parity_report_takes_nan_for_a_difference_and_wrong_inputs_are_named():
    theirs = make("bert")
    ours = from_huggingface(theirs)
    tokens = inputs(theirs)[0][0]
    with torch.no_grad():
        theirs.encoder.layer[1].output.dense.bias[0] = float("nan")
    assert parity_report(ours, theirs, tokens).first_differing == "layers.1"
    with pytest.raises(ValueError, match=r"and no more; got 2 inputs"):
        parity_report(ours, theirs, tokens, tokens)
    with pytest.raises(ValueError, match="tolerance"):
        parity_report(ours, theirs, tokens, tolerance=0)


# folders


@pytest.mark.parametrize("name", ["bert words", "albert", "smollm2", "vit", "whisper words", "marian words", "bart"])
def test_a_folder_gives_what_the_model_gives(name, tmp_path):
    theirs = make(name, torch.float32)
    theirs.save_pretrained(tmp_path)
    tensors, _ = inputs(theirs)
    with torch.no_grad():
        ours = from_huggingface(tmp_path)
        assert torch.equal(ours(*tensors), from_huggingface(theirs)(*tensors))
    assert ours.config.origin["architecture"] == type(theirs).__name__
    assert torch.equal(from_huggingface(str(tmp_path))(*tensors), ours(*tensors))


def test_tensors_that_are_not_expected_or_missing_are_named(tmp_path):
    theirs = make("bert words", torch.float32)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    save_file({**state, "bert.adapter.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"bert\.adapter\.weight"):
        from_huggingface(tmp_path)
    assert from_huggingface(tmp_path, ignore=["bert.adapter."]).config.origin["left_out"] == ["bert.adapter.weight"]
    save_file({**state, "cls.seq_relationship.bias": torch.ones(2)}, path, metadata={"format": "pt"})
    assert from_huggingface(tmp_path).config.origin["left_out"] == ["cls.seq_relationship.bias"]
    lost = "bert.encoder.layer.1.output.dense.bias"
    save_file({k: v for k, v in state.items() if k != lost}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=lost):
        from_huggingface(tmp_path)
    theirs.bert.encoder.layer[0].adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"bert\.encoder\.layer\.0\.adapter\.bias.*adapter\.weight"):
        from_huggingface(theirs)


def test_folders_that_are_no_models_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        from_huggingface("bert-base-uncased")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="architecture="):
        from_huggingface(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        from_huggingface(tmp_path, architecture="BertModel")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaModel"]}))
    with pytest.raises(ValueError, match=r"model_type must be one of bert.*'mamba'"):
        from_huggingface(tmp_path)


# refusals


def test_nan_weights_are_named():
    theirs = make("gpt2 words")
    with torch.no_grad():
        theirs.transformer.h[1].mlp.c_fc.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"NaN or infinity in transformer\.h\.1\.mlp\.c_fc\.weight"):
        from_huggingface(theirs)


SETTINGS = [(hf.GPT2LMHeadModel, hf.GPT2Config, GPT, {"scale_attn_by_inverse_layer_idx": True}),
            (hf.BertModel, hf.BertConfig, TEXT, {"is_decoder": True}),
            (hf.BertModel, hf.BertConfig, TEXT, {"hidden_act": "mish"}),
            (hf.AlbertModel, hf.AlbertConfig, TEXT, {"inner_group_num": 2}),
            (hf.LlamaModel, hf.LlamaConfig, LLAMA, {"head_dim": 8}),
            (hf.LlamaModel, hf.LlamaConfig, LLAMA, {"hidden_act": "gelu"}),
            (hf.LlamaModel, hf.LlamaConfig, LLAMA, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4,
                                                                       "factor": 2.0}}),
            (hf.Qwen2Model, hf.Qwen2Config, LLAMA, {"use_sliding_window": True, "max_window_layers": 1}),
            (hf.BartModel, hf.BartConfig, PAIR, {"tie_word_embeddings": False})]


@pytest.mark.parametrize(("kind", "config", "values", "change"), SETTINGS)
def test_settings_that_we_do_not_have_are_named(kind, config, values, change):
    name = next(iter(change))
    name = {"rope_parameters": "rope_type", "use_sliding_window": "layer_types"}.get(name, name)
    with pytest.raises(ValueError, match=name):
        from_huggingface(kind(config(**{**values, **change})))


def test_two_tensors_that_are_one_of_ours_must_agree():
    theirs = make("bert words untied")
    with torch.no_grad():
        theirs.cls.predictions.bias[0] += 1
    with pytest.raises(ValueError, match=r"cls\.predictions\.decoder\.bias and cls\.predictions\.bias"):
        from_huggingface(theirs)


def test_other_classes_types_and_options_are_named():
    with pytest.raises(ValueError, match="BertForQuestionAnswering"):
        from_huggingface(hf.BertForQuestionAnswering(hf.BertConfig(**TEXT)))
    with pytest.raises(ValueError, match="'gpt_neox'"):
        from_huggingface(hf.GPTNeoXModel(hf.GPTNeoXConfig(**TEXT)))
    with pytest.raises(TypeError, match="Linear"):
        from_huggingface(torch.nn.Linear(2, 2))
    theirs = make("bert")
    with pytest.raises(ValueError, match=r"unknown option 'step'.*solver"):
        from_huggingface(theirs, step=2)
    with pytest.raises(ValueError, match="weights is given by the checkpoint"):
        from_huggingface(theirs, weights="shared")
    with pytest.raises(ValueError, match="unknown solver"):
        from_huggingface(theirs, solver="rk5")
    with pytest.raises(ValueError, match="for a folder"):
        from_huggingface(theirs, architecture="BertModel")
    with pytest.raises(ValueError, match="for a folder"):
        from_huggingface(theirs, ignore=["x"])


def test_only_what_was_read_and_kept_its_shape_goes_back():
    ours = from_huggingface(make("bert"))
    with pytest.raises(ValueError, match="n_layers"):
        to_huggingface(prune(ours, keep=[0, 2]))
    ours.config = replace(ours.config, origin=None)
    with pytest.raises(ValueError, match="from_huggingface"):
        to_huggingface(ours)
    with pytest.raises(ValueError, match="from_huggingface"):
        to_huggingface(torch.nn.Linear(2, 2))


def test_dropout_is_off_unless_given():
    theirs = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, **LABELS, hidden_dropout_prob=0.5)).eval()
    tokens = inputs(theirs)[0][0]
    ours, dropped = from_huggingface(theirs).train(), from_huggingface(theirs, dropout=0.5).train()
    with torch.no_grad():
        assert torch.equal(ours(tokens), ours(tokens))
        assert not torch.equal(dropped(tokens), dropped(tokens))
        assert torch.equal(dropped.eval()(tokens), ours(tokens))
    to_huggingface(dropped)
