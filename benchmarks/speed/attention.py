"""Point 6: windows, relative positions and priors over plain attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import local_attention
from benchmarks.speed.timing import MODES, interleaved, row
from odeformer.attention import ATTENTION
from odeformer.attention.priors import AdditivePriorAttention

WINDOW, RELATIVE = 1.1, 1.35  # an exponent of the tokens; a ratio of times
TOKENS, D_MODEL, N_HEADS = 512, 256, 4


def cases(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Window, relative positions, priors."""
    yield {"what": "window", "tokens": list(settings["window_tokens"])}
    for mode in MODES:
        yield {"what": "relative", "pass": mode}
    yield {"what": "priors"}


def measure(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """By what is asked."""
    torch.manual_seed(0)
    return MEASURES[case["what"]](case, rounds, seconds)


def measure_window(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The p of tokens^p, forward and backward."""
    made = []
    for name in local_attention.ATTENTIONS:
        rows = [{"case": (one := {"attention": name, "window": 64, "tokens": n, "rounds": max(3, rounds // 3)}),
                 **local_attention.measure(one)[0]} for n in case["tokens"]]
        for what, unit in (("ms", "time"), ("peak_mib", "memory")):
            made.append(row(f"window 64: {unit} grows as tokens^p", "p", local_attention.exponent(rows, what), WINDOW,
                            note=f"{name}, {case['tokens'][0]} to {case['tokens'][-1]} tokens"))
    return made


def layer(name: str) -> torch.nn.Module:
    """A variant at the size of these comparisons."""
    return ATTENTION[name](D_MODEL, N_HEADS)


def state() -> torch.Tensor:
    """(1, tokens, d_model), as an earlier layer would give it."""
    return torch.randn(1, TOKENS, D_MODEL, requires_grad=True)


def measure_relative(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """All three tables, and keys alone, over plain attention; and the memory of a pass."""
    x, mode = state(), MODES[case["pass"]]
    kinds = {"relative": layer("relative"), "relative, keys only": ATTENTION["relative"](D_MODEL, N_HEADS, tables="k"),
             "softmax": layer("softmax")}
    calls = {name: mode(lambda module=module: module(x)) for name, module in kinds.items()}
    times = interleaved(calls, rounds, seconds)
    rows = [times.ratio(f"{name} over plain attention, {TOKENS} tokens, {case['pass']}", name, "softmax",
                        RELATIVE if name == "relative" else None) for name in list(kinds)[:2]]
    bytes_of = TOKENS * TOKENS * D_MODEL * 4  # what a (queries, keys, head_dim) tensor a head would take
    peak = local_attention.peak_mib(calls["relative"]) * 2**20
    return [*rows, row(f"relative: peak memory over a tokens² x head_dim buffer, {case['pass']}", "bytes / bytes",
                       peak / bytes_of, 1.0, note=f"{peak / 2**20:.1f} MiB")]


class Calls(TorchDispatchMode):
    """Counts the operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def is_fused(module: torch.nn.Module, x: torch.Tensor) -> bool:
    """Whether a call goes through torch's fused kernel, with no softmax beside it."""
    memory = (x,) if getattr(module, "for_memory", False) else ()
    with torch.no_grad(), Calls() as seen:
        module(x, *memory)
    return any("dot_product" in name for name in seen.counts) and not any("softmax" in name for name in seen.counts)


def priors() -> dict[str, torch.nn.Module]:
    """The variants that add a prior to the scores (eq. 1)."""
    return {name: layer(name) for name, kind in ATTENTION.items() if issubclass(kind, AdditivePriorAttention)}


def measure_priors(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """How many leave the fused kernel, and what each costs."""
    x, kinds = state(), priors()
    off = [name for name, module in kinds.items() if not is_fused(module, x)]
    modules = {"softmax": layer("softmax"), **kinds}

    def call(module: torch.nn.Module) -> Any:
        memory = (x,) if getattr(module, "for_memory", False) else ()
        return MODES["forward + backward"](lambda: module(x, *memory))

    times = interleaved({name: call(module) for name, module in modules.items()}, rounds, seconds)
    return [row("priors off torch's fused kernel", "how many", float(len(off)), 0.0, note=", ".join(off)),
            *(times.ratio("priors over plain attention", name, "softmax") for name in kinds)]


MEASURES = {"window": measure_window, "relative": measure_relative, "priors": measure_priors}
