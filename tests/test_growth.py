"""Growth in width: eq. 47, and models that compute the same with more units, or say why they cannot."""

import copy
import inspect

import pytest
import torch
from growing import LENGTH, VOCAB, decoder, inputs, run, seq2seq, shaken, tiny, vision
from torch import nn

from odeformer import (
    ATTENTION,
    FEEDFORWARD,
    FUSIONS,
    HEADS,
    NORMS,
    POSITIONS,
    WEIGHTS,
    BlockConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    SeriesConfig,
    SeriesEncoder,
    load,
)
from odeformer.attention.softmax import SoftmaxAttention
from odeformer.grid_positions import GRID_POSITIONS
from odeformer.growth import tile, widen
from odeformer.models import EmbeddingConfig, SpeechConfig, SpeechSeq2Seq
from solvers import SOLVERS

EXACT = 1e-10
CASES = {  # from d_model 8, 2 heads of 4, d_ff 32
    "heads": {"d_model": 24},
    "head_dim": {"d_model": 16, "n_heads": 2},
    "both": {"d_model": 48, "n_heads": 4},
    "uneven heads and head_dim": {"d_model": 24, "n_heads": 4},
    "d_ff": {"d_ff": 45},
    "all": {"d_model": 16, "n_heads": 4, "d_ff": 50, "unequal": 0.5},
}


def assert_same(model, wider, given=None):
    """The outputs, and the state with its features copied: j is old feature j mod d_model."""
    given = inputs(model) if given is None else given
    outputs, z = run(model, given)
    grown, big = run(wider, given)
    d_model = z.shape[-1]
    assert (big - z[..., torch.arange(big.shape[-1]) % d_model]).abs().max() < EXACT
    if grown.shape == outputs.shape:
        assert (grown - outputs).abs().max() < EXACT
    else:
        assert grown.shape[-1] == big.shape[-1]  # an encoder's states


def exact_or(refusal, model, given=None, **sizes):
    """Widening keeps the function, or with ``refusal`` (part of the message) it is refused."""
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            widen(model, **sizes)
        return
    assert_same(model, widen(model, **sizes), given)


# eq. 47


@pytest.mark.parametrize("rho", [None, 1.0, 2.5])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_eq_47_tiles_of_a_matrix_over_rho_number_by_number(k, rho):
    w = torch.randn(3, 4, dtype=torch.float64)
    got = tile(w, k, rho=rho)
    divisor = k if rho is None else rho
    assert got.shape == (3 * k, 4 * k)
    for i in range(3 * k):
        for j in range(4 * k):
            assert got[i, j] == w[i % 3, j % 4] / divisor
    assert abs(got.norm() / w.norm() - k / divisor) < 1e-14  # the norm stays for rho = k


def test_eq_47_rho_k_keeps_the_function_of_a_repeated_input_and_another_rho_scales_it():
    w, b, x = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 4), (3,), (5, 4)))
    y = x @ w.T + b
    for k in (2, 3):
        assert (x.repeat(1, k) @ tile(w, k).T + b.repeat(k) - y.repeat(1, k)).abs().max() < 1e-14
        assert (x.repeat(1, k) @ tile(w, k, rho=2 * k).T - (x @ w.T).repeat(1, k) / 2).abs().max() < 1e-14
    assert (x.repeat(1, 5) @ tile(w, (1, 5)).T - x @ w.T).abs().max() < 1e-14  # a head: the input alone is repeated


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((torch.ones(3), 2), ValueError, "matrix"), ((torch.ones(2, 2, dtype=torch.int64), 2), TypeError, "floating-point"),
    (([[1.0]], 2), TypeError, "list"), ((torch.ones(2, 2), 0), ValueError, "k must be at least 1"),
    ((torch.ones(2, 2), 1.5), TypeError, "k must be an int"), ((torch.ones(2, 2), 2, 0.0), ValueError, "rho"),
    ((torch.ones(2, 2), 2, float("nan")), ValueError, "rho"), ((torch.ones(2, 2), (1, 2, 3)), ValueError, "k must be"),
])
def test_tile_refuses_what_it_cannot_tile(arguments, error, message):
    with pytest.raises(error, match=message):
        tile(*arguments)


