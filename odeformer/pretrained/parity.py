"""Where a model of ours and its original part: their states compared layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.generate import evaluating
from odeformer.pretrained.families import family_of
from odeformer.pretrained.wrapped import Wrapped
from odeformer.tables import finite


@dataclass(frozen=True)
class Row:
    """One place of the comparison. ``difference``: the largest at a real token; ``size``: the original's largest entry
    there; ``bound``: tolerance times size."""

    name: str
    difference: float
    size: float
    bound: float

    @property
    def differs(self) -> bool:
        """Whether the difference is beyond the bound, or no number."""
        return not self.difference <= self.bound


@dataclass(frozen=True)
class ParityReport:
    """``rows`` in the order of a forward pass: "embedding" (the state at l = 0), "layers.0" (behind layer 0), ...,
    "final_norm" where there is one, and "output"; behind "encoder." and "decoder." for a model of both.
    ``print(report)`` gives the table."""

    rows: Sequence[Row]
    tolerance: float

    @property
    def first_differing(self) -> str | None:
        """The name of the first row that differs; None where none does."""
        return next((row.name for row in self.rows if row.differs), None)

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max(row.difference for row in self.rows)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{'':{width}}  difference       size"]
        lines += [f"{row.name:{width}}  {row.difference:10.2e} {row.size:10.3g}{'  differs' if row.differs else ''}"
                  for row in self.rows]
        return "\n".join([*lines, f"first differing: {self.first_differing} (tolerance {self.tolerance:g})"])


def parity_report(ours: nn.Module, theirs: nn.Module, tokens: Tensor, target: Tensor | None = None, *,
                  mask: Tensor | None = None, tolerance: float = 1e-5) -> ParityReport:
    """The states of both models for the same input, layer by layer.

    ``ours``: a model from ``from_huggingface``, or one that ``wrap`` made of a transformers model (its stack is then
    compared, and the output); ``theirs``: a transformers model. ``tokens``: what theirs reads, ids, features or images;
    ``target``: ids for the decoder of an encoder-decoder. ``mask``: bool, True = real token; others are not compared.
    A row differs where a difference is above ``tolerance`` times the original's largest entry there. Ours runs with the
    solver that it has: only Euler with h = 1 and coupling "lie" is meant to agree.

    Raises ValueError where the two have layers or states of different shapes, or theirs is of an unknown family.
    """
    finite("tolerance", tolerance, above=0)
    inputs = [tokens] if target is None else [tokens, target]
    family = family_of(theirs.config.model_type, type(theirs).__name__)
    if len(inputs) != len(family.inputs):
        raise ValueError(f"tokens {'and target ' if len(family.inputs) > 1 else ''}must be given for "
                         f"{type(theirs).__name__}, and no more; got {len(inputs)} inputs")
    with torch.no_grad(), ExitStack() as stack:
        for model in {id(m): m for m in (ours, theirs)}.values():
            stack.enter_context(evaluating(model))
        stacks = family.stacks(type(theirs).__name__)
        if isinstance(ours, Wrapped):
            stacks = {at: (layers, "") for at, (layers, _) in stacks.items() if layers == ours.config.stack}
        a = of_ours(ours, family, inputs, mask, next(iter(stacks), ""))
        b = of_theirs(theirs, family, inputs, mask, stacks)
    if a.keys() != b.keys():
        raise ValueError(f"the models have different layers: {', '.join(a.keys() ^ b.keys())} are in one alone")
    return ParityReport([compared(name, a[name], b[name], mask, tolerance) for name in b], tolerance)


def compared(name: str, ours: Tensor, theirs: Tensor, mask: Tensor | None, tolerance: float) -> Row:
    """A row. Raises ValueError for different shapes."""
    if ours.shape != theirs.shape:
        raise ValueError(f"{name} must have one shape, got {tuple(ours.shape)} in ours and {tuple(theirs.shape)} in "
                         "theirs")
    if mask is not None and ours.dim() == 3 and ours.shape[:2] == mask.shape and not name.startswith("decoder."):
        ours, theirs = ours[mask], theirs[mask]
    size = theirs.abs().max().item()
    return Row(name, (ours - theirs).abs().max().item(), size, tolerance * size)


def of_ours(model: nn.Module, family: Any, inputs: Sequence[Tensor], mask: Tensor | None,
            stack: str) -> dict[str, Tensor]:
    """Places of our model, or of a wrapped one whose stack has a name, by name."""
    if isinstance(model, Wrapped):
        output, solution = model(**theirs_inputs(family, inputs, mask), return_solution=True)
        return at_layers(solution, model.config.n_layers, dotted(stack)) | {"output": output_of(output)}
    masks = {} if mask is None else {"source_mask" if hasattr(model, "decoder") else "mask": mask}
    output, solution = model(*inputs, **masks, return_solution=True)
    parts = {"": (model, solution)}
    if hasattr(model, "decoder"):
        parts = {f"{name}.": (getattr(model, name), getattr(solution, name)) for name in ("encoder", "decoder")}
    found = {}
    for at, (part, solved) in parts.items():
        found |= at_layers(solved, part.config.n_layers, at)
        if not isinstance(part.final_norm, nn.Identity):
            found[f"{at}final_norm"] = part.final_norm(solved.z)
    return found | {"output": output}


def at_layers(solution: Any, n_layers: int, at: str) -> dict[str, Tensor]:
    """The states at whole l."""
    depths = [float(l) for l in solution.depths]
    nearest = [min(range(len(depths)), key=lambda i: abs(depths[i] - l)) for l in range(n_layers + 1)]
    names = ["embedding", *(f"layers.{i}" for i in range(n_layers))]
    return {f"{at}{name}": solution.states[i] for name, i in zip(names, nearest, strict=True)}


def theirs_inputs(family: Any, inputs: Sequence[Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """The arguments as transformers calls them."""
    given = dict(zip(family.inputs, inputs, strict=True))
    return given if mask is None else given | {family.masks[0]: mask.long()}


def dotted(name: str) -> str:
    """What stands before the places of a stack."""
    return f"{name}." if name else ""


def of_theirs(model: nn.Module, family: Any, inputs: Sequence[Tensor], mask: Tensor | None,
              stacks: Mapping[str, tuple[str, str]]) -> dict[str, Tensor]:
    """Places of a transformers model, by the names of ours."""
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for at, (layers, norm) in stacks.items():
            stack.enter_context(noting(model, layers, norm, dotted(at), found))
        output = model(**theirs_inputs(family, inputs, mask))
    return found | {"output": output_of(output)}


@contextmanager
def noting(model: nn.Module, layers: str, norm: str, at: str, found: dict[str, Tensor]) -> Iterator[None]:
    """Within it, what goes in and out of the layers is put into ``found``."""
    def before(module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
        found.setdefault(f"{at}embedding", arguments[0] if arguments else named["hidden_states"])

    def behind(module: nn.Module, arguments: tuple, output: Any) -> None:
        n = sum(name.startswith(f"{at}layers.") for name in found)
        found[f"{at}layers.{n}"] = output[0] if isinstance(output, tuple | list) else output

    def normed(module: nn.Module, arguments: tuple, output: Tensor) -> None:
        found[f"{at}final_norm"] = output

    handles = []
    for layer in model.get_submodule(layers):
        handles += [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(behind)]
    if norm:
        handles.append(model.get_submodule(norm).register_forward_hook(normed))
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled layers do not see new hooks
            yield
    finally:
        for handle in handles:
            handle.remove()


def output_of(output: Any) -> Tensor:
    """Logits, or the final states."""
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits
