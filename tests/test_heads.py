"""What an encoder is used for: classes, tags, masked words, and series that are sampled irregularly."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import odeformer
from odeformer import (
    HEADS,
    NORMS,
    BlockConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    SeriesConfig,
    SeriesEncoder,
)

F64, NAN = torch.float64, float("nan")
VOCAB, LENGTH = 11, 9


def drawn(module):
    """Every parameter drawn anew, so that heads that start at 0 count; float64."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return module.double().eval()


def encoder(head=None, *, n_outputs=None, head_options=(), depth=(), **block):
    return drawn(Encoder(EncoderConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2, head=head,
                                       n_outputs=n_outputs, head_options=dict(head_options),
                                       block=BlockConfig(8, 2, d_ff=16, **block), depth=DepthConfig(**dict(depth)))))


def series(*, n_channels=2, n_outputs=3, depth=(), position="none", head="regression", **config):
    block = {"position": position, "d_ff": 16, **config.pop("block", {})}
    return drawn(SeriesEncoder(SeriesConfig(n_channels=n_channels, n_outputs=n_outputs, n_layers=2, head=head,
                                            block=BlockConfig(8, 2, **block), depth=DepthConfig(**dict(depth)),
                                            **config)))


def samples(batch=3, points=6, channels=2):
    """Values at increasing, irregular times."""
    return (torch.randn(batch, points, channels, dtype=F64),
            torch.rand(batch, points, dtype=F64).mul(3).add(0.1).cumsum(1))


def first_real(n, *real):
    return torch.arange(n) < torch.tensor(real)[:, None]


def wrong(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


# heads by themselves


STATES = torch.tensor([[[1.0, 2.0], [3.0, -2.0], [5.0, 6.0]], [[0.0, 1.0], [2.0, 2.0], [9.0, 9.0]]], dtype=F64)
MASK = torch.tensor([[True, True, True], [False, True, False]])


def head(name, d_model=2, n_outputs=1, **options):
    return HEADS[name](d_model, n_outputs, **options).double()


def weigh(module, weight, bias):
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weight))
        module.bias.copy_(torch.tensor(bias))


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_pooled_heads_by_hand(name):
    mean, first = head(name), head(name, pooling="first")
    for module in (mean, first):
        weigh(module.output, [[10.0, 1.0]], [0.5])
    assert mean(STATES).flatten().tolist() == pytest.approx([32.5, 11 / 3 * 10 + 4 + 0.5])
    assert mean(STATES, MASK).flatten().tolist() == pytest.approx([32.5, 22.5])  # of row 2 the middle one alone
    assert first(STATES).flatten().tolist() == [12.5, 1.5]
    assert first(STATES, MASK).flatten().tolist() == [12.5, 22.5]
    blind = MASK & torch.tensor([[True], [False]])
    for module in (mean, first):
        assert module(STATES, blind)[1].tolist() == [0.5]  # nothing to pool: 0, and the bias


def test_a_tagging_head_is_a_linear_map_of_every_token():
    tagging = head("tagging", n_outputs=2)
    weigh(tagging.output, [[1.0, 0.0], [1.0, -1.0]], [0.0, 0.25])
    assert tagging(STATES)[0].tolist() == [[1.0, -0.75], [3.0, 5.25], [5.0, -0.75]]
    assert torch.equal(tagging(STATES, MASK), tagging(STATES))


