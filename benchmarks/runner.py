"""Runs a benchmark case by case, keeps its rows on disk, and draws its plot.

A benchmark module has ``PRESETS`` (name -> settings), ``cases(settings, seeds)`` (the factors of each
measurement), ``measure(case)`` (a list of rows), ``COLUMNS`` and ``summary(rows)`` (the table), ``draw(rows, figure)``
(the plot), ``SIZE`` (inches) and ``WORKERS``: how many cases may run side by side, each on one thread (1 where time is
measured). It may have ``FRONTS``: what its Pareto fronts show.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from benchmarks import store
from benchmarks.tables import table
from odeformer.files import write_atomically
from odeformer.tables import look_up

BENCHMARKS = {
    "accuracy_vs_nfe": "accuracy against NFE on real images, for solvers in training and after it",
    "iso_nfe": "high-order methods against Euler at equal NFE, at equal parameters, and at both",
    "published": "the field's own methods, as published and corrected, at equal parameters",
    "truncation": "one- and two-layer language models: perplexity beside the true truncation error",
    "solver_swap": "trained models under other solvers and step counts, with their solver invariance",
    "calibrated_grids": "steps calibrated on a sample against equal steps, at equal NFE, on unseen data",
    "refinement": "pretrained networks with weights held: smaller steps, higher order, fewer or repeated layers",
    "training_stability": "the largest learning rate and depth that train, for each norm and solver",
    "images": "digits and Fashion-MNIST under several solvers, beside a plain torch.nn Transformer",
    "language": "bits per byte on Shakespeare under several solvers, beside a plain torch.nn Transformer",
    "translation": "English to German under several solvers, beside a plain torch.nn Transformer",
    "depth_weights": "weights over depth at equal parameters and NFE, and under other solvers after training",
    "norm_gradients": "gradient of the loss against depth for each placement of the norm, 6 to 96 layers",
    "work_precision": "error against NFE for every method and for other libraries, on problems with known answers",
    "checks": "what an adaptive integrator must get right, and which libraries do",
    "gradients": "gradient error, evaluations and memory of each gradient mode, against the number of steps",
    "generation": "tokens per second and cache memory of generation, beside a plain torch decoder",
    "local_attention": "time and memory of attention under a window, against the number of tokens",
    "depth_memory": "memory and time of a training step against depth, for each gradient mode",
    "experts": "what experts cost, against a dense network that does as much per token",
    "speed": "our time beside that of torch.nn, torchdiffeq, torchode and others, row by row against a target",
    "scaling": "time and memory against NFE, depth, width, tokens, batch and processes, measured and estimated",
    "compiled": "compile time against depth, and a compiled pass beside torchdiffeq",
}


def find(name: str) -> ModuleType:
    """The module of a benchmark."""
    look_up(BENCHMARKS, name, "benchmark")
    return import_module(f"benchmarks.{name}")


def run(name: str, *, preset: str, seeds: int | None, resume: bool) -> Path:
    """Measure every case; returns the results file. Rows are written after each case, beside the results of earlier
    runs, which they replace when all are there; Ctrl-C leaves what is done to ``resume``. A run whose numbers become
    infinite or NaN is left out, and said so. Raises ValueError where that is all of them."""
    module = find(name)
    settings = look_up(module.PRESETS, preset, "preset")
    seeds = settings["seeds"] if seeds is None else seeds
    path = store.place(name, preset)
    begun = path.with_suffix(".part.jsonl")
    about = store.environment() | {"benchmark": name, "preset": preset, "seeds": seeds, "command": command(
        name, preset, seeds)}
    rows = store.kept_rows(begun if begun.exists() else path, preset) if resume else []
    done = {store.key(row["case"]) for row in rows}
    cases = [{"preset": preset, **case} for case in module.cases(settings, seeds)]
    places = {store.key(case): i for i, case in enumerate(cases)}
    todo = [case for case in cases if store.key(case) not in done]
    rows = [row for row in rows if store.key(row["case"]) in places]
    if not todo:
        store.write_rows(begun, rows)
    for case, measured in tqdm(measure(module, todo), desc=name, total=len(todo)):
        rows += [{"case": case, **row, "run": about} for row in measured]
        rows.sort(key=lambda row: places[store.key(row["case"])])
        store.write_rows(begun, rows)
    if failed := store.failures(begun):
        print("\n" + failed)
    if not (rows := store.read_rows(begun)):
        raise ValueError(f"{name}: no run gave numbers; {shown(begun)} says why")
    begun.replace(path)
    print("\n" + table(module.COLUMNS, module.summary(rows)))
    print(f"\nwrote {shown(path)}")
    return path


def command(name: str, preset: str, seeds: int) -> str:
    """What makes such results."""
    return f"python -m benchmarks run {name} --preset {preset} --seeds {seeds}"


def measure(module: ModuleType, cases: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(case, its rows) as they are done: one after the other, or in as many processes as the benchmark allows."""
    workers = min(module.WORKERS, os.cpu_count() or 1, len(cases))
    if workers <= 1:
        if module.WORKERS > 1:  # as beside others
            one_thread()
        yield from ((case, attempt(module.measure, case)) for case in cases)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=one_thread)
    try:
        futures = {pool.submit(attempt, module.measure, case): case for case in cases}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def attempt(measure: Callable[[dict[str, Any]], list[dict[str, Any]]], case: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a case; one that says so where its numbers became infinite or NaN, so that the others go on."""
    from solvers import SolverError

    try:
        return measure(case)
    except (FloatingPointError, SolverError) as error:
        return [{"failed": str(error)}]


def one_thread() -> None:
    """Workers share the cores: each takes one."""
    import torch

    torch.set_num_threads(1)


def figure_of(name: str, path: Path | None = None) -> Any:
    """The figure of results that are there, or of those at a path."""
    from matplotlib.figure import Figure

    module = find(name)
    figure = Figure(figsize=module.SIZE, layout="constrained")
    module.draw(store.read_rows(path or store.path_of(name)), figure)
    return figure


def plot(name: str, path: Path | None = None) -> Path:
    """Draw the results, or those at a path, beside them; returns the picture's path."""
    path = path or store.path_of(name)
    figure, picture = figure_of(name, path), path.with_suffix(".png")
    write_atomically(picture, lambda beside: figure.savefig(beside, format="png", dpi=130))
    print(f"wrote {shown(picture)}")
    return picture


def shown(path: Path) -> Path:
    """Seen from here, where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
