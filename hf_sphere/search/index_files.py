"""The folder of an `ImageIndex`: its files, and the validation of all that is read from them."""

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from huggingface_hub.dataclasses import strict
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_sphere.metrics.neighbors import Distance
from hf_sphere.search.neighbor_search import APPROXIMATE, NeighborSearch, SearchKind
from hf_sphere.utils.checks import check_regular, error_text
from hf_sphere.utils.files import MANIFEST_FILE, digest_file, find_damage, read_json, write_json, write_manifest

ABOUT_FILE = "index.json"
"""Model, distance, sources and kind of search."""

EMBEDDINGS_FILE, IMAGES_FILE, SEARCH_FILE = "embeddings.safetensors", "images.parquet", "search.safetensors"
"""Embeddings; the columns of the images; and the index of an approximate search."""

FILES = {ABOUT_FILE, EMBEDDINGS_FILE, IMAGES_FILE, SEARCH_FILE, MANIFEST_FILE}

TYPES = dict.fromkeys(("id", "source", "row", "size", "time"), pa.int64())
TYPES |= dict.fromkeys(("file", "digest", "settings", "label", "prediction"), pa.string())
TYPES |= dict.fromkeys(("confidence", "concentration"), pa.float64())
"""Types of the columns of the images."""

OPTIONAL = {"label", "prediction", "confidence", "concentration"}
"""Columns that images without labels, and models without a head, lack."""


@strict
@dataclass(kw_only=True)
class About:
    """Contents of `index.json`."""

    model: str
    weights: str
    distance: Distance
    sources: list[tuple[str, str | None]]
    kind: SearchKind | None
    search: SearchKind
    recall: float
    curvature: float | None = None
    model_folder: str | None = None  # relative to the folder of the index
    tables: list[dict[str, list[int]]]  # size and time of each table, by source; only datasets in folders have some
    next_id: int  # of the next new image

    @property
    def metric(self) -> dict[str, Any]:
        """The distance, as options of `NeighborSearch`."""
        return {"distance": self.distance} | ({} if self.curvature is None else {"curvature": self.curvature})


def read_index(folder: Path) -> tuple[About, dict[str, list[Any]], Tensor, NeighborSearch | None, str | None]:
    """Read and validate all files of an index: description, images, embeddings, approximate search, and version.

    Without FAISS there is no approximate search. Files that are damaged or do not fit together are an error.
    """
    if not (folder / ABOUT_FILE).exists():
        raise FileNotFoundError(f"there is no {folder / ABOUT_FILE}; build an index with hf-sphere index.")
    try:
        version = read_version(folder)
        if damage := find_damage(folder, (ABOUT_FILE, EMBEDDINGS_FILE, IMAGES_FILE)):
            raise ValueError(damage)
        for name in (EMBEDDINGS_FILE, IMAGES_FILE):
            check_regular(folder / name)
        about = _read_about(folder)
        embeddings = load_file(folder / EMBEDDINGS_FILE)["embeddings"]
        if embeddings.ndim != 2 or 0 in embeddings.shape or embeddings.dtype != torch.float32:
            raise ValueError(f"{EMBEDDINGS_FILE} has {embeddings.dtype} numbers of the shape {tuple(embeddings.shape)}")
        if not torch.stack(embeddings.aminmax()).isfinite().all():
            raise ValueError(f"{EMBEDDINGS_FILE} has numbers that are not finite")
        images = _read_images(folder, len(embeddings), about)
        return about, images, embeddings, _read_search(folder, about, embeddings), version
    except MemoryError:
        raise
    except Exception as error:  # of pyarrow, safetensors and FAISS, of many classes
        raise ValueError(f"the index {folder} is damaged: {error_text(error).rstrip('.')}. Build it again.") from error


def check_replaceable(folder: Path) -> None:
    """Raise an error if a folder contains files that are not part of an index."""
    if other := next((path for path in folder.glob("*") if path.name not in FILES), None):
        raise FileExistsError(f"{folder} is not replaced: {other} is not part of an index.")


