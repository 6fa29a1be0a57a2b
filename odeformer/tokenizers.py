"""Text to token ids and back: bytes, or byte pairs learnt from text by the package ``tokenizers``.

Both have ``encode(text) -> list of ids``, ``decode(ids) -> text``, ``vocab_size``, the ids of the special tokens
``pad``, ``start`` and ``stop``, and ``save(folder)``. No text gives a special token; decoding passes over them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from odeformer.files import write_atomically, write_json
from odeformer.tables import at_least

__all__ = ["TOKENIZERS", "BPETokenizer", "ByteTokenizer", "load_tokenizer", "pad_batch"]

FILE = "tokenizer.json"
SPECIAL = ("<pad>", "<start>", "<stop>")


class ByteTokenizer:
    """The bytes of UTF-8 as ids 0 to 255, then pad, start and stop.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    [110, 195, 169]
    >>> tokenizer.decode([257, 110, 195, 169, 258])
    'né'
    """

    pad, start, stop = 256, 257, 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises ValueError for half a surrogate pair, which is no text."""
        check_text(text)
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD. Raises ValueError for an unknown id."""
        return bytes(i for i in checked_ids(ids, self.vocab_size) if i < 256).decode("utf-8", "replace")

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json into folder, such as a model's."""
        write_json(Path(folder) / FILE, {"tokenizer": "bytes"})

    @classmethod
    def from_json(cls, text: str) -> ByteTokenizer:
        """The tokenizer from what ``save`` wrote. Raises ValueError for anything else."""
        if json.loads(text) != {"tokenizer": "bytes"}:
            raise ValueError("it does not describe a byte tokenizer")
        return cls()

    def __eq__(self, other: object) -> bool:
        return type(other) is ByteTokenizer

    def __hash__(self) -> int:
        return hash(ByteTokenizer)

    def __repr__(self) -> str:
        return "ByteTokenizer()"


class BPETokenizer:
    """Byte pair encoding (Sennrich et al. 2016) over bytes, by the package ``tokenizers`` of Hugging Face.

    Every text can be encoded and comes back whole. ``BPETokenizer.train(texts, vocab_size=...)`` learns one;
    ``load_tokenizer(folder)`` reads one that was saved. ``tokenizer`` is a ``tokenizers.Tokenizer`` that has the
    tokens <pad>, <start> and <stop>; ValueError where one is missing.
    """

    def __init__(self, tokenizer: Any):
        missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
        if missing:
            raise ValueError(f"tokenizer must have the special tokens {', '.join(SPECIAL)}; it lacks "
                             f"{', '.join(missing)}")
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # "<stop>" in a text is a text; this is not stored in the file
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.pad, self.start, self.stop = map(tokenizer.token_to_id, SPECIAL)

    @classmethod
    def train(cls, texts: str | Iterable[str], *, vocab_size: int) -> BPETokenizer:
        """Learn at most ``vocab_size`` tokens (at least 259: the bytes and the special tokens) from texts.

        Fewer where the texts have no more pairs that occur twice. Raises ImportError without ``tokenizers``.
        """
        at_least("vocab_size", vocab_size, 256 + len(SPECIAL))
        package = tokenizers()
        tokenizer = package.Tokenizer(package.models.BPE())
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=vocab_size, min_frequency=2, special_tokens=list(SPECIAL), show_progress=False,
            initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator([texts] if isinstance(texts, str) else texts, trainer)
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Tokens, the special ones included."""
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises ValueError for half a surrogate pair, which is no text."""
        check_text(text)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD. Raises ValueError for an unknown id."""
        return self.tokenizer.decode(checked_ids(ids, self.vocab_size), skip_special_tokens=True)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, in the format of ``tokenizers``, into folder, such as a model's."""
        text = self.tokenizer.to_str(pretty=True)
        write_atomically(Path(folder) / FILE, lambda beside: beside.write_text(text, encoding="utf-8"))

    @classmethod
    def from_json(cls, text: str) -> BPETokenizer:
        """The tokenizer from what ``save`` wrote. Raises ImportError without ``tokenizers``."""
        return cls(tokenizers().Tokenizer.from_str(text))


TOKENIZERS: Mapping[str, type] = {"bytes": ByteTokenizer, "bpe": BPETokenizer}


def tokenizers() -> Any:
    """The package. Raises ImportError that names the extra where it is missing."""
    try:
        import tokenizers as package
    except ImportError as error:
        raise ImportError("byte pair encoding needs the package tokenizers: pip install 'odeformer-depth[text]'") \
            from error
    return package


def load_tokenizer(folder: str | Path) -> ByteTokenizer | BPETokenizer:
    """The tokenizer saved in folder.

    Raises FileNotFoundError where there is none, ValueError for a damaged file, ImportError where it needs
    ``tokenizers``.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {FILE}; tokenizer.save(folder) writes it")
    try:
        text = path.read_text(encoding="utf-8")
        kind = "bpe" if "model" in json.loads(text) else "bytes"
        return TOKENIZERS[kind].from_json(text)
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for what it cannot read
        raise ValueError(f"{path} is damaged or no tokenizer: {error}") from error


def pad_batch(ids: Sequence[Sequence[int]], *, pad: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Ids (batch, tokens), int64, filled up with ``pad``, and the mask, True at real tokens.

    ``side``: where the padding goes; "left" for prompts to ``generate`` from. Raises TypeError for what are no ints,
    ValueError for an empty batch or another side.

    >>> pad_batch([[1, 2], [3]], pad=0, side="left")[0]
    tensor([[1, 2],
            [0, 3]])
    """
    if side not in ("right", "left"):
        raise ValueError(f"side must be 'right' or 'left', got {side!r}")
    if not len(ids):
        raise ValueError("ids must hold at least one row, got none")
    longest = max(len(row) for row in ids)
    tokens = torch.full((len(ids), longest), pad, dtype=torch.int64)
    mask = torch.zeros(len(ids), longest, dtype=torch.bool)
    for i, row in enumerate(ids):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        held = torch.as_tensor(row)
        if len(row) and (held.is_floating_point() or held.is_complex() or held.dim() != 1):
            raise TypeError(f"ids must be rows of ints, got {row!r}")
        tokens[i, place] = held.to(torch.int64)
        mask[i, place] = True
    return tokens, mask


def check_text(text: str) -> None:
    """Raises TypeError or ValueError for what cannot be written as UTF-8."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text holds half a surrogate pair at {error.start}: {text[error.start]!r}") from error


def checked_ids(ids: Iterable[int] | Tensor, vocab_size: int) -> list[int]:
    """ids as a list. Raises TypeError for what is no sequence of ints, ValueError for one outside the vocabulary."""
    listed = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    for i in listed if isinstance(listed, list) else [listed]:
        if not hasattr(i, "__index__"):
            raise TypeError(f"ids must be ints, one after the other, got {i!r}")
        if not 0 <= i < vocab_size:
            raise ValueError(f"ids must be at least 0 and less than vocab_size = {vocab_size}, got {i}")
    return listed
