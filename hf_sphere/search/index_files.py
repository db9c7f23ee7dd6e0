"""The folder of an `EmbeddingSpace` or `ImageIndex`, and its files."""

import importlib.util
from collections.abc import Collection
from functools import partial
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_sphere.search.calibration import Calibration, Nearest
from hf_sphere.search.drift import Migration
from hf_sphere.search.neighbor_search import APPROXIMATE, NeighborSearch
from hf_sphere.search.vectors import positions
from hf_sphere.utils import files
from hf_sphere.utils.files import MANIFEST_FILE, digest_file, read_json

ABOUT_FILE, CODES_FILE = "index.json", "codes.safetensors"
"""Model, distance, sources and kind of search; and the codes of a `CompressedSpace`, whose folder is no index."""

EMBEDDINGS_FILE, IMAGES_FILE, SEARCH_FILE = "embeddings.safetensors", "images.parquet", "neighbors.safetensors"
"""Embeddings and calibration; the columns of the rows; and the index of an approximate search."""

FILES = {ABOUT_FILE, EMBEDDINGS_FILE, IMAGES_FILE, SEARCH_FILE, MANIFEST_FILE}

TYPES = dict.fromkeys(("number", "source", "row", "size", "time"), pa.int64())
TYPES |= dict.fromkeys(("file", "digest", "settings", "label", "prediction", "text"), pa.string())
TYPES |= dict.fromkeys(("confidence", "concentration", "p_value"), pa.float64()) | {"known": pa.bool_()}
"""Types of the columns of the rows; ids and groups are texts or integers, and `columns` has those of the data."""


def read_index(space_class: Any, folder: str | PathLike) -> tuple[Any, dict[str, list[Any]], Any]:
    """Read an index: the values that `write_index` got, the columns of its rows, and its `EmbeddingSpace`.

    Without FAISS there is no approximate search. Files that are damaged or do not fit together are an error.
    """
    return files.read_whole(folder, partial(_read_files, space_class))


def _read_files(space_class: Any, folder: Path) -> tuple[Any, dict[str, list[Any]], Any]:
    version = digest_file(folder / MANIFEST_FILE)
    about = SimpleNamespace(**read_about(folder, ABOUT_FILE, EMBEDDINGS_FILE, IMAGES_FILE))
    about.sources = [(name, split) for name, split in about.sources]
    tensors = files.read_tensors(folder / EMBEDDINGS_FILE)
    with pq.ParquetFile(folder / IMAGES_FILE) as file:
        images = file.read().to_pydict()
    embeddings, numbers = tensors["embeddings"], torch.tensor(images.pop("number"))
    if len(numbers) != len(embeddings):
        raise ValueError(f"{folder / IMAGES_FILE} has {len(numbers):,} rows for {len(embeddings):,} embeddings.")
    has_faiss = importlib.util.find_spec("faiss") is not None
    options = about.options | {"metric": about.metric, "kind": about.kind if has_faiss else None, "numbers": numbers}
    space = space_class(embeddings, images.get("group"), ids=images.get("id"), **options)
    images.setdefault("id", numbers.tolist())
    space._next, space.model, space.rule, space.score = about.next_id, about.model or None, about.rule, about.score
    space.skipped, space.migration = about.skipped, about.migration and Migration(*about.migration)
    if about.score == "margin":
        space._nearest = Nearest.known(tensors["offsets"])
    if "scores" in tensors:
        scores, rows, matches = (tensors[name] for name in ("scores", "ids", "matches"))
        groups = tensors["groups"] if "queries" in tensors else _groups_of(rows, space)
        space._queries = (tensors["queries"], groups) if "queries" in tensors else None
        numbers = _groups_of(matches, space)
        space._calibration = Calibration(groups, rows, scores, numbers, matches, about.next_id, about.rule)
        space._is_current = True
    if about.search in APPROXIMATE and has_faiss:
        space._search = NeighborSearch(space.vectors, kind=about.search, file=folder / SEARCH_FILE, **about.metric)
        space._search.recall = about.recall
    space._loaded = folder, version
    return about, images, space


def read_about(folder: Path, name: str, *names: str) -> dict[str, Any]:
    """Return the content of a JSON file of a folder; the other files must be there, too, and as when it was written."""
    about = read_json(folder / name)
    if damage := files.find_damage(folder, (name, *names)):
        raise ValueError(f"{folder} is damaged: {damage}. Write it again.")
    return about


def _groups_of(ids: Tensor, space: Any) -> Tensor:
    """Return the number of the group of each row with a number, -1 for those that are not there."""
    rows = positions(ids.flatten(), space._numbers)
    return space._groups[rows].where(rows >= 0, -1).reshape(ids.shape)


def check_replaceable(folder: Path, names: Collection[str] = FILES) -> None:
    """Raise an error if a folder contains other files."""
    if other := next((path for path in files.list_folder(folder) if path.name not in names), None):
        which = f"it has other files, such as {other.name}"
        raise FileExistsError(f"{folder} is not replaced: {which}. Choose another folder.")


def write_index(folder: str | PathLike, space: Any, images: dict[str, list[Any]], **values: Any) -> None:
    """Write a space, with further columns of its rows and the model and sources of an index; a space has none.

    Rows of several groups are calibrated first. An index that has changed since it was loaded is not replaced.
    """
    folder, search = Path(folder), space.neighbor_search
    given = {"model": space.model or "", "groups": space._names and "", "ids": space._ids and ""}
    about = {"sources": [], "metric": space.metric, "options": space._options, "kind": space.kind, **given, **values}
    about |= {"rule": space.rule, "score": space.score, "next_id": space._next}
    about |= {"skipped": space.skipped, "migration": space.migration}
    about |= {"search": search.kind, "recall": search.recall}
    with files.lock_folder(folder):
        check_replaceable(folder)
        version, where = digest_file(folder / MANIFEST_FILE), folder.resolve()
        problem = ""
        if space._loaded is not None and space._loaded[0] == where and version not in (None, space._loaded[1]):
            problem = "it has changed since it was loaded. Load it again, repeat the changes, and save it"
        elif not about["sources"] and (folder / ABOUT_FILE).exists() and read_json(folder / ABOUT_FILE).get("sources"):
            problem = "it is an index with a model or sources, which would be lost. Choose another folder"
        if problem:
            raise FileExistsError(f"{folder} is not replaced: {problem}.")
        with files.atomic_folder(folder) as unfinished:
            if search.kind in APPROXIMATE:  # first: it needs memory, which pages of a mapped file of embeddings occupy
                search.save(unfinished / SEARCH_FILE)
            tensors = {"embeddings": space.vectors}
            if space._queries is not None or len(space._groups.unique()) > 1:
                tensors |= {name: getattr(space.calibration, name) for name in ("groups", "matches", "ids", "scores")}
            if space._queries is not None:
                tensors["queries"] = space._queries[0]
            if space.score == "margin":
                tensors["offsets"] = space._offsets(torch.arange(len(space)))
            stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(stored, unfinished / EMBEDDINGS_FILE)
            columns = images | {"id": space._ids, "group": space.groups, "number": space._numbers.numpy()}
            kept = {name: pa.array(cells, TYPES.get(name)) for name, cells in columns.items() if cells is not None}
            pq.write_table(pa.table(kept), unfinished / IMAGES_FILE)
            files.write_json(unfinished / ABOUT_FILE, about, strict=True)
            files.write_manifest(unfinished)
        space._loaded = where, digest_file(folder / MANIFEST_FILE)
