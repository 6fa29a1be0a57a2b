"""Text from a decoder: greedy, sampled, or by beam search, each token read once through a cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.cache import make_cache
from odeformer.tables import at_least


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from logits (batch, vocab_size).

    ``temperature``: 0 takes the most likely token; else logits are divided by it and a token drawn. ``top_k``: only
    from the k most likely. ``top_p``: only from the fewest tokens that together have at least this probability
    (Holtzman et al. 2020). ``repetition_penalty``: logits of tokens that the text holds already are divided by it where
    positive, multiplied where negative (Keskar et al. 2019). ``generator``: a torch.Generator, for draws of their own.

    Raises ValueError for numbers out of range, and for top_k, top_p or generator at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    generator: torch.Generator | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty}")
        if self.top_k is not None:
            at_least("top_k", self.top_k, 1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        for name in ("top_k", "top_p", "generator"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ValueError(f"{name} is for sampling; give a temperature greater than 0, too")

    def penalized(self, logits: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        """Logits under the repetition penalty; text (batch, tokens), mask its real tokens."""
        if self.repetition_penalty == 1:
            return logits
        real = torch.ones_like(text) if mask is None else mask.to(text.dtype)
        used = torch.zeros(logits.shape, dtype=text.dtype, device=text.device).scatter_add_(1, text.long(), real) > 0
        weaker = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return torch.where(used, weaker, logits)

    def choose(self, logits: Tensor) -> Tensor:
        """The next tokens (batch,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            highest = logits.topk(self.top_k, -1)
            logits = torch.full_like(logits, float("-inf")).scatter_(1, highest.indices, highest.values)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = logits.sort(-1, descending=True)
            p = ordered.softmax(-1)
            beyond = p.cumsum(-1) - p >= self.top_p  # the more likely ones suffice; never so for the first
            logits = logits.masked_fill(torch.empty_like(beyond).scatter_(1, order, beyond), float("-inf"))
        return torch.multinomial(logits.softmax(-1), 1, generator=self.generator).squeeze(1)


class Reader:
    """Reads on in a text: called with all of it, gives the logits of the next token (batch, vocab_size).

    With a cache only what is new is read; ``memory`` is what a decoder with cross-attention attends to.
    """

    def __init__(self, model: Any, cache: str | type | None, cache_options: Mapping[str, Any] | None,
                 memory: Mapping[str, Any] | None = None):
        if cache is None and cache_options:
            raise ValueError(f"cache_options are for a cache, and cache is None; got {dict(cache_options)}")
        self.model, self.cache = model, None if cache is None else make_cache(cache, cache_options)
        self.memory = dict(memory or {})

    def __call__(self, text: Tensor, mask: Tensor | None) -> Tensor:
        start = 0 if self.cache is None else self.cache.n_tokens
        new = None if mask is None else mask[:, start:]
        solution = self.model.run(text[:, start:], new, cache=self.cache, **self.memory)
        logits = self.model.read_out(solution.z[:, -1:])[:, 0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def reorder(self, index: Tensor) -> None:
        """Row i goes on with what row index[i] has read."""
        if self.cache is not None:
            self.cache.reorder(index)
        self.memory = {name: None if x is None else x[index] for name, x in self.memory.items()}


def is_id(token: Any, vocab_size: int) -> bool:
    """Whether it is an int in [0, vocab_size)."""
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size


class Endings:
    """Which rows have met a stop token; those get the pad token from then on.

    Raises ValueError for ids that the vocabulary does not have, and for a pad token without stop tokens.
    """

    def __init__(self, rows: int, stop_tokens: Sequence[int], pad_token: int | None, vocab_size: int,
                 device: torch.device):
        if isinstance(stop_tokens, int | str) or not all(is_id(token, vocab_size) for token in stop_tokens):
            raise ValueError(f"stop_tokens must be a sequence of ids in [0, vocab_size = {vocab_size}), got "
                             f"{stop_tokens!r}")
        if pad_token is not None and not is_id(pad_token, vocab_size):
            raise ValueError(f"pad_token must be an id in [0, vocab_size = {vocab_size}), got {pad_token!r}")
        if pad_token is not None and not stop_tokens:
            raise ValueError(f"pad_token fills up texts that have met a stop token; give stop_tokens, too, beside "
                             f"pad_token = {pad_token}")
        self.stop = torch.tensor(list(stop_tokens), dtype=torch.int64, device=device)
        self.pad = pad_token if pad_token is not None else (stop_tokens[0] if stop_tokens else 0)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)

    def mark(self, new: Tensor) -> Tensor:
        """New tokens (rows,) with the pad token in rows that had ended; rows that end now are marked."""
        new = new.masked_fill(self.done, self.pad)
        self.done = self.done | torch.isin(new, self.stop)
        return new

    def all_done(self) -> bool:
        """Whether nothing is left to write; read from the device only where there are stop tokens."""
        return len(self.stop) > 0 and bool(self.done.all())


@contextmanager
def evaluating(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Evaluation mode without gradients; the mode of every module is as it was afterwards.

    ``modules``: all of the model's, where they are at hand.
    """
    trained = [module for module in (model.modules() if modules is None else modules) if module.training]
    try:
        if trained:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in trained:
            module.training = True


def check_prompt(model: Any, tokens: Tensor, mask: Tensor | None, max_new_tokens: int) -> None:
    """Raises ValueError for a prompt that cannot be gone on with."""
    at_least("max_new_tokens", max_new_tokens, 1)
    model.check(tokens, mask)
    total, longest = tokens.shape[1] + max_new_tokens, model.config.max_seq_len
    if total > longest:
        raise ValueError(f"prompt and max_new_tokens must fit into max_seq_len = {longest}; got {tokens.shape[1]} + "
                         f"{max_new_tokens} = {total}")
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError("mask must be True at the last token of every prompt: pad shorter prompts on the left")


def stream(model: Any, tokens: Tensor, mask: Tensor | None = None, *, max_new_tokens: int,
           stop_tokens: Sequence[int] = (), pad_token: int | None = None, cache: str | type | None = "exact",
           cache_options: Mapping[str, Any] | None = None, memory: Mapping[str, Any] | None = None,
           **sampling: Any) -> Iterator[Tensor]:
    """The new tokens (batch,), one after the other, until max_new_tokens or until every row has met a stop token.

    Arguments as of ``generate``. Between two tokens the model is in the mode in which it was.
    """
    check_prompt(model, tokens, mask, max_new_tokens)
    known = [f.name for f in fields(Sampling)]
    for name in sampling:
        if name not in known:
            raise ValueError(f"unknown option {name!r} for generate; known: {', '.join(known)}, those of stream, and "
                             "n_beams and length_penalty")
    chosen_by = Sampling(**sampling)
    endings = Endings(len(tokens), stop_tokens, pad_token, model.config.vocab_size, tokens.device)
    return _stream(Reader(model, cache, cache_options, memory), chosen_by, endings, tokens, mask, max_new_tokens)


def _stream(reader: Reader, sampling: Sampling, endings: Endings, text: Tensor, mask: Tensor | None,
            max_new_tokens: int) -> Iterator[Tensor]:
    modules = list(reader.model.modules())
    for _ in range(max_new_tokens):
        with evaluating(reader.model, modules):
            logits = sampling.penalized(reader(text, mask), text, mask)
            new = endings.mark(sampling.choose(logits))
        yield new
        if endings.all_done():
            return
        text, mask = longer(text, mask, new)


def longer(text: Tensor, mask: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor | None]:
    """Text and mask with one more token a row."""
    return (torch.cat([text, new[:, None]], 1),
            None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1))


def generate(model: Any, tokens: Tensor, mask: Tensor | None = None, *, max_new_tokens: int, n_beams: int = 1,
             length_penalty: float | None = None, **options: Any) -> Tensor:
    """Prompt and continuation (batch, tokens + at most max_new_tokens).

    ``mask``: bool, True = real token; shorter prompts are padded on the left. ``stop_tokens``: a row ends with the
    first of these, and ``pad_token`` fills it up (by default the first stop token, or 0). ``temperature``, ``top_k``,
    ``top_p``, ``repetition_penalty``, ``generator``: see ``Sampling``; greedy unless told. ``cache``: a policy of
    CACHES with ``cache_options``, or None to read the whole text anew for each token. ``n_beams`` > 1: beam search,
    see ``beam_search``; then no sampling.
    """
    at_least("n_beams", n_beams, 1)
    if n_beams > 1:
        for name in {f.name for f in fields(Sampling)} & options.keys():
            raise ValueError(f"{name} is for choosing one token at a time, which a beam search (n_beams = {n_beams}) "
                             "does not do")
        return beam_search(model, tokens, mask, max_new_tokens=max_new_tokens, n_beams=n_beams,
                           length_penalty=0.0 if length_penalty is None else length_penalty, **options)[0][:, 0]
    if length_penalty is not None:
        raise ValueError("length_penalty is for beam search; give n_beams greater than 1, too")
    with evaluating(model):
        new = list(stream(model, tokens, mask, max_new_tokens=max_new_tokens, **options))
    return torch.cat([tokens, torch.stack(new, 1)], 1)


def beam_search(model: Any, tokens: Tensor, mask: Tensor | None = None, *, max_new_tokens: int, n_beams: int,
                length_penalty: float = 0.0, stop_tokens: Sequence[int] = (), pad_token: int | None = None,
                cache: str | type | None = "exact", cache_options: Mapping[str, Any] | None = None,
                memory: Mapping[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """Texts (batch, n_beams, tokens + at most max_new_tokens) and their scores (batch, n_beams), best first.

    The score is the sum of log probabilities divided by ((5 + length) / 6)^length_penalty (Wu et al. 2016, eq. 14,
    without coverage), length counting the new tokens of a text up to its stop token. Texts that have ended keep their
    place among the beams by their score.
    """
    check_prompt(model, tokens, mask, max_new_tokens)
    at_least("n_beams", n_beams, 1)
    batch, k, device = len(tokens), n_beams, tokens.device
    reader = Reader(model, cache, cache_options, memory)
    endings = Endings(batch * k, stop_tokens, pad_token, model.config.vocab_size, device)
    rows = torch.arange(batch, device=device).repeat_interleave(k)
    with evaluating(model):
        logits = reader(tokens, mask)[rows]
        reader.reorder(rows)
        total = logits.new_full((batch, k), float("-inf"))
        total[:, 0] = 0  # at first all beams are alike: only one counts
        length = logits.new_zeros(batch, k)
        text, mask = tokens[rows], None if mask is None else mask[rows]
        for step in range(max_new_tokens):
            if step:
                logits = reader(text, mask)
            done = endings.done.view(batch, k, 1)
            p = logits.log_softmax(-1).view(batch, k, -1)
            ended = torch.full_like(p, float("-inf"))
            ended[:, :, endings.pad] = 0  # a text that has ended goes on in one way, at no cost
            totals = total[:, :, None] + torch.where(done, ended, p)
            lengths = (length[:, :, None] + (~done).to(length.dtype)).expand_as(totals)
            scores = totals / penalty(lengths, length_penalty)
            best = scores.flatten(1).topk(k, 1).indices  # (batch, beams), into beams x vocabulary
            total, length = totals.flatten(1).gather(1, best), lengths.flatten(1).gather(1, best)
            beam = (best // p.shape[-1] + torch.arange(batch, device=device)[:, None] * k).flatten()
            reader.reorder(beam)
            endings.done = endings.done[beam]
            text, mask = longer(text[beam], None if mask is None else mask[beam],
                                endings.mark((best % p.shape[-1]).flatten()))
            if endings.all_done():
                break
    return text.view(batch, k, -1), total / penalty(length, length_penalty)


def penalty(length: Tensor, alpha: float) -> Tensor:
    """((5 + length) / 6)^alpha."""
    return ((5 + length) / 6) ** alpha