def test_eq_47_a_wider_model_holds_tiles_of_its_matrices():
    """d_model, heads and d_ff doubled: every matrix between them is tile(W, 2), by hand."""
    model = tiny(block={"d_ff": 12})
    wider = widen(model, d_model=16, d_ff=24)
    for old, new in zip(model.layers, wider.layers, strict=True):
        pairs = [(getattr(old.attention.core, name), getattr(new.attention.core, name))
                 for name in ("query", "key", "value", "output")]
        pairs += [(getattr(old.feedforward.core, name), getattr(new.feedforward.core, name))
                  for name in ("hidden", "output")]
        for small, big in pairs:
            rows = torch.cat([small.weight, small.weight], 0) / 2
            assert torch.equal(big.weight, torch.cat([rows, rows], 1))
            assert torch.equal(big.bias, torch.cat([small.bias, small.bias]))
    table = model.token_embedding.weight
    assert torch.equal(wider.token_embedding.weight, torch.cat([table, table], 1))


def test_hidden_units_are_copied_and_what_they_give_is_divided():
    """Net2WiderNet by hand, unit by unit: 5 units grown to 8 have the copies 2, 2, 2, 1, 1."""
    model = tiny(block={"d_ff": 5})
    wider = widen(model, d_ff=8)
    for old, new in zip(model.layers, wider.layers, strict=True):
        small, big = old.feedforward.core, new.feedforward.core
        for j in range(8):
            copies = 2 if j % 5 < 3 else 1
            assert torch.equal(big.hidden.weight[j], small.hidden.weight[j % 5])
            assert big.hidden.bias[j] == small.hidden.bias[j % 5]
            assert torch.equal(big.output.weight[:, j], small.output.weight[:, j % 5] / copies)
        assert torch.equal(big.output.bias, small.output.bias)


# everything that a model can be made of

OPTIONS = {  # beside an entry's defaults
    "local_gaussian": [{"gamma": [0.5, 2.0], "sigma_mode": "predicted"},
                       {"sigma": [1.0, 3.0], "sigma_mode": "learned"}],
    "local_distance": [{"gamma_mode": "predicted"}, {"gamma": [0.1, 0.7]}],
    "local_mixture": [{"beta_mode": "predicted", "beta": [0.3, 0.6]}, {"prior": "distance", "gamma_mode": "learned"}],
    "local_multiplicative": [{"decay": "normalized"}, {"decay": "exponential", "gamma_mode": "predicted"}],
    "relative": [{"tables": "q"}, {"tables": "kv", "max_distance": 3}],
    "window": [{"window": 3}],
}


