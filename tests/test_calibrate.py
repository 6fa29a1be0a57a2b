"""calibrate_grid: where the points fall, and that they beat equal steps where the dynamics are uneven."""

import itertools
import math

import pytest
import torch
from scipy.integrate import solve_ivp

from solvers import SolverError, calibrate_grid, get_solver, solve

F64 = torch.float64


def spin(z, l):
    """A rotation by 10 in all that speeds up a hundredfold around l = 0.3."""
    rate = 1 + 80 * torch.exp(-(((l - 0.3) / 0.05) ** 2) / 2)
    return rate * torch.stack([z[..., 1], -z[..., 0]], -1)


def van_der_pol(z, l):
    return torch.stack([z[..., 1], 5 * (1 - z[..., 0] ** 2) * z[..., 1] - z[..., 0]], -1)


def kepler(z, l):
    x, v = z[..., :2], z[..., 2:]
    return torch.cat([v, -x / x.square().sum(-1, keepdim=True) ** 1.5], -1)


ORBIT = [0.3, 0.0, 0.0, math.sqrt(1.7 / 0.3)]  # eccentricity 0.7
# field, start, span, steps, how much better rk4 must at least be
UNEVEN = {"spin": (spin, [1.0, 0.0], (0.0, 1.0), 60, 100), "backwards": (spin, [1.0, 0.0], (1.0, 0.0), 60, 100),
          "van_der_pol": (van_der_pol, [2.0, 0.0], (0.0, 11.0), 160, 10),
          "kepler": (kepler, ORBIT, (0.0, 6.3), 100, 20)}


def exact(f, z0, span):
    out = solve_ivp(lambda l, z: f(torch.tensor(z)[None], torch.tensor(l, dtype=F64))[0].numpy(), span, z0,
                    method="DOP853", rtol=1e-12, atol=1e-13)
    return torch.tensor(out.y[:, -1])


@pytest.mark.parametrize("name", list(UNEVEN))
def test_a_calibrated_grid_beats_equal_steps_at_equal_nfe(name):
    f, start, span, n, factor = UNEVEN[name]
    z0, reference = torch.tensor([start], dtype=F64), exact(f, start, span)
    grid = calibrate_grid(f, z0, span=span, n_steps=n)
    runs = [solve(f, z0, span=span, solver="rk4", **how) for how in ({"n_steps": n}, {"grid": grid})]
    uniform, calibrated = ((run.z[0] - reference).norm().item() for run in runs)
    assert runs[0].nfe == runs[1].nfe == 4 * n
    assert calibrated < uniform / factor
    assert calibrated < 0.02


def test_the_errors_of_the_steps_are_equal_where_it_matters():
    # the error of each rk4 step, against four shorter ones: within a factor of 5 of the median, which is the noise of
    # an estimate read from steps of dopri5
    z0 = torch.tensor([[1.0, 0.0]], dtype=F64)
    grid = calibrate_grid(spin, z0, span=(0.0, 1.0), n_steps=60)
    errors, z = [], z0
    for a, b in itertools.pairwise(grid):
        one, two = (solve(spin, z, span=(a, b), n_steps=k).z for k in (1, 4))
        errors.append((one - two).norm().item())
        z = two
    burst = [e for e, l in zip(errors, grid, strict=False) if 0.22 < l < 0.38]
    assert len(burst) > 35 and max(errors) < 5 * sorted(burst)[len(burst) // 2]


def test_the_density_is_the_fifth_root_of_the_error_density():
    # the same course twice, the second time 2^5 times as large: so is the error, and points are twice as dense, but for
    # the tenth of the mean density (1.5) that is added
    def f(z, l):
        return torch.where(l < 1.0, 1.0, 32.0) * torch.ones_like(z) * torch.exp(2 * (l % 1.0))

    grid = calibrate_grid(f, torch.zeros(1, 1, dtype=F64), span=(0.0, 2.0), n_steps=300, breakpoints=[1.0], rtol=0.0,
                          atol=1e-9)
    left = sum(l <= 1.0 for l in grid) - 1
    assert (300 - left) / left == pytest.approx((2 + 0.15) / (1 + 0.15), rel=0.05)


@pytest.mark.parametrize("span", [(0.0, 2.0), (2.0, 0.0), (-1.0, 3.0)])
@pytest.mark.parametrize("n", [3, 4, 17, None])
def test_a_grid_has_its_length_its_ends_and_every_jump(n, span):
    def f(z, l):
        return torch.where(l < 0.3, 1.0, -3.0) * z

    f.breakpoints = [0.3, 1.9]
    grid = calibrate_grid(f, torch.ones(1, 2, dtype=F64), span=span, n_steps=n)
    assert n is None or len(grid) == n + 1
    assert (grid[0], grid[-1]) == span and {0.3, 1.9} <= set(grid)
    sign = 1 if span[1] > span[0] else -1
    assert all((b - a) * sign > 0 for a, b in itertools.pairwise(grid))
    assert all(isinstance(x, float) for x in grid)
    solve(f, torch.ones(1, 2, dtype=F64), span=span, grid=grid)


def test_jumps_are_hit_to_the_bit():
    jumps = [k / 10 for k in range(1, 30)]
    for n in (None, 60):
        grid = calibrate_grid(van_der_pol, torch.tensor([[2.0, 0.0]], dtype=F64), span=(0.0, 3.0), n_steps=n,
                              breakpoints=jumps)
        assert set(jumps) <= set(grid)


def test_layers_are_boundaries_and_get_steps_in_proportion():
    def field(z, l):
        raise AssertionError

    def turn(rate):
        return lambda z, l: rate * torch.stack([z[..., 1], -z[..., 0]], -1)

    field.pieces = [(0.0, 1.0, turn(1.0)), (1.0, 2.0, turn(8.0)), (2.0, 3.0, turn(1.0))]
    grid = calibrate_grid(field, torch.tensor([[1.0, 0.0]]), span=(0.0, 3.0), n_steps=20)
    counts = [sum(k < l <= k + 1 for l in grid) for k in range(3)]
    assert sum(counts) == 20 and counts[1] >= 12 and min(counts) >= 1
    assert calibrate_grid(field, torch.tensor([[1.0, 0.0]]), span=(0.0, 3.0), n_steps=3) == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match=r"at least the number of pieces of f \(3\), got 2"):
        calibrate_grid(field, torch.tensor([[1.0, 0.0]]), span=(0.0, 3.0), n_steps=2)


