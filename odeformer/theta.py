"""θ(l) within a pass: made once for each depth, from coefficients and the values of a basis."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from odeformer.bases import Basis

At = Callable[[Tensor], dict[str, Tensor]]  # l -> parameters by name
Columns = Sequence[Sequence[Tensor]]
KEPT = 8  # depths whose weights a pass keeps for each sublayer: those of a step, not of the whole solve
HALF = {torch.float16, torch.bfloat16}  # in which sums are made in float32 and rounded once


class Remembered:
    """l -> weights, made once for each depth of a pass: stages, parts of a step and the way back ask for them again.

    Not where they must be made anew: traced, or with derivatives in l.
    """

    def __init__(self, at: At, blocks: nn.Module):
        self.at, self.blocks = at, blocks  # the blocks are here to be found by who looks for parameters
        self.parameters = list(blocks.parameters())
        self.kept: OrderedDict[tuple, tuple[Tensor, dict[str, Tensor]]] = OrderedDict()

    def __call__(self, l: Tensor) -> dict[str, Tensor]:
        if not isinstance(l, Tensor) or l.dim():
            got = f"shape {tuple(l.shape)}" if isinstance(l, Tensor) else repr(l)
            raise ValueError("l must be a 0-d tensor, one depth for the whole batch, where weights are functions of l; "
                             f"got {got}")
        if is_followed(l):
            return self.at(l)
        depth = l.item() if l.device.type == "cpu" else id(l)
        changes = sum(p._version for p in self.parameters if not p.is_inference())  # which keep no count
        key = depth, torch.is_grad_enabled(), changes
        if key not in self.kept:
            with apart(l):
                made = self.at(l)
            self.kept[key] = l, made  # l is kept, so that its id stays its own
            self._forget_after_backward(key, made)
            if len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return self.kept[key][1]

    def _forget_after_backward(self, key: tuple, made: dict[str, Tensor]) -> None:
        """A graph that was gone through is no more."""
        kept = ref(self.kept)  # a tensor's hook must not keep what keeps the tensor

        def forget(grad: Tensor) -> None:
            if (there := kept()) is not None:
                there.pop(key, None)

        for x in made.values():
            if x.grad_fn is not None:
                x.register_hook(forget)


def is_followed(l: Tensor) -> bool:
    """Whether what depends on l is traced or differentiated in l, so that numbers must not be read off it."""
    return (torch.compiler.is_compiling() or l.requires_grad or forward_ad._current_level >= 0
            or torch._C._functorch.maybe_current_level() is not None)


def apart(l: Tensor) -> ExitStack:
    """Make weights as if nothing around were there: in full precision, and with what is saved for backward left alone,
    as checkpointing counts that, and a step done again may find weights that are there already."""
    stack, kind = ExitStack(), l.device.type
    if torch.is_autocast_enabled(kind):
        stack.enter_context(torch.autocast(kind, enabled=False))
    if torch.is_grad_enabled() and torch._C._autograd._saved_tensors_hooks_is_enabled():
        stack.enter_context(saved_tensors_hooks(lambda x: x, lambda x: x))
    return stack


def spread(basis: Callable[[Tensor], Tensor], l: Tensor) -> Sequence[tuple[int, float | Tensor]]:
    """(k, φ_k(l)): plain numbers and no zeros where they can be read without waiting, else 0-d tensors."""
    readable = l.device.type == "cpu" and not is_followed(l)
    if readable and isinstance(basis, Basis):
        return numbers(basis, l.item(), l.dtype)
    values = basis(l)
    if readable and not values.requires_grad:
        return [(k, w) for k, w in enumerate(values.tolist()) if w]
    return list(enumerate(values.unbind()))


@lru_cache(maxsize=4096)
def numbers(basis: Basis, l: float, dtype: torch.dtype) -> tuple[tuple[int, float], ...]:
    """(k, φ_k(l)) without zeros, computed in dtype. A basis never changes, and passes ask for the same depths again."""
    return tuple((k, w) for k, w in enumerate(basis(torch.tensor(l, dtype=dtype)).tolist()) if w)


def combine(weights: Sequence[tuple[int, float | Tensor]], columns: Columns) -> list[Tensor]:
    """Σ w_k column_k, for every tensor of a column."""
    (first, w), *rest = weights
    if not columns[first]:
        return []
    if isinstance(w, Tensor):
        return [sum((v * x[k] for k, v in rest), w * x[first])
                for x in zip(*columns, strict=True)]
    if not rest and w == 1:
        return [x if x.grad_fn is None else x.view_as(x) for x in columns[first]]  # not the caller's: hooks go onto it
    dtypes = [x.dtype for x in columns[first]]
    wide = [column if not HALF & set(dtypes) else [x.float() for x in column] for column in columns]
    total = torch._foreach_mul(wide[first], w)
    for k, v in rest:
        torch._foreach_add_(total, wide[k], alpha=v)
    return [x.to(dtype) for x, dtype in zip(total, dtypes, strict=True)]
