import base64
import gzip
import html
import io
import json
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from hf_sphere.visualization import interactive, write_interactive_sphere
from hf_sphere.visualization.figures import COLORS
from hf_sphere.visualization.interactive import class_colors, make_sheets

NAMES = [f"kind {index}" for index in range(10)]
EVIL = '</script><b title="x">&amp;'


@pytest.fixture(autouse=True)
def _plotly():
    pytest.importorskip("plotly")


def spiral(count):
    """Points spread over the sphere, far from each other."""
    height = (torch.arange(count, dtype=torch.float64) + 0.5) / (count / 2) - 1
    angle = 2.4 * torch.arange(count)
    radius = (1 - height.square()).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin(), height], dim=-1)


def content_of(path):
    page = path.read_text(encoding="utf-8")
    packed = re.search(r'id="content">([^<]*)</script>', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def unpack(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


# File content


def test_points_are_unit_vectors_in_input_order_in_a_reproducible_file(tmp_path):
    points, labels = 7 * torch.randn(30, 3), torch.arange(30) % 3
    first, second = (write_interactive_sphere(tmp_path / "new" / name, points, labels, [*"abc"]) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "b"]
    content = content_of(first)
    shown = unpack(content["points"], "<i2").reshape(30, 3) / 32767
    assert shown == pytest.approx(torch.nn.functional.normalize(points, dim=-1).numpy(), abs=2e-5)
    assert unpack(content["labels"], "<i4").tolist() == labels.tolist()
    assert content["note"] == ""


def test_the_path_is_shown_by_a_notebook_and_still_a_path(tmp_path):
    path = write_interactive_sphere(str(tmp_path / "a.html"), torch.eye(3), torch.zeros(3).long(), ["a"])
    assert path == tmp_path / "a.html"
    assert str(path) == str(tmp_path / "a.html")
    shown = re.fullmatch('<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', path._repr_html_())[1]
    assert html.unescape(shown) == path.read_text(encoding="utf-8")
    assert path.parent._repr_html_() is None


def test_points_and_directions_of_other_dimensions_are_on_the_equator_or_projected_and_the_page_notes_it(tmp_path):
    points, path = torch.tensor([[3.0, 0.0], [0.0, -2.0]]), tmp_path / "a.html"
    content = content_of(write_interactive_sphere(path, points, torch.tensor([0, 1]), [*"ab"], directions=points))
    assert unpack(content["points"], "<i2").tolist() == [32767, 0, 0, 0, -32767, 0]
    assert content["directions"] == content["points"]
    assert "equator" in content["note"]
    flat = torch.randn(50, 3, dtype=torch.float64) @ torch.linalg.qr(torch.randn(8, 3, dtype=torch.float64)).Q.T
    content = content_of(write_interactive_sphere(path, flat, torch.arange(50), NAMES * 5, directions=flat))
    assert content["directions"] == content["points"]
    assert "8 coordinates, projected on the three leading principal directions" in content["note"]
    assert "100 % of the second moment" in content["note"]


def test_names_texts_and_title_are_escaped(tmp_path):
    path = write_interactive_sphere(
        tmp_path / "a.html", torch.eye(3), torch.zeros(3).long(), [EVIL], texts=[EVIL] * 3, title=EVIL + "{{script}}"
    )
    page = path.read_text(encoding="utf-8")
    assert '<b title="x">' not in page
    assert page.count('"use strict";\n\nconst element') == 1
    content = content_of(path)
    assert content["names"] == [EVIL]
    assert content["texts"] == [EVIL] * 3


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_ten_thousand_points_with_noise_images_take_less_than_6_mb(tmp_path, shape):
    noise = torch.randint(0, 256, (10_000, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    path = write_interactive_sphere(
        tmp_path / "a.html", torch.randn(10_000, 64), torch.arange(10_000) % 10, NAMES, images=noise
    )
    assert path.stat().st_size < 6_000_000


# Thumbnails


def tiles_of(made):
    """Every thumbnail of the sheets, in order: (N or more, h, w, 3)."""
    for sheet in made["sheets"]:
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet))).convert("RGB")).astype(int)
        rows = pixels.shape[0] // made["height"]
        assert pixels.shape[1] == made["columns"] * made["width"]
        tiles = pixels.reshape(rows, made["height"], made["columns"], made["width"], 3)
        yield from tiles.transpose(0, 2, 1, 3, 4).reshape(-1, made["height"], made["width"], 3)


