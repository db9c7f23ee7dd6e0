"""Every page of the site in Chromium, wide in light and narrow in dark colors: nothing is cut, too long or pale."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import file_server, running

WIDE, NARROW = 1280, 390
TALLEST_PAGE, TALLEST_ROW, LEAST_CONTRAST = 8000, 300, 4.5

EMPTY_INDEX = '{"config": {"lang": ["en"], "separator": " ", "pipeline": [], "fields": {}}, "docs": []}'
"""Index of the search, which takes longer to read than the page."""

# The height is that of the page as it opens; everything else is measured with all folds open, after the next frame, in
# which the browser tells scripts the new sizes.
MEASURE = """async ([tallestRow, leastContrast]) => {
  const root = document.documentElement, height = root.scrollHeight;
  document.querySelectorAll("details").forEach(each => each.open = true);
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const all = (selector, isWrong) => [...document.querySelectorAll(selector)]
    .filter(each => each.offsetParent && isWrong(each)).map(each => each.innerText.slice(0, 60));
  const channels = color => color.match(/[\\d.]+/g).map(Number);
  const onto = (color, below) => below.map((value, index) => value + (color[3] ?? 1) * (color[index] - value));
  const ground = each => each
    ? onto(channels(getComputedStyle(each).backgroundColor), ground(each.parentElement)) : [255, 255, 255];
  const luminance = color => {
    const linear = color.map(value => value > 10 ? ((value / 255 + 0.055) / 1.055) ** 2.4 : value / 255 / 12.92);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const contrast = each => {
    const below = ground(each), text = onto(channels(getComputedStyle(each).color), below);
    const [dark, light] = [luminance(below), luminance(text)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  return {
    height,
    overflow: root.scrollWidth - root.clientWidth,
    cut: all("pre > code", each => each.scrollWidth > each.clientWidth + 1),
    rows: all("tr", each => each.offsetHeight > tallestRow),
    unmarked: all(".md-typeset__scrollwrap, math[display=block]", each =>
      each.scrollWidth > each.clientWidth + 2 && !each.closest(".more")),
    pale: all("article :is(td, th, summary, code)", each => contrast(each) < leastContrast),
  };
}"""


DARK = """document.body.dataset.mdColorScheme &&= "slate" """


@pytest.fixture(scope="module")
def page(chromium: Any) -> Iterator[Any]:
    """A page of the browser for all addresses, and the errors that it has had since they were last cleared."""
    with chromium.new_context() as context, context.new_page() as page:
        page.wrong = []
        page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        yield page


def problems(page: Any, address: str) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with a page, with the width of the window: wide in light colors, then narrow in dark ones."""
    page.wrong.clear()
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": WIDE, "height": 900})
    page.goto(address)
    page.add_style_tag(content="* { transition: none !important }")
    found = {WIDE: page.evaluate(MEASURE, [TALLEST_ROW, LEAST_CONTRAST])}
    page.set_viewport_size({"width": NARROW, "height": 900})
    page.emulate_media(color_scheme="dark")
    page.evaluate(DARK)
    found[NARROW] = page.evaluate(MEASURE, [TALLEST_ROW, LEAST_CONTRAST])
    yield from ((WIDE, f"an error: {error}") for error in page.wrong)
    if found[WIDE]["height"] > TALLEST_PAGE:
        yield WIDE, f"{found[WIDE]['height']} pixels high"
    yield from ((WIDE, f"cut code: {code}") for code in found[WIDE]["cut"])
    for width, measured in found.items():
        if measured["overflow"] > 0:
            yield width, f"{measured['overflow']} pixels wider than the window"
        yield from ((width, f"a row of more than {TALLEST_ROW} pixels: {row}") for row in measured["rows"])
        yield from ((width, f"too little contrast: {text}") for text in measured["pale"])
        yield from ((width, f"scrolls without a sign: {text}") for text in measured["unmarked"])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which it is served."""
    with running(file_server(tmp_path)) as address:
        yield tmp_path, address


SCHEMES = """<style>[data-md-color-scheme=slate] td { background: black; color: #333 }</style>
<script>document.body.dataset.mdColorScheme = "default"</script><table><tr><td>cell</table>"""


@pytest.mark.parametrize(
    ("width", "content", "problem"),
    [
        (WIDE, "<p>Text.", ""),
        (WIDE, "<div style='width: 1300px'>x", "pixels wider than the window"),
        (NARROW, "<div style='width: 400px'>x", "10 pixels wider than the window"),
        (WIDE, "<div style='height: 9000px'>", "9000 pixels high"),
        (WIDE, "<details><div style='height: 9000px'></details>", ""),
        (WIDE, f"<pre><code style='display: block; overflow: auto'>{'x' * 300}", "cut code: xxx"),
        (NARROW, "<details><table><tr><td style='height: 400px'>cell</table></details>", "a row of more than 300"),
        (NARROW, "<table><tr><td style='background: black; color: #333'>cell</table>", "too little contrast: cell"),
        (WIDE, SCHEMES, ""),
        (NARROW, SCHEMES, "too little contrast: cell"),
        (NARROW, f"<div class=md-typeset__scrollwrap style='overflow: auto'>{'x' * 300}", "scrolls without a sign"),
        (WIDE, "<script>x.y</script>", "an error: x is not defined"),
    ],
)
def test_a_problem_of_a_page_is_found(served, page, width, content, problem):
    folder, address = served
    (folder / "page.html").write_text(
        f"<!doctype html><link rel=icon href='data:,'><body style='margin: 0'><article>{content}"
    )
    found = [line for at, line in problems(page, f"{address}/page.html") if at == width]
    assert [problem if problem in line else line for line in found] == [problem][: bool(problem)]


@pytest.mark.slow
def test_every_page_fits_its_window_and_can_be_read(served, page, site):
    folder, address = served
    shutil.copytree(site, folder, dirs_exist_ok=True)
    (folder / "search" / "search_index.json").write_text(EMPTY_INDEX)
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
    assert len(pages) > 50
    found = [
        f"{name}, {width} pixels: {problem}" for name in pages for width, problem in problems(page, f"{address}/{name}")
    ]
    assert found == []
