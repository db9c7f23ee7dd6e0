"""The published numbers in `results/published`, which runs are compared with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PUBLISHED = "results/published"  # the folder, in the repository


def read_published(folder: Path) -> dict[str, dict[str, Any]]:
    """Return all records by id; their fields are described in `results/published/README.md`."""
    records = [record for path in sorted(folder.glob("*.json")) for record in json.loads(path.read_text("utf-8"))]
    return {record["id"]: record for record in records}


def find_published(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of a run: the one with this id, and those whose id begins with it and a slash.

    Raises:
        ValueError: If there are none.
    """
    records = read_published(folder)
    found = [record for key, record in records.items() if key == name or key.startswith(f"{name}/")]
    if not found:
        raise ValueError(f"published is {name!r}, and {folder} has no record with this id.")
    return found


def show_published(record: Mapping[str, Any]) -> str:
    """Format a published value, after what distinguishes it from the main one: `98.58 ± 0.03 %`, `train: 99.42 %`."""
    what = ": ".join([record["id"].partition("/")[2], ""]) if "/" in record["id"] else ""
    spread = "" if record["std"] is None else f" ± {record['std']:g}"
    return f"{what}{record['value']:g}{spread} {record['unit']}"
