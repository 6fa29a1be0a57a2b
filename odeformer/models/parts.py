"""The models that a model is made of: an encoder and a decoder, or itself."""

from __future__ import annotations

from typing import Any

from odeformer.models.base import DepthModel


def parts_of(model: Any) -> dict[str, Any]:
    """The models with layers of their own, by name; "" for one that is whole. A Solution has its parts likewise."""
    return {name: getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)} or {"": model}


def check_model(model: Any) -> None:
    """Raises TypeError for what is no model of this package."""
    if not all(isinstance(part, DepthModel) for part in parts_of(model).values()):
        raise TypeError(f"model must be a model of this package with layers, got {type(model).__name__}")


def check_own_layers(model: Any, what: str) -> None:
    """Raises TypeError as ``check_model``, ValueError where the layers are a user's own (``wrap``)."""
    check_model(model)
    if not all(part.own_layers for part in parts_of(model).values()):
        raise ValueError(f"{what} is for layers of odeformer's own; those of a wrapped model are not")
