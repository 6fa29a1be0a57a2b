"""Initial-value problems whose solution is known: in closed form, or to 12 digits and more.

Finals without a closed form were computed in 113-bit arithmetic, twice: by Gragg-Bulirsch-Stoer extrapolation, and by
Taylor series of order 40 (smooth problems) or Radau IIA with 7 stages (stiff ones; the oregonator and Robertson to 1e11
by Radau IIA with 5 and with 7). The two agree to 17 digits of the largest entry, and belong to the data in float64.

HNW: Hairer, Nørsett & Wanner 1993. HW: Hairer & Wanner 1996. Test set: Mazzia & Magherini 2008, "Test set for initial
value problem solvers", release 2.4.

>>> problem = get_problem("logistic")
>>> problem.reference.shape == problem.f(problem.z0, torch.tensor(0.0)).shape == problem.z0.shape
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from solvers import fields
from solvers.base import VectorField
from solvers.fields import Linear, Relay, Sum, VanDerPol, state


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """dz/dl = f(z, l) over ``span``, from ``z0``.

    ``f``: for z of z0's shape with any leading batch axes, in any floating dtype, on any device. It may carry ``parts``
        (the slow one first where there is a stiff one), ``pieces`` or ``breakpoints`` (see solvers.base).
    ``z0``: float64. ``exact``: depth -> state, or None. ``final``: the entries of z(span[1]) as literals, or None.
    ``source``: author and year. ``is_linear``: f is affine in z. ``is_stiff``: explicit methods need steps far
        smaller than accuracy asks for. ``digits``: digits of ``reference`` that hold, relative to its largest entry.
    """

    name: str
    f: VectorField
    z0: Tensor
    span: tuple[float, float]
    source: str
    exact: Callable[[float], Tensor] | None = None
    final: Sequence[float] | None = None
    is_stiff: bool = False
    is_linear: bool = False
    digits: int = 14

    @cached_property
    def reference(self) -> Tensor:
        """z(span[1]), float64, shaped like z0: the literal, else the exact one, else by scipy. Made when asked for."""
        if self.final is not None:
            return state(*self.final).reshape(self.z0.shape)
        return solve_by_scipy(self) if self.exact is None else self.exact(self.span[1])


def solve_by_scipy(problem: Problem, *, method: str = "DOP853", rtol: float = 1e-13, atol: float = 1e-15) -> Tensor:
    """z(span[1]) by scipy.integrate.solve_ivp, piece by piece where f jumps. Raises RuntimeError where scipy fails."""
    from scipy.integrate import solve_ivp

    f, shape, (l0, l1) = problem.f, problem.z0.shape, problem.span
    jumps = [l for l in getattr(f, "breakpoints", ()) if l0 < l < l1]
    cuts = [(a, b, f) for a, b in zip([l0, *jumps], [*jumps, l1], strict=True)]
    z = problem.z0.flatten().numpy()
    for a, b, g in getattr(f, "pieces", None) or cuts:
        last = math.nextafter(b, a) if b in jumps else b  # f stands on the right side of a breakpoint

        def flat(l, y, g=g, last=last):
            depth = torch.tensor(min(l, last), dtype=torch.float64)
            return g(torch.from_numpy(y).reshape(shape), depth).flatten().numpy()

        result = solve_ivp(flat, (a, b), z, method=method, rtol=rtol, atol=atol)
        if not result.success:
            raise RuntimeError(f"scipy's {method} stopped on {problem.name!r} at l = {result.t[-1]:.6g}: "
                               f"{result.message}")
        z = result.y[:, -1]
    return torch.from_numpy(z.copy()).reshape(shape)


MIXING = Linear(((-0.5, 1.0, 0.3), (-1.0, -0.5, 0.2), (0.1, 0.0, -0.25)))
TURN = Linear(((0.0, 1.0), (-1.0, 0.0)))
SHEAR = Linear(((-0.4, 0.3), (0.0, 0.2)))
TWO_PARTS = Linear(((-0.4, 1.3), (-1.0, 0.2)))  # the sum of the two above, which do not commute
RELAY = Relay((1.0,))
_TOKENS = state(*(math.sin(5 + 3 * i + 2 * j + i * j) for i in range(4) for j in range(4))).reshape(4, 4)


def _table(*problems: Problem) -> dict[str, Problem]:
    """The problems by name. Raises ValueError on a name that stands twice."""
    table = {problem.name: problem for problem in problems}
    if len(table) < len(problems):
        names = [problem.name for problem in problems]
        raise ValueError(f"problem names defined twice: {', '.join(sorted({x for x in names if names.count(x) > 1}))}")
    return table


SMOOTH = (
    Problem(name="decay", f=fields.decay, z0=state(1), span=(0.0, 2.0), is_linear=True, source="Dahlquist 1963",
            exact=lambda l: state(math.exp(-l))),
    Problem(name="linear", f=MIXING, z0=state(1, 0, -1), span=(0.0, 3.0), is_linear=True,
            source="Moler & Van Loan 2003", exact=partial(MIXING.exact, z0=(1, 0, -1))),
    Problem(name="logistic", f=fields.logistic, z0=state(0.1), span=(0.0, 5.0), source="Verhulst 1838",
            exact=lambda l: state(1 / (1 + 9 * math.exp(-l)))),
    Problem(name="cubic", f=fields.cubic, z0=state(0.2), span=(0.0, 4.0), source="Bernoulli 1695",
            exact=lambda l: state(0.2 / math.sqrt(0.04 + 0.96 * math.exp(-2 * l)))),
    Problem(name="nonautonomous", f=fields.modulated, z0=state(1), span=(0.0, 5.0), is_linear=True,
            source="Hull, Enright, Fellen & Sedgwick 1972, A3", exact=lambda l: state(math.exp(math.sin(l)))),
    Problem(name="noncommuting", f=fields.noncommuting, z0=state(1, 0.5), span=(0.0, 1.5), is_linear=True,
            source="Magnus 1954", exact=fields.noncommuting_exact),
    Problem(name="oscillator", f=fields.oscillator, z0=state(1, 0), span=(0.0, 10.0), is_linear=True,
            source="Hooke 1678", exact=lambda l: state(math.cos(l), -math.sin(l))),
    Problem(name="forced_oscillator", f=fields.forced_oscillator, z0=state(1, 0), span=(0.0, 10.0), is_linear=True,
            source="Duffing 1918, without the cubic term", exact=fields.forced_oscillator_exact),
    Problem(name="lotka_volterra", f=fields.lotka_volterra, z0=state(10, 5), span=(0.0, 10.0),
            source="Lotka 1925; Volterra 1926", final=(0.28721296420212372, 0.44977746350619197)),
    Problem(name="van_der_pol", f=VanDerPol(1.0), z0=state(2, 0), span=(0.0, 20.0),
            source="van der Pol 1926; Hull, Enright, Fellen & Sedgwick 1972, E2",
            final=(2.0081497621749486, -0.042508875273202147)),
    Problem(name="brusselator", f=fields.brusselator, z0=state(1.5, 3), span=(0.0, 20.0),
            source="Lefever & Nicolis 1971; HNW I.16", final=(0.49863707126834785, 4.5967803494520112)),
    # The decimal data return to their start after a period; the data in float64 miss it by 1.5e-11, as given here.
    Problem(name="arenstorf", f=fields.arenstorf, z0=state(0.994, 0, 0, -2.00158510637908252240537862224),
            span=(0.0, 17.0652165601579625588917206249), source="Arenstorf 1963; HNW II.0",
            final=(0.99399999999997400, -8.8551346199525498e-14, -1.4388667357038203e-11, -2.0015851063831290)),
    Problem(name="pleiades", f=fields.pleiades, span=(0.0, 3.0), source="HNW 1993, II.10; Mazzia & Magherini 2008",
            z0=state(3, 3, -1, -3, 2, -2, 2, 3, -3, 2, 0, 0, -4, 4, 0, 0, 0, 0, 0, 1.75, -1.5, 0, 0, 0, -1.25, 1, 0, 0),
            final=(0.37061391439705129, 3.2372840920572331, -3.2225590324183233, 0.65970914557753084,
                   0.34255817071565798, 1.5621721014006310, -0.70030929222124954, -3.9434375855173921,
                   -3.2713809739725499, 5.2250818434565442, -2.5906124349774695, 1.1982136933922746,
                   -0.24296823449358234, 1.0914492404289797, 3.4170038063143148, 1.3545845016255012,
                   -2.5900655978107754, 2.0250537347142411, -1.1558151001604491, -0.80729881702230217,
                   0.59523963542087188, -3.7412449612340085, 0.37734596857506290, 0.93868588695510789,
                   0.36679222272005699, -0.34740463538084944, 2.3449154481809369, -1.9470204342632919)),
    Problem(name="kepler", f=fields.orbit, z0=fields.orbit_start(0.6), span=(0.0, 20.0),
            source="Kepler 1609; Hairer, Lubich & Wanner 2006, I.2",
            exact=partial(fields.orbit_exact, eccentricity=0.6)),
    Problem(name="rigid_body", f=fields.rigid_body, z0=state(0, 1, 1), span=(0.0, 10.0),
            source="Euler 1765; Jacobi 1829; Hull, Enright, Fellen & Sedgwick 1972, B5", exact=fields.rigid_body_exact),
    Problem(name="lorenz", f=fields.lorenz, z0=state(1, 1, 1), span=(0.0, 5.0), source="Lorenz 1963",
            final=(-6.5121136994195990, -6.9740427884170761, 23.924129572103370)),
    Problem(name="two_parts", f=Sum((TURN, SHEAR)), z0=state(1, 0.5), span=(0.0, 2.0), is_linear=True,
            source="Trotter 1959", exact=partial(TWO_PARTS.exact, z0=(1, 0.5))),
    Problem(name="attention", f=fields.attention, z0=_TOKENS, span=(0.0, 2.0), source="Vaswani et al. 2017",
            final=(0.15557347601428921, 0.89535811707387559, -0.73025849099477076, -1.3751422063771903,
                   1.7602892801762419, -0.57018066214207224, -0.16891856365395437, -1.3686755631974025,
                   0.11657266479812517, 0.87424332146814918, -0.98509148746786340, -1.2154145145406361,
                   1.8115027552614007, 0.43749639786455100, -2.0012170596685888, -1.0149133920979028)),
    Problem(name="block", f=Sum((fields.drifting_attention, fields.drifting_feedforward)), z0=_TOKENS, span=(0.0, 2.0),
            source="Vaswani et al. 2017",
            final=(1.1289826541877860, -0.048834389072871183, 0.92157072787889146, -0.97421217132529425,
                   3.2731336434537226, -2.2492124867658552, 2.1165137914625487, -1.3074776723747362,
                   0.60131378222229424, 0.63165746187027665, 0.36851781076440254, -0.83083870337872051,
                   1.1108175322159703, 2.3779102327730970, -1.0251499495858867, -0.56390908883145772)),
    Problem(name="layers", f=fields.LAYERS, z0=state(1, -0.5), span=(0.0, 3.0), is_linear=True,
            source="Chen et al. 2018", exact=fields.layers_exact),
    Problem(name="relay", f=RELAY, z0=state(0), span=(0.0, 2.0), is_linear=True, source="Filippov 1988",
            exact=partial(RELAY.exact, z0=0.0)),
)

STIFF = (
    Problem(name="van_der_pol_stiff", f=VanDerPol(1e-6), z0=state(2, 0), span=(0.0, 2.0), is_stiff=True,
            source="van der Pol 1926; HW 1996, IV.10; Mazzia & Magherini 2008",
            final=(1.7061677321704650, -0.89280970102481655)),
    Problem(name="robertson", f=fields.robertson, z0=state(1, 0, 0), span=(0.0, 40.0), is_stiff=True,
            source="Robertson 1966; Hindmarsh 1980",
            final=(0.71582706871940509, 9.1855347645577639e-06, 0.28416374574583036)),
    Problem(name="robertson_long", f=fields.robertson, z0=state(1, 0, 0), span=(0.0, 1e11), is_stiff=True,
            source="Robertson 1966; Mazzia & Magherini 2008",
            final=(2.0833401497012941e-08, 8.3333607703347832e-14, 0.99999997916651517)),
    Problem(name="oregonator", f=fields.oregonator, z0=state(1, 2, 3), span=(0.0, 360.0), is_stiff=True,
            source="Field & Noyes 1974; Mazzia & Magherini 2008",
            final=(1.0008148703185227, 1228.1785215498874, 132.05549428465045)),
    Problem(name="hires", f=fields.hires, z0=state(1, 0, 0, 0, 0, 0, 0, 0.0057), span=(0.0, 321.8122), is_stiff=True,
            source="Schäfer 1975; Mazzia & Magherini 2008",
            final=(0.00073713125733255412, 0.00014424857263161597, 5.8887297409673389e-05, 0.0011756513432831255,
                   0.0023863561988309493, 0.0062389682527415998, 0.0028499983951855010, 0.0028500016048144992)),
    Problem(name="prothero_robinson", f=fields.prothero_robinson, z0=state(1), span=(0.0, 10.0), is_stiff=True,
            is_linear=True, source="Prothero & Robinson 1974", exact=lambda l: state(math.cos(l))),
    Problem(name="kaps", f=Sum((fields.kaps_slow, fields.kaps_stiff)), z0=state(1, 1), span=(0.0, 1.0), is_stiff=True,
            source="Kaps 1981; Dekker & Verwer 1984", exact=lambda l: state(math.exp(-2 * l), math.exp(-l))),
    Problem(name="heat", f=fields.heat, z0=fields.heat_exact(0.0), span=(0.0, 0.2), is_stiff=True, is_linear=True,
            source="Fourier 1822", exact=fields.heat_exact),
)

PROBLEMS: dict[str, Problem] = _table(*SMOOTH, *STIFF)


def get_problem(name: str) -> Problem:
    """A problem by name. Raises ValueError for an unknown one; the message lists the known ones."""
    if name not in PROBLEMS:
        raise ValueError(f"unknown problem {name!r}; known: {', '.join(sorted(PROBLEMS))}")
    return PROBLEMS[name]
