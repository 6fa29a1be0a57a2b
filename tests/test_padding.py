"""Padding on either side changes nothing that counts, for every attention variant and every kind of position."""

from dataclasses import replace

import pytest
import torch

from odeformer import (
    ATTENTION,
    FEEDFORWARD,
    NORMS,
    POSITIONS,
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
)
from odeformer.attention.pairs import Pairs, Sight
from odeformer.attention.softmax import SoftmaxAttention
from odeformer.feedforward import FeedForward as GELU
from odeformer.norms import Placement

CROSS = [(name, {}) for name in ATTENTION if name != "window"] + [("cross_gaussian", {"center_mode": "ratio",
                                                                                      "ratio": 0.7})]
SELF = [name for name in ATTENTION if not getattr(ATTENTION[name], "for_memory", False)]


def padded(tokens, left, right=0):
    """Tokens with padding on both sides, and their mask."""
    def side(n):
        return torch.zeros(len(tokens), n, dtype=tokens.dtype)

    ids = torch.cat([side(left), tokens, side(right)], 1)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, left:left + tokens.shape[1]] = True
    return ids, mask


@pytest.mark.parametrize(("name", "options"), CROSS)
@torch.no_grad()
def test_cross_attention_counts_real_tokens_of_source_and_target(name, options):
    """Priors are placed by real tokens (eqs. 4-5), with padding before or behind either, at once or token by token."""
    block = BlockConfig(8, 2, cross_attention=name, cross_attention_options=options)
    model = Seq2Seq(Seq2SeqConfig(vocab_size=11, max_seq_len=16, n_layers=2, block=block)).double().eval()
    for path, p in model.named_parameters():
        if "table" in path:
            p.mul_(3)  # so that places matter
    source, target = torch.randint(11, (2, 5)), torch.randint(11, (2, 4))
    wanted = model(source, target)
    for side in ((3, 0), (0, 2)):
        ids, mask = padded(source, *side)
        assert (model(ids, target, mask) - wanted).abs().max() < 1e-12
        ids, mask = padded(target, *side)
        got = model(source, ids, None, mask)[:, side[0]:side[0] + 4]
        assert (got - wanted).abs().max() < 1e-12
    (source, source_mask), (target, target_mask) = padded(source, 3), padded(target, 3)
    memory, cache, parts = model.encode(source, source_mask), model.new_cache(), []
    for i in range(7):
        logits, cache = model.decode(target[:, i:i + 1], memory, source_mask, target_mask[:, i:i + 1], cache=cache)
        parts.append(logits)
    assert (torch.cat(parts, 1)[:, 3:] - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", SELF)
@torch.no_grad()
def test_a_padded_text_gives_what_it_gives_alone(name, position):
    block = BlockConfig(8, 2, attention=name, position=position)
    settings = {"vocab_size": 50, "max_seq_len": 30, "n_layers": 2, "block": block}
    for model in (Decoder(DecoderConfig(**settings)), Encoder(EncoderConfig(**settings))):
        model.double().eval()
        tokens = torch.randint(50, (2, 9))
        for side in ((5, 0), (0, 4)):
            ids, mask = padded(tokens, *side)
            assert (model(ids, mask)[:, side[0]:side[0] + 9] - model(tokens)).abs().max() < 1e-11


@pytest.mark.parametrize("norm", NORMS)
def test_padded_places_stand_still_so_implicit_steps_can_be_solved(norm):
    """A norm of zeros is stiff: its Jacobian is 1 / sqrt(eps)."""
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(vocab_size=9, max_seq_len=6, n_layers=1, block=BlockConfig(8, 2, norm=norm),
                                  depth=DepthConfig(solver="implicit_midpoint", steps_per_layer=4)))
    with torch.no_grad():
        model.token_embedding.weight.mul_(10)
        for p in model.layers.parameters():
            if p.dim() >= 2:
                p.mul_(0.3)
    ids, mask = padded(torch.randint(9, (2, 4)), 0, 2)
    _, solution = model(ids, mask, return_solution=True)
    assert solution.z[~mask].abs().max() == 0
    alone = model(ids[:, :4], return_solution=True)[1]
    assert (solution.z[mask].view(2, 4, -1) - alone.z).abs().max() < 1e-4


PARTS = [*(("attention", name) for name in SELF), *(("feedforward", name) for name in FEEDFORWARD),
         *(("norm", name) for name in NORMS)]


