"""All results that are there as one HTML file: tables that sort, figures, Pareto fronts, and what made them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from benchmarks import runner, store
from benchmarks.findings import findings
from odeformer.page import Page

LEAD = """Every number comes from a run whose command stands under its figure. Differences are paired by seed, with a
95 % bootstrap interval (of three seeds it is their range, and holds the truth in 75 %); where it holds 0 the two are
called a tie. Where nothing differs, about one in fifteen differences of five seeds is still called better or worse, and
there are many in these tables. NFE counts evaluations of the whole field in a
forward pass. Headings of columns sort."""


def write(path: str | Path) -> Path:
    """Write the file, whole or not at all. Raises FileNotFoundError where there are no results."""
    there = [name for name in runner.BENCHMARKS if store.path_of(name).exists()]
    if not there:
        raise FileNotFoundError(f"no results in {store.RESULTS.name}; make some with: python -m benchmarks run NAME")
    page = Page("Depth as an integration variable: what was measured",
                "Transformers under many solvers: accuracy, error, stability and cost.")
    page.paragraph(LEAD)
    page.heading("What we found")
    for line in findings().splitlines():
        page.paragraph(line.removeprefix("* ").replace("**", "`"))
    overview(page, there)
    for name in there:
        study(page, name)
    return page.write(path)


def overview(page: Page, names: list[str]) -> None:
    """One line a study."""
    page.heading("Studies")
    lines = []
    for name in names:
        run = store.read_rows(store.path_of(name))[0]["run"]
        lines.append((name, runner.BENCHMARKS[name], run["preset"], run["seeds"], run["date"], run["revision"]))
    page.table(("study", "what it measures", "preset", "seeds", "date", "revision"), lines)


def study(page: Page, name: str) -> None:
    """Its text, figure, Pareto fronts, table, and where it was run."""
    module, rows = runner.find(name), store.read_rows(store.path_of(name))
    run = rows[0]["run"]
    page.heading(name)
    for part in re.split(r"\n\n|\n(?=[*-] )", inspect.cleandoc(module.__doc__)):
        page.paragraph(" ".join(part.replace("``", "`").split()))
    page.figure(runner.figure_of(name), runner.BENCHMARKS[name][:1].upper() + runner.BENCHMARKS[name][1:] + ".",
                run["command"])
    if hasattr(module, "FRONTS"):
        for title, figure in module.FRONTS.figures(rows):
            page.figure(figure, f"{title}: the line is what can be had at a cost; means over seeds, dominated "
                        "configurations pale. Time is that of an update, of models with weights held that of an "
                        "evaluation.", run["command"])
    page.table(module.COLUMNS, module.summary(rows), caption=f"{name}: {len(rows)} rows measured")
    if failed := store.failures(store.path_of(name)):
        page.paragraph(failed)
    page.paragraph(made_with(rows))


def made_with(rows: list[dict[str, Any]]) -> str:
    """Machines, versions, revisions and dates of a study, of all its rows."""
    def each(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row["run"][name]) for row in rows if name in row["run"]))

    versions = ", ".join(f"{name} {x}" for name in ("python", *store.PACKAGES, *store.PEERS) if (x := each(name)))
    return f"{each('machine')}; {versions}; revision {each('revision')}; {each('date')}."
