"""Fashion-MNIST: 70,000 grey images of 28 x 28 pixels, ten kinds of clothes.

Source: H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking machine learning
algorithms, 2017, arXiv:1708.07747 (licence MIT, Zalando SE). 31 MB to fetch, 220 MB in memory.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from odeformer.data.fetch import cache_folder, check, debian, download
from odeformer.data.images import Images

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"  # the address that the authors give
PACKAGE = "dataset-fashion-mnist"  # Debian's
INSTALLED = Path("/usr/share/datasets/fashion-mnist")

# SHA-256 of the idx files, and of those as the authors pack them (whose MD5 sums they publish). Debian packs anew.
CONTENT = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
PACKED = {
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}

Reader = Callable[[str], bytes]  # from the name of an idx file to its content


def fashion_mnist(*, folder: str | Path | None = None) -> Images:
    """The task, pixels scaled to [-1, 1]: 60,000 images to train on, 10,000 to test.

    ``folder``: where the four idx files lie, packed (.gz) or not, or torchvision's root folder, or a copy of the
    Hugging Face repository ``zalando-datasets/fashion_mnist`` (parquet; needs pyarrow). Without it: the Debian package
    ``dataset-fashion-mnist`` if installed, the cache folder, the Hugging Face cache; else it is fetched.

    Raises FileNotFoundError where there is nothing and nothing can be fetched, ValueError for damaged files.
    """
    read = find(folder)
    if read is None and folder is not None:
        raise FileNotFoundError(f"{folder} holds no Fashion-MNIST: neither {', '.join(CONTENT)} (or those with .gz) "
                                "nor parquet files named train-* and test-*")
    return task(read or fetch())


def find(folder: str | Path | None = None) -> Reader | None:
    """What reads the files in folder, or by default in the places where they may lie here; None where none does."""
    cache = cache_folder()
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    snapshots = Path(hub).expanduser() / "datasets--zalando-datasets--fashion_mnist" / "snapshots"
    places = [INSTALLED, cache / "fashion_mnist", cache / "debian" / PACKAGE / INSTALLED.relative_to("/"),
              *sorted(snapshots.glob("*"))]
    for place in places if folder is None else [Path(folder)]:
        for inner in (place, place / "raw", place / "FashionMNIST" / "raw"):
            if all(idx_file(inner, name) for name in CONTENT):
                return lambda name, inner=inner: read_packed(idx_file(inner, name))
        if all(parquet_files(place, name) for name in CONTENT):
            return lambda name, place=place: read_parquet(parquet_files(place, name), name)
    return None


def fetch() -> Reader:
    """What reads the files after they were fetched. Raises FileNotFoundError where they cannot be."""
    reasons = []
    for way in (fetch_package, fetch_files):
        try:
            return find(way())
        except OSError as error:
            reasons.append(str(error))
    raise FileNotFoundError(f"Fashion-MNIST is not here: apt-get install {PACKAGE}, or give folder= with the files "
                            f"of {URL} ({'; '.join(reasons)})")


def fetch_package() -> Path:
    return debian(PACKAGE) / INSTALLED.relative_to("/")


def fetch_files() -> Path:
    folder = cache_folder() / "fashion_mnist"
    for name, sha256 in PACKED.items():
        download(f"{URL}{name}.gz", folder / f"{name}.gz", sha256=sha256)
    return folder


def idx_file(folder: Path, name: str) -> Path | None:
    return next((folder / n for n in (name, f"{name}.gz") if (folder / n).is_file()), None)


def read_packed(path: Path) -> bytes:
    """The content of a file, unpacked where it ends in .gz. Raises ValueError where that fails."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); delete it, so that it is fetched anew") from error


def parquet_files(folder: Path, name: str) -> list[Path]:
    part = "train" if name.startswith("train") else "test"
    return sorted(folder.rglob(f"{part}-*.parquet")) if folder.is_dir() else []


def read_parquet(paths: list[Path], name: str) -> bytes:
    """The idx file that parquet files hold as rows of PNG images and labels. Raises ImportError without pyarrow."""
    try:
        from PIL import Image
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ImportError(f"{paths[0]} needs pyarrow and pillow: pip install pyarrow pillow") from error
    if "labels" in name:
        labels = [label for path in paths for label in read_table(path, columns=["label"])["label"].to_pylist()]
        return struct.pack(">II", 0x801, len(labels)) + bytes(labels)
    rows = [row for path in paths for row in read_table(path, columns=["image"])["image"].to_pylist()]
    images = [Image.open(io.BytesIO(row["bytes"])) for row in tqdm(rows, desc=name, unit="image")]
    size = images[0].size
    return (struct.pack(">IIII", 0x803, len(images), size[1], size[0])
            + b"".join(image.convert("L").tobytes() for image in images))


def read_idx(data: bytes) -> Tensor:
    """The array (uint8) of an idx file: two zero bytes, type 8, the number of axes, their sizes, the values.

    Raises ValueError for anything else.
    """
    n_axes = data[3] if len(data) > 3 else 0
    start = 4 + 4 * n_axes
    if data[:3] != b"\0\0\x08" or len(data) < start:
        raise ValueError(f"not an idx file of bytes: it begins with {data[:4].hex(' ')}")
    sizes = struct.unpack(f">{n_axes}I", data[4:start])
    if len(data) - start != math.prod(sizes):
        raise ValueError(f"an idx file of the sizes {sizes} must hold {math.prod(sizes)} values, got "
                         f"{len(data) - start}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).reshape(sizes)


def task(read: Reader) -> Images:
    """The task that a reader's four files make. Raises ValueError where a checksum is another."""
    arrays = []
    for name, sha256 in CONTENT.items():
        data = read(name)
        check(data, sha256, name)
        arrays.append(read_idx(data))
    train_x, train_y, test_x, test_y = arrays
    scaled = [x.unsqueeze(1).float().div_(127.5).sub_(1) for x in (train_x, test_x)]
    return Images("fashion_mnist", 10, scaled[0], train_y.long(), scaled[1], test_y.long())