def attention_options(name):
    """Options to try: an entry's own, and those that all variants share."""
    known = inspect.signature(ATTENTION[name]).parameters
    shared = [{"qk_norm": "rms"}, {"qk_norm": "layer"}, {"n_kv_heads": 1}, {"bias": False}]
    return [{}, *OPTIONS.get(name, []), *[options for options in shared if options.keys() <= known.keys()]]


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", [name for name in ATTENTION if not getattr(ATTENTION[name], "for_memory", False)])
def test_every_attention_grows_exactly_or_says_why_not(name, sizes):
    for options in attention_options(name):
        refusal = None
        heads = sizes.get("n_heads", sizes.get("d_model", 8) // 4)
        if "qk_norm" in options and sizes.get("d_model", 8) // heads % 4:
            refusal = "whole factor under qk_norm"
        if name == "alibi" and heads != 2:
            refusal = "slopes follow from the number of heads"
        model = tiny(n_layers=1, block={"attention": name, "attention_options": options})
        exact_or(refusal, model, **sizes)


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "window"])
def test_every_cross_attention_grows_exactly_or_says_why_not(name, sizes):
    options = {"ratio": 1.3, "center_mode": "ratio", "gamma": [0.5, 1.5]} if name == "cross_gaussian" else {}
    heads = sizes.get("n_heads", sizes.get("d_model", 8) // 4)
    refusal = "slopes" if name == "alibi" and heads != 2 else None
    for given in ([{}, options] if options else [{}]):
        model = seq2seq(n_layers=1, block={"cross_attention": name, "cross_attention_options": given})
        exact_or(refusal, model, **sizes)


NORM_OPTIONS = {"weighted": [{"beta": 0.4, "gamma": 0.3}, {"mode": "learned"}, {"mode": "predicted", "gamma": 1.0}]}


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_grows_by_whole_factors_and_by_others_where_nothing_is_averaged(name):
    known = inspect.signature(NORMS[name]).parameters
    kinds = [{"kind": "rms"}] if "kind" in known else []
    for options in ({}, *kinds, *NORM_OPTIONS.get(name, [])):
        model = tiny(block={"norm": name, "norm_options": options})
        exact_or(None, model, d_model=24, unequal=0.3)
        refusal = None if name in ("none", "rezero") else "averages over the features"
        exact_or(refusal, model, d_model=12)


@pytest.mark.parametrize("name", FEEDFORWARD)
def test_every_feed_forward_grows(name):
    experts = [{"n_experts": 4, "top_k": 2, "gate": "softmax_then_topk"}, {"n_experts": 4, "top_k": 4, "bias": False}]
    for options in ({}, *(experts if "experts" in name or "slices" in name else [{"bias": False}])):
        model = tiny(block={"feedforward": name, "feedforward_options": options})
        assert_same(model, widen(model, d_model=16))
        assert_same(model, widen(model, d_ff=56))
        assert_same(model, widen(model, d_model=24, d_ff=40, unequal=0.4))


def test_experts_grow_with_gates_noise_and_any_number_of_hidden_units():
    block = {"feedforward": "experts", "d_ff": 6, "feedforward_options": {"n_experts": 3, "top_k": 2, "noise": True,
                                                                         "activation": "swiglu"}}
    model = tiny(block=block)
    wider = widen(model, d_model=16, d_ff=11)
    assert_same(model, wider)
    given = inputs(model)
    for part in (model, wider):  # the noise is drawn in the shape of the logits, which stays
        part.train()
    torch.manual_seed(3)
    outputs, _ = run(model, given)
    torch.manual_seed(3)
    assert (run(wider, given)[0][..., :8] - outputs).abs().max() < EXACT


@pytest.mark.parametrize("name", POSITIONS)
def test_every_position_grows_exactly_or_says_why_not(name):
    model = decoder(block={"position": name})
    exact_or("sinusoidal positions" if name == "sinusoidal" else None, model, d_model=24)
    exact_or({"sinusoidal": "sinusoidal positions", "rope": "angles follow from head_dim"}.get(name), model,
             d_model=16, n_heads=2)
    exact_or(None, model, d_ff=33)


@pytest.mark.parametrize("name", GRID_POSITIONS)
@pytest.mark.parametrize("pooling", ["mean", "class_token"])
def test_vision_grows_with_every_position_of_patches(name, pooling):
    model = vision(block={"position": name}, model={"pooling": pooling})
    exact_or("sinusoidal positions" if name == "sinusoidal" else None, model, d_model=16)
    exact_or({"sinusoidal": "sinusoidal", "rope": "angles follow"}.get(name), model, d_model=24, n_heads=2)
    exact_or(None, model, d_ff=40)


def gated():
    model = tiny(solver="rk2_gate", block={"coupling": "parallel"})
    assert model.solver.weight.abs().min() > 0
    return model


@pytest.mark.parametrize("solver", ["euler", "rk4", "dopri87", "ab3", "abm2", "strang", "leapfrog", "revnet",
                                    "reversible_rk4", "implicit_midpoint", "bdf2", "imex_euler", "rk2_learned",
                                    "rk3_family", "dense"])
def test_the_function_stays_under_every_kind_of_solver(solver):
    mild = {"norm": "rezero"} if SOLVERS[solver].is_implicit else {}  # so that every stage is found
    model = tiny(solver=solver, block=mild)
    assert_same(model, widen(model, d_model=16, n_heads=2, d_ff=40))


def test_coefficients_learned_from_increments_grow_too():
    corrected = tiny(solver="hypersolver", solver_options={"base": "heun2"}, block={"coupling": "parallel"})
    for model in (gated(), corrected):
        assert_same(model, widen(model, d_model=24))


@pytest.mark.parametrize("solver", [name for name in SOLVERS if SOLVERS[name].embedded_order is not None
                                    and SOLVERS[name].is_adaptive])
def test_adaptive_solvers_take_the_same_steps_in_the_wider_model(solver):
    """Their norm is a mean over features, which copies do not change."""
    model = tiny(solver=solver, rtol=1e-2, n_layers=1, block={"norm": "completep"})
    wider = widen(model, d_model=16, unequal=0.5)
    assert_same(model, wider)
    (args, named), counts = inputs(model), []
    for part in (model, wider):
        counts.append(part(*args, **named, return_solution=True)[1].nfe)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_family_of_weights_grows(name):
    model = tiny(weights=name, n_layers=4, solver="rk4", block={"feedforward": "swiglu"})
    assert_same(model, widen(model, d_model=16, n_heads=2, d_ff=50, unequal=0.3))
    if name in ("spline", "lowrank", "hyper"):
        block = {"attention": "l2", "feedforward": "experts", "feedforward_options": {"n_experts": 2, "top_k": 2}}
        model = tiny(weights=name, n_layers=4, block=block)
        assert_same(model, widen(model, d_model=24, n_heads=3))


@pytest.mark.parametrize("name", FUSIONS)
def test_every_fusion_grows_in_all_its_forms(name):
    tried = 0
    for form in ("plain", "input", "pre", "post"):
        if FUSIONS[name].forms[form] is None:
            model = tiny(fusion=name, fusion_options={"form": form}, n_layers=3)
            assert_same(model, widen(model, d_model=16, unequal=0.2))
            tried += 1
    assert tried >= 3


# whole models


def test_a_tied_decoder_grows_by_its_final_norm_and_is_refused_without_one():
    model = decoder(model={"tie_embeddings": True})
    wider = widen(model, d_model=24, unequal=0.5)
    assert wider.head.weight is wider.token_embedding.weight
    assert_same(model, wider)
    for norm in ("post", "none"):
        model = decoder(model={"tie_embeddings": True}, block={"norm": norm})
        exact_or("untie it first", model, d_model=16)
        exact_or(None, model, d_ff=40)


@pytest.mark.parametrize("tied", [{}, {"tie_embeddings": True}, {"share_embeddings": True},
                                  {"tie_embeddings": True, "share_embeddings": True}])
def test_both_parts_of_a_seq2seq_grow(tied):
    own = BlockConfig(8, 4, d_ff=20, feedforward="swiglu", norm="sandwich")
    model = seq2seq(model={"decoder_block": own, "n_decoder_layers": 1, **tied})
    assert_same(model, widen(model, d_model=16))
    wider = widen(model, d_model=24, d_ff=37, n_heads=6, unequal=0.2)
    assert_same(model, wider)
    assert (wider.encoder.layers[0].attention.core.n_heads, wider.decoder.layers[0].attention.core.n_heads) == (6, 6)


@pytest.mark.parametrize("name", HEADS)
def test_an_encoder_grows_with_every_head(name):
    outputs = {} if name == "masked_lm" else {"n_outputs": 5}
    model = tiny(model={"head": name, **outputs})
    wider = widen(model, d_model=16)
    given = inputs(model)
    assert (run(wider, given)[0] - run(model, given)[0]).abs().max() < EXACT


def test_heads_and_embeddings_with_a_width_of_their_own_keep_it():
    for width, options in ((None, {}), (8, {"width": 8}), (6, {"width": 6})):
        for tied in (True, False):
            embedding = EmbeddingConfig(scale=2.0, norm=True, width=width, n_token_types=2)
            model = tiny(model={"head": "masked_lm", "head_options": options, "tie_embeddings": tied,
                                "embedding": embedding})
            wider = widen(model, d_model=24)
            given = inputs(model)
            assert (run(wider, given)[0] - run(model, given)[0]).abs().max() < EXACT
            assert wider.token_embedding.weight.shape[1] == (24 if width is None else width)
            assert (wider.head.output.weight is wider.token_embedding.weight) == tied


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_positions_of_embeddings_with_a_width_of_their_own_stay(position):
    model = tiny(model={"embedding": EmbeddingConfig(width=6)}, block={"position": position})
    assert_same(model, widen(model, d_model=16))


@pytest.mark.parametrize("options", [{"head_bias": True}, {"head_bias": True, "tie_embeddings": True},
                                     {"with_head": False}])
def test_decoders_with_a_bias_and_without_a_head_grow(options):
    model = decoder(model=options)
    assert_same(model, widen(model, d_model=16))


def test_poolers_and_the_other_tokens_of_vision_grow():
    model = tiny(model={"pooler": True})
    wider = widen(model, d_model=16)
    states = model(torch.randint(VOCAB, (2, 4)))
    assert (wider.pooled(states.repeat(1, 1, 2))[:, :8] - model.pooled(states)).abs().max() < EXACT
    model = vision(model={"pooling": "class_and_mean", "class_position": True, "mask_token": True})
    wider = widen(model, d_model=24)
    (images,), _ = inputs(model)
    hidden = torch.tensor([[True, False, False, True]] * 2)
    assert (wider(images, hidden=hidden) - model(images, hidden=hidden)).abs().max() < EXACT
    model = vision(model={"pooling": "class_token", "n_classes": None, "pooler": True})
    assert_same(model, widen(model, d_model=16))


def test_a_model_of_speech_grows_with_its_convolutions():
    block = BlockConfig(8, 2, position="sinusoidal_table")
    model = shaken(SpeechSeq2Seq(SpeechConfig(n_mels=3, max_frames=12, vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2,
                                              block=block, tie_embeddings=True)))
    given = (torch.randn(2, 3, 12, dtype=torch.float64), torch.randint(VOCAB, (2, 5))), {}
    assert_same(model, widen(model, d_model=16, d_ff=40), given)


def test_a_series_encoder_grows_in_its_layers_and_not_in_d_model():
    config = SeriesConfig(n_channels=2, n_outputs=1, n_layers=2, block=BlockConfig(8, 2, position="none"))
    model = shaken(SeriesEncoder(config))
    with pytest.raises(ValueError, match="waves of its times"):
        widen(model, d_model=16)
    wider = widen(model, d_ff=50)
    given = torch.randn(3, 7, 2, dtype=torch.float64), torch.rand(3, 7, dtype=torch.float64).cumsum(1)
    assert (wider(*given) - model(*given)).abs().max() < EXACT


def test_a_wider_decoder_generates_the_same_text_with_and_without_a_cache():
    model = decoder(block={"attention_options": {"n_kv_heads": 1}, "position": "rope"}, solver="rk4")
    wider = widen(model, d_model=16, d_ff=48)
    assert wider.layers[0].attention.core.n_kv_heads == 1
    prompt = torch.randint(VOCAB, (2, 3))
    for cache in ("exact", None):
        assert torch.equal(*(part.generate(prompt, max_new_tokens=5, cache=cache) for part in (model, wider)))


def test_the_old_model_stays_and_the_new_one_has_its_own_config_and_parameters(tmp_path):
    model = tiny(block={"attention": "local_gaussian", "attention_options": {"gamma": [0.5, 2.0]}})
    model.layers[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    wider = widen(model, d_model=16)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.block.d_model == 8
    block = wider.config.block
    assert (block.d_model, block.n_heads, block.d_ff) == (16, 4, None)
    assert block.attention_options["gamma"] == [0.5, 2.0, 0.5, 2.0]
    assert not wider.layers[0].attention.core.query.weight.requires_grad
    assert wider.layers[1].attention.core.query.weight.requires_grad
    assert not wider.training
    given = inputs(model)
    wider.save(tmp_path)
    assert torch.equal(run(load(tmp_path), given)[1], run(wider, given)[1])
    with torch.no_grad():
        for p in wider.parameters():
            p.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    named = widen(tiny(block={"d_ff": 20}), d_model=16).config.block
    assert named.d_ff == 20


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_the_precision_of_the_parameters_stays(dtype, tolerance):
    model = tiny().to(dtype)
    wider = widen(model, d_model=16)
    assert {p.dtype for p in wider.parameters()} == {dtype}
    given = inputs(model)
    (_, a), (_, b) = run(model, given), run(wider, given)
    assert (b[..., :8] - a).abs().max() < tolerance * a.abs().max()


def test_training_mode_and_growth_in_steps():
    model = tiny().train()
    model.layers[0].eval()
    wider = widen(widen(model, d_model=16), d_model=48, d_ff=99)
    assert wider.training and not wider.layers[0].training and wider.layers[1].training
    assert_same(model.eval(), wider.eval())
    assert_same(model, widen(model, d_model=8, d_ff=32))  # nothing grows


# twins


def one_step(model, given):
    """A step of gradient descent towards outputs at random."""
    args, named = given
    y = model(*args, **named)
    torch.manual_seed(5)
    loss = (y * torch.randn_like(y)).sum()
    with torch.no_grad():
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, tuple(model.parameters())), strict=True):
            p.sub_(0.1 * g)
    return model


