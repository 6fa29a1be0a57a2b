"""What a model is timed and traced on: made-up inputs of a given size, and the passes over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.models.parts import parts_of
from odeformer.tables import at_least


def longest(model: nn.Module) -> int | None:
    """The most tokens that a model of text reads; None for images and series."""
    part = list(parts_of(model).values())[-1]
    return getattr(part.config, "max_seq_len", None)


def inputs(model: nn.Module, batch: int, n_tokens: int | None = None) -> list[Tensor]:
    """What a model reads, in order: ids, images, values and times, or features and ids. ``n_tokens``: of texts (both of
    a translator) and points of series; max_seq_len if None. Raises ValueError for more than the model reads, for a
    series without a number of points, and for other images."""
    at_least("batch", batch, 1)
    config, most = model.config, longest(model)
    if hasattr(config, "image_size"):
        if n_tokens is not None:
            raise ValueError(f"n_tokens is for texts and series, and this model reads images; got {n_tokens}")
        return [torch.zeros(batch, config.channels, config.image_size, config.image_size)]
    n_tokens = most if n_tokens is None else n_tokens
    if n_tokens is None:
        raise ValueError("n_tokens, the points of a series, must be given for a model of series")
    at_least("n_tokens", n_tokens, 1)
    if most is not None and n_tokens > most:
        raise ValueError(f"n_tokens must be at most max_seq_len = {most}, got {n_tokens}")
    if hasattr(config, "n_channels"):
        return [torch.zeros(batch, n_tokens, config.n_channels), torch.zeros(batch, n_tokens)]
    ids = torch.zeros(batch, n_tokens, dtype=torch.int64)
    if hasattr(config, "n_mels"):
        return [torch.zeros(batch, config.n_mels, config.max_frames), ids]
    return [ids, ids] if hasattr(model, "decoder") else [ids]


def loss(model: nn.Module, given: list[Tensor]) -> tuple[Tensor, Any]:
    """The loss of a training pass, the cross-entropy of the outputs, whose last axis is taken for classes; and the
    Solution."""
    outputs, solution = model(*given, return_solution=True, save_states=False)
    outputs = outputs.flatten(0, -2)
    return F.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.int64)), solution


def writing(model: nn.Module, batch: int, n_tokens: int, cache: Any = "exact") -> Iterator[Tensor]:
    """Tokens written one after the other behind ``n_tokens`` that are read first, by a decoder."""
    text = torch.zeros(batch, n_tokens, dtype=torch.int64)
    return model.stream(text, max_new_tokens=model.config.max_seq_len - n_tokens, cache=cache)
