"""Is a pretrained network the discretisation of an ODE? Its weights are held, its step size is not.

Two networks that others trained, with the step h = 1 built in: rxnmapper (ALBERT, 12 times one layer, d_model 256) and
MiniLM (BERT, 6 layers, d_model 384), see ``odeformer.pretrained.wheels``. The field is f(z, l) = layer_l(z) - z, of
post-norm layers, so that Euler with h = 1 is the original; ``LINES`` says what else is done with the same weights. NFE:
evaluations of a layer. "Fine limit" is rk4 with h = 1/4: what the ODE itself gives.

- quality: rxnmapper, the share of masked tokens that are found again, of textbook reactions written as SMILES;
  MiniLM, of paragraphs of Python's help, one a topic, the share whose halves find each other among 20.
- agreement: cosine between the mean of the final states and the original's. For its scale, the original's line has the
  mean cosine between its different examples, and the quality that guessing has.
- distance: of the final states from the fine limit, over its size. order: log2 of the ratio of distances when h is
  halved; 1 for Euler and 2 for midpoint where h is small enough. step: mean |z_{n+1} - z_n| / |z_n| of a token.

How to read it. If the network is the Euler method of its ODE, then refining converges (order near the method's own),
the original is near the limit (distance far below 1), and quality holds all along. If distances shrink but quality
falls, there is an ODE, but the network is not close to it: the weights were fitted to h = 1, and are at their best
there. If fewer layers with h = 1 keep quality and finer steps lose it, the network is an iteration in which the size
of a step matters more than where in depth it ends. One model and one task each: intervals are over examples (paired
bootstrap), not over trainings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.comparison import difference
from odeformer.blocks import LayeredField
from odeformer.pretrained import from_huggingface, wheel
from odeformer.tokenizers import pad_batch
from solvers import get_solver, solve

COLUMNS = ("model", "method", "h", "NFE", "quality", "spread", "difference to the original", "verdict", "loss",
           "agreement", "distance", "order", "step")
PRESETS = {
    "quick": {"seeds": 1, "models": {"rxnmapper": {"parts": 1, "examples": 6}}},
    "cpu": {"seeds": 1, "models": {"rxnmapper": {"parts": 4, "examples": 6}, "minilm": {"parts": 3, "examples": 20}}},
}
SIZE = (13, 7)
WORKERS = 2
FINE = 4  # rk4 steps a layer of the limit
PERIOD, COPIES = 7, 3  # of a reaction's tokens every 7th is masked, in copies that begin at different tokens
HALF = 24  # word pieces of half a paragraph
TEMPERATURE = 0.05  # of MiniLM's own training: logits are cosines over it

# Textbook reactions; reagents stand among the reactants, as in the patents that rxnmapper was trained on.
REACTIONS = {
    "esterification": "CC(=O)O.CCO>>CCOC(C)=O",
    "ether synthesis": "CCBr.Oc1ccccc1>>CCOc1ccccc1",
    "Grignard addition": "CC(C)=O.C[Mg]Br>>CC(C)(C)O",
    "lactam rearrangement": "ON=C1CCCCC1.O=S(=O)(O)O>>O=C1CCCCCN1",
    "ketone reduction": "O=C1CCCCC1.[BH4-].[Na+]>>OC1CCCCC1",
    "cycloaddition": "C=CC=C.O=C1C=CC(=O)O1>>O=C1OC(=O)C2CC=CCC12",
    "nitration": "O=[N+]([O-])O.c1ccccc1>>O=[N+]([O-])c1ccccc1",
    "acylation": "CC(=O)Cl.Cl[Al](Cl)Cl.c1ccccc1>>CC(=O)c1ccccc1",
    "biaryl coupling": "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
    "condensation": "N#CCC#N.O=Cc1ccccc1>>N#CC(C#N)=Cc1ccccc1",
    "amine arylation": "Brc1ccccc1.C1COCCN1>>c1ccc(N2CCOCC2)cc1",
    "epoxidation": "C1=CCCCC1.O=C(OO)c1cccc(Cl)c1>>C1CCC2OC2C1",
    "alkyne coupling": "C#Cc1ccccc1.Ic1ccccc1>>C(#Cc1ccccc1)c1ccccc1",
    "alkene arylation": "C=CC(=O)OC.Ic1ccccc1>>COC(=O)C=Cc1ccccc1",
    "hydrolysis": "CCOC(=O)c1ccccc1.[Na+].[OH-]>>O=C(O)c1ccccc1",
    "reductive amination": "CN.O=Cc1ccccc1.[BH3-]C#N.[Na+]>>CNCc1ccccc1",
    "benzylic bromination": "Cc1ccccc1.O=C1CCC(=O)N1Br>>BrCc1ccccc1",
    "amide formation": "NCc1ccccc1.O=C(Cl)c1ccccc1>>O=C(NCc1ccccc1)c1ccccc1",
    "paracetamol": "CC(=O)OC(C)=O.Nc1ccc(O)cc1>>CC(=O)Nc1ccc(O)cc1",
    "aspirin": "CC(=O)OC(C)=O.O=C(O)c1ccccc1O>>CC(=O)Oc1ccccc1C(=O)O",
    "deprotection": "CC(C)(C)OC(=O)NCc1ccccc1.O=C(O)C(F)(F)F>>NCc1ccccc1",
    "azide cycloaddition": "C#Cc1ccccc1.[N-]=[N+]=NCc1ccccc1>>c1ccc(Cn2cc(-c3ccccc3)nn2)cc1",
    "thioether synthesis": "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "sulfonamide formation": "Cc1ccc(S(=O)(=O)Cl)cc1.NCc1ccccc1>>Cc1ccc(S(=O)(=O)NCc2ccccc2)cc1",
}
SMILES = re.compile(r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}"
                    r"|[0-9])")  # Schwaller et al. 2019, Molecular Transformer


@dataclass(frozen=True)
class Sample:
    """Token ids and mask (batch, tokens) of named examples; ``score(model, z)``: (quality, loss) of each example from
    the final states; ``chance``: the quality of guessing. Rows of an example lie side by side."""

    names: list[str]
    tokens: Tensor
    mask: Tensor
    score: Callable[[Any, Tensor], tuple[Tensor, Tensor]]
    chance: float


def reactions(part: int, parts: int, examples: int, seed: int) -> Sample:
    """Reactions with masked tokens; a part's have like lengths."""
    words = (wheel("rxnmapper") / "vocab.txt").read_text(encoding="utf-8").split("\n")
    names = sorted(REACTIONS, key=lambda x: len(REACTIONS[x]))[part * examples:(part + 1) * examples]
    rows, wanted = [], []
    for name in names:
        ids = [words.index(x) for x in ("[CLS]", *SMILES.findall(REACTIONS[name]), "[SEP]")]
        for copy in range(COPIES):
            hidden = [0 < i < len(ids) - 1 and i % PERIOD == (copy * 2 + seed) % PERIOD for i in range(len(ids))]
            rows.append([words.index("[MASK]") if x else y for x, y in zip(hidden, ids, strict=True)])
            wanted.append([y if x else -1 for x, y in zip(hidden, ids, strict=True)])
    tokens, mask = pad_batch(rows, pad=words.index("[PAD]"))
    targets, _ = pad_batch(wanted, pad=-1)

    def score(model: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.head(model.final_norm(z), mask)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
        found, n = (logits.argmax(-1) == targets).float(), (targets >= 0).view(len(names), -1).sum(1)
        return tuple(x.view(len(names), -1).sum(1) / n for x in (found, losses))

    known = targets[targets >= 0]
    return Sample(names, tokens, mask, score, known.bincount().max().item() / len(known))


def topics(part: int, parts: int, examples: int, seed: int) -> Sample:
    """The two halves of a paragraph of each topic of Python's help; topics are dealt to parts in turn, for neighbours
    in the alphabet are alike."""
    from pydoc_data.topics import topics as texts

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(wheel("minilm") / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    first, last, pad = map(tokenizer.token_to_id, ("[CLS]", "[SEP]", "[PAD]"))
    paragraphs = {}
    for name, text in sorted(texts.items()):
        found = [tokenizer.encode(x, add_special_tokens=False).ids for x in prose(text)]
        if found := [ids for ids in found if len(ids) >= 2 * HALF]:
            paragraphs[name] = found[seed % len(found)]
    chosen = list(paragraphs)[part::parts][:examples]
    tokens, mask = pad_batch([[first, *half, last] for name in chosen
                              for half in (paragraphs[name][:HALF], paragraphs[name][HALF:2 * HALF])], pad=pad)

    def score(model: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        first, second = F.normalize(pooled(model.final_norm(z), mask), dim=-1).unflatten(0, (-1, 2)).unbind(1)
        logits, wanted = first @ second.T / TEMPERATURE, torch.arange(len(chosen))
        both = [(x, (x.argmax(-1) == wanted).float()) for x in (logits, logits.T)]
        losses = [F.cross_entropy(x, wanted, reduction="none") for x, _ in both]
        return (both[0][1] + both[1][1]) / 2, (losses[0] + losses[1]) / 2

    return Sample(chosen, tokens, mask, score, 1 / len(chosen))


def prose(text: str) -> list[str]:
    """Paragraphs that are sentences: at least 20 words, nine of ten of them letters only."""
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [x for x in found if len(words := x.split()) >= 20
            and sum(word.strip(".,;:()\"'*").isalpha() for word in words) >= 0.9 * len(words)]


SAMPLES = {"rxnmapper": reactions, "minilm": topics}


def pooled(z: Tensor, mask: Tensor) -> Tensor:
    """The mean over real tokens (batch, d_model)."""
    return (z * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


Piece = tuple[float, Callable, int]  # of depth: length, field, steps; a layout makes them of the layers' fields


def split(fields: Sequence[Callable], k: int) -> list[Piece]:
    """k steps of 1/k in each layer: h is refined. Of Euler these are k damped sub-steps, z + (layer(z) - z) / k."""
    return [(1.0, f, k) for f in fields]


def repeated(fields: Sequence[Callable], k: int) -> list[Piece]:
    """Each layer k times, undamped."""
    return [(float(k), f, k) for f in fields]


def stretched(fields: Sequence[Callable], k: int) -> list[Piece]:
    """Every k-th layer, with the step h = k."""
    return [(float(k), f, 1) for f in fields[::k]]


def skipped(fields: Sequence[Callable], k: int) -> list[Piece]:
    """Every k-th layer, with the step h = 1."""
    return [(1.0, f, 1) for f in fields[::k]]


def looped(fields: Sequence[Callable], k: int) -> list[Piece]:
    """The middle third of the layers is one field g(z) - z, g its layers in turn, and takes k damped sub-steps."""
    third = len(fields) // 3
    middle = fields[third:-third]

    def block(z: Tensor, l: Tensor) -> Tensor:
        return reduce(lambda x, f: x + f(x, l), middle, z) - z

    return [*split(fields[:third], 1), (1.0, block, k), *split(fields[-third:], 1)]


@dataclass(frozen=True)
class Line:
    """A method: its solver, its layout, and the k that are tried; ``shown``: those in the table."""

    solver: str
    layout: Callable[[Sequence[Callable], int], list[Piece]]
    levels: tuple[int, ...]
    shown: tuple[int, ...]
    turns: bool = False  # attention and feed-forward take turns within a step, each with a field of its own

    def h(self, k: int) -> str:
        """The step size, as the table has it."""
        return {split: f"1/{k}" if k > 1 else "1", stretched: str(k)}.get(self.layout, "1")


LINES = {
    "euler": Line("euler", split, (1, 2, 4, 8), (1, 2, 8)),
    "midpoint": Line("midpoint", split, (1, 2, 4), (1, 4)),
    "rk4": Line("rk4", split, (1, 2, FINE), (1, FINE)),
    "ab2 across layers": Line("ab2", split, (1, 2, 4), (1, 2)),
    "euler, sublayers in turn": Line("euler", split, (2, 4), (2,), turns=True),
    "layers repeated": Line("euler", repeated, (2, 3), (2,)),
    "long steps": Line("euler", stretched, (2, 3), (2,)),
    "layers skipped": Line("euler", skipped, (2, 3), (2,)),
    "damped loop of the middle": Line("euler", looped, (2, 4), (2,)),
}


class Counted:
    """Of a model and one batch: the state at l = 0, the layers' fields, and how often they were evaluated."""

    def __init__(self, model: Any, sample: Sample):
        self.z0 = model.embed(sample.tokens, sample.mask)
        field = model.vector_field(self.z0, sample.mask)
        pieces = [f for _, _, f in getattr(field, "pieces", None) or [(0, 0, field)]]
        self.fields = [self.counting(pieces[i % len(pieces)]) for i in range(model.config.n_layers)]
        self.nfe = 0

    def counting(self, f: Callable) -> Callable:
        """f that counts."""
        def counted(z: Tensor, l: Tensor) -> Tensor:
            self.nfe += 1
            return f(z, l)
        return counted

    def run(self, line: Line, k: int) -> tuple[Tensor, int]:
        """The states at all steps, and the evaluations of a layer."""
        self.nfe, ends, grid, pieces = 0, [0.0], [0.0], []
        for length, f, steps in line.layout(self.fields, k):
            start = ends[-1]
            ends.append(start + length)
            pieces.append((start, ends[-1], f))
            grid += [start + length * i / steps for i in range(1, steps)] + [ends[-1]]
        options = {"across_pieces": True} if line.solver == "ab2" else {}
        states = solve(LayeredField(pieces), self.z0, span=(0.0, ends[-1]), grid=grid, save_at="steps",
                       solver=get_solver(line.solver, **options)).states
        return states, self.nfe


@cache
def network(name: str, coupling: str) -> Any:
    """The model; ``coupling`` "composed" for layers as wholes, "lie" for sublayers that take turns."""
    return from_huggingface(wheel(name), coupling=coupling).eval()


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Model x part of its examples. The seed chooses the masked tokens, and the topics' paragraphs."""
    for model, options in settings["models"].items():
        for seed in range(seeds):
            for part in range(options["parts"]):
                yield {"model": model, "seed": seed, "part": part, **options}


@torch.no_grad()
def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each method and k; quality, loss, agreement and distance for each example."""
    sample = SAMPLES[case["model"]](case["part"], case["parts"], case["examples"], case["seed"])
    model = network(case["model"], "composed")
    work = Counted(model, sample)
    runs = {(name, k): in_turn(case["model"], sample, k) if line.turns else work.run(line, k)
            for name, line in LINES.items() for k in line.levels}
    original, fine = (runs[key][0][-1] for key in (("euler", 1), ("rk4", FINE)))
    return [measured(name, k, *run, sample, model, original, None if LINES[name].turns else fine)
            for (name, k), run in runs.items()]


def in_turn(name: str, sample: Sample, k: int) -> tuple[Tensor, float]:
    """States and NFE of Euler with h = 1 / k where attention and feed-forward take turns."""
    model = network(name, "lie").with_solver("euler", steps_per_layer=k)
    _, solution = model(sample.tokens, sample.mask, return_solution=True)
    return solution.states, solution.nfe


def measured(name: str, k: int, states: Tensor, nfe: float, sample: Sample, model: Any, original: Tensor,
             fine: Tensor | None) -> dict[str, Any]:
    """The numbers of one method. ``fine``: None where the method has another limit."""
    z, n = states[-1], len(sample.names)
    quality, loss = sample.score(model, z)
    ours, theirs = (pooled(model.final_norm(x), sample.mask) for x in (z, original))
    steps = (states.diff(dim=0).norm(dim=-1) / states[:-1].norm(dim=-1))[:, sample.mask]
    unit = F.normalize(theirs[::len(theirs) // n], dim=-1)
    row = {"method": name, "k": k, "nfe": nfe, "examples": sample.names, "quality": rounded(quality),
           "loss": rounded(loss), "agreement": rounded(F.cosine_similarity(ours, theirs).view(n, -1).mean(1)),
           "step": steps.mean().item(), "steps": rounded(steps.mean(1)), "chance": sample.chance,
           "unrelated": ((unit @ unit.T).sum().item() - n) / (n * (n - 1))}
    if fine is not None:
        off, size = ((x * sample.mask.unsqueeze(-1)).flatten(1).norm(dim=1) for x in (z - fine, fine))
        row["distance"] = rounded((off / size).view(n, -1).mean(1))
    return row


def rounded(values: Tensor) -> list[float]:
    """To six digits."""
    return [float(f"{x:.6g}") for x in values.tolist()]


def joined(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    """Rows of all parts and seeds by (model, method, k)."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"]["model"], row["method"], row["k"]), []).append(row)
    return groups


def values(group: list[dict[str, Any]], name: str) -> dict[tuple[int, str], float]:
    """{(seed, example): value}."""
    return {(row["case"]["seed"], example): x for row in group
            for example, x in zip(row["examples"], row[name], strict=True)}


def average(group: list[dict[str, Any]], name: str) -> float:
    """Over examples."""
    return mean(values(group, name).values())


def order(groups: dict[tuple[str, str, int], list[dict[str, Any]]], model: str, name: str, k: int) -> str:
    """log2 of the distance at 2h over that at h, where both were measured and h is not the limit's own."""
    before = groups.get((model, name, k // 2)) if k > 1 and LINES[name].layout is split else None
    if before is None or "distance" not in before[0] or (name, k) == ("rk4", FINE):
        return ""
    return f"{math.log2(average(before, 'distance') / average(groups[model, name, k], 'distance')):.2f}"


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a model and method, means and spread over examples; differences to Euler with h = 1, paired."""
    groups, lines = joined(rows), []
    for (model, name, k), group in groups.items():
        if k not in LINES[name].shown:
            continue
        original = groups[model, "euler", 1]
        found = difference(values(group, "quality"), values(original, "quality"))
        compared, agreement = (found.shown(), found.verdict()), f"{average(group, 'agreement'):.3f}"
        quality = f"{average(group, 'quality'):.3f}", f"{stdev(values(group, 'quality').values()):.3f}"
        label = "fine limit (rk4)" if (name, k) == ("rk4", FINE) else name
        if group is original:
            label = "the original (euler)"
            compared = (f"guessing: {mean(row['chance'] for row in group):.3f}", "")
            agreement += f" (unrelated: {mean(row['unrelated'] for row in group):.3f})"
        distance = f"{average(group, 'distance'):.2g}" if "distance" in group[0] else ""
        lines.append((model, label, LINES[name].h(k), f"{group[0]['nfe']:g}", *quality, *compared,
                      f"{average(group, 'loss'):.2f}", agreement, distance, order(groups, model, name, k),
                      f"{mean(row['step'] for row in group):.2f}"))
    return lines


LOOKS = dict(zip(LINES, (("o", "#0072B2"), ("s", "#E69F00"), ("D", "#D55E00"), ("^", "#009E73"), ("v", "#56B4E9"),
                         ("X", "#CC79A7"), ("P", "#000000"), ("<", "#7F7F7F"), ("*", "#B8A000")), strict=True))
PANELS = {"quality": "quality (share found)", "agreement": "agreement (cosine with the original)",
          "distance": "distance from the fine limit (relative)"}


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Quality, agreement and distance against NFE, a line a method, a row of panels a model; a ring: the original."""
    groups = joined(rows)
    models = list(dict.fromkeys(model for model, _, _ in groups))
    for line, model in zip(figure.subplots(len(models), len(PANELS), squeeze=False), models, strict=True):
        for axes, (value, label) in zip(line, PANELS.items(), strict=True):
            for name, (marker, color) in LOOKS.items():
                points = [(group[0]["nfe"], average(group, value)) for (owner, method, k), group in groups.items()
                          if (owner, method) == (model, name) and value in group[0]
                          and (value, name, k) != ("distance", "rk4", FINE)]
                if points:
                    axes.plot(*zip(*sorted(points), strict=True), marker=marker, color=color, label=name, markersize=5,
                              linewidth=1.2, linestyle="-" if LINES[name].layout is split else ":")
            first = groups[model, "euler", 1]
            axes.plot(first[0]["nfe"], average(first, value), "o", markersize=12, markerfacecolor="none",
                      markeredgecolor="black", label="the original")
            level = {"quality": "chance", "agreement": "unrelated"}.get(value)
            if level:
                axes.axhline(mean(row[level] for row in first), color="0.6", linestyle="--", linewidth=1,
                             label="guessing; unrelated examples")
            axes.set_xscale("log", base=2)
            axes.set_xlabel("NFE (evaluations of a layer a forward pass)")
            axes.set_ylabel(label)
            axes.set_title(model, fontsize=10)
            axes.grid(alpha=0.3)
        line[-1].set_yscale("log")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
