"""Pages of HTML: escaped, self-contained, sorted as a reader expects, and the same in a real browser."""

import re

import numpy as np
import pytest
from browser import DARK, Reader, answer, needs_browser

from odeformer import plots
from odeformer.page import Page, svg

COLUMNS = ["name", "error", "share", "difference", "count"]
ROWS = [["rk4", 1.3e-05, "12 %", "+0.012 [-0.003, +0.020]", "1,024"],
        ["euler", 0.25, "3 %", "−0.5 [-0.6, -0.4]", "99"],
        ["ab2", None, "", "diverged", 7],
        ["dopri10", float("inf"), "100 %", "0.001", ""],
        ["dopri9", 2e-6, "7.5 %", "", "8"]]


def page_with_everything():
    page = Page("A title & <more>", "of `code`")
    page.heading("First")
    page.paragraph("Less < more & \"quotes\" 12 % <script>alert(1)</script> in `x < y`.")
    page.table(COLUMNS, ROWS, "What is <here>")
    page.heading("First", 3)
    for _ in range(2):
        page.figure(plots.stability_regions("rk4"), "Regions of <rk4>.", "odeformer stability rk4 --out 'a<b.html'")
    page.html('<p id="own">own</p>')
    return page


def test_text_is_escaped_and_elements_are_closed():
    read = Reader(str(page_with_everything()))
    assert "<script>alert(1)</script> in x < y." in read.text and "A title & <more>" in read.text
    assert "odeformer stability rk4 --out 'a<b.html'" in read.text
    assert sum(name == "script" for name, _ in read.elements) == 1
    assert ("p", {"id": "own"}) in read.elements


