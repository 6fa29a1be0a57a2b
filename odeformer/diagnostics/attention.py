"""How widely attention spreads, over depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from odeformer.attention.base import Attention
from odeformer.diagnostics.linearize import elementary
from odeformer.diagnostics.trajectory import Site, Trajectory, modules_of


def attention_maps(source: Any, *, at: str | Sequence[float] = "layers") -> list[list[Tensor]]:
    """The attention weights of each site: a list of (batch, heads, queries, keys), self-attention before
    cross-attention, as they are at the state with which the site begins.

    For our models by ``Attention.probabilities``. For wrapped layers: every softmax over the last axis of a tensor with
    (queries, keys) in its last two, where queries are the row's tokens (batch and heads may be one axis).
    """
    run = Trajectory.of(source)
    return [_maps(site) for site in run.sites(at)]


def attention_entropies(source: Any, *, at: str | Sequence[float] = "layers", relative: bool = False) -> Tensor:
    """Entropy -Σ p log p of each query's attention weights: (sites, maps, batch, heads, queries), in nats, nan at
    padding and for a query that sees nothing.

    0: all on one key; log(keys): even. ``relative``: divided by log of the number of keys with p > 0, nan where there
    is one alone. Its fall over depth goes with unstable training (Zhai et al. 2023). Raises ValueError where no
    attention is found, or not equally many at all sites.
    """
    run = Trajectory.of(source)
    rows = []
    for maps in attention_maps(run, at=at):
        rows.append([_entropy(p, relative) for p in maps])
    counts = {len(row) for row in rows}
    if counts == {0}:
        raise ValueError("the field has no attention: no module of odeformer.attention, and no softmax over keys")
    if len(counts) > 1:
        raise ValueError(f"sites must have equally many attentions, got {sorted(counts)}")
    entropies = torch.stack([torch.stack(row) for row in rows])
    return entropies if run.mask is None else entropies.masked_fill(~run.mask[:, None], torch.nan)


def _entropy(p: Tensor, relative: bool) -> Tensor:
    entropy = torch.special.entr(p).sum(-1)
    seen = (p > 0).sum(-1)
    if relative:
        entropy = entropy / seen.to(p.dtype).log()
        return torch.where(seen > 1, entropy, torch.nan)
    return torch.where(seen > 0, entropy, torch.nan)


def _maps(site: Site) -> list[Tensor]:
    ours = list(dict.fromkeys(_attentions(site.f)))
    found: list[Tensor] = []
    if not ours:
        watch = _Softmaxes(site.z)
        with elementary(), torch.no_grad(), watch:
            site.f(site.z, site.l)
        return watch.found
    with ExitStack() as stack, torch.no_grad(), torch.compiler.set_stance("force_eager"):  # which sees new hooks
        for module in ours:
            def note(core: Attention, arguments: tuple, named: dict) -> None:
                named = {name: x for name, x in named.items() if name != "slot"}
                found.append(core.probabilities(*arguments, **named))

            handle = module.register_forward_pre_hook(note, with_kwargs=True)
            stack.callback(handle.remove)
        site.f(site.z, site.l)
    return found


def _attentions(f: Any) -> Iterator[Attention]:
    for _, module in modules_of(f):
        yield from (m for m in module.modules() if isinstance(m, Attention))


class _Softmaxes(TorchDispatchMode):
    """Notes the results of softmax that look like attention weights of states like z."""

    def __init__(self, z: Tensor):
        super().__init__()
        self.batch, self.tokens = z.shape[:2]
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket._qualified_op_name
        over_keys = name in ("aten::_softmax", "aten::_safe_softmax") and args[1] in (-1, args[0].dim() - 1)
        if over_keys and self._is_map(out.shape):
            self.found.append(out if out.dim() == 4 else out.unflatten(0, (self.batch, -1)))
        return out

    def _is_map(self, shape: torch.Size) -> bool:
        return len(shape) in (3, 4) and shape[-2] == self.tokens and shape[0] % self.batch == 0
