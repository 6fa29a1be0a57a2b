"""Which parts of f are known to stay finite at padding."""

from __future__ import annotations

from typing import Any


class Finite:
    """A part of f (core, norm placement) that gives finite numbers at padded tokens, where states are 0.

    Padding stands still; where all parts of a sublayer are ``finite`` its increment is multiplied by 0 there, which is
    several times as fast as filling it. Odeformer's own classes are; a class derived from one of them elsewhere is not,
    unless it says ``finite = True``.
    """

    finite = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.finite = vars(cls).get("finite", cls.__module__.partition(".")[0] == "odeformer")
