"""Tokens per second and cache memory of greedy generation, beside a plain torch decoder of the same size.

The plain decoder is written out here: the same layers with one key/value cache a layer, buffers written in place, no
solver. Both read the same prompt and write the same number of tokens, in turn, round after round on one thread; each
round gives a ratio, so that a busy machine slows all alike. ``growth``: the exponent p of seconds ~ tokens^p between
half and all of the new tokens, for which 1 is linear. ``error``: of the logits, read token by token with the cache,
against one pass over the same text, in a small model trained a little on the Python documentation; exact is rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import cache as once
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from odeformer import BlockConfig, Decoder, DecoderConfig
from odeformer.tasks import Language
from odeformer.train import TrainConfig, Trainer

COLUMNS = ("size", "cache", "solver", "tokens/s", "time over plain", "spread", "growth", "cache MiB", "over plain",
           "error")
PRESETS = {
    "quick": {"seeds": 1, "rounds": 3, "sizes": ["small"]},
    "cpu": {"seeds": 1, "rounds": 5, "sizes": ["small", "gpt2"]},
}
SIZES = {
    "small": {"d_model": 256, "n_layers": 6, "new_tokens": 192},
    "gpt2": {"d_model": 768, "n_layers": 12, "new_tokens": 48},  # the layers of GPT-2 small
}
CASES = [("exact", "euler"), ("exact", "midpoint"), ("exact", "ab2 across layers"), ("exact", "rk4"),
         ("first_stage", "midpoint"), ("first_stage", "rk4"), ("window", "rk4")]
WINDOW, PROMPT, BATCH, VOCAB = 64, 16, 1, 256
TRAINED = {"d_model": 128, "n_layers": 4, "length": 128, "steps": 120}
SIZE = (11, 4.4)
WORKERS = 1


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Size, cache policy and solver."""
    for size in settings["sizes"]:
        for cache, solver in CASES:
            yield {"size": size, "cache": cache, "solver": solver, "rounds": settings["rounds"]}


def under(model: Decoder, solver: str) -> Decoder:
    """The model under a solver; a multistep one with its history carried across layers, of one step each."""
    name, _, rest = solver.partition(" ")
    return model.with_solver(name, **({"across_pieces": True} if rest else {}))


