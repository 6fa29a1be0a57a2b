"""Attention written out query by query from the equations, in the numbers' own dtype, and the variants to compare."""

import math
from dataclasses import dataclass

import torch

from odeformer.attention import ATTENTION

F64 = torch.float64
D_MODEL, N_HEADS = 8, 2

VARIANTS = {  # of each entry of ATTENTION at least one (checked in a test)
    "softmax": ("softmax", {}),
    "rms queries": ("softmax", {"qk_norm": "rms"}),
    "layer-normed queries": ("softmax", {"qk_norm": "layer", "bias": False}),
    "multi-query": ("softmax", {"n_kv_heads": 1}),
    "distance": ("local_distance", {}),
    "distance by head": ("local_distance", {"gamma": (0.3, 0.0)}),
    "distance learned": ("local_distance", {"gamma": 0.7, "gamma_mode": "learned", "n_kv_heads": 1}),
    "distance predicted": ("local_distance", {"gamma": 0.4, "gamma_mode": "predicted"}),
    "gaussian": ("local_gaussian", {"sigma": 1.5}),
    "gaussian by head": ("local_gaussian", {"sigma": [0.5, 3.0], "gamma": [2.0, 1.0], "qk_norm": "rms"}),
    "gaussian learned": ("local_gaussian", {"sigma": 2.0, "sigma_mode": "learned", "gamma_mode": "learned"}),
    "gaussian predicted": ("local_gaussian", {"sigma": 1.2, "sigma_mode": "predicted", "gamma_mode": "predicted"}),
    "mixture": ("local_mixture", {"sigma": 1.3}),
    "mixture of distance": ("local_mixture", {"prior": "distance", "gamma": 0.6, "beta": (0.0, 1.0)}),
    "mixture learned": ("local_mixture", {"beta": 0.3, "beta_mode": "learned", "sigma_mode": "learned"}),
    "mixture gated": ("local_mixture", {"beta": 0.2, "beta_mode": "predicted", "sigma": 2.0, "gamma": 0.5}),
    "multiplicative": ("local_multiplicative", {"sigma": 2.0}),
    "multiplicative predicted": ("local_multiplicative", {"sigma_mode": "predicted", "sigma": 3.0}),
    "multiplicative exponential": ("local_multiplicative", {"decay": "exponential", "gamma": 0.3,
                                                            "gamma_mode": "learned"}),
    "multiplicative normalized": ("local_multiplicative", {"decay": "normalized", "n_kv_heads": 1}),
    "cross predicted": ("cross_gaussian", {"sigma": 1.1}),
    "cross ratio": ("cross_gaussian", {"center_mode": "ratio", "sigma": 2.0, "sigma_mode": "learned"}),
    "cross given ratio": ("cross_gaussian", {"center_mode": "ratio", "ratio": 1.4, "sigma_mode": "predicted"}),
    "relative": ("relative", {"max_distance": 3}),
    "relative scores": ("relative", {"max_distance": 2, "tables": "kq"}),
    "relative queries": ("relative", {"max_distance": 1, "tables": "q", "n_kv_heads": 1}),
    "relative keys": ("relative", {"max_distance": 20, "tables": "k"}),
    "relative values": ("relative", {"max_distance": 2, "tables": "v"}),
    "window": ("window", {"window": 3}),
    "gaussian in a window": ("local_gaussian", {"sigma": 2.0, "window": 2}),
    "alibi": ("alibi", {}),
    "l2": ("l2", {}),
}
CROSS = [label for label, (name, _) in VARIANTS.items() if name.startswith("cross")]
SELF = [label for label in VARIANTS if label not in CROSS]


def make(label, dtype=F64, **more):
    """The module of a variant. Its parameters are drawn in float64, so that a learned one starts exactly."""
    name, options = VARIANTS[label]
    torch.set_default_dtype(F64)
    try:
        attention = ATTENTION[name](D_MODEL, N_HEADS, **{**options, **more})
    finally:
        torch.set_default_dtype(torch.float32)
    return attention.to(dtype)


