"""Files from elsewhere, kept in one folder: web addresses, wheels and Debian packages, each checked."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

from tqdm import tqdm

from odeformer.files import write_atomically


def cache_folder() -> Path:
    """Where fetched files are kept: the environment variable ODEFORMER_DATA, or ~/.cache/odeformer."""
    return Path(os.environ.get("ODEFORMER_DATA") or Path.home() / ".cache" / "odeformer")


def check(data: bytes, sha256: str, path: str | Path) -> None:
    """Raises ValueError unless data, which path holds, has this SHA-256."""
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise ValueError(f"{path} is damaged or another version: its SHA-256 is {got}, it should be {sha256}; "
                         "delete it, so that it is fetched anew, or give another folder")


def checked(path: Path, sha256: str) -> Path:
    """path, whose content has this SHA-256. Raises ValueError where it has another."""
    check(path.read_bytes(), sha256, path)
    return path


def download(url: str, path: Path, *, sha256: str) -> Path:
    """path, fetched from url unless it is there, with a progress bar.

    Raises ConnectionError where it cannot be fetched, ValueError for another SHA-256 (nothing is kept then).
    """
    def write(beside: Path) -> None:
        with urlopen(url, timeout=60) as answer, open(beside, "wb") as file:
            size = int(answer.headers.get("Content-Length") or 0) or None
            with tqdm(total=size, unit="B", unit_scale=True, desc=path.name) as bar:
                while piece := answer.read(1 << 18):
                    file.write(piece)
                    bar.update(len(piece))
        check(beside.read_bytes(), sha256, url)

    if path.is_file():
        return checked(path, sha256)
    try:
        write_atomically(path, write)
    except OSError as error:
        raise ConnectionError(f"cannot fetch {url} into {path.parent} ({error})") from error
    return path


def run(*command: str, folder: Path) -> None:
    """Run a program in folder. Raises ConnectionError that tells why it failed, in its own last words."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConnectionError(f"{command[0]} could not be run ({error})") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConnectionError(f"{' '.join(command[:3])} ... failed ({words[-1].strip()})")


def wheel(package: str, version: str, *, sha256: str) -> Path:
    """The wheel of a Python package, fetched by pip into the cache folder unless it is there; nothing is installed.

    Raises ConnectionError where pip cannot fetch it, ValueError for another SHA-256.
    """
    folder = cache_folder() / "wheels"
    if found := cached_wheel(package, version):
        return checked(found, sha256)
    folder.mkdir(parents=True, exist_ok=True)
    with (tempfile.TemporaryDirectory(dir=folder) as beside,
          tqdm(total=1, unit="wheel", desc=f"{package} {version}") as bar):
        run(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", f"{package}=={version}", folder=Path(beside))
        fetched = checked(next(Path(beside).glob("*.whl")), sha256)
        os.replace(fetched, folder / fetched.name)
        bar.update()
    return folder / fetched.name


def cached_wheel(package: str, version: str) -> Path | None:
    """The wheel, if it is in the cache folder."""
    return next(iter(sorted((cache_folder() / "wheels").glob(f"{package}-{version}-*.whl"))), None)


def packaged(package: str, inside: str) -> Path | None:
    """A folder inside an installed Python package, or None; the package is not imported."""
    spec = find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(root) / inside).is_dir():
            return Path(root) / inside
    return None


def inside_wheel(path: Path, inside: str) -> zipfile.Path:
    """A folder inside a wheel. Raises ValueError where path is no wheel or has no such folder."""
    try:
        found = zipfile.Path(path, inside.rstrip("/") + "/")
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is no wheel: {error}") from error
    if not found.exists():
        raise ValueError(f"{path} holds no folder {inside}")
    return found


def debian(package: str) -> Path:
    """The files of a Debian package (of the release in use), unpacked in the cache folder; nothing is installed.

    apt checks what it fetches; no rights are needed. Raises ConnectionError where apt-get cannot fetch it.
    """
    folder = cache_folder() / "debian"
    if (folder / package).is_dir():
        return folder / package
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside, tqdm(total=1, unit="package", desc=package) as bar:
        run("apt-get", "download", package, folder=Path(beside))
        archive = next(Path(beside).glob("*.deb"))
        run("dpkg-deb", "-x", str(archive), "unpacked", folder=Path(beside))
        try:
            os.rename(Path(beside) / "unpacked", folder / package)
        except OSError:
            if not (folder / package).is_dir():  # else another process was quicker
                raise
        bar.update()
    return folder / package
