"""What a model is trained for: batches of real data, a loss, and the numbers by which it is judged.

A task has ``name``, ``n_train`` (examples an epoch), ``batch(rows)`` (those training examples), ``loss(model, batch)``
(the mean loss and the Solution of the pass) and ``evaluate(model)`` (numbers on the test data, by name).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from odeformer.data.images import Images
from odeformer.generate import evaluating
from odeformer.tables import at_least, probability
from odeformer.tokenizers import pad_batch

__all__ = ["Classification", "Language", "Task", "Translation", "accuracy", "as_task", "perplexity",
           "smoothed_cross_entropy"]

IGNORED = -100  # a target that counts for nothing


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0,
                           ignore_index: int = IGNORED) -> Tensor:
    """Mean over the targets that count of (1 - ε) (-log p_target) + ε mean over the vocabulary of -log p.

    Label smoothing (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4) with ε = ``smoothing``. ``logits``: (...,
    vocab_size); ``targets``: int64 (...); those that are ``ignore_index``, padding, take no part. 0 where none counts.

    Raises ValueError unless 0 <= smoothing < 1 and the shapes agree, TypeError for targets of another dtype.
    """
    probability("smoothing", smoothing)
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets must have the shape of logits without the vocabulary, {tuple(logits.shape[:-1])}, "
                         f"got {tuple(targets.shape)}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index,
                            label_smoothing=smoothing, reduction="sum")
    return total / (targets != ignore_index).sum().clamp(min=1)


def perplexity(token_losses: Sequence[Tensor]) -> float:
    """exp of the mean negative log likelihood (nats) over all tokens, however they were batched."""
    if isinstance(token_losses, Tensor):
        token_losses = [token_losses]
    losses = torch.cat([x.flatten().double() for x in token_losses]) if token_losses else torch.empty(0)
    if not len(losses):
        raise ValueError("token_losses must hold at least one loss")
    return losses.mean().exp().item()


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, *, batch_size: int = 512) -> float:
    """The share of images (n, channels, size, size) whose largest logit is at their class."""
    hits = sum((model(a).argmax(-1) == b).sum().item()
               for a, b in zip(x.split(batch_size), y.split(batch_size), strict=True))
    return hits / len(y)


class Task(Protocol):
    """See the module."""

    name: str
    n_train: int

    def batch(self, rows: Tensor) -> Any:
        """Training examples (a permutation's part)."""

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, Any]:
        """The mean loss, with its graph, and the Solution."""

    def evaluate(self, model: Any) -> dict[str, float]:
        """Numbers on the test data."""


@dataclass(frozen=True)
class Classification:
    """Images to classes, by cross-entropy; judged by accuracy."""

    data: Images

    @property
    def name(self) -> str:
        """The data's."""
        return self.data.name

    @property
    def n_train(self) -> int:
        """Images."""
        return len(self.data.train_x)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and classes."""
        return self.data.train_x[rows], self.data.train_y[rows]

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        x, y = batch
        logits, solution = model(x, return_solution=True, save_states=False)
        return F.cross_entropy(logits, y), solution

    def evaluate(self, model: Any) -> dict[str, float]:
        with evaluating(model):
            return {"accuracy": accuracy(model, self.data.test_x, self.data.test_y)}


class Language:
    """Text to its next tokens: windows of ``length`` tokens that lie side by side; judged by bits per byte.

    ``train``, ``test``: int64 token ids, one text after the other; ``n_test_bytes``: bytes of the test text. Where a
    token is a byte, bits per byte are bits per token.
    """

    def __init__(self, name: str, train: Tensor, test: Tensor, *, length: int, n_test_bytes: int | None = None):
        at_least("length", length, 1)
        for what, ids in (("train", train), ("test", test)):
            if len(ids) <= length:
                raise ValueError(f"{what} must hold more than length = {length} tokens, got {len(ids)}")
        self.name, self.train, self.test, self.length = name, train, test, length
        self.bytes_per_token = 1.0 if n_test_bytes is None else n_test_bytes / len(test)
        self.n_train = (len(train) - 1) // length

    def batch(self, rows: Tensor) -> Tensor:
        """(batch, length + 1): each window with the token behind it."""
        return self.train[rows[:, None] * self.length + torch.arange(self.length + 1)]

    def loss(self, model: Any, batch: Tensor) -> tuple[Tensor, Any]:
        logits, solution = model(batch[:, :-1], return_solution=True, save_states=False)
        return smoothed_cross_entropy(logits, batch[:, 1:]), solution

    def token_losses(self, model: Any, batch_size: int = 64) -> Iterator[Tensor]:
        """Losses (nats) of the test tokens, window after window, the last one shorter."""
        n = (len(self.test) - 1) // self.length * self.length
        x, y = (self.test[i:i + n].view(-1, self.length) for i in (0, 1))
        rest = (self.test[n:-1][None], self.test[n + 1:][None])
        for a, b in [*zip(x.split(batch_size), y.split(batch_size), strict=True), rest]:
            if b.numel():
                yield F.cross_entropy(model(a).flatten(0, 1).float(), b.flatten(), reduction="none")

    def evaluate(self, model: Any) -> dict[str, float]:
        with evaluating(model):
            nats = math.log(perplexity(list(self.token_losses(model))))
        return {"bits_per_byte": nats / math.log(2) / self.bytes_per_token}


class Translation:
    """Source sentences to target sentences, with label smoothing; judged by the loss, and BLEU where asked.

    ``train``, ``test``: (source, target) pairs of token id lists. ``start``, ``stop``, ``pad``: token ids; a target is
    read from ``start`` on and ends with ``stop``.
    """

    def __init__(self, name: str, train: Sequence[tuple[list[int], list[int]]],
                 test: Sequence[tuple[list[int], list[int]]], *, start: int, stop: int, pad: int,
                 smoothing: float = 0.1):
        probability("smoothing", smoothing)
        if not train or not test:
            raise ValueError(f"train and test must hold pairs, got {len(train)} and {len(test)}")
        self.name, self.train, self.test = name, train, test
        self.start, self.stop, self.pad, self.smoothing = start, stop, pad, smoothing
        self.n_train = len(train)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Source and target (start ... stop) with their masks."""
        return self.padded([self.train[row] for row in rows.tolist()])

    def padded(self, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pairs as tensors (batch, tokens), padded on the right, and bool masks."""
        source, source_mask = pad_batch([x for x, _ in pairs], pad=self.pad)
        target, target_mask = pad_batch([[self.start, *y, self.stop] for _, y in pairs], pad=self.pad)
        return source, target, source_mask, target_mask

    def loss(self, model: Any, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Any]:
        source, target, source_mask, target_mask = batch
        logits, solution = model(source, target[:, :-1], source_mask, target_mask[:, :-1], return_solution=True,
                                 save_states=False)
        wanted = target[:, 1:].masked_fill(~target_mask[:, 1:], IGNORED)
        return smoothed_cross_entropy(logits, wanted, self.smoothing), solution

    def evaluate(self, model: Any, batch_size: int = 64) -> dict[str, float]:
        losses = []
        with evaluating(model):
            for i in range(0, len(self.test), batch_size):
                source, target, source_mask, target_mask = self.padded(self.test[i:i + batch_size])
                logits = model(source, target[:, :-1], source_mask, target_mask[:, :-1]).float()
                real = target_mask[:, 1:]
                losses.append(F.cross_entropy(logits[real], target[:, 1:][real], reduction="none"))
        return {"perplexity": perplexity(losses)}


def as_task(data: Any) -> Task:
    """A task of its own, or what data is usually used for."""
    return Classification(data) if isinstance(data, Images) else data
