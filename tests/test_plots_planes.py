"""Planes of odeformer.plots: stability regions with eigenvalues by depth, order stars, paths and phase portraits."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.contour import ContourSet
from matplotlib.quiver import Quiver

from odeformer import plots
from solvers import get_solver, solve


def contour(ax, *, filled):
    (found,) = [c for c in ax.collections if isinstance(c, ContourSet) and c.filled == filled]
    return found


def boundary(ax):
    return np.concatenate([path.vertices for path in contour(ax, filled=False).get_paths()]) @ [1, 1j]


def one(ax, kind):
    (found,) = [c for c in ax.collections if type(c) is kind]
    return found


# ---- stability regions


def test_the_boundary_of_euler_is_the_circle_around_minus_1_through_minus_2():
    z = boundary(plots.stability_regions("euler"))
    np.testing.assert_allclose(np.abs(z + 1), 1, atol=2e-3)
    assert np.abs(z + 2).min() < 0.02


def test_the_boundary_of_a_multistep_method_is_its_root_locus():
    """ab2: h λ = (ζ² - ζ) / (3/2 ζ - 1/2) with |ζ| = 1 (Hairer & Wanner 1996, V.1)."""
    ζ = np.exp(1j * np.linspace(0, 2 * math.pi, 20001))
    locus = (ζ**2 - ζ) / (1.5 * ζ - 0.5)
    drawn = boundary(plots.stability_regions("ab2"))
    assert max(np.abs(locus - z).min() for z in drawn) < 5e-3
    assert drawn.real.min() == pytest.approx(-1, abs=5e-3)


def test_eigenvalues_are_coloured_by_their_layer_and_missing_ones_left_out():
    nan = complex(math.nan, math.nan)
    λ = torch.tensor([[-1 + 1j, -2, nan], [-3j, nan, 0.5]], dtype=torch.complex64)
    ax = plots.stability_regions(["euler", "rk4"], eigenvalues=λ, depths=[0.5, 4.0])
    dots = one(ax, PathCollection)
    np.testing.assert_allclose(dots.get_offsets() @ [1, 1j], [-1 + 1j, -2, -3j, 0.5])
    np.testing.assert_array_equal(dots.get_array(), [0.5, 0.5, 4, 4])
    bars = [axes for axes in ax.figure.axes if axes is not ax]
    assert [bar.get_ylabel() for bar in bars] == ["depth l (layers)"]


def test_eigenvalues_that_do_not_fit_their_depths_are_refused():
    with pytest.raises(ValueError, match="depths are those of eigenvalues, and there are none"):
        plots.stability_regions("rk4", depths=[0, 1])
    with pytest.raises(ValueError, match="depths must be 2 increasing or decreasing numbers, one for each of"):
        plots.stability_regions("rk4", eigenvalues=[[-1.0], [-2.0]], depths=[0, 1, 2])
    with pytest.raises(ValueError, match="eigenvalues must be finite or nan"):
        plots.stability_regions("rk4", eigenvalues=[[math.inf]], depths=[0])


# ---- order stars


def sectors(ax, radius):
    """Parts of a small circle around 0 that lie in the star."""
    circle = radius * np.exp(1j * np.linspace(0, 2 * math.pi, 2000, endpoint=False))
    points = np.stack([circle.real, circle.imag], 1)
    inside = np.logical_xor.reduce([p.contains_points(points) for p in contour(ax, filled=True).get_paths()])
    return int((inside & ~np.roll(inside, 1)).sum())


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("kutta3", 3), ("rk4", 4),
                                               ("trapezoid", 2), ("backward_euler", 1), ("gauss4", 4)])
def test_an_order_star_has_one_sector_more_than_the_order_near_0(solver, order):
    ax = plots.order_star(solver, extent=(-1.5, 1.5, -1.5, 1.5), resolution=301)
    assert sectors(ax, 0.4) == order + 1 == get_solver(solver).order + 1


def test_on_the_boundary_of_an_order_star_the_method_grows_as_the_solution():
    z = boundary(plots.order_star("rk4", extent=(-3, 3, -3, 3)))
    growth = np.abs(np.polyval([1 / 24, 1 / 6, 1 / 2, 1, 1], z)) / np.exp(z.real)
    away = np.abs(z) > 0.5  # near 0 the star's lines meet, closer than the grid
    np.testing.assert_allclose(growth[away], 1, atol=5e-3)


def test_zeros_and_poles_of_order_stars_are_where_they_belong():
    ax = plots.order_star("rk4")
    marks = {line.get_label(): line.get_xydata() @ [1, 1j] for line in ax.lines}
    roots = np.roots([1 / 24, 1 / 6, 1 / 2, 1, 1])
    assert np.abs(np.sort_complex(marks["zeros of R"]) - np.sort_complex(roots)).max() < 1e-6
    assert "poles of R" not in marks
    marks = {line.get_label(): line.get_xydata() @ [1, 1j] for line in plots.order_star("trapezoid").lines}
    np.testing.assert_allclose(marks["zeros of R"], [-2])  # R = (1 + z/2) / (1 - z/2)
    np.testing.assert_allclose(marks["poles of R"], [2])


def test_the_order_star_of_an_a_stable_method_leaves_the_imaginary_axis_alone():
    ax = plots.order_star("backward_euler", resolution=201)
    axis = np.stack([np.full(50, -0.03), np.linspace(0.6, 4.9, 50)], 1)
    inside = np.logical_xor.reduce([p.contains_points(axis) for p in contour(ax, filled=True).get_paths()])
    assert not inside.any()


def test_order_stars_are_of_methods_with_a_tableau():
    with pytest.raises(ValueError, match="'ab3' has no tableau"):
        plots.order_star("ab3")
    with pytest.raises(ValueError, match="extent must be"):
        plots.order_star("rk4", extent=(1, 0, 0, 1))
    with pytest.raises(ValueError, match="resolution must be an int of at least 2"):
        plots.order_star("rk4", resolution=True)
    tableau = get_solver("rk4").tableau
    assert np.array_equal(boundary(plots.order_star(tableau)), boundary(plots.order_star("rk4")))


# ---- numerical ranges


def test_the_numerical_range_of_a_nilpotent_matrix_is_a_disc_and_is_drawn_closed():
    """W([[0, 2], [0, 0]]) is the unit disc, its eigenvalues 0 (Horn & Johnson 1991, 1.3)."""
    circle = np.exp(2j * math.pi * np.arange(16) / 16)
    ax = plots.numerical_ranges(torch.tensor(np.stack([circle, 3 * circle])), eigenvalues=[[0, 0], [0, math.nan]],
                                depths=[0, 5])
    lines = one(ax, LineCollection)
    for row, radius in zip(lines.get_segments(), (1, 3), strict=True):
        np.testing.assert_allclose(np.hypot(*row.T), radius)
        np.testing.assert_array_equal(row[0], row[-1])
        assert len(row) == 17
    np.testing.assert_array_equal(lines.get_array(), [0, 5])
    bounds, dots = ax.get_xlim(), one(ax, PathCollection)
    np.testing.assert_array_equal(dots.get_array(), [0, 0, 5])
    ax = plots.numerical_ranges([circle, circle], eigenvalues=[[math.nan], [0.5]])
    assert one(ax, PathCollection).norm(1.0) == one(ax, LineCollection).norm(1.0) == 1.0  # layer 0 has none
    assert -4 < bounds[0] < -3 and 3 < bounds[1] < 4
    with pytest.raises(ValueError, match="points must have at least three angles to a layer, got 2"):
        plots.numerical_ranges([[1, 2]])
    with pytest.raises(ValueError, match="eigenvalues must be those of 1 layers, as many as points has; got 2"):
        plots.numerical_ranges([[1, 1j, -1]], eigenvalues=[[0], [0]])


# ---- paths


def test_principal_directions_are_those_of_the_singular_value_decomposition():
    x = np.random.default_rng(0).normal(size=(40, 5)) * [5, 3, 1, 0.5, 0.1] + 7
    mean, directions, shares = plots.principal_directions(torch.tensor(x), 3)
    covariance = np.cov(x.T)
    values, vectors = np.linalg.eigh(covariance)
    np.testing.assert_allclose(mean, x.mean(0))
    np.testing.assert_allclose(shares, values[::-1][:3] / values.sum())
    np.testing.assert_allclose(np.abs(directions @ vectors[:, ::-1][:, :3]), np.eye(3), atol=1e-8)
    assert (directions[np.arange(3), np.abs(directions).argmax(1)] > 0).all()
    with pytest.raises(ValueError, match="3 principal directions need at least 3 points and coordinates"):
        plots.principal_directions(x[:, :2], 3)


def test_trajectories_are_projections_of_each_token_without_padding():
    generator = np.random.default_rng(1)
    z = generator.normal(size=(4, 2, 3, 6))
    mask = np.array([[True, True, False], [True, True, True]])
    z[:, 0, 2] = math.nan
    ax = plots.trajectories(torch.tensor(z), depths=[0, 1, 2, 5], mask=torch.tensor(mask))
    segments = np.array(one(ax, LineCollection).get_segments()).reshape(5, 3, 2, 2)
    tokens = z[:, mask]  # (points, tokens, d)
    flat = tokens.reshape(-1, 6)
    u, s, _ = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    scores = (u * s)[:, :2].reshape(4, 5, 2)
    for k in range(5):
        path = np.concatenate([segments[k, :, 0], segments[k, -1:, 1]])
        np.testing.assert_allclose(np.abs(path), np.abs(scores[:, k]), atol=1e-10)
    np.testing.assert_allclose(one(ax, LineCollection).get_array(), np.tile([0.5, 1.5, 3.5], 5))
    share = s[0] ** 2 / (s**2).sum()
    assert ax.get_xlabel() == f"PC 1 ({share:.0%} of the variance)"
    assert [line.get_label() for line in ax.lines] == ["l = 0", "l = 5"]


def test_a_solution_brings_its_states_and_depths():
    path = solve(lambda z, l: torch.stack([-z[..., 1], z[..., 0]], -1), torch.eye(2, dtype=torch.float64),
                 span=(1.0, 2.0), n_steps=8, save_at="steps")
    ax = plots.trajectories(path)
    assert [line.get_label() for line in ax.lines] == ["l = 1", "l = 2"]
    with pytest.raises(ValueError, match="the Solution holds no states"):
        plots.trajectories(SimpleNamespace(states=None))


def test_trajectories_refuse_what_is_no_path():
    for states in (np.zeros((1, 3)), np.zeros((4, 2, 1)), np.zeros(3)):
        with pytest.raises(ValueError, match=r"states must have the shape \(points, \.\.\., d_model\)"):
            plots.trajectories(states)
    with pytest.raises(ValueError, match="states must be finite at real tokens"):
        plots.trajectories(np.full((2, 3, 2), math.nan))
    with pytest.raises(ValueError, match=r"mask must be bool with the shape \(3,\)"):
        plots.trajectories(np.zeros((2, 3, 2)), mask=np.ones((2, 3), dtype=bool))


# ---- phase portraits

SADDLE = torch.tensor([[1.0, 0.0], [0.0, -2.0]], dtype=torch.float64)


def saddle(z, l):
    return z @ SADDLE.T * (1 + l)


def test_arrows_point_along_the_field_and_their_colour_is_its_norm():
    ax = plots.phase_portrait(saddle, origin=torch.zeros(2, dtype=torch.float64), directions=np.eye(2), l=1.0,
                              extent=(-2, 2, -1, 1), resolution=9)
    arrows = one(ax, Quiver)
    x, y = arrows.XY.T
    assert len(x) == 9 * 5
    expected = np.stack([2 * x, -4 * y], 1)
    norm = np.hypot(*expected.T)
    np.testing.assert_allclose(arrows.get_array(), norm, atol=1e-12)
    np.testing.assert_allclose(np.stack([arrows.U, arrows.V], 1) * norm[:, None], expected, atol=1e-12)
    assert (ax.get_xlim(), ax.get_ylim()) == ((-2, 2), (-1, 1))
    assert arrows.get_clim() == (0, np.quantile(norm, 0.95)) and arrows.colorbar.extend == "neither"


def test_a_plane_in_a_larger_space_sees_the_part_of_the_field_in_it():
    """Directions are made orthonormal; f = A z at origin + x u + y v, projected."""
    generator = np.random.default_rng(2)
    a, origin, directions = (generator.normal(size=size) for size in ((6, 6), (2, 3), (2, 2, 3)))
    matrix = torch.tensor(a)
    ax = plots.phase_portrait(lambda z, l: (z.flatten(1) @ matrix.T).view_as(z), origin=torch.tensor(origin),
                              directions=directions, extent=(-1, 1, -1, 1), resolution=3)
    arrows = one(ax, Quiver)
    assert arrows.colorbar.extend == "max"  # one of nine is beyond the 95 % that the colours show
    u, v = directions.reshape(2, 6)
    u = u / np.linalg.norm(u)
    v = v - (v @ u) * u
    v = v / np.linalg.norm(v)
    for (x, y), speed in zip(arrows.XY, arrows.get_array(), strict=True):
        k = a @ (origin.ravel() + x * u + y * v)
        assert speed == pytest.approx(math.hypot(k @ u, k @ v), rel=1e-9)


def test_states_are_drawn_on_the_plane_in_their_own_dtype():
    seen = []

    def f(z, l):
        seen.append((z.dtype, l.dtype, tuple(z.shape[1:])))
        return z

    states = torch.randn(5, 3, 4, 2, generator=torch.Generator().manual_seed(0))
    ax = plots.phase_portrait(f, states=SimpleNamespace(states=states, depths=[0, 1, 2, 3, 4]), resolution=4)
    assert set(seen) == {(torch.float32, torch.float32, (4, 2))}
    flat = states.double().numpy().reshape(15, 8)
    mean, directions, _ = plots.principal_directions(flat)
    points = ((flat - mean) @ directions.T).reshape(5, 3, 2)
    np.testing.assert_allclose(ax.lines[0].get_xydata(), points[0], atol=1e-6)
    np.testing.assert_allclose(ax.lines[1].get_xydata(), points[-1], atol=1e-6)
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    assert left < points[..., 0].min() and right > points[..., 0].max()
    assert bottom < points[..., 1].min() and top > points[..., 1].max()


def test_phase_portraits_refuse_what_makes_no_plane():
    origin, plane = np.zeros(2), np.eye(2)
    for call, message in (
        (lambda: plots.phase_portrait(saddle, origin=origin), "a plane needs states, or both origin and directions"),
        (lambda: plots.phase_portrait(saddle, origin=origin, directions=np.ones((2, 2))), "must not be parallel"),
        (lambda: plots.phase_portrait(saddle, origin=origin, directions=np.zeros((2, 3))),
         r"directions must have the shape \(2, 2\), got \(2, 3\)"),
        (lambda: plots.phase_portrait(saddle, states=np.zeros((3, 2, 2)), origin=np.zeros(3)),
         r"origin must have the shape of a state, \(2,\), got \(3,\)"),
        (lambda: plots.phase_portrait(saddle, states=np.zeros((3, 2))),
         r"states must have the shape \(points, paths, d, \.\.\.\)"),
        (lambda: plots.phase_portrait(lambda z, l: z[:1], origin=origin, directions=plane),
         "f must return an increment shaped like its state"),
        (lambda: plots.phase_portrait(lambda z, l: z / 0, origin=origin, directions=plane), "f must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
