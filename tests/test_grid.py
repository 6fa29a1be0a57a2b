"""Where the steps of a given grid fall."""

from itertools import pairwise

import pytest
import torch

from odeformer import DepthConfig
from solvers import solve


def steps(grid):
    return solve(lambda z, l: -z, torch.ones(1, dtype=torch.float64), solver="euler", grid=grid).steps


@pytest.mark.parametrize("grid", [
    torch.tensor([1000.0, 1000.001, 1000.0016, 1000.003]), torch.tensor([0, 0.234375, 0.5, 0.78125, 1]).bfloat16(),
    torch.tensor([0.0, 0.25, 0.5002, 1.0]).half(), torch.tensor([0.0, 1.0, 2.0, 4.0]),
], ids=lambda x: str(x.dtype))
def test_a_tensor_that_is_uneven_on_purpose_stays_as_it_is(grid):
    given = grid.double().tolist()
    assert steps(grid) == [b - a for a, b in pairwise(given)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ends", [(0.0, 1.0), (-1.0, 2.0), (5.0, 3.0)])
def test_an_even_tensor_in_low_precision_is_even(ends, dtype):
    found = steps(torch.linspace(*ends, 8).to(dtype))
    a, b = (torch.tensor(x).to(dtype).item() for x in ends)
    assert found == pytest.approx([(b - a) / 7] * 7, rel=1e-12)


@pytest.mark.parametrize("n", [21, 41, 101])
def test_linspace_across_zero_is_even(n):
    assert steps(torch.linspace(-1, 1, n)) == pytest.approx([2 / (n - 1)] * (n - 1), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_whole_depths_may_be_integers(dtype):
    assert steps(torch.arange(4, dtype=dtype)) == [1.0, 1.0, 1.0]
    assert DepthConfig(grid=torch.arange(4, dtype=dtype)).grid == (0.0, 1.0, 2.0, 3.0)
