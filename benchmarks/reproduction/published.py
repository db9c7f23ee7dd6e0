"""The numbers of the papers, in `results/published`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent.parent / "results" / "published"


def read_published(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return all records by id; their fields are described in `results/published/README.md`."""
    records = [record for path in sorted(folder.glob("*.json")) for record in json.loads(path.read_text("utf-8"))]
    return {record["id"]: record for record in records}


def show_published(record: Mapping[str, Any]) -> str:
    """Format a published value, after what distinguishes it from the main one: `98.58 ± 0.03 %`, `train: 99.42 %`."""
    what = ": ".join([record["id"].partition("/")[2], ""]) if "/" in record["id"] else ""
    spread = "" if record["std"] is None else f" ± {record['std']:g}"
    return f"{what}{record['value']:g}{spread} {record['unit']}"
