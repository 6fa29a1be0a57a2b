"""What a run reports while it goes on: CSV files always, TensorBoard where asked for."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from odeformer.checkpoint import ADVICE, explained
from odeformer.files import write_atomically


class Csv:
    """Rows in a CSV file, each on disk when ``add`` returns. Those after ``step`` are removed on opening."""

    def __init__(self, path: Path, step: int):
        self.path, self.file, self.columns = path, None, None
        kept = kept_lines(path, step) if step else []
        with explained(path, ADVICE):
            if kept:
                write_atomically(path, lambda beside: beside.write_text("".join(kept), encoding="utf-8"))
                self.columns = next(csv.reader(kept[:1]))
            else:
                path.unlink(missing_ok=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """One more row; the first one's names are the columns."""
        with explained(self.path, ADVICE):
            if self.file is None:
                self.file: TextIO | None = open(self.path, "a", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115
            writer = csv.writer(self.file, lineterminator="\n")
            if self.columns is None:
                self.columns = list(row)
                writer.writerow(self.columns)
            writer.writerow([row.get(name, "") for name in self.columns])

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def kept_lines(path: Path, step: int) -> list[str]:
    """The head and the whole rows up to ``step`` of a file that an earlier process wrote; nothing where there is none.
    """
    if not path.is_file():
        return []
    head, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
    if not head.startswith("step,"):
        return []
    return [head, *(line for line in lines if line.endswith("\n") and line.split(",")[0].isdigit()
                    and int(line.split(",")[0]) <= step)]


class TensorBoard:
    """Numbers for TensorBoard, in the folder ``tensorboard``. Raises ImportError where the package is missing."""

    def __init__(self, folder: Path, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("tensorboard = true needs the package tensorboard: pip install 'odeformer-depth[log]', "
                              "or leave it out: train.csv and valid.csv hold the same numbers") from error
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, kind: str, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(f"{kind}/{name}", value, row["step"])

    def close(self) -> None:
        self.writer.close()


class Logs:
    """All logs of a run in ``folder`` (None: nowhere): train.csv and valid.csv, and TensorBoard if asked."""

    def __init__(self, folder: Path | None, step: int, *, tensorboard: bool = False):
        self.files = {} if folder is None else {kind: Csv(folder / f"{kind}.csv", step) for kind in ("train", "valid")}
        self.board = TensorBoard(folder, step) if tensorboard and folder is not None else None

    def add(self, kind: str, row: Mapping[str, Any]) -> None:
        """A row of "train" or "valid"; it has a ``step``."""
        if kind in self.files:
            self.files[kind].add(row)
        if self.board is not None:
            self.board.add(kind, row)

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *error: object) -> None:
        for log in [*self.files.values(), *([self.board] if self.board else [])]:
            log.close()


def packed(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Rows with the same names as one tensor (float64) a name, and which of them are whole numbers."""
    names = list(rows[0]) if rows else []
    return {"values": {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in names},
            "whole": json.dumps({name: all(isinstance(row[name], int) for row in rows) for name in names})}


def unpacked(state: Mapping[str, Any]) -> list[dict[str, float]]:
    """The rows again."""
    whole: dict[str, bool] = json.loads(state["whole"])
    columns = {name: column(values, whole[name]) for name, values in state["values"].items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def column(values: Tensor, whole: bool) -> list[float]:
    return [int(x) for x in values.tolist()] if whole else values.tolist()