def options_of(label):
    return VARIANTS[label][1]


@dataclass
class Row:
    """One query: its number i, its head, what it may see (js), scores over js, and all that a prior may need."""

    attention: torch.nn.Module
    options: dict
    i: int
    head: int
    js: list
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    n: int
    real: list

    @property
    def scores(self):
        return torch.stack([self.q @ self.k[j] for j in self.js]) / math.sqrt(len(self.q))

    def number(self, name, default):
        """γ, σ or β of this head and query."""
        start = self.options.get(name, default)
        start = start[self.head] if isinstance(start, tuple | list) else start
        if self.options.get(f"{name}_mode", "fixed") != "predicted":
            return start
        network = next(m for path, m in self.attention.named_modules() if path.split(".")[-1] == name).network
        more = two_layers(network, self.q)
        if name == "beta":
            return 1 / (1 + torch.exp(-(math.log(start / (1 - start)) + more)))
        return start * torch.exp(more)

    def over(self, g):
        """(g(i, j) for the j seen)."""
        return torch.stack([torch.as_tensor(g(self.i, j), dtype=self.q.dtype) for j in self.js])


def two_layers(network, q):
    return network.last.weight[0] @ torch.tanh(network.hidden.weight @ q + network.hidden.bias)


def softmax(x):
    weights = torch.exp(x - x.max())
    return weights / weights.sum()


def averaged(row, weights):
    return sum(w * row.v[j] for w, j in zip(weights, row.js, strict=True))


def softmax_row(row):
    return averaged(row, softmax(row.scores))


def distance(row):
    gamma = row.number("gamma", 1.0)
    return row.over(lambda i, j: -gamma * abs(i - j))  # eqs. 1-2


def gaussian(row):
    gamma, sigma = row.number("gamma", 1.0), row.number("sigma", 4.0)
    return row.over(lambda i, j: -gamma * (i - j) ** 2 / (2 * sigma**2))  # eqs. 1, 3


def mixture_row(row):  # eq. 6
    beta = row.number("beta", 0.5)
    prior = distance if row.options.get("prior") == "distance" else gaussian
    return averaged(row, (1 - beta) * softmax(row.scores) + beta * softmax(prior(row)))


def multiplicative_row(row):  # eq. 7
    decay = row.options.get("decay", "gaussian")
    if decay == "gaussian":
        sigma = row.number("sigma", 4.0)
        factor = torch.exp(row.over(lambda i, j: -((i - j) ** 2) / (2 * sigma**2)))
    elif decay == "exponential":
        gamma = row.number("gamma", 1.0)
        factor = row.over(lambda i, j: math.exp(-gamma * abs(i - j)))
    else:
        g = row.over(lambda i, j: -abs(i - j))
        low, high = g.min(), g.max()
        factor = torch.ones_like(g) if low == high else (g - low) / (high - low)
    return averaged(row, softmax(row.scores * factor))


def cross_row(row):  # eqs. 4-5
    length = len(row.real)
    if row.options.get("center_mode", "predicted") == "predicted":
        center = length / (1 + torch.exp(-two_layers(row.attention.center.network, row.q)))
    else:
        center = min(max(row.i * row.options.get("ratio", length / row.n), 0), length - 1)
    gamma, sigma = row.number("gamma", 1.0), row.number("sigma", 4.0)
    return averaged(row, softmax(row.scores + row.over(
        lambda i, j: -gamma * (center - row.real.index(j)) ** 2 / (2 * sigma**2))))


