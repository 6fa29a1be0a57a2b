"""Every attention variant against plain loops (tests/attention_reference.py), and what all of them promise."""

import inspect

import pytest
import torch
from attention_reference import CROSS, D_MODEL, F64, N_HEADS, SELF, VARIANTS, make, options_of, plain
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from odeformer.attention import ATTENTION, base
from odeformer.attention.base import BLOCK
from odeformer.positions import RotaryPosition

N, M = 6, 9
each_variant = pytest.mark.parametrize("label", VARIANTS)
each_self = pytest.mark.parametrize("label", SELF)
each_name = pytest.mark.parametrize("name", ATTENTION)


def states(n=N, dtype=F64, batch=2):
    return torch.randn(batch, n, D_MODEL, dtype=dtype)


def source(label, dtype=F64, m=M):
    """A memory for the variants that need one."""
    return states(m, dtype) if label in CROSS else None


def padding(n=N):
    """The first row has two tokens of padding at its end, the second one at its start."""
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[0, -2:] = mask[1, 0] = False
    return mask


def close(a, b, tolerance=1e-10):
    assert a.shape == b.shape
    assert torch.isfinite(a).all()
    assert (a - b).abs().max() < tolerance, (a - b).abs().max()


def gradients(attention, y, *inputs):
    attention.zero_grad()
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weight).sum(), [*inputs, *attention.parameters()], materialize_grads=True)


def test_every_entry_of_the_table_is_among_the_variants():
    assert {name for name, _ in VARIANTS.values()} == set(ATTENTION)


@each_variant
@pytest.mark.parametrize("dtype, tolerance", [(F64, 1e-10), (torch.float32, 1e-5)])
def test_eqs_1_to_12_the_call_equals_plain_loops(label, dtype, tolerance):
    attention = make(label, dtype)
    x, memory = states(dtype=dtype), source(label, dtype)
    m = M if label in CROSS else N
    rows = torch.rand(2, N, m) < 0.6
    rows[0, 1] = False
    for mask in (None, padding(m), rows):
        for causal in ((False,) if label in CROSS else (False, True)):
            y = attention(x, memory, mask=mask, causal=causal)
            close(y, plain(label, attention, x, memory, mask, causal), tolerance)


@each_self
def test_self_attention_variants_read_a_memory_too(label):
    if "window" in options_of(label):
        with pytest.raises(ValueError, match="window is for self-attention"):
            make(label)(states(), states(M))
        return
    attention, x, memory = make(label), states(), states(M)
    close(attention(x, memory, mask=padding(M)), plain(label, attention, x, memory, padding(M)))


@each_variant
def test_probabilities_sum_to_one_over_what_may_be_seen(label):
    attention, x, memory = make(label), states(), source(label)
    mask = padding(M if label in CROSS else N)
    mask[1] = False
    p = attention.probabilities(x, memory, mask=mask)
    assert p.shape == (2, N_HEADS, N, mask.shape[1])
    some = p[0].sum(-1) if "window" not in options_of(label) else p[0].sum(-1)[:, :4]  # the last may see padding only
    assert (some - 1).abs().max() < 1e-12
    assert not p[0][..., ~mask[0]].any() and not p[1].any()
    if label in CROSS or getattr(attention, "value_table", None) is not None:
        return
    value = attention.pairs(x, memory, mask=mask).value
    close(attention(x, memory, mask=mask), attention.output((p @ value).transpose(1, 2).flatten(2)), 1e-12)