@pytest.mark.parametrize(("part", "name"), PARTS)
def test_what_is_said_to_be_finite_is_so_where_states_are_zero_and_nothing_is_seen(part, name):
    """A row all of padding, one with two padded tokens and one without: increments, all gradients."""
    torch.manual_seed(0)
    block = BlockConfig(8, 2, **{part: name})
    model = Encoder(EncoderConfig(vocab_size=9, max_seq_len=5, n_layers=2, block=block)).double()
    mask = torch.tensor([[False] * 5, [True] * 3 + [False] * 2, [True] * 5])
    z = torch.randn(3, 5, 8, dtype=torch.float64).masked_fill(~mask.unsqueeze(-1), float("nan")).requires_grad_()
    end = model.evolve(z, mask).z
    assert end.isfinite().all() and (end[~mask] == 0).all()
    end.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert z.grad.isfinite().all() and (z.grad[~mask] == 0).all()
    model.zero_grad()
    alone = model.evolve(z.detach()[1:2, :3]).z
    assert (alone - end[1:2, :3]).abs().max() < 1e-11


class OverNothing(torch.nn.Module):
    """An own attention that divides by 0 at padded tokens."""

    def __init__(self, d_model, n_heads, **options):
        super().__init__()
        self.output = torch.nn.Linear(d_model, d_model)

    def forward(self, x, mask=None, causal=False):
        seen = mask.unsqueeze(-1).to(x.dtype)
        return self.output((x * seen).sum(1, keepdim=True) / seen) * torch.ones_like(x)


@torch.no_grad()
def test_an_own_attention_may_give_nan_at_padding():
    torch.manual_seed(0)
    block = BlockConfig(8, 2, attention=OverNothing)
    model = Encoder(EncoderConfig(vocab_size=9, max_seq_len=6, n_layers=2, block=block))
    tokens = torch.randint(9, (2, 4))
    ids, mask = padded(tokens, 0, 2)
    assert not model.layers[0].attention.finite and model.layers[0].feedforward.finite
    assert (model(ids, mask)[:, :4] - model(tokens, torch.ones(2, 4, dtype=torch.bool))).abs().max() < 1e-5


def test_padding_of_states_that_come_later_may_hold_nan():
    """The field that ``vector_field`` gives is called with states of any kind."""
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(vocab_size=9, max_seq_len=6, n_layers=1, block=BlockConfig(8, 2)))
    ids, mask = padded(torch.randint(9, (2, 4)), 0, 2)
    z, l = model.embed(ids, mask).detach(), torch.zeros(())
    f = model.vector_field(z, mask)
    spoiled = z.masked_fill(~mask.unsqueeze(-1), float("nan"))
    assert torch.equal(f(spoiled, l), f(z.masked_fill(~mask.unsqueeze(-1), 0), l))


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda block: Encoder(EncoderConfig(vocab_size=9, max_seq_len=6, n_layers=4,
                                                                      block=block)),
                                  lambda block: Decoder(DecoderConfig(vocab_size=9, max_seq_len=6, n_layers=4,
                                                                      block=block))])
def test_who_sees_whom_is_read_once_a_pass(make, monkeypatch):
    ids, mask = padded(torch.randint(9, (2, 4)), 0, 2)
    model, calls = make(BlockConfig(8, 2)).with_solver("rk4"), []
    seen = Pairs.seen
    monkeypatch.setattr(Pairs, "seen", property(lambda pairs: calls.append(1) or seen.fget(pairs)))
    model(ids, mask)
    assert len(calls) == 1
    model(ids, mask)
    assert len(calls) == 2


class Hide(SoftmaxAttention):
    """An own variant that hides the third token from all."""

    def attend(self, pairs):
        n = pairs.key.shape[2]
        keep = torch.arange(n) != 2
        mask = torch.ones(1, n, dtype=torch.bool) if pairs.mask is None else pairs.mask
        return super().attend(replace(pairs, mask=mask & keep))


class OldPairs(SoftmaxAttention):
    """An own variant with a ``pairs`` that knows nothing of ``sight``."""

    def pairs(self, x, memory=None, *, mask=None, causal=False, rotary=None, slot=None, first=None):
        return super().pairs(x, memory, mask=mask, causal=causal, rotary=rotary, slot=slot, first=first)


class OldForward(SoftmaxAttention):
    """An own variant with such a ``forward``."""

    def forward(self, x, memory=None, *, mask=None, causal=False, rotary=None, slot=None, first=None):
        return super().forward(x, memory, mask=mask, causal=causal, rotary=rotary, slot=slot, first=first)


