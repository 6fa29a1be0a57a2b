"""What the attention variants of eqs. 1-12 add: priors, their parameters, tables, Lipschitz bounds."""

import inspect
import math

import pytest
import torch
from attention_reference import D_MODEL, F64, VARIANTS
from torch import nn

import odeformer
from odeformer import BlockConfig
from odeformer.attention import ATTENTION
from odeformer.attention.alibi import slopes
from odeformer.attention.head_parameter import MODES, RANGES, head_parameter
from odeformer.attention.l2 import inverse_phi
from odeformer.tables import build


def blank(name, n_heads=2, **options):
    """Scores of 0, so that the prior alone decides."""
    attention = ATTENTION[name](D_MODEL, n_heads, **options).double()
    for linear in (attention.query, attention.key):
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
    return attention


def shares(*scores):
    total = sum(math.exp(s) for s in scores)
    return torch.tensor([math.exp(s) / total for s in scores], dtype=F64)


def x_of(n, batch=1):
    return torch.randn(batch, n, D_MODEL, dtype=F64)


def wrong(call, error, *words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_eqs_1_2_without_scores_weights_fall_by_exp_of_minus_gamma_a_token():
    p = blank("local_distance", gamma=(0.5, 2.0)).probabilities(x_of(4))
    assert (p[0, 0, 1] - shares(-0.5, 0, -0.5, -1.0)).abs().max() < 1e-12
    assert (p[0, 1, 0] - shares(0, -2, -4, -6)).abs().max() < 1e-12


def test_eq_3_without_scores_weights_are_a_gaussian():
    p = blank("local_gaussian", sigma=2.0, gamma=3.0).probabilities(x_of(4))
    assert (p[0, 1, 1] - shares(-3 / 8, 0, -3 / 8, -12 / 8)).abs().max() < 1e-12


def test_eqs_4_5_the_center_follows_the_ratio_of_the_lengths_without_padding_and_stays_in_the_source():
    attention = blank("cross_gaussian", center_mode="ratio", sigma=0.5)
    x, memory = x_of(4, 3), x_of(8, 3)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, 4:] = mask[2, :4] = False
    p = attention.probabilities(x, memory, mask=mask)[:, 0]
    assert p[0].argmax(-1).tolist() == [0, 2, 4, 6]  # 8 / 4 tokens of the source for each query
    assert p[1].argmax(-1).tolist() == [0, 1, 2, 3]  # 4 / 4
    assert p[2].argmax(-1).tolist() == [4, 5, 6, 7]  # padding on the left does not count
    assert (p[1][..., :4] - p[2][..., 4:]).abs().max() < 1e-15
    assert (p[0, 1] - shares(*(-((2 - j) ** 2) / 0.5 for j in range(8)))).abs().max() < 1e-12
    far = blank("cross_gaussian", center_mode="ratio", ratio=5, sigma=0.5).probabilities(x, memory, mask=mask)[:, 0]
    assert far[0].argmax(-1).tolist() == [0, 5, 7, 7] and far[1].argmax(-1).tolist() == [0, 3, 3, 3]


def test_eq_5_a_predicted_center_is_a_share_of_each_samples_source():
    attention = blank("cross_gaussian", sigma=0.5, gamma=1.0)  # a network on q = 0 gives w tanh(b)
    network = attention.center.network
    nn.init.zeros_(network.hidden.bias)
    memory, mask = x_of(9, 2), torch.arange(9).expand(2, -1) < torch.tensor([[9], [5]])
    p = attention.probabilities(x_of(3, 2), memory, mask=mask)[:, 0, 0]
    for row, length in zip(p, (9, 5), strict=True):
        wanted = shares(*(-((length / 2 - j) ** 2) / 0.5 for j in range(length)))
        assert (row[:length] - wanted).abs().max() < 1e-12


def test_eqs_4_5_queries_in_parts_stand_where_first_says_and_need_a_given_ratio():
    attention = ATTENTION["cross_gaussian"](D_MODEL, 2, center_mode="ratio", ratio=0.7).double()
    x, memory = x_of(6), x_of(5)
    assert not attention.reads_target_length
    assert (attention(x[:, 4:], memory, first=4) - attention(x, memory)[:, 4:]).abs().max() < 1e-12
    whole = ATTENTION["cross_gaussian"](D_MODEL, 2, center_mode="ratio").double()
    assert whole.reads_target_length
    wrong(lambda: whole(x[:, 4:], memory, first=4), ValueError, "ratio must be a number", "begin at 0")
    assert not ATTENTION["cross_gaussian"](D_MODEL, 2).reads_target_length


