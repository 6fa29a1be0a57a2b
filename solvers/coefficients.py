"""Butcher tableaus of named explicit methods, as printed: ``c | a``, a rule, ``| b`` and, where published, ``| b_hat``.

Every table is checked on construction: c against the row sums of a, and the stated order by rooted trees, exactly
where the coefficients are rational. ``b`` is the row that is propagated, ``b_hat`` the embedded one that gives the
error estimate. In a name the first digit is the propagated order: ``bosh32`` propagates order 3, ``rkf45`` order 4.
Orders 6 to 8 stand in ``coefficients_high``.
"""

from __future__ import annotations

import math

from solvers.coefficients_high import HIGH
from solvers.tableau import Tableau

parse = Tableau.parse
R5 = math.sqrt(5.0)
R2 = math.sqrt(2.0)

ORDER_1_TO_3: dict[str, Tableau] = {
    # Euler 1768
    "euler": parse("""
        0 |
        --+--
          | 1""", order=1),
    # Runge 1895, the explicit midpoint rule
    "midpoint": parse("""
        0   |
        1/2 | 1/2
        ----+----
            | 0 1""", order=2),
    # Heun 1900, the explicit trapezoidal rule
    "heun2": parse("""
        0 |
        1 | 1
        --+--------
          | 1/2 1/2""", order=2),
    # Ralston 1962: least bound on the local error among two-stage methods
    "ralston2": parse("""
        0   |
        2/3 | 2/3
        ----+--------
            | 1/4 3/4""", order=2),
    # Heun 1900 with Euler 1768 embedded
    "heun_euler21": parse("""
        0 |
        1 | 1
        --+--------
          | 1/2 1/2
          | 1   0""", order=2),
    # Fehlberg 1969, RK1(2), here propagating the second-order row as torchdiffeq's fehlberg2 does
    "fehlberg21": parse("""
        0   |
        1/2 | 1/2
        1   | 1/256 255/256
        ----+----------------------
            | 1/512 255/256 1/512
            | 1/256 255/256 0""", order=2),
    # Kutta 1901
    "kutta3": parse("""
        0   |
        1/2 | 1/2
        1   | -1  2
        ----+------------
            | 1/6 2/3 1/6""", order=3),
    # Heun 1900
    "heun3": parse("""
        0   |
        1/3 | 1/3
        2/3 | 0   2/3
        ----+------------
            | 1/4 0 3/4""", order=3),
    # Ralston 1962
    "ralston3": parse("""
        0   |
        1/2 | 1/2
        3/4 | 0   3/4
        ----+------------
            | 2/9 1/3 4/9""", order=3),
    # Wray 1986 (in the family of van der Houwen 1972): two registers suffice
    "wray3": parse("""
        0    |
        8/15 | 8/15
        2/3  | 1/4  5/12
        -----+-----------
             | 1/4 0 3/4""", order=3),
    # Shu & Osher 1988: strong stability preserving
    "ssprk3": parse("""
        0   |
        1   | 1
        1/2 | 1/4 1/4
        ----+------------
            | 1/6 1/6 2/3""", order=3),
    # Kraaijevanger 1991, strong stability preserving; the embedded row is that of Conde, Fekete & Shadid 2022
    "ssprk43": parse("""
        0   |
        1/2 | 1/2
        1   | 1/2 1/2
        1/2 | 1/6 1/6 1/6
        ----+----------------
            | 1/6 1/6 1/6 1/2
            | 1/4 1/4 1/4 1/4""", order=3),
    # Bogacki & Shampine 1989
    "bosh32": parse("""
        0   |
        1/2 | 1/2
        3/4 | 0   3/4
        1   | 2/9 1/3 4/9
        ----+-------------------
            | 2/9  1/3 4/9 0
            | 7/24 1/4 1/3 1/8""", order=3),
}

