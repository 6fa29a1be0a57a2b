"""Point 5: memory and time of reversible training, and what weights that are functions of depth add."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.local_attention import peak_mib
from benchmarks.speed.timing import MODES, interleaved, row
from odeformer import BlockConfig, DepthConfig, Encoder, EncoderConfig

MEMORY, TIME, WEIGHTS = 1.10, 2.2, 1.10
SHALLOW, DEEP = 12, 96
REVERSIBLE = {"solver": "reversible_midpoint", "weights": "shared"}
INTERPOLATIONS = {"linear": {"n_knots": 4}, "spline": {"n_knots": 4}, "chebyshev": {"n_basis": 4},
                  "fourier": {"n_basis": 4}}
OTHERS = {"lowrank": {}, "modulated": {}, "hyper": {}}  # weights that are functions of depth in other ways
D_MODEL, N_LAYERS = 256, 6


def cases(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Memory, time, and the weights in both passes."""
    for what in ("memory", "reversible"):
        yield {"what": what, "shape": [8, 64, settings["d_model"]]}
    for mode in MODES:
        yield {"what": "weights", "kinds": list(settings["weights"]), "shape": [8, 128, D_MODEL], "pass": mode}


def measure(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """By what is asked."""
    return MEASURES[case["what"]](case, rounds, seconds)


def make(shape: list[int], n_layers: int = N_LAYERS, coupling: str = "lie", **depth: Any) -> Encoder:
    """An encoder; the same draw for all."""
    torch.manual_seed(0)
    return Encoder(EncoderConfig(vocab_size=8, max_seq_len=shape[1], n_layers=n_layers, depth=DepthConfig(**depth),
                                 block=BlockConfig(shape[2], 4, coupling=coupling)))


def measure_memory(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The most that torch's allocator held at a time in a training step, at 96 layers over 12."""
    tokens, peak = torch.randint(8, case["shape"][:2]), {}
    for n_layers in (SHALLOW, DEEP):
        model = make(case["shape"], n_layers, "composed", **REVERSIBLE, gradient="reversible")
        peak[n_layers] = peak_mib(MODES["forward + backward"](lambda model=model: model(tokens)))
    return [row(f"reversible: memory of a training step, {DEEP} layers over {SHALLOW}", "bytes / bytes",
                peak[DEEP] / peak[SHALLOW], MEMORY, note=f"{peak[DEEP]:.1f} MiB at {DEEP}")]


def measure_reversible(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The same reversible method under both gradient modes."""
    tokens = torch.randint(8, case["shape"][:2])
    calls = {}
    for mode in ("reversible", "backprop"):
        model = make(case["shape"], SHALLOW, "composed", **REVERSIBLE, gradient=mode)
        calls[mode] = MODES["forward + backward"](lambda model=model: model(tokens))
    times = interleaved(calls, rounds, seconds)
    return [times.ratio("reversible training over backprop, time", "reversible", "backprop", TIME)]


def measure_weights(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """θ(l) of each kind over one block a layer."""
    tokens = torch.randint(8, case["shape"][:2])
    options = INTERPOLATIONS | OTHERS
    models = {"piecewise": make(case["shape"])} | {
        name: make(case["shape"], weights=name, weights_options=options[name]) for name in case["kinds"]}
    calls = {name: MODES[case["pass"]](lambda model=model: model(tokens)) for name, model in models.items()}
    times = interleaved(calls, rounds, seconds)
    where = f"over one block a layer, d_model {D_MODEL}, {case['pass']}"
    return [times.ratio(f"θ(l) interpolated {where}", name, "piecewise", WEIGHTS) if name in INTERPOLATIONS else
            times.ratio(f"θ(l) otherwise {where}", name, "piecewise") for name in case["kinds"]]


MEASURES = {"memory": measure_memory, "reversible": measure_reversible, "weights": measure_weights}
