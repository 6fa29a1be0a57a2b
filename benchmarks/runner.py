"""Runs a benchmark case by case, keeps its rows on disk, and prints tables.

A benchmark module has ``PRESETS`` (name -> settings), ``cases(settings, seeds)`` (the factors of each
measurement), ``measure(case)`` (a list of rows), ``COLUMNS`` and ``summary(rows)`` (the table), ``draw(rows, figure)``
(the plot), and ``WORKERS``: how many cases may run side by side, each on one thread (1 where time is measured).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from odeformer.files import write_atomically, write_json
from odeformer.tables import look_up

RESULTS = Path(__file__).parent / "results"
BENCHMARKS = {
    "accuracy_vs_nfe": "accuracy against NFE on real images, for solvers in training and after it",
    "work_precision": "error against NFE for every method and for other libraries, on problems with known answers",
    "checks": "what an adaptive integrator must get right, and which libraries do",
    "gradients": "gradient error, evaluations and memory of each gradient mode, against the number of steps",
    "generation": "tokens per second and cache memory of generation, beside a plain torch decoder",
    "local_attention": "time and memory of attention under a window, against the number of tokens",
    "images": "digits and Fashion-MNIST under several solvers, beside a plain torch.nn Transformer",
    "language": "bits per byte on Shakespeare under several solvers, beside a plain torch.nn Transformer",
    "translation": "English to German under several solvers, beside a plain torch.nn Transformer",
    "depth_weights": "weights over depth at equal parameters and NFE, and under other solvers after training",
    "depth_memory": "memory and time of a training step against depth, for each gradient mode",
    "norm_gradients": "gradient of the loss against depth for each placement of the norm, 6 to 96 layers",
    "experts": "what experts cost, against a dense network that does as much per token",
    "overhead": "what solve() costs over bare calls of the field, and beside torchdiffeq",
}


def find(name: str) -> ModuleType:
    """The module of a benchmark."""
    look_up(BENCHMARKS, name, "benchmark")
    return import_module(f"benchmarks.{name}")


def run(name: str, *, preset: str, seeds: int | None, resume: bool) -> Path:
    """Measure every case, writing after each one; returns the results file. Ctrl-C leaves what is done."""
    module = find(name)
    settings = look_up(module.PRESETS, preset, "preset") if isinstance(preset, str) else preset
    seeds = settings["seeds"] if seeds is None else seeds
    path = RESULTS / f"{name}.json"
    meta = environment() | {"benchmark": name, "preset": preset, "seeds": seeds,
                            "command": f"python -m benchmarks run {name} --preset {preset} --seeds {seeds}"}
    rows = kept_rows(path, preset) if resume else []
    done = {key(row["case"]) for row in rows}
    cases = [{"preset": preset, **case} for case in module.cases(settings, seeds)]
    order = [key(case) for case in cases]
    todo = [case for case in cases if key(case) not in done]
    for case, measured in tqdm(measure(module, todo), desc=name, total=len(todo)):
        rows += [{"case": case, **row} for row in measured]
        rows = sorted((row for row in rows if key(row["case"]) in order), key=lambda row: order.index(key(row["case"])))
        write_rows(path, meta, rows)
    print("\n" + table(module.COLUMNS, module.summary(rows)))
    print(f"\nwrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path


def measure(module: ModuleType, cases: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(case, its rows) as they are done: one after the other, or in as many processes as the benchmark allows."""
    workers = min(module.WORKERS, os.cpu_count() or 1, len(cases))
    if workers <= 1:
        yield from ((case, module.measure(case)) for case in cases)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=one_thread)
    try:
        futures = {pool.submit(module.measure, case): case for case in cases}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def one_thread() -> None:
    """Workers share the cores: each takes one."""
    import torch

    torch.set_num_threads(1)


def plot(name: str) -> Path:
    """Draw the results file; returns the picture's path."""
    from matplotlib.figure import Figure

    module, picture = find(name), RESULTS / f"{name}.png"
    figure = Figure(figsize=getattr(module, "SIZE", (10, 4)), layout="constrained")
    module.draw(read_rows(RESULTS / f"{name}.json"), figure)
    write_atomically(picture, lambda beside: figure.savefig(beside, format="png", dpi=130))
    print(f"wrote {picture.relative_to(Path.cwd()) if picture.is_relative_to(Path.cwd()) else picture}")
    return picture


def fill(text: str) -> str:
    """README text with every block ``<!-- results: NAME -->`` ... ``<!-- end -->`` replaced by that table."""

    def block(match: re.Match) -> str:
        module = find(match[1])
        body = table(module.COLUMNS, module.summary(read_rows(RESULTS / f"{match[1]}.json")))
        return f"<!-- results: {match[1]} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- results: (\w+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def key(case: dict[str, Any]) -> str:
    """What tells one case from another: its factors."""
    return json.dumps(case, sort_keys=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file. Raises FileNotFoundError with the command that makes it."""
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is not there; make it with: python -m benchmarks run {path.stem}")
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def kept_rows(path: Path, preset: str) -> list[dict[str, Any]]:
    """Rows of an earlier run of the same preset."""
    return [row for row in read_rows(path) if row["case"]["preset"] == preset] if path.exists() else []


def write_rows(path: Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Results as JSON: what was run where, and one row a case."""
    write_json(path, {"meta": meta, "rows": rows})


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    body = [[str(x) for x in row] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in body)) if body else len(column)
              for i, column in enumerate(columns)]
    lines = [columns, ["-" * width for width in widths], *body]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
                     for line in lines)


def environment() -> dict[str, Any]:
    """Versions, machine and revision under which results were made."""
    import torch
    import torchdiffeq

    here = Path(__file__).parent
    try:
        revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True,
                                  check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = "unknown"
    return {"date": date.today().isoformat(), "revision": revision, "python": platform.python_version(),
            "torch": torch.__version__, "torchdiffeq": torchdiffeq.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores"}
