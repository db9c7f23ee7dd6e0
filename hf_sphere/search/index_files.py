"""The folder of an `EmbeddingSpace` or `ImageIndex`: its files, and the validation of all that is read from them."""

import importlib.util
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from huggingface_hub.dataclasses import strict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_sphere.metrics.neighbors import Distance
from hf_sphere.search.calibration import Calibration, Rule
from hf_sphere.search.margins import Nearest, Score, check_offsets
from hf_sphere.search.neighbor_search import APPROXIMATE, NeighborSearch, SearchKind
from hf_sphere.search.vectors import Content, positions
from hf_sphere.utils.checks import check_regular, error_text
from hf_sphere.utils.files import (
    MANIFEST_FILE,
    atomic_folder,
    digest_file,
    find_damage,
    list_folder,
    lock_folder,
    read_json,
    read_tensors,
    read_whole,
    write_json,
    write_manifest,
)

ABOUT_FILE, CODES_FILE = "index.json", "codes.safetensors"
"""Model, distance, sources and kind of search; and the codes of a `CompressedSpace`, whose folder is no index."""

EMBEDDINGS_FILE, IMAGES_FILE, SEARCH_FILE = "embeddings.safetensors", "images.parquet", "neighbors.safetensors"
"""Embeddings and calibration; the columns of the rows; and the index of an approximate search."""

FILES = {ABOUT_FILE, EMBEDDINGS_FILE, IMAGES_FILE, SEARCH_FILE, MANIFEST_FILE}

TYPES = dict.fromkeys(("number", "source", "row", "size", "time"), pa.int64())
TYPES |= dict.fromkeys(("file", "digest", "settings", "label", "prediction", "text"), pa.string())
TYPES |= dict.fromkeys(("confidence", "concentration", "p_value"), pa.float64())
TYPES |= {"known": pa.bool_(), "group": None, "id": None, "columns": None}
"""Types of the columns of the rows; ids and groups are texts or integers, and `columns` has those of the data."""

OPTIONAL = {"label", "prediction", "confidence", "concentration", "known", "p_value", "text", "group", "id", "columns"}
"""Columns that images without labels, and models without a head or a rejection, lack."""

CALIBRATION = dict.fromkeys(("groups", "matches", "ids"), torch.int64)
CALIBRATION |= {"scores": torch.float64, "queries": torch.float32}
"""Types of the tensors of the calibration; queries are those that are not rows."""

OPTIONS = {"rows_per_group": 1, "calibration_rows": 1, "seed": 0}
"""Options of a space, and their smallest values."""

Tensors = dict[str, Tensor]


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
    groups: str | None
    ids: str | None  # as groups: a column, an empty text for ids that are given, or None for numbers
    extra: list[str] = field(default_factory=list)  # columns of the data that the index keeps
    calibrated_with: Content = "image"
    calibration_settings: str = ""  # of the encoder of separate calibration queries
    columns: dict[str, str] = field(default_factory=dict)
    rule: Rule
    score: Score
    rows_per_group: int
    calibration_rows: int
    seed: int

    @property
    def metric(self) -> dict[str, Any]:
        """The distance, as options of `NeighborSearch`."""
        return {"distance": self.distance} | ({} if self.curvature is None else {"curvature": self.curvature})


def read_index(space_class: Any, folder: str | PathLike) -> tuple[About, dict[str, list[Any]], Any]:
    """Read and validate all files of an index: description, columns of the rows, and `EmbeddingSpace`.

    Without FAISS there is no approximate search. Files that are damaged or do not fit together are an error.
    """
    about, images, space, version = read_whole(folder, partial(_read_files, space_class))
    space._loaded = Path(folder).resolve(), version
    return about, images, space


def _read_files(space_class: Any, folder: Path) -> tuple[About, dict[str, list[Any]], Any, str | None]:
    if (folder / CODES_FILE).exists():
        raise ValueError(f"{folder} has codes, not vectors: use CompressedSpace.load, or the index it was made of.")
    if not (folder / ABOUT_FILE).exists():
        raise FileNotFoundError(f"there is no {folder / ABOUT_FILE}; build an index with hf-sphere index.")
    try:
        version = digest_file(folder / MANIFEST_FILE)
        if damage := find_damage(folder, (ABOUT_FILE, EMBEDDINGS_FILE, IMAGES_FILE)):
            raise ValueError(damage)
        for name in (EMBEDDINGS_FILE, IMAGES_FILE):
            check_regular(folder / name)
        about = _read_about(folder)
        tensors = read_tensors(folder / EMBEDDINGS_FILE)
        _check_embeddings(folder / EMBEDDINGS_FILE, tensors["embeddings"], about.distance)
        images = _read_images(folder, len(tensors["embeddings"]), about)
        return about, images, _read_space(space_class, folder, about, images, tensors), version
    except MemoryError:
        raise
    except Exception as error:  # of pyarrow, safetensors and FAISS, of many classes
        raise ValueError(f"the index {folder} is damaged: {error_text(error).rstrip('.')}. Build it again.") from error


