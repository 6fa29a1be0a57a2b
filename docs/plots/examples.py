"""An example of every drawing in odeformer.plots: ``python -m docs.plots.examples [NAME...]`` writes them here.

The model is a small VisionEncoder trained on scikit-learn's digits for some seconds; the other numbers are those in
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from odeformer import BlockConfig, VisionConfig, VisionEncoder, plots
from odeformer.data import DATA
from odeformer.files import write_atomically
from odeformer.tasks import Classification
from odeformer.train import TrainConfig, Trainer
from solvers import solve
from solvers.problems import PROBLEMS

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results"
N_LAYERS, UPDATES = 6, 250


# ---- numbers to draw


def results(name: str) -> list[dict[str, Any]]:
    """The rows of a benchmark."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@cache
@torch.enable_grad()
def trained(norm: str = "pre") -> Trainer:
    """A vision Transformer after training on digits."""
    images = DATA["digits"]()
    torch.manual_seed(0)
    model = VisionEncoder(VisionConfig(image_size=images.size, patch_size=2, channels=images.channels,
                                       n_classes=images.n_classes, n_layers=N_LAYERS,
                                       block=BlockConfig(32, 4, d_ff=64, norm=norm)))
    trainer = Trainer(model, Classification(images), TrainConfig(steps=UPDATES))
    trainer.run(progress=False)
    return trainer


@cache
@torch.no_grad()
def solution(n: int = 4) -> Any:
    """What the trained model does with n test images; states at every layer."""
    return trained().model(DATA["digits"]().test_x[:n], return_solution=True)[1]


@cache
def jacobians() -> Tensor:
    """df/dz at each layer, for one image: (layers, n, n) in float64 with n = tokens d_model."""
    z = solution().states[:, :1].double()
    model = VisionEncoder(trained().model.config).double()
    model.load_state_dict(trained().model.state_dict())
    rows = []
    for k, (start, _, f) in enumerate(model.eval().vector_field(z[0]).pieces):
        l = torch.tensor(start, dtype=torch.float64)
        jacobian = torch.func.jacrev(lambda x, f=f, l=l: f(x, l))(z[k])
        rows.append(jacobian.detach().reshape(z[k].numel(), -1))
    return torch.stack(rows)


@cache
def eigenvalues() -> Tensor:
    """λ of df/dz at each layer: complex (layers, n)."""
    return torch.linalg.eigvals(jacobians())


def leading(n: int = 30) -> Tensor:
    """The n eigenvalues of the largest modulus at each layer."""
    λ = eigenvalues()
    return λ.gather(1, λ.abs().argsort(1, descending=True)[:, :n])


def boundaries(n_angles: int = 48) -> Tensor:
    """Points x* J x at the edge of the numerical range: complex (layers, angles); x is the leading eigenvector of the
    Hermitian part of exp(-iθ) J (Johnson 1978)."""
    rows = []
    for jacobian in jacobians().to(torch.complex128):
        row = []
        for angle in torch.arange(n_angles) * (2 * torch.pi / n_angles):
            turned = torch.exp(-1j * angle) * jacobian
            x = torch.linalg.eigh((turned + turned.mH) / 2)[1][:, -1]
            row.append(x.conj() @ jacobian @ x)
        rows.append(torch.stack(row))
    return torch.stack(rows)


@torch.no_grad()
def attention() -> Tensor:
    """Attention weights on one image: (layers, heads, queries, keys)."""
    model, seen = trained().model, []

    def keep(core: Any, args: tuple, kwargs: dict, out: Tensor) -> None:
        seen.append(core.probabilities(*args, **kwargs)[0])

    hooks = [layer.attention.core.register_forward_hook(keep, with_kwargs=True) for layer in model.layers]
    model(DATA["digits"]().test_x[:1])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)


@torch.no_grad()
def relative_sizes() -> Tensor:
    """‖f‖ / ‖z‖ of each token at each layer: (layers, batch, tokens)."""
    z = solution().states
    pieces = trained().model.vector_field(z[0]).pieces
    return torch.stack([f(z[k], torch.tensor(start)).norm(dim=-1) / z[k].norm(dim=-1)
                        for k, (start, _, f) in enumerate(pieces)])


@torch.no_grad()
def euler_errors() -> Tensor:
    """‖h/2 (f(z + h f) - f(z))‖ of each token with h = 1, Euler's local error as Heun's method sees it."""
    z = solution().states[:, :1]
    rows = []
    for k, (start, stop, f) in enumerate(trained().model.vector_field(z[0]).pieces):
        first = f(z[k], torch.tensor(start))
        rows.append((f(z[k] + first, torch.tensor(stop)) - first).norm(dim=-1)[0] / 2)
    return torch.stack(rows)


def costs(methods: Sequence[str], problem: str) -> dict[str, tuple[list, list]]:
    """{method: (nfe, error)} of this package, measured by the benchmark work_precision."""
    found = {}
    for method in methods:
        mine = [r for r in results("work_precision") if r["case"]["library"] == "solvers" and r["error"]
                and (r["case"]["method"], r["case"]["problem"]) == (method, problem)]
        found[method] = [r["nfe"] for r in mine], [r["error"] for r in mine]
    return found


