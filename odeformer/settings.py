"""The settings of a run: dataclasses filled from a TOML file and from the command line, and written back.

A settings file has ``data`` and ``tokenizer``, names, at the top, and the tables ``[data_options]``,
``[tokenizer_options]``, ``[task]``, ``[model]``, ``[block]``, ``[depth]`` and ``[train]``. On the command line every
key is ``--table.key value``, the value written as in TOML, a string without quotes.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from odeformer.block import BlockConfig
from odeformer.depth import DepthConfig
from odeformer.files import write_atomically
from odeformer.train_config import TrainConfig

FILE = "config.toml"
# annotation -> what a settings file may hold there, and its name
PLAIN = {bool: (bool, "true or false"), int: (int, "a whole number"), float: (int | float, "a number"),
         str: (str, "a string"), tuple: (list | tuple, "a list"), Sequence: (list | tuple, "a list"),
         Mapping: (Mapping, "a table")}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What ``odeformer train`` trains: ``data``, a key of DATA, and ``data_options`` for it; ``tokenizer``, a key of
    TOKENIZERS (None: what such data usually have), and ``tokenizer_options``; options of the ``task`` and of the
    ``model`` that are not the block's, the depth's or given by the data (``odeformer.recipes``)."""

    data: str = "digits"
    data_options: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    tokenizer_options: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    block: BlockConfig
    depth: DepthConfig
    train: TrainConfig


DEFAULTS: Mapping[str, Any] = {"data": "digits", "block": {"d_model": 32, "n_heads": 4},
                               "depth": {"weights": "shared"}, "train": {"steps": 400}}