def test_thumbnails_are_at_the_positions_that_the_page_reads_in_their_colors(monkeypatch):
    monkeypatch.setattr(interactive, "SHEET_SIDE", 100)
    images = (torch.arange(40, dtype=torch.uint8) * 6).view(40, 1, 1, 1).expand(40, 1, 16, 24)
    made = make_sheets(images)
    assert (made["width"], made["height"], made["columns"], made["per_sheet"]) == (24, 16, 4, 24)
    assert len(made["sheets"]) == 2
    seen = [tile[4:-4, 4:-4].mean() for tile in tiles_of(made)][:40]
    assert seen == pytest.approx(images[:, 0, 0, 0].tolist(), abs=6)
    red = torch.tensor([220, 40, 40], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    (tile,) = tiles_of(make_sheets(red))
    assert tile.mean((0, 1)) == pytest.approx([220, 40, 40], abs=8)


def test_large_and_many_images_are_downscaled_with_their_aspect_ratio():
    made = make_sheets(torch.zeros(2, 3, 300, 600, dtype=torch.uint8))
    assert (made["width"], made["height"]) == (128, 64)
    made = make_sheets(torch.zeros(1, 1, 28, 28, dtype=torch.uint8).expand(40_000, 1, 28, 28))
    assert made["width"] == 16


# Colors


@pytest.mark.parametrize("count", [1, 11, 100, 1000, 3000])
def test_every_class_has_a_color_and_the_first_ten_those_of_the_other_figures(count):
    colors = class_colors(count)
    assert len(colors) == count
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in colors)
    assert len(set(colors)) > 0.9 * count or count > 1000
    assert colors[:10] == COLORS[:count]


# Invalid input


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"points": torch.ones(4, 1)}, "cannot be shown in 2 dimensions"),
        ({"labels": torch.tensor([0, 1, 2, 0])}, "from 0 to 1"),
        ({"images": torch.zeros(3, 1, 8, 8, dtype=torch.uint8)}, "3 images for 4 points"),
        ({"texts": ["a"]}, "1 texts for 4 points"),
    ],
)
def test_invalid_input_is_rejected_without_leaving_a_file(tmp_path, changed, message):
    given = {"points": torch.ones(4, 3), "labels": torch.tensor([0, 1, 1, 0]), "class_names": ["a", "b"]}
    with pytest.raises((TypeError, ValueError), match=message):
        write_interactive_sphere(tmp_path / "a.html", **(given | changed))
    assert list(tmp_path.iterdir()) == []


def test_missing_plotly_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[plotly\]'"):
        write_interactive_sphere(tmp_path / "a.html", torch.eye(3), torch.zeros(3).long(), ["a"])


# In a browser


@pytest.fixture(scope="module")
def open_page(open_page):
    """Open a file and wait until it is drawn."""

    def opened(path, **options):
        page = open_page(
            path.as_uri(), **{"viewport": {"width": 1000, "height": 700}, "color_scheme": "light"} | options
        )
        page.wait_for_selector("html[data-drawn]")
        return page

    return opened


@pytest.fixture(scope="module")
def drawn(open_page, tmp_path_factory):
    """Thirty distant points in ten classes; the gray level of each image encodes the number of its point."""
    images = (torch.arange(30, dtype=torch.uint8) * 8).view(30, 1, 1, 1).expand(30, 1, 28, 28)
    page = open_page(
        write_interactive_sphere(
            tmp_path_factory.mktemp("page") / "sphere.html",
            spiral(30),
            torch.arange(30) % 10,
            [EVIL, *NAMES[1:]],
            images=images,
            directions=spiral(30)[:10],
            texts=[f"number {index} <i>" for index in range(30)],
            title=EVIL,
        )
    )
    page.start = page.evaluate("element('sphere').layout.scene.camera")
    yield page
    page.close()


@pytest.fixture
def page(drawn):
    """The freshly opened page."""
    yield drawn
    drawn.emulate_media(color_scheme="light")
    drawn.mouse.move(5, 5)
    drawn.evaluate("camera => Plotly.relayout(element('sphere'), {'scene.camera': camera})", drawn.start)
    drawn.evaluate("Plotly.restyle(element('sphere'), {visible: true})")


