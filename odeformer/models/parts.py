"""The models that a model is made of: an encoder and a decoder, or itself."""

from __future__ import annotations

from typing import Any

from odeformer.models.base import DepthModel, refuse_wrapped


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
    for part in parts_of(model).values():
        refuse_wrapped(part, what)
