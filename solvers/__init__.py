"""Integrators for neural ODEs in PyTorch: solve(f, z0, solver=...) with every method by name."""

from solvers.base import SolverError
from solvers.explicit import ExplicitRungeKutta
from solvers.multistep import LinearMultistep
from solvers.registry import SOLVERS, get_solver
from solvers.solve import Solution, solve
from solvers.splitting import LieTrotter, Strang
from solvers.tableau import Tableau

__all__ = ["SOLVERS", "ExplicitRungeKutta", "LieTrotter", "LinearMultistep", "Solution", "SolverError", "Strang",
           "Tableau", "get_solver", "solve"]
