"""docs/equations.md says what is true: names, keys, options and tests exist; and eqs. 34-37 and 39-46 by hand."""

import ast
import importlib
import inspect
import math
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from odeformer import FEEDFORWARD, BlockConfig, DepthConfig, Encoder, EncoderConfig
from solvers import ExplicitRungeKutta, LinearMultistep, Tableau, solve

ROOT = Path(__file__).parent.parent
WANTED = [*(str(n) for n in range(1, 54)), "AN"]
LATER = "later: "
ARGUMENTS = {"ATTENTION": (8, 2), "NORMS": (8,), "FEEDFORWARD": (8, 16), "FUSIONS": (4, 8), "POSITIONS": (16, 8),
             "BlockConfig": (8, 2)}  # what a table's entries need beside options


class Row(NamedTuple):
    label: str
    formula: str
    names: list[str]
    tests: list[str]
    later: bool


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read(text):
    """The rows of all tables whose first cell is an equation's number, AN, or "after" a number."""
    rows = []
    for line in text.splitlines():
        if not line.startswith("|") or not re.match(r"(\d+|AN|after \d+)$", cells(line)[0]):
            continue
        label, formula, name, test = cells(line)
        names = re.findall(r"`((?:odeformer|solvers|benchmarks)\.[^`]*)`", name)
        rows.append(Row(label, formula, names, re.findall(r"`([^`]*)`", test), name.startswith(LATER)))
    return rows


ROWS = read((ROOT / "docs" / "equations.md").read_text(encoding="utf-8"))
LANDED = [row for row in ROWS if not row.later]


def ids(rows):
    return [f"{row.label.replace(' ', '_')}-{i}" for i, row in enumerate(rows)]


def resolve(path):
    """The object of a dotted path: the longest part that is a module, then attributes."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for name in parts[n:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def check_name(text):
    """Raises where ``path``, ``path["key"]`` or either with ``(option=value)`` names what is not there."""
    node = ast.parse(text, mode="eval").body
    call = node if isinstance(node, ast.Call) else None
    node = call.func if call else node
    key = ast.literal_eval(node.slice) if isinstance(node, ast.Subscript) else None
    path = ast.unparse(node.value if key is not None else node)
    found = resolve(path)
    if key is not None:
        found = found[key]
    if call is None:
        return
    known = inspect.signature(found).parameters
    options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    for option in options:
        assert option in known, f"{text}: no option {option!r}; known: {', '.join(known)}"
    if ... not in options.values():
        found(*ARGUMENTS.get(path.rpartition(".")[2], ()), **options)


@cache
def functions(file):
    """The test functions of a file, name -> docstring."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}


def numbers(name, docstring):
    """Equation numbers in a test's name (eq_6, eqs_42_46 and eqs_1_to_12 with all between, eqs_8_and_10, eqs_13_14_17)
    and docstring (eq. 6, eqs. 1-2, 4 and 6)."""
    found = set()
    for tail in re.findall(r"eqs?_(\d+(?:_(?:to_|and_)?\d+)*)", name):
        plain = [int(n) for n in re.findall(r"\d+", tail)]
        found |= set(range(plain[0], plain[-1] + 1)) if len(plain) == 2 and "and" not in tail else set(plain)
    for tail in re.findall(r"[eE]qs?\. ?(\d+(?:(?:-|, | and )\d+)*)", docstring):
        for a, b in re.findall(r"(\d+)(?:-(\d+))?", tail):
            found |= set(range(int(a), int(b or a) + 1))
    return found | ({"AN"} if name.startswith("test_an_") or "[AN]" in docstring else set())


def test_the_page_has_a_row_for_every_equation_from_1_to_53_and_one_for_an():
    labels = [row.label for row in ROWS if not row.label.startswith("after")]
    assert sorted(labels, key=WANTED.index) == WANTED
    assert [label for label in labels if label != "AN"] == WANTED[:-1]  # in order