def by_hand(model, ids, mask):
    """The textbook pass, each core called by itself with the mask."""
    z = model.embed(ids, mask).masked_fill(~mask.unsqueeze(-1), 0)
    for layer in model.layers:
        a, f = layer.attention, layer.feedforward
        z = z + a.core(a.placement.norm(z), mask=mask).masked_fill(~mask.unsqueeze(-1), 0)
        z = z + f.core(f.placement.norm(z)).masked_fill(~mask.unsqueeze(-1), 0)
    return model.final_norm(z)


@pytest.mark.parametrize("own", [Hide, OldPairs, OldForward, OverNothing])
@torch.no_grad()
def test_layers_that_see_through_other_masks_or_with_replaced_cores_keep_their_own(own):
    """The second layer's core is exchanged after construction; what the first has read from the mask is not its."""
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(vocab_size=9, max_seq_len=6, n_layers=3, block=BlockConfig(8, 2))).double().eval()
    old = model.layers[1].attention.core
    model.layers[1].attention.core = own(8, 2).double()
    model.layers[1].attention.core.load_state_dict(old.state_dict(), strict=False)
    ids, mask = padded(torch.randint(9, (2, 4)), 1, 1)
    assert (model(ids, mask) - by_hand(model, ids, mask))[mask].abs().max() < 1e-12
    if own is not OverNothing:
        assert model(ids).isfinite().all()


class Unit(GELU):
    """An own feed-forward that divides by the length of its input, 0 at padding."""

    def forward(self, x):
        return super().forward(x / x.norm(dim=-1, keepdim=True))


class RootMeanSquare(Placement):
    """An own placement that does so."""

    def __init__(self, d_model):
        super().__init__()

    def forward(self, z, branch):
        return branch(z / z.square().mean(-1, keepdim=True).sqrt())


@pytest.mark.parametrize("own", [{"feedforward": Unit, "norm": "none"}, {"norm": RootMeanSquare}])
@torch.no_grad()
def test_classes_derived_elsewhere_may_give_nan_at_padding(own):
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(vocab_size=9, max_seq_len=6, n_layers=2, block=BlockConfig(8, 2, **own))).double()
    tokens = torch.randint(9, (2, 4))
    ids, mask = padded(tokens, 0, 2)
    assert (model(ids, mask)[:, :4] - model(tokens)).abs().max() < 1e-12


@torch.no_grad()
def test_a_mask_that_is_changed_in_place_is_read_again():
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(vocab_size=9, max_seq_len=6, n_layers=1, block=BlockConfig(8, 2))).double()
    ids, mask = padded(torch.randint(9, (2, 4)), 0, 2)
    _, solution = model(ids, mask, return_solution=True)
    z, l = solution.states[0], torch.zeros(())
    solution.field(z, l)
    mask[:, 3] = False
    z = z.masked_fill(~mask.unsqueeze(-1), 0)
    assert (solution.field(z, l) - model.vector_field(z, mask.clone())(z, l)).abs().max() < 1e-12


@torch.no_grad()
def test_the_field_of_a_solution_keeps_nan_at_padding_from_real_tokens():
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(vocab_size=9, max_seq_len=6, n_layers=1, block=BlockConfig(8, 2))).double()
    ids, mask = padded(torch.randint(9, (2, 4)), 0, 2)
    _, solution = model(ids, mask, return_solution=True)
    z, l = solution.states[0], torch.zeros(())
    spoiled = z.masked_fill(~mask.unsqueeze(-1), float("nan"))
    assert torch.equal(solution.field(spoiled, l)[mask], solution.field(z, l)[mask])
    with pytest.raises(ValueError, match="mask must have the shape"):
        solution.field(z[:1], l)
    with pytest.raises(ValueError, match="x must have the shape"):
        solution.field(z[0], l)


def test_norms_of_queries_and_keys_may_be_set_on_a_layer():
    torch.manual_seed(0)
    core, x = SoftmaxAttention(8, 2), torch.randn(1, 5, 8)
    before = core(x)
    core.query_norm = torch.nn.RMSNorm(4)
    q, k, v = (linear(x).view(1, 5, 2, 4).transpose(1, 2) for linear in (core.query, core.key, core.value))
    q = q / (q.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    wanted = core.output(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))
    assert (core(x) - wanted).abs().max() < 1e-5 < (before - wanted).abs().max()


def test_a_pass_that_fails_leaves_no_claim_about_padding():
    """After it, as after any pass, states may hold anything at padding."""
    sight = Sight(None)
    with pytest.raises(KeyError), sight.during(clean=True):
        assert sight.clean
        raise KeyError
    assert not sight.clean and not sight.kept
