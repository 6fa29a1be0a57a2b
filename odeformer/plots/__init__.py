"""What the project draws. A function takes matplotlib Axes, draws on them and returns them; without, it makes a figure.

Figures are made without pyplot: no window, no display, no global state. ``save`` writes them, ``figure`` makes one of
several panels. Numbers come as arrays, tensors, lists, or as Solutions; measuring is the business of others. A legend
stands below the axes; a second call on the same axes adds to them.
"""

from odeformer.plots.curves import gradient_norms, over_depth, spectra
from odeformer.plots.files import save
from odeformer.plots.fronts import pareto, pareto_front
from odeformer.plots.heat import attention_entropy, attention_map, local_errors
from odeformer.plots.paths import phase_portrait, principal_directions, trajectories
from odeformer.plots.ranges import numerical_ranges
from odeformer.plots.regions import UNBOUNDED, Extent, stability_regions
from odeformer.plots.stars import order_star
from odeformer.plots.steps import step_sizes
from odeformer.plots.style import COLORS, COLUMN, FILL, LINES, MARKERS, STYLE, figure, looks
from odeformer.plots.training import training_curves
from odeformer.plots.work import error_against_nfe, work_precision

# what draws; docs/plots/examples.py has an example of each
DRAWINGS = (attention_entropy, attention_map, error_against_nfe, gradient_norms, local_errors, numerical_ranges,
            order_star, over_depth, pareto, phase_portrait, spectra, stability_regions, step_sizes, training_curves,
            trajectories, work_precision)

__all__ = ["COLORS", "COLUMN", "DRAWINGS", "FILL", "LINES", "MARKERS", "STYLE", "UNBOUNDED", "Extent",
           "attention_entropy", "attention_map", "error_against_nfe", "figure", "gradient_norms", "local_errors",
           "looks", "numerical_ranges", "order_star", "over_depth", "pareto", "pareto_front", "phase_portrait",
           "principal_directions", "save", "spectra", "stability_regions", "step_sizes", "training_curves",
           "trajectories", "work_precision"]