def test_the_masked_word_head_by_the_plain_formula():
    module = drawn(HEADS["masked_lm"](2, 5))
    x = STATES @ module.transform.weight.T + module.transform.bias
    x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    wanted = (x * module.norm.weight + module.norm.bias) @ module.output.weight.T + module.output.bias
    assert (module(STATES) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("name", HEADS)
def test_a_new_head_gives_nearly_even_odds_and_what_padding_holds_does_not_reach_it(name):
    module = head(name, n_outputs=4)
    loss = F.cross_entropy(module(STATES).flatten(0, -2), torch.zeros(module(STATES).numel() // 4, dtype=torch.int64))
    assert abs(loss - math.log(4)) < (0.1 if name == "masked_lm" else 1e-12)
    module = drawn(head(name, n_outputs=4))
    spoilt = STATES.masked_fill(~MASK.unsqueeze(-1), NAN).requires_grad_()
    out, wanted = module(spoilt, MASK), module(STATES, MASK)
    by_token = out.dim() == 3
    assert torch.equal(out[MASK] if by_token else out, wanted[MASK] if by_token else wanted)
    (grad,) = torch.autograd.grad((out[MASK] if by_token else out).sum(), spoilt)
    assert grad[MASK].isfinite().all()


def test_wrong_heads_name_the_argument():
    wrong(lambda: encoder("classify"), "head", "classify", "classification")
    wrong(lambda: encoder("classification"), "n_outputs", "'classification'")
    wrong(lambda: encoder("tagging", n_outputs=0), "n_outputs", "at least 1", "0")
    wrong(lambda: encoder("tagging", n_outputs=2.0), "n_outputs", "2.0", error=TypeError)
    wrong(lambda: encoder("masked_lm", n_outputs=0), "n_outputs", "0")
    wrong(lambda: encoder(n_outputs=3), "n_outputs", "head")
    wrong(lambda: encoder(head_options={"pooling": "first"}), "head_options", "head")
    wrong(lambda: encoder("classification", n_outputs=2, head_options={"pooling": "max"}), "pooling", "max", "first")
    wrong(lambda: encoder("tagging", n_outputs=2, head_options={"pooling": "mean"}), "pooling", "tagging")


# an encoder of text with a head


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_classes_of_texts_of_unequal_length_equal_single_runs(pooling):
    for solver in ("euler", "rk4", "dopri5"):
        model = encoder("classification", n_outputs=3, head_options={"pooling": pooling}, depth={"solver": solver})
        ids, mask = torch.randint(VOCAB, (3, LENGTH)), first_real(LENGTH, 9, 4, 1)
        logits = model(ids, mask)
        assert logits.shape == (3, 3)
        other = torch.where(mask, ids, (ids + 1) % VOCAB)
        assert torch.equal(model(other, mask), logits)
        left = torch.stack([row.roll(int((~keep).sum())) for row, keep in zip(ids, mask, strict=True)])
        close = 1e-12
        if solver == "dopri5":
            continue  # its steps are those of the batch's hardest row
        assert (model(left, mask.flip(1)) - logits).abs().max() < close * logits.abs().max()
        for i, n in enumerate((9, 4, 1)):
            assert (model(ids[i:i + 1, :n]) - logits[i]).abs().max() < close * logits.abs().max()


def test_tags_and_masked_words_are_those_of_single_runs_and_of_the_states():
    for name, n in (("tagging", 4), ("masked_lm", VOCAB)):
        model = encoder(name, n_outputs=n if name == "tagging" else None, depth={"solver": "midpoint"})
        ids, mask = torch.randint(VOCAB, (3, LENGTH)), first_real(LENGTH, 9, 4, 1)
        logits, solution = model(ids, mask, return_solution=True)
        assert logits.shape == (3, LENGTH, n)
        assert torch.equal(model.head(model.final_norm(solution.z)), logits)
        for i, length in enumerate((9, 4, 1)):
            alone = model(ids[i:i + 1, :length])[0]
            assert (logits[i, :length] - alone).abs().max() < 1e-12 * alone.abs().max()


def test_a_model_with_masked_words_learns_to_fill_them_in():
    """Token 0 hides one of a run a a+1 a+2 ..., which its neighbours tell."""
    model = Encoder(EncoderConfig(vocab_size=VOCAB, max_seq_len=5, n_layers=1, head="masked_lm",
                                  block=BlockConfig(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(150):
        ids = torch.randint(1, 6, (32, 1)) + torch.arange(5)
        hidden = torch.arange(5) == torch.randint(5, (32, 1))
        loss = F.cross_entropy(model(ids.masked_fill(hidden, 0))[hidden], ids[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(VOCAB)) < 0.2 and sum(losses[-10:]) / 10 < 0.3


@pytest.mark.parametrize("name", HEADS)
def test_models_with_heads_are_saved_and_loaded_bit_for_bit_and_trained_throughout(name, tmp_path):
    options = {"pooling": "first"} if name in ("classification", "regression") else {}
    text = encoder(name, n_outputs=4, head_options=options, depth={"solver": "rk4"})
    numbers = series(head=name, head_options=options, depth={"solver": "rk4"})
    for model, x in ((text, (torch.randint(VOCAB, (2, LENGTH)),)), (numbers, samples())):
        model.save(tmp_path)
        again = odeformer.load(tmp_path)
        assert again.config == model.config and torch.equal(again(*x), model(*x))
        model(*x).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_an_own_head_works_wherever_a_name_does():
    class Norm(nn.Module):
        def __init__(self, d_model, n_outputs):
            super().__init__()
            self.n_outputs = n_outputs

        def forward(self, states, mask=None):
            return states.norm(dim=-1)[:, :self.n_outputs]

    assert encoder(Norm, n_outputs=2)(torch.randint(VOCAB, (3, LENGTH))).shape == (3, 2)
    assert series(head=Norm, n_outputs=2)(*samples()).shape == (3, 2)


# series


def test_the_embedding_of_a_series_by_the_plain_formula():
    model = series(time_scale=0.5)
    values, times = samples()
    values[0, 1, 0] = values[2, 3, 1] = NAN
    z = model.embed(values, times)
    weight, bias = model.value_embedding.weight, model.value_embedding.bias
    for row, point in ((0, 1), (2, 3), (1, 4)):
        x = values[row, point].tolist()
        there = [float(not math.isnan(v)) for v in x]
        entry = torch.tensor([v if t else 0.0 for v, t in zip(x, there, strict=True)] + there, dtype=F64)
        t = float(times[row, point]) / 0.5
        angles = [t / 10000 ** (2 * i / 8) for i in range(4)]
        waves = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=F64)
        assert (z[row, point] - (weight @ entry + bias + waves)).abs().max() < 1e-12


def test_missing_values_are_told_from_zeros_and_whole_points_may_be_missing():
    model, (values, times) = series(), samples()
    missing, zero = values.clone(), values.clone()
    missing[:, 2, 0], zero[:, 2, 0] = NAN, 0.0
    a, b, c = model(missing, times), model(zero, times), model(values, times)
    assert a.isfinite().all() and min((a - b).abs().max(), (a - c).abs().max()) > 1e-4
    missing[:, 4] = NAN
    out = model(missing, times)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("solver", ["euler", "rk4", "dopri5"])
def test_points_outside_the_mask_change_nothing_whatever_they_hold(solver):
    model, (values, times) = series(depth={"solver": solver}), samples()
    mask = first_real(6, 6, 4, 1)
    wanted = model(values, times, mask)
    for spoil in (NAN, 0.0, float("inf"), 1e30):
        other = values.masked_fill(~mask.unsqueeze(-1), spoil), times.masked_fill(~mask, spoil)
        assert torch.equal(model(*other, mask), wanted)
    other = values.masked_fill(~mask.unsqueeze(-1), NAN).requires_grad_()
    (grad,) = torch.autograd.grad(model(other, times.masked_fill(~mask, NAN), mask).sum(), other)
    assert grad.isfinite().all() and (grad[~mask] == 0).all() and (grad[mask] != 0).any()
    grads = [torch.autograd.grad(model(x, times, mask).sum(), list(model.parameters())) for x in (
        values, values.masked_fill(~mask.unsqueeze(-1), float("inf")))]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("position", ["none", "rope"])
@pytest.mark.parametrize("head", ["regression", "tagging"])
def test_series_of_unequal_lengths_equal_single_runs(position, head):
    for solver in ("euler", "rk4", "ab2"):
        model, (values, times) = series(depth={"solver": solver}, position=position, head=head), samples()
        lengths = (6, 4, 1)
        out = model(values, times, first_real(6, *lengths))
        for i, n in enumerate(lengths):
            alone = model(values[i:i + 1, :n], times[i:i + 1, :n])[0]
            got = out[i, :n] if head == "tagging" else out[i]
            assert (got - alone).abs().max() < 1e-12 * out.abs().max()


def test_without_positions_a_series_is_a_set_of_points_at_times():
    """Any order of the points gives the same pooled output, and moves single outputs along; with rope order counts."""
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    values, times = samples()
    mask = first_real(6, 6, 4, 3)
    for solver in ("euler", "rk4", "dopri5"):
        model = series(depth={"solver": solver})
        wanted, got = model(values, times, mask), model(values[:, order], times[:, order], mask[:, order])
        assert (got - wanted).abs().max() < 1e-11 * wanted.abs().max()
    tagging = series(head="tagging")
    moved = tagging(values[:, order], times[:, order])
    assert (moved - tagging(values, times)[:, order]).abs().max() < 1e-12 * moved.abs().max()
    turning = series(position="rope")
    assert (turning(values[:, order], times[:, order]) - turning(values, times)).abs().max() > 1e-4


def test_irregular_times_matter_and_their_unit_is_the_time_scale():
    model, (values, times) = series(), samples()
    wanted = model(values, times)
    later = times.clone()
    later[:, 3] += 0.05
    assert (model(values, later) - wanted).abs().amax(1).min() > 1e-5
    assert (model(values, torch.arange(6).expand(3, -1)) - wanted).abs().amax(1).min() > 1e-3  # whole numbers, too
    in_seconds = series(time_scale=60.0)
    in_seconds.load_state_dict(model.state_dict())
    assert (in_seconds(values, times * 60) - wanted).abs().max() < 1e-12


def test_large_times_keep_their_differences_in_float32():
    """Angles are made in float64: a year of seconds does not blur a second."""
    model = series().float()
    values, times = samples()
    embedded = model.embed(values.float(), times + 31_536_000)
    exact = model.double().embed(values.float().double(), times + 31_536_000)
    assert (embedded - exact).abs().max() < 1e-5


def test_series_survive_torch_func_and_compilation():
    model, (values, times) = series(depth={"solver": "rk4"}), samples()
    wanted = model(values, times)
    got = torch.func.vmap(lambda v, t: model(v[None], t[None])[0])(values, times)
    assert (got - wanted).abs().max() < 1e-12
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert (compiled(values, times) - wanted).abs().max() < 1e-12
    ids = torch.randint(VOCAB, (3, LENGTH))
    text = encoder("classification", n_outputs=2)
    got = torch.func.vmap(lambda row: text(row[None])[0])(ids)  # ids cannot be read there, so they are not checked
    assert (got - text(ids)).abs().max() < 1e-12


def test_every_norm_takes_series():
    for name in NORMS:
        assert series(block={"norm": name})(*samples()).isfinite().all()


def test_a_regression_learns_the_slope_of_lines_sampled_irregularly():
    """It needs values and times together."""
    model = SeriesEncoder(SeriesConfig(n_channels=1, n_outputs=1, n_layers=1, block=BlockConfig(16, 2, position="none"),
                                       time_scale=0.2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(250):
        times, slope = torch.rand(64, 8), torch.randn(64, 1)
        mask = torch.rand(64, 8) < 0.8
        mask[:, 0] = True
        loss = (model((slope * times).unsqueeze(-1), times, mask) - slope).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < 0.15


def test_wrong_series_name_what_came_and_what_is_allowed():
    model, (values, times) = series(), samples()
    wrong(lambda: model(values[0], times), "values", "n_channels = 2", "(6, 2)")
    wrong(lambda: model(values[..., :1], times), "values", "n_channels = 2", "(3, 6, 1)")
    wrong(lambda: model(values[:, :0], times[:, :0]), "values", "(3, 0, 2)")
    wrong(lambda: model(values[:0], times[:0]), "values", "(0, 6, 2)")
    wrong(lambda: model(values.long(), times), "values", "int64", error=TypeError)
    wrong(lambda: model(values, times[:, 1:]), "times", "(3, 6)", "(3, 5)")
    wrong(lambda: model(values, 3.0), "times", "float")
    wrong(lambda: model(values, times, first_real(5, 5, 4, 3)), "mask", "(3, 5)")
    wrong(lambda: model(values, times, first_real(6, 5, 4, 3).float()), "mask", "bool", error=TypeError)
    for bad in (NAN, float("inf")):
        late = times.clone()
        late[1, 2] = bad
        wrong(lambda: model(values, late), "times", "finite")  # noqa: B023
    wrong(lambda: model(values.clone().index_fill_(1, torch.tensor([2]), float("inf")), times), "values", "NaN")


def test_wrong_series_configurations_name_the_argument():
    def config(**changes):
        given = {"n_channels": 2, "n_outputs": 3, "n_layers": 1, "block": BlockConfig(8, 2, position="none")}
        return SeriesConfig(**{**given, **changes})

    wrong(lambda: config(n_channels=0), "n_channels", "0")
    wrong(lambda: config(n_outputs=0), "n_outputs", "0")
    wrong(lambda: config(head="classify"), "head", "classification")
    for scale in (0.0, -1.0, NAN, math.inf, "x"):
        wrong(lambda: config(time_scale=scale), "time_scale", repr(scale))  # noqa: B023
    wrong(lambda: config(block=BlockConfig(8, 2)), "position", "'none' or 'rope'", "'learned'")
    wrong(lambda: SeriesEncoder(config(head_options={"pooling": "max"})), "pooling", "max")
