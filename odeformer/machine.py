"""What a machine can do: seconds of torch's operations by their size, measured in some ten seconds on this one."""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, count, cycle, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.files import write_json
from odeformer.tracing import Operation, Trace
from odeformer.workload import loss, writing

ROUNDS = 5
MOMENT = 3e-3  # seconds that a measurement lasts at least
ELEMENTS = (64, 4096, 65536, 524288, 4194304)  # of tensors that are gone through
SIDES = (16, 64, 256, 1024)  # of matrices
NEAR, FAR, MOST = 2**20, 3 * 2**24, 4096  # bytes of weights that stay in a near cache, and that do not; matrices
LENGTHS, HEAD_DIMS, HEADS = (4, 16, 64, 256), (16, 64), 16  # of attention
TEXT = 64  # tokens that are written
# solver, layers, d_model, batch, tokens of the models that are measured as a whole
FITTED = (("euler", 1, 16, 1, 4), ("euler", 6, 16, 1, 4), ("rk4", 1, 16, 1, 4), ("rk4", 6, 16, 1, 4),
          ("euler", 2, 64, 4, 64), ("euler", 2, 512, 8, 64))
FLOWS = {  # what goes through tensors: kind -> what is timed on x
    "add": lambda x: x + x,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "gelu_backward": lambda x: torch.ops.aten.gelu_backward(x, x),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, (64,), x[0], x[0], 1e-5),
    "native_layer_norm_backward": lambda x: torch.ops.aten.native_layer_norm_backward(
        x, x, (64,), x[:, :1], x[:, :1], x[0], x[0], (True, True, True)),
    "_softmax": lambda x: x.softmax(-1),
    "_softmax_backward_data": lambda x: torch.ops.aten._softmax_backward_data(x, x, -1, torch.float32),
    "sum": lambda x: x.sum(0),
    "copy": lambda x: x.reshape(-1, 4, 16).transpose(0, 1).contiguous(),
}
ALIKE = {  # operations that cost what another does; all others cost what adding does, by bytes
    "tanh": ("silu", "sigmoid", "exp", "erf", "pow", "cos", "sin", "log", "elu", "softplus", "log_sigmoid_forward",
             "silu_backward", "softplus_backward", "elu_backward"),
    "native_layer_norm": ("_fused_rms_norm",),
    "native_layer_norm_backward": ("_fused_rms_norm_backward",),
    "_softmax": ("_log_softmax", "softmax", "logsumexp"),
    "_softmax_backward_data": ("_log_softmax_backward_data",),
    "sum": ("mean", "linalg_vector_norm", "amax", "amin", "aminmax", "argmax", "var_mean"),
    "copy": ("clone", "cat", "stack", "index", "index_select", "gather", "scatter", "embedding",
             "embedding_dense_backward", "index_put", "index_add", "repeat", "constant_pad_nd",
             "slice_backward", "select_backward", "unfold_backward"),
}
KIND = {name: kind for kind, names in ALIKE.items() for name in names} | {kind: kind for kind in FLOWS}


Curve = list[tuple[float, float]]  # (work, seconds), by increasing work


@dataclass(frozen=True)
class Table:
    """Seconds of ``n`` things done at once, by a key, against work; ``call``: of a call that does next to nothing."""

    n: int
    call: float
    curves: dict[int, Curve]

    def seconds(self, n: int, key: int, work: float) -> float:
        """Of n at once."""
        return self.call + n / self.n * max(between(self.curves, key, work) - self.call, 0.0)