def relative_row(row):  # eqs. 8-12
    k = row.options["max_distance"]
    zero = torch.zeros_like(row.q)

    def pe(letter, j):
        table = getattr(row.attention, {"q": "query_table", "k": "key_table", "v": "value_table"}[letter])
        on = letter in row.options.get("tables", "qkv")
        return table[max(-k, min(j - row.i, k)) + k] if on else zero

    scores = torch.stack([(row.q + pe("q", j)) @ (row.k[j] + pe("k", j)) for j in row.js]) / math.sqrt(len(row.q))
    return sum(w * (row.v[j] + pe("v", j)) for w, j in zip(softmax(scores), row.js, strict=True))


def alibi_row(row):
    slope = 2 ** (-8 * (row.head + 1) / N_HEADS)
    return averaged(row, softmax(row.scores - row.over(lambda i, j: slope * abs(i - j))))


def l2_row(row):  # Kim et al. 2021, eq. 5; row.v is x_j W^Q W^Q^T W^V / sqrt(head_dim)
    square = torch.stack([(row.q - row.k[j]).square().sum() for j in row.js])
    return averaged(row, softmax(-square / math.sqrt(len(row.q))))


ROWS = {
    "softmax": softmax_row,
    "window": softmax_row,
    "local_distance": lambda row: averaged(row, softmax(row.scores + distance(row))),
    "local_gaussian": lambda row: averaged(row, softmax(row.scores + gaussian(row))),
    "local_mixture": mixture_row,
    "local_multiplicative": multiplicative_row,
    "cross_gaussian": cross_row,
    "relative": relative_row,
    "alibi": alibi_row,
    "l2": l2_row,
}


def normed(x, kind, module):
    if kind == "rms":
        return x / torch.sqrt(x.square().mean() + torch.finfo(x.dtype).eps) * module.weight
    if kind == "layer":
        return (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5) * module.weight + module.bias
    return x


def in_heads(linear, x, width):
    y = x @ linear.weight.T + (0 if linear.bias is None else linear.bias)
    return [y[:, start:start + width] for start in range(0, y.shape[1], width)]


def plain(label, attention, x, memory=None, mask=None, causal=False):
    """The output, by Python loops. mask (batch, keys) or (batch, queries, keys)."""
    name, options = VARIANTS[label]
    head_dim, window = D_MODEL // N_HEADS, options.get("window")
    outputs = []
    for b in range(len(x)):
        source, sight = x[b] if memory is None else memory[b], None if mask is None else mask[b]
        if memory is not None and sight is not None and sight.dim() == 1 and not causal:
            first = sight.tolist().index(True) if sight.any() else 0  # places count from the first real token
            source, sight = source[first:], sight[first:]
        n, m = len(x[b]), len(source)
        heads = []
        for h in range(N_HEADS):
            group = h * options.get("n_kv_heads", N_HEADS) // N_HEADS
            q = in_heads(attention.query, x[b], head_dim)[h]
            k = in_heads(attention.key, source, head_dim)[group]
            v = in_heads(attention.value, source, head_dim)[group]
            if name == "l2":
                w_q, w_v = (w.weight[h * head_dim:(h + 1) * head_dim].T for w in (attention.query, attention.value))
                v = source @ (w_q @ w_q.T / math.sqrt(head_dim)) @ w_v
            kind = options.get("qk_norm", "none")
            q = torch.stack([normed(row, kind, attention.query_norm) for row in q])
            k = torch.stack([normed(row, kind, attention.key_norm) for row in k])
            rows = []
            for i in range(n):
                seen = torch.ones(m, dtype=torch.bool) if sight is None else sight if sight.dim() == 1 else sight[i]
                real = [j for j in range(m) if seen[j]]
                js = [j for j in real if not (causal and j > i) and (window is None or abs(i - j) < window)]
                row = Row(attention, options, i, h, js, q[i], k, v, n, real)
                rows.append(ROWS[name](row) if js else torch.zeros(head_dim, dtype=x.dtype))
            heads.append(torch.stack(rows))
        y = torch.cat(heads, -1) @ attention.output.weight.T
        outputs.append(y if attention.output.bias is None else y + attention.output.bias)
    return torch.stack(outputs)
