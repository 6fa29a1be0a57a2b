"""Compiled depth: what ``model.compile()`` costs once, and the time of a pass after that.

``compile``: process time of the first training step of a fresh process with an empty cache, beside the wall-clock time,
at 6 and 48 layers; one function is compiled for all of them, so the two should be equal. ``graphs``: graphs that a
backend was given in that process, then how many more it was given for other numbers of steps, another depth with the
same functions, and another batch size. ``time``: a pass of a model with one set of weights for 12 layers, compiled,
over the same model as it is written, and over torchdiffeq's fixed-step solver on the same field (``composed``: a whole
layer as one field, so that all three do the same evaluations). Process time on one thread, the three in turn, round
after round; each round gives a ratio, and the table shows medians and quartiles.

On a GPU also ``captured``: a pass replayed as a CUDA graph, in float32 and with bfloat16 weights, over the same pass as
it is written.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.timing import quartiles
from odeformer import BlockConfig, DepthConfig, Encoder, EncoderConfig

N_LAYERS = 12
COLUMNS = ("what", "state", "solver", "pass", "ours / torchdiffeq", "compiled / ours", "compiled / torchdiffeq",
           "compile, s", "graphs", "more graphs")
SMALL, LARGE = [1, 8, 32], [8, 32, 64]
PRESETS = {
    "quick": {"seeds": 1, "rounds": 9, "seconds": 0.1, "depths": [], "timed": [(SMALL, "rk4", False)], "device": "cpu"},
    "cpu": {"seeds": 1, "rounds": 15, "seconds": 0.2, "depths": [6, 48], "device": "cpu",
            "timed": [(shape, solver, training) for shape, solver in ((SMALL, "euler"), (SMALL, "rk4"), (LARGE, "rk4"))
                      for training in (False, True)]},
    "gpu": {"seeds": 1, "rounds": 15, "seconds": 0.1, "depths": [6, 48], "device": "cuda",
            "timed": [(shape, "rk4", training) for shape in (SMALL, [8, 64, 256]) for training in (False, True)],
            "captured": ["float32", "bfloat16"]},
}
SIZE = (9, 3.4)
WORKERS = 1


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Depths to compile at; then state x solver x forward or training step."""
    common = {"device": settings["device"], "rounds": settings["rounds"]}
    for n_layers in settings["depths"]:
        yield {"what": "compile", "n_layers": n_layers, "shape": SMALL, "solver": "rk4", "device": settings["device"]}
    for shape, solver, training in settings["timed"]:
        timed = {"n_layers": N_LAYERS, "shape": shape, "solver": solver, "training": training, **common}
        yield {"what": "time", "seconds": settings["seconds"], **timed}
        for dtype in settings.get("captured", ()):
            yield {"what": "captured", "dtype": dtype, **timed}


def make(case: dict[str, Any], **depth: Any) -> Encoder:
    """An encoder whose layers are each one field."""
    torch.manual_seed(0)
    _, n_tokens, d_model = case["shape"]
    config = EncoderConfig(vocab_size=16, max_seq_len=n_tokens, n_layers=case["n_layers"],
                           block=BlockConfig(d_model, 4, coupling="composed"),
                           depth=DepthConfig(solver=case["solver"], **depth))
    return Encoder(config).to(case["device"])


def state(case: dict[str, Any]) -> Tensor:
    """A state that needs a gradient, as what comes out of an embedding does."""
    return torch.randn(case["shape"], device=case["device"]).requires_grad_()


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """What a fresh process measures: nothing is compiled there, and nothing of this one's is left."""
    if case["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU; take --preset cpu")
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run([sys.executable, "-m", "benchmarks.compiled", json.dumps(case)], text=True,
                              capture_output=True, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache,
                                                                     "TORCHINDUCTOR_COMPILE_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr}")
    return [json.loads(done.stdout.splitlines()[-1])]


def used() -> float:
    """Seconds of processors that this process and those it waited for took (a C++ compiler among them)."""
    return sum(os.times()[:4])


