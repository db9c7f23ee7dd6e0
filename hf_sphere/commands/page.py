"""Search page: drop an image, or type a text, and see the most similar images of an index (extra `app`).

hf-sphere page --index outputs/index

`hf-sphere index` builds the index.
"""

import html
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sphere import search
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
    (args,) = parse_arguments((PageArguments,), argv, "Search for images in the browser.")
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before the import of gradio, which sends telemetry
    check_extra("app", "the search page", "gradio")
    import gradio as gr

    try:
        socket.create_server((args.host or "localhost", args.port or 0)).close()
    except (OSError, UnicodeError, TypeError) as error:  # gradio would only say that there is no port
        address = f"{args.host or 'localhost'}{'' if args.port is None else f':{args.port}'}"
        raise ValueError(f"the page cannot listen on {address}: {error}. Choose another --host or --port.") from error
    page = build_page(search.ImageIndex.load(args.index, args.model_name_or_path))
    # The default theme downloads its fonts.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    page.launch(server_name=args.host, server_port=args.port, theme=theme, ssr_mode=False, max_file_size="50mb")


def build_page(index: "search.ImageIndex") -> Any:
    """Build the page."""
    import gradio as gr

    from hf_sphere.search.neighbor_search import APPROXIMATE

    shown = "All if none is chosen; of images without a label, predictions."
    classes = sorted(set(index.classes()) - {""})
    searched = index.neighbor_search
    # Uploads and the pictures that were shown are removed after an hour.
    with gr.Blocks(title="Image search", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.Markdown(
            f"# Image search\n{len(index):,} images, {searched.distance} distance, search `{searched.kind}`"
            + (f" with a recall@10 of {searched.recall:.3f}" if searched.kind in APPROXIMATE else "")
        )
        with gr.Row():
            with gr.Column(scale=1):
                image = gr.Image(
                    type="filepath", image_mode=None, label="Image", sources=["upload", "clipboard"], height=260
                )
                text = gr.Textbox(label="Text", visible=index.encoder.embeds_texts, info="Instead of an image.")
                class_filter = gr.Dropdown(classes, multiselect=True, label="Classes", info=shown)
                count = gr.Slider(1, min(50, len(index)), min(10, len(index)), step=1, label="Neighbors")
                button = gr.Button("Search", variant="primary")
            with gr.Column(scale=2):
                note = gr.HTML()
                gallery = gr.Gallery(label="Neighbors", columns=5, object_fit="contain", height="auto")

        def find(path: str | None, *inputs: Any) -> Any:
            # gradio lets clients of its API name any file, and with the suffix of an SVG any folder or dataset.
            uploads = Path(image.GRADIO_CACHE).resolve()
            if path and not (os.path.isfile(path) and uploads in Path(path).resolve().parents):
                raise gr.Error("upload an image.", print_exception=False)
            return show(index, path, *inputs)

        inputs = [image, text, class_filter, count]
        for event in (image.upload, text.submit, button.click):
            event(find, inputs, [note, gallery])
    return page


def show(index: "search.ImageIndex", image: Any, text: str, classes: list[str], count: float) -> tuple[str, list[Any]]:
    """Search, and return a note as HTML and the neighbors with captions; errors are shown in the note."""
    names = index.classes()
    try:
        k = min(int(count), sum(name in classes for name in names) if classes else len(index))
        if image is None and not text:
            raise ValueError("choose an image first.")
        if image is None:
            neighbors = index.search_texts([text], k, classes=classes or None)
        else:
            neighbors = index.search(image, k, classes=classes or None, progress=False)
    except (ValueError, OSError) as error:
        return f"<b>Error</b>: {html.escape(str(error))}", []
    return html.escape(describe(neighbors.queries, 0, "Query")), list_neighbors(index, neighbors)


def list_neighbors(index: "search.ImageIndex", neighbors: "search.Neighbors") -> list[Any]:
    """Return the image and the caption of each neighbor of the first query; "?" marks predicted classes."""
    from PIL import Image

    names, items = index.classes(mark="?"), []
    for row, distance in zip(neighbors.rows[0].tolist(), neighbors.distances[0].tolist(), strict=True):
        if row < 0:
            continue
        try:
            image = index.open_image(row)
        except (ValueError, OSError):
            image = Image.new("RGB", (64, 64), "lightgray")  # it was removed or changed
        title = f"{index.images['file'][row]} {names[row]}".strip()
        title += f", distance {distance:.4g}, id {index.images['id'][row]}"
        items.append((image, f"{title}, {describe(index.images, row, 'certainty')}"))
    return items


def describe(columns: dict[str, list[Any]], row: int, title: str) -> str:
    """Describe the prediction and the certainty of an image."""
    names = [name for name in ("prediction", "confidence", "concentration") if name in columns]
    values = [columns[name][row] for name in names]
    shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    return f"{title}: " + (", ".join(f"{name} {value}" for name, value in zip(names, shown, strict=True)) or "unknown")
