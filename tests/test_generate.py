"""Text from a decoder: greedy, sampled and by beam search, against loops that read the whole text for each token."""

import itertools
import math

import pytest
import scipy.stats
import torch

from odeformer import CACHES, POSITIONS, BlockConfig, Decoder, DecoderConfig, DepthConfig
from odeformer.generate import Sampling, beam_search

VOCAB, LENGTH = 7, 12


def decoder(*, vocab=VOCAB, solver="euler", steps=1, sharpness=2.0, **block):
    """A small model whose next tokens differ clearly in their odds; float64."""
    model = Decoder(DecoderConfig(vocab_size=vocab, max_seq_len=LENGTH, n_layers=2,
                                  block=BlockConfig(16, 2, d_ff=16, **block),
                                  depth=DepthConfig(solver=solver, steps_per_layer=steps))).double().eval()
    with torch.no_grad():
        model.head.weight.mul_(sharpness)
        for name, p in model.named_parameters():
            if name.startswith(("token_embedding", "position")):
                p.mul_(8.0)  # so that texts go on in many ways
    return model


def prompt(batch=3, length=4, vocab=VOCAB):
    return torch.randint(vocab, (batch, length))


def left_padding(batch=3, length=4):
    """Row i has i tokens of padding on the left."""
    return torch.arange(length).expand(batch, -1) >= torch.arange(batch)[:, None]


@torch.no_grad()
def argmax_loop(model, text, n):
    for _ in range(n):
        text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], 1)
    return text


def wrong(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


# greedy


@pytest.mark.parametrize("solver", ["euler", "midpoint", "rk4", "ab3", "leapfrog", "reversible_heun", "rk2_learned"])
def test_greedy_is_the_argmax_loop_over_the_whole_text(solver):
    for coupling in ("lie", "composed"):
        model, ids = decoder(solver=solver, steps=2, coupling=coupling), prompt()
        wanted = argmax_loop(model, ids, 8)
        assert torch.equal(model.generate(ids, max_new_tokens=8), wanted)
        assert torch.equal(model.generate(ids, max_new_tokens=8, cache=None), wanted)
        assert len(wanted[:, 4:].unique()) > 1


@pytest.mark.parametrize("position", POSITIONS)
def test_prompts_of_unequal_length_padded_on_the_left_equal_single_runs(position):
    for solver, cache in itertools.product(("euler", "rk4"), ("exact", None)):
        model, ids, mask = decoder(solver=solver, position=position), prompt(), left_padding()
        together = model.generate(ids, mask, max_new_tokens=6, cache=cache)
        for i in range(3):
            assert torch.equal(together[i, i:], argmax_loop(model, ids[i:i + 1, i:], 6)[0]), (solver, cache)


def test_the_window_policy_is_exact_in_generation_too_where_the_attentions_window_is_no_wider():
    model, ids = decoder(solver="rk4", attention="window", attention_options={"window": 3}), prompt()
    wanted = argmax_loop(model, ids, 8)
    assert torch.equal(model.generate(ids, max_new_tokens=8, cache="window", cache_options={"window": 3}), wanted)


@pytest.mark.parametrize("policy", CACHES)
def test_every_cache_policy_generates(policy):
    model, ids = decoder(solver="rk4"), prompt()
    assert model.generate(ids, max_new_tokens=8, cache=policy).shape == (3, 12)
    assert model.generate(ids, max_new_tokens=8, cache=policy, n_beams=3).shape == (3, 12)


def test_what_is_written_needs_no_gradients_and_leaves_their_mode_alone():
    model = decoder()
    out = model.generate(prompt(), max_new_tokens=2)
    assert out.dtype == torch.int64 and torch.is_grad_enabled()
    steps = model.stream(prompt(), max_new_tokens=3)
    next(steps)
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())
    ids = prompt()
    assert torch.equal(model.generate(ids.int(), max_new_tokens=4, repetition_penalty=1.3),
                       model.generate(ids, max_new_tokens=4, repetition_penalty=1.3))


def test_a_half_precision_model_is_read_out_in_float32():
    model, ids = decoder().bfloat16(), prompt()
    assert torch.equal(model.generate(ids, max_new_tokens=3, cache=None), argmax_loop(model, ids, 3))
    assert beam_search(model, ids, max_new_tokens=2, n_beams=2)[1].dtype == torch.float32
    assert beam_search(model.double(), ids, max_new_tokens=2, n_beams=2)[1].dtype == torch.float64