def compile_once(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the first training step, and how many graphs there are."""
    counted = Counting()
    model, z = make(case), state(case)
    wait, cpu = time.perf_counter(), used()
    model.evolve(z).z.square().mean().backward()  # as it is written: what a first step costs anyway
    plain = time.perf_counter() - wait, used() - cpu
    model.compile()
    wait, cpu = time.perf_counter(), used()
    model.evolve(z).z.square().mean().backward()
    row = {"compile_wall_s": time.perf_counter() - wait - plain[0], "compile_s": used() - cpu - plain[1]}
    torch._dynamo.reset()
    model.compile(backend=counted)
    more = {}

    def look(name: str, change: Callable[[], None]) -> None:
        before = counted.graphs
        change()
        more[name] = counted.graphs - before

    other = make(case | {"n_layers": case["n_layers"] + 1})
    other.compiled = None
    look("first", lambda: model.evolve(z))
    look("n_steps", lambda: [model.with_solver(case["solver"], steps_per_layer=n).evolve(z) for n in (2, 3, 5)])
    other.compiled = model.compiled
    look("depth", lambda: other.evolve(z))
    look("batch", lambda: [model.evolve(z.repeat(n, 1, 1)) for n in (2, 3, 4)])
    return row | {"graphs": more.pop("first"), "more_graphs": more}


class Counting:
    """A backend that counts the graphs, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        self.graphs += 1
        return graph.forward


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of torchdiffeq, of the model as it is written and of the compiled one, and their ratios."""
    import torchdiffeq

    model, compiled = make(case, weights="shared"), make(case, weights="shared")
    compiled.compile()
    z = state(case)
    times = torch.linspace(0.0, float(N_LAYERS), N_LAYERS + 1, device=case["device"])

    def theirs() -> Tensor:
        field = model.vector_field(z)
        return torchdiffeq.odeint(lambda t, y: field(y, t), z, times, method=case["solver"])[-1]

    calls = [theirs, lambda: model.evolve(z).z, lambda: compiled.evolve(z).z]
    clock = timer(case["device"])

    def run(call: Callable[[], Tensor]) -> None:
        if case["training"]:
            call().square().mean().backward()
        else:
            with torch.no_grad():
                call()

    def timed(call: Callable[[], Tensor], repeats: int) -> float:
        start = clock()
        for _ in range(repeats):
            run(call)
        return (clock() - start) / repeats

    for call in calls:
        timed(call, 3)
    repeats = max(1, round(case["seconds"] / 3 / timed(theirs, 3)))
    gc.collect()
    gc.disable()
    rounds = [[timed(call, repeats) for call in calls] for _ in range(case["rounds"])]
    row: dict[str, Any] = {name: 1e3 * median(r[i] for r in rounds)
                           for i, name in enumerate(("torchdiffeq_ms", "ours_ms", "compiled_ms"))}
    for name, i, j in (("ours_over_torchdiffeq", 1, 0), ("compiled_over_ours", 2, 1),
                       ("compiled_over_torchdiffeq", 2, 0)):
        ratios = [r[i] / r[j] for r in rounds]
        row |= {name: median(ratios), f"{name}_quartiles": quartiles(ratios)}
    return row


def capture(case: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a pass as it is written, and replayed as a CUDA graph."""
    model = make(case).to(getattr(torch, case["dtype"]))
    z = torch.randn(case["shape"], device="cuda", dtype=getattr(torch, case["dtype"]))

    def run() -> Tensor:
        if not case["training"]:
            with torch.no_grad():
                return model.evolve(z).z
        loss = model.evolve(z).z.square().mean()
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            wanted = run().detach().clone()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    clock, rounds = timer("cuda"), []
    for _ in range(case["rounds"]):
        times = []
        for call in (run, graph.replay):
            start = clock()
            for _ in range(20):
                call()
            times.append((clock() - start) / 20)
        rounds.append(times)
    ratios = [b / a for a, b in rounds]
    return {"ours_ms": 1e3 * median(a for a, _ in rounds), "captured_ms": 1e3 * median(b for _, b in rounds),
            "difference": (out.detach() - wanted).abs().max().item(), "compiled_over_ours": median(ratios),
            "compiled_over_ours_quartiles": quartiles(ratios)}


def timer(device: str) -> Callable[[], float]:
    """Seconds: of the process on a CPU, of the device when it has done all on a GPU."""
    if device == "cpu":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def shown(row: dict[str, Any], name: str) -> str:
    """A ratio with its quartiles; nothing where none was measured."""
    return "{:.2f} ({:.2f}-{:.2f})".format(row[name], *row[f"{name}_quartiles"]) if name in row else ""


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Table rows."""
    for row in rows:
        case = row["case"]
        more = ", ".join(f"{name} {n}" for name, n in row.get("more_graphs", {}).items())
        what = {"compile": f"compile, {case['n_layers']} layers", "time": "time",
                "captured": f"CUDA graph, {case.get('dtype')}"}[case["what"]]
        kind = "training" if case.get("training", True) else "forward"
        yield (what, tuple(case["shape"]), case["solver"], kind,
               *(shown(row, name) for name in ("ours_over_torchdiffeq", "compiled_over_ours",
                                               "compiled_over_torchdiffeq")),
               f"{row['compile_s']:.1f} ({row['compile_wall_s']:.1f} by the wall)" if "compile_s" in row else "",
               row.get("graphs", ""), more)


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """Ratios over torchdiffeq, and seconds to compile."""
    timed = [row for row in rows if row["case"]["what"] == "time"]
    made = [row for row in rows if row["case"]["what"] == "compile"]
    axes, *others = figure.subplots(1, 2 if made else 1, width_ratios=[3, 1] if made else None, squeeze=False)[0]
    names = [f"{row['case']['solver']} {tuple(row['case']['shape'])}\n"
             f"{'training step' if row['case']['training'] else 'forward'}" for row in timed]
    for k, (name, label, color) in enumerate((("ours_over_torchdiffeq", "as written", "#0072b2"),
                                              ("compiled_over_torchdiffeq", "compiled", "#d55e00"))):
        low, high = ([abs(row[name] - row[f"{name}_quartiles"][i]) for row in timed] for i in (0, 1))
        axes.bar([i + 0.4 * (k - 0.5) for i in range(len(timed))], [row[name] for row in timed], 0.38, label=label,
                 color=color, yerr=[low, high], capsize=2)
    axes.set_xticks(range(len(timed)), names, fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("time over torchdiffeq (ratio)")
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    for axes in others:
        axes.bar([str(row["case"]["n_layers"]) for row in made], [row["compile_s"] for row in made], color="#009e73")
        axes.set_xlabel("layers")
        axes.set_ylabel("time to compile (s of a processor)")


WHAT = {"compile": compile_once, "time": compare, "captured": capture}

if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    print(json.dumps(WHAT[asked["what"]](asked)))
