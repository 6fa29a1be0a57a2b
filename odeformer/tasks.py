"""What a model is trained for: batches of real data, a loss, and the numbers by which it is judged.

A task of your own has ``name``, ``n_train`` (examples an epoch), ``batch(rows)`` (those training examples),
``loss(model, batch)`` (the mean loss and the Solution of the pass) and ``evaluate(model)`` (numbers on the test data,
by name). Derived from ``Task`` it needs ``splits``, ``batch``, ``forward``, ``criterion`` and ``evaluate``, and can be
validated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from odeformer.data.images import Images
from odeformer.data.series import Series
from odeformer.generate import evaluating
from odeformer.metrics import (
    IGNORED,
    accuracy,
    exact,
    perplexity,
    smoothed_cross_entropy,
    translation_scores,
)
from odeformer.order import put_aside
from odeformer.tables import at_least, probability
from odeformer.tokenizers import pad_batch

__all__ = ["Classification", "Language", "SeriesPrediction", "Task", "Translation", "accuracy", "as_task", "perplexity",
           "smoothed_cross_entropy"]


class Task:
    """See the module. ``splits``: the numbers of examples in "train", "valid" and "test".

    ``metric``: the number of ``evaluate`` by which models are compared; ``higher``: whether more of it is better.
    ``unit``: what ``count`` counts.
    """

    name: str
    metric = "loss"
    higher = False
    unit = "examples"

    @property
    def splits(self) -> dict[str, int]:
        """Examples in each split."""
        raise NotImplementedError

    @property
    def n_train(self) -> int:
        """Examples to train on."""
        return self.splits["train"]

    @property
    def n_valid(self) -> int:
        """Examples to validate on."""
        return self.splits.get("valid", 0)

    def batch(self, rows: Tensor, split: str = "train") -> Any:
        """Examples of a split: a tensor or a tuple of them, on the CPU."""
        raise NotImplementedError

    def forward(self, model: Any, batch: Any, *, save_states: bool = False) -> tuple[Tensor, Any]:
        """The model's outputs and the Solution, with every state if ``save_states``."""
        raise NotImplementedError

    def criterion(self, outputs: Tensor, batch: Any) -> Tensor:
        """The mean loss over what ``count`` counts."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Any, *, save_states: bool = False) -> tuple[Tensor, Any]:
        """The mean loss, with its graph, and the Solution."""
        outputs, solution = self.forward(model, batch, save_states=save_states)
        return self.criterion(outputs, batch), solution

    def count(self, batch: Any) -> int:
        """What the mean loss of a batch is a mean over: by default the examples."""
        return len(batch if isinstance(batch, Tensor) else batch[0])

    def real(self, batch: Any) -> Tensor | None:
        """Where states are those of real tokens (batch, tokens), bool; None: everywhere."""
        return None

    def evaluate(self, model: Any, split: str = "test") -> dict[str, Any]:
        """Numbers on a split, by name."""
        raise NotImplementedError

    def batches(self, model: Any, split: str, size: int) -> Iterator[Any]:
        """All examples of a split in order, on the model's device."""
        device = device_of(model)
        for rows in torch.arange(self.splits[split]).split(size):
            yield to_device(self.batch(rows, split), device)


def device_of(model: Any) -> torch.device:
    """Where a model's parameters are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(batch: Any, device: torch.device) -> Any:
    """A tensor, or a tuple of such, on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return tuple(to_device(part, device) for part in batch) if isinstance(batch, tuple | list) else batch


