"""Fitting the hypersolver of a model: a small learned correction to a cheap solver (see ``solvers.hypersolver``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from odeformer.block import COUPLINGS
from odeformer.depth import SPLITTINGS, split
from odeformer.generate import evaluating
from odeformer.models.parts import check_own_layers, parts_of
from odeformer.tables import look_up


def fit_hypersolver(model: Any, batches: Iterable[Any], **options: Any) -> Any:
    """Train the correction of ``model.with_solver("hypersolver", base=...)`` on the residuals of a fine solve.

    ``batches``: inputs of the model, each a tensor or a tuple of its positional arguments (tokens, mask). Their forward
    passes, without dropout and with layer drop as in evaluation, give the fields; the model's other parameters stay as
    they are. The steps are those of the model unless ``n_steps`` (one number or several) is among the ``options``,
    which are those of ``solvers.fit_hypersolver``: fine, substeps, updates, batch_size, learning_rate, seed, progress.

    Returns its Fit, with the local error of a step before and after on held-out states; for a Seq2Seq a dict of those
    of its encoder and decoder, as far as each has a hypersolver.

    Raises ValueError: a model with another solver, with fusion (whose layers do not start where f leaves them), or
    whose routers choose once a step; no batches.

    >>> model = model.with_solver("hypersolver", base="euler")      # doctest: +SKIP
    >>> fit_hypersolver(model, [tokens]).error                      # doctest: +SKIP
    """
    check_own_layers(model, "fit_hypersolver")
    models = {name: part for name, part in parts_of(model).items() if hasattr(part.solver, "rebased")}
    if not models:
        raise ValueError("model must have the solver 'hypersolver': take model.with_solver('hypersolver', base=...)")
    for part in models.values():
        check(part)
    with evaluating(model):
        passes = [_solution(model, batch) for batch in batches]
    fits = {name: _fit(part, [getattr(one, name) if name else one for one in passes], options)
            for name, part in models.items()}
    return fits.get("", fits)


def check(model: Any) -> None:
    """Raises ValueError for a model whose field is not all there is to a step."""
    if model.fusion is not None and model.fusion.acts:
        raise ValueError(f"fusion {model.config.depth.fusion!r} moves the state between layers, so that a fine solve "
                         "of f does not pass where the model does; fit a model without fusion")
    if model.config.block.feedforward_options.get("routing") == "step":
        raise ValueError("routing='step' chooses experts once a step, so that a finer solve is of another f; take "
                         "routing='solve' or 'evaluation'")


def _solution(model: Any, batch: Any) -> Any:
    arguments = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    return model(*arguments, return_solution=True)[1]


def _fit(model: Any, passes: list[Any], options: Mapping[str, Any]) -> Any:
    """The fit of one stack of layers to the solutions of its passes."""
    depth, n_layers = model.config.depth, model.config.n_layers
    splitting = look_up(COUPLINGS, model.config.block.coupling, "coupling").splitting
    solver = model.solver if splitting is None else split(model.solver, SPLITTINGS[splitting])
    steps = {"n_steps": depth.steps(n_layers)} if depth.grid is None else {"grid": depth.grid}
    if "n_steps" in options or "grid" in options:
        steps = {}
    samples = [(one.field, one.states[0]) for one in passes]
    return solver.fit(samples, span=(0.0, float(n_layers)), **steps, **options)