def test_nothing_is_loaded_and_the_policy_says_so():
    text = str(page_with_everything())
    read = Reader(text)
    assert read.loads() == []
    assert not re.search(r"@import|url\(\s*['\"]?http|<link|src\s*=", text)
    policy = next(attributes["content"] for name, attributes in read.elements
                  if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_ids_are_unique_and_every_reference_has_its_target():
    read = Reader(str(page_with_everything()))
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 50
    text = str(page_with_everything())
    wanted = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    assert wanted and wanted <= set(ids)


def test_headings_are_in_the_contents_in_order():
    page = Page("t")
    assert [page.heading("One"), page.heading("One"), page.heading("%", 4)] == ["one", "one-2", "section"]
    text = str(page)
    links = re.findall(r'<li class="level-(\d)"><a href="#([^"]+)">', text)
    assert links == [("2", "one"), ("2", "one-2"), ("4", "section")]


def test_figures_are_named_drawn_and_the_same_each_time():
    page = page_with_everything()
    drawn = [attributes for name, attributes in Reader(str(page)).elements if name == "svg"]
    assert [x["role"] for x in drawn] == ["img", "img"] and drawn[0]["aria-label"] == "Regions of <rk4>."
    figure = plots.stability_regions("rk4").figure
    assert svg(figure, "a-", "x") == svg(plots.stability_regions("rk4").figure, "a-", "x")
    assert "<metadata>" not in svg(figure, "a-", "x") and "<!DOCTYPE" not in svg(figure, "a-", "x")


def test_cells_show_four_digits_and_keep_all():
    page = Page("t")
    page.table(["x", "y"], [[1 / 3, True], [float("-inf"), None], [np.float64(0.1), 2]])
    text = str(page)
    assert 'data-value="0.1">0.1<' in text
    assert 'data-value="0.3333333333333333">0.3333<' in text and ">yes<" in text and ">−∞<" in text


@pytest.mark.parametrize(("call", "message"), [
    (lambda page: page.heading("x", 1), "level must be 2, 3 or 4"),
    (lambda page: page.table(["a", "b"], [[1, 2], [3]]), r"rows\[1\] must have 2 cells"),
    (lambda page: page.html('<img src="https://a.b/c.png">'), "load nothing from a network"),
    (lambda page: page.html("<style>@import '//a.b/c'</style>"), "load nothing from a network"),
    (lambda page: Page("  "), "title must be a text"),
])
def test_what_does_not_go_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(Page("t"))


def test_what_is_no_figure_is_refused():
    with pytest.raises(TypeError, match="figure must be a matplotlib Figure or Axes, got str"):
        Page("t").figure("x")


def test_the_file_is_whole_or_not_there(tmp_path):
    path = Page("t").write(tmp_path / "new" / "a.html")
    assert path.read_text().startswith("<!DOCTYPE html>") and list(path.parent.iterdir()) == [path]


SORT = """
var table=document.querySelector("table.sorts"),out={};
function column(i){return Array.from(table.tBodies[0].rows).map(function(r){return r.cells[i].textContent})}
function states(){return Array.from(table.tHead.rows[0].cells).map(function(c){return c.getAttribute("aria-sort")})}
out.first=Array.from(table.querySelectorAll("th button")).map(function(b,i){
  b.focus();
  var focused=document.activeElement===b;
  b.click();
  var up=column(0),said=states();
  b.click();
  return {focused:focused,up:up,down:column(0),said:said,then:states()[i]};
});
return out;
"""


@needs_browser
def test_tables_sort_in_a_browser(tmp_path):
    page = page_with_everything().write(tmp_path / "page.html")
    found = answer(page, SORT, tmp_path)["first"]
    expected = [["ab2", "dopri9", "dopri10", "euler", "rk4"],  # texts with numbers in them by these
                ["dopri9", "rk4", "euler", "dopri10", "ab2"],  # 2e-06, 1.3e-05, 0.25, ∞, blank
                ["euler", "dopri9", "rk4", "dopri10", "ab2"],  # 3 %, 7.5 %, 12 %, 100 %, blank
                ["euler", "dopri10", "rk4", "ab2", "dopri9"],  # -0.5, 0.001, 0.012, a text, blank
                ["ab2", "dopri9", "euler", "rk4", "dopri10"]]  # 7, 8, 99, 1,024, blank
    last = [0, 1, 1, 2, 1]  # texts among numbers, and blanks, stay behind, whichever way numbers go
    for i, (got, up) in enumerate(zip(found, expected, strict=True)):
        numbers, behind = up[:5 - last[i]], up[5 - last[i]:]
        assert got["up"] == up and got["down"] == numbers[::-1] + behind, COLUMNS[i]
        assert got["focused"] and got["said"] == ["ascending" if j == i else "none" for j in range(5)]
        assert got["then"] == "descending"


LAYOUT = """
var root=document.documentElement,box=document.querySelector(".scroll");
return {width:window.innerWidth,page:root.scrollWidth,table:box.scrollWidth,box:box.clientWidth,
  paper:getComputedStyle(document.body).backgroundColor,ink:getComputedStyle(document.body).color,
  open:document.querySelector("nav details").open};
"""


@needs_browser
def test_a_phone_scrolls_tables_in_their_box_and_not_the_page(tmp_path):
    page = page_with_everything().write(tmp_path / "page.html")
    found = answer(page, LAYOUT, tmp_path, DARK, width=390)
    assert found["width"] == 390 and found["page"] <= 390
    assert found["table"] > found["box"] and not found["open"]
    dark, light = (sum(map(int, re.findall(r"\d+", found[name])[:3])) / 3 for name in ("paper", "ink"))
    assert dark < 60 and light > 200


@needs_browser
def test_the_copy_button_copies_or_says_how(tmp_path):
    page = page_with_everything().write(tmp_path / "page.html")
    script = """
    var taken=null;
    Object.defineProperty(navigator,"clipboard",{value:{writeText:function(t){taken=t;
      return {then:function(done){done()}}}},configurable:true});
    var button=document.querySelector("button.copy");
    button.click();
    return {taken:taken,said:button.textContent};
    """
    assert answer(page, script, tmp_path) == {"taken": "odeformer stability rk4 --out 'a<b.html'", "said": "copied"}