def twins_apart(model):
    """How far the rows of hidden units that were copies of one are apart."""
    weight = model.layers[0].feedforward.core.hidden.weight
    return (weight[:32] - weight[32:]).abs().max().item()


def test_twins_stay_alike_unless_they_are_read_unequally_or_shaken():
    model = tiny(model={"head": "tagging", "n_outputs": 4})
    given = inputs(model)
    assert twins_apart(one_step(widen(model, d_ff=64), given)) < 1e-15
    uneven = widen(model, d_ff=64, unequal=0.5)
    assert twins_apart(uneven) == 0
    assert_same(model, uneven, given)
    assert twins_apart(one_step(uneven, given)) > 1e-4
    assert twins_apart(widen(model, d_ff=64, noise=1e-3)) > 1e-4


def test_noise_moves_copies_alone_and_the_output_in_proportion():
    model = tiny(block={"d_ff": 12})
    given = inputs(model)
    z, errors = run(model, given)[1], {}
    for noise in (1e-6, 1e-5, 1e-3):
        torch.manual_seed(7)
        wider = widen(model, d_model=16, d_ff=24, noise=noise)
        errors[noise] = (run(wider, given)[1][..., :8] - z).norm() / z.norm()
    assert abs(errors[1e-5] / errors[1e-6] - 10) < 0.1
    for noise, error in errors.items():
        assert 0.1 * noise < error < 10 * noise
    exact = widen(model, d_model=16, d_ff=24)
    for name, p in wider.named_parameters():
        moved = (p - dict(exact.named_parameters())[name]).detach()
        if p.dim() < 2:
            assert not moved.any(), name
        elif name == "token_embedding.weight":
            assert not moved[:, :8].any()
            assert 0.7 < moved[:, 8:].std() / (1e-3 * p.square().mean().sqrt()) < 1.3


