"""Translation: greedy and by beams, over a memory, against loops and brute force."""

import itertools

import pytest
import torch
from seq2seq_models import CROSS, LENGTH, SOURCE, right_padding, texts, tiny, wrong

from odeformer.generate import beam_search


@torch.no_grad()
def argmax_loop(model, source, text, n, mask=None):
    for _ in range(n):
        text = torch.cat([text, model(source, text, mask)[:, -1].argmax(-1, keepdim=True)], 1)
    return text


def talkative(**options):
    """A model whose texts go on in many ways."""
    model = tiny(**options)
    with torch.no_grad():
        for part in (model.encoder, model.decoder):
            for name, p in part.named_parameters():
                if name.startswith(("token_embedding", "position")):
                    p.mul_(8.0)
    return model


@pytest.mark.parametrize("solver", ["euler", "rk4", "ab2", "leapfrog"])
def test_greedy_translation_is_the_argmax_loop_and_rows_equal_single_runs(solver):
    for cross in ({}, {"cross_attention": "cross_gaussian", "cross_attention_options": CROSS["cross_gaussian"]}):
        model = talkative(depth={"solver": solver, "steps_per_layer": 2}, block={"coupling": "composed", **cross})
        source, mask = texts()[0], right_padding(SOURCE, 7, 4, 5)
        wanted = argmax_loop(model, source, torch.full((3, 1), 2), 8, mask)
        for cache in ("exact", None):
            got = model.generate(source, mask, start=2, max_new_tokens=8, cache=cache)
            assert torch.equal(got, wanted)
            for i, n in enumerate((7, 4, 5)):
                alone = model.generate(source[i:i + 1, :n], start=2, max_new_tokens=8, cache=cache)
                assert torch.equal(alone[0], wanted[i])
        assert len(wanted.unique()) > 2


def test_translations_may_start_with_beginnings_of_unequal_length():
    model, (source, target) = talkative(depth={"solver": "rk4"}), texts()
    start, mask = target[:, :4], right_padding(4, 4, 3, 1).flip(1)
    assert torch.equal(model.generate(source, start=start, max_new_tokens=5), argmax_loop(model, source, start, 5))
    together = model.generate(source, start=start, start_mask=mask, max_new_tokens=5)
    for i, row in enumerate(mask):
        alone = argmax_loop(model, source[i:i + 1], start[i:i + 1, row], 5)
        assert torch.equal(together[i, (~row).sum():], alone[0])


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_beam_search_over_a_memory_finds_what_brute_force_does(alpha):
    vocab, n, stop = 3, 3, 1
    model = talkative(target_vocab_size=vocab, depth={"solver": "midpoint"})
    source, mask = texts(2)[0], right_padding(SOURCE, 7, 4)
    got = model.generate(source, mask, start=0, max_new_tokens=n, n_beams=27, length_penalty=alpha, stop_tokens=[stop])
    assert torch.equal(got, model.generate(source, mask, start=0, max_new_tokens=n, n_beams=27, cache=None,
                                           length_penalty=alpha, stop_tokens=[stop]))
    for i, real in enumerate((7, 4)):
        best, found = -float("inf"), None
        for tail in itertools.product(range(vocab), repeat=n):
            tail = tail[:tail.index(stop) + 1] if stop in tail else tail
            text = torch.tensor([[0, *tail]])
            with torch.no_grad():
                logs = model(source[i:i + 1, :real], text)[0].log_softmax(-1)
            total = sum(float(logs[j, token]) for j, token in enumerate(tail)) / ((5 + len(tail)) / 6) ** alpha
            if total > best:
                best, found = total, [0, *tail, *[stop] * (n - len(tail))]
        assert got[i].tolist() == found[:got.shape[1]]


def test_narrow_beams_take_their_memory_with_them():
    """Rows whose beams are reordered: cached equals uncached, and each row equals its run alone."""
    model = talkative(depth={"solver": "rk4"}, block={"cross_attention": "cross_gaussian"})
    source, mask = texts()[0], right_padding(SOURCE, 7, 4, 5)
    start = torch.full((3, 1), 1)
    with torch.no_grad():
        memory = {"memory": model.encode(source, mask), "memory_mask": mask}
    one, two = (beam_search(model.decoder, start, max_new_tokens=8, n_beams=3, memory=memory, cache=cache)
                for cache in ("exact", None))
    assert torch.equal(one[0], two[0]) and (one[1] - two[1]).abs().max() < 1e-12
    for i, n in enumerate((7, 4, 5)):
        with torch.no_grad():
            alone = beam_search(model.decoder, start[:1], max_new_tokens=8, n_beams=3,
                                memory={"memory": model.encode(source[i:i + 1, :n])})
            logs = model(source[i:i + 1, :n].expand(3, -1), alone[0][0]).log_softmax(-1)
        assert torch.equal(alone[0][0], one[0][i])
        total = logs[:, :-1].gather(2, alone[0][0][:, 1:, None]).sum((1, 2))
        assert (total - one[1][i]).abs().max() < 1e-12


def test_translation_restores_modes_and_does_not_drop_out():
    model = talkative(block={"dropout": 0.5}, depth={"solver": "midpoint"})
    source, _ = texts()
    wanted = model.generate(source, start=1, max_new_tokens=6)
    model.train()
    model.encoder.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert torch.equal(model.generate(source, start=1, max_new_tokens=6), wanted)
    assert [module.training for module in model.modules()] == modes
    wrong(lambda: model.generate(source, start=1, max_new_tokens=LENGTH), "max_new_tokens", "max_seq_len")
    assert [module.training for module in model.modules()] == modes
