"""What a model is looked at on: given input, else its own data where a run's settings name them, else random input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.models import Decoder, Encoder, Seq2Seq, SeriesEncoder, SpeechSeq2Seq, VisionEncoder
from odeformer.tasks import device_of, to_device


@dataclass(frozen=True)
class Sample:
    """``arguments`` and ``named`` of a call of the model; ``source``: where they come from, for the report. ``task``,
    ``batch``: of a run, whose loss is then known."""

    arguments: tuple
    named: Mapping[str, Any]
    source: str
    task: Any = None
    batch: Any = None

    def run(self, model: nn.Module) -> tuple[Any, Any]:
        """Outputs and the Solution with all states."""
        if self.task is not None:
            return self.task.forward(model, self.batch, save_states=True)
        return model(*self.arguments, **self.named, return_solution=True)

    def first(self, n: int, batch: int) -> Sample:
        """The first n rows: of every tensor that has ``batch`` of them."""
        def cut(x: Any) -> Any:
            return x[:n] if isinstance(x, Tensor) and x.dim() and len(x) == batch else x

        rows = self.batch if self.batch is None or isinstance(self.batch, Tensor) else tuple(map(cut, self.batch))
        return replace(self, arguments=tuple(map(cut, self.arguments)), batch=cut(rows),
                       named={name: cut(x) for name, x in self.named.items()})


def given(inputs: Any) -> Sample:
    """What the user gave: a tensor, a tuple of arguments, or a mapping of named ones. Raises TypeError for others."""
    source = "the inputs that were given"
    if isinstance(inputs, Tensor):
        return Sample((inputs,), {}, source)
    if isinstance(inputs, tuple | list):
        return Sample(tuple(inputs), {}, source)
    if isinstance(inputs, Mapping):
        return Sample((), dict(inputs), source)
    raise TypeError(f"inputs must be a tensor, a tuple of arguments or a mapping of named ones, got "
                    f"{type(inputs).__name__}")


def of_run(model: nn.Module, folder: Path, samples: int, max_tokens: int) -> Sample | None:
    """Test data of the run that left the model in a folder; None where no settings are there.

    Raises ValueError where the data do not go with the model.
    """
    from odeformer import recipes, settings
    from odeformer.data import DATA
    from odeformer.tokenizers import load_tokenizer

    path = folder / settings.FILE
    if not path.is_file():
        return None
    run = settings.read(path)
    name = run.get("data", settings.DEFAULTS["data"])
    data = DATA[name](**recipes.data_options(name, run.get("data_options", {})))
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    task = recipes.task_of(model, data, tokenizer, run.get("task"))
    n = min(samples, task.splits["test"])
    batch = to_device(cropped(task.batch(torch.arange(n), "test"), max_tokens), device_of(model))
    return Sample((), {}, f"the first {n} test examples of {name}", task, batch)


def cropped(batch: Any, max_tokens: int) -> Any:
    """A batch of ids, or of texts or series with masks, without what lies beyond max_tokens (one more where the last is
    only predicted). Images stay whole."""
    if isinstance(batch, Tensor):
        return batch[:, :max_tokens + 1]
    if len(batch) == 2:  # images and classes
        return batch
    if batch[1].dtype == torch.int64:  # source, target and their masks
        source, target, source_mask, target_mask = batch
        return (source[:, :max_tokens], target[:, :max_tokens + 1], source_mask[:, :max_tokens],
                target_mask[:, :max_tokens + 1])
    values, times, mask, y = batch
    return values[:, :max_tokens], times[:, :max_tokens], mask[:, :max_tokens], y


def random(model: nn.Module, samples: int, max_tokens: int, seed: int) -> Sample:
    """Random input of the kind that a model reads. Raises ValueError for a model of which that is not known."""
    make = next((make for kind, make in RANDOM.items() if isinstance(model, kind)), of_wrapped)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        arguments, what = make(model, samples, max_tokens)
    return Sample(to_device(arguments, device_of(model)), {}, f"random {what}: no data were named, and what a trained "
                  "model does on its own data can differ")


def ids(vocab_size: int, max_seq_len: int, samples: int, max_tokens: int) -> Tensor:
    """Random token ids (samples, tokens)."""
    return torch.randint(0, vocab_size, (samples, min(max_tokens, max_seq_len)))


def of_text(model: Any, samples: int, max_tokens: int) -> tuple[tuple, str]:
    return (ids(model.config.vocab_size, model.config.max_seq_len, samples, max_tokens),), "token ids"


def of_pairs(model: Any, samples: int, max_tokens: int) -> tuple[tuple, str]:
    config = model.config
    return (ids(config.vocab_size, config.max_seq_len, samples, max_tokens),
            ids(config.target_vocab_size or config.vocab_size, config.max_seq_len, samples, max_tokens)), "token ids"


def of_speech(model: Any, samples: int, max_tokens: int) -> tuple[tuple, str]:
    config = model.config
    return (torch.randn(samples, config.n_mels, min(2 * max_tokens, config.max_frames)),
            ids(config.vocab_size, config.max_seq_len, samples, max_tokens)), "frames and token ids"


def of_images(model: Any, samples: int, max_tokens: int) -> tuple[tuple, str]:
    config = model.config
    return (torch.randn(samples, config.channels, config.image_size, config.image_size),), "images"


def of_series(model: Any, samples: int, max_tokens: int) -> tuple[tuple, str]:
    values = torch.randn(samples, max_tokens, model.config.n_channels)
    return (values, torch.arange(max_tokens).double().expand(samples, -1)), "series"


def of_wrapped(model: Any, samples: int, max_tokens: int) -> tuple[tuple, str]:
    config = getattr(getattr(model, "model", None), "config", None)
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"inputs must be given for {type(getattr(model, 'model', model)).__name__}, whose input is "
                         "not known: a tensor, a tuple of arguments or a mapping of named ones")
    longest = getattr(config, "max_position_embeddings", max_tokens)
    return (ids(size, longest, samples, max_tokens),), "token ids"


RANDOM = {SpeechSeq2Seq: of_speech, Seq2Seq: of_pairs, Encoder: of_text, Decoder: of_text, VisionEncoder: of_images,
          SeriesEncoder: of_series}