def read(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises FileNotFoundError, and ValueError for what is no TOML."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no settings file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from error


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, those of ``above`` before those of ``below``."""
    both = dict(below)
    for key, value in above.items():
        table = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = merged(both[key], value) if table else value
    return both


def nested(key: str, value: Any) -> dict[str, Any]:
    """{'a': {'b': value}} for 'a.b'; a dash in a key stands for an underscore."""
    for part in reversed(key.replace("-", "_").split(".")):
        value = {part: value}
    return value


def parsed(text: str) -> Any:
    """A value as in TOML; what is none, and a date, is a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def dotted(arguments: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Command-line arguments without those of the form --table.key value or --table.key=value, and the settings that
    these make. Raises ValueError where a value is missing."""
    rest, settings = [], {}
    arguments = iter(arguments)
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not name.startswith("--") or "." not in name:
            rest.append(argument)
            continue
        if not equals:
            text = next(arguments, None)
            if text is None:
                raise ValueError(f"{name} needs a value")
        settings = merged(settings, nested(name[2:], parsed(text)))
    return rest, settings


def hint(key: str, known: Iterable[str]) -> str:
    """A guess at what was meant."""
    near = get_close_matches(key, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_keys(values: Any, known: Iterable[str], where: str) -> None:
    """Raises ValueError unless values are a table and have known keys alone."""
    known = list(known)
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be a table, got {values!r}")
    for key in values:
        if key not in known:
            raise ValueError(f"unknown setting {where}{'.' if where else ''}{key}{hint(key, known)}; known: "
                             f"{', '.join(known) or 'none'}")


def filled(kind: type, values: Mapping[str, Any], where: str = "") -> Any:
    """The dataclass ``kind`` from plain values. Raises ValueError for an unknown key, a missing one, another type."""
    hints = get_type_hints(kind)
    check_keys(values, (f.name for f in fields(kind)), where)
    missing = [f.name for f in fields(kind) if f.name not in values and f.default is MISSING
               and f.default_factory is MISSING]
    if missing:
        raise ValueError(f"{where or 'the settings'} must have {', '.join(missing)}")
    return kind(**{key: fitted(hints[key], value, f"{where}{'.' if where else ''}{key}")
                   for key, value in values.items()})


def fitted(annotation: Any, value: Any, where: str) -> Any:
    """A value as a field's annotation wants it. Raises ValueError for another type.

    "none" is None where that is allowed and no string is.
    """
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    inner = next((kind for kind in kinds if is_dataclass(kind)), None)
    if inner is not None and isinstance(value, Mapping | inner):
        return value if isinstance(value, inner) else filled(inner, value, where)
    kinds = [get_origin(kind) or kind for kind in kinds]
    if Any in kinds or (value is None and NoneType in kinds):
        return value
    if value == "none" and NoneType in kinds and str not in kinds:
        return None
    for kind, (found, _) in PLAIN.items():
        if kind in kinds and isinstance(value, found) and (kind is bool or not isinstance(value, bool)):
            return float(value) if kind is float else value
    wanted = " or ".join(words for kind, (_, words) in PLAIN.items() if kind in kinds)
    raise ValueError(f"{where} must be {wanted}, got {value!r}")


def checked_options(function: Callable[..., Any], options: Mapping[str, Any], known: Iterable[str], where: str) -> dict:
    """Options as a function's annotations want them. Raises ValueError for unknown ones and other types."""
    check_keys(options, known, where)
    hints = get_type_hints(function)
    return {key: value if key not in hints or isinstance(value, list) or "Path" in str(hints[key])
            else fitted(hints[key], value, f"{where}.{key}") for key, value in options.items()}


def run_config(settings: Mapping[str, Any]) -> RunConfig:
    """The settings over the DEFAULTS. Raises ValueError for what is unknown or does not fit, with its dotted name."""
    return filled(RunConfig, merged(DEFAULTS, settings))


def to_dict(config: Any) -> Any:
    """A dataclass as nested plain values, without None and empty tables."""
    if is_dataclass(config):
        config = {f.name: getattr(config, f.name) for f in fields(config)}
    if isinstance(config, Mapping):
        values = {key: to_dict(value) for key, value in config.items() if value is not None}
        return {key: value for key, value in values.items() if value != {}}
    return [to_dict(value) for value in config] if isinstance(config, list | tuple) else config


def to_toml(values: Mapping[str, Any], path: str = "") -> str:
    """Nested plain values as TOML, a table for each mapping.

    >>> print(to_toml({"a": 1, "b": {"c": "x", "d": [1.5, True]}}), end="")
    a = 1
    <BLANKLINE>
    [b]
    c = "x"
    d = [1.5, true]
    """
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = [f"{name(key)} = {inline(value)}\n" for key, value in values.items() if key not in tables]
    for key, value in tables.items():
        full = f"{path}{name(key)}"
        own = any(not isinstance(inner, Mapping) for inner in value.values())
        lines.append((f"\n[{full}]\n" if own or not value else "") + to_toml(value, f"{full}."))
    return "".join(lines)


def name(key: str) -> str:
    """A key, quoted where TOML wants that."""
    return key if key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key) else quoted(key)


def quoted(text: str) -> str:
    """A string as in TOML, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def inline(value: Any) -> str:
    """A value in one line. Raises ValueError for what TOML cannot hold."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name(key)} = {inline(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    raise ValueError(f"a settings file holds plain values, got {value!r}")


def write(folder: str | Path, config: RunConfig) -> None:
    """Write config.toml, from which the run can be had again, into folder."""
    text = "# odeformer train --config THIS_FILE --out FOLDER makes this run again\n" + to_toml(to_dict(config))
    write_atomically(Path(folder) / FILE, lambda beside: beside.write_text(text, encoding="utf-8"))


def listed() -> list[tuple[str, str]]:
    """Every field of the tables as table.field, with its default as TOML ("" for None)."""
    found = []
    for table, kind in get_type_hints(RunConfig).items():
        for f in fields(kind) if is_dataclass(kind) else ():
            default = DEFAULTS.get(table, {}).get(f.name, {} if f.default is MISSING else f.default)
            found.append((f"{table}.{f.name}", "" if default is None else inline(default)))
    return found
