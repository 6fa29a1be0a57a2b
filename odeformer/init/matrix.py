"""The matrices of a model, as initialisers see them.

Found in ``model.layers`` are the weight of every nn.Linear, and of torch.nn.MultiheadAttention. A module can say more:

``linear.fused``: the roles of several matrices that lie below one another in its weight, ``("query", "key", "value")``
for equal parts or ``{"query": 64, "key": 16, "value": 16}`` with their rows. A linear map named qkv, in_proj, qkv_proj,
c_attn or Wqkv from d to 3 d is taken for fused unless it says otherwise (``fused = ()``).

``module.stacked``: parameters that hold one matrix for each leading index (expert, ...), with the order of their last
two axes: ``{"hidden": "in,out"}`` or ``"out,in"``. One called weight has the module's role; a parameter ``bias`` beside
it is its bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor, nn

QKV = ("query", "key", "value")
FUSED_NAMES = ("qkv", "in_proj", "qkv_proj", "c_attn", "Wqkv")
SAME_ROLE = {"out_proj": "output", "o_proj": "output", "c_proj": "output", "linear1": "hidden", "linear2": "output",
             "fc1": "hidden", "fc2": "output"}
KINDS = (nn.Linear, nn.MultiheadAttention)
ORDERS = {"out,in": False, "in,out": True}  # whether a matrix is stored transposed


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix: a part of a parameter.

    ``name``: the parameter's path, with what part of it this is. ``role``: query, key, value, output, hidden and gate
    (of a feed-forward), or else the module's own name. ``layer``: the first that uses it, counted from 1; 0 outside of
    the layers. ``index``, ``transposed``, ``start``, ``stop``: where it lies in the parameter.
    """

    name: str
    parameter: nn.Parameter
    role: str
    layer: int
    index: tuple[int, ...] = ()
    transposed: bool = False
    start: int = 0
    stop: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """This matrix's part (d_out, d_in) of a tensor shaped like the parameter, as a view."""
        part = whole[self.index]
        return (part.mT if self.transposed else part)[self.start:self.stop]

    @property
    def tensor(self) -> Tensor:
        """The matrix itself (d_out, d_in): a view that writes through to the parameter."""
        return self.of(self.parameter.detach())

    @property
    def d_out(self) -> int:
        """Rows."""
        return self.tensor.shape[0]

    @property
    def d_in(self) -> int:
        """Columns."""
        return self.tensor.shape[-1]


def matrices(model: nn.Module) -> list[Matrix]:
    """All matrices of ``model.layers``, each once.

    Raises TypeError for a model without layers of its own, ValueError where ``fused`` or ``stacked`` does not
    fit its parameters.
    """
    found, seen = [], set()
    for path, module in layers_of(model).named_modules():
        layer = first_layer(model, path)
        for matrix in _inside(f"layers.{path}", module, layer):
            key = id(matrix.parameter), matrix.index, matrix.start
            if key not in seen:
                seen.add(key)
                found.append(matrix)
    return found


def biases(model: nn.Module) -> Iterator[Tensor]:
    """The biases that go with ``matrices``."""
    for module in model.layers.modules():
        name = "in_proj_bias" if isinstance(module, nn.MultiheadAttention) else "bias"
        bias = getattr(module, name, None)
        if isinstance(bias, nn.Parameter) and (isinstance(module, KINDS) or hasattr(module, "stacked")):
            yield bias


def embeddings(model: nn.Module) -> list[Matrix]:
    """What makes the state at l = 0, as layer 0: tables of tokens and learned positions (role "embedding"), and linear
    maps of patches or values (role "projection")."""
    found = []
    for name, child in model.named_children():
        if isinstance(child, nn.Embedding):
            found.append(Matrix(f"{name}.weight", child.weight, "embedding", 0))
        elif isinstance(child, nn.Linear) and name.endswith("embedding"):
            found.append(Matrix(f"{name}.weight", child.weight, "projection", 0))
        elif name == "position":
            found += [Matrix(f"{name}.{key}", p, "embedding", 0) for key, p in child.named_parameters() if p.dim() > 1]
    return found


def layers_of(model: nn.Module) -> nn.Module:
    """What holds the layers. Raises TypeError for a model that is made of models."""
    if not hasattr(model, "layers"):
        raise TypeError(f"model must have layers, got {type(model).__name__}; initialise its parts, such as "
                        "model.encoder and model.decoder")
    return model.layers


def n_layers(model: nn.Module) -> int:
    """L, the number of layers; solver steps and stages are not counted."""
    return getattr(layers_of(model), "n_layers", None) or model.config.n_layers


def first_layer(model: nn.Module, path: str) -> int:
    """The first layer (from 1) that uses the block which a path in ``model.layers`` begins with.

    What is in no block counts as layer 1.
    """
    head = path.split(".")[0]
    if not head.isdigit():
        return 1
    block, depth = int(head), n_layers(model)
    if hasattr(model.layers, "layer_of"):
        return model.layers.layer_of(block)
    return 1 + min(block, depth - 1)


def _inside(path: str, module: nn.Module, layer: int) -> Iterator[Matrix]:
    """The matrices whose parameters are the module's own."""
    name = path.rsplit(".", 1)[-1]
    role = SAME_ROLE.get(name, name)
    if role == "hidden" and "attention" in path:  # of a network that predicts a prior's parameters
        role = "predictor"
    if isinstance(module, nn.Linear):
        yield from _fused(f"{path}.weight", module.weight, _parts(name, module), role, layer)
    elif isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is not None:
            yield from _fused(f"{path}.in_proj_weight", module.in_proj_weight, QKV, "", layer)
        else:
            for role, own in zip(QKV, ("q_proj_weight", "k_proj_weight", "v_proj_weight"), strict=True):
                yield Matrix(f"{path}.{own}", getattr(module, own), role, layer)
    for own, order in getattr(module, "stacked", {}).items():
        kind = role if own == "weight" else SAME_ROLE.get(own, own)
        yield from _stacked(f"{path}.{own}", getattr(module, own, None), kind, order, layer)


def _parts(name: str, linear: nn.Linear) -> Any:
    if hasattr(linear, "fused"):
        return linear.fused
    return QKV if name in FUSED_NAMES and linear.out_features == 3 * linear.in_features else ()


def _fused(name: str, weight: nn.Parameter, parts: Any, role: str, layer: int) -> Iterator[Matrix]:
    if not parts:
        yield Matrix(name, weight, role, layer)
        return
    rows = weight.shape[0]
    sizes = dict(parts) if hasattr(parts, "items") else {part: rows // len(parts) for part in parts}
    if sum(sizes.values()) != rows:
        raise ValueError(f"fused must be parts that make up the {rows} rows of {name}, got {parts!r}")
    start = 0
    for part, size in sizes.items():
        yield Matrix(f"{name}[{part}]", weight, part, layer, start=start, stop=start + size)
        start += size


def _stacked(name: str, stack: Any, role: str, order: str, layer: int) -> Iterator[Matrix]:
    if not isinstance(stack, nn.Parameter) or stack.dim() < 3 or order not in ORDERS:
        raise ValueError(f"stacked must name parameters with 3 axes or more in the order 'in,out' or 'out,in'; got "
                         f"{name} with {getattr(stack, 'shape', stack)!r}, {order!r}")
    for index in product(*map(range, stack.shape[:-2])):
        part = ",".join(map(str, index))
        yield Matrix(f"{name}[{part}]", stack, role, layer, index, ORDERS[order])
