"""Run the notebooks, each in a temporary folder and for at most five minutes; the files change with `--write` only.

python notebooks/run.py [--write] [notebooks]
"""

import argparse
import base64
import io
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from PIL import Image

SECONDS = 300
FOLDER = Path(__file__).parent


def run(path: Path, seconds: float = SECONDS) -> nbformat.NotebookNode:
    """Run a notebook, and return it with its outputs.

    Raises:
        CellExecutionError: If a cell fails.
        CellTimeoutError: If the notebook takes longer.
    """
    notebook = nbformat.read(path, as_version=4)
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, resources={"metadata": {"path": folder}})
        client.timeout_func = lambda cell: max(1, int(end - time.monotonic()))
        client.execute()
    return notebook


def clean(notebook: nbformat.NotebookNode) -> None:
    """Keep of the outputs what a page shows, small: texts and pictures, without warnings and addresses of objects."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        kept = []
        for output in cell.outputs:
            data = output.get("data", {})
            if output.output_type == "stream":
                if output.name == "stdout" and kept and kept[-1].output_type == "stream":
                    kept[-1].text += output.text
                elif output.name == "stdout":
                    kept.append(output)
            elif "image/png" in data:
                kept.append(nbformat.v4.new_output("display_data", {"image/png": compress(data["image/png"])}))
            elif not data.get("text/plain", "<").startswith("<"):
                kept.append(nbformat.v4.new_output("display_data", {"text/plain": data["text/plain"]}))
        cell.outputs = kept
    notebook.metadata.language_info = {"name": "python"}


def compress(picture: str) -> str:
    """Return a picture, PNG in base64, with 32 colors."""
    buffer = io.BytesIO()
    shown = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    shown.quantize(32, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main() -> None:
    """Run the given notebooks, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the outputs into the files, for the documentation")
    parser.add_argument("notebooks", nargs="*", type=Path, help="notebooks, by default all")
    args = parser.parse_args()
    failed = []
    for path in args.notebooks or sorted(FOLDER.glob("*.ipynb")):
        start = time.monotonic()
        try:
            notebook = run(path)
        except (CellExecutionError, CellTimeoutError) as error:
            failed.append(path.name)
            print(f"{path.name}: {error}", file=sys.stderr)
            continue
        finally:
            print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
        if args.write:
            clean(notebook)
            nbformat.write(notebook, path)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
