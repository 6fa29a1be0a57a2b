"""What commands on a saved model share."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def solver_of(model: Any) -> str:
    """The solver of a model."""
    solver = model.config.depth.solver
    return solver if isinstance(solver, str) else solver.name


def under(model: Any, spec: str | None) -> Any:
    """The model under a solver given as NAME or NAME:STEPS; its own if None."""
    if spec is None:
        return model
    name, colon, steps = spec.partition(":")
    if colon and not steps.isdigit():
        raise ValueError(f"solvers are given as NAME or NAME:STEPS, got {spec!r}")
    return model.with_solver(name, **({"n_steps": int(steps)} if steps else {}))


def tokenizer_of(folder: str | None) -> Any:
    """The tokenizer saved beside a model, or None."""
    from odeformer.tokenizers import load_tokenizer

    return load_tokenizer(folder) if folder and (Path(folder) / "tokenizer.json").is_file() else None


def shown(value: Any) -> str:
    """A score."""
    return value if isinstance(value, str) else f"{value:.4f}"
