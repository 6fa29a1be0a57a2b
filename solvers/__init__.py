"""Integrators for neural ODEs in PyTorch: solve(f, z0, solver=...) with every method by name."""

from importlib import import_module
from types import ModuleType

from solvers.adaptive import Adaptive
from solvers.base import SolverError
from solvers.calibrate import calibrate_grid
from solvers.equilibrium import Equilibrium
from solvers.explicit import ExplicitRungeKutta
from solvers.hypersolver import Hypersolver
from solvers.imex import ImexRungeKutta
from solvers.implicit import ImplicitRungeKutta
from solvers.multistep import LinearMultistep
from solvers.nonlinear import Anderson, FixedPoint, NewtonKrylov
from solvers.odeint import odeint
from solvers.odeint_adjoint import odeint_adjoint
from solvers.per_sample import PerSample
from solvers.registry import SOLVERS, get_solver
from solvers.residual_fit import fit_hypersolver
from solvers.reversible import Reversible
from solvers.solve import Solution, solve
from solvers.splitting import LieTrotter, Strang, Yoshida4
from solvers.tableau import Tableau

__all__ = ["SOLVERS", "Adaptive", "Anderson", "Equilibrium", "ExplicitRungeKutta", "FixedPoint", "Hypersolver",
           "ImexRungeKutta", "ImplicitRungeKutta", "LieTrotter", "LinearMultistep", "NewtonKrylov", "PerSample",
           "Reversible", "Solution", "SolverError", "Strang", "Tableau", "Yoshida4", "calibrate_grid",
           "fit_hypersolver", "get_solver", "odeint", "odeint_adjoint", "solve"]

_ON_DEMAND = ("detest", "problems", "stability")  # modules that a solve does not need


def __getattr__(name: str) -> ModuleType:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'solvers' has no attribute {name!r}")
    return import_module(f"solvers.{name}")
