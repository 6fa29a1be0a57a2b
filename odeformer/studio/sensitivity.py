"""Sections on how differences of states and gradients grow along depth, and on attention and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odeformer import diagnostics, plots
from odeformer.diagnostics import GradientNorms, Lyapunov
from odeformer.studio.section import Section, Verdict
from odeformer.studio.stack import Stack
from odeformer.studio.words import graded, largest, median, number, percent, times

DIRECTIONS = 4


@dataclass(frozen=True, eq=False)
class Exponents:
    """Of the flow of f, and of what the solver makes of it (None where it chooses its steps)."""

    flow: Lyapunov
    discrete: Lyapunov | None


def measure_lyapunov(stack: Stack) -> Exponents:
    options = {"sweeps": 1, "max_bytes": stack.limits.max_bytes, "seed": stack.limits.seed}
    n = min(DIRECTIONS, stack.few.states[0, 0].numel())
    flow = diagnostics.lyapunov(stack.few, n, **options)
    return Exponents(flow, None if stack.chooses_steps else diagnostics.lyapunov(stack.few, n, solver=stack.solver,
                                                                                **options))


def draw_lyapunov(stack: Stack, found: Exponents) -> Any:
    chosen = found.flow if found.discrete is None else found.discrete
    lengths = torch.tensor(chosen.depths).diff().view(-1, 1, 1)
    rates = chosen.growth / lengths
    return plots.over_depth({f"direction {i + 1}": rates[..., i] for i in range(rates.shape[-1])},
                            depths=chosen.depths[:-1], label="log growth (1 / layer)")


def leading(x: Lyapunov) -> float:
    return float(x.exponents[:, 0].nanmean())


def say_lyapunov(stack: Stack, found: Exponents) -> str:
    flow, length = leading(found.flow), stack.length
    text = f"Of the flow the largest exponent is {number(flow)} a layer: a small difference is {_grown(flow, length)}"
    if found.discrete is None:
        return text + "."
    steps = leading(found.discrete)
    apart = abs(steps - flow) * length
    same = ("much the same as the flow" if apart < 0.5 else
            f"{'calmer' if steps < flow else 'wilder'} than the flow: its steps are too long to follow it")
    return (f"{text}. As {stack.solver.name} steps it, it is {number(steps)} and a difference is "
            f"{_grown(steps, length)}; the network is {same}.")


def _grown(exponent: float, length: float) -> str:
    factor = exponent * length
    if abs(factor) < 0.05:
        return "as large at the end as at the start"
    return f"{number(math.exp(min(factor, 700)))} times as large at the end as at the start"


def judge_lyapunov(stack: Stack, found: Exponents) -> Verdict:
    chosen = found.flow if found.discrete is None else found.discrete
    value = leading(chosen)
    total = value * stack.length
    answer = graded(total, (-0.7, "they shrink"), (0.7, "neither"), (4.6, "they grow"), otherwise="they grow fast")
    grade = {"they shrink": "good", "neither": "good", "they grow": "warn"}.get(answer, "bad")
    return Verdict("Do small differences grow along depth?", answer, f"largest exponent {number(value)} a layer, a "
                   f"factor of {number(math.exp(min(total, 700)))} in all", grade)


def measure_gradients(stack: Stack) -> GradientNorms:
    if stack.loss is None:
        raise ValueError("there is no loss")
    solver = "rk4" if stack.chooses_steps else stack.solver
    return diagnostics.gradient_norms(stack.run, stack.loss, solver)


def draw_gradients(stack: Stack, found: GradientNorms) -> Any:
    rows = found.rows
    if not bool((rows > 0).all()):
        return None
    return plots.gradient_norms(rows, depths=found.depths)


def gain(found: GradientNorms) -> float:
    """First over last, the median over rows."""
    return median(found.rows[0] / found.rows[-1])


def say_gradients(stack: Stack, found: GradientNorms) -> str:
    ratio = gain(found)
    if not ratio > 0:
        return f"The gradient of {stack.loss_name} vanishes."
    rate = math.log(ratio) / stack.length
    kind = graded(ratio, (0.1, "it vanishes towards the input"), (0.5, "it fades towards the input"),
                  (2.0, "depth passes it through"), (10.0, "it grows towards the input"),
                  otherwise="it explodes towards the input")
    return (f"The gradient of {stack.loss_name} is {times(ratio)} as large at the first layer as at the last, a rate "
            f"of {number(rate)} a layer: {kind}.")


def judge_gradients(stack: Stack, found: GradientNorms) -> Verdict:
    ratio = gain(found)
    fine = 0.1 <= ratio <= 10
    answer = "yes" if 0.5 <= ratio <= 2 else "roughly" if fine else "no"
    return Verdict("Does the gradient keep its size?", answer, f"{times(ratio)} as large at l = 0 as at the end",
                   {"yes": "good", "roughly": "warn", "no": "bad"}[answer])


@dataclass(frozen=True, eq=False)
class Attention:
    """``entropy`` (sites, heads): nats, means over rows and queries; ``relative``: of log(keys); ``n_keys``."""

    entropy: Tensor
    relative: Tensor
    n_keys: int


def measure_attention(stack: Stack) -> Attention:
    run = stack.run
    entropy, relative = (diagnostics.attention_entropies(run, relative=relative)[:, 0] for relative in (False, True))
    return Attention(entropy.nanmean((1, 3)), relative.nanmean((1, 3)), run.states.shape[2])


def draw_attention(stack: Stack, found: Attention) -> Any:
    return plots.attention_entropy(found.entropy, n_keys=found.n_keys if found.n_keys > 1 else None)


def say_attention(stack: Stack, found: Attention) -> str:
    rows = found.relative.nanmean(1)
    narrow = found.relative.nan_to_num(math.inf)
    layer, head = divmod(int(narrow.argmin()), narrow.shape[1])
    fall = float(rows[0] - rows[-1])
    kind = ("attention narrows with depth" if fall > 0.1 else "attention widens with depth" if fall < -0.1 else
            "attention is about as wide at the end as at the start")
    wide = graded(float(rows.nanmean()), (0.5, "heads look at few tokens"), (0.9, "heads choose among tokens"),
                  otherwise="heads look at nearly all tokens alike")
    return (f"Entropy is {percent(float(rows[0]))} of its maximum in the first layer and {percent(float(rows[-1]))} in "
            f"the last: {kind}; {wide}. Narrowest is head {head} in layer {layer}, at "
            f"{percent(float(found.relative[layer, head]))}.")


@dataclass(frozen=True, eq=False)
class Tokens:
    """(points, batch) each."""

    cosines: Tensor
    ranks: Tensor


def measure_tokens(stack: Stack) -> Tokens:
    if stack.run.states.shape[2] < 2:
        raise ValueError("a row has one token")
    return Tokens(diagnostics.token_cosines(stack.run), diagnostics.effective_ranks(stack.run, centred=True))


def draw_tokens(stack: Stack, found: Tokens) -> Any:
    figure, ((left, right),) = plots.figure(1, 2, width=6.8, height=2.5)
    plots.over_depth(found.cosines, left, depths=stack.run.depths, label="cosine between tokens")
    plots.over_depth(found.ranks, right, depths=stack.run.depths, label="effective rank")
    return figure


def say_tokens(stack: Stack, found: Tokens) -> str:
    (first, last), (wide, narrow) = ((median(x[0]), median(x[-1])) for x in (found.cosines, found.ranks))
    kind = graded(last, (0.3, "tokens stay apart"), (0.8, "tokens come to share a direction"),
                  otherwise="tokens have all but collapsed onto one direction")
    kept = narrow / wide
    rank = ("the states keep their rank" if kept > 0.9 and kept < 1.1 else "the states gain rank" if kept >= 1.1 else
            f"the states lose {percent(1 - kept)} of their rank")
    _, i = largest(-found.ranks.nanmedian(1).values)
    return (f"The mean cosine between tokens goes from {number(first)} to {number(last)}: {kind}. The effective rank "
            f"goes from {number(wide)} to {number(narrow)} of at most {min(stack.run.states.shape[2:])}: {rank}, "
            f"lowest at l = {number(stack.run.depths[i])}.")


SECTIONS = {
    "lyapunov": Section(
        "Lyapunov exponents", measure_lyapunov,
        "How fast the directions that grow most over the whole depth grow in each layer: above 0 small differences "
        "become larger, below 0 smaller. The sum over depth is the logarithm of the whole growth.",
        say_lyapunov, draw_lyapunov, judge_lyapunov, code="diagnostics.lyapunov(solution, 4, sweeps=1)"),
    "gradients": Section(
        "Gradient against depth", measure_gradients,
        "The norm of the gradient with respect to the state at each depth: level where depth passes gradients through, "
        "a slope where they vanish or explode on the way back.",
        say_gradients, draw_gradients, judge_gradients,
        code="plots.gradient_norms(diagnostics.gradient_norms(solution, loss, model.solver).rows)"),
    "attention": Section(
        "Attention entropy", measure_attention,
        "How widely each head looks in each layer: dark cells are heads that look at few tokens, bright ones heads "
        "that look at all alike. Entropy that falls towards 0 goes with unstable training.",
        say_attention, draw_attention, code="diagnostics.attention_entropies(solution)"),
    "tokens": Section(
        "Clustering and rank of tokens", measure_tokens,
        "Left, the mean cosine between two tokens of a row: 1 where all point the same way. Right, how many directions "
        "their states really use, their mean taken off.",
        say_tokens, draw_tokens, code="plots.over_depth(diagnostics.token_cosines(solution))"),
}
