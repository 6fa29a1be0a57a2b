"""Who serves which token: the router of a mixture of experts, its gates, its capacity and its losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.tables import at_least, look_up

ROUTINGS = ("evaluation", "step", "solve")


@dataclass
class Visit:
    """What a routed layer knows of the forward pass in which it is evaluated.

    ``mask``: (batch, tokens), True = real; others take no expert and no part in the losses. ``causal``: what a token
    gets may depend on earlier ones only. ``training``: noise acts. ``held``: draws and choices of this layer that last
    longer than an evaluation. ``step``: the number of the solver's step; None where steps are not counted, and each
    evaluation is one. ``report``: takes what is to be known after the pass.
    """

    mask: Tensor | None = None
    causal: bool = False
    training: bool = False
    held: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    step: int | None = None
    report: Callable[[str, Tensor], None] | None = None

    def once(self, name: str, make: Callable[[], Tensor], span: Any = None) -> Tensor:
        """What ``make`` gave first, for as long as ``span`` stays the same."""
        if name not in self.held or self.held[name][0] != span:
            self.held[name] = span, make()
        return self.held[name][1]


@dataclass
class RoutingLog:
    """What the routed layers of one forward pass keep and report. ``step``: the number of the solver's step, or None
    where steps are not counted. ``records``: (layer, name, value) of every evaluation."""

    step: int | None = None
    held: dict[tuple[int, int], dict] = field(default_factory=dict)
    records: list[tuple[int, str, Tensor]] = field(default_factory=list)

    def visit(self, site: nn.Module, layer: int, **known: Any) -> Visit:
        """What ``site`` sees when it is evaluated as a layer."""
        def report(name: str, value: Tensor) -> None:
            self.records.append((layer, name, value))

        held = self.held.setdefault((id(site), layer), {})
        return Visit(**known, held=held, step=self.step, report=report)


class Route(NamedTuple):
    """For each of (batch, tokens): the ``top_k`` experts it goes to, their weights (0 where not served), and which of
    them serve it (None: all do)."""

    indices: Tensor
    gates: Tensor
    served: Tensor | None


def softmax_then_topk(logits: Tensor, indices: Tensor) -> Tensor:
    """Weights of the chosen: their part of the softmax over all experts (eq. 50; Fedus et al. 2022)."""
    return logits.softmax(-1).gather(-1, indices)


def topk_then_softmax(logits: Tensor, indices: Tensor) -> Tensor:
    """Weights of the chosen: a softmax over them alone, so that they sum to 1 (Shazeer et al. 2017)."""
    return logits.gather(-1, indices).softmax(-1)


def sigmoid(logits: Tensor, indices: Tensor) -> Tensor:
    """Each of the chosen by itself (Csordás et al. 2023)."""
    return logits.gather(-1, indices).sigmoid()


def no_gate(logits: Tensor, indices: Tensor) -> Tensor:
    """Weight 1 for each of the chosen; the router then learns from the balance loss alone."""
    return torch.ones_like(indices, dtype=logits.dtype)


GATES = {
    "softmax_then_topk": softmax_then_topk,
    "topk_then_softmax": topk_then_softmax,
    "sigmoid": sigmoid,
    "none": no_gate,
}


class Router(nn.Linear):
    """x W_g without a bias, computed in float32 at least whatever the model's precision, and the choice made from it.

    ``gate``: a key of GATES. ``renormalize``: the weights of the chosen are divided by their sum (which makes
    softmax_then_topk equal to topk_then_softmax). ``capacity_factor`` c: see ``serve_in_order``. In training, ``noise``
    adds softplus(x W_noise) ε, ε ~ N(0, 1), to the logits (Shazeer et al. 2017; W_noise starts at 0), and ``jitter`` δ
    multiplies x by U(1 - δ, 1 + δ) (Fedus et al. 2022), both drawn once a solve. ``routing``: for how long a choice
    lasts (see ``odeformer.experts.Experts``).
    """

    def __init__(self, d_model: int, n_experts: int, top_k: int, *, gate: str | Callable = "softmax_then_topk",
                 renormalize: bool = False, capacity_factor: float | None = None, noise: bool = False,
                 jitter: float = 0.0, routing: str = "evaluation"):
        check_choice(n_experts, top_k)
        self.gate_function = look_up(GATES, gate, "gate")
        if renormalize and gate in ("topk_then_softmax", "none"):
            raise ValueError(f"renormalize has nothing to do for gate {gate!r}, whose weights are fixed to sum to "
                             "1 or are all 1; take gate='softmax_then_topk' or 'sigmoid', or leave it out")
        if routing not in ROUTINGS:
            raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
        if not isinstance(jitter, int | float) or not 0 <= jitter < 1:
            raise ValueError(f"jitter must be a number in [0, 1), got {jitter!r}")
        if capacity_factor is not None and not (isinstance(capacity_factor, int | float)
                                                and 0 < capacity_factor < math.inf):
            raise ValueError(f"capacity_factor must be a finite number above 0, or None for no limit; got "
                             f"{capacity_factor!r}")
        super().__init__(d_model, n_experts, bias=False)
        nn.init.xavier_uniform_(self.weight)
        self.top_k, self.renormalize, self.jitter, self.routing = top_k, renormalize, jitter, routing
        self.capacity_factor = capacity_factor
        if capacity_factor is not None:  # as a fraction: ceil(1.1 * 10) is 11, in floating point 12
            room = Fraction(str(capacity_factor)).limit_denominator(10**6) or Fraction(1, 10**6)
            self.room = (room * top_k / n_experts).as_integer_ratio()
        self.noise = nn.Parameter(torch.zeros(n_experts, d_model)) if noise else None

    def logits(self, x: Tensor, visit: Visit) -> Tensor:
        """(..., d_model) -> (..., n_experts), float32 or float64."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            if visit.training and self.jitter:
                low, high = 1 - self.jitter, 1 + self.jitter
                x = x * visit.once("jitter", lambda: torch.empty_like(x).uniform_(low, high))
            logits = F.linear(x, self.weight.to(dtype))
            if visit.training and self.noise is not None:
                scale = F.softplus(F.linear(x, self.noise.to(dtype)))
                logits = logits + scale * visit.once("noise", lambda: torch.randn_like(logits))
        return logits

    def choose(self, logits: Tensor, visit: Visit) -> Tensor:
        """The experts of each token (..., top_k), chosen anew or as before (``routing``)."""
        def top() -> Tensor:
            return logits.topk(self.top_k, -1).indices

        if self.routing == "evaluation" or (self.routing == "step" and visit.step is None):
            return top()
        return visit.once("choice", top, visit.step if self.routing == "step" else None)

    def forward(self, x: Tensor, visit: Visit, total: Callable[[Tensor], Tensor] = lambda tally: tally) -> Route:
        """Route x (batch, tokens, d_model). ``total`` adds up what several processes counted."""
        logits = self.logits(x, visit)
        indices = self.choose(logits.detach(), visit)
        gates = self.gate_function(logits, indices)
        if self.renormalize:
            gates = gates / gates.sum(-1, keepdim=True)
        served = None
        if self.capacity_factor is not None:
            served = serve_in_order(indices, self.out_features, self.room, visit.mask, visit.causal)
        elif visit.mask is not None:
            served = visit.mask.unsqueeze(-1).expand_as(indices)
        if served is not None:
            gates = gates.masked_fill(~served, 0)
        if visit.report is not None:
            account(total(tally(logits, indices, served, visit.mask)), self.out_features, visit.report)
        return Route(indices, gates, served)