IN_FRONT = """() => {
  const plot = element("sphere"), view = viewOf(plot.layout.scene.camera), frame = plot.getBoundingClientRect();
  let nearest = {distance: Infinity};
  plot.data.slice(0, 10).forEach((trace, label) => trace.x.forEach((x, row) => {
    const place = inCube([x, trace.y[row], trace.z[row]]), distance = Math.hypot(...minus(place, view.eye));
    const [left, top] = seenAt(place, view, frame);
    if (distance < nearest.distance)
      nearest = {distance, point: label + 10 * row, x: frame.left + left, y: frame.top + top};
  }));
  return nearest;
}"""
"""Number and screen position of the point nearest to the camera."""


def visible_classes(page):
    traces = page.evaluate("element('sphere').data.slice(0, 10).map((trace) => trace.visible ?? true)")
    return [index for index, seen in enumerate(traces) if seen is True]


def test_the_page_draws_every_class_without_errors_and_names_literally(page):
    traces = page.evaluate("element('sphere').data.map(({name, x, showlegend}) => [name, x.length, showlegend])")
    assert [trace[0] for trace in traces if trace[2]][1:] == NAMES[1:]
    assert [trace[1] for trace in traces if trace[2]] == [3] * 10
    assert "30 points, 10 classes" in page.inner_text("header")
    assert page.locator("#message").is_hidden()
    legend = page.locator("#legend button").first.text_content()
    assert legend == page.inner_text("h1") == page.title() == page.locator("#names span").first.text_content() == EVIL
    assert page.locator("b").count() == 0
    assert page.wrong == []


def test_hovering_over_a_point_shows_its_image_and_text(page):
    nearest = page.evaluate(IN_FRONT)
    page.mouse.move(nearest["x"] - 3, nearest["y"] - 3)
    page.mouse.move(nearest["x"], nearest["y"])
    number = nearest["point"]
    page.wait_for_selector(f"#thumbnail[data-point='{number}']")
    words = page.inner_text("#card")
    assert f"number {number} <i>" in words
    assert f"point {number}" in words
    assert ([EVIL, *NAMES[1:]])[number % 10] in words
    gray = page.evaluate("[...element('thumbnail').getContext('2d').getImageData(14, 14, 1, 1).data]")
    assert gray[:3] == pytest.approx([8 * number] * 3, abs=6)
    page.mouse.move(5, 5)
    page.wait_for_selector("#card", state="hidden")


def test_clicking_the_legend_hides_a_class_its_name_and_its_direction(page):
    front = page.locator("#names span").evaluate_all("all => all.findIndex(each => !each.hidden)")
    name, entry = page.locator("#names span").nth(front), page.locator("#legend button").nth(front)
    before = page.evaluate("element('sphere').data[12].x.length")
    assert name.is_visible()
    entry.click()
    page.wait_for_function(f"element('sphere').data[{front}].visible === 'legendonly'")
    page.wait_for_function(f"element('sphere').data[12].x.length === {before - 3}")
    assert visible_classes(page) == [index for index in range(10) if index != front]
    assert name.is_hidden()
    assert entry.get_attribute("aria-pressed") == "false"


def press(page, *keys):
    """Press keys in the first entry of the legend, which is reached by the key Tab."""
    page.locator("#theme").focus()
    for _ in range(3):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#legend') !== null"):
            break
    assert page.evaluate("document.activeElement.textContent") == EVIL
    for key in keys:
        page.keyboard.press(key)


ACTIONS = {
    "double click": (lambda page: page.locator("#legend button").nth(4).dblclick(), [4]),
    "Enter": (lambda page: press(page, "Enter"), [*range(1, 10)]),
    "Shift and Enter": (lambda page: press(page, "Tab", "Shift+Enter"), [1]),
    "None": (lambda page: page.get_by_role("button", name="None").click(), []),
    "All": (lambda page: page.get_by_role("button", name="All").click(), [*range(10)]),
}


@pytest.mark.parametrize("action", [name for name in ACTIONS if name != "All"])
def test_the_legend_hides_classes_and_all_are_shown_again(page, action):
    hidden = "element('sphere').data.slice(0, 10).filter((trace) => (trace.visible ?? true) !== true).length"
    for act, shown in (ACTIONS[action], ACTIONS["All"]):
        act(page)
        page.wait_for_function(f"{hidden} === {10 - len(shown)}")
        assert visible_classes(page) == shown
        assert page.locator("#legend button[aria-pressed='true']").count() == len(shown)
        assert page.locator("#names span:visible").count() > 0 or not shown


