"""A page: one self-contained HTML file of text, tables that sort, figures and the commands that made them."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from odeformer.files import write_atomically

# a number at the start of a cell, as the script below reads it: "1.3e-05", "12 %", "+0.012 [-0.003, +0.020]", "1,024"
NUMBER = re.compile(r"^[<>≤≥≈~]?\s*[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?(?=$|[\s%‰×±\[(/°])", re.IGNORECASE)
LOADS = re.compile(r"""(?:\b(?:src|srcset|poster|data|action)\s*=|<link\b[^>]*\bhref\s*=|@import|\burl\()\s*["']?\s*"""
                   r"""(?:https?:)?//""", re.IGNORECASE)


class Page:
    """Parts in the order in which they are added; ``write`` makes the file. All text is escaped, and `back ticks` make
    code of a word; ``html`` alone takes markup.

    The file loads nothing, reads on a phone, in the dark and on paper, and works without a mouse.
    """

    def __init__(self, title: str, subtitle: str = ""):
        if not isinstance(title, str) or not title.strip():
            raise ValueError(f"title must be a text that is not empty, got {title!r}")
        self.title, self.subtitle = title, subtitle
        self._parts: list[str] = []
        self._contents: list[tuple[int, str, str]] = []  # level, anchor, text
        self._anchors: set[str] = set()
        self._n_figures = 0

    def heading(self, text: str, level: int = 2) -> str:
        """A heading with an anchor and an entry in the contents; returns the anchor. Raises ValueError unless level is
        2, 3 or 4: 1 is the title."""
        if level not in (2, 3, 4):
            raise ValueError(f"level must be 2, 3 or 4, got {level!r}")
        anchor = self._anchor(text)
        self._contents.append((level, anchor, text))
        self._parts.append(f'<h{level} id="{anchor}">{inline(text)}</h{level}>')
        return anchor

    def _anchor(self, text: str) -> str:
        base = re.sub(r"\W+", "-", text.lower()).strip("-") or "section"
        anchor, n = base, 1
        while anchor in self._anchors:
            n += 1
            anchor = f"{base}-{n}"
        self._anchors.add(anchor)
        return anchor

    def paragraph(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{inline(text)}</p>")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> None:
        """A table that sorts by a click on a heading, or by Enter or Space on it: cells that begin with a number as
        numbers, then texts, then blanks.

        Cells: texts, numbers, bools; None is a blank. A number sorts by its full value and shows four digits. Raises
        ValueError for a row that has not one cell a column.
        """
        rows = [list(row) for row in rows]
        for i, row in enumerate(rows):
            if len(row) != len(columns):
                raise ValueError(f"rows[{i}] must have {len(columns)} cells, one for each column; got {len(row)}")
        numeric = [_is_numeric([row[j] for row in rows]) for j in range(len(columns))]
        kinds = [' class="number"' if yes else "" for yes in numeric]
        head = "".join(f'<th scope="col" aria-sort="none"{kind}><button type="button">{inline(str(name))}</button></th>'
                       for name, kind in zip(columns, kinds, strict=True))
        body = "\n".join("<tr>" + "".join(f"<td{kind}{_sort_key(cell)}>{inline(shown(cell))}</td>"
                                          for cell, kind in zip(row, kinds, strict=True)) + "</tr>" for row in rows)
        label = html.escape(plain(caption) or "table")
        words = f'<p class="caption">{inline(caption)}</p>' if caption else ""
        self._parts.append(f'{words}<div class="scroll" role="region" tabindex="0" aria-label="{label}">'
                           f'<table class="sorts" aria-label="{label}"><thead><tr>{head}</tr></thead>\n'
                           f"<tbody>{body}</tbody></table></div>")

    def figure(self, figure: Any, caption: str = "", command: str = "", *, alt: str = "") -> None:
        """A matplotlib Figure, or the one that Axes are on, as SVG within the page. ``command``: what made it, with a
        button that copies it. ``alt``: what is said in its place; the caption if empty.

        Raises TypeError for what is no figure.
        """
        while not hasattr(figure, "savefig") and hasattr(figure, "figure"):
            figure = figure.figure
        if not hasattr(figure, "savefig"):
            raise TypeError(f"figure must be a matplotlib Figure or Axes, got {type(figure).__name__}")
        self._n_figures += 1
        drawn = svg(figure, f"figure-{self._n_figures}-", alt or plain(caption) or f"figure {self._n_figures}")
        words = f"<figcaption>{inline(caption)}</figcaption>" if caption else ""
        code = "" if not command else (f'<div class="command"><code>{html.escape(command)}</code>'
                                       '<button type="button" class="copy">copy</button></div>')
        self._parts.append(f'<figure><div class="card" tabindex="0">{drawn}</div>{words}{code}</figure>')

    def html(self, fragment: str) -> None:
        """Markup as it is, for what is interactive. Raises ValueError where it would load something from a network."""
        found = LOADS.search(fragment)
        if found:
            raise ValueError(f"fragment must load nothing from a network, and holds {found.group(0)!r}")
        self._parts.append(fragment)

    def __str__(self) -> str:
        """The whole file."""
        entries = "".join(f'<li class="level-{level}"><a href="#{anchor}">{inline(text)}</a></li>'
                          for level, anchor, text in self._contents)
        contents = (f'<nav aria-label="contents"><details open><summary>Contents</summary><ul>{entries}</ul></details>'
                    "</nav>") if len(self._contents) > 1 else ""
        subtitle = f'<p class="subtitle">{inline(self.subtitle)}</p>' if self.subtitle else ""
        body = "\n".join(self._parts)
        return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
                '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
                '<meta name="color-scheme" content="light dark">\n'
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
                f"<title>{html.escape(plain(self.title))}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
                f"<header><h1>{inline(self.title)}</h1>{subtitle}</header>\n{contents}\n<main>\n{body}\n</main>\n"
                f"<script>{SCRIPT}</script>\n</body>\n</html>\n")

    def write(self, path: str | Path) -> Path:
        """Write the file, whole or not at all; returns its path."""
        text = str(self)
        write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))
        return Path(path)


