"""odeformer.plots: what is drawn is what the numbers say, without a display and without pyplot."""

import itertools
import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure

from odeformer import plots
from solvers import LieTrotter

RK4 = [1 / 24, 1 / 6, 1 / 2, 1, 1]


@dataclass(frozen=True)
class Leapfrog:
    name: str = "leapfrog"
    is_adaptive = False

    def characteristic(self, z):
        return [1.0, -2 * z, -1.0]


@dataclass(frozen=True)
class BackwardEuler:
    name: str = "backward_euler"
    is_adaptive = False

    def characteristic(self, z):
        return [1 - z, -1.0]


def boundary(ax):
    """Vertices of the boundary curves, as complex numbers."""
    lines = [c for c in ax.collections if isinstance(c, ContourSet) and not c.filled]
    return [np.concatenate([path.vertices for path in c.get_paths()]) @ [1, 1j] for c in lines]


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_the_boundary_drawn_for_rk4_has_modulus_one():
    ax = plots.stability_regions("rk4")
    (z,) = boundary(ax)
    # linear interpolation in cells of 0.03: an error of about (0.03)² / 8 times the curvature of |R|
    np.testing.assert_allclose(np.abs(np.polyval(RK4, z)), 1.0, atol=2e-3)
    assert z.real.min() == pytest.approx(-2.7853, abs=2e-3)
    assert z.imag.max() == pytest.approx(2.94, abs=0.01)


def test_the_region_is_filled_where_the_method_is_stable():
    ax = plots.stability_regions("euler")
    (fill,) = [c for c in ax.collections if isinstance(c, ContourSet) and c.filled]
    (path,) = fill.get_paths()
    assert path.contains_points([(-1, 0), (-1.9, 0), (-1, 0.95)]).all()
    assert not path.contains_points([(-2.1, 0), (0.05, 0), (-1, 1.05), (-0.1, 0.9)]).any()


def test_an_implicit_method_is_filled_outside_its_circle():
    ax = plots.stability_regions(BackwardEuler())
    canvas = FigureCanvasAgg(ax.figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    places = ax.transData.transform([(-5, 3), (2.2, 0.4), (1, 1.3), (1, 0.4), (0.4, 0.4)]).round().astype(int)
    white = [bool((pixels[-1 - row, column] == 255).all()) for column, row in places]
    assert white == [False, False, False, True, True]


def test_every_method_is_labelled_by_name_and_the_view_holds_all_regions():
    names = ["euler", "midpoint", "kutta3", "rk4", "ab3"]
    ax = plots.stability_regions(names)
    assert labels(ax) == names
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Re(h λ)", "Im(h λ)")
    assert ax.get_aspect() == 1.0
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    for z in boundary(ax):
        assert left < z.real.min() and z.real.max() < right and bottom < z.imag.min() and z.imag.max() < top
    assert left > -4 and top < 4  # and is not much larger


def test_eigenvalues_are_scattered_and_in_view():
    points = [-5 + 1j, -0.5 + 0j, -1j, 0.2 - 7j]
    values = torch.tensor(points, requires_grad=True).reshape(2, 2).conj().conj_physical()  # as a model hands them over
    ax = plots.stability_regions(["rk4"], eigenvalues=values)
    (dots,) = [c for c in ax.collections if isinstance(c, PathCollection)]
    np.testing.assert_allclose(dots.get_offsets() @ [1, 1j], points, rtol=1e-6)  # torch.tensor makes them complex64
    assert labels(ax) == ["rk4", "eigenvalues h λ"]
    assert ax.get_xlim()[0] < -5 and ax.get_ylim()[0] < -7


def test_given_axes_are_drawn_on_and_returned_and_a_second_call_adds_to_them():
    first, second = Figure().subplots(1, 2)
    assert plots.stability_regions("euler", first) is first
    assert not second.lines
    assert plots.stability_regions("rk4", first, extent=(-4, 1, -3, 3), resolution=61) is first
    assert labels(first) == ["euler", "rk4"]
    colors = [line.get_color() for line in first.get_legend().get_lines()]
    assert len(set(colors)) == 2 and set(colors) <= set(plots.COLORS)
    assert first.get_xlim() == (-4, 1) and first.get_ylim() == (-3, 3)


def test_a_region_without_interior_is_a_line_along_the_axis():
    ax = plots.stability_regions(Leapfrog())
    assert boundary(ax) == []
    ends = [line.get_ydata() for line in ax.lines if line.get_linewidth() == 3 and len(line.get_ydata())]
    assert max(max(y) for y in ends) == pytest.approx(1, abs=1e-8)
    assert min(min(y) for y in ends) == pytest.approx(-1, abs=1e-8)


def test_more_methods_than_colours_stay_distinct():
    styles = list(itertools.islice(plots.looks(0), 2 * len(plots.COLORS)))
    assert len(set(styles)) == len(styles)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="solvers must name at least one method"):
        plots.stability_regions([])
    with pytest.raises(ValueError, match="unknown solver 'rk5'"):
        plots.stability_regions("rk5")
    with pytest.raises(ValueError, match="has no stability region"):
        plots.stability_regions([LieTrotter("euler")])
    with pytest.raises(ValueError, match=r"extent must be \(left, right, bottom, top\)"):
        plots.stability_regions("rk4", extent=(1, -1, -1, 1))
    with pytest.raises(ValueError, match=r"extent must be \(left, right, bottom, top\)"):
        plots.stability_regions("rk4", extent=(-1, 1, 2))
    with pytest.raises(ValueError, match="eigenvalues must be finite"):
        plots.stability_regions("rk4", eigenvalues=[math.nan])
    with pytest.raises(ValueError, match="resolution must be an int of at least 2, got 1"):
        plots.stability_regions("rk4", resolution=1)
    with pytest.raises(TypeError, match="ax must be matplotlib Axes or None, got str"):
        plots.stability_regions("rk4", "ab3")