@each_variant
def test_nan_in_padding_changes_nothing_that_counts(label):
    attention, x, memory = make(label), states(), source(label)
    mask = padding(N if memory is None else M)
    counts = mask if memory is None else torch.ones(2, N, dtype=torch.bool)
    results = []
    for value in (0.0, float("nan"), float("inf")):
        spoilt = (x if memory is None else memory).masked_fill(~mask[..., None], value).requires_grad_()
        y = attention(spoilt, mask=mask) if memory is None else attention(x, spoilt, mask=mask)
        assert torch.isfinite(y).all()
        results.append((y[counts], *gradients(attention, y[counts], spoilt)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@each_self
def test_nan_in_a_token_that_no_query_may_see_changes_nothing_that_counts(label):
    attention, x = make(label), states()
    mask = torch.rand(2, N, N) < 0.7
    mask[..., 2] = False
    spoilt = x.clone()
    spoilt[:, 2] = float("nan")
    others = [0, 1, 3, 4, 5]
    assert torch.equal(attention(spoilt, mask=mask)[:, others], attention(x, mask=mask)[:, others])


@each_variant
def test_rows_that_may_see_nothing_give_zero_and_finite_gradients(label):
    attention, x, memory = make(label), states().requires_grad_(), source(label)
    m = N if memory is None else M
    whole = torch.ones(2, m, dtype=torch.bool)
    whole[1] = False
    some = torch.ones(2, N, m, dtype=torch.bool)
    some[1] = some[0, 3] = False
    for mask, blind in ((whole, [(1, slice(None))]), (some, [(1, slice(None)), (0, 3)])):
        for causal in ((False,) if label in CROSS else (False, True)):
            y = attention(x, memory, mask=mask, causal=causal)
            nothing = 0 if attention.output.bias is None else attention.output.bias
            assert all((y[at] == nothing).all() for at in blind)
            assert all(torch.isfinite(g).all() for g in gradients(attention, y, x))


@each_self
@pytest.mark.parametrize("mask", [None, padding(12)], ids=["whole", "padded"])
def test_causal_means_that_later_tokens_change_nothing(label, mask):
    attention, x = make(label), states(12)
    y = attention(x, mask=mask, causal=True)
    for cut in (1, 5, 11):
        later = torch.cat([x[:, :cut], 30 * torch.randn_like(x[:, cut:])], 1)
        assert torch.equal(attention(later, mask=mask, causal=True)[:, :cut], y[:, :cut])
        part = attention(x[:, :cut], mask=None if mask is None else mask[:, :cut], causal=True)
        close(part, y[:, :cut], 1e-12)


@each_self
def test_the_last_queries_alone_get_what_they_get_among_all(label):
    attention, x, mask = make(label), states(12), padding(12)
    y = attention(x, mask=mask, causal=True)
    for start in (0, 7, 11):
        close(attention(x[:, start:], x, mask=mask, causal=True), y[:, start:], 1e-12)


def test_causal_queries_before_the_first_key_see_nothing():
    attention = make("softmax")
    x = states()
    y = attention(x, x[:, 4:], causal=True)
    assert (y[:, :4] == attention.output.bias).all()
    close(y[:, 4:], attention(x[:, 4:], x[:, 4:], causal=True), 1e-12)


@each_variant
def test_bfloat16_autocast_and_weights_stay_near_float32(label):
    attention, x, memory = make(label, torch.float32), states(24, torch.float32), source(label, torch.float32)
    mask = padding(24 if memory is None else M)
    wanted = attention(x, memory, mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(x, memory, mask=mask)
    assert (y - wanted).abs().max() < 2e-2
    y.float().sum().backward()
    half = attention.bfloat16()
    y = half(x.bfloat16(), None if memory is None else memory.bfloat16(), mask=mask)
    assert y.dtype == torch.bfloat16 and (y - wanted).abs().max() < 4e-2


@pytest.mark.parametrize("label", ["distance", "gaussian", "mixture", "alibi"])
def test_a_key_that_is_far_but_alone_gets_all_the_weight_in_float16(label):
    attention = make(label, torch.float16)
    x = states(800, torch.float16, batch=1)
    mask = torch.zeros(1, 800, dtype=torch.bool)
    mask[0, 0] = True  # −γ G of the last queries is below float16's range
    assert (attention(x, mask=mask) - attention.output(attention.value(x[:, :1]))).abs().max() < 1e-2


@each_variant
def test_every_parameter_gets_a_gradient(label):
    attention = make(label)
    y = attention(states(), source(label), mask=padding(M if label in CROSS else N))
    names = [name for name, _ in attention.named_parameters()]
    for name, gradient in zip(names, gradients(attention, y), strict=True):
        assert torch.isfinite(gradient).all()
        if name not in ("key.bias", "key_norm.bias"):  # a shift of all keys may move the scores of a row alike
            assert gradient.abs().max() > 1e-8, name


@pytest.mark.parametrize("n_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_softmax_equals_torch_multihead_attention_with_gradients(n_heads, bias):
    """Scores are scaled by head_dim, not d_model."""
    ours = ATTENTION["softmax"](D_MODEL, n_heads, bias=bias).double()
    theirs = nn.MultiheadAttention(D_MODEL, n_heads, bias=bias, batch_first=True, dtype=F64)
    projections = (ours.query, ours.key, ours.value)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
            theirs.out_proj.bias.copy_(ours.output.bias)
    x, memory = states(), states(M)
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    for arguments, key, options in (({"mask": padding()}, x, {"key_padding_mask": ~padding()}),
                                    ({"causal": True}, x, {"attn_mask": future}),
                                    ({"memory": memory, "mask": padding(M)}, memory,
                                     {"key_padding_mask": ~padding(M)})):
        y, (wanted, _) = ours(x, **arguments), theirs(x, key, key, **options)
        close(y, wanted, 1e-12)
        weight = torch.linspace(-1, 1, y.numel(), dtype=F64).view_as(y)
        ours.zero_grad(), theirs.zero_grad()
        (y * weight).sum().backward(), (wanted * weight).sum().backward()
        close(torch.cat([p.weight.grad for p in projections]), theirs.in_proj_weight.grad)
        close(ours.output.weight.grad, theirs.out_proj.weight.grad)
        if bias:
            close(torch.cat([p.bias.grad for p in projections]), theirs.in_proj_bias.grad)


@each_variant
@pytest.mark.parametrize("n_heads, n_kv_heads", [(2, 1), (4, 2)])
def test_grouped_queries_equal_repeated_heads(label, n_heads, n_kv_heads):
    name, options = VARIANTS[label]
    if "n_kv_heads" not in inspect.signature(ATTENTION[name]).parameters:
        return
    options = {key: value for key, value in options.items() if not isinstance(value, tuple | list)}
    grouped, full = (ATTENTION[name](D_MODEL, n_heads, **{**options, "n_kv_heads": n}).double()
                     for n in (n_kv_heads, n_heads))
    weights = grouped.state_dict()
    for key in ("key.weight", "value.weight", "key.bias", "value.bias"):
        if key in weights:
            heads = weights[key].unflatten(0, (n_kv_heads, -1))
            weights[key] = heads.repeat_interleave(n_heads // n_kv_heads, 0).flatten(0, 1)
    full.load_state_dict(weights)
    x, memory = states(), source(label)
    close(grouped(x, memory), full(x, memory), 1e-12)


def banded(n, window, mask):
    """The mask (batch, n, n) of a window, by its definition."""
    band = torch.tensor([[abs(i - j) < window for j in range(n)] for i in range(n)]).expand(2, n, n)
    return band if mask is None else band & mask[:, None]


@each_self
@pytest.mark.parametrize("causal", [False, True])
def test_windows_in_blocks_equal_masks(label, causal, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", 4)
    name, options = VARIANTS[label]
    full = name if name != "window" else "softmax"
    options = {key: value for key, value in options.items() if key != "window"}
    direct = ATTENTION[full](D_MODEL, N_HEADS, **options).double()
    rope = RotaryPosition(64, D_MODEL)
    for window in (1, 3, 6):
        blocked = ATTENTION[name](D_MODEL, N_HEADS, **options, window=window).double()
        blocked.load_state_dict(direct.state_dict())
        for n in (1, window + 4, 17, 24, 29):
            x = states(n)
            for mask in (None, torch.rand(2, n) < 0.7):
                rotary = rope.rotary(n, D_MODEL // N_HEADS, x.device) if n % 2 else None
                wanted = direct(x, mask=banded(n, window, mask), causal=causal, rotary=rotary)
                close(blocked(x, mask=mask, causal=causal, rotary=rotary), wanted, 1e-12)


@pytest.mark.parametrize("n, window", [(BLOCK + 40, 5), (4 * BLOCK, BLOCK), (300, 70), (2 * BLOCK + 1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_in_blocks_of_the_usual_size_equal_masks_with_gradients(n, window, causal):
    direct, blocked = make("gaussian learned"), make("gaussian learned", window=window)
    blocked.load_state_dict(direct.state_dict())
    x, mask = states(n).requires_grad_(), torch.rand(2, n) < 0.8
    wanted, y = direct(x, mask=banded(n, window, mask), causal=causal), blocked(x, mask=mask, causal=causal)
    close(y, wanted, 1e-12)
    for a, b in zip(gradients(blocked, y, x), gradients(direct, wanted, x), strict=True):
        close(a, b)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("tables", ["qkv", "qk", "v"])
def test_eqs_11_12_no_tensor_of_tokens_by_tokens_by_head_dim_is_made(tables):
    n, heads, head_dim = 256, 2, 32
    attention = ATTENTION["relative"](heads * head_dim, heads, max_distance=4, tables=tables)
    with Largest() as largest:
        attention(torch.randn(1, n, heads * head_dim)).sum().backward()
    assert n * n <= largest.elements <= heads * n * n  # of the scores' size, 16 times less than with head_dim


@each_self
def test_a_window_makes_no_tensor_of_tokens_by_tokens(label):
    n, window = 1024, 8
    attention = make(label, torch.float32, window=window)
    with Largest() as largest:
        attention(states(n, torch.float32, batch=1), mask=torch.ones(1, n, dtype=torch.bool)).sum().backward()
    assert largest.elements <= N_HEADS * 2 * n * (BLOCK + 2 * window) < N_HEADS * n * n / 4


@pytest.mark.parametrize("label", ["softmax", "gaussian predicted", "mixture gated", "multiplicative predicted",
                                   "cross predicted", "relative", "l2"])
def test_derivatives_pass_gradcheck(label):
    attention, mask = make(label), padding(4)
    x = states(4)
    parameters = tuple(attention.parameters())
    names = [name for name, _ in attention.named_parameters()]

    def call(x, *values):
        arguments = (x, x if label in CROSS else None)
        return torch.func.functional_call(attention, dict(zip(names, values, strict=True)), arguments, {"mask": mask})

    assert torch.autograd.gradcheck(call, (x.requires_grad_(), *parameters), fast_mode=True)


@each_variant
def test_vmap_jvp_and_jacrev_survive(label):
    attention, mask = make(label), padding(N)[:1]
    x, v = states(batch=1), states(batch=1)

    def call(x):
        return attention(x, x if label in CROSS else None, mask=mask)

    y = call(x)
    value, forward = torch.func.jvp(call, (x,), (v,))
    close(value, y, 1e-12)
    h = 1e-5
    close(forward, (call(x + h * v) - call(x - h * v)) / (2 * h), 1e-8)
    both = torch.stack([x, v])
    close(torch.func.vmap(call)(both), torch.stack([y, call(v)]), 1e-12)
    jacobian = torch.func.jacrev(call)(x).flatten(3)
    close(jacobian @ v.flatten(), forward, 1e-11)


@each_name
def test_compiles_to_one_graph(name):
    label = next(label for label, (known, _) in VARIANTS.items() if known == name)
    attention, x, memory = make(label), states(), source(label)
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    arguments = {"mask": padding(N if memory is None else M), "causal": memory is None}
    close(compiled(x, memory, **arguments), attention(x, memory, **arguments), 1e-12)


def test_a_window_in_blocks_compiles_to_one_graph():
    attention, x = make("gaussian in a window"), states(BLOCK + 9)
    torch.compiler.reset()
    close(torch.compile(attention, fullgraph=True, backend="eager")(x), attention(x), 1e-12)


@each_variant
def test_masks_that_are_not_bool_or_do_not_fit_are_refused(label):
    attention, x, memory = make(label), states(), source(label)
    m = N if memory is None else M
    for mask in (torch.ones(2, m), torch.ones(2, m, dtype=torch.int64), [[True] * m] * 2):
        with pytest.raises(TypeError, match="mask must be a bool tensor"):
            attention(x, memory, mask=mask)
    for shape in ((2, m + 1), (2, m - 1), (1, m), (m,), (2, N + 1, m), (2, N_HEADS, N, m)):
        with pytest.raises(ValueError, match=r"mask must have the shape .*got"):
            attention(x, memory, mask=torch.ones(shape, dtype=torch.bool))