@dataclass(frozen=True)
class Classification(Task):
    """Images to classes, by cross-entropy; judged by accuracy.

    ``valid``: the share of the training images that is put aside to validate on, the same for every seed.
    """

    data: Images
    valid: float = 0.0
    metric, higher, unit = "accuracy", True, "images"
    rows: dict[str, Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        probability("valid", self.valid)
        train, valid = put_aside(len(self.data.train_x), self.valid)
        object.__setattr__(self, "rows", {"train": train, "valid": valid, "test": torch.arange(len(self.data.test_x))})

    @property
    def name(self) -> str:
        """The data's."""
        return self.data.name

    @property
    def splits(self) -> dict[str, int]:
        """Images."""
        return {split: len(rows) for split, rows in self.rows.items()}

    def batch(self, rows: Tensor, split: str = "train") -> tuple[Tensor, Tensor]:
        """Images and classes."""
        x, y = ((self.data.test_x, self.data.test_y) if split == "test" else (self.data.train_x, self.data.train_y))
        chosen = self.rows[split][rows]
        return x[chosen], y[chosen]

    def forward(self, model: Any, batch: tuple[Tensor, Tensor], *, save_states: bool = False) -> tuple[Tensor, Any]:
        return model(batch[0], return_solution=True, save_states=save_states)

    def criterion(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(exact(outputs), batch[1])

    def evaluate(self, model: Any, split: str = "test", batch_size: int = 512) -> dict[str, float]:
        with evaluating(model):
            hits = sum((model(x).argmax(-1) == y).sum().item() for x, y in self.batches(model, split, batch_size))
        return {"accuracy": hits / self.splits[split]}


class Language(Task):
    """Text to its next tokens: windows of ``length`` tokens that lie side by side; judged by bits per byte.

    ``train``, ``test``, ``valid``: int64 token ids, one text after the other; ``n_test_bytes``, ``n_test_characters``,
    ``n_valid_bytes``: how long those texts are. Where it is not said tokens are taken for bytes, unless ids beyond 255
    say that they are none: then the text is judged by bits per token.
    """

    unit = "tokens"

    def __init__(self, name: str, train: Tensor, test: Tensor, *, length: int, valid: Tensor | None = None,
                 n_test_bytes: int | None = None, n_test_characters: int | None = None,
                 n_valid_bytes: int | None = None):
        at_least("length", length, 1)
        for what, ids in (("train", train), ("test", test)):
            if len(ids) <= length:
                raise ValueError(f"{what} must hold more than length = {length} tokens, got {len(ids)}")
        self.name, self.train, self.test, self.length = name, train, test, length
        self.valid = train[:0] if valid is None else valid
        self.n_bytes = {"test": n_test_bytes, "valid": n_valid_bytes}
        self.n_characters = {"test": n_test_characters}
        of_bytes = all(len(ids) == 0 or int(ids.max()) < 256 for ids in (train, test, self.valid))
        known = n_test_bytes is not None and (n_valid_bytes is not None or not len(self.valid))
        self.metric = "bits_per_byte" if known or of_bytes else "bits_per_token"

    @property
    def splits(self) -> dict[str, int]:
        """Whole windows."""
        return {split: max(0, len(getattr(self, split)) - 1) // self.length for split in ("train", "valid", "test")}

    def batch(self, rows: Tensor, split: str = "train") -> Tensor:
        """(batch, length + 1): each window with the token behind it."""
        return getattr(self, split)[rows[:, None] * self.length + torch.arange(self.length + 1)]

    def forward(self, model: Any, batch: Tensor, *, save_states: bool = False) -> tuple[Tensor, Any]:
        return model(batch[:, :-1], return_solution=True, save_states=save_states)

    def criterion(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return smoothed_cross_entropy(outputs, batch[:, 1:])

    def count(self, batch: Tensor) -> int:
        """Tokens to predict."""
        return batch[:, 1:].numel()

    def token_losses(self, model: Any, batch_size: int = 64, split: str = "test") -> Iterator[Tensor]:
        """Losses (nats) of the tokens of a split, window after window, the last one shorter."""
        ids, n = getattr(self, split), self.splits[split] * self.length
        for batch in [*self.batches(model, split, batch_size), to_device(ids[n:][None], device_of(model))]:
            if batch.shape[1] > 1:
                yield F.cross_entropy(exact(model(batch[:, :-1]).flatten(0, 1)), batch[:, 1:].flatten(),
                                      reduction="none")

    def evaluate(self, model: Any, split: str = "test", batch_size: int = 64) -> dict[str, float]:
        """``bits_per_byte`` (or ``bits_per_token``), ``bits_per_character`` where the text's characters are known,
        ``perplexity`` a token."""
        with evaluating(model):
            value = perplexity(list(self.token_losses(model, batch_size, split)))
        bits = math.log2(value) * len(getattr(self, split))
        n = self.n_bytes.get(split) if self.metric == "bits_per_byte" else None
        lengths = {self.metric: n or len(getattr(self, split)), "bits_per_character": self.n_characters.get(split)}
        return {name: bits / n for name, n in lengths.items() if n} | {"perplexity": value}


class Translation(Task):
    """Source sentences to target sentences, with label smoothing; judged by perplexity a token, and by BLEU and chrF.

    ``train``, ``test``, ``valid``: (source, target) pairs of token id lists. ``start``, ``stop``, ``pad``: token ids; a
    target is read from ``start`` on and ends with ``stop``. With ``tokenizer`` and ``references``, the target texts of
    the test pairs, the test pairs are translated as well (greedily), and scored by sacrebleu.
    """

    metric, unit = "perplexity", "tokens"

    def __init__(self, name: str, train: Sequence[tuple[list[int], list[int]]],
                 test: Sequence[tuple[list[int], list[int]]], *, start: int, stop: int, pad: int,
                 smoothing: float = 0.1, valid: Sequence[tuple[list[int], list[int]]] = (), tokenizer: Any = None,
                 references: Sequence[str] | None = None):
        probability("smoothing", smoothing)
        if not train or not test:
            raise ValueError(f"train and test must hold pairs, got {len(train)} and {len(test)}")
        if references is not None and (tokenizer is None or len(references) != len(test)):
            raise ValueError(f"references must come with a tokenizer, one for each of the {len(test)} test pairs; got "
                             f"{len(references)} and tokenizer = {tokenizer!r}")
        self.name, self.train, self.test, self.valid = name, train, test, valid
        self.start, self.stop, self.pad, self.smoothing = start, stop, pad, smoothing
        self.tokenizer, self.references = tokenizer, references

    @property
    def splits(self) -> dict[str, int]:
        """Pairs."""
        return {split: len(getattr(self, split)) for split in ("train", "valid", "test")}

    def batch(self, rows: Tensor, split: str = "train") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Source and target (start ... stop) with their masks."""
        pairs = getattr(self, split)
        return self.padded([pairs[row] for row in rows.tolist()])

    def padded(self, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pairs as tensors (batch, tokens), padded on the right, and bool masks."""
        source, source_mask = pad_batch([x for x, _ in pairs], pad=self.pad)
        target, target_mask = pad_batch([[self.start, *y, self.stop] for _, y in pairs], pad=self.pad)
        return source, target, source_mask, target_mask

    def forward(self, model: Any, batch: Any, *, save_states: bool = False) -> tuple[Tensor, Any]:
        source, target, source_mask, target_mask = batch
        return model(source, target[:, :-1], source_mask, target_mask[:, :-1], return_solution=True,
                     save_states=save_states)

    def criterion(self, outputs: Tensor, batch: Any) -> Tensor:
        _, target, _, target_mask = batch
        return smoothed_cross_entropy(outputs, target[:, 1:].masked_fill(~target_mask[:, 1:], IGNORED), self.smoothing)

    def count(self, batch: Any) -> int:
        """Target tokens to predict."""
        return int(batch[3][:, 1:].sum())

    def real(self, batch: Any) -> Tensor:
        """Target tokens that are read."""
        return batch[3][:, :-1]

    def evaluate(self, model: Any, split: str = "test", batch_size: int = 64) -> dict[str, Any]:
        """``perplexity`` a token; on the test pairs also what ``translation_scores`` gives."""
        losses = []
        with evaluating(model):
            for source, target, source_mask, target_mask in self.batches(model, split, batch_size):
                logits = exact(model(source, target[:, :-1], source_mask, target_mask[:, :-1]))
                real = target_mask[:, 1:]
                losses.append(F.cross_entropy(logits[real], target[:, 1:][real], reduction="none"))
        found: dict[str, Any] = {"perplexity": perplexity(losses)}
        if split == "test" and self.references is not None:
            found |= translation_scores(self.translate(model, batch_size), self.references)
        return found

    def translate(self, model: Any, batch_size: int = 64) -> list[str]:
        """Greedy translations of the test sources, at most as long as the model reads."""
        written = []
        for source, _, mask, _ in self.batches(model, "test", batch_size):
            ids = model.generate(source, mask, start=self.start, max_new_tokens=model.config.max_seq_len - 1,
                                 stop_tokens=[self.stop], pad_token=self.pad)
            written += [self.tokenizer.decode(row[1:].tolist()) for row in ids]
        return written


class SeriesPrediction(Task):
    """Time series to their class, by cross-entropy, or to a number, by the squared error.

    Judged by accuracy, or by the root mean squared error. ``valid``: as of Classification.
    """

    unit = "series"

    def __init__(self, data: Series, *, valid: float = 0.0):
        probability("valid", valid)
        self.data, self.name = data, data.name
        self.metric, self.higher = ("accuracy", True) if data.classes else ("rmse", False)
        train, held_out = put_aside(len(data.train_y), valid)
        self.rows = {"train": train, "valid": held_out, "test": torch.arange(len(data.test_y))}

    @property
    def splits(self) -> dict[str, int]:
        """Series."""
        return {split: len(rows) for split, rows in self.rows.items()}

    def batch(self, rows: Tensor, split: str = "train") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values, times and mask up to the end of the longest, and what is to be predicted."""
        part, chosen = "test" if split == "test" else "train", self.rows[split][rows]
        values, times, mask, y = (getattr(self.data, f"{part}_{name}")[chosen]
                                  for name in ("values", "times", "mask", "y"))
        n = max(1, int(mask.any(0).sum()))
        return values[:, :n], times[:, :n], mask[:, :n], y

    def forward(self, model: Any, batch: Any, *, save_states: bool = False) -> tuple[Tensor, Any]:
        return model(*batch[:3], return_solution=True, save_states=save_states)

    def criterion(self, outputs: Tensor, batch: Any) -> Tensor:
        if self.data.classes:
            return F.cross_entropy(exact(outputs), batch[3])
        return F.mse_loss(exact(outputs).squeeze(-1), batch[3])

    def real(self, batch: Any) -> Tensor:
        """Real points."""
        return batch[2]

    def evaluate(self, model: Any, split: str = "test", batch_size: int = 256) -> dict[str, float]:
        total = 0.0
        with evaluating(model):
            for batch in self.batches(model, split, batch_size):
                outputs, y = exact(model(*batch[:3])), batch[3]
                part = (outputs.argmax(-1) == y) if self.data.classes else (outputs.squeeze(-1) - y).square()
                total += part.double().sum().item()
        mean = total / self.splits[split]
        return {"accuracy": mean} if self.data.classes else {"rmse": math.sqrt(mean)}


def as_task(data: Any) -> Any:
    """A task of its own, or what data is usually used for."""
    usual = {Images: Classification, Series: SeriesPrediction}.get(type(data))
    return data if usual is None else usual(data)
