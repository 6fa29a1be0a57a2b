"""What a pass would do, without doing it: its operations with their sizes, and the memory that it would hold.

Under ``on_nothing()`` tensors have shapes and no numbers, so models of any size can be made and run; a ``Trace`` notes
what reaches torch's dispatcher.

    with on_nothing():
        model = make()
        with Trace() as trace:
            model(tokens)
    trace.counts, trace.peak
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

# matrix products -> where their first matrix stands
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "baddbmm_": 1}
# operations that move no numbers
VIEWS = frozenset({
    "_unsafe_view", "_reshape_alias", "alias", "as_strided", "detach", "diagonal", "empty", "empty_like", "expand",
    "lift_fresh", "new_empty", "permute", "promote_types", "select", "slice", "split", "split_with_sizes", "squeeze",
    "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "_to_copy", "resize_"})
FEW = 256  # numbers in a tensor that are followed
SMALL = 1e-6
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Operation(NamedTuple):
    """``kind``: "product" (size (batch, m, k, n)), "attention" and "attention_backward" (size (batch x heads, queries,
    keys, head_dim)), "view" (size ()), or the name of any other (size (elements of the largest tensor, bytes read and
    written))."""

    kind: str
    size: tuple[int, ...]


class Trace(TorchDispatchMode):
    """``counts``: how often each Operation was met. ``live``: bytes of the tensors made within it that are still held,
    ``peak``: the most of them at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Operation] = Counter()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if function.namespace == "aten" and function not in READS:
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
            self.counts[operation(name, inputs, outputs)] += 1
            held = {id(x.untyped_storage()) for x in inputs}
            for x in outputs:
                if id(x.untyped_storage()) not in held:
                    self._note(x.untyped_storage())
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        """A storage that was made, until it goes."""
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    @property
    def n_operations(self) -> int:
        """How many there were."""
        return sum(self.counts.values())

    @property
    def multiply_adds(self) -> int:
        """Of the matrix products, those of attention included."""
        return sum(n * multiply_adds(op) for op, n in self.counts.items())


class Numbers(TorchDispatchMode):
    """The numbers of small tensors that follow from plain numbers alone, such as depths and the values of a basis at
    them, for code that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.known = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in READS:
            return self.read(function, args)
        found = function(*args, **kwargs)
        self.follow(function, args, kwargs, found)
        return found

    def read(self, function: Any, args: Any) -> Any:
        """What the operation reads off its tensors. Where their numbers are not known: next to 0 of real ones (such as
        errors that must be small), 1 of others (the largest of some ids, whether something holds)."""
        if any(isinstance(x, FakeTensor) and x not in self.known for x in args):
            return SMALL if args[0].is_floating_point() else 1
        with unset_fake_temporarily():
            return function(*(self.known[x] if isinstance(x, FakeTensor) else x for x in args))

    def follow(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Do on numbers what was done on tensors without them, where all are known and few."""
        outputs = [x for x in tree_leaves(output) if isinstance(x, FakeTensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        few = all(x.numel() <= FEW for x in [*inputs, *outputs])
        if not outputs or not few or any(isinstance(x, FakeTensor) and x not in self.known for x in inputs):
            return
        with unset_fake_temporarily(), torch.no_grad():
            args, kwargs = tree_map_only(FakeTensor, lambda x: self.known[x], (args, kwargs))
            found = tree_leaves(function(*args, **kwargs))
        for x, y in zip(outputs, (y for y in found if isinstance(y, Tensor)), strict=True):
            self.known[x] = y


def operation(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> Operation:
    """What an operation of torch is to a cost model."""
    if name in VIEWS:
        return Operation("view", ())
    if name in PRODUCTS:
        a, b = inputs[PRODUCTS[name]:][:2]
        batch = a.shape[0] if a.dim() == 3 else 1
        return Operation("product", (batch, *a.shape[-2:], b.shape[-1]))
    if name.startswith(ATTENTION):
        query, key = (inputs[1:] if name.endswith("backward") else inputs)[:2]
        kind = "attention_backward" if name.endswith("backward") else "attention"
        return Operation(kind, (math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]))
    tensors = [*inputs, *outputs]
    return Operation(name, (max((x.numel() for x in tensors), default=0), sum(map(touched, tensors))))


def touched(x: Tensor) -> int:
    """Bytes of a tensor in memory: an expanded one is read again and again from its cache."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def multiply_adds(op: Operation) -> int:
    """Of one operation. Attention backward does 5 products (its scores again, and a gradient each of scores, queries,
    keys and values), forward 2."""
    each = {"product": 1, "attention": 2, "attention_backward": 5}.get(op.kind, 0)
    return each * math.prod(op.size) if each else 0


@contextmanager
def on_nothing() -> Iterator[None]:
    """Within it tensors have no numbers and take no memory; random states stay as they are."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode(), Numbers():
        yield


def evenly(rows: Tensor, counts: Tensor, stacks: Any, feed: Any) -> Tensor:
    """Experts on rows shared out evenly among them: who would serve whom is not known without numbers."""
    parts = rows.tensor_split(counts.shape[0])
    return torch.cat([feed(part, [(weight[i], None if bias is None else bias[i]) for weight, bias in stacks])
                      for i, part in enumerate(parts)])


def without_choices(model: nn.Module) -> nn.Module:
    """The model with experts that are equally busy."""
    for module in model.modules():
        if hasattr(module, "grouping"):
            module.grouping = evenly
    return model
