"""Markdown tables of results, and the README's that are made of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    body = [[str(x) for x in row] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in body)) if body else len(column)
              for i, column in enumerate(columns)]
    lines = [columns, ["-" * width for width in widths], *body]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
                     for line in lines)


def fill(text: str) -> str:
    """README text with every block ``<!-- results: NAME -->`` ... ``<!-- end -->`` replaced by that table, and
    ``<!-- findings -->`` ... ``<!-- end -->`` by what the results say."""
    from benchmarks import runner, store
    from benchmarks.findings import findings

    def block(match: re.Match) -> str:
        module = runner.find(match[1])
        path = store.path_of(match[1])
        body = table(module.COLUMNS, module.summary(store.read_rows(path)))
        if failed := store.failures(path):
            body += f"\n\n{failed}"
        return f"<!-- results: {match[1]} -->\n{body}\n<!-- end -->"

    text = re.sub(r"<!-- results: (\w+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)
    return re.sub(r"<!-- findings -->\n.*?<!-- end -->",
                  lambda match: f"<!-- findings -->\n{findings()}\n<!-- end -->", text, flags=re.DOTALL)