def test_without_a_number_the_grid_is_the_adaptive_runs():
    z0 = torch.tensor([[2.0, 0.0]], dtype=F64)
    run = solve(van_der_pol, z0, span=(0.0, 4.0), solver="bosh3", rtol=1e-4, atol=1e-5)
    grid = calibrate_grid(van_der_pol, z0, span=(0.0, 4.0), solver="bosh3", rtol=1e-4, atol=1e-5)
    assert len(grid) == run.n_steps + 1
    for a, b in zip(itertools.accumulate(run.steps), grid[1:], strict=True):
        assert a == pytest.approx(b, abs=1e-12)


def test_a_steady_problem_gets_equal_steps():
    grid = calibrate_grid(lambda z, l: torch.stack([z[..., 1], -z[..., 0]], -1), torch.tensor([[1.0, 0.0]], dtype=F64),
                          span=(0.0, 10.0), n_steps=20)
    steps = [b - a for a, b in itertools.pairwise(grid)]
    assert max(steps) < 1.5 * min(steps)
    still = calibrate_grid(lambda z, l: 0 * z, torch.ones(1, 1), span=(0.0, 1.0), n_steps=4)
    assert still == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0], abs=1e-9)


def test_no_step_is_longer_than_eleven_mean_ones():
    # the field stands still but for a burst
    def f(z, l):
        rate = 300 * torch.exp(-(((l - 0.7) / 0.01) ** 2))
        return rate * torch.stack([z[..., 1], -z[..., 0]], -1)

    grid = calibrate_grid(f, torch.tensor([[1.0, 0.0]], dtype=F64), span=(0.0, 1.0), n_steps=50)
    assert max(b - a for a, b in itertools.pairwise(grid)) <= 11 / 50 + 1e-9


def test_padding_and_gradients_stay_out():
    z0 = torch.tensor([[[1.0, 0.0], [50.0, 50.0]]], dtype=F64, requires_grad=True)
    mask = torch.tensor([[True, False]])
    assert calibrate_grid(spin, z0, span=(0.0, 1.0), n_steps=12, mask=mask) == calibrate_grid(
        spin, z0[:, :1], span=(0.0, 1.0), n_steps=12)


def test_half_precision_states_and_autocast_get_a_grid():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert len(calibrate_grid(lambda z, l: -z, torch.ones(2, 4, dtype=dtype), span=(0.0, 1.0), n_steps=6)) == 7
    weight = torch.eye(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grid = calibrate_grid(lambda z, l: -(z @ weight).float(), torch.ones(2, 4), span=(0.0, 1.0), n_steps=6)
    assert len(grid) == 7


def test_wrong_arguments_are_refused():
    z0 = torch.ones(1, 2)
    for n in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="n_steps must be"):
            calibrate_grid(spin, z0, span=(0.0, 1.0), n_steps=n)
    with pytest.raises(ValueError, match="solver must be adaptive"):
        calibrate_grid(spin, z0, span=(0.0, 1.0), n_steps=4, solver="rk4")
    with pytest.raises(ValueError, match="one step for all rows"):
        calibrate_grid(spin, z0, span=(0.0, 1.0), n_steps=4, solver=get_solver("dopri54", per_sample=True))
    with pytest.raises(TypeError, match="z0"):
        calibrate_grid(spin, [1.0], span=(0.0, 1.0), n_steps=4)
    with pytest.raises(SolverError):
        calibrate_grid(lambda z, l: z * z, z0, span=(0.0, 2.0), n_steps=4)
