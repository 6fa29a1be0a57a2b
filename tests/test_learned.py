"""Learned coefficients: their starts, the order conditions in training, gradients, dense fusion (eq. 38)."""

import copy
import math

import pytest
import torch
from convergence import PROBLEMS, assert_order, orbit, orbit_exact

from solvers import SOLVERS, get_solver, solve
from solvers.dense import METHODS as DENSE
from solvers.learned import METHODS as LEARNED
from solvers.tableau import order_of

FAMILIES = {"rk2_family": 2, "rk3_family": 3, "rk4_family": 4}
ALL = [*LEARNED, *DENSE]
Z0 = torch.tensor([0.4, -0.9, 0.2], dtype=torch.float64)
# start of each family: the named method it begins as
STARTS = [("rk2_family", "midpoint"), ("rk2_family", "ralston2"), ("rk3_family", "ralston3"), ("rk3_family", "heun3"),
          ("rk4_family", "rk38")]


def field(z, l):
    return torch.sin(z) * (1 + l) - 0.5 * z.flip(-1)


def perturbed(solver, seed, size=2.0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in solver.parameters():
            p += size * torch.randn(p.shape, generator=generator)
    return solver


def coefficients(solver):
    a, b = solver.coefficients(*solver.free_nodes())
    return [[x.item() for x in row] for row in a], [x.item() for x in b]


# Making them


@pytest.mark.parametrize("name", ALL)
def test_each_call_by_name_makes_a_module_of_its_own(name):
    first, second = get_solver(name), get_solver(name)
    assert isinstance(first, torch.nn.Module)
    assert first is not second
    assert first is not SOLVERS[name]
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    assert get_solver(first) is first  # as it is, so that it trains
    assert list(first.parameters())


@pytest.mark.parametrize("name", ALL)
def test_learned_solvers_have_what_every_solver_has(name):
    solver = SOLVERS[name]
    assert solver.name == name
    assert (solver.embedded_order, solver.is_implicit, solver.is_adaptive, solver.is_reversible) == (None, *[False] * 3)
    assert solver.order == solver.attained_order()
    assert solve(field, Z0, solver=name, n_steps=5).nfe == solver.nfe(5)


def test_options_are_checked_where_they_are_given():
    assert get_solver("dense", n_steps=3).n_steps == 3
    with pytest.raises(ValueError, match="unknown option 'widow' for solver 'dense'; known: n_steps, initial, window"):
        get_solver("dense", widow=2)
    with pytest.raises(ValueError, match="options of 'dense' are set when it is made"):
        get_solver(get_solver("dense"), window=2)
    with pytest.raises(ValueError, match="n_steps must be a positive int, got 0"):
        get_solver("dense", n_steps=0)
    with pytest.raises(ValueError, match="initial must be one of residual, average, ab2, got 'ab3'"):
        get_solver("dense", initial="ab3")
    with pytest.raises(ValueError, match="links every step to the one before, which window = 1"):
        get_solver("dense", initial="ab2", window=1)
    with pytest.raises(ValueError, match="stride = 3 leaves no dense step among n_steps = 2"):
        get_solver("dense", n_steps=2, stride=3)
    with pytest.raises(ValueError, match="start must be one of ralston3, heun3 for 'rk3_family', got 'kutta3'"):
        get_solver("rk3_family", start="kutta3")
    with pytest.raises(ValueError, match="d_model must be a positive int or None, got 0"):
        get_solver("rk2_gate", d_model=0)
    with pytest.raises(ValueError, match="start must hold two numbers"):
        get_solver("rk2_learned", start=(1.0,))


# Families: the order holds by construction


@pytest.mark.parametrize("name, start", STARTS)
def test_a_family_begins_as_the_named_method(name, start):
    ours = solve(field, Z0, solver=get_solver(name, start=start), n_steps=4).z
    assert torch.allclose(ours, solve(field, Z0, solver=start, n_steps=4).z, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_order_conditions_hold_wherever_the_parameters_go(name, dtype):
    for seed in range(20):
        solver = perturbed(get_solver(name).to(dtype), seed, size=10.0 if seed % 2 else 1.0)
        a, b = coefficients(solver)
        assert order_of(a, b) >= FAMILIES[name], (seed, a, b)
        assert solver.attained_order() == solver.order >= FAMILIES[name]
        assert max(abs(x) for row in (*a, b) for x in row) < 12  # bounded, far from the singular points


@pytest.mark.parametrize("name", FAMILIES)
def test_a_perturbed_family_measures_its_order(name):
    assert_order(perturbed(get_solver(name), 1), FAMILIES[name], finer=2)
    assert_order(perturbed(get_solver(name), 1), FAMILIES[name], finer=2, even=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_order_conditions_hold_all_through_training(name):
    solver = get_solver(name)
    optimizer = torch.optim.Adam(solver.parameters(), lr=0.3)
    seen = []
    for _ in range(15):
        z = solve(orbit, orbit_exact(0.0), span=(0.0, 2.0), solver=solver, n_steps=5).z
        loss = (z - orbit_exact(2.0)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        assert order_of(*coefficients(solver)) >= FAMILIES[name]
    assert min(seen) < 0.95 * seen[0]  # the free parameters are used
    assert not torch.equal(solver.theta, torch.zeros_like(solver.theta))


def test_wrong_families_would_be_noticed():
    """The check that the tests lean on sees a coefficient off by 1e-9."""
    a, b = coefficients(get_solver("rk4_family"))
    a[2][1] += 1e-9
    assert order_of(a, b) < 4


def test_a_family_shows_its_tableau_and_stability_function():
    from solvers.stability import stability_function

    z = torch.linspace(-2, 1, 5, dtype=torch.float64).numpy()
    exact = 1 + z + z**2 / 2 + z**3 / 6 + z**4 / 24  # all four-stage methods of order 4 share it
    assert stability_function(perturbed(get_solver("rk4_family"), 3))(z) == pytest.approx(exact, abs=1e-12)
    assert get_solver("rk3_family").tableau.order == 3


# Published forms


def test_rk2_learned_starts_from_one_and_is_not_consistent():
    solver = get_solver("rk2_learned")
    assert solver.gamma.tolist() == [1.0, 1.0]
    assert solver.order == 0
    k1 = field(Z0, torch.tensor(0.0, dtype=torch.float64))
    k2 = field(Z0 + 0.5 * k1, torch.tensor(0.5, dtype=torch.float64))
    z = solve(field, Z0, span=(0.0, 0.5), solver=solver, n_steps=1).z
    assert torch.allclose(z, Z0 + 0.5 * (k1 + k2), rtol=0, atol=1e-15)
    # it integrates 2 f: z' = -z over [0, 1] arrives at exp(-2)
    one = torch.ones(1, dtype=torch.float64)
    assert solve(lambda z, l: -z, one, solver=solver, n_steps=2000).z.item() == pytest.approx(math.exp(-2), abs=1e-3)


def test_rk2_learned_reports_what_its_weights_attain():
    solver = get_solver("rk2_learned", start=(0.5, 0.5))
    assert solver.attained_order() == 2
    assert_order(solver, 2)
    with torch.no_grad():
        solver.gamma.copy_(torch.tensor([0.25, 0.75]))
    assert solver.attained_order() == 1
    assert_order(solver, 1, finer=0.5)
    with torch.no_grad():
        solver.gamma[0] += 0.01
    assert solver.attained_order() == 0


def test_rk2_gate_is_one_number_a_token():
    solver = get_solver("rk2_gate", d_model=4).double()
    assert solver.attained_order() == 2  # 1/2 everywhere
    perturbed(solver, 0, size=0.7)
    assert solver.attained_order() == 1
    z0 = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    zero, one = torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    k1 = field(z0, zero)
    k2 = field(z0 + k1, one)
    score = torch.cat([k1, k2], -1) @ solver.weight.flatten() + solver.bias
    gate = 1 / (1 + torch.exp(-score))[..., None]
    expected = z0 + gate * k1 + (1 - gate) * k2
    assert torch.allclose(solve(field, z0, solver=solver, n_steps=1).z, expected, rtol=0, atol=1e-14)
    assert gate.flatten().unique().numel() == 6


def test_a_gate_of_one_half_is_heun_and_another_is_of_order_one():
    solver = get_solver("rk2_gate")
    assert_order(solver, 2)
    with torch.no_grad():
        solver.bias += 0.5
    assert_order(solver, 1, finer=0.5)


def test_the_gate_says_which_states_it_fits():
    solver = get_solver("rk2_gate", d_model=4)
    with pytest.raises(ValueError, match=r"needs one real state whose last axis is 4; got \[\(3,\)\]"):
        solve(field, Z0, solver=solver, n_steps=1)
    with pytest.raises(ValueError, match="needs one real state"):
        solve(lambda z, l: z, (torch.ones(4), torch.ones(4)), solver=solver, n_steps=1)


def test_pc_ema_starts_from_three_quarters():
    solver = get_solver("pc_ema")
    z0 = torch.zeros(1, dtype=torch.float64)
    z = solve(lambda z, l: torch.ones_like(z), z0, solver=solver, n_steps=4).z
    assert z.item() == pytest.approx(0.75, abs=1e-15)
    assert solver.order == 0
    at = [torch.tensor(x, dtype=torch.float64) for x in (0.0, 0.5)]
    k1 = field(Z0, at[0])
    k2 = field(Z0 + 0.5 * k1, at[1])
    k3 = field(Z0 + 0.5 * (0.25 * k1 + 0.5 * k2), at[1])
    z = solve(field, Z0, span=(0.0, 0.5), solver=solver, n_steps=1).z
    assert torch.allclose(z, Z0 + 0.5 * (0.25 * k1 + 0.5 * k3), rtol=0, atol=1e-15)


def test_pc_ema_is_of_order_one_at_gamma_one_only():
    solver = get_solver("pc_ema", gamma=1.0)
    assert solver.attained_order() == 1
    assert_order(solver, 1)


# Dense fusion


def rows(solver):
    return [x.detach() for x in solver.matrices()]


def test_dense_starts_as_it_is_told():
    n = 4
    a, b = rows(get_solver("dense", n_steps=n))
    assert torch.equal(a, torch.eye(n)) and torch.equal(b, torch.eye(n))
    a, b = rows(get_solver("dense", n_steps=n, initial="average"))
    share = 1 / torch.arange(2.0, n + 2)[:, None]
    assert torch.equal(a, torch.cat([share, torch.zeros(n, n - 1)], 1))
    assert torch.equal(b, share.expand(n, n).tril())
    a, b = rows(get_solver("dense", n_steps=n, initial="ab2"))
    assert torch.equal(a, torch.eye(n))
    assert b.tolist() == [[1, 0, 0, 0], [-0.5, 1.5, 0, 0], [0, -0.5, 1.5, 0], [0, 0, -0.5, 1.5]]


def test_eq_38_dense_is_the_sum_over_all_earlier_states_and_increments():
    n, h = 4, 0.25
    solver = perturbed(get_solver("dense", n_steps=n), 0, size=0.3)
    a, b = rows(solver)
    zs, fs = [Z0], []
    for i in range(n):
        fs.append(field(zs[i], torch.tensor(i * h, dtype=torch.float64)))
        zs.append(sum(a[i, j].double() * zs[j] + b[i, j].double() * h * fs[j] for j in range(i + 1)))
    states = solve(field, Z0, solver=solver, n_steps=n, save_at="steps").states
    assert torch.allclose(states, torch.stack(zs), rtol=0, atol=1e-14)


def test_dense_average_is_the_mean_of_the_input_and_all_layer_outputs():
    """DLCL, Wang et al. 2019, at its start: x_{n+1} = (y_0 + ... + y_{n+1}) / (n + 2), y_0 the input, h = 1."""
    ys, x = [Z0], Z0
    for i in range(5):
        ys.append(field(x, torch.tensor(float(i), dtype=torch.float64)))
        x = torch.stack(ys).mean(0)
    solver = get_solver("dense", n_steps=5, initial="average")
    ours = solve(field, Z0, span=(0.0, 5.0), solver=solver, n_steps=5).z
    assert torch.allclose(ours, x, rtol=0, atol=1e-7)  # weights like 1/3 are float32
    assert solver.order == 0


def test_dense_residual_is_euler():
    ours = solve(field, Z0, solver=get_solver("dense", n_steps=9), n_steps=9).z
    assert torch.allclose(ours, solve(field, Z0, solver="euler", n_steps=9).z, rtol=0, atol=1e-14)
    assert get_solver("dense", n_steps=9).order == 1


def test_dense_as_ab2_is_ab2():
    n = 16
    exact = solve(field, Z0, solver="ab2", n_steps=n, save_at="steps").states
    solver = get_solver("dense", n_steps=n, initial="ab2", starter="midpoint")
    solution = solve(field, Z0, solver=solver, n_steps=n, save_at="steps")
    assert (solution.states - exact).abs().max() < 1e-12
    assert solution.nfe == solver.nfe(n) == n + 1
    assert solver.attained_order() == 2


def test_dense_as_ab2_without_a_starter_begins_with_euler_and_keeps_order_two():
    h, l = 1 / 8, [torch.tensor(i / 8, dtype=torch.float64) for i in range(8)]
    z, before = Z0 + h * field(Z0, l[0]), field(Z0, l[0])
    for i in range(1, 8):
        k = field(z, l[i])
        z, before = z + h * (1.5 * k - 0.5 * before), k
    ours = solve(field, Z0, solver=get_solver("dense", n_steps=8, initial="ab2"), n_steps=8).z
    assert (ours - z).abs().max() < 1e-14
    solver = get_solver("dense", n_steps=256, initial="ab2", window=2)
    assert solver.order == 2
    assert_order(solver, 2, finer=2, problems={"orbit": PROBLEMS["orbit"]})


def test_window_and_stride_leave_dense_links_to_some_steps_only():
    a, b = rows(get_solver("dense", n_steps=6, initial="average", window=3))
    assert [(row != 0).int().tolist() for row in b] == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1]]
    assert a[5].tolist() == [0, 0, 0, 0.25, 0, 0]
    a, b = rows(get_solver("dense", n_steps=6, initial="average", stride=3))
    assert [row.count_nonzero().item() for row in b] == [1, 1, 3, 1, 1, 6]
    assert torch.equal(a[[0, 1, 3, 4]], torch.eye(6)[[0, 1, 3, 4]])
    solver = get_solver("dense", n_steps=6, stride=3)
    assert solver.a.numel() == solver.b.numel() == 1 + 1 + 3 + 1 + 1 + 6  # links that are not there have no weights


@pytest.mark.parametrize("options", [{"window": 3}, {"stride": 2}, {"window": 3, "stride": 2}])
def test_windows_and_strides_compute_what_their_matrices_say(options):
    n, h = 7, 1 / 7
    solver = perturbed(get_solver("dense", n_steps=n, **options), 4, size=0.2)
    a, b = rows(solver)
    zs, fs = [Z0], []
    for i in range(n):
        fs.append(field(zs[i], torch.tensor(i / n, dtype=torch.float64)))
        zs.append(sum(a[i, j].double() * zs[j] + b[i, j].double() * h * fs[j] for j in range(i + 1)))
    assert torch.allclose(solve(field, Z0, solver=solver, n_steps=n).z, zs[-1], rtol=0, atol=1e-13)


def test_dense_goes_on_across_pieces_and_starts_anew_with_each_solve():
    class Layers:
        pieces = ((0.0, 1.0, lambda z, l: torch.sin(z)), (1.0, 2.0, lambda z, l: torch.cos(z)),
                  (2.0, 3.0, lambda z, l: -z))

    solver = perturbed(get_solver("dense", n_steps=3), 2, size=0.3)
    a, b = (x.double() for x in rows(solver))
    zs, fs = [Z0], []
    for i, layer in enumerate((torch.sin, torch.cos, torch.neg)):
        fs.append(layer(zs[i]))
        zs.append(sum(a[i, j] * zs[j] + b[i, j] * fs[j] for j in range(i + 1)))
    for _ in range(2):
        z = solve(Layers(), Z0, span=(0.0, 3.0), solver=solver, n_steps=3).z
        assert torch.allclose(z, zs[-1], rtol=0, atol=1e-14)


def test_dense_repeats_its_last_rows_beyond_those_it_has():
    solver = perturbed(get_solver("dense", n_steps=3), 4, size=0.2)
    a, b = (x.double() for x in rows(solver))
    zs, fs, h = [Z0], [], 1 / 5
    for i in range(5):
        fs.append(field(zs[i], torch.tensor(i / 5, dtype=torch.float64)))
        row, first = min(i, 2), max(0, i - 2)
        zs.append(sum(a[row, j] * zs[first + j] + b[row, j] * h * fs[first + j] for j in range(row + 1)))
    assert torch.allclose(solve(field, Z0, solver=solver, n_steps=5).z, zs[-1], rtol=0, atol=1e-14)
    strided = perturbed(get_solver("dense", n_steps=4, stride=2), 4, size=0.2)
    seven = solve(field, Z0, solver=strided, n_steps=7, save_at="steps").states
    a, b = (x.double() for x in rows(strided))
    k = [field(seven[i], torch.tensor(i / 7, dtype=torch.float64)) / 7 for i in range(7)]
    dense = sum(a[3, j] * seven[2 + j] + b[3, j] * k[2 + j] for j in range(4))  # rows 2, 3, then 2, 3, 2
    assert torch.allclose(seven[6], dense, rtol=0, atol=1e-14)
    assert torch.allclose(seven[7], a[2, 2] * seven[6] + b[2, 2] * k[6], rtol=0, atol=1e-14)


def test_dense_reports_the_order_of_its_weights_as_they_are():
    solver = get_solver("dense", n_steps=5, initial="ab2")
    assert solver.attained_order() == 2
    with torch.no_grad():
        solver.b[-1] += 0.01
    assert solver.attained_order() == 0
    assert get_solver("dense", n_steps=1).attained_order() == 1


# What all share


@pytest.mark.parametrize("mode", ["backprop", "checkpoint"])
@pytest.mark.parametrize("name", [*ALL, "rk2_gate with d_model"])
def test_gradients_reach_every_learned_parameter(name, mode):
    solver = get_solver("rk2_gate", d_model=3) if "with" in name else get_solver(name, **(
        {"n_steps": 4} if name == "dense" else {}))
    weight = torch.tensor([0.3, -1.2, 0.8], requires_grad=True)
    z = solve(lambda z, l: torch.sin(z * weight) + l * z.flip(-1), torch.ones(3), solver=solver, n_steps=4,
              gradient=mode).z
    z.square().sum().backward()
    for parameter in (*solver.parameters(), weight):
        assert parameter.grad is not None
        assert parameter.grad.ne(0).all()


@pytest.mark.parametrize("name", ALL)
def test_gradients_agree_with_differences(name):
    solver = perturbed(get_solver(name, **({"n_steps": 3} if name == "dense" else {})).double(), 5, size=0.1)
    names = [key for key, _ in solver.named_parameters()]

    def run(z0, *values):
        return torch.func.functional_call(
            _Solve(solver), {f"solver.{key}": value for key, value in zip(names, values, strict=True)}, z0)

    values = [p.detach().clone().requires_grad_() for p in solver.parameters()]
    assert torch.autograd.gradcheck(run, (Z0.clone().requires_grad_(), *values))


class _Solve(torch.nn.Module):
    def __init__(self, solver):
        super().__init__()
        self.solver = solver

    def forward(self, z0):
        return solve(field, z0, solver=self.solver, n_steps=3).z


@pytest.mark.parametrize("name", ALL)
def test_states_keep_their_dtype_and_tuples_work(name):
    solver = perturbed(get_solver(name), 6, size=0.1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert solve(lambda z, l: torch.sin(z), Z0.to(dtype), solver=solver, n_steps=3).z.dtype == dtype
    whole = solve(lambda z, l: torch.sin(z) * l, Z0, solver=solver, n_steps=3).z
    halves = solve(lambda z, l: tuple(torch.sin(x) * l for x in z), (Z0[:1], Z0[1:]), solver=solver, n_steps=3).z
    assert torch.allclose(torch.cat(halves), whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in ALL if name != "dense"])
def test_a_zero_field_is_the_identity(name):
    z = solve(lambda z, l: torch.zeros_like(z), Z0, solver=perturbed(get_solver(name), 7), n_steps=3).z
    assert torch.equal(z, Z0)


@pytest.mark.parametrize("name", ALL)
def test_parameters_survive_saving_and_copying(name):
    solver = perturbed(get_solver(name), 8, size=0.1)
    again = get_solver(name)
    again.load_state_dict(solver.state_dict())
    expected = solve(field, Z0, solver=solver, n_steps=3).z
    assert torch.equal(solve(field, Z0, solver=again, n_steps=3).z, expected)
    assert torch.equal(solve(field, Z0, solver=copy.deepcopy(solver), n_steps=3).z, expected)
