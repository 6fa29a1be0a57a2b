"""Real data sets by name: ``DATA[name](**options)`` gives the task, found or fetched on first use.

What is fetched is kept in the folder that the environment variable ODEFORMER_DATA names, by default
``~/.cache/odeformer``. The kinds of task are ``Images``, ``Text``, ``Pairs`` and ``Series``.
"""

from odeformer.data.catalogues import catalogues
from odeformer.data.digits import digits
from odeformer.data.fashion_mnist import fashion_mnist
from odeformer.data.huggingface import huggingface
from odeformer.data.images import Images
from odeformer.data.japanese_vowels import japanese_vowels
from odeformer.data.libreoffice import libreoffice
from odeformer.data.pairs import Pairs
from odeformer.data.parallel_files import parallel_files, tab_separated
from odeformer.data.python_docs import python_docs
from odeformer.data.series import Series
from odeformer.data.series_files import series_files
from odeformer.data.shakespeare import shakespeare
from odeformer.data.text import Text
from odeformer.data.text_files import text_files

__all__ = ["DATA", "Images", "Pairs", "Series", "Text"]

DATA = {
    "digits": digits,
    "fashion_mnist": fashion_mnist,
    "shakespeare": shakespeare,
    "python_docs": python_docs,
    "text_files": text_files,
    "huggingface": huggingface,
    "libreoffice": libreoffice,
    "parallel_files": parallel_files,
    "tab_separated": tab_separated,
    "catalogues": catalogues,
    "japanese_vowels": japanese_vowels,
    "series_files": series_files,
}
