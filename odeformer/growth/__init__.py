"""Growing trained models: wider and deeper ones that start from what the smaller one computes.

``widen`` and ``deepen`` return a new model with its own config; the old one stays as it is. ``grow_optimizer`` carries
an optimiser's state over, ``refinement_error`` measures deepening as the refinement of a grid.
"""

from odeformer.growth.deepening import SCHEMES, deepen
from odeformer.growth.maps import tile
from odeformer.growth.moments import grow_optimizer
from odeformer.growth.refinement import Refinement, refinement_error
from odeformer.growth.widening import widen

__all__ = ["SCHEMES", "Refinement", "deepen", "grow_optimizer", "refinement_error", "tile", "widen"]
