"""Every drawing of odeformer.plots: any numbers, no display, nothing left behind; an example image of each."""

import ast
import inspect
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from odeformer import plots

ROOT = Path(__file__).parent.parent
TABLE = {drawing.__name__: drawing for drawing in plots.DRAWINGS}


def rotation(z, l):
    return torch.stack([-z[..., 1], z[..., 0]], -1)


def complex_of(x):
    return x + 1j * x if isinstance(x, np.ndarray) else torch.complex(x, x)


# for each drawing: make(values: shape -> positive numbers) -> its arguments
ARGUMENTS = {
    "attention_entropy": lambda of: ((of(3, 2),), {}),
    "attention_map": lambda of: ((of(4, 5),), {}),
    "error_against_nfe": lambda of: (({"rk4": (of(4), of(4)), "ab3": (of(3), of(3))},), {"orders": (1, 4)}),
    "gradient_norms": lambda of: (({"pre": of(5, 2), "post": of(5)},), {"depths": of(5)}),
    "local_errors": lambda of: ((of(3, 4),), {"edges": of(4)}),
    "numerical_ranges": lambda of: ((complex_of(of(3, 5)),), {"eigenvalues": complex_of(of(3, 2)), "depths": of(3)}),
    "order_star": lambda of: (("rk4",), {"resolution": 41}),
    "over_depth": lambda of: ((of(5, 2, 3),), {"depths": of(5)}),
    "pareto": lambda of: (({"rk4": (of(4), of(4))},), {}),
    "phase_portrait": lambda of: ((rotation,), {"states": of(6, 3, 2), "resolution": 5}),
    "spectra": lambda of: ((complex_of(of(4, 3)),), {"depths": of(4)}),
    "stability_regions": lambda of: (("rk4",), {"eigenvalues": complex_of(of(4, 3)), "depths": of(4),
                                                "resolution": 41}),
    "step_sizes": lambda of: (({"rk4": of(5)},), {}),
    "training_curves": lambda of: (({"run": (of(6), of(6, 2))},), {"smoothing": 0.5}),
    "trajectories": lambda of: ((of(5, 2, 3, 4),), {"depths": of(5)}),
    "work_precision": lambda of: (({"rk4": (of(4), of(4))},), {}),
}
KINDS = {
    "numpy float32": lambda x: x.astype(np.float32),
    "numpy float64": lambda x: x,
    "torch float32": lambda x: torch.tensor(x, dtype=torch.float32, requires_grad=True),
    "torch float64": lambda x: torch.tensor(x),
}


def numbers(kind):
    """shape -> increasing positive numbers."""
    return lambda *shape: KINDS[kind](np.arange(1, 1 + np.prod(shape), dtype=float).reshape(shape) / 8)


def drawn(name, kind="numpy float64", ax=None):
    arguments, options = ARGUMENTS[name](numbers(kind))
    return TABLE[name](*arguments, ax, **options)


def points(ax):
    """All that is drawn, as arrays."""
    found = [np.asarray(line.get_xydata(), dtype=float) for line in ax.lines]
    for collection in ax.collections:
        found += [np.asarray(collection.get_offsets(), dtype=float), np.ma.filled(collection.get_array(), 0)
                  if collection.get_array() is not None else np.zeros(0)]
    return found


def test_every_function_that_takes_axes_is_in_the_table():
    takes_axes = {name for name in plots.__all__ if inspect.isfunction(getattr(plots, name))
                  and "ax" in inspect.signature(getattr(plots, name)).parameters}
    assert set(TABLE) == takes_axes == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_drawing_is_the_same_from_arrays_and_tensors_of_either_precision(name):
    reference = points(drawn(name))
    assert sum(map(np.size, reference)) > 4
    for kind in KINDS:
        for x, y in zip(points(drawn(name, kind)), reference, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5)  # float32 arguments; all is drawn in float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_drawn_too(dtype):
    line = plots.over_depth(torch.tensor([1.0, 0.5, 2.0], dtype=dtype)).lines[0]
    assert line.get_ydata().tolist() == [1.0, 0.5, 2.0] and line.get_ydata().dtype == np.float64


