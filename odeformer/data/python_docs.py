"""The topics of Python's own help (``help("FORMATTING")``): about half a million characters of technical English.

Source: the module pydoc_data.topics of the standard library (Python Software Foundation License, version 2). Nothing is
downloaded. The text is that of the Python that runs.
"""

from __future__ import annotations

from odeformer.data.text import Text, cut


def python_docs(*, valid: float = 0.05, test: float = 0.05) -> Text:
    """The topics by name, one after the other; the end is held out: a share to choose by, then one to report on.

    Raises ImportError where the module is missing (some systems package it apart from Python).
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError("the Python documentation topics (pydoc_data) are missing in this Python; on Debian: "
                          "apt-get install libpython3-stdlib") from error
    text = "\n".join(text.strip() + "\n" for _, text in sorted(topics.items()))
    return cut("python_docs", text, valid=valid, test=test)