# what is refused


@pytest.mark.parametrize(("sizes", "message"), [
    ({}, "must be given"), ({"d_model": 4}, "d_model must be at least 8"),
    ({"n_heads": 1, "d_ff": 32}, "n_heads must be"), ({"d_ff": 31}, "d_ff must be at least 32"),
    ({"n_heads": 4}, "head_dim = 2"), ({"d_model": 10}, "n_heads must be given"),
    ({"d_model": 16, "n_heads": 3}, "whole number"), ({"d_model": 12}, "averages over the features"),
    ({"d_ff": 40, "noise": -1.0}, "noise"), ({"d_ff": 40, "unequal": 1.0}, "unequal"),
])
def test_sizes_that_make_no_wider_model_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        widen(tiny(), **sizes)


@pytest.mark.parametrize("name", ["d_model", "d_ff", "n_heads"])
@pytest.mark.parametrize("value", [16.0, True, "16"])
def test_sizes_must_be_ints(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        widen(tiny(), **{name: value})


class OwnAttention(SoftmaxAttention):
    """What it does is not known."""


class OwnModel(Encoder):
    """Nor this."""


def test_own_classes_are_refused_by_name():
    with pytest.raises(ValueError, match="no rule for the attention OwnAttention"):
        widen(tiny(block={"attention": OwnAttention}), d_model=16)
    with pytest.raises(ValueError, match="got OwnModel"):
        widen(OwnModel(EncoderConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=1, block=BlockConfig(8, 2),
                                     depth=DepthConfig())), d_ff=40)
    with pytest.raises(ValueError, match="got Linear"):
        widen(nn.Linear(2, 2), d_ff=40)
    model = tiny()
    model.layers.register_parameter("extra", nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match=r"'layers\.extra' for which growth has no rule"):
        widen(model, d_ff=40)
