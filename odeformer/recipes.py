"""What ``odeformer train`` makes of a kind of data: a task, a model of a usual shape, and a tokenizer for text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

import torch

from odeformer import settings
from odeformer.data import DATA, Images, Pairs, Series, Text
from odeformer.models import (
    Decoder,
    DecoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
    SeriesConfig,
    SeriesEncoder,
    VisionConfig,
    VisionEncoder,
)
from odeformer.settings import RunConfig, check_keys, checked_options, filled
from odeformer.tables import look_up
from odeformer.tasks import Classification, Language, SeriesPrediction, Task, Translation
from odeformer.tokenizers import TOKENIZERS, ByteTokenizer

PATCHES = 8  # a side, at most; images are cut into as many as divide them
VALID = 0.1  # the share put aside where a run is validated and the data have no validation split


def images(data: Images, tokenizer: None, config: VisionConfig, *, valid: float = 0.0) -> Classification:
    """Classification; ``valid``: the share of the training images to validate on."""
    return Classification(data, valid)


def text(data: Text, tokenizer: Any, config: DecoderConfig) -> Language:
    """A language model's task; it reads ``max_seq_len`` tokens at once."""
    ids = {split: data.ids(split, tokenizer) for split in ("train", "valid", "test")}
    return Language(data.name, **ids, length=config.max_seq_len, n_test_bytes=len(data.test.encode()),
                    n_test_characters=len(data.test), n_valid_bytes=len(data.valid.encode()))


def pairs(data: Pairs, tokenizer: Any, config: Seq2SeqConfig, *, smoothing: float = 0.1) -> Translation:
    """Translation of the pairs that both fit into ``max_seq_len``, with label smoothing."""
    ids, references = {}, []
    for split in ("train", "valid", "test"):
        both = [((tokenizer.encode(source), tokenizer.encode(target)), target)
                for source, target in getattr(data, split)]
        short = [(x, target) for x, target in both if min(map(len, x)) > 0 and max(map(len, x)) < config.max_seq_len]
        ids[split], references = [x for x, _ in short], [target for _, target in short]
    return Translation(data.name, **ids, start=tokenizer.start, stop=tokenizer.stop, pad=tokenizer.pad,
                       smoothing=smoothing, tokenizer=tokenizer, references=references)


def series(data: Series, tokenizer: None, config: SeriesConfig, *, valid: float = 0.0) -> SeriesPrediction:
    """Prediction of the class or number of a series; ``valid``: the share of the training series to validate on."""
    return SeriesPrediction(data, valid=valid)


