"""Tableaus check themselves: shapes, row sums, order conditions by rooted trees, exactly where rational."""

from fractions import Fraction

import numpy as np
import pytest

from solvers import Tableau
from solvers.coefficients import EXPLICIT
from solvers.tableau import density, order_of, orders_of, size, trees

F = Fraction
RK4_A, RK4_B = [[], [F(1, 2)], [0, F(1, 2)], [0, 0, 1]], [F(1, 6), F(1, 3), F(1, 3), F(1, 6)]


def test_rooted_trees_are_as_many_as_cayley_counted():
    assert [len(trees(p)) for p in range(1, 9)] == [1, 1, 2, 4, 9, 20, 48, 115]  # OEIS A000081
    assert all(size(tree) == p for p in range(1, 9) for tree in trees(p))


def test_densities_are_those_of_butcher_up_to_four_nodes():
    # Hairer, Nørsett & Wanner 1993, table II.2.1 (order 4: 4, 8, 12, 24)
    assert [sorted(map(density, trees(p))) for p in range(1, 5)] == [[1], [2], [3, 6], [4, 8, 12, 24]]


def test_order_is_exact_for_rational_coefficients():
    assert order_of(RK4_A, RK4_B) == 4
    tiny = F(1, 10**40)  # a float check cannot see this
    assert order_of(RK4_A, [RK4_B[0] + tiny, RK4_B[1] - tiny, *RK4_B[2:]]) == 1
    assert Tableau(RK4_A, RK4_B).exact
    assert not Tableau([[], [0.5]], [0.0, 1.0]).exact


def test_order_of_floats_agrees_with_the_exact_one():
    for name, tableau in EXPLICIT.items():
        assert order_of(tableau.a, tableau.b) == tableau.order, name


def test_several_weight_rows_are_judged_separately():
    assert orders_of([[], [1]], [F(1, 2), F(1, 2)], [1, 0], [2, 0]) == [2, 1, 0]


def test_quadrature_conditions_agree_with_an_independent_formula():
    for name, tableau in EXPLICIT.items():
        b, c = np.array(tableau.b), np.array(tableau.c)
        for q in range(1, tableau.order + 1):  # Σ b_i c_i^(q - 1) = 1 / q
            assert abs(b @ c ** (q - 1) - 1 / q) < 1e-12, (name, q)


def test_a_wrong_coefficient_is_refused():
    with pytest.raises(ValueError, match="order 1, not the stated order 4"):
        Tableau([[], [F(1, 2)], [0, F(1, 2)], [0, 0, 1]], [F(1, 6), F(1, 3), F(1, 4), F(1, 4)], order=4)
    with pytest.raises(ValueError, match="not the stated order 2"):
        Tableau([[], [0.4999999]], [0, 1], order=2)
    with pytest.raises(ValueError, match="order 4, not the stated order 5"):
        Tableau(RK4_A, RK4_B, order=5)


def test_nodes_that_are_not_the_row_sums_are_refused():
    with pytest.raises(ValueError, match=r"c must equal the row sums of a: c\[1\] = 0.6, a\[1\] sums to 0.5"):
        Tableau([[], [0.5]], [0, 1], c=[0, 0.6])
    with pytest.raises(ValueError, match="c must have one entry a stage"):
        Tableau([[], [0.5]], [0, 1], c=[0])


def test_inconsistent_weights_are_refused():
    with pytest.raises(ValueError, match=r"not consistent; it sums to 0\.75"):
        Tableau([[], [0.5]], [0.25, 0.5])
    with pytest.raises(ValueError, match="b_hat must sum to 1"):
        Tableau([[], [0.5]], [0, 1], b_hat=[0.5, 0.4])


@pytest.mark.parametrize("a, b", [([[0.5]], [0, 1]), ([[], [0.5, 0.5, 0.5]], [0, 1]), ([], [])])
def test_shapes_that_do_not_fit_are_refused(a, b):
    with pytest.raises(ValueError, match="one row a stage"):
        Tableau(a, b)


def test_an_embedded_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"b_hat must have as many entries as b \(2\); got 3"):
        Tableau([[], [0.5]], [0, 1], b_hat=[0, 1, 0])


def test_a_coefficient_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        Tableau([[], [float("nan")]], [0, 1])


def test_full_rows_that_are_strictly_lower_count_as_explicit():
    tableau = Tableau([[0, 0], [F(1, 2), 0]], [0, 1])
    assert tableau.is_explicit
    assert tableau.a == ((), (0.5,))
    assert not Tableau([[F(1, 2)]], [1]).is_explicit


def test_evaluations_and_fsal_follow_from_the_coefficients():
    assert EXPLICIT["dopri54"].is_fsal
    assert EXPLICIT["dopri54"].n_evaluations == 6
    assert not EXPLICIT["heun_euler21"].is_fsal
    completed = EXPLICIT["heun_euler21"].with_fsal()
    assert completed.is_fsal
    assert (completed.n_stages, completed.n_evaluations, completed.order, completed.embedded_order) == (3, 2, 2, 1)


def test_stability_function_of_rk4_is_the_truncated_exponential():
    z = np.array([0.3 - 0.2j, -2.0, 1.5j])
    assert np.allclose(EXPLICIT["rk4"].stability(z), 1 + z + z**2 / 2 + z**3 / 6 + z**4 / 24, rtol=0, atol=1e-14)


def test_a_printed_tableau_is_read():
    read = Tableau.parse("""
        0   |
        1/2 | 1/2
        ----+----
            | 0 1
            | 1 0""")
    assert (read.a, read.b, read.b_hat, read.order, read.embedded_order) == (((), (0.5,)), (0, 1), (1, 0), 2, 1)
