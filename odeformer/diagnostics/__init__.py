"""Numbers about the dynamics and the stability of a network's depth.

Every function takes a model's Solution (``model(..., return_solution=True)``), also a wrapped one's, or a
``Trajectory(f, states, depths, mask)``. l is depth, one unit a layer. Fusion is no part of f: what integrates anew
(gradients, exponents, global errors, invariance) goes without it. ``max_bytes`` bounds what a function keeps (bases,
directions, Jacobians); the activations of one evaluation of f, or of one graph of it, come on top.
"""

from odeformer.diagnostics.attention import attention_entropies, attention_maps
from odeformer.diagnostics.errors import GlobalErrors, global_errors, local_errors
from odeformer.diagnostics.gradients import GradientNorms, gradient_norms
from odeformer.diagnostics.krylov import WHICH, Eigenvalues, leading_eigenvalues
from odeformer.diagnostics.limits import (
    DepthScaling,
    IncrementScaling,
    WeightSmoothness,
    depth_scaling,
    increment_scaling,
    layer_weights,
    weight_smoothness,
)
from odeformer.diagnostics.linearize import Jacobian
from odeformer.diagnostics.lyapunov import Lyapunov, lyapunov
from odeformer.diagnostics.solver_invariance import solver_invariance
from odeformer.diagnostics.spectrum import (
    NumericalRange,
    Spectrum,
    dense_jacobians,
    departure_from_normality,
    lipschitz,
    log_norm,
    log_norm_interval,
    non_normality,
    numerical_range,
    secant_lipschitz,
    spectral_norm,
    spectral_radius,
    spectrum,
)
from odeformer.diagnostics.stability import Stability, stability, stiffness_index, stiffness_ratio
from odeformer.diagnostics.steps import curvatures, effective_steps, path_ratio, update_cosines
from odeformer.diagnostics.tokens import effective_rank, effective_ranks, token_cosines
from odeformer.diagnostics.trajectory import MAX_BYTES, Site, Trajectory, check_weights
from odeformer.invariance import Invariance, invariance

__all__ = [
    "MAX_BYTES", "WHICH", "DepthScaling", "Eigenvalues", "GlobalErrors", "GradientNorms", "IncrementScaling",
    "Invariance", "Jacobian", "Lyapunov", "NumericalRange", "Site", "Spectrum", "Stability", "Trajectory",
    "WeightSmoothness", "attention_entropies", "attention_maps", "check_weights", "curvatures", "dense_jacobians",
    "departure_from_normality", "depth_scaling", "effective_rank", "effective_ranks", "effective_steps",
    "global_errors", "gradient_norms", "increment_scaling", "invariance", "layer_weights", "leading_eigenvalues",
    "lipschitz", "local_errors", "log_norm", "log_norm_interval", "lyapunov", "non_normality", "numerical_range",
    "path_ratio", "secant_lipschitz", "solver_invariance", "spectral_norm", "spectral_radius", "spectrum", "stability",
    "stiffness_index", "stiffness_ratio", "token_cosines", "update_cosines", "weight_smoothness"]