def image_shape(data: Images, tokenizer: None) -> dict[str, Any]:
    patch = next(p for p in range(2, data.size + 1) if data.size % p == 0 and data.size // p <= PATCHES)
    return {"image_size": data.size, "channels": data.channels, "n_classes": data.n_classes, "patch_size": patch}


def text_shape(data: Text | Pairs, tokenizer: Any) -> dict[str, Any]:
    return {"vocab_size": tokenizer.vocab_size}


def series_shape(data: Series, tokenizer: None) -> dict[str, Any]:
    return {"n_channels": data.n_channels, "n_outputs": data.n_classes or 1,
            "head": "classification" if data.classes else "regression"}


@dataclass(frozen=True)
class Recipe:
    """For one kind of data. ``shape``: fields of the model's config that follow from the data; of these ``open`` may be
    set. ``model``: defaults of further fields, ``block``: defaults of the block's."""

    task: Callable[..., Task]
    kind: type
    config: type
    shape: Callable[[Any, Any], dict[str, Any]]
    given: frozenset[str]
    model: Mapping[str, Any] = field(default_factory=dict)
    block: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None

    @property
    def model_options(self) -> list[str]:
        """Fields of the model's config that a run may set."""
        return [f.name for f in fields(self.config) if f.name not in self.given | {"block", "depth"}]

    @property
    def task_options(self) -> list[str]:
        """Options of the task."""
        return [p.name for p in inspect.signature(self.task).parameters.values() if p.kind is p.KEYWORD_ONLY]


VOCABULARY = frozenset({"vocab_size", "target_vocab_size"})
RECIPES: dict[type, Recipe] = {
    Images: Recipe(images, VisionEncoder, VisionConfig, image_shape, frozenset({"image_size", "channels", "n_classes"}),
                   {"n_layers": 4}),
    Text: Recipe(text, Decoder, DecoderConfig, text_shape, VOCABULARY, {"n_layers": 4, "max_seq_len": 128},
                 tokenizer="bytes"),
    Pairs: Recipe(pairs, Seq2Seq, Seq2SeqConfig, text_shape, VOCABULARY,
                  {"n_layers": 4, "max_seq_len": 64, "tie_embeddings": True, "share_embeddings": True},
                  tokenizer="bpe"),
    Series: Recipe(series, SeriesEncoder, SeriesConfig, series_shape, frozenset({"n_channels", "n_outputs"}),
                   {"n_layers": 4}, {"position": "none"}),
}


def data_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a data set. Raises ValueError for an unknown data set or option, and where a needed one is missing."""
    make = look_up(DATA, name, "data")
    parameters = inspect.signature(make).parameters.values()
    options = checked_options(make, options, [p.name for p in parameters], "data_options")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"data {name!r} needs {' and '.join(f'--data_options.{name}' for name in missing)}, or "
                         f"[data_options] in a settings file with {' and '.join(missing)}")
    return options


def recipe_of(name: str) -> Recipe:
    """The recipe for the kind of data that a data set is. Raises ValueError where there is none."""
    kind = get_type_hints(look_up(DATA, name, "data")).get("return")
    if kind not in RECIPES:
        raise ValueError(f"data {name!r} must say by the return annotation of its function in DATA which kind they "
                         f"are, one of {', '.join(known.__name__ for known in RECIPES)}; got {kind!r}. Others are "
                         "trained on in Python, with odeformer.train.Trainer and a task of your own")
    return RECIPES[kind]


@dataclass(frozen=True)
class Prepared:
    """A run that can begin: the settings with all defaults, data, task and tokenizer, and the model's config."""

    run: RunConfig
    task: Task
    tokenizer: Any
    kind: type
    config: Any
    described: Mapping[str, Any]

    def model(self) -> Any:
        """The model with its first weights, drawn from the seed."""
        torch.manual_seed(self.run.train.seed)
        return self.kind(self.config)


def prepare(values: Mapping[str, Any], tokenizer: Any = None) -> Prepared:
    """From plain settings to a run; ``tokenizer``: one made already. Settings are checked before data are read.

    Raises ValueError for settings that are unknown, of another type, or do not fit each other.
    """
    name = values.get("data", settings.DEFAULTS["data"])
    recipe = recipe_of(name)
    run = settings.run_config(settings.merged({"block": recipe.block, "model": recipe.model}, values))
    options = data_options(run.data, run.data_options)
    check_keys(run.model, recipe.model_options, "model")
    task_options = checked_options(recipe.task, run.task, recipe.task_options, "task")
    if "valid" in recipe.task_options and run.train.validate_every is not None:
        task_options = {"valid": VALID, **task_options}
    if run.tokenizer is not None and recipe.tokenizer is None:
        raise ValueError(f"tokenizer is for text, and data {run.data!r} have none; got {run.tokenizer!r}")
    data = DATA[run.data](**options)
    run = replace(run, tokenizer=run.tokenizer or recipe.tokenizer, task=task_options)
    tokenizer = tokenizer or make_tokenizer(run, data)
    given = {name: value for name, value in recipe.shape(data, tokenizer).items() if name not in run.model}
    config = filled(recipe.config, {**run.model, **given, "block": run.block, "depth": run.depth}, "model")
    described = {"data_options": options, "task": task_options, "tokenizer": run.tokenizer,
                 "tokenizer_options": dict(run.tokenizer_options)}
    if hasattr(data, "checksum"):
        described["checksum"] = data.checksum
    task = recipe.task(data, tokenizer, config, **task_options)
    return Prepared(run, task, tokenizer, recipe.kind, config, described)


def make_tokenizer(run: RunConfig, data: Any) -> Any:
    """The tokenizer, learnt from the training data where it learns; None where there is no text."""
    if run.tokenizer is None:
        check_keys(run.tokenizer_options, [], "tokenizer_options")
        return None
    kind = look_up(TOKENIZERS, run.tokenizer, "tokenizer")
    if kind is ByteTokenizer:
        check_keys(run.tokenizer_options, [], "tokenizer_options")
        return kind()
    check_keys(run.tokenizer_options, ["vocab_size"], "tokenizer_options")
    return kind.train(training_texts(data), **{"vocab_size": 4000, **run.tokenizer_options})


def training_texts(data: Text | Pairs) -> Iterable[str]:
    """What a tokenizer may learn from."""
    return data.train.splitlines(keepends=True) if isinstance(data, Text) else [x for pair in data.train for x in pair]


OF_DATA = frozenset({"n_classes", "channels", "n_channels", "n_outputs", "head"})  # what data decide of a model


def task_of(model: Any, data: Any, tokenizer: Any, options: Mapping[str, Any] | None = None) -> Task:
    """What a trained model is judged by on data. Raises ValueError where they do not go together."""
    recipe = RECIPES.get(type(data))
    if recipe is None or type(model) is not recipe.kind or (tokenizer is None) != (recipe.tokenizer is None):
        raise ValueError(f"data {data.name!r} does not go with a model that is a {type(model).__name__}; name the data "
                         "that it was trained on")
    shape = recipe.shape(data, tokenizer)
    for name in OF_DATA & shape.keys():
        if getattr(model.config, name) != shape[name]:
            raise ValueError(f"data {data.name!r} has {name} = {shape[name]!r}, and the model was made for "
                             f"{getattr(model.config, name)!r}; name the data that it was trained on")
    options = {name: value for name, value in (options or {}).items() if name in recipe.task_options}
    return recipe.task(data, tokenizer, model.config, **options)
