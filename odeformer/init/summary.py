"""What an initialiser wanted, and what stands in the model."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from odeformer.init.matrix import embeddings, matrices


class Row(NamedTuple):
    """One matrix; ``gain`` and ``wanted`` are None where no scheme of INITIALIZERS has drawn it."""

    matrix: str
    layer: int
    scheme: str
    gain: float | None
    wanted: float | None
    measured: float


def show(value: object) -> str:
    """A table cell."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


class Report(list[Row]):
    """Rows that print as a table."""

    def __str__(self) -> str:
        cells = [Row._fields, *(tuple(map(show, row)) for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                         for line in cells)


def report(model: nn.Module) -> Report:
    """For each matrix: name, layer, scheme, gain, wanted and measured standard deviation (around 0).

    Wanted is what the last initialiser drew from (``model.draws``); measured is the present value, so in a trained
    model they differ. Embeddings are listed where the scheme drew them, too. A matrix drawn by an own callable has only
    a measured value, and so have those of a model that was loaded or pruned. Of a model made of models (Seq2Seq) all
    are listed.
    """
    if not hasattr(model, "layers"):
        return Report(row._replace(matrix=f"{name}.{row.matrix}") for name, part in model.named_children()
                      if hasattr(part, "layers") for row in report(part))
    init = model.config.block.init
    own = "-", None
    if not isinstance(init, str):
        own = getattr(init, "__name__", type(init).__name__), None
    draws, rows = getattr(model, "draws", {}), Report()
    for matrix in [*(m for m in embeddings(model) if m.name in draws), *matrices(model)]:
        scheme, draw = draws.get(matrix.name, own)
        measured = matrix.tensor.float().square().mean().sqrt().item()
        rows.append(Row(matrix.name, matrix.layer, scheme, draw and draw.gain, draw and draw.std, measured))
    return rows