def test_every_line_of_a_table_is_read():
    lines = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("|") and cells(line)[0] not in ("eq.", "---")]
    assert len(tables) == len(ROWS)


@pytest.mark.parametrize("row", LANDED, ids=ids(LANDED))
def test_every_name_key_and_option_exists(row):
    assert row.formula
    assert row.names, f"eq. {row.label} has no name in the code"
    for name in row.names:
        check_name(name)


@pytest.mark.parametrize("row", LANDED, ids=ids(LANDED))
def test_every_test_exists_and_one_carries_the_number(row):
    assert row.tests, f"eq. {row.label} has no test"
    carried = set()
    for reference in row.tests:
        file, _, name = reference.partition("::")
        assert name in functions(file), f"no test {name!r} in {file}"
        carried |= numbers(name, functions(file)[name])
    if not row.label.startswith("after"):
        number = row.label if row.label == "AN" else int(row.label)
        assert number in carried, f"eq. {row.label}: none of {', '.join(row.tests)} carries the number"


@pytest.mark.parametrize("row", [row for row in ROWS if row.later], ids=lambda row: row.label)
def test_what_is_marked_later_is_not_there_yet(row):
    for name in row.names:
        with pytest.raises((ModuleNotFoundError, AttributeError, KeyError)):
            check_name(name)


def test_the_reader_notices_what_does_not_exist():
    for wrong in ("odeformer.attention.ATTENTIONS", "odeformer.attentions.ATTENTION", 'odeformer.NORMS["pest"]',
                  'odeformer.NORMS["post"](kind="batch")', 'odeformer.DepthConfig(solver="rk5")'):
        with pytest.raises((ModuleNotFoundError, AttributeError, KeyError, ValueError)):
            check_name(wrong)
    with pytest.raises(AssertionError, match="no option 'gama'"):
        check_name('odeformer.BlockConfig(gama=1.0)')
    assert numbers("test_eqs_39_41_x", "see eqs. 1-3, 5 and 7 of [AN]") == {39, 40, 41, 1, 2, 3, 5, 7, "AN"}
    assert numbers("test_eqs_1_to_3_x", "") == numbers("test_eqs_1_2_3_x", "") == {1, 2, 3}
    assert numbers("test_eqs_8_and_10_of_2_x", "Eq. 12.") == {8, 10, 12}
    assert read("| 7 | x | later: `odeformer.a` | later |") == [Row("7", "x", ["odeformer.a"], [], True)]


# the equations of depth, in plain Python


def tiny(**depth):
    block = BlockConfig(8, 2, coupling="composed")
    return Encoder(EncoderConfig(vocab_size=11, max_seq_len=6, n_layers=3, block=block,
                                 depth=DepthConfig(**depth))).double().eval()


def field(block):
    """f(z) = the increment of a whole textbook layer."""
    def f(z):
        y = z + block.attention.core(block.attention.placement.norm(z))
        return y + block.feedforward.core(block.feedforward.placement.norm(y)) - z

    return f


def test_eqs_34_35_a_step_of_size_h_adds_h_times_the_increment_of_the_sublayers():
    model = tiny(steps_per_layer=4)
    z = model.embed(torch.randint(11, (2, 6)))
    states = model.evolve(z, None, save=True).states
    n = 0
    for block in model.layers:
        f = field(block)
        for _ in range(4):
            assert (states[n + 1] - (states[n] + f(states[n]) / 4)).abs().max() < 1e-13
            assert ((states[n + 1] - states[n]) / 0.25 - f(states[n])).abs().max() < 1e-12
            n += 1
    assert n + 1 == len(states)


def test_eq_36_small_steps_tend_to_the_solution_of_the_ode():
    a = torch.randn(4, 4, dtype=torch.float64)
    z = torch.randn(4, dtype=torch.float64)
    exact = torch.linalg.matrix_exp(a) @ z
    errors = [(solve(lambda z, l: a @ z, z, solver="euler", n_steps=n).z - exact).norm() for n in (512, 1024, 2048)]
    assert errors[-1] < 0.01 * exact.norm()
    for coarse, fine in pairwise(errors):
        assert abs(coarse / fine - 2) < 0.05  # Euler is of order 1


