"""Search page: drop an image, or type a text, and see the most similar images or texts of an index (extra `app`).

hf-sphere page --index outputs/index

`hf-sphere index` builds the index.
"""

import html
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hf_sphere import search
from hf_sphere.commands.search import make_table
from hf_sphere.utils.arguments import Arguments, argument, parse_arguments
from hf_sphere.utils.checks import check_extra
from hf_sphere.utils.pages import draw_image, draw_table
from hf_sphere.utils.texts import hide_private

SEARCH_AGAIN = """element.addEventListener("click", (event) => {
  const neighbor = event.target.closest("[data-row]");
  if (!neighbor) return;
  element.scrollIntoView();
  trigger("click", {row: Number(neighbor.dataset.row)});
});"""
"""Script of the results: a click on a neighbor searches by it."""

THUMBNAIL = 256
"""Longest side of the image of a neighbor, pixels."""


@dataclass
class PageArguments(Arguments):
    """Index and address."""

    index: str = argument(help="Folder of the index.")
    model_name_or_path: str | None = argument(None, "Model of the index, if it was moved.")
    host: str | None = argument(None, "Address to listen on; localhost if not set.")
    port: int | None = argument(None, "Port; the first free one if not set.", ge=1, le=65535)
    allowed_hosts: list[str] | None = argument(None, "Further names of the page for its visitors, such as a proxy's.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and launch the page."""
    (args,) = parse_arguments((PageArguments,), argv, __doc__)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before the import of gradio, which sends telemetry
    check_extra("app", "the search page", "gradio")
    host = args.host or os.environ.get("GRADIO_SERVER_NAME") or "localhost"
    try:
        socket.getaddrinfo(host, None)  # with a name that is unknown, gradio would wait forever
    except OSError as error:
        raise ValueError(f"the host {host} (--host, or GRADIO_SERVER_NAME) is no address: {error}.") from error
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    index = search.ImageIndex.load(args.index, args.model_name_or_path)
    if index.encoder.content == "vector":
        raise ValueError(f"{args.index} has no model that embeds what a visitor enters; use hf-sphere search.")
    page = build_page(index)
    # The default theme downloads its fonts.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    options: dict[str, Any] = {"theme": theme, "css_paths": Path(__file__).with_name("page.css"), "ssr_mode": False}
    names = own_hosts(host, args.allowed_hosts or ())
    checked = Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)
    options["app_kwargs"] = {"middleware": [checked]}
    page.launch(server_name=args.host, server_port=args.port, max_file_size="50mb", **options)


def own_hosts(host: str, allowed: Sequence[str]) -> list[str]:
    """Return the names of the page: a site that a visitor opens could give this machine another one, and read the page.

    A page that listens on all addresses has each of those of this machine, and its name.
    """
    names = ["localhost", "127.0.0.1", "::1", host, *allowed]
    if host in ("0.0.0.0", "::"):
        names += [socket.gethostname(), socket.getfqdn()]
        names += [each.address for addresses in psutil.net_if_addrs().values() for each in addresses]
    return [f"[{name}]" if ":" in name else name for name in names]


