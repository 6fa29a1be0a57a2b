"""What ``odeformer train`` builds for a data set: a task, a model of a usual shape, and a tokenizer for text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from odeformer.block import BlockConfig
from odeformer.data import Images, Text
from odeformer.depth import DepthConfig
from odeformer.models import Decoder, DecoderConfig, VisionConfig, VisionEncoder
from odeformer.tasks import Classification, Language, Task
from odeformer.tokenizers import ByteTokenizer

PATCHES = 8  # a side, at most; images are cut into as many as divide them


@dataclass(frozen=True)
class Recipe:
    """A task, the config of a model for it with that model's class, and a tokenizer where the data are text."""

    task: Task
    kind: type
    config: Any
    tokenizer: Any = None


def images(data: Images, block: BlockConfig, depth: DepthConfig, n_layers: int, length: int) -> Recipe:
    """A vision encoder that classifies."""
    patch = next(p for p in range(2, data.size + 1) if data.size % p == 0 and data.size // p <= PATCHES)
    config = VisionConfig(image_size=data.size, patch_size=patch, channels=data.channels, n_classes=data.n_classes,
                          n_layers=n_layers, block=block, depth=depth)
    return Recipe(Classification(data), VisionEncoder, config)


def text(data: Text, block: BlockConfig, depth: DepthConfig, n_layers: int, length: int) -> Recipe:
    """A byte language model that reads ``length`` bytes."""
    tokenizer = ByteTokenizer()
    config = DecoderConfig(vocab_size=tokenizer.vocab_size, max_seq_len=length, n_layers=n_layers, block=block,
                           depth=depth)
    return Recipe(language(data, tokenizer, length), Decoder, config, tokenizer)


def language(data: Text, tokenizer: Any, length: int) -> Language:
    """The task of a language model on a text."""
    return Language(data.name, data.ids("train", tokenizer), data.ids("test", tokenizer), length=length,
                    n_test_bytes=len(data.test.encode()))


RECIPES: dict[type, Callable[..., Recipe]] = {Images: images, Text: text}


def recipe(data: Any, block: BlockConfig, depth: DepthConfig, n_layers: int, length: int) -> Recipe:
    """The recipe for a data set. Raises ValueError for data that have none."""
    if type(data) not in RECIPES:
        raise ValueError(f"data must be images or text for this command, got {type(data).__name__} from {data.name!r}; "
                         "train on others in Python, with odeformer.train.Trainer and a task of odeformer.tasks")
    return RECIPES[type(data)](data, block, depth, n_layers, length)


def task_of(model: Any, data: Any, tokenizer: Any) -> Task:
    """What a trained model is judged by on a data set. Raises ValueError where they do not go together."""
    wanted = {VisionEncoder: Images, Decoder: Text}.get(type(model))
    if not isinstance(data, wanted or ()):
        raise ValueError(f"data {data.name!r} does not go with a model that is a {type(model).__name__}; name the data "
                         "that it was trained on")
    return Classification(data) if wanted is Images else language(data, tokenizer, model.config.max_seq_len)
