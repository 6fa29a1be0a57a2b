"""Options of embeddings, heads, positions and attention that published models need, by plain formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from odeformer import (
    ATTENTION,
    FEEDFORWARD,
    HEADS,
    POSITIONS,
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
    VisionConfig,
    VisionEncoder,
    load,
)
from odeformer.heads import ACTIVATIONS, Pooler
from odeformer.models import EmbeddingConfig, SpeechConfig, SpeechSeq2Seq

D, VOCAB, LENGTH = 8, 11, 9


def filled(model):
    """In float64, no parameter at its start."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.double().eval()


def encoder(embedding=None, block=(), **options):
    return filled(Encoder(EncoderConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=1, embedding=embedding
                                        or EmbeddingConfig(), block=BlockConfig(D, 2, **dict(block)), **options)))


def tokens(batch=2, n=LENGTH):
    return torch.randint(VOCAB, (batch, n))


def normed(x, norm, eps=1e-5):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return (x - mean) / (variance + eps).sqrt() * norm.weight + norm.bias


def test_the_state_at_l_0_is_scaled_rows_positions_and_types_normed_and_mapped():
    model = encoder(EmbeddingConfig(scale=3.0, norm=True, width=4, n_token_types=2), {"norm_options": {"eps": 1e-3}})
    ids, types = tokens(), torch.randint(2, (2, LENGTH))
    rows = model.token_embedding.weight[ids] * 3 + model.position.table + model.token_type_embedding.weight[types]
    wanted = normed(rows, model.embedding_norm, 1e-3) @ model.embedding_projection.weight.T
    wanted = wanted + model.embedding_projection.bias
    assert model.token_embedding.weight.shape == (VOCAB, 4) and model.position.table.shape == (LENGTH, 4)
    assert (model.embed(ids, token_types=types) - wanted).abs().max() < 1e-13
    assert torch.equal(model.embed(ids), model.embed(ids, token_types=torch.zeros_like(ids)))


@pytest.mark.parametrize(("option", "value", "word"), [("scale", 0.0, "scale"), ("scale", math.inf, "scale"),
                                                       ("width", 0, "width"), ("n_token_types", -1, "n_token_types"),
                                                       ("n_token_types", 1.5, "n_token_types")])
def test_wrong_embeddings_are_named(option, value, word):
    with pytest.raises((ValueError, TypeError), match=word):
        EmbeddingConfig(**{option: value})


def test_models_with_these_options_are_saved_and_loaded(tmp_path):
    embedding = EmbeddingConfig(scale=2.0, norm=True, width=4, n_token_types=2)
    model = encoder(embedding, {"attention_options": {"bias": ["query", "output"]}}, head="masked_lm",
                    head_options={"width": 4, "activation": "relu"}, tie_embeddings=True, origin={"a": [1, None]})
    model.save(tmp_path)
    again = load(tmp_path)
    assert again.config == model.config and again.head.output.weight is again.token_embedding.weight
    ids = tokens()
    assert torch.equal(again(ids), model(ids))


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_begin_behind_the_offset(offset):
    position = POSITIONS["learned"](LENGTH, D, offset=offset)
    assert position.table.shape == (LENGTH + offset, D)
    assert torch.equal(position(4), position.table[offset:offset + 4])
    with pytest.raises(ValueError, match="offset"):
        POSITIONS["learned"](LENGTH, D, offset=-1)


