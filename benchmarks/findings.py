"""What the results say: sentences whose words and numbers come out of the results.

A benchmark that has something to say has ``finding(rows)``, which gives one sentence or two.
"""

from __future__ import annotations

from benchmarks import runner, store

COUNT = {"better": "wins", "worse": "loses", "tie": "ties", "one seed": "has one seed only"}


def findings() -> str:
    """A line a study, each ``* **name**: ...``."""
    lines = []
    for name in runner.BENCHMARKS:
        module, path = runner.find(name), store.path_of(name)
        if hasattr(module, "finding") and path.exists():
            lines.append(f"* **{name}**: {module.finding(store.read_rows(path))}")
    return "\n".join(lines)