STARTS = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.mark.parametrize("suffix", STARTS)
def test_save_writes_the_format_of_the_suffix_and_leaves_nothing_beside(suffix, tmp_path):
    ax = plots.stability_regions("euler", resolution=21)
    path = tmp_path / f"region{suffix}"
    assert plots.save(ax, path) == path
    assert plots.save(ax.figure, str(path)) == path
    assert path.read_bytes().startswith(STARTS[suffix])
    assert list(tmp_path.iterdir()) == [path]


def test_save_renames_so_that_a_reader_of_the_old_file_keeps_it(tmp_path):
    path, reader = tmp_path / "a.png", tmp_path / "reader"
    path.write_text("old")
    reader.hardlink_to(path)
    plots.save(Figure(), path)
    assert reader.read_text() == "old" and path.read_bytes().startswith(STARTS[".png"])


def test_axes_on_a_part_of_a_figure_save_the_figure(tmp_path):
    part = Figure().subfigures(1, 2)[0]
    assert plots.save(part.add_subplot(), tmp_path / "a.PNG").exists()


def test_a_save_that_fails_keeps_the_old_file(tmp_path):
    class Broken(Figure):
        def savefig(self, path, **options):
            path.write_text("half")
            raise OSError("disk full")

    path = tmp_path / "a.png"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"):
        plots.save(Broken(), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["region.xyz", "region", ".png"])
def test_save_refuses_an_unknown_format(name, tmp_path):
    with pytest.raises(ValueError, match=r"path must end in one of .*\.pdf.*\.png.*got"):
        plots.save(Figure(), tmp_path / name)
    with pytest.raises(TypeError, match="figure must be a matplotlib Figure or Axes, got str"):
        plots.save("region", tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_drawing_and_saving_do_not_import_pyplot(tmp_path):
    code = (f"import sys; from odeformer import plots; plots.save(plots.stability_regions('rk4', resolution=21), "
            f"{str(tmp_path / 'a.png')!r}); assert 'matplotlib.pyplot' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