class Plain(nn.Module):
    """A pre-norm decoder with the modules of ours, and the textbook key/value cache."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.model = model
        self.n_heads = model.config.block.n_heads

    def begin(self, longest: int) -> list[Tensor]:
        """Empty buffers (2, batch, heads, longest, head_dim), one a layer."""
        d = self.model.config.block.d_model
        return [torch.empty(2, BATCH, self.n_heads, longest, d // self.n_heads) for _ in self.model.layers]

    def forward(self, tokens: Tensor, start: int, cache: list[Tensor]) -> Tensor:
        """Logits of the token behind the last one."""
        model, n = self.model, tokens.shape[1]
        z = model.token_embedding(tokens) + model.position.table[start:start + n]
        for layer, buffer in zip(model.layers, cache, strict=True):
            a, f = layer.attention, layer.feedforward
            x = a.placement.norm(z)
            q, k, v = (g(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                       for g in (a.core.query, a.core.key, a.core.value))
            buffer[0, :, :, start:start + n], buffer[1, :, :, start:start + n] = k, v
            k, v = buffer[:, :, :, :start + n]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1)
            z = z + a.core.output(y.transpose(1, 2).flatten(2))
            x = f.placement.norm(z)
            z = z + f.core.output(F.gelu(f.core.hidden(x)))
        return model.head(model.final_norm(z[:, -1]))

    @torch.no_grad()
    def generate(self, tokens: Tensor, n: int) -> tuple[Tensor, list[float], int]:
        """Text, seconds after each token, bytes of the cache."""
        cache, start = self.begin(tokens.shape[1] + n), 0
        seconds, begun = [], time.process_time()
        for _ in range(n):
            logits = self(tokens[:, start:], start, cache)
            start = tokens.shape[1]
            tokens = torch.cat([tokens, logits.argmax(-1)[:, None]], 1)
            seconds.append(time.process_time() - begun)
        return tokens, seconds, sum(x[:, :, :, :start].numel() * 4 for x in cache)


def ours(model: Decoder, tokens: Tensor, n: int, cache: Any) -> tuple[Tensor, list[float]]:
    """Text and seconds after each token."""
    seconds, begun, new = [], time.process_time(), []
    for token in model.stream(tokens, max_new_tokens=n, cache=lambda: cache):
        new.append(token)
        seconds.append(time.process_time() - begun)
    return torch.cat([tokens, torch.stack(new, 1)], 1), seconds


def growth(seconds: list[float]) -> float:
    """The exponent between half and all of the tokens."""
    return math.log2(seconds[-1] / seconds[len(seconds) // 2 - 1])


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians over the rounds, and the error of the logits against a pass without a cache."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = SIZES[case["size"]]
    n, block = size["new_tokens"], BlockConfig(size["d_model"], size["d_model"] // 64)
    base = Decoder(DecoderConfig(vocab_size=VOCAB, max_seq_len=PROMPT + n, n_layers=size["n_layers"],
                                 block=block)).eval()
    model, plain = under(base, case["solver"]), Plain(base)
    tokens = torch.randint(VOCAB, (BATCH, PROMPT))
    options = {"window": WINDOW} if case["cache"] == "window" else {}
    rounds: dict[str, list[float]] = {"tokens_per_second": [], "ratio": [], "growth": []}
    for i in range(case["rounds"] + 1):
        cache = model.new_cache(case["cache"], **options)
        text, seconds = ours(model, tokens, n, cache)
        theirs, plain_seconds, plain_bytes = plain.generate(tokens, n)
        if i:  # the first round warms up
            rounds["tokens_per_second"].append(n / seconds[-1])
            rounds["ratio"].append(seconds[-1] / plain_seconds[-1])
            rounds["growth"].append(growth(seconds))
    if case["solver"] == "euler" and not torch.equal(text, theirs):
        raise AssertionError("euler and the plain decoder wrote different texts")
    low, _, high = quantiles(rounds["ratio"], n=4)
    return [{name: median(values) for name, values in rounds.items()}
            | {"ratio_low": low, "ratio_high": high, "bytes": cache.bytes(), "plain_bytes": plain_bytes,
               "error": error(case["solver"], case["cache"], options)}]


@once
def trained() -> tuple[Decoder, Tensor]:
    """A small decoder trained for a minute under euler on the bytes of the Python documentation, and unseen bytes."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()))
    torch.manual_seed(0)
    n, held_out = TRAINED["length"], len(text) // 10
    model = Decoder(DecoderConfig(vocab_size=VOCAB, max_seq_len=n, n_layers=TRAINED["n_layers"],
                                  block=BlockConfig(TRAINED["d_model"], TRAINED["d_model"] // 64)))
    task = Language("python documentation", text[:-held_out], text[-held_out:], length=n)
    Trainer(model, task, TrainConfig(steps=TRAINED["steps"], batch_size=16)).run(progress=False)
    return model.eval(), text[-n:][None]


def error(solver: str, policy: str, options: dict[str, int]) -> float:
    """Relative error of a trained model's logits, read token by token with the cache, against one pass."""
    base, text = trained()
    model = under(base, solver)
    cache = model.new_cache(policy, **options)
    with torch.no_grad():
        logits = torch.cat([model(text[:, i:i + 1], cache=cache)[0] for i in range(text.shape[1])], 1)
        full = model(text)
    return ((logits - full).norm() / full.norm()).item()


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a case."""
    return [(*(row["case"][name] for name in ("size", "cache", "solver")), f"{row['tokens_per_second']:.0f}",
             f"{row['ratio']:.2f}", f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}", f"{row['growth']:.2f}",
             f"{row['bytes'] / 2**20:.2f}", f"{row['bytes'] / row['plain_bytes']:.1f}", f"{row['error']:.1e}")
            for row in rows]


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Time and memory over those of the plain decoder, and the error."""
    names = [", ".join(row["case"][name] for name in ("size", "solver", "cache")) for row in rows]
    values = (("time / plain decoder", [row["ratio"] for row in rows]),
              ("cache memory / plain decoder", [row["bytes"] / row["plain_bytes"] for row in rows]),
              ("relative error of the logits", [max(row["error"], 1e-8) for row in rows]))
    for axes, (label, heights) in zip(figure.subplots(1, 3, sharey=True), values, strict=True):
        axes.barh(names, heights, color=["C0" if row["case"]["cache"] == "exact" else "C1" for row in rows])
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.3)
        if "error" in label:
            axes.set_xscale("log")
        else:
            axes.axvline(1, color="black", linewidth=1)
        axes.invert_yaxis() if axes.get_subplotspec().is_first_col() else None
