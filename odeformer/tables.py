"""Looking names up in tables: a string is a key, anything else is taken as it is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any


def look_up(table: Mapping[str, Any], key: Any, what: str) -> Any:
    """table[key] for a string key, else the key itself (an own class works wherever a name does).

    Raises ValueError for an unknown name; the message lists the known ones.
    """
    if not isinstance(key, str):
        if callable(key):
            return key
        raise TypeError(f"{what} must be a name or a class, got {key!r}; known: {', '.join(sorted(table))}")
    if key not in table:
        near = get_close_matches(key, table, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown {what} {key!r}{hint}; known: {', '.join(sorted(table))}")
    return table[key]


def build(table: Mapping[str, Any], key: Any, what: str, *args: Any, options: Mapping[str, Any] | None = None,
          shape: Mapping[str, Any] | None = None) -> Any:
    """An instance of the entry, with options. Raises ValueError for an option that the entry does not have.

    ``shape``: what the model knows (``n_layers``), for entries that have such an option and were not given it.
    """
    options = dict(options or {})
    known = known_options(table, key, what, options, len(args))
    entry = look_up(table, key, what)
    return entry(*args, **{name: value for name, value in (shape or {}).items() if name in known} | options)


def known_options(table: Mapping[str, Any], key: Any, what: str, options: Iterable[str], n: int) -> list[str]:
    """The options that the entry has beside its first n arguments. Raises ValueError where one of ``options`` is none
    of them."""
    parameters = inspect.signature(look_up(table, key, what)).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][n:]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if option not in known and not open_ended:
            raise ValueError(f"unknown option {option!r} for {what} {key!r}; known: {', '.join(known) or 'none'}")
    return known


def check_kinds(config: Any) -> None:
    """Raises TypeError unless the fields of a dataclass that are declared ``bool`` hold one, and those declared
    ``Mapping[...]`` a mapping."""
    for f in fields(config):
        value, declared = getattr(config, f.name), str(getattr(f.type, "__name__", f.type))  # of a subclass, a class
        if declared == "bool" and not isinstance(value, bool):
            raise TypeError(f"{f.name} must be a bool, got {value!r}")
        absent = value is None and declared.endswith("| None")
        if declared.startswith("Mapping") and not (absent or isinstance(value, Mapping)):
            raise TypeError(f"{f.name} must map names to values, got {value!r}")


def at_least(name: str, value: Any, least: int) -> None:
    """Raises TypeError or ValueError unless value is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def finite(name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf) -> float:
    """The value as a float; raises ValueError unless it is finite, above ``above`` and of at least ``least``."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value <= above or value < least:
        bound = f" above {above}" if above > -math.inf else f" of at least {least}" if least > -math.inf else ""
        raise ValueError(f"{name} must be a finite number{bound}, got {value!r}")
    return float(value)


def probability(name: str, value: Any) -> None:
    """Raises ValueError unless 0 <= value < 1."""
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1), got {value!r}")