def test_eqs_4_5_without_a_source_or_with_causal_the_cross_prior_refuses():
    attention = ATTENTION["cross_gaussian"](D_MODEL, 2)
    x = torch.randn(1, 3, D_MODEL)
    wrong(lambda: attention(x), ValueError, "memory", "None")
    wrong(lambda: attention(x, x, causal=True), ValueError, "causal", "True")
    wrong(lambda: BlockConfig(D_MODEL, 2, attention="cross_gaussian"), ValueError, "cross_gaussian", "memory")


def test_eq_6_beta_0_is_softmax_and_beta_1_the_prior_alone():
    x = x_of(5)
    mixed = ATTENTION["local_mixture"](D_MODEL, 2, beta=(0, 1), sigma=1.0).double()
    plain = ATTENTION["softmax"](D_MODEL, 2).double()
    plain.load_state_dict(mixed.state_dict(), strict=False)
    p = mixed.probabilities(x)
    assert (p[:, 0] - plain.probabilities(x)[:, 0]).abs().max() < 1e-15
    assert (p[0, 1, 2] - shares(-2, -0.5, 0, -0.5, -2)).abs().max() < 1e-12


def test_eq_7_a_factor_of_zero_leaves_a_score_of_zero_not_a_weight_of_zero():
    attention = ATTENTION["local_multiplicative"](D_MODEL, 2, decay="exponential", gamma=800.0).double()
    x = x_of(4)
    pairs = attention.pairs(x)
    own = (pairs.query * pairs.key).sum(-1) / 2  # sqrt(head_dim) = 2
    wanted = own.exp() / (own.exp() + 3)
    assert (attention.probabilities(x).diagonal(dim1=-2, dim2=-1) - wanted).abs().max() < 1e-12


def test_eq_7_the_normalized_decay_is_one_at_the_query_zero_at_the_farthest_and_blind_to_what_is_hidden():
    attention = ATTENTION["local_multiplicative"](D_MODEL, 2, decay="normalized").double()
    x = x_of(6)
    factor = attention.decay(attention.pairs(x))
    assert torch.equal(factor[1], torch.tensor([0.75, 1, 0.75, 0.5, 0.25, 0], dtype=F64))
    mask = torch.tensor([[True, True, True, True, False, False]])
    assert torch.equal(attention.decay(attention.pairs(x, mask=mask))[0, 0, 1, :4],
                       torch.tensor([0.5, 1, 0.5, 0], dtype=F64))
    short = attention(x[:, :4])
    assert (attention(x, mask=mask)[:, :4] - short).abs().max() < 1e-12
    assert attention.decay(attention.pairs(x, causal=True))[0, 0] == 1  # alone: nearest and farthest at once


@pytest.mark.parametrize("name", ["window", "softmax"])
def test_a_window_of_w_sees_w_tokens_back_and_itself(name):
    p = ATTENTION[name](D_MODEL, 2, window=3).probabilities(torch.randn(1, 8, D_MODEL))[0, 0] > 0
    distance = torch.tensor([[abs(i - j) for j in range(8)] for i in range(8)])
    assert torch.equal(p, distance < 3)


def test_eqs_8_10_row_zero_of_a_table_is_offset_minus_k_and_farther_offsets_are_clipped():
    attention = blank("relative", max_distance=2, tables="v")
    nn.init.zeros_(attention.value.weight), nn.init.zeros_(attention.value.bias)
    with torch.no_grad():
        attention.value_table.copy_(torch.arange(-2.0, 3.0)[:, None].expand(5, 4))
        attention.output.weight.copy_(torch.eye(D_MODEL))
        attention.output.bias.zero_()
    y = attention(x_of(5))[0, :, 0]
    clipped = [[max(-2, min(j - i, 2)) for j in range(5)] for i in range(5)]
    assert (y - torch.tensor(clipped, dtype=F64).mean(1)).abs().max() < 1e-12


