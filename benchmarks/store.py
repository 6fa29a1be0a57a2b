"""Results on disk: JSON lines, one row a line with all that made it.

A row is ``{"case": its factors, ...what was measured..., "run": preset, seeds, command, versions, machine, revision}``,
so that it can be read alone: ``pandas.read_json(path, lines=True)``. That of a run whose numbers became infinite or NaN
has "failed", what was said then, in place of what was measured.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from odeformer.files import write_atomically

RESULTS = Path(__file__).parent / "results"
RANK = ("quick", "cpu", "gpu")
PACKAGES = ("torch", "torchdiffeq", "numpy", "scipy")
PEERS = ("torchode", "torchdyn", "diffrax", "x-transformers", "transformers")


def path_of(name: str, suffix: str = "jsonl") -> Path:
    """Where results of a benchmark lie."""
    return RESULTS / f"{name}.{suffix}"


def place(name: str, preset: str) -> Path:
    """Where a run of a preset goes: with the results, or in a folder of the preset's own where those are of a larger
    one, which it does not replace."""
    path = path_of(name)
    there = every_row(path)[0]["run"]["preset"] if path.exists() and path.stat().st_size else preset
    smaller = preset in RANK and there in RANK and RANK.index(preset) < RANK.index(there)
    return RESULTS / preset / path.name if smaller else path


def key(case: dict[str, Any]) -> str:
    """What tells one case from another: its factors."""
    return json.dumps(case, sort_keys=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What was measured: the rows of a results file without those of runs that failed. Raises as ``every_row``."""
    return [row for row in every_row(path) if "failed" not in row]


def failures(path: Path) -> str:
    """A sentence about the runs of a results file that failed, with what each said; "" where there are none."""
    rows = every_row(path)
    failed, n = [row for row in rows if "failed" in row], len({key(row["case"]) for row in rows})
    told = (f"{', '.join(f'{name} {x}' for name, x in row['case'].items() if name != 'preset')}: {row['failed']}"
            for row in failed)
    return f"{len(failed)} of {n} runs failed and are left out: {'; '.join(told)}." if failed else ""


def every_row(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file. Raises FileNotFoundError with the command that makes it, ValueError for a line that
    is not JSON."""
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is not there; make it with: python -m benchmarks run {path.stem}")
    rows = []
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}, line {i} is not JSON: {error}") from None
    return rows


def kept_rows(path: Path, preset: str) -> list[dict[str, Any]]:
    """Rows of an earlier run of the same preset."""
    return [row for row in every_row(path) if row["case"]["preset"] == preset] if path.exists() else []


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One line a row."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


@cache
def environment() -> dict[str, Any]:
    """Versions, machine and revision under which results are made; a revision with changes that are not committed
    ends in "+"."""
    found = {"date": date.today().isoformat(), "revision": revision(), "python": platform.python_version(),
             "machine": machine()}
    return found | {name: known for name in (*PACKAGES, *PEERS) if (known := installed(name)) is not None}


def installed(name: str) -> str | None:
    """The version of a package, None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine() -> str:
    """System, architecture, cores, and the GPU where there is one."""
    import torch

    parts = [f"{platform.system()} {platform.machine()}", f"{os.cpu_count()} CPU cores"]
    return ", ".join(parts + ([torch.cuda.get_device_name()] if torch.cuda.is_available() else []))


def revision() -> str:
    """The commit, "unknown" outside a repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..", ":!results", ":!../README.md")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
