"""Search page: drop an image, or type a text, and see the most similar images or texts of an index (extra `app`).

hf-sphere page --index outputs/index

`hf-sphere index` builds the index.
"""

import collections
import contextlib
import html
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sphere import search
from hf_sphere.commands.search import compare_queries, verdict
from hf_sphere.utils.arguments import Arguments, argument, parse_arguments
from hf_sphere.utils.checks import check_extra


@dataclass
class PageArguments(Arguments):
    """Index and address."""

    index: str = argument(help="Folder of the index.")
    model_name_or_path: str | None = argument(None, "Model of the index, if it was moved.")
    host: str | None = argument(None, "Address to listen on; localhost if not set.")
    port: int | None = argument(None, "Port; the first free one if not set.", ge=1, le=65535)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and launch the page."""
    (args,) = parse_arguments((PageArguments,), argv, "Search in the browser.")
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before the import of gradio, which sends telemetry
    check_extra("app", "the search page", "gradio")
    import gradio as gr

    try:
        socket.create_server((args.host or "localhost", args.port or 0)).close()
    except (OSError, UnicodeError, TypeError) as error:  # gradio would only say that there is no port
        address = f"{args.host or 'localhost'}{'' if args.port is None else f':{args.port}'}"
        raise ValueError(f"the page cannot listen on {address}: {error}. Choose another --host or --port.") from error
    index = search.ImageIndex.load(args.index, args.model_name_or_path)
    if index.encoder.content == "vector":
        raise ValueError(f"{args.index} has no model that embeds what a visitor enters; use hf-sphere search.")
    page = build_page(index)
    # The default theme downloads its fonts.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    page.launch(server_name=args.host, server_port=args.port, theme=theme, ssr_mode=False, max_file_size="50mb")


def build_page(index: "search.ImageIndex") -> Any:
    """Build the page."""
    import gradio as gr

    from hf_sphere.search.neighbor_search import APPROXIMATE

    shown = "All if none is chosen; of images without a label, predictions."
    classes = sorted(set(index.classes()) - {""})
    searched, kind, lowest = index.neighbor_search, index.encoder.content, 1.0
    is_image, recent = kind == "image", collections.deque[Any](maxlen=100)
    with contextlib.suppress(ValueError):  # there is one group
        lowest = math.ceil(1000 * index.space.smallest_p_value) / 1000
    # Uploads and the pictures that were shown are removed after an hour.
    with gr.Blocks(title=f"{kind.title()} search", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.Markdown(
            f"# {kind.title()} search\n{len(index):,} {kind}s, {searched.distance} distance, search `{searched.kind}`"
            + (f" with a recall@10 of {searched.recall:.3f}" if searched.kind in APPROXIMATE else "")
        )
        with gr.Row():
            with gr.Column(scale=1):
                image = gr.Image(
                    type="filepath", sources=["upload", "clipboard"], image_mode=None, height=260, visible=is_image
                )
                text = gr.Textbox(label="Text", visible=index.encoder.embeds_texts)
                class_filter = gr.Dropdown(classes, multiselect=True, label="Classes", info=shown, visible=any(classes))
                count = gr.Slider(1, min(50, len(index)), min(10, len(index)), step=1, label="Neighbors")
                about = "False accepts: chance to accept anything for a query whose group is not in the index"
                levels = [gr.Slider(lowest, 0.5, max(lowest, 0.05), step=0.001, label=about)] if lowest < 0.5 else []
                button = gr.Button("Search", variant="primary")
            with gr.Column(scale=2):
                note = gr.HTML()
                items = gr.Gallery(label="Neighbors", columns=5, object_fit="contain", height="auto", visible=is_image)

        def find(path: str | None, *inputs: Any) -> Any:
            # gradio lets clients of its API name any file, and with the suffix of an SVG any folder or dataset.
            uploads = Path(image.GRADIO_CACHE).resolve()
            if path and not (os.path.isfile(path) and uploads in Path(path).resolve().parents):
                raise gr.Error("upload an image.", print_exception=False)
            return show(index, path, *inputs, recent=recent)

        inputs = [image, text, class_filter, count, *levels]
        for event in (image.upload, text.submit, button.click, *(slider.release for slider in levels)):
            event(find, inputs, [note, items])
    return page


def show(
    index: Any, image: Any, text: str, classes: Any, count: float, level: Any = None, *, recent: Any
) -> tuple[str, list[Any]]:
    """Search, and return a note as HTML with texts or an error, and images with captions; add the query to `recent`."""
    names, query = index.classes(), "image" if image else "text"
    try:
        k = min(int(count), sum(name in classes for name in names) if classes else len(index))
        if image is None and not text:
            raise ValueError(f"{'choose an image' if index.encoder.content == 'image' else 'enter a text'} first.")
        options: dict[str, Any] = {"classes": classes or None}
        options["false_accept"] = None if (reason := index.why_no_level(query)) else level
        if image is None:
            neighbors = index.search_texts([text], k, **options)
        else:
            neighbors = index.search(image, k, progress=False, **options)
    except (ValueError, OSError) as error:
        return f"<b>Error</b>: {html.escape(str(error))}", []
    note = html.escape(describe(neighbors.queries, 0, "Query").removesuffix("Query: unknown"))
    if neighbors.accepted is not None:
        matches = int(neighbors.accepted[0].sum())
        result = f"{matches} of {k} neighbors match" if matches else "No match"
        recent.append(tuple(neighbors.queries["embedding"][0].tolist()))
        note = f"<b>{result}</b> at {100 * level:.3g} % false accepts.<br>{note}"
        note += f"<br>{html.escape(compare_queries(index, neighbors.queries['embedding'].new_tensor([*{*recent}])))}"
    elif level is not None:
        note += f"<br>No level: {html.escape(reason)}."
    texts, images = list_neighbors(index, neighbors)
    return note + texts, images


def list_neighbors(index: "search.ImageIndex", neighbors: "search.Neighbors") -> tuple[str, list[Any]]:
    """Return the texts as HTML, or images with captions, of the neighbors of the first query; "?" marks predictions."""
    from PIL import Image

    names, items, texts = index.classes(mark="?"), [], ""
    for rank, row in enumerate(neighbors.rows[0].tolist()):
        if row < 0:
            continue
        decision, name = verdict(neighbors, 0, rank), f"{index.images['file'][row]} {names[row]}".strip()
        title = f"{decision}{name}, distance {neighbors.distances[0, rank]:.4g}, id {index.images['id'][row]}"
        if "text" in index.images:
            body = f"{html.escape(index.images['text'][row])}<br><small>{html.escape(title)}</small>"
            texts += f'<p style="opacity: {0.6 if "rejected" in decision else 1}">{body}</p>'
            continue
        try:
            image = index.open_image(row)
        except (ValueError, OSError):
            image = Image.new("RGB", (64, 64), "lightgray")  # it was removed or changed
        image = image.convert("RGB").point(lambda value: 170 + value // 3) if "rejected" in decision else image
        items.append((image, f"{title}, {describe(index.images, row, 'certainty')}"))
    return texts, items


def describe(columns: dict[str, list[Any]], row: int, title: str) -> str:
    """Describe the prediction and the certainty of an image, or that its model rejects it."""
    from hf_sphere.search.indexed_images import predicted_class

    is_rejected = columns.get("known", {row: None})[row] is False
    names = ["concentration"] if is_rejected else ["prediction", "confidence", "concentration"]
    cells = {name: columns[name][row] for name in names if name in columns}
    texts = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in cells.items()]
    texts = [predicted_class(columns, row, "?")] * is_rejected + texts
    return f"{title}: {', '.join(texts) or 'unknown'}"