def test_eq_10_tables_exist_for_the_letters_given_and_no_others():
    for letters in ("q", "k", "v", "qk", "vq", "qkv"):
        attention = ATTENTION["relative"](D_MODEL, 2, tables=letters, max_distance=3)
        tables = {"q": attention.query_table, "k": attention.key_table, "v": attention.value_table}
        assert {letter for letter, table in tables.items() if table is not None} == set(letters)
        assert all(table.shape == (7, 4) for table in tables.values() if table is not None)


@pytest.mark.parametrize("n_heads, wanted", [
    (1, [2**-8]), (8, [2.0**-h for h in range(1, 9)]),
    (12, [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),  # as published for 12 heads
    (3, [2**-4, 2**-8, 2**-2]),
])
def test_alibi_slopes_are_the_published_ones(n_heads, wanted):
    assert slopes(n_heads) == pytest.approx(wanted, rel=1e-15)


@pytest.mark.parametrize("n_heads", [2, 4])
def test_alibi_is_eqs_1_2_with_gamma_by_head(n_heads):
    alibi = ATTENTION["alibi"](D_MODEL, n_heads).double()
    gamma = [2 ** (-8 * h / n_heads) for h in range(1, n_heads + 1)]
    distance = ATTENTION["local_distance"](D_MODEL, n_heads, gamma=gamma).double()
    distance.load_state_dict(alibi.state_dict())
    x = x_of(7)
    assert torch.equal(alibi(x, causal=True), distance(x, causal=True))
    published = torch.nn.functional.softmax(  # m_h (j - i) for j <= i, Press et al. 2022, section 3
        torch.stack([torch.tensor([[m * (j - i) if j <= i else -math.inf for j in range(7)] for i in range(7)],
                                  dtype=F64) for m in gamma]), -1)
    assert (blank("alibi", n_heads).probabilities(x, causal=True)[0] - published).abs().max() < 1e-12


def test_l2_keys_are_queries_and_no_projection_has_a_bias():
    attention = ATTENTION["l2"](D_MODEL, 2)
    assert attention.key is attention.query
    assert {name for name, _ in attention.named_parameters()} == {"query.weight", "value.weight", "output.weight"}
    assert list(inspect.signature(ATTENTION["l2"]).parameters) == ["d_model", "n_heads", "window"]


def jacobian_norm(attention, x, **arguments):
    jacobian = torch.func.jacrev(lambda x: attention(x, **arguments))(x)
    return torch.linalg.matrix_norm(jacobian.reshape(x.numel(), x.numel()), 2)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
@pytest.mark.parametrize("arguments", [{}, {"causal": True}], ids=["full", "causal"])
def test_l2_jacobians_stay_below_the_bound_at_every_scale_of_the_input(n, arguments):
    """Kim et al. 2021, theorem 3.2; dot-product attention has no such bound (their theorem 3.1)."""
    attention = ATTENTION["l2"](D_MODEL, 2).double()
    bound = attention.lipschitz_bound(n)
    norms = [jacobian_norm(attention, scale * x_of(n), **arguments) for scale in (0.01, 0.3, 1, 3, 10, 100)]
    assert max(norms) < bound
    if n == 1:  # linear: x W^Q W^Q^T W^V W^O / sqrt(head_dim)
        heads = [(w_q.T @ w_q @ w_v.T) / 2 for w_q, w_v in zip(attention.query.weight.split(4),
                                                              attention.value.weight.split(4), strict=True)]
        exact = torch.linalg.matrix_norm(torch.cat(heads, 1) @ attention.output.weight.T, 2)
        assert (norms[2] - exact).abs() < 1e-12


def test_the_l2_bound_is_the_published_formula():
    attention = ATTENTION["l2"](D_MODEL, 2).double()
    for n, inverse in ((1, 0.0), (1 + 2 * math.e**3, 2.0), (1 + math.e**2, 1.0)):  # φ(x) = x exp(x + 1)
        assert inverse_phi(n - 1) == pytest.approx(inverse, abs=1e-12)
    low, high = 0.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.exp(middle + 1) < 6 else (low, middle)
    heads = zip(attention.query.weight.split(4), attention.value.weight.split(4), strict=True)
    norm = lambda w: torch.linalg.svdvals(w)[0]  # noqa: E731
    root = torch.stack([norm(w_q) ** 4 * norm(w_v) ** 2 for w_q, w_v in heads]).sum().sqrt()
    wanted = math.sqrt(7) / 2 * (4 * low + 1) * root * norm(attention.output.weight)
    assert (attention.lipschitz_bound(7) - wanted).abs() < 1e-12 * wanted
    wrong(lambda: attention.lipschitz_bound(0), ValueError, "n_tokens", "at least 1")


def test_dot_product_attention_outgrows_any_bound_where_l2_does_not():
    x = x_of(6)
    torch.manual_seed(3)
    dot, l2 = ATTENTION["softmax"](D_MODEL, 1, bias=False).double(), ATTENTION["l2"](D_MODEL, 1).double()
    x[:, 0] = 0  # their example: a token at 0 sees all others alike, however far apart they are
    grown = [[jacobian_norm(attention, scale * x) for scale in (1, 1000)] for attention in (dot, l2)]
    assert grown[0][1] > 1000 * grown[0][0] and grown[1][1] < 10 * grown[1][0]


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("mode", MODES)
def test_parameters_start_at_the_value_given_and_stay_in_their_range(name, mode):
    source = torch.randn(2, 3, 5, 4)
    values = [0.25, 0.5, 0.9]
    module = head_parameter(name, values, mode, 3, 4)
    if mode == "predicted":
        nn.init.zeros_(module.network.last.weight)
    start = torch.as_tensor(module(source)).expand(2, 3, 5, 1)
    assert (start - torch.tensor(values).view(1, 3, 1, 1)).abs().max() < 1e-6
    if mode == "fixed":
        assert not list(module.parameters())
        return
    low, high, *_ = RANGES[name]
    for raw in (-60.0, 9.0):
        nn.init.constant_(module.raw, raw)
        assert (module(source) > low).all() and (module(source) < high).all()
    assert module(source).dtype == module.bfloat16()(source.bfloat16()).dtype == torch.float32


def test_a_fixed_number_is_exact_in_every_precision():
    for value in (0.3, [0.3, 0.7]):
        attention = blank("local_distance", gamma=value)
        assert (attention.probabilities(x_of(2))[0, 0, 0] - shares(0, -0.3)).abs().max() < 1e-15


def test_predicted_parameters_differ_by_query_and_change_with_the_state():
    module = head_parameter("sigma", 2.0, "predicted", 3, 4)
    sigma = module(torch.randn(2, 3, 5, 4))
    assert sigma.shape == (2, 3, 5, 1) and sigma.flatten().unique().numel() == 30


BAD = [
    ("local_gaussian", {"sigma": 0.0}, ValueError, ("sigma", "(0, inf)", "0.0")),
    ("local_gaussian", {"sigma": (1.0, -2.0)}, ValueError, ("sigma", "-2.0")),
    ("local_gaussian", {"sigma": math.inf}, ValueError, ("sigma", "inf")),
    ("local_gaussian", {"sigma": math.nan}, ValueError, ("sigma", "nan")),
    ("local_gaussian", {"sigma": (1.0, 2.0, 3.0)}, ValueError, ("sigma", "n_heads = 2", "3")),
    ("local_gaussian", {"sigma": "4"}, TypeError, ("sigma", "'4'")),
    ("local_gaussian", {"sigma_mode": "learnt"}, ValueError, ("sigma_mode", "learnt", "learned", "known: fixed")),
    ("local_distance", {"gamma": -0.1}, ValueError, ("gamma", "[0, inf)", "-0.1")),
    ("local_distance", {"gamma": 0.0, "gamma_mode": "learned"}, ValueError, ("gamma", "(0, inf)", "'learned'")),
    ("local_distance", {"gamma": True}, TypeError, ("gamma", "True")),
    ("local_mixture", {"beta": 1.1}, ValueError, ("beta", "[0, 1]", "1.1")),
    ("local_mixture", {"beta": -0.1}, ValueError, ("beta", "-0.1")),
    ("local_mixture", {"beta": 1.0, "beta_mode": "predicted"}, ValueError, ("beta", "(0, 1)", "'predicted'")),
    ("local_mixture", {"prior": "distance", "sigma": 2.0}, ValueError, ("sigma", "distance", "known: gamma")),
    ("local_mixture", {"prior": "gauss"}, ValueError, ("prior", "did you mean 'gaussian'")),
    ("local_multiplicative", {"decay": "exponential", "sigma": 2.0}, ValueError, ("sigma", "exponential")),
    ("local_multiplicative", {"decay": "gaussian", "gamma": 2.0}, ValueError, ("gamma", "gaussian")),
    ("local_multiplicative", {"decay": "normalized", "gamma_mode": "learned"}, ValueError, ("gamma_mode",)),
    ("cross_gaussian", {"ratio": 1.0}, ValueError, ("ratio", "predicted")),
    ("cross_gaussian", {"center_mode": "ratio", "ratio": 0.0}, ValueError, ("ratio", "0.0")),
    ("cross_gaussian", {"sigma": -1}, ValueError, ("sigma", "-1")),
    ("relative", {"max_distance": 0}, ValueError, ("max_distance", "at least 1", "0")),
    ("relative", {"max_distance": 1.5}, TypeError, ("max_distance", "1.5")),
    ("relative", {"tables": ""}, ValueError, ("tables", "qkv")),
    ("relative", {"tables": "qq"}, ValueError, ("tables", "'qq'")),
    ("relative", {"tables": "qx"}, ValueError, ("tables", "'qx'")),
    ("window", {"window": 0}, ValueError, ("window", "at least 1", "0")),
    ("window", {"window": None}, TypeError, ("window", "None")),
    ("softmax", {"window": 0}, ValueError, ("window", "at least 1")),
    ("softmax", {"n_kv_heads": 3}, ValueError, ("n_kv_heads", "3")),
    ("softmax", {"qk_norm": "l2"}, ValueError, ("qk_norm", "rms")),
]


@pytest.mark.parametrize("name, options, error, words", BAD)
def test_impossible_settings_are_refused_at_construction(name, options, error, words):
    wrong(lambda: ATTENTION[name](D_MODEL, 2, **options), error, *words)


@pytest.mark.parametrize("name, option", [
    ("softmax", "gamma"), ("alibi", "gamma"), ("local_distance", "sigma"), ("cross_gaussian", "window"),
    ("l2", "bias"), ("l2", "n_kv_heads"), ("l2", "qk_norm"), ("relative", "sigma"), ("local_gaussian", "sgima"),
])
def test_options_that_a_variant_does_not_have_are_refused_with_the_known_ones(name, option):
    wrong(lambda: build(ATTENTION, name, "attention", D_MODEL, 2, options={option: 1}), ValueError, option, name,
          "known:", "window" if name != "cross_gaussian" else "center_mode")
    with pytest.raises(TypeError, match=option):
        ATTENTION[name](D_MODEL, 2, **{option: 1})


@pytest.mark.parametrize("label", [label for label in VARIANTS if not label.startswith("cross")])
def test_a_model_with_the_variant_is_saved_and_loaded_bit_for_bit(label, tmp_path):
    name, options = VARIANTS[label]
    block = BlockConfig(D_MODEL, 2, attention=name, attention_options=options)
    model = odeformer.Encoder(odeformer.EncoderConfig(vocab_size=7, max_seq_len=9, n_layers=1, block=block)).bfloat16()
    model.save(tmp_path)
    tokens = torch.randint(7, (2, 9))
    assert torch.equal(odeformer.load(tmp_path)(tokens), model.eval()(tokens))


def test_eq_7_the_normalized_decay_of_the_gaussian_prior_falls_with_the_square():
    """(eq. 3 in eq. 7) G = (i - j)^2 / (2 sigma^2) brought to [0, 1] over j: sigma cancels."""
    attention = ATTENTION["local_multiplicative"](D_MODEL, 2, decay="normalized", prior="gaussian")
    x = torch.randn(1, 5, D_MODEL)
    decay = attention.decay(attention.pairs(x))
    i, j = torch.arange(5)[:, None].float(), torch.arange(5).float()
    g = (i - j) ** 2 / (2 * 1.7**2)
    assert (decay - (1 - g / g.amax(1, keepdim=True))).abs().max() < 1e-6
    with pytest.raises(ValueError, match="prior must be one of distance, gaussian"):
        ATTENTION["local_multiplicative"](D_MODEL, 2, decay="normalized", prior="sharp")