def test_a_table_of_sinusoids_is_that_of_marian_or_whispers_released_code():
    position = POSITIONS["sinusoidal_table"](LENGTH, D)
    stretched = POSITIONS["sinusoidal_table"](LENGTH, D, stretch=True)
    assert not [*position.parameters()] and [*position.state_dict()] == ["table"]
    for t in (0, 1, 8):
        for i in range(D // 2):
            angle = t / 10000 ** (2 * i / D)
            assert position.table[t, i] == pytest.approx(math.sin(angle), abs=1e-7)
            assert position.table[t, D // 2 + i] == pytest.approx(math.cos(angle), abs=1e-7)
            angle = t * math.exp(-math.log(10000) / (D // 2 - 1) * i)  # whisper/model.py, sinusoids()
            assert stretched.table[t, i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert stretched.table[t, D // 2 + i] == pytest.approx(math.cos(angle), abs=1e-6)


def test_single_angles_of_rotary_positions_are_those_of_float32():
    fine, single = (POSITIONS["rope"](4096, D, base=500.0, single=s).rotary(4096, D, torch.device("cpu"), torch.float64)
                    for s in (False, True))
    theta = 1.0 / (500.0 ** (torch.arange(0, D, 2).float() / D))
    angle = torch.arange(4096).float()[:, None] * theta
    assert torch.equal(single.cos, angle.cos().double()) and torch.equal(single.sin, angle.sin().double())
    assert 1e-6 < (fine.cos - single.cos).abs().max() < 1e-3


@pytest.mark.parametrize("bias", [True, False, ("query", "key", "value"), ["query", "value", "output"], ()])
def test_each_projection_has_a_bias_or_none(bias):
    attention = ATTENTION["softmax"](D, 2, bias=bias)
    wanted = {True: "query key value output", False: ""}.get(bias) if isinstance(bias, bool) else " ".join(bias)
    got = [name for name in ("query", "key", "value", "output") if getattr(attention, name).bias is not None]
    assert got == wanted.split()


@pytest.mark.parametrize("bias", ["query", ("q",), ("query", "gate")])
def test_a_bias_of_no_projection_is_named(bias):
    with pytest.raises(ValueError, match="bias must be True, False or some of query"):
        ATTENTION["softmax"](D, 2, bias=bias)


FORMULAS = {
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_eq_48_with_the_activations_of_published_models(name):
    f, x = FEEDFORWARD[name](D, 12).double(), torch.randn(3, D, dtype=torch.float64)
    hidden = FORMULAS[name](x @ f.hidden.weight.T + f.hidden.bias)
    assert (f(x) - (hidden @ f.output.weight.T + f.output.bias)).abs().max() < 1e-14
    assert (ACTIVATIONS[name](x) - FORMULAS[name](x)).abs().max() < 1e-14


def test_the_pooler_reads_the_first_real_token():
    states, mask = torch.randn(2, 3, D), torch.tensor([[True, True, True], [False, True, True]])
    pooler = Pooler(D)
    first = torch.stack([states[0, 0], states[1, 1]])
    wanted = torch.tanh(first @ pooler.transform.weight.T + pooler.transform.bias)
    assert (pooler(states, mask) - wanted).abs().max() < 1e-6
    head = HEADS["pooled_classification"](D, 3, activation="relu")
    nn.init.normal_(head.output.weight)
    hidden = torch.relu(first @ head.pooler.transform.weight.T + head.pooler.transform.bias)
    assert (head(states, mask) - (hidden @ head.output.weight.T + head.output.bias)).abs().max() < 1e-6
    with pytest.raises(ValueError, match=r"activation 'mish'.*gelu"):
        HEADS["masked_lm"](D, 3, activation="mish")


def test_ties_poolers_and_heads_that_do_not_go_together_are_named():
    for options, word in (({"tie_embeddings": True}, "masked_lm"), ({"pooler": True, "head": "masked_lm"}, "pooler"),
                          ({"head": "masked_lm", "head_options": {"width": 4}, "tie_embeddings": True}, "as wide as")):
        with pytest.raises(ValueError, match=word):
            encoder(**options)
    shape = {"vocab_size": VOCAB, "max_seq_len": LENGTH, "n_layers": 1, "block": BlockConfig(D, 2)}
    for options, word in (({"with_head": False, "tie_embeddings": True}, "tie_embeddings"),
                          ({"with_head": False, "head_bias": True}, "head_bias"),
                          ({"tie_embeddings": True, "embedding": EmbeddingConfig(width=4)}, "width")):
        with pytest.raises(ValueError, match=word):
            DecoderConfig(**shape, **options)


def test_a_decoder_may_have_a_biased_head_or_none():
    shape = {"vocab_size": VOCAB, "max_seq_len": LENGTH, "n_layers": 2, "block": BlockConfig(D, 2)}
    biased, bare = filled(Decoder(DecoderConfig(**shape, head_bias=True))), Decoder(DecoderConfig(**shape,
                                                                                                   with_head=False))
    bare = bare.double().eval()
    bare.load_state_dict({k: v for k, v in biased.state_dict().items() if not k.startswith("head.")})
    ids = tokens()
    wanted = bare(ids) @ biased.head.weight.T + biased.head.bias
    assert (biased(ids) - wanted).abs().max() < 1e-12
    logits, cache = biased(ids[:, :4], cache=biased.new_cache())
    rest, _ = biased(ids[:, 4:], cache=cache)
    assert (torch.cat([logits, rest], 1) - wanted).abs().max() < 1e-12
    for call in (bare.generate, bare.stream):
        with pytest.raises(ValueError, match="no head"):
            call(ids, max_new_tokens=1)


def test_both_sides_of_a_seq2seq_have_the_embedding_options():
    model = filled(Seq2Seq(Seq2SeqConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=1, block=BlockConfig(D, 2),
                                         embedding=EmbeddingConfig(scale=2.0, norm=True), head_bias=True)))
    for part in (model.encoder, model.decoder):
        ids = tokens()
        wanted = normed(part.token_embedding.weight[ids] * 2 + part.position.table, part.embedding_norm)
        assert (part.embed(ids) - wanted).abs().max() < 1e-13
    assert model.decoder.head.bias.shape == (VOCAB,)


# images


def vision(n_classes=3, **options):
    return filled(VisionEncoder(VisionConfig(image_size=8, patch_size=4, n_classes=n_classes, n_layers=1, channels=1,
                                             block=BlockConfig(D, 2), **options)))


def test_class_token_position_and_hidden_patches_by_hand():
    model = vision(pooling="class_token", class_position=True, mask_token=True)
    images, hidden = torch.randn(2, 1, 8, 8, dtype=torch.float64), torch.tensor([[True, False, False, True]] * 2)
    patches = [images[:, 0, i:i + 4, j:j + 4].flatten(1) for i in (0, 4) for j in (0, 4)]
    x = torch.stack(patches, 1) @ model.patch_embedding.weight.T + model.patch_embedding.bias
    x[hidden] = model.mask_token
    x = x + model.position.table.flatten(0, 1)
    wanted = torch.cat([(model.class_token + model.class_position).expand(2, 1, -1), x], 1)
    assert (model.embed(images, hidden) - wanted).abs().max() < 1e-13
    with pytest.raises(ValueError, match="hidden"):
        model(images, hidden=hidden[:, :3])
    with pytest.raises(TypeError, match="hidden"):
        model(images, hidden=hidden.long())


def test_what_the_head_of_an_image_model_sees():
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    for pooling, made in (("class_token", lambda s: s[:, 0]), ("mean", lambda s: s.mean(1)),
                          ("class_and_mean", lambda s: torch.cat([s[:, 0], s[:, 1:].mean(1)], -1))):
        model = vision(pooling=pooling)
        bare = VisionEncoder(VisionConfig(image_size=8, patch_size=4, n_classes=None, n_layers=1, channels=1,
                                          pooling=pooling, block=BlockConfig(D, 2))).double().eval()
        bare.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head.")})
        states = bare(images)
        assert states.shape == (2, 4 + (pooling != "mean"), D)
        assert (model(images) - made(states) @ model.head.weight.T - model.head.bias).abs().max() < 1e-12


def test_options_of_images_that_do_not_go_together_are_named():
    for options, word in (({"class_position": True}, "class_position"), ({"pooler": True}, "pooler"),
                          ({"pooler": True, "pooling": "class_token"}, "n_classes"), ({"n_classes": 0}, "n_classes")):
        with pytest.raises(ValueError, match=word):
            vision(**options)


# speech


def speech(**depth):
    return filled(SpeechSeq2Seq(SpeechConfig(
        n_mels=3, max_frames=20, vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2, n_decoder_layers=1,
        block=BlockConfig(D, 2, position="sinusoidal_table", position_options={"stretch": True}),
        decoder_block=BlockConfig(D, 2), depth=DepthConfig(**depth))))


def frames(n=20):
    return torch.randn(2, 3, n, dtype=torch.float64)


@pytest.mark.parametrize("n", [20, 13, 1])
def test_frames_are_halved_by_two_convolutions(n):
    model, x = speech(), frames(n)
    part = model.encoder
    padded = F.pad(x, (1, 1))
    first = torch.stack([torch.einsum("bit,oit->bo", padded[:, :, t:t + 3], part.bands.weight) + part.bands.bias
                         for t in range(n)], -1)
    first = F.pad(first * (1 + torch.erf(first / math.sqrt(2))) / 2, (1, 1))
    second = torch.stack([torch.einsum("bit,oit->bo", first[:, :, t:t + 3], part.halving.weight) + part.halving.bias
                          for t in range(0, n, 2)], 1)
    wanted = second * (1 + torch.erf(second / math.sqrt(2))) / 2 + part.position.table[:(n + 1) // 2]
    assert (part.embed(x) - wanted).abs().max() < 1e-12
    assert model(x, tokens()).shape == (2, LENGTH, VOCAB)


@pytest.mark.parametrize("name", ["euler", "rk4", "ab2", "leapfrog"])
def test_speech_under_other_solvers_with_a_cache_and_on_disk(name, tmp_path):
    model, x, ids = speech().with_solver(name), frames(), tokens()
    logits, solution = model(x, ids, return_solution=True)
    assert type(model) is SpeechSeq2Seq and solution.encoder.z.shape == (2, 10, D)
    memory, cache = model.encode(x), model.new_cache()
    pieces = [model.decode(part, memory, cache=cache)[0] for part in ids.split(4, 1)]
    assert (torch.cat(pieces, 1) - logits).abs().max() < 1e-12
    assert model.generate(x, start=1, max_new_tokens=3).shape == (2, 4)
    model.save(tmp_path)
    assert torch.equal(load(tmp_path)(x, ids), logits)
    later = ids.clone()
    later[:, -1] = (later[:, -1] + 1) % VOCAB
    assert (model(x, later) - logits)[:, :-1].abs().max() < 1e-12


def test_wrong_features_are_named():
    model, ids = speech(), tokens()
    for x, error, word in ((frames()[:, :2], ValueError, "n_mels = 3"), (frames(21), ValueError, "max_frames = 20"),
                           (frames().long(), TypeError, "floating-point"), (frames()[0], ValueError, "n_mels"),
                           (frames()[:1], ValueError, "batches of one size")):
        with pytest.raises(error, match=word):
            model(x, ids)
    with pytest.raises(ValueError, match="no mask"):
        model(frames(), ids, torch.ones(2, 20, dtype=torch.bool))
    with pytest.raises(ValueError, match="n_mels"):
        SpeechConfig(n_mels=0, max_frames=2, vocab_size=2, max_seq_len=2, n_layers=1, block=BlockConfig(D, 2))
