"""Mixtures of experts: each token is served by ``top_k`` of ``n_experts`` networks (eqs. 49-53).

Slots (a token and one of its experts) are sorted by expert and computed a group at a time, so the cost grows with top_k
and not with n_experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from odeformer.routing import Route, Router, Visit, balance_loss, check_choice, router_z_loss
from odeformer.tables import at_least, look_up

__all__ = ["ExpertSlices", "Experts", "StackedLinear", "balance_loss", "router_z_loss"]

Maps = Sequence[tuple[Tensor, Tensor | None]]  # the weights and biases of one expert's matrices
Feed = Callable[[Tensor, Maps], Tensor]


class StackedLinear(nn.Module):
    """The same linear map of several experts: ``weight`` (n_experts, d_in, d_out), ``bias`` (n_experts, d_out)."""

    def __init__(self, n_experts: int, d_in: int, d_out: int, *, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, d_in, d_out))
        self.bias = nn.Parameter(torch.zeros(n_experts, d_out)) if bias else None
        self.stacked = {"weight": "in,out"}  # for initialisers: a matrix for each expert
        for weight in self.weight:
            nn.init.xavier_uniform_(weight)

    def extra_repr(self) -> str:
        """Shape."""
        n_experts, d_in, d_out = self.weight.shape
        return f"n_experts={n_experts}, d_in={d_in}, d_out={d_out}, bias={self.bias is not None}"


Stack = tuple[Tensor, Tensor | None]  # weights (n_experts, d_in, d_out) and biases (n_experts, d_out)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W + b for x (rows, d_in), or for a batch of such with a W and b each."""
    y = torch.matmul(x, weight)
    return y if bias is None else y + bias.to(y.dtype).unsqueeze(-2)


def loop(rows: Tensor, counts: Tensor, stacks: Sequence[Stack], feed: Feed) -> Tensor:
    """Expert after expert, each on its rows: nothing is computed twice or for nothing, but the counts must be read."""
    sizes = counts.tolist()
    rest = rows.shape[0] - sum(sizes)
    per_stack = [list(zip(weight.unbind(), [None] * len(sizes) if bias is None else bias.unbind(), strict=True))
                 for weight, bias in stacks]
    done = [feed(x, maps) for x, *maps in zip(rows.split([*sizes, rest]), *per_stack, strict=False)]
    return torch.cat([*done, done[0].new_zeros(rest, done[0].shape[-1])])


