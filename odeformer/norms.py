"""Where the norm stands: each placement turns a sublayer's core F into an increment (a vector field).

``NORMS[name](d_model, **options)``, called ``(z, branch)`` with branch the core F; what comes back is dz/dl, so that an
Euler step with h = 1 gives the textbook formula.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from odeformer.tables import look_up

KINDS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


def make_norm(d_model: int, kind: str = "layer", eps: float = 1e-5) -> nn.Module:
    """Layer norm over d_model with learned scale and shift ([AN]), or RMSNorm (Zhang & Sennrich 2019)."""
    return look_up(KINDS, kind, "norm kind")(d_model, eps=eps)


class PreNorm(nn.Module):
    """f = F(LN(z)), so that z + f is eq. 14."""

    final = True  # the model ends with a norm, since the state leaves the layers without one

    def __init__(self, d_model: int, *, kind: str = "layer", eps: float = 1e-5):
        super().__init__()
        self.norm = make_norm(d_model, kind, eps)

    def forward(self, z: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """The increment, shaped like z."""
        return branch(self.norm(z))


NORMS = {
    "pre": PreNorm,
}
