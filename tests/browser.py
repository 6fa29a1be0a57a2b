"""Pages in a real browser: headless Chromium, where it is installed."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
DARK = "--blink-settings=preferredColorScheme=0"


def answer(page, script, tmp_path, *options, width=None):
    """What a script answers that runs at the end of a page: the body of a function that returns JSON values.

    width: of a frame around the page, as Chromium's own window is never narrower than 500 pixels.
    """
    text = Path(page).read_text(encoding="utf-8")
    probe = ('<pre id="answer"></pre><script>document.getElementById("answer").textContent='
             f"JSON.stringify((function(){{{script}}})())</script></body>")
    text = text.replace("</body>", probe)
    if width is not None:
        text = (f'<!DOCTYPE html><iframe id="frame" width="{width}" height="1000" style="border:0" '
                f'srcdoc="{escape(text)}"></iframe><pre id="answer"></pre><script>frame.onload=function(){{document.'
                'getElementById("answer").textContent=frame.contentDocument.getElementById("answer").textContent}'
                "</script>")
    copy = tmp_path / "probe.html"
    copy.write_text(text, encoding="utf-8")
    dumped = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options,
                             f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,1200",
                             "--virtual-time-budget=3000", "--dump-dom", copy.as_uri()],
                            capture_output=True, text=True, timeout=90)
    found = re.findall(r'<pre id="answer">(.+?)</pre>', dumped.stdout, re.DOTALL)
    assert found, dumped.stderr[-2000:]
    return json.loads(unescape(found[-1]))


class Reader(HTMLParser):
    """Elements (name, attributes) of a page in order, which must be closed as they were opened, and its text."""

    VOID = ("meta", "br", "input", "hr", "img", "link")

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.open = [], "", []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in self.VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if not {"script", "style", "svg"} & set(self.open):
            self.text += data.replace("\N{NO-BREAK SPACE}", " ")

    def loads(self):
        """Addresses that the page would load something from."""
        return [value for _, attributes in self.elements for key, value in attributes.items()
                if key in ("src", "srcset", "poster", "data", "href", "xlink:href") and value
                and not value.startswith(("#", "data:"))]