ORDER_4: dict[str, Tableau] = {
    # Kutta 1901, "the" Runge-Kutta method; eqs. 42-46
    "rk4": parse("""
        0   |
        1/2 | 1/2
        1/2 | 0   1/2
        1   | 0   0   1
        ----+----------------
            | 1/6 1/3 1/3 1/6""", order=4),
    # Kutta 1901, the 3/8 rule; torchdiffeq calls this one "rk4"
    "rk38": parse("""
        0   |
        1/3 | 1/3
        2/3 | -1/3 1
        1   | 1   -1  1
        ----+----------------
            | 1/8 3/8 3/8 1/8""", order=4),
    # Gill 1951; irrational, checked in floating point
    "gill4": Tableau(
        [[], [1 / 2], [(R2 - 1) / 2, (2 - R2) / 2], [0, -R2 / 2, 1 + R2 / 2]],
        [1 / 6, (2 - R2) / 6, (2 + R2) / 6, 1 / 6],
        c=[0, 1 / 2, 1 / 2, 1], order=4),
    # Ralston 1962: least bound on the local error among four-stage methods; irrational, checked in floating point
    "ralston4": Tableau(
        [[], [2 / 5], [(-2889 + 1428 * R5) / 1024, (3785 - 1620 * R5) / 1024],
         [(-3365 + 2094 * R5) / 6040, (-975 - 3046 * R5) / 2552, (467040 + 203968 * R5) / 240845]],
        [(263 + 24 * R5) / 1812, (125 - 1000 * R5) / 3828, 1024 * (3346 + 1623 * R5) / 5924787, (30 - 4 * R5) / 123],
        c=[0, 2 / 5, (14 - 3 * R5) / 16, 1], order=4),
    # Merson 1957; the embedded row is of order 3 (of order 5 on linear equations with constant coefficients)
    "merson43": parse("""
        0   |
        1/3 | 1/3
        1/3 | 1/6 1/6
        1/2 | 1/8 0   3/8
        1   | 1/2 0   -3/2 2
        ----+------------------------
            | 1/6  0  0    2/3 1/6
            | 1/10 0  3/10 2/5 1/5""", order=4),
    # Zonneveld 1963: the classical method with one more stage for the error estimate
    "zonneveld43": parse("""
        0   |
        1/2 | 1/2
        1/2 | 0    1/2
        1   | 0    0    1
        3/4 | 5/32 7/32 13/32 -1/32
        ----+-------------------------------
            | 1/6  1/3 1/3 1/6  0
            | -1/2 7/3 7/3 13/6 -16/3""", order=4),
    # Fehlberg 1969, RK4(5) formula 2: propagates order 4, as published; the embedded row is of order 5
    "rkf45": parse("""
        0     |
        1/4   | 1/4
        3/8   | 3/32      9/32
        12/13 | 1932/2197 -7200/2197 7296/2197
        1     | 439/216   -8         3680/513   -845/4104
        1/2   | -8/27     2          -3544/2565 1859/4104 -11/40
        ------+-----------------------------------------------------
              | 25/216 0 1408/2565  2197/4104   -1/5  0
              | 16/135 0 6656/12825 28561/56430 -9/50 2/55""", order=4),
    # Ketcheson 2008: strong stability preserving with coefficient 6 in ten stages
    "ssprk104": parse("""
        0   |
        1/6 | 1/6
        1/3 | 1/6  1/6
        1/2 | 1/6  1/6  1/6
        2/3 | 1/6  1/6  1/6  1/6
        1/3 | 1/15 1/15 1/15 1/15 1/15
        1/2 | 1/15 1/15 1/15 1/15 1/15 1/6
        2/3 | 1/15 1/15 1/15 1/15 1/15 1/6 1/6
        5/6 | 1/15 1/15 1/15 1/15 1/15 1/6 1/6 1/6
        1   | 1/15 1/15 1/15 1/15 1/15 1/6 1/6 1/6 1/6
        ----+----------------------------------------------------------
            | 1/10 1/10 1/10 1/10 1/10 1/10 1/10 1/10 1/10 1/10""", order=4),
}

