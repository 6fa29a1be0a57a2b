"""Text to ids and back, on disk, and in batches."""

import json
import sys

import pytest
import torch

import odeformer
from odeformer import BPETokenizer, ByteTokenizer, load_tokenizer, pad_batch
from odeformer.tokenizers import SPECIAL, TOKENIZERS

TEXTS = ["to be, or not to be: that is the question", "Straße, naïve, Ελλάδα, 日本語, 👩‍🔬, \x00 \t\r\n", "", " ",
         "<pad><start><stop>", "a  b   c\n\n\n d"]
CORPUS = ["to be or not to be, that is the question " * 20, "whether 'tis nobler in the mind to suffer " * 20]


def bpe(vocab_size=300):
    pytest.importorskip("tokenizers", reason="byte pair encoding needs the package tokenizers")
    return BPETokenizer.train(CORPUS, vocab_size=vocab_size)


MADE = {"bytes": ByteTokenizer, "bpe": bpe}


@pytest.fixture(params=MADE)
def tokenizer(request):
    return MADE[request.param]()


def test_every_tokenizer_is_tested_here():
    assert {*MADE} == {*TOKENIZERS}


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_whole_and_gives_no_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(isinstance(i, int) for i in ids)
    assert not {tokenizer.pad, tokenizer.start, tokenizer.stop} & {*ids}
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(torch.tensor(ids, dtype=torch.int64)) == text


def test_every_character_of_unicode_comes_back(tokenizer):
    text = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)[::7]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_passed_over_and_have_ids_of_their_own(tokenizer):
    special = [tokenizer.pad, tokenizer.start, tokenizer.stop]
    assert len({*special}) == 3 and all(0 <= i < tokenizer.vocab_size for i in special)
    assert tokenizer.decode([tokenizer.start, *tokenizer.encode("née"), tokenizer.stop, tokenizer.pad]) == "née"


def test_ids_are_all_below_vocab_size_and_others_are_refused(tokenizer):
    for text in TEXTS + CORPUS:
        assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.encode(text))
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="vocab_size"):
            tokenizer.decode([wrong])


def test_what_is_no_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match="surrogate pair at 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(TypeError, match="bytes"):
        tokenizer.encode(b"a")


def test_a_saved_tokenizer_gives_the_same_ids(tokenizer, tmp_path):
    model = odeformer.Decoder(odeformer.DecoderConfig(vocab_size=tokenizer.vocab_size, max_seq_len=8, n_layers=1,
                                                      block=odeformer.BlockConfig(8, 2)))
    model.save(tmp_path)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is type(tokenizer) and loaded.vocab_size == tokenizer.vocab_size
    assert (loaded.pad, loaded.start, loaded.stop) == (tokenizer.pad, tokenizer.start, tokenizer.stop)
    for text in TEXTS + CORPUS:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert odeformer.load(tmp_path).config == model.config  # neither is in the other's way


def test_byte_ids_are_the_bytes_of_utf_8():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("né€") == [0x6E, 0xC3, 0xA9, 0xE2, 0x82, 0xAC]
    assert (tokenizer.pad, tokenizer.start, tokenizer.stop, tokenizer.vocab_size) == (256, 257, 258, 259)
    assert tokenizer.decode([0xC3, 0x41]) == "\ufffdA"  # half a character


def test_bpe_joins_the_pairs_that_occur_most_often():
    """Sennrich et al. 2016: the most frequent pair first. In 'abab' a b occurs most often, then ab ab."""
    pytest.importorskip("tokenizers")
    text = " ".join(["abab"] * 50)
    smallest = BPETokenizer.train([text], vocab_size=259)
    assert smallest.vocab_size == 259 and len(smallest.encode("abab")) == 4
    assert len(BPETokenizer.train([text], vocab_size=260).encode("abab")) == 2
    assert len(BPETokenizer.train([text], vocab_size=261).encode("abab")) == 1


def test_bpe_shortens_what_it_was_trained_on_and_is_trained_the_same_way_twice():
    first, second = bpe(), bpe()
    assert first.vocab_size == 300
    assert [first.encode(t) for t in CORPUS] == [second.encode(t) for t in CORPUS]
    assert len(first.encode(CORPUS[0])) < len(CORPUS[0]) / 2


def test_bpe_takes_one_text_or_many_and_refuses_too_small_a_vocabulary():
    pytest.importorskip("tokenizers")
    whole = BPETokenizer.train(CORPUS[0], vocab_size=280)
    assert whole.encode("question") == BPETokenizer.train([CORPUS[0]], vocab_size=280).encode("question")
    with pytest.raises(ValueError, match="vocab_size must be at least 259"):
        BPETokenizer.train(CORPUS, vocab_size=258)


def test_bpe_refuses_a_tokenizer_without_the_special_tokens():
    package = pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=", ".join(SPECIAL)):
        BPETokenizer(package.Tokenizer(package.models.BPE()))


def test_without_tokenizers_the_error_names_the_extra_and_bytes_work(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}}))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for call in (lambda: BPETokenizer.train(CORPUS, vocab_size=300), lambda: load_tokenizer(tmp_path)):
        with pytest.raises(ImportError, match=r"odeformer-depth\[text\]"):
            call()
    ByteTokenizer().save(tmp_path)
    assert load_tokenizer(tmp_path) == ByteTokenizer()


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"tokenizer": "words"}', '{"model": {"type": "nonsense"}}'])
def test_a_folder_without_a_tokenizer_or_with_a_damaged_one_is_refused(content, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)
    if "model" in content:
        pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="damaged or no tokenizer"):
        load_tokenizer(tmp_path)


def test_rows_are_padded_on_the_right_or_on_the_left():
    tokens, mask = pad_batch([[1, 2, 3], [4], []], pad=9)
    assert tokens.tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]] and tokens.dtype == torch.int64
    assert mask.tolist() == [[True] * 3, [True, False, False], [False] * 3] and mask.dtype == torch.bool
    tokens, mask = pad_batch([[1, 2, 3], [4], []], pad=9, side="left")
    assert tokens.tolist() == [[1, 2, 3], [9, 9, 4], [9, 9, 9]]
    assert mask.tolist() == [[True] * 3, [False, False, True], [False] * 3]
    with pytest.raises(ValueError, match="side must be 'right' or 'left', got 'top'"):
        pad_batch([[1]], pad=0, side="top")
    with pytest.raises(ValueError, match="at least one row"):
        pad_batch([], pad=0)


def test_prompts_padded_on_the_left_are_gone_on_with_as_if_alone():
    tokenizer = ByteTokenizer()
    model = odeformer.Decoder(odeformer.DecoderConfig(vocab_size=tokenizer.vocab_size, max_seq_len=16, n_layers=2,
                                                      block=odeformer.BlockConfig(16, 2))).double().eval()
    prompts = [tokenizer.encode(text) for text in ("to be", "or", "naïve")]
    tokens, mask = pad_batch(prompts, pad=tokenizer.pad, side="left")
    together = model.generate(tokens, mask, max_new_tokens=5)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row[-5:], model.generate(torch.tensor([prompt]), max_new_tokens=5)[0, -5:])