# stop tokens, streaming


def cut(row, n_prompt, stop, pad):
    """A row up to its first stop token behind the prompt, then padding."""
    row = row.tolist()
    ends = [i for i, token in enumerate(row) if i >= n_prompt and token in stop]
    return row if not ends else row[:ends[0] + 1] + [pad] * (len(row) - ends[0] - 1)


def test_rows_end_with_their_stop_token_and_are_filled_with_the_pad_token():
    model, ids = decoder(solver="midpoint"), prompt(6)
    free = argmax_loop(model, ids, 8)
    for stop, pad in (([2], None), ([5, 1], 3), ([0, 4], None), ((6,), 0)):
        got = model.generate(ids, max_new_tokens=8, stop_tokens=stop, pad_token=pad)
        wanted = [cut(row, 4, stop, stop[0] if pad is None else pad) for row in free]
        n = got.shape[1]
        assert got.tolist() == [row[:n] for row in wanted]
        longest = max(next((i for i in range(4, 12) if row[i] in stop), 11) for row in free.tolist())
        assert n == longest + 1  # it stops with the row that ends last
    first = int(free[0, 4])
    alone = model.generate(ids[:1], max_new_tokens=8, stop_tokens=[first])
    assert alone.shape == (1, 5)


def test_a_stop_token_in_the_prompt_ends_nothing():
    model, ids = decoder(), prompt(1)
    free = argmax_loop(model, ids, 3)
    stop = next(token for token in range(VOCAB) if token not in free[0, 4:])
    ids_with = ids.clone()
    ids_with[0, 0] = stop
    got = model.generate(ids_with, max_new_tokens=3, stop_tokens=[stop])
    assert got.shape[1] >= 5


def test_streaming_yields_what_generate_returns():
    model, ids, mask = decoder(solver="rk4"), prompt(), left_padding()
    for options in ({}, {"stop_tokens": [2, 5], "pad_token": 1}, {"cache": None}, {"repetition_penalty": 1.5}):
        parts = list(model.stream(ids, mask, max_new_tokens=6, **options))
        assert all(part.shape == (3,) for part in parts)
        whole = model.generate(ids, mask, max_new_tokens=6, **options)
        assert torch.equal(torch.cat([ids, torch.stack(parts, 1)], 1), whole)
    drawn = [torch.stack(list(model.stream(ids, max_new_tokens=6, temperature=1.0,
                                           generator=torch.Generator().manual_seed(3))), 1),
             model.generate(ids, max_new_tokens=6, temperature=1.0,
                            generator=torch.Generator().manual_seed(3))[:, 4:]]
    assert torch.equal(*drawn)


def test_a_stream_reads_only_as_far_as_it_is_asked():
    model, calls = decoder(), []
    model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    model.layers[0].attention.core.register_forward_hook(lambda *_: calls.append(1))
    steps = model.stream(prompt(), max_new_tokens=8)
    assert not calls
    next(steps)
    assert len(calls) == 1
    next(steps)
    assert len(calls) == 2


# sampling


def handed(monkeypatch, logits, **options):
    """The distribution from which a token is drawn."""
    seen = []

    def record(p, n, generator=None):
        seen.append(p)
        return p.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", record)
    Sampling(**options).choose(torch.tensor([logits], dtype=torch.float64))
    return seen[0][0].tolist()


P = [0.4, 0.3, 0.2, 0.06, 0.04]


