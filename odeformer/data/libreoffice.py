"""LibreOffice's help pages in two languages, aligned: sentences, headings and menu items of an office program.

Source: The Document Foundation and the translators of LibreOffice (Mozilla Public License 2.0); the pages of the
Debian packages ``libreoffice-help-en-us``, ``-de``, ``-fr`` and others, 2 to 4 MB each (25 MB unpacked). A page has the
same name in each language and a paragraph the same id, so that nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from tqdm import tqdm

from odeformer.data.fetch import cache_folder, debian
from odeformer.data.pairs import Pairs, apart
from odeformer.data.text import read_text

HELP = Path("/usr/share/libreoffice/help")  # Debian and its relatives
ROOTS = ("/usr/share/libreoffice", "/usr/lib/libreoffice", "/usr/lib64/libreoffice", "/opt/libreoffice*")

# a paragraph or heading with an id of its own; those do not nest
ELEMENT = re.compile(r'<(p|h\d?)\s([^>]*?\bid="((?:par|hd)_id\w+)"[^>]*)>(.*?)</\1>', re.DOTALL)
PROGRAM_TEXT = re.compile(r'class="[^"]*code')  # code, codeintable, smathcode


def libreoffice(target: str = "de", *, source: str = "en-US", folder: str | Path | None = None) -> Pairs:
    """Pairs from the pages in ``source`` and ``target`` (codes of languages as the folders are named: de, fr, pt-BR).

    Whole pages are held out, by the hash of their name, 5 % to choose by and 5 % to report on. Left out: paragraphs
    that read differently on each system or program (``class="switch..."``), program text, what is equal in both
    languages, and what came already (see ``apart``).

    ``folder``: the help folder that holds one folder a language. Without it: an installed help, the cache folder; else
    the Debian packages are fetched. Raises FileNotFoundError where there are no pages and none can be fetched.
    """
    for argument, language in (("source", source), ("target", target)):
        if not re.fullmatch(r"[A-Za-z]+([-@][A-Za-z]+)*", language):
            raise ValueError(f"{argument} must be the code of a language, such as 'de' or 'pt-BR', got {language!r}")
    if source == target:
        raise ValueError(f"source and target must be two languages, got {source!r} twice")
    pages = [find(language, folder) or fetch(language, folder) for language in (source, target)]
    return apart(f"libreoffice_{source}_{target}", aligned(*pages))


def find(language: str, folder: str | Path | None = None) -> Path | None:
    """The folder of the pages in a language, if it is on this machine."""
    package = cache_folder() / "debian" / package_of(language) / HELP.relative_to("/")
    installed = [place / "help" for root in ROOTS for place in sorted(Path("/").glob(root[1:]))]
    for place in [*installed, package] if folder is None else [Path(folder)]:
        if (place / language / "text").is_dir():
            return place / language / "text"
    return None


def fetch(language: str, folder: str | Path | None = None) -> Path:
    """The folder of the pages in a language after they were fetched. Raises FileNotFoundError where they cannot be."""
    reason = f"{folder} holds no folder {language}/text"
    if folder is None:
        try:
            return debian(package_of(language)) / HELP.relative_to("/") / language / "text"
        except OSError as error:
            reason = str(error)
    raise FileNotFoundError(f"LibreOffice's help pages in {language!r} are not here: apt-get install "
                            f"{package_of(language)}, or give folder= with LibreOffice's help folder ({reason})")


def package_of(language: str) -> str:
    """Debian's package of the pages in a language."""
    return f"libreoffice-help-{language.lower()}"


class Words(HTMLParser):
    """Collects the text between tags, entities resolved."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "br":
            self.parts.append(" ")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def words(html: str) -> str:
    """The text of a piece of html, white space made single blanks."""
    if "<" in html or "&" in html:
        parser = Words()
        parser.feed(html)
        parser.close()
        html = "".join(parser.parts)
    return " ".join(html.split())


def paragraphs(html: str) -> dict[str, str]:
    """id -> text of a page's paragraphs and headings; an id that stands for two different texts is left out."""
    found: dict[str, set[str]] = {}
    for _, attributes, key, inner in ELEMENT.findall(html):
        if 'class="switch' not in inner and not PROGRAM_TEXT.search(attributes):
            found.setdefault(key, set()).add(words(inner))
    return {key: min(texts) for key, texts in found.items() if len(texts) == 1 and texts != {""}}


def aligned(source: Path, target: Path) -> Iterator[tuple[str, str, str]]:
    """(name of the page, source text, target text) for each id that a page has in both languages."""
    pages = [path.relative_to(source) for path in sorted(source.rglob("*.html"))]
    for page in tqdm(pages, desc=f"{source.parent.name}-{target.parent.name}", unit="page"):
        if (target / page).is_file():
            ours, theirs = (paragraphs(read_text(root / page)) for root in (source, target))
            for key, text in ours.items():
                if key in theirs and theirs[key] != text:
                    yield page.as_posix(), text, theirs[key]