def build_page(index: "search.ImageIndex") -> Any:
    """Build the page."""
    import gradio as gr

    shown = "All if none is chosen; of images without a label, predictions."
    classes = sorted(set(index.classes()) - {""})
    searched, kind, texts = index.space.neighbor_search, index.encoder.content, index.encoder.embeds_texts
    is_image = kind == "image"
    reasons = [index.why_no_level(content) for content in (kind, "text")]
    lowest, reason = 0.001, reasons[0] if all(reasons[: 1 + texts]) else ""
    if not reason:
        try:
            smallest = math.ceil(1000 * index.space.smallest_p_value) / 1000
            if smallest < 0.5:
                lowest = smallest
            else:
                groups = f"there are {index.space.calibration.num_groups} groups"
                reason = f"{groups}, whose lowest one is {100 * smallest:.3g} %"
        except ValueError as error:  # there is one group
            reason = str(error).rstrip(".")
    about = "Chance to accept anything for a query whose group is not in the index."
    options: dict[str, Any] = {"info": f"No level: {reason}." if reason else about, "interactive": not reason}
    # Uploads are removed after an hour.
    with gr.Blocks(title=f"{kind.title()} search", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.Markdown(
            f"# {kind.title()} search\n{len(index):,} {kind}s, {searched.distance} distance, search `{searched.kind}`"
            + (f" with a recall@10 of {searched.recall:.3f}" if searched.recall < 1 else "")
        )
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                image: Any = gr.Image(
                    format="png", sources=["upload", "clipboard"], height=220, visible=is_image, elem_classes="query"
                )
                # `show` opens it: gradio would show an error without the reason for a file that is no image.
                image.preprocess = lambda payload: payload and payload.path
                text = gr.Textbox(label="Text", visible=texts)
                level = gr.Slider(lowest, 0.5, max(lowest, 0.05), step=0.001, label="False accepts", **options)
                with gr.Accordion("More options", open=False):
                    chosen = gr.Dropdown(classes, multiselect=True, label="Classes", info=shown, visible=any(classes))
                    count = gr.Slider(1, min(50, len(index)), min(10, len(index)), step=1, label="Neighbors")
                button = gr.Button("Search", variant="primary")
            with gr.Column(scale=2, min_width=280):
                results = gr.HTML(draw_verdict(ask(index), kind=""), js_on_load=SEARCH_AGAIN, apply_default_css=False)

        def find(path: str | None, text: str, classes: Any, count: float, level: float) -> str:
            # gradio lets clients of its API name any file, and with the suffix of an SVG any folder or dataset.
            uploads = Path(image.GRADIO_CACHE).resolve()
            if path and not (os.path.isfile(path) and uploads in Path(path).resolve().parents):
                raise gr.Error("upload an image.", print_exception=False)
            return show(index, path, text, classes, count, None if reason else level)

        def choose(event: gr.EventData) -> Any:
            if (row := int(event.row)) not in range(len(index)):
                raise gr.Error("there is no such row.", print_exception=False)
            try:
                return (index.open_image(row), "") if is_image else (None, index.images["text"][row])
            except (ValueError, OSError) as error:
                raise gr.Error("the image is missing or changed.", print_exception=False) from error

        inputs = [image, text, chosen, count, level]
        for event in (image.upload, text.submit, button.click, chosen.change):
            event(find, inputs, results)
        for slider in (level, count):
            slider.change(find, inputs, results, trigger_mode="always_last", show_progress="hidden")
        results.click(choose, None, [image, text]).success(find, inputs, results)
    return page


def ask(index: "search.ImageIndex") -> str:
    """Return what a visitor has to enter."""
    image, text = index.encoder.content == "image", index.encoder.embeds_texts
    return f"{'Choose an image' * image}{' or ' * (image and text)}{'enter a text' * text} first.".capitalize()


def show(index: Any, image: Any, text: str, classes: Any, count: float, level: Any = None) -> str:
    """Search, and return the verdict and the neighbors as HTML, or what is wrong."""
    query = "image" if image else "text"
    if image is None and not (text and text.strip()):
        return draw_verdict(ask(index), kind="")
    try:
        k = min(int(count), sum(name in classes for name in index.classes()) if classes else len(index))
        if image is not None and text:
            raise ValueError("There are an image and a text to search by: remove one of them.")
        options: dict[str, Any] = {"classes": classes or None}
        options["false_accept"] = None if (reason := index.why_no_level(query)) else level
        if image is None:
            neighbors = index.search_texts([text], k, **options)
        else:
            source = search.ImageSource.of([image])
            source.open(0)  # its error has no advice for the command line
            neighbors = index.search(source, k, progress=False, **options)
    except (ValueError, OSError) as error:
        text = str(error).replace(f"{Path(image or '').parent}{os.sep}", "")  # the folder of the uploads
        return draw_verdict(hide_private(text))
    verdicts, columns, names = [], neighbors.queries, ["prediction", "confidence", "concentration"]
    if columns.get("known", [None])[0] is False:  # then there is no certainty of a class
        at, names = f"at its level of {100 * index.encoder.model.rejection.settings['level']:.3g} %", names[2:]
        verdicts.append(draw_verdict(f"to the model {at} (p = {columns['p_value'][0]:.2g})", "Unknown"))
    if neighbors.accepted is not None:
        matches = int(neighbors.accepted[0].sum())
        result = f"{matches} of {k} neighbors match" if matches else "No match"
        about = f"at a false-accept level of {100 * level:.3g} %"
        verdicts.append(draw_verdict(about, result, "match" if matches else "none"))
    elif level is not None:
        verdicts.append(draw_verdict(f"No level: {reason}."))
    cells = {name: columns[name][0] for name in names if name in columns}
    certainty = ", ".join(f"{name} {v:.4g}" if isinstance(v, float) else f"{name} {v}" for name, v in cells.items())
    return "".join(verdicts) + f"<p>Query: {html.escape(certainty)}</p>" * bool(certainty) + draw(index, neighbors)


def draw_verdict(text: str, result: str = "", kind: str = "none") -> str:
    """Return a box with a text and the result before it as HTML."""
    result = f"<b>{html.escape(result)}</b> " * bool(result)
    return f'<p class="verdict {kind}" role="status">{result}{html.escape(text)}</p>'


def draw(index: "search.ImageIndex", neighbors: "search.Matches") -> str:
    """Return the neighbors of the first query, and a table with their details, as HTML; "?" marks predictions."""
    rows = [row for row in neighbors.rows[0].tolist() if row >= 0]
    from pandas import DataFrame

    table, cards, kind = make_table(index, neighbors), "", index.encoder.content
    for row, cells in zip(rows, table, strict=True):
        file = index.images["file"][row]
        cells["file"] = os.path.basename(file) if os.path.isabs(file) else file  # not where it is on this machine
        try:
            shown = html.escape(cells["text"]) if kind == "text" else draw_image(index.open_image(row), THUMBNAIL)
            tag = f'button data-row="{row}" title="Search by this {kind}"'
        except (ValueError, OSError):
            shown, tag = "missing or changed", "div"
        decision = {None: "", "true": "match", "false": "rejected"}[cells.get("accepted")]
        distance = f'<span class="distance">distance {float(cells["distance"]):.4g}</span>'
        about = f"<b>{html.escape(cells['class'])}</b> {distance}"
        about += f" <em>{decision}, p {float(cells['p_value']):.2g}</em>" if decision else ""
        cards += f'<{tag} class="neighbor {decision}"><span class="shown">{shown}</span>{about}</{tag.split()[0]}>'
    names = [name for name in next(iter(table), ()) if name != "text" and not name.startswith("query")]
    details = f"<details><summary>Details</summary>{draw_table(DataFrame(table, columns=names))}</details>"
    return f'<div class="neighbors {kind}s">{cards}</div>{details}'