def blocks(rows: Tensor, counts: Tensor, stacks: Sequence[Stack], feed: Feed) -> Tensor:
    """Rows in blocks of equal size, each of one expert, in a batched product with a copy of its weights.

    Shapes do not depend on the counts, so nothing waits for the device and torch.compile and torch.func can trace it.
    An expert's last block is filled up: at most half as many rows again are computed, and at most three copies of the
    weights made (an expert with many rows has several blocks).
    """
    n_rows, n_experts = rows.shape[0], counts.shape[0]
    if n_rows == 0:
        return feed(rows, [(weight[0], None if bias is None else bias[0]) for weight, bias in stacks])
    busy = min(n_experts, n_rows)
    size = -(-n_rows // (2 * n_experts))
    n_blocks = (n_rows + busy * (size - 1)) // size  # enough, however the rows fall
    per_expert = (counts + size - 1).div(size, rounding_mode="floor")
    last, stop = per_expert.cumsum(0), counts.cumsum(0)
    first, start = last - per_expert, stop - counts  # the first block and the first row of each expert

    def owners(ends: Tensor, n: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(n, device=rows.device)
        return at, (at.unsqueeze(-1) >= ends).sum(-1).clamp(max=n_experts - 1)

    at, owner = owners(last, n_blocks)
    within = (at - first[owner]).unsqueeze(-1) * size + torch.arange(size, device=rows.device)
    source = (start[owner].unsqueeze(-1) + within).clamp(max=n_rows - 1)
    maps = [(weight[owner], None if bias is None else bias[owner]) for weight, bias in stacks]
    done = feed(rows[source], maps).flatten(0, 1)
    at, owner = owners(stop, n_rows)
    place = first[owner] * size + at - start[owner]
    return done[place.clamp(max=done.shape[0] - 1)]


GROUPINGS = {"loop": loop, "blocks": blocks}


def can_read(x: Tensor) -> bool:
    """Whether numbers can be read off x without waiting for a device or breaking a trace."""
    return not (x.is_cuda or torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None)


class Grouped(nn.Module):
    """What experts have in common: a router, and rows sorted by expert. A subclass gives ``stacks()`` and ``feed``.

    ``routed`` tells a block to call the layer with a ``Visit``.
    """

    routed = True

    def __init__(self, d_model: int, d_ff: int, n_experts: int, top_k: int, grouping: str | None):
        super().__init__()
        at_least("d_model", d_model, 1)
        at_least("d_ff", d_ff, 1)
        check_choice(n_experts, top_k)
        if grouping is not None:
            look_up(GROUPINGS, grouping, "grouping")
        self.d_model, self.d_ff, self.n_experts, self.top_k, self.grouping = d_model, d_ff, n_experts, top_k, grouping

    def stacks(self) -> list[Stack]:
        """The experts' matrices."""
        raise NotImplementedError

    def feed(self, x: Tensor, maps: Maps) -> Tensor:
        """One expert on its rows (rows, d_model), or a batch of such pairs."""
        raise NotImplementedError

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, ``counts`` of them for each (what is left over is nobody's) -> their outputs."""
        grouping = self.grouping or ("loop" if can_read(rows) else "blocks")
        return look_up(GROUPINGS, grouping, "grouping")(rows, counts, self.stacks(), self.feed)

    def total(self, tally: Tensor) -> Tensor:
        """What all processes counted; here there is one."""
        return tally

    def serve(self, x: Tensor, route: Route, scale: Tensor | None = None) -> Tensor:
        """x (batch, tokens, d_model) -> what each token's experts make of it (batch, tokens, top_k, d_model), 0 where
        one does not serve. ``scale``, shaped like the gates, multiplies what goes in."""
        experts = route.indices.flatten()
        if route.served is not None:
            experts = experts.masked_fill(~route.served.flatten(), self.n_experts)  # sorted behind all that are served
        order = experts.argsort(stable=True)
        counts = (experts.unsqueeze(-1) == torch.arange(self.n_experts, device=x.device)).sum(0)
        rows = x.flatten(0, 1)[order.div(self.top_k, rounding_mode="floor")]
        if scale is not None:
            rows = rows * scale.flatten()[order].unsqueeze(-1).to(rows.dtype)
        y = self.compute(rows, counts)[order.argsort()].unflatten(0, route.indices.shape)
        return y if route.served is None else y.masked_fill(~route.served.unsqueeze(-1), 0)


def as_sequences(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (..., tokens, d_model) as (batch, tokens, d_model), padding at 0."""
    sequences = x.flatten(0, -3) if x.dim() > 2 else x.reshape(1, -1, x.shape[-1])
    return sequences if mask is None else sequences.masked_fill(~mask.unsqueeze(-1), 0)


class Experts(Grouped):
    """Σ_{i in the top_k} g_i(x) FFN_i(x) (eqs. 49-50, 53): n_experts networks of the form of eq. 48, each with d_ff
    hidden units of its own.

    ``activation``: the feed-forward that each expert is, a key of FEEDFORWARD such as relu, gelu, swiglu. ``gate``,
    ``renormalize``, ``noise``, ``jitter``: see ``odeformer.routing.Router``. With top_k = n_experts it is the dense
    mixture of eqs. 49-50.

    ``capacity_factor`` c: an expert serves at most ceil(c tokens top_k / n_experts) tokens of each sequence, the first
    ones by position (in a causal model this holds after every token); None: all. A dropped choice adds nothing, so a
    token that is dropped by all its experts keeps its state. The share dropped is in ``solution.routing``.

    ``routing``: how long a choice of experts lasts; their weights are computed anew at each evaluation. f jumps where
    the top_k change, and a step over a jump has an error of O(h) whatever the solver's order. "evaluation": each
    evaluation chooses, so stages of one step may use different experts; order 1 over a depth with changes (for rk4
    measured, and 4 without them). Adaptive solvers then take many small steps (dopri5 1544 evaluations instead of 32
    in a small layer), and the iterations of implicit ones may fail. "step": the first evaluation of a step chooses, so
    that f is smooth within it; a change comes up to h late, so the order over a depth with changes is 1 as well, and
    the error larger. Not for adaptive solvers, nor for gradient modes other than backprop and checkpoint. "solve": the
    first evaluation of a layer in a forward pass chooses for the rest of it; f is smooth and every solver keeps its
    order, toward the solution of a field that is another one wherever the choice would have changed (with shared
    weights there is one choice for all depths).

    ``grouping``: "loop" reads how many rows each expert has; "blocks" has fixed shapes, so that nothing waits for a
    GPU; None: loop on a CPU, blocks on a GPU and where torch.compile or torch.func trace.

    Raises ValueError or TypeError for options out of range.
    """

    def __init__(self, d_model: int, d_ff: int, *, n_experts: int = 8, top_k: int = 2, activation: str = "relu",
                 capacity_factor: float | None = None, renormalize: bool = False,
                 gate: str | Callable = "softmax_then_topk", noise: bool = False, jitter: float = 0.0,
                 routing: str = "evaluation", bias: bool = True, grouping: str | None = None):
        super().__init__(d_model, d_ff, n_experts, top_k, grouping)
        from odeformer.feedforward import FEEDFORWARD, GatedFeedForward

        form = look_up(FEEDFORWARD, activation, "activation")
        if not hasattr(form, "activation"):
            raise ValueError(f"activation must be a plain feed-forward network, such as relu, gelu or swiglu; got "
                             f"{activation!r}")
        self.activation = form.activation
        self.router = Router(d_model, n_experts, top_k, gate=gate, renormalize=renormalize, noise=noise,
                             capacity_factor=capacity_factor, jitter=jitter, routing=routing)
        self.hidden = StackedLinear(n_experts, d_model, d_ff, bias=bias)
        self.gate = StackedLinear(n_experts, d_model, d_ff, bias=bias) if issubclass(form, GatedFeedForward) else None
        self.output = StackedLinear(n_experts, d_ff, d_model, bias=bias)

    def stacks(self) -> list[Stack]:
        """Output, hidden, and the gate's where the experts have one."""
        return [(m.weight, m.bias) for m in (self.output, self.hidden, self.gate) if m is not None]

    def feed(self, x: Tensor, maps: Maps) -> Tensor:
        """One expert on its rows (eq. 48)."""
        output, hidden, *gate = maps
        h = affine(x, *hidden)
        h = self.activation(affine(x, *gate[0])) * h if gate else self.activation(h)
        return affine(h, *output)

    def forward(self, x: Tensor, visit: Visit | None = None) -> Tensor:
        """(..., tokens, d_model) -> the same shape. ``visit``: what a forward pass tells (mask, causal, ...)."""
        visit = Visit(training=self.training) if visit is None else visit
        sequences = as_sequences(x, visit.mask)
        route = self.router(sequences, visit, self.total)
        y = self.serve(sequences, route)
        mixed = (y * route.gates.unsqueeze(-1)).sum(-2)  # in the router's precision
        return mixed.to(y.dtype).reshape(x.shape)


class ExpertSlices(Grouped):
    """A feed-forward network with W_h cut into n_experts column slices (eqs. 51-52), of which a token uses top_k:

        activation(Σ_{i in the top_k} g_i(x) [x W_h^i] + b_h) W_f + b_f

    where [·] stands in the columns of slice i. As eq. 51 has it the weight multiplies the product, and a slice that is
    not used leaves its columns at activation(b_h). The parameters are those of the dense network, ``hidden`` and
    ``output``; d_ff must be a multiple of n_experts.

    By default all slices are used with weight 1 (gate "none"): the dense network, bit for bit; there is then no router.
    Take a smaller ``top_k``, and a softmax gate if the router is to learn from the task and not only from the balance
    loss. ``activation``: relu or gelu. The other options are those of ``Experts``.
    """

    def __init__(self, d_model: int, d_ff: int, *, n_experts: int = 8, top_k: int | None = None,
                 activation: str = "relu", capacity_factor: float | None = None, renormalize: bool = False,
                 gate: str | Callable = "none", noise: bool = False, jitter: float = 0.0,
                 routing: str = "evaluation", bias: bool = True, grouping: str | None = None):
        super().__init__(d_model, d_ff, n_experts, n_experts if top_k is None else top_k, grouping)
        from odeformer.feedforward import FEEDFORWARD, GatedFeedForward

        if d_ff % n_experts:
            raise ValueError(f"d_ff must be a multiple of n_experts, got d_ff = {d_ff}, n_experts = {n_experts}")
        form = look_up(FEEDFORWARD, activation, "activation")
        if not hasattr(form, "activation") or issubclass(form, GatedFeedForward):
            raise ValueError(f"activation must be that of a network with one hidden matrix, such as relu or gelu; got "
                             f"{activation!r}")
        self.activation = form.activation
        router = Router(d_model, n_experts, self.top_k, gate=gate, renormalize=renormalize, noise=noise,
                        capacity_factor=capacity_factor, jitter=jitter, routing=routing)
        self.dense = gate == "none" and self.top_k == n_experts and capacity_factor is None
        if self.dense and (noise or jitter or routing != "evaluation" or grouping is not None):
            raise ValueError("noise, jitter, routing and grouping have nothing to do where all slices are used with "
                             "weight 1; give top_k or gate as well")
        self.router = None if self.dense else router
        self.hidden = nn.Linear(d_model, d_ff, bias=bias)
        self.output = nn.Linear(d_ff, d_model, bias=bias)

    def stacks(self) -> list[Stack]:
        """The slices, as views. The output's bias is not a slice's."""
        n = self.n_experts
        hidden = self.hidden.weight.unflatten(0, (n, -1)).transpose(1, 2)
        bias = self.hidden.bias
        output = self.output.weight.unflatten(1, (n, -1)).permute(1, 2, 0)
        return [(output, None), (hidden, None if bias is None else bias.unflatten(0, (n, -1)))]

    def feed(self, x: Tensor, maps: Maps) -> Tensor:
        """One slice on its rows."""
        output, hidden = maps
        return affine(self.activation(affine(x, *hidden)), *output)

    def forward(self, x: Tensor, visit: Visit | None = None) -> Tensor:
        """(..., tokens, d_model) -> the same shape."""
        if self.dense:
            return self.output(self.activation(self.hidden(x)))
        visit = Visit(training=self.training) if visit is None else visit
        sequences = as_sequences(x, visit.mask)
        route = self.router(sequences, visit, self.total)
        y = self.serve(sequences, route, scale=route.gates).sum(-2)
        if self.hidden.bias is not None:
            y = y + self._unused(route).to(y.dtype)
        if self.output.bias is not None:
            y = y + self.output.bias.to(y.dtype)
        return y.reshape(x.shape)

    def _unused(self, route: Route) -> Tensor:
        """Σ over the slices that a token does not use of activation(b_h^i) W_f^i (batch, tokens, d_model)."""
        (output, _), (_, bias) = self.stacks()
        each = affine(self.activation(bias).unsqueeze(1), output, None).squeeze(1)  # (n_experts, d_model)
        used = torch.ones_like(route.gates) if route.served is None else route.served.to(route.gates.dtype)
        unused = 1 - torch.zeros_like(route.gates[..., :1]).repeat(1, 1, self.n_experts).scatter(
            -1, route.indices, used)
        return torch.matmul(unused.to(each.dtype), each)
