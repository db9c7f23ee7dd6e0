"""Run the notebooks, each in a temporary folder and for at most five minutes; the files are not changed.

python notebooks/run.py [notebooks]
"""

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

SECONDS = 300
FOLDER = Path(__file__).parent


def run(path: Path, seconds: float = SECONDS) -> None:
    """Run a notebook.

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


def main() -> None:
    """Run the given notebooks, or all."""
    paths = [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb"))
    failed = []
    for path in paths:
        start = time.monotonic()
        try:
            run(path)
        except (CellExecutionError, CellTimeoutError) as error:
            failed.append(path.name)
            print(f"{path.name}: {error}", file=sys.stderr)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