def _check_embeddings(path: Path, embeddings: Tensor, distance: str) -> None:
    if embeddings.ndim != 2 or 0 in embeddings.shape or embeddings.dtype != torch.float32:
        raise ValueError(f"{path.name} has {embeddings.dtype} numbers of the shape {tuple(embeddings.shape)}")
    for start in range(0, len(embeddings), 1 << 15):
        with safe_open(path, "pt") as file:  # only a block of it is in memory
            sizes = file.get_slice("embeddings")[start : start + (1 << 15)].abs().amax(1)
        if not sizes.max() < torch.inf or (distance == "cosine" and not sizes.min() > 0):
            raise ValueError(f"{path.name} has numbers that are not finite, or zero vectors, which have no direction")


def _check_calibration(tensors: Tensors, dim: int, distance: str) -> None:
    for name, tensor in tensors.items():
        shape = (len(tensors["scores"]), {"queries": dim, "scores": 2, "matches": 2}.get(name, 1))
        is_valid = tensor.dtype == CALIBRATION[name] and len(tensor) > 0
        is_valid &= tensor.shape == (shape if name in ("queries", "scores", "matches") else shape[:1])
        is_valid &= name != "queries" or distance != "cosine" or bool(tensor.any(1).all())
        if not is_valid or not (tensor < torch.inf).all():
            raise ValueError(f"{EMBEDDINGS_FILE} has invalid {name} of the calibration")


def _groups_of(ids: Tensor, space: Any) -> Tensor:
    """Return the number of the group of each row with a number, -1 for those that are not there."""
    rows = positions(ids.flatten(), space._numbers)
    return space._groups[rows].where(rows >= 0, -1).reshape(ids.shape)


def check_replaceable(folder: Path, files: Collection[str] = FILES) -> None:
    """Raise an error if a folder contains other files."""
    if other := next((path for path in list_folder(folder) if path.name not in files), None):
        which = f"it has other files, such as {other.name}"
        raise FileExistsError(f"{folder} is not replaced: {which}. Choose another folder.")


def write_index(folder: str | PathLike, space: Any, images: dict[str, list[Any]], **about: Any) -> None:
    """Write a space with the columns of its rows, and the model and sources of an index; a space has none.

    Rows of several groups are calibrated first. An index that has changed since it was loaded is not replaced.
    """
    folder, search = Path(folder), space.neighbor_search
    options = dict(zip(OPTIONS, space._options, strict=True), rule=space.rule, score=space.score)
    values = {"model": "", "weights": "", "sources": [], "tables": [], **about, **space.metric, **options}
    description = About(kind=space.kind, search=search.kind, recall=search.recall, next_id=space._next, **values)
    with lock_folder(folder):
        check_replaceable(folder)
        version, problem = digest_file(folder / MANIFEST_FILE), ""
        is_of_folder = space._loaded is not None and space._loaded[0] == folder.resolve()
        if is_of_folder and version not in (None, space._loaded[1]):
            problem = "it has changed since it was loaded. Load it again, repeat the changes, and save it"
        elif not description.sources and _has_sources(folder):
            problem = "it is an index with a model or sources, which would be lost. Choose another folder"
        if problem:
            raise FileExistsError(f"{folder} is not replaced: {problem}.")
        with atomic_folder(folder) as unfinished:
            _write_files(unfinished, description, images, space)
            try:  # somebody may have set attributes of the space, and a good folder would be lost
                _read_files(type(space), unfinished)
            except ValueError as error:
                raise ValueError(f"the space is not saved, since it could not be read: {error.__cause__}.") from error
        space._loaded = folder.resolve(), digest_file(folder / MANIFEST_FILE)


def _has_sources(folder: Path) -> bool:
    with suppress(OSError, ValueError, AttributeError):  # there is no index, or it is damaged
        return bool(read_json(folder / ABOUT_FILE).get("sources"))
    return False


def _write_files(folder: Path, about: About, images: dict[str, list[Any]], space: Any) -> None:
    tensors: Tensors = {}
    if space._queries is not None or len(space._calibration_rows()):
        tensors = {name: getattr(space.calibration, name) for name in ("groups", "matches", "ids", "scores")}
    if space._queries is not None:
        tensors["queries"] = space._queries[0]
    if space.score == "margin":
        tensors["offsets"] = space._near().offsets(torch.arange(len(space)))
    tensors["embeddings"] = space.vectors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / EMBEDDINGS_FILE)
    images = images | {"number": space._numbers.tolist()}
    kept = {name: cells for name, cells in images.items() if name != "id" or space._ids is not None}
    table = pa.table({name: pa.array(cells, TYPES[name]) for name, cells in kept.items()})
    pq.write_table(table, folder / IMAGES_FILE)
    if about.search in APPROXIMATE:
        space.neighbor_search.save(folder / SEARCH_FILE)
    write_json(folder / ABOUT_FILE, asdict(about), strict=True)
    write_manifest(folder)


def _read_about(folder: Path) -> About:
    values = read_json(folder / ABOUT_FILE)
    values["sources"] = [tuple(source) for source in values["sources"]]
    about = About(**values)
    _check_about(about)
    return about


