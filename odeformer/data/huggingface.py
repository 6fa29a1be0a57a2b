"""Text data sets of the Hugging Face hub, by name. Each has its own licence, told on its page."""

from __future__ import annotations

from odeformer.data.splits import SPLITS
from odeformer.data.text import Text, cut

NAMES = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}  # as data sets call them


def huggingface(name: str, *, subset: str | None = None, column: str = "text", valid: float = 0.05,
                test: float = 0.05) -> Text:
    """The data set ``name`` (with its ``subset``, if it has some), the rows of ``column`` joined by line ends.

    ``name`` may be a folder of text, JSON lines or parquet files as well. Splits are the data set's own where it has
    train, validation and test; where it has train alone, the end of that is held out by the shares ``valid`` and
    ``test``. It is read by the package ``datasets``, which fetches it with progress bars into its own cache.

    Raises ImportError without that package; ValueError for other splits or a missing column.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("data sets of the Hugging Face hub need the package datasets: pip install datasets") \
            from error
    data = load_dataset(name, subset)
    have = {split: next((n for n in NAMES[split] if n in data), None) for split in SPLITS}
    texts = {split: joined(data[own], column, name) for split, own in have.items() if own}
    if len(texts) == len(SPLITS):
        return Text(name, *(texts[split] for split in SPLITS))
    if list(texts) == ["train"]:
        return cut(name, texts["train"], valid=valid, test=test)
    raise ValueError(f"{name} must have the splits train, validation and test, or train alone; it has "
                     f"{', '.join(data)}")


def joined(rows: object, column: str, name: str) -> str:
    """The rows of a column, one after the other."""
    if column not in rows.column_names:
        raise ValueError(f"{name} has no column {column!r}; it has {', '.join(rows.column_names)}")
    return "\n".join(rows[column])
