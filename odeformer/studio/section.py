"""A section of a report: what is measured, how it is drawn, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """A line of the summary. ``grade``: "good", "warn" or "bad", in words in ``answer``; "" where it is neither."""

    question: str
    answer: str
    numbers: str
    grade: str = ""


@dataclass(frozen=True)
class Section:
    """``measure(stack)`` gives the numbers, which all others get; it raises ValueError where a model has no such
    numbers, and the section then says why. ``draw``: a matplotlib Axes or Figure, or None where there is nothing to
    draw; ``say``: what this model shows; ``judge``: its line of the summary; ``table``: columns and rows. ``how``: how
    to read it. ``code``: what gives the figure in Python, ``solution`` being the model's."""

    title: str
    measure: Callable[[Any], Any]
    how: str
    say: Callable[[Any, Any], str]
    draw: Callable[[Any, Any], Any] | None = None
    judge: Callable[[Any, Any], Verdict | None] | None = None
    table: Callable[[Any, Any], tuple[list[str], list[list[Any]]]] | None = None
    code: str = ""
