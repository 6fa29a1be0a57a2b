"""Padding on either side changes nothing that counts, for every attention variant and every kind of position."""

import pytest
import torch

from odeformer import (
    ATTENTION,
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

CROSS = [(name, {}) for name in ATTENTION if name != "window"] + [("cross_gaussian", {"center_mode": "ratio",
                                                                                      "ratio": 0.7})]


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
@pytest.mark.parametrize("name", [name for name in ATTENTION if not getattr(ATTENTION[name], "for_memory", False)])
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