def write_index(
    folder: Path, about: About, images: dict[str, list[Any]], embeddings: Tensor, search: NeighborSearch
) -> None:
    """Write all files of an index to an empty folder."""
    save_file({"embeddings": embeddings.contiguous()}, folder / EMBEDDINGS_FILE)
    pq.write_table(pa.table(images, schema=_schema(images)), folder / IMAGES_FILE)
    if about.search in APPROXIMATE:
        search.save(folder / SEARCH_FILE)
    write_json(folder / ABOUT_FILE, asdict(about), strict=True)
    write_manifest(folder)


def read_version(folder: Path) -> str | None:
    """Return a digest that identifies the contents of an index, or None if there is none."""
    return digest_file(folder / MANIFEST_FILE)


def _schema(names: Iterable[str]) -> pa.Schema:
    return pa.schema([(name, TYPES[name]) for name in names])


def _read_about(folder: Path) -> About:
    values = read_json(folder / ABOUT_FILE)
    values["sources"] = [tuple(source) for source in values["sources"]]
    names = {each.name for each in fields(About)}
    about = About(**{name: value for name, value in values.items() if name in names})
    tables = [(name, len(state)) for tables in about.tables for name, state in tables.items()]
    valid = {
        "recall": 0 <= about.recall <= 1,
        "next_id": 0 <= about.next_id < 1 << 62,  # with room for more images
        "curvature": about.curvature is None or 0 < about.curvature < torch.inf,
        "sources": all(split is not None or os.path.isabs(name or "/") for name, split in about.sources),
        "model_folder": not os.path.isabs(about.model_folder or ""),
        "tables": len(about.tables) == len(about.sources) and all(n == 2 and _is_below(name) for name, n in tables),
    }
    if wrong := [name for name, is_valid in valid.items() if not is_valid]:
        raise ValueError(f"{wrong[0]} of {ABOUT_FILE} is invalid: {getattr(about, wrong[0])}")
    return about


def _read_images(folder: Path, count: int, about: About) -> dict[str, list[Any]]:
    with pq.ParquetFile(folder / IMAGES_FILE) as file:
        if file.metadata.num_rows != count:
            raise ValueError(f"{IMAGES_FILE} has {file.metadata.num_rows:,} rows, but {EMBEDDINGS_FILE} {count:,}")
        table = file.read([name for name in file.schema_arrow.names if name in TYPES])
    table = table.cast(_schema(table.column_names))
    if missing := TYPES.keys() - OPTIONAL - {*table.column_names}:
        raise ValueError(f"{IMAGES_FILE} has no column {min(missing)}")
    for name in ("file", "source", "row", "id", "settings"):
        if table[name].null_count:
            raise ValueError(f"column {name} of {IMAGES_FILE} has missing values")
    for name in {"confidence", "concentration"} & {*table.column_names}:
        if not pc.all(pc.is_finite(table[name]), min_count=0).as_py():
            raise ValueError(f"column {name} of {IMAGES_FILE} has values that are not finite")
    images = table.to_pydict()
    for name, limit in (("source", len(about.sources)), ("id", about.next_id), ("row", 1 << 62)):
        if not 0 <= min(images[name]) <= max(images[name]) < limit or (name == "id" and len(set(images[name])) < count):
            raise ValueError(f"column {name} of {IMAGES_FILE} has numbers that are out of range, or equal")
    folders = [name if split is None else "" for name, split in about.sources]
    for name, source in zip(images["file"], images["source"], strict=True):
        if "\0" in name or (folders[source] and not _is_below(name)):
            raise ValueError(f"{IMAGES_FILE} has the file {name!r}, which is not in {about.sources[source][0]}")
    return images


def _read_search(folder: Path, about: About, embeddings: Tensor) -> NeighborSearch | None:
    if about.search not in APPROXIMATE or importlib.util.find_spec("faiss") is None:
        return None
    check_regular(folder / SEARCH_FILE)
    search = NeighborSearch(embeddings, kind=about.search, file=folder / SEARCH_FILE, **about.metric)
    search.recall = about.recall
    return search


def _is_below(name: str) -> bool:
    path = PurePath(name)
    return bool(path.parts) and not path.anchor and ".." not in path.parts