def test_the_slider_draws_a_von_mises_fisher_sample_around_the_visible_classes(page):
    slider = "(each, value) => { each.value = value; each.dispatchEvent(new Event('input')); }"
    page.locator("#legend button").nth(4).dblclick()
    page.wait_for_function("element('sphere').data[3].visible === 'legendonly'")
    page.locator("#kappa").evaluate(slider, 1)
    page.wait_for_function("element('sphere').data[13].x.length === 500")
    mean = np.mean(page.evaluate("(({x, y, z}) => [x, y, z])(element('sphere').data[13])"), axis=1)
    direction = spiral(30)[4::10].mean(0).numpy()
    assert page.inner_text("#chosen") == "κ 10, R 0.90"
    assert np.linalg.norm(mean) == pytest.approx(0.9, abs=0.03)  # six standard errors
    assert mean @ direction > 0.998 * np.linalg.norm(mean) * np.linalg.norm(direction)
    page.get_by_role("button", name="All").click()  # the sample follows
    page.wait_for_function(f"Math.abs(element('sphere').data[13].x.reduce((a, b) => a + b) / 500 - {mean[0]}) > 0.05")
    page.locator("#kappa").evaluate(slider, -1)
    page.wait_for_function("element('sphere').data[13].x.length === 0")
    assert page.inner_text("#chosen") == "off"
    assert page.wrong == []


def colors_of(page):
    return page.evaluate(
        """[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
            getComputedStyle(document.querySelector("#legend button")).color, element("sphere").data[10].color,
            element("sphere").data[11].line.color]"""
    )


def contrast(one, other):
    """Contrast of two colors "rgb(r, g, b)" by WCAG 2, from 1 to 21."""

    def luminance(color):
        share = np.array([int(part) for part in re.findall(r"\d+", color)[:3]]) / 255
        return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_the_theme_follows_the_system_and_the_button_with_legible_text(page):
    light = colors_of(page)
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Light").wait_for()
    page.wait_for_function(f"element('sphere').data[11].line.color !== '{light[4]}'")
    dark = colors_of(page)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    for paper, ink, legend, *_ in (light, dark):
        assert contrast(paper, ink) > 7
        assert contrast(paper, legend) > 7
    page.get_by_role("button", name="Light").click()
    page.wait_for_function(f"element('sphere').data[11].line.color === '{light[4]}'")
    assert colors_of(page) == light


def test_dragging_rotates_sphere_and_names_and_home_resets_them(page):
    before = page.evaluate("element('sphere').layout.scene.camera.eye")
    places = "[...document.querySelectorAll('#names span:not([hidden])')].map((tag) => tag.style.transform)"
    names = page.evaluate(places)
    page.mouse.move(450, 350)
    page.mouse.down()
    page.mouse.move(520, 380, steps=4)
    page.mouse.up()
    page.wait_for_function(f"element('sphere').layout.scene.camera.eye.x !== {before['x']}")
    after = page.evaluate("element('sphere').layout.scene.camera.eye")
    lengths = [np.linalg.norm(list(eye.values())) for eye in (before, after)]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-3)
    assert page.evaluate(places) != names
    page.locator("[data-title='Reset the view']").click()
    page.wait_for_function(f"element('sphere').layout.scene.camera.eye.x === {before['x']}")
    assert page.evaluate(places) == names


LAYOUT = """() => {
  const boxes = (selector) => [...document.querySelectorAll(selector)].map((each) => each.getBoundingClientRect())
    .filter(({width}) => width > 0).map(({left, top, right, bottom}) => [left, top, right, bottom]);
  const single = ["#stage", "#legend", "#outline path", "header", "footer"];
  return {
    names: boxes("#names span"), entries: boxes("#legend button"),
    ...Object.fromEntries(single.map((selector) => [selector, boxes(selector)[0]])),
  };
}"""
"""Left, top, right and bottom of the parts of the page, in pixels."""

OUTSIDE = """() => {
  const plot = element("sphere"), view = viewOf(plot.layout.scene.camera), frame = plot.getBoundingClientRect();
  const circle = document.querySelector("#outline path"), outside = [];
  for (const {x, y, z, marker, mode} of plot.data) if (mode === "markers") x.forEach((_, row) => {
    const seen = seenAt(inCube([x[row], y[row], z[row]]), view, frame);
    for (let angle = 0; angle < 2 * Math.PI; angle += Math.PI / 4) {
      const [right, down] = [Math.cos(angle), Math.sin(angle)].map((side) => side * marker.size / 2);
      if (!circle.isPointInFill(new DOMPoint(seen[0] + right, seen[1] + down))) outside.push([x[row], y[row], z[row]]);
    }
  });
  return outside;
}"""
"""Points whose markers are not inside the circle around the ball."""


