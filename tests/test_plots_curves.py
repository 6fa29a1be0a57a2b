"""Curves, costs, steps and heat maps of odeformer.plots: what is drawn against plain formulas."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection, QuadMesh

from odeformer import plots
from solvers import solve


def named(ax):
    """{label: line}."""
    return {line.get_label(): line for line in ax.lines}


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def mesh(ax):
    (cells,) = [c for c in ax.collections if isinstance(c, QuadMesh)]
    return cells


# ---- over depth


def test_over_depth_draws_the_median_and_the_middle_80_percent_without_missing_numbers():
    values = np.arange(33.0).reshape(3, 11)
    values[1, 5:] = math.nan  # leaves 11 ... 15
    ax = plots.over_depth({"cosine": values}, depths=[0, 0.5, 2], label="cosine")
    line = named(ax)["cosine"]
    np.testing.assert_array_equal(line.get_xdata(), [0, 0.5, 2])
    np.testing.assert_allclose(line.get_ydata(), [5, 13, 27])
    (band,) = [c for c in ax.collections if isinstance(c, PolyCollection)]
    corners = band.get_paths()[0].vertices
    for l, low, high in ((0, 1, 9), (0.5, 11.4, 14.6), (2, 23, 31)):
        here = corners[corners[:, 0] == l][:, 1]
        np.testing.assert_allclose([here.min(), here.max()], [low, high])
    assert ax.get_ylabel() == "cosine" and ax.get_yscale() == "linear"


def test_over_depth_leaves_a_gap_where_all_is_missing_and_no_band_for_single_numbers():
    ax = plots.over_depth([[1.0], [math.nan], [3.0]])
    (line,) = ax.lines
    np.testing.assert_array_equal(line.get_ydata(), [1, math.nan, 3])
    np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2])
    assert not ax.collections and ax.get_legend() is None


def test_gradient_norms_are_logarithmic_and_refuse_zero():
    ax = plots.gradient_norms({"pre": [1.0, 10.0], "post": [1.0, 0.1]})
    assert ax.get_yscale() == "log" and labels(ax) == ["pre", "post"]
    with pytest.raises(ValueError, match=r"values\['pre'\] must be above 0 for scale 'log'"):
        plots.gradient_norms({"pre": [1.0, 0.0]})


@pytest.mark.parametrize(("part", "largest"), [("real", [3, -1]), ("imaginary", [2, 5]),
                                               ("modulus", [math.sqrt(13), math.sqrt(26)])])
def test_spectra_draw_every_eigenvalue_and_the_largest(part, largest):
    λ = torch.tensor([[3 - 2j, -1 + 2j, complex(math.nan, math.nan)], [-1 + 5j, -1 - 5j, -4]], dtype=torch.complex128)
    ax = plots.spectra(λ, depths=[0, 2], part=part, limits={"euler": -2.0})
    assert len(ax.collections[0].get_offsets()) == 5
    np.testing.assert_allclose(ax.lines[0].get_ydata(), largest)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0, 2])
    np.testing.assert_array_equal(named(ax)["euler"].get_ydata(), [-2, -2])


def test_training_curves_smooth_by_the_corrected_exponential_mean():
    values = np.array([4.0, math.nan, 1.0, 2.0])
    ax = plots.training_curves({"run": ([10, 20, 30, 40], values)}, smoothing=0.5, scale="linear")
    w = 0.5
    expected = [4, 4, (w**2 * 4 + 1) / (w**2 + 1), (w**3 * 4 + w * 1 + 2) / (w**3 + w + 1)]
    np.testing.assert_allclose(named(ax)["run"].get_ydata(), expected)
    faded = ax.lines[0]
    np.testing.assert_array_equal(faded.get_ydata(), values)
    assert faded.get_alpha() < 0.5 and labels(ax) == ["run"]
    (plain,) = plots.training_curves(([1, 2], [3.0, 4.0])).lines
    np.testing.assert_array_equal(plain.get_xydata(), [[1, 3], [2, 4]])


def test_curves_refuse_what_does_not_fit_with_a_sentence():
    for call, message in (
        (lambda: plots.over_depth(3.0), r"values must have the shape \(points, \.\.\.\) with no axis empty, got \(\)"),
        (lambda: plots.over_depth({}), "there must be at least one entry to draw"),
        (lambda: plots.over_depth([1.0, math.inf]), "values must be finite or nan"),
        (lambda: plots.over_depth([1.0, 2.0], depths=[0]), "depths must be 2 increasing or decreasing numbers, one for "
                                                           "each of the points of values; got 1"),
        (lambda: plots.over_depth([1.0, 2.0], depths=[1, 1]), "got 2 that turn back"),
        (lambda: plots.over_depth([1.0], scale="cubic"), "scale must be 'linear' or 'log', got 'cubic'"),
        (lambda: plots.spectra([1.0, 2.0], part="real part"), "unknown part 'real part'"),
        (lambda: plots.spectra([1.0], part=3), "part must be one of real, imaginary, modulus, got 3"),
        (lambda: plots.spectra([1.0], limits={"euler": math.inf}), r"limits\['euler'\] must be finite"),
        (lambda: plots.training_curves({"a": ([1, 2], [1.0])}),
         r"steps and values of curves\['a'\] must be equally long"),
        (lambda: plots.training_curves({"a": [1, 2, 3]}),
         r"curves\['a'\] must be a pair \(steps, values\), got list of length 3"),
        (lambda: plots.training_curves(([1], [0.0])), "values of curves must be above 0 for scale 'log'"),
        (lambda: plots.training_curves(([1], [1.0]), smoothing=1.0), "smoothing must be below 1"),
        (lambda: plots.training_curves(([1], [1.0]), scale="x"), "scale must be 'linear' or 'log'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for value in ("text", object(), [[1, 2], [3]], [1j], None):
        with pytest.raises(TypeError, match="values must be an array, a tensor or nested lists of real numbers"):
            plots.over_depth(value)


# ---- cost


def test_error_against_nfe_draws_the_points_and_leaves_out_what_has_no_logarithm():
    ax = plots.error_against_nfe({"rk4": ([4, 8, 16, 32], [1e-2, math.inf, 0.0, 1e-5]), "euler": ([1, 2], [1, 0.5])})
    np.testing.assert_array_equal(named(ax)["rk4"].get_xydata(), [[4, 1e-2], [32, 1e-5]])
    np.testing.assert_array_equal(named(ax)["euler"].get_xydata(), [[1, 1], [2, 0.5]])
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_xlabel()) == ("log", "log", "NFE")


@pytest.mark.parametrize("order", [1, 2, 4, 8])
def test_lines_of_an_order_fall_by_nfe_to_its_power_and_stay_within_the_data(order):
    ax = plots.error_against_nfe(([10, 1000], [1.0, 1e-6]), orders=[order])
    (x0, y0), (x1, y1) = ax.lines[1].get_xydata()
    assert (x0, y0) == (10, 1)
    assert math.log(y1 / y0) / math.log(x1 / x0) == pytest.approx(-order)
    assert x1 <= 1000 * (1 + 1e-12) and y1 >= 1e-6 * (1 - 1e-9)
    assert ax.texts[0].get_text() == f"order {order}"


def test_work_precision_has_precision_across_and_work_upwards():
    ax = plots.work_precision({"dopri5": ([10, 100], [1e-2, 1e-6])}, work="time (s)")
    np.testing.assert_array_equal(named(ax)["dopri5"].get_xydata(), [[1e-2, 10], [1e-6, 100]])
    assert ax.xaxis_inverted() and ax.get_ylabel() == "time (s)" and ax.get_xscale() == "log"
    plots.work_precision({"tsit5": ([10], [1e-3])}, ax)
    assert ax.xaxis_inverted() and labels(ax) == ["dopri5", "tsit5"]


def test_costs_refuse_what_has_no_place_on_logarithmic_axes():
    for draw in (plots.error_against_nfe, plots.work_precision):
        for pair, message in ((([0], [1.0]), "must be positive"), (([1], [-1.0]), "not negative"),
                              (([1], [math.nan]), "must hold a finite number above 0"),
                              (([1, 2], [1.0]), "must be equally long"), (([], []), "no axis empty")):
            with pytest.raises(ValueError, match=message):
                draw({"a": pair})
    with pytest.raises(TypeError, match=r"orders must be an int, got 1\.5"):
        plots.error_against_nfe(([1, 2], [1.0, 0.1]), orders=[1.5])


def dominated(cost, score, i):
    """By the definition, in plain Python."""
    return any(c <= cost[i] and s >= score[i] and (c < cost[i] or s > score[i])
               for c, s in zip(cost, score, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_the_pareto_front_is_what_no_other_point_dominates(seed):
    generator = np.random.default_rng(seed)
    cost, score = generator.integers(1, 8, 30), generator.integers(0, 8, 30)  # with ties and twins
    expected = [not dominated(cost.tolist(), score.tolist(), i) for i in range(30)]
    assert plots.pareto_front(cost, score).tolist() == expected
    assert plots.pareto_front(cost, -score, maximise=False).tolist() == expected


def test_pareto_draws_the_front_as_a_step_line_and_fades_what_is_dominated():
    ax = plots.pareto({"euler": ([1, 2, 4], [0.5, 0.8, 0.7]), "rk4": ([4, 8], [0.9, 0.85])})
    line = named(ax)["Pareto front"]
    np.testing.assert_array_equal(line.get_xydata(), [[1, 0.5], [2, 0.8], [4, 0.9], [8, 0.9]])
    assert line.get_drawstyle() == "steps-post"
    np.testing.assert_array_equal(named(ax)["euler"].get_xydata(), [[1, 0.5], [2, 0.8]])
    np.testing.assert_array_equal(named(ax)["rk4"].get_xydata(), [[4, 0.9]])
    faded = np.concatenate([x.get_xydata() for x in ax.lines if (x.get_alpha() or 1) < 1])
    np.testing.assert_array_equal(faded, [[4, 0.7], [8, 0.85]])
    assert ax.get_xscale() == "linear"
    assert plots.pareto(([1, 10], [1, 2])).get_xscale() == "log"
    with pytest.raises(ValueError, match="cost and score must be equally long, got 2 and 1"):
        plots.pareto_front([1, 2], [1])
    with pytest.raises(ValueError, match="score of points must be finite"):
        plots.pareto(([1.0], [math.nan]))
    with pytest.raises(ValueError, match=r"must have the shape \(points\)"):
        plots.pareto({"a": ([1.0], [[1.0]])})


# ---- steps


def test_step_sizes_are_stairs_between_the_depths_of_a_real_solve():
    solution = solve(lambda z, l: -z * (1 + l), torch.ones(3, dtype=torch.float64), span=(1.0, 3.0), solver="dopri5",
                     rtol=1e-6, atol=1e-9)
    ax = plots.step_sizes({"dopri5": solution})
    stair = ax.lines[0]
    assert stair.get_drawstyle() == "steps-post" and ax.get_yscale() == "log"
    x, y = stair.get_xydata().T
    assert x[0] == pytest.approx(1.0) and x[-1] == pytest.approx(3.0)
    np.testing.assert_allclose(np.diff(x), solution.steps)
    np.testing.assert_allclose(y[:-1], solution.steps)


def test_step_sizes_of_rows_backward_spans_and_rejected_trials():
    rows = SimpleNamespace(steps=[[0.5, 0.5], [0.25, 0.75]], l=1.0, n_rejected=3)
    rejected = {"back": ([0.0, -1.0], [-2.0, -3.0])}
    ax = plots.step_sizes({"rows": rows, "back": [-1.0, -2.0]}, rejected=rejected, start=3.0)
    assert labels(ax) == ["rows (3 rejected)", "back", "rejected"]
    stairs = [line.get_xydata() for line in ax.lines if line.get_drawstyle() == "steps-post"]
    np.testing.assert_allclose(stairs[1], [[0, 0.25], [0.25, 0.75], [1, 0.75]])
    np.testing.assert_allclose(stairs[2], [[3, 1], [2, 2], [0, 2]])
    np.testing.assert_array_equal(named(ax)["rejected"].get_xydata(), [[0, 2], [-1, 3]])


def test_step_sizes_refuse_what_is_none():
    with pytest.raises(ValueError, match="steps of 'a' must be all positive or all negative"):
        plots.step_sizes({"a": [0.5, -0.5]})
    with pytest.raises(ValueError, match=r"steps must have the shape \(steps\)"):
        plots.step_sizes([])
    with pytest.raises(ValueError, match="rejected must be for some of a; got 'b'"):
        plots.step_sizes({"a": [0.5]}, rejected={"b": ([0], [1])})


# ---- heat maps


def test_the_local_error_of_a_token_in_a_step_lies_in_its_cell_and_padding_is_grey():
    errors = torch.tensor([[1e-3, 1e-1, 1.0], [1e-2, math.nan, 0.0]])
    ax = plots.local_errors(errors, edges=[0, 0.5, 2])
    cells = mesh(ax)
    shown = cells.get_array()
    np.testing.assert_allclose(np.ma.filled(shown, -1), [[1e-3, 1e-2], [1e-1, -1], [1, -1]], rtol=1e-6)
    np.testing.assert_array_equal(cells.get_coordinates()[0, :, 0], [0, 0.5, 2])
    np.testing.assert_array_equal(cells.get_coordinates()[:, 0, 1], [-0.5, 0.5, 1.5, 2.5])
    assert (cells.norm.vmin, cells.norm.vmax) == pytest.approx((1e-3, 1.0))
    assert ax.get_facecolor()[:3] == pytest.approx((0.85,) * 3)
    assert cells.norm(0.1) == pytest.approx(2 / 3)  # logarithmic


def test_attention_entropy_has_heads_upwards_and_ends_at_the_entropy_of_equal_weights():
    entropy = [[0.0, 0.5], [1.0, math.log(4)], [0.1, 0.2]]
    ax = plots.attention_entropy(entropy, n_keys=4)
    cells = mesh(ax)
    np.testing.assert_array_equal(cells.get_array(), np.transpose(entropy))
    assert (cells.norm.vmin, cells.norm.vmax) == pytest.approx((0, math.log(4)))
    with pytest.raises(ValueError, match=r"entropy must be at most log\(n_keys\) = 1.099, got 1.386"):
        plots.attention_entropy(entropy, n_keys=3)
    with pytest.raises(ValueError, match="entropy must not be negative"):
        plots.attention_entropy([[-0.5]])
    with pytest.raises(ValueError, match=r"entropy must have the shape \(layers, heads\)"):
        plots.attention_entropy([0.5])


def test_an_attention_map_has_the_first_query_on_top():
    weights = np.array([[1.0, math.nan, math.nan], [0.5, 0.5, math.nan], [0.2, 0.3, 0.5]])
    ax = plots.attention_map(weights, tokens=["the", "cat", "sat"])
    np.testing.assert_array_equal(np.ma.filled(mesh(ax).get_array(), math.nan), weights)
    bottom, top = ax.get_ylim()
    assert bottom > top and [t.get_text() for t in ax.get_yticklabels()] == ["the", "cat", "sat"]
    with pytest.raises(ValueError, match="tokens must be 3 names, one for each key; got 2"):
        plots.attention_map(weights, tokens=["a", "b"])
    with pytest.raises(ValueError, match="weights must not be negative"):
        plots.attention_map([[-1.0]])


def test_local_errors_refuse_what_has_no_logarithm():
    for errors, message in (([[-1.0]], "errors must not be negative"), ([[0.0]], "must hold a number above 0"),
                            ([1.0], r"errors must have the shape \(steps, tokens\)")):
        with pytest.raises(ValueError, match=message):
            plots.local_errors(errors)
    with pytest.raises(ValueError, match="depths must be 3 increasing or decreasing numbers"):
        plots.local_errors([[1.0], [2.0]], edges=[0, 1])