def accuracies() -> dict[str, tuple[list, list]]:
    """{solver: (nfe, accuracy)}, means over seeds, measured by the benchmark accuracy_vs_nfe."""
    rows = [r for r in results("accuracy_vs_nfe") if r["case"]["part"] == "train"]
    groups: dict[tuple, list] = {}
    for r in rows:
        groups.setdefault((r["solver"], r["steps"]), []).append(r)
    found: dict[str, tuple[list, list]] = {}
    for (solver, _), mine in sorted(groups.items(), key=lambda group: str(group[0])):
        nfe, score = found.setdefault(solver, ([], []))
        nfe.append(mean(r["nfe"] for r in mine))
        score.append(mean(r["accuracy"] for r in mine))
    return found


def gradients(n_layers: int = 24) -> dict[str, Tensor]:
    """{norm: (depths, seeds)} relative to the last layer, measured by the benchmark norm_gradients."""
    found: dict[str, list] = {}
    for r in results("norm_gradients"):
        if r["case"]["layers"] == n_layers:
            found.setdefault(r["case"]["norm"], []).append([x / r["gradient"][-1] for x in r["gradient"]])
    return {name: torch.tensor(rows).T for name, rows in found.items()}


def losses() -> dict[str, tuple[list, list]]:
    """{norm: (steps, loss)} of two trainings."""
    return {norm: tuple(zip(*((r["step"], r["loss"]) for r in trained(norm).rows), strict=True))
            for norm in ("pre", "post")}


# ---- drawings


def attention_entropy() -> Axes:
    weights = attention()
    entropy = torch.special.entr(weights).sum(-1).mean(-1)
    return plots.attention_entropy(entropy, n_keys=weights.shape[-1])


def attention_map() -> Axes:
    return plots.attention_map(attention()[2, 0])


def error_against_nfe() -> Axes:
    return plots.error_against_nfe(costs(["euler", "midpoint", "kutta3", "rk4", "ab4"], "noncommuting"),
                                   orders=(1, 2, 4), error="relative error of the final state")


def gradient_norms() -> Axes:
    return plots.gradient_norms(gradients(), label="‖dE/dz(l)‖ / ‖dE/dz(L)‖")


def local_errors() -> Axes:
    return plots.local_errors(euler_errors(), label="local error of Euler, ‖·‖ per token")


def numerical_ranges() -> Axes:
    return plots.numerical_ranges(boundaries(), eigenvalues=leading())


def order_star() -> Axes:
    return plots.order_star("rk4")


def over_depth() -> Axes:
    return plots.over_depth(relative_sizes(), label="effective step ‖f‖ / ‖z‖")


def pareto() -> Axes:
    return plots.pareto(accuracies(), score="test accuracy")


def phase_portrait() -> Axes:
    starts = torch.tensor([[2.0, 3.0], [-3.0, 1.0], [0.3, 0.0]], dtype=torch.float64)

    def f(z: Tensor, l: Tensor) -> Tensor:
        return torch.stack([z[..., 1], (1 - z[..., 0] ** 2) * z[..., 1] - z[..., 0]], dim=-1)

    path = solve(f, starts, span=(0.0, 12.0), solver="rk4", n_steps=240, save_at="steps")
    return plots.phase_portrait(f, states=path, origin=torch.zeros(2, dtype=torch.float64),
                                directions=torch.eye(2, dtype=torch.float64))


def spectra() -> Axes:
    return plots.spectra(eigenvalues(), limits={"euler, h = 1": -2.0})


def stability_regions() -> Axes:
    return plots.stability_regions(["euler", "midpoint", "rk4"], eigenvalues=leading(), depths=range(N_LAYERS))


def step_sizes() -> Axes:
    problem = PROBLEMS["van_der_pol"]
    return plots.step_sizes({name: solve(problem.f, problem.z0, span=problem.span, solver=name, rtol=rtol, atol=rtol)
                             for name, rtol in (("bosh3", 1e-4), ("dopri5", 1e-4))})


def training_curves() -> Axes:
    return plots.training_curves(losses(), smoothing=0.9, label="training loss (nats)")


def trajectories() -> Axes:
    return plots.trajectories(solution().states[:, 0])


def work_precision() -> Axes:
    return plots.work_precision(costs(["adaptive_heun", "bosh3", "dopri5", "dopri8"], "noncommuting"),
                                error="relative error")


EXAMPLES: dict[str, Callable[[], Axes]] = {
    example.__name__: example for example in (
        stability_regions, order_star, spectra, numerical_ranges, step_sizes, work_precision, error_against_nfe, pareto,
        trajectories, phase_portrait, over_depth, gradient_norms, local_errors, attention_entropy, attention_map,
        training_curves)}


def gallery() -> str:
    """README.md: each drawing with the first paragraph of its docstring."""
    parts = ["# Drawings", "", "What `odeformer.plots` draws; `python -m docs.plots.examples` makes these files."]
    for name in EXAMPLES:
        said = " ".join(getattr(plots, name).__doc__.split("\n\n")[0].split())
        parts += ["", f"## {name}", "", said, "", f"![{name}]({name}.png)"]
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the images that are named, all and the gallery if none is."""
    parser = argparse.ArgumentParser(prog="python -m docs.plots.examples", description="Example images of all plots.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(EXAMPLES)}")
    names = parser.parse_args(arguments).names
    for name in names or EXAMPLES:
        if name not in EXAMPLES:
            parser.error(f"no example is called {name!r}; known: {', '.join(EXAMPLES)}")
        print(plots.save(EXAMPLES[name](), HERE / f"{name}.png").relative_to(HERE))
    if not names:
        write_atomically(HERE / "README.md", lambda path: path.write_text(gallery(), encoding="utf-8"))


if __name__ == "__main__":
    main()