def overlap(one, other):
    """Whether two boxes have more than a pixel in common."""
    return all(min(one[2 + axis], other[2 + axis]) - max(one[axis], other[axis]) > 1 for axis in (0, 1))


def within(one, other):
    return all(one[axis] >= other[axis] - 1 and one[2 + axis] <= other[2 + axis] + 1 for axis in (0, 1))


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """Pages of 3,000 points on the whole sphere with names of any length and script, and of 200 classes."""
    names = ["a" * 60, "Spätburgunder und Grauburgunder", "雀と猫", "عصفور", EVIL, "$x^2$", "{{value}}", "e", "f", "g"]
    folder = tmp_path_factory.mktemp("crowded")
    many = [f"class {index} with a long name" for index in range(200)]
    for kind, labels, classes in (("names", torch.arange(3000) % 10, names), ("many", torch.arange(3000) // 15, many)):
        texts = [f"text {index} <i> " * 100 for index in range(3000)]
        write_interactive_sphere(folder / f"{kind}.html", spiral(3000), labels, classes, texts=texts)
    return folder


@pytest.mark.parametrize("kind", ["names", "many"])
@pytest.mark.parametrize("width", [1280, 390])
def test_at_every_width_the_legend_is_beside_the_ball_points_are_in_it_and_no_name_covers_another(
    width, kind, open_page, crowded
):
    page = open_page(crowded / f"{kind}.html", viewport={"width": width, "height": 844})
    layout = page.evaluate(LAYOUT)
    ball, legend, stage = layout["#outline path"], layout["#legend"], layout["#stage"]
    assert within(ball, stage)
    assert ball[2] - ball[0] > 0.7 * min(stage[2] - stage[0], stage[3] - stage[1])
    assert legend[1] >= stage[3] - 1 if width < 500 else legend[0] >= stage[2] - 1
    assert within(legend, [0, layout["header"][3], width, layout["footer"][1]])
    for boxes in (layout["names"], layout["entries"]):
        assert not any(overlap(one, other) for number, one in enumerate(boxes) for other in boxes[:number])
    assert len(layout["names"]) > 3
    assert all(within(name, stage) for name in layout["names"])
    assert all(left >= legend[0] and right <= legend[2] for left, _, right, _ in layout["entries"])
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
    assert page.wrong == []


def test_on_a_phone_a_tap_shows_the_text_beside_the_point_and_names_follow_a_rotation(open_page, crowded):
    page = open_page(crowded / "names.html", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    nearest = page.evaluate(IN_FRONT)
    page.touchscreen.tap(nearest["x"], nearest["y"])
    page.wait_for_selector("#card")
    assert re.match(r"text \d+ <i> text", page.inner_text("#text"))
    assert page.locator("#thumbnail").is_hidden()
    (card,) = page.locator("#card").evaluate_all("all => all.map((each) => each.getBoundingClientRect().toJSON())")
    sides = [card[side] for side in ("left", "top", "right", "bottom")]
    assert within(sides, [0, 0, 390, 844])
    assert not overlap(sides, [nearest["x"] - 3, nearest["y"] - 3, nearest["x"] + 3, nearest["y"] + 3])
    places = "[...document.querySelectorAll('#names span')].map((tag) => tag.hidden + tag.style.transform)"
    turned = "element('sphere').layout.scene.camera.eye"
    before, start = page.evaluate(places), page.evaluate(turned)
    session = page.context.new_cdp_session(page)
    for step in range(7):  # plotly emits no event while a touch rotates the sphere
        kind = "touchMove" if step else "touchStart"
        points = [{"x": 120 + 20 * step, "y": 300 + 5 * step}]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        page.wait_for_timeout(60)
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.wait_for_function(f"JSON.stringify({turned}) !== '{json.dumps(start, separators=(',', ':'))}'")
    live = page.evaluate("element('sphere')._fullLayout.scene._scene.getCamera().eye")
    assert page.evaluate(turned) == pytest.approx(live, abs=1e-6)
    assert page.evaluate(places) != before
    page.close()