@pytest.mark.parametrize(("options", "wanted"), [
    ({"temperature": 1.0}, P),
    ({"temperature": 0.5}, [p**2 / sum(q**2 for q in P) for p in P]),
    ({"temperature": 2.0}, [p**0.5 / sum(q**0.5 for q in P) for p in P]),
    ({"temperature": 1.0, "top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
    ({"temperature": 1.0, "top_k": 9}, P),
    ({"temperature": 1.0, "top_p": 0.39}, [1, 0, 0, 0, 0]),
    ({"temperature": 1.0, "top_p": 0.41}, [4 / 7, 3 / 7, 0, 0, 0]),
    ({"temperature": 1.0, "top_p": 0.69}, [4 / 7, 3 / 7, 0, 0, 0]),
    ({"temperature": 1.0, "top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0, 0]),
    ({"temperature": 1.0, "top_p": 1e-9}, [1, 0, 0, 0, 0]),
    ({"temperature": 1.0, "top_p": 1.0}, P),
    # of the top 3, renormalised to 4/9, 3/9, 2/9, two have 7/9 together
    ({"temperature": 1.0, "top_k": 3, "top_p": 0.75}, [4 / 7, 3 / 7, 0, 0, 0]),
    # at temperature 1/2 the odds are 16 : 9 : 4 : 0.36 : 0.16, of 29.52
    ({"temperature": 0.5, "top_p": 0.8}, [16 / 25, 9 / 25, 0, 0, 0]),
    ({"temperature": 0.5, "top_p": 0.86}, [16 / 29, 9 / 29, 4 / 29, 0, 0]),
])
def test_the_distribution_that_is_drawn_from_by_hand(monkeypatch, options, wanted):
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        got = handed(monkeypatch, [math.log(P[i]) + 5 for i in order], **options)
        assert max(abs(x - wanted[i]) for x, i in zip(got, order, strict=True)) < 1e-12


def test_top_k_keeps_k_even_among_equals_and_tiny_temperatures_take_the_best(monkeypatch):
    assert sorted(handed(monkeypatch, [1.0, 1.0, 1.0, 0.0], temperature=1.0, top_k=2)) == [0, 0, 0.5, 0.5]
    for temperature in (1e-4, 1e-40, 5e-324):
        assert handed(monkeypatch, [1.0, 3.0, 2.9, -1.0], temperature=temperature) == [0, 1, 0, 0]


def test_frequencies_of_drawn_tokens_are_those_of_the_softmax():
    model, ids, n = decoder(sharpness=1.0), prompt(1), 4000
    logits = model(ids)[0, -1] / 1.3
    draws = model.generate(ids.expand(n, -1), max_new_tokens=1, temperature=1.3)[:, -1]
    counts = torch.bincount(draws, minlength=VOCAB)
    assert scipy.stats.chisquare(counts.numpy(), (n * logits.softmax(-1)).detach().numpy()).pvalue > 0.01
    best = logits.argsort(descending=True)[:3]
    draws = model.generate(ids.expand(n, -1), max_new_tokens=1, temperature=1.3, top_k=3)[:, -1]
    counts = torch.bincount(draws, minlength=VOCAB)
    assert set(draws.tolist()) == set(best.tolist())
    expected = n * logits[best].softmax(-1)
    assert scipy.stats.chisquare(counts[best].numpy(), expected.detach().numpy()).pvalue > 0.01


def test_top_k_of_one_is_greedy_at_any_temperature():
    model, ids = decoder(solver="rk4"), prompt()
    assert torch.equal(model.generate(ids, max_new_tokens=6, temperature=3.0, top_k=1), argmax_loop(model, ids, 6))


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_used_tokens():
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0], [2.0, -1.0, 0.5, -3.0]])
    text = torch.tensor([[0, 1, 1], [3, 2, 2]])
    got = Sampling(repetition_penalty=2.0).penalized(logits, text, None)
    assert got.tolist() == [[1.0, -2.0, 0.5, 0.0], [2.0, -1.0, 0.25, -6.0]]
    mask = torch.tensor([[False, True, True], [False, False, True]])  # padding is no text
    got = Sampling(repetition_penalty=2.0).penalized(logits, text, mask)
    assert got.tolist() == [[2.0, -2.0, 0.5, 0.0], [2.0, -1.0, 0.25, -3.0]]
    got = Sampling(repetition_penalty=0.5).penalized(logits, text, None)  # below 1 it repeats more
    assert got.tolist() == [[4.0, -0.5, 0.5, 0.0], [2.0, -1.0, 1.0, -1.5]]


def test_greedy_under_a_repetition_penalty_is_the_penalised_loop():
    model, ids, penalty = decoder(solver="midpoint"), prompt(), 1.7
    text = ids
    with torch.no_grad():
        for _ in range(8):
            logits = model(text)[:, -1]
            for row, used in zip(logits, text.tolist(), strict=True):
                for token in set(used):
                    row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
    got = model.generate(ids, max_new_tokens=8, repetition_penalty=penalty)
    assert torch.equal(got, text)
    assert not torch.equal(got, argmax_loop(model, ids, 8))
    padded = torch.cat([torch.full((3, 2), 5), ids], 1)
    mask = torch.cat([torch.zeros(3, 2, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool)], 1)
    got = model.generate(padded, mask, max_new_tokens=6, repetition_penalty=penalty)
    assert torch.equal(got[:, 2:], text[:, :10])


def test_a_generator_makes_draws_reproducible_and_leaves_the_global_ones_alone():
    model, ids = decoder(sharpness=0.5), prompt(8)

    def draw(seed, global_seed):
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        out = model.generate(ids, max_new_tokens=6, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(torch.get_rng_state(), state)
        return out

    assert torch.equal(draw(1, 1), draw(1, 2))
    assert not torch.equal(draw(1, 1), draw(2, 1))
    torch.manual_seed(5)
    first = model.generate(ids, max_new_tokens=6, temperature=1.0)
    torch.manual_seed(5)
    assert torch.equal(model.generate(ids, max_new_tokens=6, temperature=1.0), first)
    assert not torch.equal(model.generate(ids, max_new_tokens=6, temperature=1.0), first)


# beam search


def score(logs, alpha):
    return sum(logs) / ((5 + len(logs)) / 6) ** alpha


@torch.no_grad()
def logs_of(model, text, n_prompt):
    """Log probabilities of the tokens behind the prompt, from one reading of the whole text."""
    logits = model(torch.tensor([text]))[0].log_softmax(-1)
    return [float(logits[i - 1, text[i]]) for i in range(n_prompt, len(text))]


def every_text(vocab, n, stop):
    """All continuations of at most n tokens that end with their first stop token."""
    for tail in itertools.product(range(vocab), repeat=n):
        ends = [i for i, token in enumerate(tail) if token in stop]
        if not ends or all(token == stop[0] for token in tail[ends[0] + 1:]):  # one way of filling up
            yield tail[:ends[0] + 1] if ends else tail


def filled(tail, n, pad):
    return [*tail, *[pad] * (n - len(tail))]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize(("vocab", "stop"), [(3, []), (3, [1]), (4, []), (4, [2, 0])])
def test_a_beam_as_wide_as_all_texts_finds_and_ranks_them_as_brute_force_does(vocab, stop, alpha):
    model, ids, n = decoder(vocab=vocab, solver="midpoint"), prompt(2, 3, vocab), 3
    texts, scores = beam_search(model, ids, max_new_tokens=n, n_beams=vocab**n, length_penalty=alpha,
                                stop_tokens=stop)
    for row, found, values in zip(ids.tolist(), texts.tolist(), scores.tolist(), strict=True):
        ranked = sorted(((score(logs_of(model, [*row, *tail], 3), alpha), tail)
                         for tail in every_text(vocab, n, stop)), reverse=True)
        assert [text[3:] for text in found[:len(ranked)]] == [filled(tail, n, (stop or [0])[0]) for _, tail in ranked]
        assert max(abs(x - y) for x, (y, _) in zip(values, ranked, strict=False)) < 1e-12
        assert all(x == -math.inf for x in values[len(ranked):])  # there are no more texts
    best = model.generate(ids, max_new_tokens=n, n_beams=vocab**n, length_penalty=alpha, stop_tokens=stop)
    assert torch.equal(best, texts[:, 0])


def plain_beam_search(model, row, n, k, alpha, stop):
    """(score, tokens), best first: of all continuations of k texts by a token, and ended texts as they are, the best k.
    """
    beams = [(0.0, [])]
    for _ in range(n):
        more = []
        for value, tail in beams:
            if tail and tail[-1] in stop:
                more.append((value, tail))
                continue
            for token in range(model.config.vocab_size):
                longer = [*tail, token]
                more.append((score(logs_of(model, [*row, *longer], len(row)), alpha), longer))
        beams = sorted(more, reverse=True)[:k]
    return beams


@pytest.mark.parametrize(("k", "alpha", "stop"), [(2, 0.0, []), (3, 0.0, [4]), (3, 1.0, [4, 1]), (4, -0.5, [0])])
def test_narrow_beams_are_those_of_a_plain_search_row_by_row(k, alpha, stop):
    model, n = decoder(vocab=5, solver="rk4", sharpness=1.0), 5
    ids, mask = prompt(3, 4, 5), left_padding()
    for cache in ("exact", None):
        texts, scores = beam_search(model, ids, mask, max_new_tokens=n, n_beams=k, length_penalty=alpha,
                                    stop_tokens=stop, cache=cache)
        for i in range(3):
            wanted = plain_beam_search(model, ids[i, i:].tolist(), n, k, alpha, stop)
            width = texts.shape[2] - 4
            assert texts[i, :, 4:].tolist() == [filled(tail, n, (stop or [0])[0])[:width] for _, tail in wanted]
            assert max(abs(x - y) for x, (y, _) in zip(scores[i].tolist(), wanted, strict=True)) < 1e-12


@pytest.mark.parametrize("solver", ["euler", "rk4", "ab2", "leapfrog"])
def test_one_beam_is_greedy_and_rows_do_not_know_their_batch_mates(solver):
    model, ids, mask = decoder(solver=solver, steps=2, sharpness=1.0), prompt(), left_padding()
    texts, scores = beam_search(model, ids, max_new_tokens=6, n_beams=1)
    assert torch.equal(texts[:, 0], argmax_loop(model, ids, 6))
    for row, value in zip(texts[:, 0].tolist(), scores[:, 0].tolist(), strict=True):
        assert abs(sum(logs_of(model, row, 4)) - value) < 1e-12
    texts, scores = beam_search(model, ids, mask, max_new_tokens=6, n_beams=3, stop_tokens=[2])
    for i in range(3):
        alone, values = beam_search(model, ids[i:i + 1, i:], max_new_tokens=6, n_beams=3, stop_tokens=[2])
        n = alone.shape[2]
        assert torch.equal(texts[i, :, i:i + n], alone[0])
        assert (texts[i, :, i + n:] == 2).all()
        assert (scores[i] - values[0]).abs().max() < 1e-12


def test_a_length_penalty_changes_which_text_is_best():
    """Uniform odds but for the stop token: with alpha = 0 the shortest text wins, with a large one the longest."""
    model = decoder(vocab=3)
    with torch.no_grad():
        model.head.weight.zero_()
    ids = prompt(1, 2, 3)
    texts, scores = beam_search(model, ids, max_new_tokens=4, n_beams=81, stop_tokens=[2])
    assert texts[0, 0].tolist()[2:] == [2, 2, 2, 2] and abs(scores[0, 0] - math.log(1 / 3)) < 1e-12
    texts, scores = beam_search(model, ids, max_new_tokens=4, n_beams=81, stop_tokens=[2], length_penalty=5.0)
    assert 2 not in texts[0, 0].tolist()[2:5] and abs(scores[0, 0] - 4 * math.log(1 / 3) / 1.5**5) < 1e-12


# modes


def test_the_mode_of_every_submodule_is_restored_also_after_an_error_and_between_tokens():
    model, failing = decoder(dropout=0.3).train(), []
    model.layers[1].feedforward.eval()
    model.token_embedding.eval()
    modes = [module.training for module in model.modules()]

    def same():
        return [module.training for module in model.modules()] == modes

    def spy(*_):
        assert not any(module.training for module in model.modules())
        if failing:
            raise RuntimeError("no more")

    model.layers[0].attention.core.register_forward_hook(spy)
    model.generate(prompt(), max_new_tokens=3)
    assert same()
    model.generate(prompt(), max_new_tokens=3, n_beams=2)
    assert same()
    steps = model.stream(prompt(), max_new_tokens=3)
    next(steps)
    assert same()
    steps.close()
    assert same()
    one, two = (model.stream(prompt(), max_new_tokens=3) for _ in range(2))
    for _ in zip(one, two, strict=True):
        assert same()
    assert same()
    steps = model.stream(prompt(), max_new_tokens=3)
    next(steps)
    failing.append(True)
    for call in (lambda: next(steps), lambda: model.generate(prompt(), max_new_tokens=3),
                 lambda: model.generate(prompt(), max_new_tokens=3, n_beams=2)):
        with pytest.raises(RuntimeError, match="no more"):
            call()
        assert same()


def test_generation_in_training_mode_is_that_in_evaluation_mode():
    for per in ("solve", "evaluation"):
        model, ids = decoder(dropout=0.5, dropout_per=per, solver="rk4"), prompt()
        wanted = model.generate(ids, max_new_tokens=6), model.generate(ids, max_new_tokens=6, n_beams=2)
        model.train()
        assert torch.equal(model.generate(ids, max_new_tokens=6), wanted[0])
        assert torch.equal(model.generate(ids, max_new_tokens=6, n_beams=2), wanted[1])


# what is refused


def test_prompts_that_cannot_be_gone_on_with_are_refused():
    model, ids = decoder(), prompt()
    for call in (model.generate, model.stream, lambda *a, **o: beam_search(model, *a, n_beams=2, **o)):
        wrong(lambda: call(ids, left_padding().flip(1), max_new_tokens=1), "mask", "pad shorter prompts on the left")  # noqa: B023
        wrong(lambda: call(ids, max_new_tokens=9), "max_new_tokens", "4 + 9 = 13", "max_seq_len = 12")  # noqa: B023
        wrong(lambda: call(ids, max_new_tokens=0), "max_new_tokens", "0")  # noqa: B023
        wrong(lambda: call(ids[0], max_new_tokens=1), "tokens", "(batch, tokens)", "(4,)")  # noqa: B023
        wrong(lambda: call(ids[:, :0], max_new_tokens=1), "tokens", "(3, 0)")  # noqa: B023
        wrong(lambda: call(ids + VOCAB, max_new_tokens=1), "tokens", "vocab_size = 7")  # noqa: B023
        wrong(lambda: call(ids, left_padding()[:, 1:], max_new_tokens=1), "mask", "(3, 3)")  # noqa: B023
        wrong(lambda: call(ids, max_new_tokens=1.5), "max_new_tokens", "1.5", error=TypeError)  # noqa: B023
        wrong(lambda: call(ids.float(), max_new_tokens=1), "tokens", "float32", error=TypeError)  # noqa: B023


def test_options_out_of_range_and_options_that_would_do_nothing_are_refused():
    model, ids = decoder(), prompt()

    def refused(*words, **options):
        wrong(lambda: model.generate(ids, max_new_tokens=2, **options), *words)

    for value in (-0.1, math.nan, math.inf):
        refused("temperature", str(value), temperature=value)
    for value in (0.0, -1.0, math.nan, math.inf):
        refused("repetition_penalty", str(value), repetition_penalty=value)
    refused("top_k", "at least 1", temperature=1.0, top_k=0)
    for value in (0.0, 1.1, math.nan):
        refused("top_p", "(0, 1]", temperature=1.0, top_p=value)
    for name, value in (("top_k", 3), ("top_p", 0.5), ("generator", torch.Generator())):
        refused(name, "temperature", **{name: value})
    for name, value in (("temperature", 1.0), ("top_k", 3), ("repetition_penalty", 1.2)):
        refused(name, "n_beams = 2", n_beams=2, **{name: value})
    refused("length_penalty", "n_beams", length_penalty=1.0)
    refused("n_beams", "at least 1", n_beams=0)
    for beams in ({}, {"n_beams": 2}):
        refused("pad_token", "stop_tokens", pad_token=3, **beams)
        refused("pad_token", "vocab_size = 7", "7", pad_token=7, stop_tokens=[1], **beams)
        for value in ([7], [-1], [1.0], 3, [True]):
            refused("stop_tokens", "vocab_size = 7", repr(value), stop_tokens=value, **beams)
        refused("cache policy", "exct", cache="exct", **beams)
        refused("cache_options", "cache is None", cache=None, cache_options={"window": 3}, **beams)
        refused("window", "exact", cache_options={"window": 3}, **beams)
        refused("memory", "cross-attention", memory={"memory": torch.zeros(3, 2, 16)}, **beams)
    for name in ("top_kk", "n_beam"):
        with pytest.raises(ValueError, match=f"unknown option '{name}' for generate"):
            model.generate(ids, max_new_tokens=2, **{name: 1})