def check_choice(n_experts: int, top_k: int) -> None:
    """Raises TypeError or ValueError unless 1 <= top_k <= n_experts."""
    at_least("n_experts", n_experts, 1)
    at_least("top_k", top_k, 1)
    if top_k > n_experts:
        raise ValueError(f"top_k must be at most n_experts = {n_experts}, got {top_k}")


def serve_in_order(indices: Tensor, n_experts: int, room: tuple[int, int], mask: Tensor | None,
                   causal: bool) -> Tensor:
    """Which claims (batch, tokens, top_k) are served when an expert takes at most ceil(a n / b) of a sequence with n
    real tokens, (a, b) = ``room``: the first ones by position. With a / b = top_k / n_experts there is room for an even
    spread.

    Room is each sequence's own, so that batch-mates do not compete, and padding takes none. In a causal model room
    grows with the tokens read: after t of them an expert has served at most ceil(a t / b), so what a token gets depends
    on earlier ones only, not even on how long the sequence is (a prefix is served as in the whole).
    """
    claims = torch.zeros(*indices.shape[:2], n_experts, dtype=torch.int64, device=indices.device)
    claims = claims.scatter(-1, indices, 1)
    real = torch.ones_like(indices[..., :1]) if mask is None else mask.unsqueeze(-1).long()
    claims = claims * real
    asked = claims.cumsum(1)
    read = real.cumsum(1)
    limit = -(-room[0] * (read if causal else read[:, -1:]) // room[1])
    if causal:  # filled(t) = min(filled(t - 1) + claim(t), limit(t)), unrolled: no loop over tokens
        filled = asked + (limit - asked).cummin(1).values.clamp(max=0)
        served = filled > F.pad(filled, (0, 0, 1, 0))[:, :-1]
    else:
        served = (asked <= limit) & (claims > 0)
    return served.gather(-1, indices)


def tally(logits: Tensor, indices: Tensor, served: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Sums over real tokens, one vector: claims of each expert, their probabilities (n_experts each), squared
    log-sum-exp, claims dropped, tokens. Two tallies add up."""
    n_experts, top_k = logits.shape[-1], indices.shape[-1]
    real = logits.new_ones(logits.shape[:-1]) if mask is None else mask.to(logits.dtype)
    if mask is not None:
        logits = logits.masked_fill(~mask.unsqueeze(-1), 0)  # what padding holds, NaN perhaps, times 0 is not 0
    claims = torch.zeros_like(logits).scatter(-1, indices, 1.0)
    by_expert = [(x * real.unsqueeze(-1)).reshape(-1, n_experts).sum(0) for x in (claims, logits.softmax(-1))]
    squares = (logits.logsumexp(-1).square() * real).sum()
    tokens = real.sum()
    dropped = torch.zeros_like(tokens) if served is None else top_k * tokens - served.sum().to(tokens.dtype)
    return torch.cat([*by_expert, torch.stack([squares, dropped, tokens])])


def balance_of(sums: Tensor, n_experts: int) -> Tensor:
    """n Σ_i f_i P_i from a tally; f_i is the share of claims that go to expert i (they sum to 1 for every top_k)."""
    claims, probabilities = sums[:n_experts], sums[n_experts:2 * n_experts]
    shares = claims / claims.sum().clamp(min=1)
    return n_experts * (shares * probabilities).sum() / sums[-1].clamp(min=1)


def account(sums: Tensor, n_experts: int, report: Callable[[str, Tensor], None]) -> None:
    """Report what a tally says of an evaluation."""
    tokens, claims = sums[-1].clamp(min=1), sums[:n_experts].detach()
    report("balance", balance_of(sums, n_experts))
    report("router_z", sums[-3] / tokens)
    report("load", claims / claims.sum().clamp(min=1))
    report("dropped", (sums[-2] / claims.sum().clamp(min=1)).detach())


def check_logits(logits: Tensor, mask: Tensor | None) -> None:
    """Raises TypeError or ValueError unless logits are (..., n_experts) and mask None or bool (...)."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"logits must be a floating-point tensor (..., n_experts), got "
                        f"{getattr(logits, 'dtype', type(logits).__name__)}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool):
        raise TypeError(f"mask must be a bool tensor (True = real), got {getattr(mask, 'dtype', type(mask).__name__)}")
    if mask is not None and mask.shape != logits.shape[:-1]:
        raise ValueError(f"mask must have the shape of logits without the experts, {tuple(logits.shape[:-1])}, got "
                         f"{tuple(mask.shape)}")


def balance_loss(logits: Tensor, top_k: int = 1, mask: Tensor | None = None) -> Tensor:
    """n Σ_i f_i P_i: f_i the share of the choices that expert i got, P_i its mean probability (Lepikhin et al. 2021,
    Fedus et al. 2022). 1 at perfect balance for every top_k, since f_i counts choices, k a token; n where one expert
    gets all with certainty and top_k = 1.

    logits (..., n_experts) of the router; mask (...), True = real: other tokens do not count (0 where none is real).
    """
    check_logits(logits, mask)
    check_choice(logits.shape[-1], top_k)
    return balance_of(tally(logits, logits.detach().topk(top_k, -1).indices, mask=mask), logits.shape[-1])


def router_z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over real tokens of (log Σ_i exp logits_i)² (Zoph et al. 2022), which keeps logits small."""
    check_logits(logits, mask)
    sums = tally(logits, logits.detach().argmax(-1, keepdim=True), mask=mask)
    return sums[-3] / sums[-1].clamp(min=1)


@dataclass(frozen=True, eq=False)
class RoutingReport:
    """What the routers of a forward pass did: a row for each layer, averaged over its evaluations.

    ``load`` (layers, n_experts): share of the choices that each expert got. ``dropped`` (layers,): share of them that
    found no room. ``balance``, ``router_z`` (layers,): the losses.
    """

    load: Tensor
    dropped: Tensor
    balance: Tensor
    router_z: Tensor

    @classmethod
    def of(cls, records: Sequence[tuple[int, str, Tensor]]) -> RoutingReport | None:
        """From (layer, name, value) of all evaluations; None where there are none."""
        if not records:
            return None
        table: dict[str, dict[int, list[Tensor]]] = {}
        for layer, name, value in records:
            table.setdefault(name, {}).setdefault(layer, []).append(value)
        return cls(**{name: torch.stack([torch.stack(layers[i]).mean(0) for i in sorted(layers)])
                      for name, layers in table.items()})

    @property
    def losses(self) -> dict[str, Tensor]:
        """Averaged over layers, so that a weight means the same at every depth."""
        return {"balance": self.balance.mean(), "router_z": self.router_z.mean()}


class Withheld(dict):
    """Losses that may not be used: asking for one says why."""

    def __init__(self, why: str):
        super().__init__()
        self.why = why

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"losses[{name!r}] {self.why}")
