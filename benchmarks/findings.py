"""What the results say, in sentences whose numbers and words come out of the results."""

from __future__ import annotations


def findings() -> str:
    """A line a finding, each beginning with ``* ``."""
    return "\n".join(f"* {line}" for line in ())
