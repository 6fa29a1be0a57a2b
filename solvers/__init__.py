"""Integrators for neural ODEs in PyTorch: solve(f, z0, solver=...) with every method by name."""

from solvers.base import SolverError
from solvers.calibrate import calibrate_grid
from solvers.explicit import ExplicitRungeKutta
from solvers.multistep import LinearMultistep
from solvers.odeint import odeint
from solvers.odeint_adjoint import odeint_adjoint
from solvers.registry import SOLVERS, get_solver
from solvers.reversible import Reversible
from solvers.solve import Solution, solve
from solvers.splitting import LieTrotter, Strang, Yoshida4
from solvers.tableau import Tableau

__all__ = ["SOLVERS", "ExplicitRungeKutta", "LieTrotter", "LinearMultistep", "Reversible", "Solution", "SolverError",
           "Strang", "Tableau", "Yoshida4", "calibrate_grid", "get_solver", "odeint", "odeint_adjoint", "solve"]