def swing(z, l):
    """Neither autonomous nor linear."""
    return torch.sin(z) * (1 + l) - 0.3 * z.flip(-1) + l


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.5, -0.5]), ([0.0, 1.0], [2.0]), ([0.5, 0.5], [1.75, -0.25])])
def test_eq_37_a_linear_multistep_method_weighs_states_and_increments(a, b):
    """z(l) = Σ a_i z(l - i) + h Σ b_i f at the same earlier points, newest first; the first step by a starter."""
    h, n = 0.125, 8
    solver = LinearMultistep(a, b, starter="midpoint")
    z = torch.randn(5, dtype=torch.float64)
    states = solve(swing, z, solver=solver, n_steps=n, save_at="steps").states
    first = z + h * swing(z + h / 2 * swing(z, 0.0), h / 2)
    zs = [z, first]
    for step in range(1, n):
        new = sum(weight * zs[step - i] for i, weight in enumerate(a))
        new = new + h * sum(weight * swing(zs[step - i], (step - i) * h) for i, weight in enumerate(b))
        zs.append(new)
    assert (states - torch.stack(zs)).abs().max() < 1e-13


def test_eqs_39_41_an_explicit_runge_kutta_step_is_the_printed_recipe():
    """Kutta's third-order method, with β, γ and λ as the seed writes them."""
    beta, gamma = [[], [1 / 2], [-1, 2]], [1 / 6, 2 / 3, 1 / 6]
    h, z = 0.5, torch.randn(5, dtype=torch.float64)
    solver = ExplicitRungeKutta(Tableau(beta, gamma))
    for f in (swing, lambda z, l: swing(z, 0.0)):  # eq. 40, and eq. 41 without the dependence on l
        wanted = z
        got = solve(f, z, solver=solver, n_steps=2).z
        for l in (0.0, h):
            g = []
            for row in beta:
                g.append(h * f(wanted + sum((b * x for b, x in zip(row, g, strict=True)), 0.0), l + sum(row) * h))
            wanted = wanted + sum(weight * x for weight, x in zip(gamma, g, strict=True))
        assert (got - wanted).abs().max() < 1e-14


def test_eqs_42_46_an_rk4_layer_is_the_printed_recipe():
    model = tiny(solver="rk4")
    z = wanted = model.embed(torch.randint(11, (2, 6)))
    for block in model.layers:
        f = field(block)
        g1 = f(wanted)
        g2 = f(wanted + g1 / 2)
        g3 = f(wanted + g2 / 2)
        g4 = f(wanted + g3)
        wanted = wanted + (g1 + 2 * g2 + 2 * g3 + g4) / 6
    assert (model.evolve(z, None).z - wanted).abs().max() < 1e-12


SCALAR = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize(("name", "activation", "gated"), [("relu", "relu", False), ("gelu", "gelu", False),
                                                           ("swiglu", "silu", True), ("geglu", "gelu", True),
                                                           ("reglu", "relu", True)])
@pytest.mark.parametrize("bias", [True, False])
def test_eq_48_a_feed_forward_network_number_by_number(name, activation, gated, bias):
    f = FEEDFORWARD[name](3, 5, bias=bias).double()
    for p in f.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(3, dtype=torch.float64)

    def row(linear, j, values):
        shift = linear.bias[j].item() if bias else 0.0
        return sum(w * v for w, v in zip(linear.weight[j].tolist(), values, strict=True)) + shift

    hidden = []
    for j in range(5):
        inner = row(f.hidden, j, x.tolist())
        act = SCALAR[activation]
        hidden.append(act(row(f.gate, j, x.tolist())) * inner if gated else act(inner))
    wanted = [row(f.output, j, hidden) for j in range(3)]
    assert (f(x) - torch.tensor(wanted, dtype=torch.float64)).abs().max() < 1e-13
