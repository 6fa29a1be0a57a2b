"""Positions: RoPE in both layouts and with every extension, against complex numbers; sinusoids and learned tables."""

import cmath
import math
from dataclasses import fields

import pytest
import torch
from torch import nn

import odeformer
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig
from odeformer.positions import LAYOUTS, POSITIONS, SCALINGS, Rotary, RotaryPosition, apply_rope
from odeformer.rope import Frequencies, Rope

VOCAB, LENGTH = 17, 12


# θ of pair i, in plain Python: base b, d coordinates, factor s, training length n

def by_parts(b, d, i, s, n, kept):
    theta = b ** (-2 * i / d)
    return kept * theta + (1 - kept) * theta / s


def printed_share(b, d, i, n, slow=1, fast=32):
    """1 - γ(r) of Peng et al. 2023 is 0 where pair i turns less than slow times over n positions, 1 above fast."""
    r = n / (2 * math.pi * b ** (2 * i / d))
    return min(1, max(0, (r - slow) / (fast - slow)))


def released_share(b, d, i, n, slow=1, fast=32):
    """The share in YaRN's released code: a ramp over i between two pairs, which are rounded outwards."""
    low = max(math.floor(d * math.log(n / (fast * 2 * math.pi)) / (2 * math.log(b))), 0)
    high = min(math.ceil(d * math.log(n / (slow * 2 * math.pi)) / (2 * math.log(b))), d - 1)
    return 1 - min(1, max(0, (i - low) / (high - low)))


THETA = {
    "none": lambda b, d, i, s, n: b ** (-2 * i / d),
    "linear": lambda b, d, i, s, n: b ** (-2 * i / d) / s,
    "ntk": lambda b, d, i, s, n: (b * s ** (d / (d - 2))) ** (-2 * i / d),
    "ntk_by_parts": lambda b, d, i, s, n: by_parts(b, d, i, s, n, printed_share(b, d, i, n)),
    "yarn": lambda b, d, i, s, n: by_parts(b, d, i, s, n, released_share(b, d, i, n)),
}
FACTOR, TRAINED = 4.0, 300
SCALE = {"yarn": 0.1 * math.log(FACTOR) + 1}  # of queries and keys; others leave their length alone


def needed(scaling):
    """Values for the options that an entry of SCALINGS has no default for."""
    known = {f.name for f in fields(SCALINGS[scaling])}
    return {name: value for name, value in {"factor": FACTOR, "original_max_len": TRAINED}.items() if name in known}


def turned_by_hand(x, positions, theta, pairs):
    """Each pair of coordinates as a complex number, times exp(1j t θ)."""
    out = x.clone()
    for t, position in enumerate(positions):
        for i, (real, imaginary) in enumerate(pairs):
            number = complex(x[t, real], x[t, imaginary]) * cmath.exp(1j * position * theta[i])
            out[t, real], out[t, imaginary] = number.real, number.imag
    return out