def _check_about(about: About) -> None:
    tables = [(name, len(state)) for tables in about.tables for name, state in tables.items()]
    valid = {
        "recall": 0 <= about.recall <= 1,
        "next_id": 0 <= about.next_id < 1 << 62,  # with room for more images
        "curvature": about.curvature is None or 0 < about.curvature < torch.inf,
        "sources": all(split is not None or os.path.isabs(name or "/") for name, split in about.sources),
        "model_folder": not os.path.isabs(about.model_folder or ""),
        "tables": len(about.tables) == len(about.sources)
        and all(n == 2 and (name == "." or _is_below(name)) for name, n in tables),
        **{name: least <= getattr(about, name) < 1 << 63 for name, least in OPTIONS.items()},
    }
    if wrong := [name for name, is_valid in valid.items() if not is_valid]:
        raise ValueError(f"{wrong[0]} of {ABOUT_FILE} is invalid: {getattr(about, wrong[0])}")


def _read_images(folder: Path, count: int, about: About) -> dict[str, list[Any]]:
    with pq.ParquetFile(folder / IMAGES_FILE) as file:
        if file.metadata.num_rows != count:
            raise ValueError(f"{IMAGES_FILE} has {file.metadata.num_rows:,} rows, but {EMBEDDINGS_FILE} {count:,}")
        table = file.read([name for name in file.schema_arrow.names if name in TYPES])
    table = table.cast(pa.schema([(column.name, TYPES[column.name] or column.type) for column in table.schema]))
    needed = TYPES.keys() - OPTIONAL if about.sources else {"number"}
    needed |= {name for name, rule in (("group", about.groups), ("id", about.ids)) if rule is not None}
    if missing := needed - {*table.column_names}:
        raise ValueError(f"{IMAGES_FILE} has no column {min(missing)}")
    for name in needed & {"file", "source", "row", "number", "id", "settings"}:
        if table[name].null_count:
            raise ValueError(f"column {name} of {IMAGES_FILE} has missing values")
    for name in {"confidence", "concentration", "p_value"} & {*table.column_names}:
        if not pc.all(pc.is_finite(table[name]), min_count=0).as_py():
            raise ValueError(f"column {name} of {IMAGES_FILE} has values that are not finite")
    if "columns" in table.column_names and not pa.types.is_struct(table["columns"].type):
        raise ValueError(f"columns of {IMAGES_FILE} are of type {table['columns'].type}")
    images = table.to_pydict()
    limits = {"number": about.next_id} | ({"source": len(about.sources), "row": 1 << 62} if about.sources else {})
    for name, limit in limits.items():
        if not 0 <= min(images[name]) <= max(images[name]) < limit or (
            name == "number" and len(set(images[name])) < count
        ):
            raise ValueError(f"column {name} of {IMAGES_FILE} has numbers that are out of range, or equal")
    folders = [name if split is None else "" for name, split in about.sources]
    for name, source in zip(images.get("file", []), images.get("source", []), strict=True):
        if "\0" in name or (folders[source] and not _is_below(name)):
            raise ValueError(f"{IMAGES_FILE} has the file {name!r}, which is not in {about.sources[source][0]}")
    return images


def _read_space(space_class: Any, folder: Path, about: About, images: dict[str, list[Any]], tensors: Tensors) -> Any:
    embeddings = tensors.pop("embeddings")
    has_faiss = importlib.util.find_spec("faiss") is not None
    kind = about.kind if has_faiss else None  # exact; with a message for many images
    options = {name: getattr(about, name) for name in OPTIONS} | {"metric": about.metric, "kind": kind}
    own = images.pop("number")
    options |= {"ids": None if about.ids is None else images["id"], "numbers": torch.tensor(own)}
    images.setdefault("id", own)
    space = space_class(embeddings, images.get("group"), **options)
    space._next, space.model = about.next_id, about.model or None
    space.rule = about.rule
    space.score = about.score
    if about.score == "margin":
        check_offsets(offsets := tensors.pop("offsets"), len(embeddings))
        space._nearest = Nearest.known(offsets)
    _check_calibration(tensors, embeddings.shape[1], about.distance)
    if "queries" in tensors:
        space._queries = tensors.pop("queries"), tensors["groups"]
    elif tensors:
        rows = positions(tensors["ids"], space._numbers)
        if rows.min() < 0:
            raise ValueError(f"{EMBEDDINGS_FILE} has a calibration by rows that are not there")
        tensors["groups"] = space._groups[rows]
    if tensors:
        numbers = _groups_of(tensors["matches"], space)
        columns = (tensors["groups"], tensors["ids"], tensors["scores"], numbers, tensors["matches"])
        space._calibration = Calibration(*columns, about.next_id, about.rule)
        space._is_current = True
    if about.search in APPROXIMATE and has_faiss:
        check_regular(folder / SEARCH_FILE)
        space._search = NeighborSearch(space.vectors, kind=about.search, file=folder / SEARCH_FILE, **about.metric)
        space._search.recall = about.recall
    return space


def _is_below(name: str) -> bool:
    path = PurePath(name)
    return bool(path.parts) and not path.anchor and ".." not in path.parts