@pytest.mark.parametrize("name", ARGUMENTS)
def test_given_axes_are_drawn_on_and_returned_and_the_neighbour_is_left_alone(name):
    _, panels = plots.figure(1, 2)
    first, second = panels[0]
    assert drawn(name, ax=first) is first
    assert not second.has_data() and not second.get_xlabel()
    with pytest.raises(TypeError, match="ax must be matplotlib Axes or None, got str"):
        drawn(name, ax="here")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_axes_are_labelled_and_everything_lies_within_a_figure_of_a_column(name):
    ax = drawn(name)
    assert ax.get_xlabel() and ax.get_ylabel()
    figure = ax.figure
    assert figure.get_figwidth() == plots.COLUMN
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box, page = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < page[0] + 0.02 and box.y1 < page[1] + 0.02
    legend = ax.get_legend()
    if legend is not None:
        assert not legend.get_window_extent().overlaps(ax.get_window_extent())
        assert not legend.get_window_extent().overlaps(ax.xaxis.label.get_window_extent())
        assert not legend.get_frame_on()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_setting_of_matplotlib_is_changed(name):
    before = dict(matplotlib.rcParams)
    drawn(name)
    assert dict(matplotlib.rcParams) == before


def test_nothing_imports_pyplot_or_needs_a_display(tmp_path):
    code = ("import sys; sys.path.insert(0, 'tests')\n"
            "import test_plots_style as t\n"
            "from odeformer import plots\n"
            "axes = {name: t.drawn(name) for name in t.ARGUMENTS}\n"
            f"plots.save(axes['pareto'], {str(tmp_path / 'pareto.svg')!r})\n"
            "assert 'matplotlib.pyplot' not in sys.modules\n"
            "assert not any('_tk' in m or 'qt' in m for m in sys.modules if m.startswith('matplotlib.backends'))")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PATH": "", "HOME": str(tmp_path)})
    assert (tmp_path / "pareto.svg").read_text().startswith("<?xml")


def test_the_sources_do_not_name_pyplot():
    for path in (ROOT / "odeformer" / "plots").glob("*.py"):
        modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                   for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                   if isinstance(node, ast.Import | ast.ImportFrom)}
        assert not any("pyplot" in module or "pylab" in module for module in modules), path


def test_the_size_of_text_on_new_axes_is_that_of_the_style_and_on_given_ones_that_of_their_owner():
    assert drawn("over_depth").xaxis.label.get_fontsize() == plots.STYLE["axes.labelsize"] == 8
    own = Figure().add_subplot()
    before = own.xaxis.label.get_fontsize()
    assert drawn("over_depth", ax=own).xaxis.label.get_fontsize() == before
    assert plots.figure()[1][0, 0].xaxis.label.get_fontsize() == 8


def luminance(color):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# Machado, Oliveira & Fernandes 2009, severity 1.0
VISIONS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_stay_apart_for_other_colour_vision_and_on_white_paper(vision):
    seen = [np.array(VISIONS[vision]) @ to_rgb(color) for color in plots.COLORS]
    gaps = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 0.14
    assert all(1.05 / (luminance(color) + 0.05) > 2 for color in plots.COLORS)


def test_depth_goes_from_dark_to_light_without_a_turn():
    from odeformer.plots.style import depth_colors, heat_colors

    for colors in (depth_colors(), heat_colors()):
        light = [luminance(colors(x)) for x in np.linspace(0, 1, 50)]
        assert all(b > a for a, b in pairwise(light))
    assert 1.05 / (luminance(depth_colors()(1.0)) + 0.05) > 1.5  # still seen on white


def test_looks_differ_in_colour_line_and_marker_and_do_not_repeat_for_a_long_time():
    looks = [look for look, _ in zip(plots.looks(), range(7), strict=False)]
    assert all(len(set(part)) == 7 for part in zip(*looks, strict=True))
    first = [look for look, _ in zip(plots.looks(), range(49), strict=False)]
    assert len(set(first)) == 49


def test_the_examples_cover_every_drawing_and_each_has_a_small_image():
    from docs.plots import examples

    assert set(examples.EXAMPLES) == set(TABLE)
    images = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "plots").glob("*.png")}
    assert set(images) == set(TABLE)
    assert sum(images.values()) < 1.5e6
    gallery = (ROOT / "docs" / "plots" / "README.md").read_text(encoding="utf-8")
    assert gallery == examples.gallery()


@pytest.mark.parametrize("name", ["order_star", "error_against_nfe", "work_precision", "pareto", "gradient_norms"])
def test_examples_that_need_no_training_draw(name):
    from docs.plots import examples

    assert examples.EXAMPLES[name]().has_data()


def test_an_example_of_another_name_is_refused(capsys):
    from docs.plots import examples

    with pytest.raises(SystemExit):
        examples.main(["portrait"])
    assert "no example is called 'portrait'; known: stability_regions" in capsys.readouterr().err