def inline(text: str) -> str:
    """Text as markup: escaped, `code` between back ticks."""
    text = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", html.escape(str(text)))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def plain(text: str) -> str:
    """Text without back ticks."""
    return str(text).replace("`", "")


def shown(cell: Any) -> str:
    """A cell as it is read: four significant digits of a float, nothing for None."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return "∞" if cell == math.inf else "−∞" if cell == -math.inf else f"{cell:.4g}"
    return str(cell)


def _sort_key(cell: Any) -> str:
    """The full value of a number, where what is shown is less."""
    if isinstance(cell, float) and not math.isnan(cell):
        return f' data-value="{float(cell)!r}"' if math.isfinite(cell) else f' data-value="{"-" * (cell < 0)}Infinity"'
    return ""


def _is_numeric(cells: Sequence[Any]) -> bool:
    """Whether at least half of what is there begins with a number; the script below decides in the same way."""
    texts = [shown(cell).strip() for cell in cells]
    texts = [text for text in texts if text not in BLANKS]
    numbers = sum(bool(NUMBER.match(text.replace("−", "-"))) or "∞" in text for text in texts)
    return bool(texts) and 2 * numbers >= len(texts)


BLANKS = ("", "-", "–", "—", "nan")


def svg(figure: Any, prefix: str, label: str) -> str:
    """A figure as an svg element whose ids begin with ``prefix``: ids of several figures on a page must differ.

    The same figure gives the same text. Its width is that of the figure in print times 1.5, as far as there is room.
    """
    from matplotlib import rc_context

    sink = io.StringIO()
    with rc_context({"svg.hashsalt": prefix, "svg.fonttype": "path"}), _plain_ticks(figure):
        figure.savefig(sink, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = sink.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg"):], flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(url\(|xlink:href="|\bhref=")#', rf"\1#{prefix}", text)
    width = float(re.search(r'width="([\d.]+)pt"', text).group(1)) / 0.75  # CSS pixels
    size = f"min-width:{min(width, 640):.0f}px;width:{1.5 * width:.0f}px"
    opening = re.sub(r'\s(width|height)="[\d.]+pt"', "", text[:text.index(">")])
    return (f'{opening} role="img" aria-label="{html.escape(label)}" style="{size}"'
            f'{text[text.index(">"):].rstrip()}')


@contextmanager
def _plain_ticks(figure: Any) -> Iterator[None]:
    """Numbers at ticks set as plain text, which looks the same and takes half the time."""
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    formatters = [axis.get_major_formatter() for axis in axes]
    formatters = [x for x in formatters if hasattr(x, "set_useMathText") and x.get_useMathText()]
    for formatter in formatters:
        formatter.set_useMathText(False)
    try:
        yield
    finally:
        for formatter in formatters:
            formatter.set_useMathText(True)


POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

CSS = """
:root{--paper:#fdfdfc;--ink:#1d2024;--quiet:#5c636b;--line:#dcdedc;--soft:#f3f4f2;--accent:#00619c;--card:#fff;
--good:#00714f;--warn:#9a5b00;--bad:#b03a00}
@media(prefers-color-scheme:dark){:root{--paper:#16181b;--ink:#e4e5e3;--quiet:#9aa1a8;--line:#34383d;--soft:#1f2226;
--accent:#7cc4f2;--card:#fff;--good:#4cc79d;--warn:#e5ab4a;--bad:#f08b57}.card{filter:brightness(.86)}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
@media(prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0 auto;padding:2.2rem 1.2rem 5rem;max-width:62rem;background:var(--paper);color:var(--ink);
font:1rem/1.6 Charter,"Bitstream Charter","Source Serif 4",Georgia,Cambria,serif;overflow-wrap:break-word}
h1,h2,h3,h4,nav,table,button,figcaption,.subtitle,.caption,.ui{font-family:system-ui,-apple-system,
"Segoe UI",Roboto,"Noto Sans",
sans-serif}
h1{font-size:clamp(1.5rem,1.1rem + 2vw,2.1rem);line-height:1.2;letter-spacing:-.015em;margin:0;font-weight:680}
h2{font-size:1.35rem;line-height:1.3;margin:3rem 0 .8rem;padding-top:.9rem;border-top:1px solid var(--line)}
h3{font-size:1.08rem;line-height:1.35;margin:2.2rem 0 .5rem}
h4{font-size:.95rem;margin:1.6rem 0 .4rem}
.subtitle{color:var(--quiet);margin:.5rem 0 0;max-width:46rem}
p{max-width:44rem;margin:.7rem 0}
a{color:var(--accent);text-underline-offset:.15em;text-decoration-thickness:.06em}
code{font:.88em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;background:var(--soft);
border-radius:3px;padding:.08em .3em}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
nav{margin:1.4rem 0 0;font-size:.88rem}
nav summary{cursor:pointer;color:var(--quiet)}
nav ul{list-style:none;margin:.5rem 0 0;padding:0;columns:17rem;column-gap:2rem}
nav li{padding:.16rem 0;break-inside:avoid}
nav .level-3{padding-left:1rem}nav .level-4{padding-left:2rem}
nav a{color:inherit;text-decoration:none}nav a:hover{text-decoration:underline;color:var(--accent)}
.caption{color:var(--quiet);font-size:.86rem;line-height:1.45;margin:1.2rem 0 .5rem}
.scroll{overflow-x:auto;margin:1.2rem 0}.caption+.scroll{margin-top:0}
table{border-collapse:collapse;font-size:.86rem;line-height:1.4;font-variant-numeric:tabular-nums}
th,td{padding:.38rem .8rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{padding-left:.2rem}
thead th{border-bottom:1.5px solid var(--quiet);vertical-align:bottom;padding-top:0}
tbody tr:hover{background:var(--soft)}
td.number{text-align:right;white-space:nowrap}th.number{text-align:right}
th button{all:unset;cursor:pointer;font-weight:640;border-radius:2px}
th button:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
th button::after{content:"\\2195";color:var(--line);padding-left:.3em;font-weight:400}
th[aria-sort=ascending] button::after{content:"\\2191";color:var(--accent)}
th[aria-sort=descending] button::after{content:"\\2193";color:var(--accent)}
figure{margin:1.4rem 0}
.card{background:var(--card);color:#1d2024;border:1px solid var(--line);border-radius:6px;padding:.7rem;
overflow-x:auto;width:fit-content;max-width:100%}
.card svg{display:block;max-width:100%;height:auto}
figcaption{color:var(--quiet);font-size:.86rem;line-height:1.45;max-width:46rem;margin:.5rem 0 0}
.command{display:flex;gap:.5rem;align-items:flex-start;margin:.5rem 0 0;max-width:46rem}
.command code{flex:0 1 auto;min-width:0;overflow-x:auto;white-space:pre;padding:.2rem .5rem}
.copy,.ui button{font-size:.78rem;color:var(--quiet);background:none;border:1px solid var(--line);border-radius:4px;
padding:.2rem .55rem;cursor:pointer}
.copy:hover,.ui button:hover{color:var(--ink);border-color:var(--quiet)}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
@media(max-width:34rem){body{padding:1.4rem 1rem 3rem}th,td{padding:.34rem .55rem}.card{padding:.4rem}
h2{margin-top:2.2rem}}
@media print{:root{--paper:#fff;--ink:#000;--quiet:#444;--line:#bbb;--soft:#fff}body{max-width:none;padding:0;
font-size:10pt}nav,.copy,th button::after{display:none}.scroll,.card,.command code{overflow:visible}
.card{border:0;padding:0;filter:none}.card svg{min-width:0!important}figure,tr{break-inside:avoid}
h2,h3,h4{break-after:avoid}thead{display:table-header-group}.command code{white-space:pre-wrap}a{color:inherit}}
"""

SCRIPT = r"""
(function(){
"use strict";
var number=new RegExp(/^[<>\u2264\u2265\u2248~]?\s*([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)/.source+
  /(?=$|[\s%\u2030\u00d7\u00b1\[(\/\u00b0])/.source,"i");
var blanks=["","-","\u2013","\u2014","nan"];
function key(cell){
  if(cell.dataset.value!==undefined)return {number:Number(cell.dataset.value)};
  var text=cell.textContent.trim().replace(/\u2212/g,"-");
  if(blanks.indexOf(text.toLowerCase())>=0)return {blank:true};
  if(/^[-+]?\u221e$/.test(text))return {number:text[0]==="-"?-Infinity:Infinity,text:text};
  var found=number.exec(text);
  return found?{number:Number(found[1].replace(/,/g,"")),text:text}:{text:text};
}
function rank(k,numeric){return k.blank?2:numeric&&k.number===undefined?1:0}
function sort(table,column,down){
  var body=table.tBodies[0],rows=Array.from(body.rows).map(function(row,i){
    return {row:row,at:i,key:key(row.cells[column])}});
  var there=rows.filter(function(r){return !r.key.blank});
  var numeric=2*there.filter(function(r){return r.key.number!==undefined}).length>=there.length;
  rows.sort(function(a,b){
    var apart=rank(a.key,numeric)-rank(b.key,numeric),x=a.key,y=b.key,order;
    if(apart)return apart;
    if(x.blank)return a.at-b.at;
    order=numeric&&x.number!==undefined?(x.number<y.number?-1:x.number>y.number?1:0)
      :String(x.text===undefined?x.number:x.text).localeCompare(String(y.text===undefined?y.number:y.text),"en",
        {numeric:true});
    return (down?-order:order)||a.at-b.at;
  });
  rows.forEach(function(r){body.appendChild(r.row)});
  Array.from(table.tHead.rows[0].cells).forEach(function(cell,i){
    cell.setAttribute("aria-sort",i===column?(down?"descending":"ascending"):"none")});
}
document.addEventListener("click",function(event){
  var button=event.target.closest("table.sorts th button");
  if(button){
    var cell=button.parentNode;
    sort(cell.closest("table"),cell.cellIndex,cell.getAttribute("aria-sort")==="ascending");
    return;
  }
  button=event.target.closest("button.copy");
  if(button)copy(button,button.parentNode.querySelector("code").textContent);
});
function copy(button,text){
  function say(word){button.textContent=word;setTimeout(function(){button.textContent="copy"},1500)}
  function byHand(){
    var area=document.createElement("textarea");
    area.value=text;area.style.position="fixed";area.style.opacity="0";
    document.body.appendChild(area);area.select();
    var done=false;
    try{done=document.execCommand("copy")}catch(e){done=false}
    area.remove();button.focus();say(done?"copied":"select it by hand");
  }
  if(navigator.clipboard&&navigator.clipboard.writeText)
    navigator.clipboard.writeText(text).then(function(){say("copied")},byHand);
  else byHand();
}
if(window.matchMedia("(max-width: 34rem)").matches)
  document.querySelectorAll("nav details").forEach(function(box){box.open=false});
})();
"""
