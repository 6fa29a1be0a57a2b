"""Models on disk: model.safetensors and config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torch import Tensor

from odeformer.block import BlockConfig
from odeformer.depth import DepthConfig
from odeformer.files import write_atomically, write_json
from odeformer.models.base import to_be_filled
from odeformer.models.decoder import Decoder, DecoderConfig
from odeformer.models.encoder import Encoder, EncoderConfig
from odeformer.models.seq2seq import Seq2Seq, Seq2SeqConfig
from odeformer.models.series import SeriesConfig, SeriesEncoder
from odeformer.models.speech import SpeechConfig, SpeechSeq2Seq
from odeformer.models.text import EmbeddingConfig
from odeformer.models.vision import VisionConfig, VisionEncoder
from odeformer.tables import look_up

MODELS = {"encoder": Encoder, "decoder": Decoder, "seq2seq": Seq2Seq, "vision": VisionEncoder,
          "series": SeriesEncoder, "speech": SpeechSeq2Seq}
CONFIGS = {"encoder": EncoderConfig, "decoder": DecoderConfig, "seq2seq": Seq2SeqConfig, "vision": VisionConfig,
           "series": SeriesConfig, "speech": SpeechConfig}


def to_dict(config: Any, path: str = "config") -> Any:
    """A config as plain values. Raises ValueError for an own class or object, which JSON cannot hold."""
    if type(config) in (BlockConfig, DepthConfig, EmbeddingConfig, *CONFIGS.values()):
        return {f.name: to_dict(getattr(config, f.name), f"{path}.{f.name}") for f in fields(config)}
    if isinstance(config, Mapping):
        return {str(key): to_dict(value, f"{path}.{key}") for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value, path) for value in config]
    if config is None or isinstance(config, str | int | float | bool):
        return config
    raise ValueError(f"{path} must be a name or a plain value to be saved, got {config!r}; put an own class into its "
                     "table (ATTENTION['mine'] = Mine) and give that name; do the same before loading")


def from_dict(kind: type, values: Mapping[str, Any]) -> Any:
    """A config of the dataclass ``kind``. Raises ValueError for a key that it does not have."""
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    for key in values:
        if key not in known:
            raise ValueError(f"unknown key {key!r} for {kind.__name__}; known: {', '.join(known)}")
    nested = {key: next((x for x in (hints[key], *get_args(hints[key])) if is_dataclass(x)), None) for key in values}
    return kind(**{key: from_dict(nested[key], value) if nested[key] and value is not None else value
                   for key, value in values.items()})


def save(model: Any, folder: str | Path) -> None:
    """Write the model into folder; each file appears whole or not at all."""
    from safetensors.torch import save_file

    name = next((name for name, kind in MODELS.items() if type(model) is kind), None)
    if name is None:
        raise ValueError(f"model must be one of {', '.join(kind.__name__ for kind in MODELS.values())} to be saved, "
                         f"got {type(model).__name__}")
    folder = Path(folder)
    config = {"model": name, "config": to_dict(model.config)}
    tensors, again = once_each(model)
    write_atomically(folder / "model.safetensors", lambda beside: save_file(tensors, str(beside), again))
    write_json(folder / "config.json", config)


def once_each(model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a model by name, row by row in memory; of tied ones the first name, and for each other name that
    one."""
    tensors, again, first = {}, {}, {}
    for name, tensor in sorted(model.state_dict().items()):
        where = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        if where in first:
            again[name] = first[where]
        else:
            first[where], tensors[name] = name, tensor.contiguous()
    return tensors, again


def load(folder: str | Path) -> Any:
    """The model saved in folder, in eval mode; it gives the same outputs bit for bit.

    Raises FileNotFoundError where a file is missing, ValueError where one is damaged or does not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            unfinished = "; it is a training run that has not ended: go on with --resume" if (
                folder / "checkpoint.pt").exists() else ""
            raise FileNotFoundError(f"{folder} holds no {name}; a saved model has config.json and model.safetensors"
                                    f"{unfinished}")
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name, values = stored["model"], stored["config"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a model's config: {error}") from error
    try:
        with to_be_filled():
            model = look_up(MODELS, name, "model")(from_dict(CONFIGS[name], values))
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} does not describe a model: {error}") from error
    path = folder / "model.safetensors"
    try:
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            dtypes = {key: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
        for key, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
            if key in dtypes:  # of tied tensors the file holds one
                tensor.data = tensor.data.to(dtypes[key])
        load_model(model, str(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit {folder / 'config.json'}: {error}") from error
    return model.eval()