@dataclass(frozen=True)
class Machine:
    """Seconds of operations. ``flows``: by kind, against elements (``add``: against bytes). ``products`` of matrices:
    by the smallest of the three sides, against the product of the others, with the second in a near cache and not (of
    models with more bytes of weights than NEAR); ``attention`` and ``attention_backward``: by
    head_dim, against queries x keys. ``evaluate`` (a pass without gradients), ``train`` (one there and back),
    ``write`` (one of a single token, through a cache): what Python and autograd take beside the work, in seconds a
    pass, a step of the solver and an operation; and what work takes there, as a multiple. ``update``: seconds of
    clipping and AdamW a tensor and an element. ``reference``: of the pass that ``reference()`` makes, by which one can
    see later whether the machine has become slower. ``threads``: of torch, when it was measured."""

    flows: dict[str, Curve]
    products: Table
    far_products: Table
    attention: Table
    attention_backward: Table
    evaluate: Sequence[float]
    train: Sequence[float]
    write: Sequence[float]
    update: Sequence[float]
    reference: float
    threads: int

    def work(self, op: Operation, weights: int = 0) -> float:
        """Seconds of an operation called by itself, again and again, in a model with so many bytes of weights."""
        if op.kind == "view":
            return 0.0
        if op.kind == "product":
            batch, *sides = op.size
            least, a, b = sorted(sides)
            return (self.products if weights <= NEAR else self.far_products).seconds(batch, least, a * b)
        if op.kind in ("attention", "attention_backward"):
            heads, queries, keys, head_dim = op.size
            return getattr(self, op.kind).seconds(heads, head_dim, queries * keys)
        kind = KIND.get(op.kind.rstrip("_"), "add")  # in place costs the same
        return read_off(self.flows[kind], op.size[1] if kind == "add" else op.size[0])

    def seconds(self, counts: Counter[Operation], n_steps: int, way: str, weights: int) -> float:
        """Of a pass with these operations, to "evaluate", "train" or "write"."""
        a, b, c, d = getattr(self, way)
        return a + b * n_steps + c * counts.total() + d * self.working(counts, weights)

    def working(self, counts: Counter[Operation], weights: int = 0) -> float:
        """Seconds of work alone."""
        return sum(n * self.work(op, weights) for op, n in counts.items())

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """What ``save`` wrote. Raises ValueError for anything else."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            tables = {name: Table(**values[name] | {"curves": {int(k): c for k, c in values[name]["curves"].items()}})
                      for name in ("products", "far_products", "attention", "attention_backward")}
            return cls(**{**values, **tables})
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no measurement of a machine: {error}") from error


def read_off(curve: Curve, work: float) -> float:
    """Seconds at an amount of work: straight between points on logarithmic axes, beyond the last in proportion, before
    the first the same."""
    if work <= curve[0][0]:
        return curve[0][1]
    if work >= curve[-1][0]:
        return curve[-1][1] * work / curve[-1][0]
    i = bisect_right([x for x, _ in curve], work)
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    share = math.log(work / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0)**share


def between(table: dict[int, Curve], key: float, work: float) -> float:
    """The same between two curves of a table; outside it the work of the nearest, in proportion."""
    keys = sorted(table)
    if key <= keys[0]:
        return read_off(table[keys[0]], work)
    if key >= keys[-1]:
        return read_off(table[keys[-1]], work) * key / keys[-1]
    low, high = next((a, b) for a, b in pairwise(keys) if a <= key <= b)
    return read_off([(float(k), read_off(table[k], work)) for k in (low, high)], key)


Clock = Callable[[], float]


def clock() -> Clock:
    """Seconds of this process where it has one thread, which others on the machine lengthen little; else of the
    wall."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def timed(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Seconds of each call: the lower quartile of several rounds in which all take turns, as others on the machine only
    lengthen them."""
    now, repeats = clock(), []
    for call in calls:
        call()
        begun = now()
        call()
        repeats.append(max(1, math.ceil(MOMENT / max(now() - begun, 1e-7))))
    rounds = []
    for _ in range(ROUNDS):
        rounds.append([])
        for call, n in zip(calls, repeats, strict=True):
            call()  # what the one before has put into the caches is none of its business
            begun = now()
            for _ in range(n):
                call()
            rounds[-1].append((now() - begun) / n)
    return [sorted(column)[ROUNDS // 4] for column in zip(*rounds, strict=True)]


@torch.no_grad()
def measure() -> Machine:
    """This machine as it is now, with torch's number of threads; takes some ten seconds."""
    flows = {kind: curve({n: partial(flow, torch.randn(n // 64, 64)) for n in ELEMENTS})
             for kind, flow in FLOWS.items()}
    flows["add"] = [(12 * n, t) for n, t in flows["add"]]
    near, far = ({m: curve({n * n: product(m, n, room) for n in SIDES}) for m in (1, 4, *SIDES)} for room in (0, FAR))
    tables = [Table(HEADS, timed([attention(1, 2, HEAD_DIMS[0], backward)])[0],
                    {d: curve({n * n: attention(HEADS, n, d, backward) for n in LENGTHS}) for d in HEAD_DIMS})
              for backward in (False, True)]
    products = [Table(1, curves[1][0][1], curves) for curves in (near, far)]
    bare = Machine(flows, *products, *tables, (), (), (), (), timed([reference()])[0], torch.get_num_threads())
    return replace(bare, update=update(), **fitted(bare))


def curve(calls: dict[int, Callable[[], Any]]) -> Curve:
    """Seconds against work."""
    return list(zip(map(float, calls), timed(list(calls.values())), strict=True))


def product(m: int, n: int, room: int) -> Callable[[], Tensor]:
    """(m, n) times (n, n), the latter others each time until so many bytes have been gone through; they lie in memory
    as the weights of a linear map do, by which a single row costs up to twice what it would the other way round."""
    a, others = torch.randn(m, n), cycle(torch.randn(max(1, min(MOST, room // (4 * n * n))), n, n).mT.unbind())
    return lambda: a @ next(others)


def attention(heads: int, n: int, head_dim: int, backward: bool) -> Callable[[], Any]:
    """Attention of n tokens."""
    q = torch.randn(1, heads, n, head_dim)
    if not backward:
        return lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    y, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    return lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(y, q, q, q, y, logsumexp, 0.0,
                                                                                      False)


def fitted(bare: Machine) -> dict[str, Sequence[float]]:
    """What passes take beside their work, from models so small that they do little else and some that are not, and how
    much more work takes in a model, where operations drive each other's numbers out of the caches."""
    from scipy.optimize import nnls

    rows: list[tuple[str, Counter[Operation], int, int]] = []
    calls: list[Callable[[], Any]] = []
    for solver, n_layers, d_model, batch, n_tokens in FITTED:
        model = small(solver, n_layers, d_model)
        weights = sum(p.nbytes for p in model.parameters())
        for way, call in passes(model, batch, n_tokens).items():
            call()  # gradients, and buffers of a cache, are there from here on
            call()
            with Trace() as trace:
                call()
            rows.append((way, trace.counts, n_layers, weights))
            calls.append(call)
    found: dict[str, Sequence[float]] = {}
    times = timed(calls)
    for kind in dict.fromkeys(way for way, *_ in rows):
        matrix = [[x / t for x in (1, n_layers, counts.total(), bare.working(counts, weights))]
                  for t, (way, counts, n_layers, weights) in zip(times, rows, strict=True) if way == kind]
        found[kind] = nnls(matrix, [1.0] * len(matrix))[0].tolist()  # errors are relative, and nothing is below 0
    return found


def reference() -> Callable[[], Any]:
    """A training pass over a model of middling size."""
    return passes(small("euler", 2, 64), 4, 64)["train"]


def small(solver: str, n_layers: int, d_model: int) -> nn.Module:
    """A decoder."""
    from odeformer.block import BlockConfig
    from odeformer.depth import DepthConfig
    from odeformer.models import Decoder, DecoderConfig

    return Decoder(DecoderConfig(vocab_size=64, max_seq_len=TEXT, n_layers=n_layers, block=BlockConfig(d_model, 4),
                                 depth=DepthConfig(solver=solver)))


def passes(model: nn.Module, batch: int, n_tokens: int) -> dict[str, Callable[[], Any]]:
    """A pass without gradients, one there and back, and one that writes a token."""
    given = [torch.zeros(batch, n_tokens, dtype=torch.int64)]

    def train() -> None:
        with torch.enable_grad():
            loss(model, given)[0].backward()

    text = chain.from_iterable(writing(model, batch, n_tokens // 2) for _ in count())  # so that no cache grows long
    return {"evaluate": lambda: model(*given), "train": train, "write": lambda: next(text)}


def update() -> Sequence[float]:
    """Of clipping, AdamW and forgetting the gradients: seconds for each tensor, and for each element beside that."""
    from odeformer.optim import adamw

    shapes, found = [(64, 16, 16), (8, 512, 512)], []
    for n, *shape in shapes:
        layers = nn.ModuleList(nn.Linear(*shape, bias=False) for _ in range(n))
        optimizer = adamw(layers, learning_rate=1e-3, weight_decay=0.01)
        gradients = [torch.randn(shape) for _ in layers]

        def step(layers: Any = layers, optimizer: Any = optimizer, gradients: Any = gradients) -> None:
            for layer, gradient in zip(layers, gradients, strict=True):
                layer.weight.grad = gradient
            nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        with torch.enable_grad():
            found.append(timed([step])[0] / n)
    elements = [math.prod(shape) for _, *shape in shapes]
    each = (found[1] - found[0]) / (elements[1] - elements[0])
    return max(found[0] - each * elements[0], 0.0), max(each, 0.0)
