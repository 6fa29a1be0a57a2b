"""Point 8: what ``import odeformer`` adds to ``import torch``, and how long ``odeformer --help`` takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.speed.timing import row

CODE = {
    "import torch": "import torch",
    "import odeformer": "import torch; import odeformer",
    "help": "import sys; sys.argv[1:] = ['--help']; from odeformer.cli import main; main()",
}
LOADED = """
import contextlib, io, sys
from odeformer.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(["--help"])
print(int("torch" in sys.modules))
"""


def cases(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One."""
    yield {}


def spent(code: str) -> float:
    """Processor seconds, user and system, of a fresh interpreter that runs the code."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def measure(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Seconds, and whether help loads torch."""
    for code in CODE.values():
        spent(code)  # bytecode is written, files are in memory
    found = [{name: spent(code) for name, code in CODE.items()} for _ in range(max(3, rounds // 3))]
    added = [max(one["import odeformer"] - one["import torch"], 0.0) for one in found]
    loaded = int(subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True).stdout)
    return [row("import odeformer after import torch, s", "seconds added", added, 0.3),
            row("odeformer --help, s", "seconds", [one["help"] for one in found], 0.3),
            row("odeformer --help loads torch", "1 = yes", float(loaded), 0.0)]