def pairs_of(layout, d):
    return {"half": [(i, i + d // 2) for i in range(d // 2)],
            "interleaved": [(2 * i, 2 * i + 1) for i in range(d // 2)]}[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_multiplies_each_pair_by_exp_of_i_t_theta(scaling, layout):
    d, base = 64, 10000.0
    positions = [0, 1, 2, 17, 299, 4000]
    x = torch.randn(2, 3, len(positions), d, dtype=torch.float64)
    frequencies = SCALINGS[scaling](**needed(scaling))
    got = apply_rope(x, torch.tensor(positions), layout=layout, frequencies=frequencies)
    theta = [THETA[scaling](base, d, i, FACTOR, TRAINED) for i in range(d // 2)]
    for batch in range(2):
        for head in range(3):
            wanted = turned_by_hand(x[batch, head], positions, theta, pairs_of(layout, d)) * SCALE.get(scaling, 1)
            assert (got[batch, head] - wanted).abs().max() < 1e-11  # 4000 θ in float64 is good to 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scores_of_turned_queries_and_keys_depend_on_j_minus_i_alone(scaling, layout):
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64)
    frequencies = SCALINGS[scaling](**needed(scaling))

    def score(i, j):
        a, b = (apply_rope(x, torch.tensor([t]), layout=layout, frequencies=frequencies) for x, t in ((q, i), (k, j)))
        return (a * b).sum()

    for i, j in ((0, 5), (3, 3), (40, 2)):
        for shift in (1, 1000):
            assert abs(score(i, j) - score(i + shift, j + shift)) < 1e-11
    assert abs(score(0, 5) - score(0, 9)) > 1e-3


def test_both_layouts_are_one_up_to_a_permutation_of_coordinates():
    x, t = torch.randn(2, 7, 10, dtype=torch.float64), torch.arange(7)
    order = torch.arange(10).view(5, 2).T.flatten()  # 0 2 4 6 8 1 3 5 7 9
    interleaved = apply_rope(x, t, layout="interleaved")
    assert torch.equal(interleaved[..., order], apply_rope(x[..., order], t, layout="half"))


def test_turning_keeps_lengths_and_position_zero_turns_nothing():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    assert torch.equal(apply_rope(x, torch.zeros(5)), x)
    assert (apply_rope(x, torch.arange(5)).norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-14


def test_positions_may_differ_in_each_row_and_lie_between_whole_numbers():
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    positions = torch.tensor([[0.0, 1.0, 2.0, 3.0], [7.5, 8.5, 9.5, 10.5]])
    got = apply_rope(x, positions)
    assert torch.equal(got[0], apply_rope(x[0], positions[0]))
    assert torch.equal(got[1], apply_rope(x[1], positions[1]))
    flat = torch.randn(2, 4, 8)
    assert torch.equal(apply_rope(flat, positions)[1], apply_rope(flat[1], positions[1]))


def test_linear_scaling_is_plain_rope_at_positions_divided_by_the_factor():
    x, t = torch.randn(6, 16, dtype=torch.float64), torch.arange(6)
    got = apply_rope(x, t, frequencies=SCALINGS["linear"](factor=2.5))
    assert (got - apply_rope(x, t.double() / 2.5)).abs().max() < 1e-14


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    plain, scaled = Frequencies()(64), SCALINGS["ntk"](factor=8)(64)
    assert scaled[0] == plain[0] == 1
    assert abs(plain[-1] / scaled[-1] - 8) < 1e-12


@pytest.mark.parametrize("scaling", ["ntk_by_parts", "yarn"])
def test_parts_keep_fast_pairs_and_divide_slow_ones_by_the_factor(scaling):
    plain, scaled = Frequencies()(128), SCALINGS[scaling](factor=16, original_max_len=4096)(128)
    turns = 4096 * plain / (2 * math.pi)
    ratio = plain / scaled
    assert torch.equal(ratio[turns > 40], torch.ones_like(ratio[turns > 40]))
    assert (ratio[turns < 0.9] - 16).abs().max() < 1e-12
    assert (ratio.diff() >= -1e-12).all() and ((ratio > 1.01) & (ratio < 15.9)).sum() > 5


def test_yarn_blends_pairs_20_to_46_of_llama_2():
    """d = 128, base 10000, 4096 positions: 64 ln(4096 / 64π) / ln 10000 = 20.9, 64 ln(4096 / 2π) / ln 10000 = 45.03."""
    kept = SCALINGS["yarn"](factor=32, original_max_len=4096).kept(128, None)
    assert torch.equal(kept[:21], torch.ones(21, dtype=torch.float64))
    assert torch.equal(kept[46:], torch.zeros(18, dtype=torch.float64))
    assert (kept[20:47].diff() + 1 / 26).abs().max() < 1e-14


def test_yarn_of_a_length_that_no_pair_turns_in_divides_all_but_the_first():
    kept = SCALINGS["yarn"](factor=2, original_max_len=3).kept(8, None)
    assert torch.equal(kept, torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))


def test_by_parts_from_1_to_4_turns_is_the_scaling_of_llama_3_1():
    """As published with Llama 3.1: by wavelength, with low_freq_factor 1, high_freq_factor 4, 8192 positions."""
    base, d, factor, length = 500000.0, 128, 8, 8192
    got = SCALINGS["ntk_by_parts"](base=base, factor=factor, original_max_len=length, beta_slow=1, beta_fast=4)(d)
    for i in range(d // 2):
        theta = base ** (-2 * i / d)
        wavelength = 2 * math.pi / theta
        if wavelength < length / 4:
            wanted = theta
        elif wavelength > length / 1:
            wanted = theta / factor
        else:
            smooth = (length / wavelength - 1) / (4 - 1)
            wanted = (1 - smooth) * theta / factor + smooth * theta
        assert abs(got[i] - wanted) < 1e-14


@pytest.mark.parametrize(("ours", "theirs", "options"), [
    ("linear", "linear", {}), ("yarn", "yarn", {"beta_fast": 16.0, "beta_slow": 2.0}), ("yarn", "yarn", {}),
    ("ntk_by_parts", "llama3", {"beta_fast": 4.0})])
def test_frequencies_are_those_of_hugging_face_where_it_is_installed(ours, theirs, options):
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = {"rope_type": theirs, "rope_theta": 5000.0, "factor": FACTOR, "original_max_position_embeddings": TRAINED,
               **options}
    if theirs == "llama3":
        scaling |= {"high_freq_factor": scaling.pop("beta_fast"), "low_freq_factor": 1.0}
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, rope_theta=5000.0, rope_scaling=scaling,
                                      max_position_embeddings=int(FACTOR * TRAINED))
    wanted, scale = rope_utils.ROPE_INIT_FUNCTIONS[theirs](config, torch.device("cpu"))
    frequencies = SCALINGS[ours](base=5000.0, **needed(ours) | options)
    assert (frequencies(64) / wanted.double() - 1).abs().max() < 1e-5  # theirs is float32
    assert abs(frequencies.scale - scale) < 1e-12


def test_both_layouts_are_those_of_llama_and_gpt_j_in_hugging_face_where_it_is_installed():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    x, t = torch.randn(2, 3, 5, 16, dtype=torch.float64), torch.arange(5)
    angle = t[None, :, None] * Frequencies()(16)
    wanted, _ = llama.apply_rotary_pos_emb(x, x, angle.repeat(1, 1, 2).cos(), angle.repeat(1, 1, 2).sin())
    assert (apply_rope(x, t, layout="half") - wanted).abs().max() < 1e-14
    wanted = gptj.apply_rotary_pos_emb(x.transpose(1, 2), angle.sin(), angle.cos()).transpose(1, 2)
    assert (apply_rope(x, t, layout="interleaved") - wanted).abs().max() < 1e-14


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_fraction_turns_the_first_coordinates_as_a_smaller_head(scaling, layout):
    x, t = torch.randn(2, 3, 6, 32, dtype=torch.float64), torch.arange(6)
    frequencies = SCALINGS[scaling](**needed(scaling))
    got = apply_rope(x, t, layout=layout, fraction=0.25, frequencies=frequencies)
    assert torch.equal(got[..., :8], apply_rope(x[..., :8], t, layout=layout, frequencies=frequencies))
    assert torch.equal(got[..., 8:], x[..., 8:] * SCALE.get(scaling, 1))  # YaRN's temperature is of the whole score


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_attention_with_rope_is_the_plain_formula_in_float64(layout):
    attention = odeformer.ATTENTION["softmax"](16, 2).double()
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    position = RotaryPosition(7, 16, layout=layout, base=100.0)
    got = attention(x, causal=True, rotary=position.rotary(7, 8, x.device, x.dtype))
    theta = [100.0 ** (-2 * i / 8) for i in range(4)]
    q, k, v = (part(x).view(3, 7, 2, 8) for part in (attention.query, attention.key, attention.value))
    y = torch.zeros(3, 7, 2, 8, dtype=torch.float64)
    for b in range(3):
        for h in range(2):
            rows = [turned_by_hand(part[b, :, h].detach(), range(7), theta, pairs_of(layout, 8)) for part in (q, k)]
            scores = rows[0] @ rows[1].T / math.sqrt(8)
            scores = scores + torch.full((7, 7), -math.inf, dtype=torch.float64).triu(1)
            y[b, :, h] = scores.softmax(-1) @ v[b, :, h]
    assert (got - attention.output(y.flatten(2))).abs().max() < 1e-12


def test_queries_are_the_last_of_the_positions():
    attention = odeformer.ATTENTION["softmax"](16, 2).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    rotary = RotaryPosition(9, 16).rotary(9, 8, x.device, x.dtype)
    whole = attention(x, causal=True, rotary=rotary)
    assert (attention(x[:, 6:], x, causal=True, rotary=rotary) - whole[:, 6:]).abs().max() < 1e-13
    with pytest.raises(ValueError, match="at most as many tokens as there are positions, 9; got 10"):
        rotary.turn(torch.randn(1, 2, 10, 8))


def test_tables_are_float32_or_finer_whatever_the_precision_around_them():
    wanted = torch.arange(5000.0, dtype=torch.float64)[:, None] * 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    position = RotaryPosition(5000, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        inside = position.rotary(5000, 64, torch.device("cpu"), torch.bfloat16)
    for rotary in (inside, position.rotary(5000, 64, torch.device("cpu"), torch.float16)):
        assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
        assert (rotary.cos - wanted.cos()).abs().max() < 1e-7 and (rotary.sin - wanted.sin()).abs().max() < 1e-7
    fine = position.rotary(5000, 64, torch.device("cpu"), torch.float64)
    assert torch.equal(fine.cos, wanted.cos()) and torch.equal(fine.sin, wanted.sin())
    coarse = (torch.arange(5000.0).bfloat16()[:, None] * 10000.0 ** -(torch.arange(0, 64, 2) / 64).bfloat16()).cos()
    assert (coarse - wanted.cos()).abs().max() > 1.9  # what is avoided here


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11),
                                                  (torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_turned_states_are_as_exact_as_their_dtype(layout, dtype, tolerance):
    x, t = torch.randn(2, 64, 32).to(dtype), torch.arange(3000, 3064)
    got, wanted = apply_rope(x, t, layout=layout), apply_rope(x.double(), t, layout=layout)
    assert got.dtype == dtype
    assert (got.double() - wanted).abs().max() < tolerance * wanted.abs().max()


def test_rope_is_differentiable_and_survives_vmap_jvp_and_compile():
    x, t = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.arange(5)
    frequencies = SCALINGS["yarn"](**needed("yarn"))

    def turn(x):
        return apply_rope(x, t, frequencies=frequencies)

    assert torch.autograd.gradcheck(turn, x.clone().requires_grad_())
    assert (torch.func.vmap(turn)(x) - turn(x)).abs().max() < 1e-15
    direction = torch.randn_like(x)
    assert (torch.func.jvp(turn, (x,), (direction,))[1] - turn(direction)).abs().max() < 1e-14  # it is linear
    assert torch.equal(torch.compile(turn, fullgraph=True, backend="eager")(x), turn(x))


def wrong(call, error, *words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_wrong_options_are_refused_when_the_entry_is_made():
    def rope(**options):
        return lambda: RotaryPosition(LENGTH, 16, **options)

    wrong(rope(layout="halves"), ValueError, "layout", "halves", "interleaved")
    wrong(rope(scaling="ntk2"), ValueError, "scaling", "ntk2", "yarn")
    for base in (0, -1.0, 1, math.nan, math.inf, "10000", True):
        wrong(rope(base=base), ValueError, "base", "above 1", repr(base))
    for scaling in set(SCALINGS) - {"none"}:
        wrong(rope(scaling=scaling, original_max_len=8) if "original_max_len" in needed(scaling) else
              rope(scaling=scaling), ValueError, "factor", "None")
        for factor in (0.5, -2.0, math.nan):
            wrong(lambda s=scaling, f=factor: SCALINGS[s](**needed(s) | {"factor": f}), ValueError, "factor",
                  repr(factor))
    wrong(rope(factor=2.0), ValueError, "factor", "none", "known: base")
    wrong(rope(scaling="linear", factor=2.0, original_max_len=8), ValueError, "original_max_len", "linear", "factor")
    for scaling in ("ntk_by_parts", "yarn"):
        wrong(rope(scaling=scaling, factor=2.0), ValueError, "original_max_len")
        wrong(rope(scaling=scaling, factor=2.0, original_max_len=0), ValueError, "original_max_len", "0")
        wrong(rope(scaling=scaling, factor=2.0, original_max_len=8.5), TypeError, "original_max_len", "8.5")
        wrong(rope(scaling=scaling, factor=2.0, original_max_len=8, beta_slow=0), ValueError, "beta_slow", "0")
        wrong(rope(scaling=scaling, factor=2.0, original_max_len=8, beta_fast=1), ValueError, "beta_fast", "1")
    for fraction in (0, -0.5, 1.5, math.nan):
        wrong(rope(fraction=fraction), ValueError, "fraction", repr(fraction))
    wrong(lambda: BlockConfig(6, 2, position="rope"), ValueError, "head_dim", "3")


def test_heads_that_cannot_be_turned_are_refused():
    wrong(lambda: RotaryPosition(LENGTH, 16, fraction=0.2).check(8), ValueError, "fraction = 0.2", "head_dim = 8")
    wrong(lambda: RotaryPosition(LENGTH, 16, fraction=0.4).check(8), ValueError, "3 coordinates")
    wrong(lambda: RotaryPosition(LENGTH, 16).check(7), ValueError, "head_dim = 7")
    wrong(lambda: RotaryPosition(LENGTH, 16, scaling="ntk", factor=2).check(2), ValueError, "ntk", "at least 4")
    wrong(lambda: tiny(Encoder, "rope", {"fraction": 0.4})(tokens()), ValueError, "fraction = 0.4", "head_dim = 8")
    for name in POSITIONS:
        POSITIONS[name](LENGTH, 16).check(8)
    RotaryPosition(LENGTH, 16, fraction=0.25).check(8)


def test_wrong_inputs_of_apply_rope_are_named():
    x = torch.randn(2, 5, 8)
    wrong(lambda: apply_rope(x.long(), torch.arange(5)), TypeError, "x", "int64")
    wrong(lambda: apply_rope(x, torch.arange(4)), ValueError, "positions", "(5,) or (2, 5)", "(4,)")
    wrong(lambda: apply_rope(x[0], torch.zeros(2, 5)), ValueError, "positions", "(5,)", "(2, 5)")
    wrong(lambda: apply_rope(x[..., :7], torch.arange(5)), ValueError, "head_dim = 7")
    wrong(lambda: apply_rope(x, torch.arange(5), layout="whole"), ValueError, "layout", "whole")


@pytest.mark.parametrize("d_model", [8, 7])
def test_sinusoids_are_vaswanis_formula_and_follow_the_model(d_model):
    position = POSITIONS["sinusoidal"](50, d_model)
    for dtype, tolerance in ((torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 4e-3)):
        table = position.to(dtype)(31)
        assert table.shape == (31, d_model) and table.dtype == dtype and not table.requires_grad
        for t in (0, 1, 30):
            for c in range(d_model):
                angle = t / 10000 ** (2 * (c // 2) / d_model)
                wanted = math.cos(angle) if c % 2 else math.sin(angle)
                assert abs(table[t, c] - wanted) <= tolerance


def test_learned_positions_are_rows_of_a_trained_table():
    position = POSITIONS["learned"](LENGTH, 8)
    assert position.table.shape == (LENGTH, 8)
    weight = torch.randn(5, 8)
    (position(5) * weight).sum().backward()
    assert torch.equal(position.table.grad[:5], weight)
    assert torch.equal(position.table.grad[5:], torch.zeros(LENGTH - 5, 8))
    assert position.table.std() < 3 * 8**-0.5


# whole models

ROPES = [{"layout": layout, "scaling": scaling, "base": 500.0, **needed(scaling)}
         for layout in LAYOUTS for scaling in SCALINGS] + [
             {"fraction": 0.5}, {"scaling": "yarn", "fraction": 0.5, "beta_fast": 4.0, "beta_slow": 0.5,
                                 **needed("yarn")}]
KINDS = [(name, {}) for name in POSITIONS if name != "rope"] + [("rope", options) for options in ROPES]
NAMES = [" ".join([name, *(str(value) for value in options.values())]) for name, options in KINDS]
every_kind = pytest.mark.parametrize(("name", "options"), KINDS, ids=NAMES)


def tiny(kind, name, options, n_layers=2, **depth):
    config = DecoderConfig if kind is Decoder else EncoderConfig
    block = BlockConfig(16, 2, position=name, position_options=options)
    return kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, block=block,
                       depth=DepthConfig(**depth))).double().eval()


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


@pytest.mark.parametrize("options", ROPES, ids=str)
@pytest.mark.parametrize("solver", ["euler", "rk4"])
def test_left_padding_moves_nothing_where_only_differences_of_positions_are_seen(options, solver):
    model = tiny(Decoder, "rope", options, solver=solver)
    ids, pad = tokens(length=7), 5
    padded = torch.cat([tokens(length=pad), ids], 1)
    mask = torch.arange(LENGTH).expand(2, -1) >= pad
    assert (model(padded, mask)[:, pad:] - model(ids)).abs().max() < 1e-10


@every_kind
def test_the_order_of_tokens_is_seen_unless_there_are_no_positions(name, options):
    model = tiny(Encoder, name, options)
    ids, order = tokens(), torch.randperm(LENGTH)
    moved = (model(ids[:, order]) - model(ids)[:, order]).abs().max()
    assert moved < 1e-12 if name == "none" else moved > 1e-3


@every_kind
def test_every_option_is_saved_and_loaded_with_equal_outputs(name, options, tmp_path):
    model = tiny(Decoder, name, options)
    ids = tokens()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model.to(dtype).save(tmp_path)
        again = odeformer.load(tmp_path)
        assert again.config == model.config
        assert torch.equal(again(ids), model(ids))


@every_kind
def test_every_parameter_gets_a_finite_gradient(name, options):
    model = tiny(Decoder, name, options, solver="midpoint")
    (model(tokens()) * torch.randn(VOCAB, dtype=torch.float64)).sum().backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), key
        if ".key.bias" not in key:  # a constant added to all scores of a query, without RoPE
            assert p.grad.abs().max() > 0, key


@every_kind
def test_bfloat16_autocast_stays_within_two_percent(name, options):
    model = tiny(Decoder, name, options).float()
    ids = tokens()
    wanted = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(ids)
    assert (got.float() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("name", POSITIONS)
def test_models_with_every_kind_of_position_compile_to_one_graph(name):
    model = tiny(Encoder, name, {}, n_layers=1)
    ids = tokens()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ids), model(ids))


def test_the_base_and_every_other_option_change_what_a_model_computes():
    ids = tokens()
    torch.manual_seed(1)
    plain = tiny(Encoder, "rope", {})
    yarn = {"base": 100.0, "scaling": "yarn", "factor": 2.0, "original_max_len": 640}
    changes = [{"base": 100.0}, {"layout": "interleaved"}, {"fraction": 0.5}, {"scaling": "linear", "factor": 2.0},
               {"scaling": "ntk", "factor": 2.0}, yarn, yarn | {"factor": 3.0}, yarn | {"original_max_len": 64},
               yarn | {"beta_fast": 4.0}, yarn | {"beta_slow": 0.01}, yarn | {"scaling": "ntk_by_parts"}]
    outputs = [plain(ids)]
    for options in changes:
        model = tiny(Encoder, "rope", options)
        model.load_state_dict(plain.state_dict())
        outputs.append(model(ids))
    for i, a in enumerate(outputs):
        for b in outputs[:i]:
            assert (a - b).abs().max() > 1e-6


def test_an_own_class_works_as_a_position_a_scaling_and_a_layout():
    class Reversed(Frequencies):
        def __call__(self, d, device=None):
            return super().__call__(d, device).flip(0)

    class Backwards(odeformer.positions.LAYOUTS["half"]):
        @staticmethod
        def split(x):
            return x.chunk(2, -1)[::-1]

    class Ones(POSITIONS["none"]):
        def forward(self, n_tokens):
            return 1.0

    assert tiny(Encoder, "rope", {"scaling": Reversed, "layout": Backwards})(tokens()).isfinite().all()
    assert tiny(Encoder, Ones, {})(tokens()).isfinite().all()
    x = torch.randn(3, 8, dtype=torch.float64)
    rotary = Rope(frequencies=Frequencies(), layout="half").tables(torch.arange(3), 8, torch.float64)
    assert isinstance(rotary, Rotary) and torch.equal(rotary.turn(x), apply_rope(x, torch.arange(3)))


def test_positions_without_tables_have_no_parameters_and_no_files_of_their_own():
    for name in ("none", "rope"):
        position = POSITIONS[name](LENGTH, 16)
        assert isinstance(position, nn.Module) and not list(position.state_dict())
