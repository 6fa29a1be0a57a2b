"""How much a model's final states and outputs depend on the solver: not at all, if it learnt a flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor


@dataclass(frozen=True)
class Invariance:
    """What ``invariance`` found, by solver, in comparison with the solver ``reference``.

    ``distances``: mean over the samples of the relative distance of the final states, at most 1 a sample;
    ``output_differences``: the largest absolute difference of an output; ``agreement``: the share of predictions (the
    largest of several outputs) that are the same, None where there is one output alone. ``score``: 1 minus the mean of
    the distances over the solvers other than the reference.
    """

    reference: str
    distances: Mapping[str, float]
    output_differences: Mapping[str, float]
    agreement: Mapping[str, float | None]

    @property
    def score(self) -> float:
        """In [0, 1]; 1: all solvers end in the same states."""
        return 1 - mean(x for name, x in self.distances.items() if name != self.reference)


def invariance(states: Mapping[str, Tensor], outputs: Mapping[str, Tensor], reference: str,
               mask: Tensor | None = None) -> Invariance:
    """Compare solvers on the same inputs and weights.

    ``states``: final states z (samples, tokens, d_model) by solver; ``outputs``: (samples, n) or (samples, tokens, n).
    ``reference``: the solver that the others are compared with, the finest. ``mask`` (samples, tokens), bool: True
    where states, and outputs of tokens, count. The distance of a sample is min(1, |z - z_ref| / |z_ref|), norms over
    its real tokens; a state that is not finite is at the distance 1.

    Raises ValueError for an unknown reference, or for less than two solvers.
    """
    if reference not in states or states.keys() != outputs.keys() or len(states) < 2:
        raise ValueError(f"states and outputs must have the same solvers, at least two and the reference {reference!r} "
                         f"among them; got {', '.join(states)} and {', '.join(outputs)}")
    finest, wanted = states[reference], outputs[reference]
    seen = mask if mask is not None and wanted.dim() == 3 else torch.ones(wanted.shape[:-1], dtype=torch.bool,
                                                                          device=wanted.device)
    distances, differences, agreement = {}, {}, {}
    for solver, z in states.items():
        distances[solver] = relative_distances(z, finest, mask).mean().item()
        difference = (outputs[solver].double() - wanted.double()).abs()[seen]
        differences[solver] = difference.nan_to_num(torch.inf).max().item() if difference.numel() else 0.0
        same = (outputs[solver].argmax(-1) == wanted.argmax(-1))[seen].double()
        agreement[solver] = same.mean().item() if wanted.shape[-1] > 1 else None
    return Invariance(reference, distances, differences, agreement)


def relative_distances(z: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """min(1, |z - z_ref| / |z_ref|) of each sample (samples,), float64; 0 where both are 0."""
    z, reference = z.double(), reference.double()
    if mask is not None:
        z, reference = (x.masked_fill(~mask.unsqueeze(-1), 0) for x in (z, reference))
    apart, size = ((x.flatten(1)).norm(dim=1) for x in (z - reference, reference))
    ratio = torch.where(apart == 0, 0.0, apart / size)
    return ratio.nan_to_num(1.0, posinf=1.0).clamp(max=1.0)
