"""The report: a page on solvers and models, with a summary on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from odeformer.depth import SolverError
from odeformer.generate import evaluating
from odeformer.page import Page, inline
from odeformer.studio import accuracy, explorer, methods, paths, samples, sensitivity, spectra
from odeformer.studio.modes import modes_of
from odeformer.studio.section import Section, Verdict
from odeformer.studio.stack import Limits, Stack, stacks_of
from odeformer.studio.targets import Target, resolve
from odeformer.studio.words import counted, number

# in the order of the page
SECTIONS: dict[str, Section] = {
    **{name: spectra.SECTIONS[name] for name in ("region", "reach", "stiffness", "spectra", "growth")},
    **accuracy.SECTIONS, **paths.SECTIONS, **sensitivity.SECTIONS}
# in the order of the summary
JUDGED = ("global", "stiffness", "region", "reach", "invariance", "weights", "limit", "lyapunov", "gradients")
LEGEND = "✓ as a smooth, stable depth has it, ~ in part, ✗ not so."
MARKS = {"good": "✓ ", "warn": "~ ", "bad": "✗ ", "": ""}

Findings = dict[str, Any]


def stability_report(targets: Any, path: str | Path, *, inputs: Any = None, title: str = "", progress: bool = False,
                     **limits: int) -> Path:
    """Write one self-contained HTML file on the stability of solvers and models; returns its path.

    ``targets``: one or several of: the name of a solver, a solver; a folder with a model that was saved here, or in
    Hugging Face's format; a model, or any module with a residual stack (see ``pretrained.wrap``). ``inputs``: what
    models are called with, a tensor, a tuple of arguments or a mapping of named ones; if None, test data of the run
    whose settings lie beside a saved model, else random input, which the report says.

    ``limits``: ``samples`` (4 rows) and ``max_tokens`` (32 a row) of what is not given, ``max_layers`` (6) at which
    Jacobians are taken, ``max_bytes`` that a diagnostic keeps, ``seed``. A row's Jacobian is over all its tokens; up to
    640 numbers all eigenvalues are found, beyond these the leading ones. ``progress``: a bar on stderr.

    Raises ValueError for an unknown target (with what is possible), a module without a residual stack, weights that are
    not finite (with their names), and sizes that do not fit into max_bytes (with the number of bytes).
    """
    bounds, found = Limits(**limits), resolve(targets)
    solvers = [target.solver for target in found if target.solver is not None]
    models = [target for target in found if target.model is not None]
    if inputs is not None and not models:
        raise ValueError("inputs are for models, and the targets are solvers")
    page = Page(title or f"Stability of {', '.join(target.name for target in found)}", _subtitle(solvers, models))
    stacks: list[tuple[Stack, Findings]] = []
    with tqdm(total=None, desc="stability", disable=not progress) as bar:
        for target in models:
            stacks += studied(target, inputs, bounds, bar)
        bar.set_description("writing")
        if stacks:
            _summary(page, stacks)
        if solvers:
            methods.write(page, solvers)
        for i, (stack, findings) in enumerate(stacks):
            _write(page, stack, findings, i)
            bar.update()
    return page.write(path)


def _subtitle(solvers: Sequence[Any], models: Sequence[Target]) -> str:
    if models:
        return ("Depth as the time of a differential equation: dz/dl = f(z, l), one unit of l a layer. Every number is "
                "measured on the sample input named below; sentences are computed from the numbers.")
    return "Stability regions in the plane of h λ, from the coefficients of the methods."


def studied(target: Target, inputs: Any, limits: Limits, bar: Any = None) -> list[tuple[Stack, Findings]]:
    """The stacks of a model, each with what was found by section: numbers, or a text that says why there are none."""
    model, found = target.model, []
    bar = tqdm(disable=True) if bar is None else bar
    with evaluating(model):
        stacks = stacks_of(target.name, model, _sample(target, inputs, limits), limits)
        bar.total = (bar.total or 0) + len(stacks) * (len(SECTIONS) + 1)
        for stack in stacks:
            modes_of(stack)  # what does not fit into memory is an error, not a gap in the report
            findings: Findings = {}
            for name, section in SECTIONS.items():
                bar.set_description(f"{stack.name}: {section.title}")
                try:
                    findings[name] = section.measure(stack)
                except (ValueError, SolverError) as error:
                    findings[name] = str(error)
                bar.update()
            found.append((stack, findings))
    return found


def _sample(target: Target, inputs: Any, limits: Limits) -> samples.Sample:
    """What the model is looked at on."""
    if inputs is not None:
        return samples.given(inputs)
    own = samples.of_run(target.model, target.folder, limits.samples, limits.max_tokens) if target.folder else None
    return own or samples.random(target.model, limits.samples, limits.max_tokens, limits.seed)


def verdicts(stack: Stack, findings: Findings) -> list[Verdict]:
    """The lines of the summary."""
    return [SECTIONS[name].judge(stack, findings[name]) for name in JUDGED
            if SECTIONS[name].judge is not None and not isinstance(findings[name], str)]


def _summary(page: Page, stacks: Sequence[tuple[Stack, Findings]]) -> None:
    """What came out, question by question."""
    page.heading("Summary")
    found = {stack.name: verdicts(stack, findings) for stack, findings in stacks}
    for name, lines in found.items():
        page.paragraph(in_short(name, lines))
    if len(found) == 1:
        (lines,) = found.values()
        page.table(["question", "answer", "numbers"],
                   [[line.question, MARKS[line.grade] + line.answer, line.numbers] for line in lines],
                   LEGEND)
        return
    questions = list(dict.fromkeys(line.question for lines in found.values() for line in lines))
    by_name = {name: {line.question: f"{MARKS[line.grade]}{line.answer} ({line.numbers})" for line in lines}
               for name, lines in found.items()}
    page.table(["question", *found], [[question, *(by_name[name].get(question) for name in found)]
                                      for question in questions], LEGEND)


SMOOTH = {"yes": "is a smooth ODE", "roughly": "is an ODE in outline",
          "no": "is no ODE: its layers are not steps of a flow",
          "as its solver makes it": "is integrated with steps that its solver chooses"}


def in_short(name: str, lines: Sequence[Verdict]) -> str:
    """The answers to the four first questions, in a sentence or two."""
    answers: Mapping[str, Verdict] = {line.question: line for line in lines}
    smooth, stiff = answers.get("Is this depth a smooth ODE?"), answers.get("How stiff is it?")
    inside = answers.get("Is h λ inside the region of its solver?")
    bigger = answers.get("Which solver could take bigger steps?")
    text = f"{name}: " + (f"its depth {SMOOTH[smooth.answer]} ({smooth.numbers}). " if smooth else "")
    text += f"It is {stiff.answer}: {stiff.numbers}. " if stiff else ""
    text += f"Of h λ: {inside.numbers}. " if inside else ""
    text += f"Bigger steps could take {bigger.answer}: {bigger.numbers}." if bigger else ""
    return text.strip()


def _write(page: Page, stack: Stack, findings: Findings, i: int) -> None:
    """The part on one stack."""
    page.heading(stack.name)
    page.paragraph(f"Looked at on {stack.source}.")
    page.html('<dl class="facts ui">' + "".join(f"<dt>{inline(what)}</dt><dd>{inline(value)}</dd>"
                                                for what, value in facts(stack)) + "</dl>")
    for name, section in SECTIONS.items():
        page.heading(section.title, 3)
        found = findings[name]
        if isinstance(found, str):
            page.paragraph(f"Not measured: {found}.")
            continue
        _figure(page, stack, section, found)
        page.paragraph(section.say(stack, found))
        if section.table is not None:
            page.table(*section.table(stack, found))
        if name == "region":
            page.heading("Move the step size", 3)
            page.paragraph("Move h, or choose another method: eigenvalues move along rays through 0, regions stay. The "
                           "slider takes the arrow keys.")
            page.html(explorer.fragment(stack, modes_of(stack), i, script=i == 0))


def _figure(page: Page, stack: Stack, section: Section, found: Any) -> None:
    drawn = None if section.draw is None else section.draw(stack, found)
    if drawn is None:
        page.paragraph(section.how)
    else:
        page.figure(drawn, section.how, section.code, alt=f"{section.title}, {stack.name}")


def facts(stack: Stack) -> list[list[Any]]:
    """What the model is, how it was integrated, and on what."""
    config, run = getattr(stack.model, "config", None), stack.run
    depth, block = getattr(config, "depth", None), getattr(config, "block", None)
    batch, tokens, width = run.states.shape[1:]
    rows = [["layers", number(stack.length)], ["width", width]]
    if isinstance(stack.model, nn.Module):
        rows.append(["parameters", f"{sum(p.numel() for p in stack.model.parameters()):,}"])
    if block is not None:
        rows += [["attention, heads", f"{block.attention}, {block.n_heads}"], ["norm", str(block.norm)],
                 ["coupling of sublayers", str(block.coupling)]]
    steps = f"{counted(len(stack.steps), 'step')}, h = {number(stack.h)}" + (" in the median" if stack.chooses_steps
                                                                              else "")
    rows.append(["solver", f"{stack.solver.name}, {steps}, {number(stack.nfe)} evaluations of f"])
    if depth is not None:
        rows.append(["weights over depth", str(depth.weights)])
        if depth.fusion is not None:
            rows.append(["fusion", f"{depth.fusion}, no part of f: what integrates anew goes without it"])
    rows += [["sample", f"{counted(batch, 'row')} of {counted(tokens, 'token')}, {str(run.states.dtype)[6:]}"],
             ["Jacobians", f"{counted(stack.few.states.shape[1], 'row')}, {counted(len(stack.at), 'layer')}, over all "
              f"{stack.size:,} numbers of a row: {modes_of(stack).what} a row and layer"]]
    return rows


