"""Small data in the real formats: name -> function of a folder that gives the call's arguments; nothing is fetched."""

import gzip
import hashlib
import importlib
import struct

import pytest
import torch

from odeformer.data import Images, Pairs, Series, Text, fetch

fashion, vowels, office, plays = (importlib.import_module(f"odeformer.data.{name}") for name in (
    "fashion_mnist", "japanese_vowels", "libreoffice", "shakespeare"))


def offline(monkeypatch, folder):
    """An empty cache, and an error for whatever is fetched."""
    def refused(*command, **options):
        raise ConnectionError(f"tests fetch nothing: {command}")

    monkeypatch.setenv("ODEFORMER_DATA", str(folder / "cache"))
    monkeypatch.setattr(fetch, "run", refused)
    monkeypatch.setattr(fetch, "urlopen", refused)


def idx(array):
    """An idx file: 0, 0, 8 (bytes), the number of axes, the sizes (big endian), the values."""
    return (bytes([0, 0, 8, array.dim()]) + b"".join(struct.pack(">I", n) for n in array.shape)
            + bytes(array.flatten().tolist()))


def small_clothes(folder, monkeypatch):
    content = {}
    for part, n in (("train", 5), ("t10k", 3)):
        content[f"{part}-images-idx3-ubyte"] = idx(torch.randint(256, (n, 4, 4)))
        content[f"{part}-labels-idx1-ubyte"] = idx(torch.arange(n))
    for name, data in content.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(data))
    monkeypatch.setattr(fashion, "CONTENT", {n: hashlib.sha256(data).hexdigest() for n, data in content.items()})
    return {"folder": folder}


def small_plays(folder, monkeypatch):
    for i, name in enumerate(["the-tempest", "hamlet", *plays.VALID, *plays.TEST]):
        path = folder / "kind" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n\n## ACT I\n\n_Enter a_\n\n**A**  \n__\\[Aside]_  \nSay {i},'\\--or  \nnot.\n",
                        encoding="utf-8")
    return {"folder": folder}


def page(*elements):
    return ('<!DOCTYPE html><html><head><title>T</title></head><body>\n<div id="DisplayArea"><a name="bm_id1"></a>'
            + "\n".join(elements) + "</div></body></html>")


def p(key, text, kind="paragraph"):
    return f'<p id="{key}" class="{kind}" dir="auto">{text}</p>'


def small_help(folder, monkeypatch):
    for language, say in (("en-US", "Click {} to close."), ("de", "Klicken Sie auf {}.")):
        for i in range(60):
            path = folder / language / "text" / "scalc" / f"{i:02}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page(p("par_id1", say.format(i))), encoding="utf-8")
    return {"target": "de", "folder": folder}


def small_lines(folder, monkeypatch):
    for side in ("source", "target"):
        (folder / side).write_text("".join(f"{side} {i % 90}\n" for i in range(100)), encoding="utf-8")
    return {"source": folder / "source", "target": folder / "target"}


def small_columns(folder, monkeypatch):
    (folder / "t.tsv").write_text("".join(f"x\tone {i}\teins {i}\n" for i in range(90)), encoding="utf-8")
    return {"path": folder / "t.tsv", "source": 1, "target": 2}


def small_catalogue(folder, monkeypatch):
    (folder / "t.po").write_text('msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n' + "\n\n".join(
        f'#: a.c:{i}\nmsgid "one {i}"\nmsgstr "eins {i}"' for i in range(90)) + "\n", encoding="utf-8")
    return {"paths": folder}


TS = """# made by hand
@problemName Small
@timeStamps false
@univariate false
@dimensions 2
@equalLength false
@classLabel true up down
@data
1,2,3:4,5,6:up
1,?:0.5,-1e1:down
"""


def small_series(folder, monkeypatch):
    (folder / "a.ts").write_text(TS, encoding="utf-8")
    return {"train": folder / "a.ts", "test": folder / "a.ts"}


def small_vowels(folder, monkeypatch):
    for name in vowels.CONTENT:
        (folder / name).write_text(TS, encoding="utf-8")
    monkeypatch.setattr(vowels, "CONTENT", dict.fromkeys(vowels.CONTENT, hashlib.sha256(TS.encode()).hexdigest()))
    return {"folder": folder}


def small_text(folder, monkeypatch):
    (folder / "b.txt").write_text("second\r\nfile " * 30, encoding="utf-8", newline="")
    (folder / "a.txt").write_text("\ufefffirst ü", encoding="utf-8")
    (folder / "c.md").write_text("not meant")
    return {"paths": folder}


def small_rows(folder, monkeypatch):
    pytest.importorskip("datasets", reason="data sets of the hub need the package datasets")
    (folder / "train.txt").write_text("line\n" * 100)
    return {"name": str(folder)}


def nothing(folder, monkeypatch):
    return {}


SMALL = {
    "digits": (Images, nothing), "fashion_mnist": (Images, small_clothes), "shakespeare": (Text, small_plays),
    "python_docs": (Text, nothing), "text_files": (Text, small_text), "huggingface": (Text, small_rows),
    "libreoffice": (Pairs, small_help), "parallel_files": (Pairs, small_lines), "tab_separated": (Pairs, small_columns),
    "catalogues": (Pairs, small_catalogue), "series_files": (Series, small_series),
    "japanese_vowels": (Series, small_vowels),
}