ORDER_5: dict[str, Tableau] = {
    # Kutta 1901, corrected by Nyström 1925
    "nystrom5": parse("""
        0   |
        1/3 | 1/3
        2/5 | 4/25 6/25
        1   | 1/4  -3    15/4
        2/3 | 2/27 10/9  -50/81 8/81
        4/5 | 2/25 12/25 2/15   8/75 0
        ----+--------------------------------------
            | 23/192 0 125/192 0 -27/64 125/192""", order=5),
    # Butcher 1964, six stages
    "butcher5": parse("""
        0   |
        1/4 | 1/4
        1/4 | 1/8  1/8
        1/2 | 0    -1/2 1
        3/4 | 3/16 0    0    9/16
        1   | -3/7 2/7  12/7 -12/7 8/7
        ----+---------------------------------
            | 7/90 0 32/90 12/90 32/90 7/90""", order=5),
    # Cash & Karp 1990; the rows of orders 1 to 3 that the paper gives besides are not kept
    "cash_karp54": parse("""
        0    |
        1/5  | 1/5
        3/10 | 3/40       9/40
        3/5  | 3/10       -9/10   6/5
        1    | -11/54     5/2     -70/27    35/27
        7/8  | 1631/55296 175/512 575/13824 44275/110592 253/4096
        -----+---------------------------------------------------------------
             | 37/378     0 250/621     125/594     0         512/1771
             | 2825/27648 0 18575/48384 13525/55296 277/14336 1/4""", order=5),
    # Dormand & Prince 1980 with the embedded row of Shampine 1986, which is the one torchdiffeq uses
    "dopri54": parse("""
        0    |
        1/5  | 1/5
        3/10 | 3/40       9/40
        4/5  | 44/45      -56/15      32/9
        8/9  | 19372/6561 -25360/2187 64448/6561 -212/729
        1    | 9017/3168  -355/33     46732/5247 49/176  -5103/18656
        1    | 35/384     0           500/1113   125/192 -2187/6784  11/84
        -----+-----------------------------------------------------------------
             | 35/384     0 500/1113    125/192 -2187/6784    11/84    0
             | 1951/21600 0 22642/50085 451/720 -12231/42400  649/6300 1/60""", order=5),
    # Bogacki & Shampine 1996, eight stages
    "bosh54": parse("""
        0   |
        1/6 | 1/6
        2/9 | 2/27          4/27
        3/7 | 183/1372      -162/343     1053/1372
        2/3 | 68/297        -4/11        42/143           1960/3861
        3/4 | 597/22528     81/352       63099/585728     58653/366080   4617/20480
        1   | 174197/959244 -30942/79937 8152137/19744439 666106/1039181 -29421/29068 482048/414219
        1   | 587/8064 0 4440339/15491840 24353/124800 387/44800 2152/5985 7267/94080
        ----+--------------------------------------------------------------------------------------------
            | 587/8064   0 4440339/15491840 24353/124800   387/44800 2152/5985 7267/94080    0
            | 2479/34992 0 123/416          612941/3411720 43/1440   2272/6561 79937/1113912 3293/556956""", order=5),
    # Tsitouras 2011. b is the fifth-order row, also the last row of a (FSAL). Published as decimals (a few free
    # parameters chosen, the rest solved for), so the conditions are checked in floating point.
    "tsit54": Tableau(
        [
            [],
            [0.161],
            [-0.008480655492356988544, 0.3354806554923569885],
            [2.897153057105493432, -6.359448489975074843, 4.362295432869581412],
            [5.325864828439256604, -11.74888356406282788, 7.495539342889836208, -0.09249506636175524925],
            [5.861455442946420028, -12.92096931784710929, 8.159367898576158643, -0.07158497328140099722,
             -0.02826905039406838291],
            [0.09646076681806522952, 0.01, 0.4798896504144995748, 1.379008574103741893, -3.290069515436080680,
             2.324710524099773982],
        ],
        [0.09646076681806522952, 0.01, 0.4798896504144995748, 1.379008574103741893, -3.290069515436080680,
         2.324710524099773982, 0],
        c=[0, 0.161, 0.327, 0.9, 0.9800255409045096857, 1, 1],
        b_hat=[0.09468075576583945807, 0.009183565540343253097, 0.4877705284247615708, 1.234297566930478986,
               -2.707712349983525455, 1.866628418170587036, 1 / 66],
        order=5),
}

EXPLICIT: dict[str, Tableau] = ORDER_1_TO_3 | ORDER_4 | ORDER_5 | HIGH

# torchdiffeq's names of pairs, for the adaptive engine. Its dopri8 is the pair of Prince & Dormand 1981.
ADAPTIVE: dict[str, Tableau] = {
    "adaptive_heun": EXPLICIT["heun_euler21"],
    "fehlberg2": EXPLICIT["fehlberg21"],
    "bosh3": EXPLICIT["bosh32"],
    "dopri5": EXPLICIT["dopri54"],
    "dopri8": EXPLICIT["dopri87"],
}
