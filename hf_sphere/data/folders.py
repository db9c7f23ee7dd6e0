"""Folders of image files, and of tables that contain or name images."""

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features, config, load_dataset_builder
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from huggingface_hub.constants import HF_HUB_CACHE

from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.files import is_of_system

logger = logging.getLogger(__name__)

# Suffixes of photos that `datasets` does not read, of a folder's image files, and of files that contain or name images.
UNREADABLE = {".arw", ".avif", ".cr2", ".cr3", ".dng", ".heic", ".heif", ".jxl", ".nef", ".raf"}
SUFFIXES = {
    *(".apng", ".avif", ".bmp", ".gif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
    *(".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif", ".tiff", ".webp"),
}
TABLES = {".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tar", ".zip"}


def list_files(folder: Path, suffixes: Collection[str], *, follow_links: bool = False) -> list[Path]:
    """Return the files below a folder with these suffixes, but for hidden ones; links that leave it are an error."""
    files, links = list[Path](), list[Path]()
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and not is_of_system(name)]
        found = [Path(parent, n) for n in names if n[0] != "." and os.path.splitext(n)[1].lower() in suffixes]
        links += [*(Path(parent, name) for name in folders), *(found if not follow_links else ())]
        files += found
    check_inside(folder, sorted(link for link in links if link.is_symlink()))
    for file in files:
        check_regular(file)
    return sorted(files)


def check_inside(dataset: str | Path, names: Iterable[str | Path | None]) -> None:
    """Raise an error if links in a folder, or names in tables, lead to local files outside it and the caches."""
    root, *caches = (Path(os.path.realpath(path)) for path in (dataset, HF_HUB_CACHE, config.HF_DATASETS_CACHE))
    beside = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []  # files of the Hub's cache
    outside = []
    for name in (name for name in names if name):
        # Names in tables, unlike links, may be of files in archives, in the caches or remote.
        is_link = isinstance(name, Path)
        path = str(name) if is_link else str(name).rpartition("::")[2].removeprefix("file://")
        allowed = [root, *beside] if is_link else [root, *beside, *caches]
        is_local = os.path.isabs(path) or "://" not in path
        if is_local and not any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in allowed):
            outside.append(str(name))
    if outside:
        problem = f"{dataset} names or links to {len(outside):,} file(s) outside it: {', '.join(outside[:5])}"
        how = "Copy the files into the folder; only training follows links to files, with --follow_links"
        raise ValueError(f"{problem}. {how}.")


def check_class_names(tables: Iterable[Path], features: Mapping[str, Any]) -> None:
    """Raise an error if a file numbers its classes otherwise than the one whose names `datasets` uses for all."""
    for table in tables:
        if table.suffix == ".parquet":
            schema = pq.read_schema(table)
        elif table.suffix == ".arrow":
            with pa.memory_map(str(table)) as stored:
                try:
                    schema = pa.ipc.open_stream(stored).schema
                except pa.ArrowInvalid:
                    schema = pa.ipc.open_file(stored).schema
        else:
            continue
        for column, feature in Features.from_arrow_schema(schema).items():
            stated, used = (getattr(each, "names", []) for each in (feature, features.get(column)))
            if differing := [f"{a!r} and {b!r}" for a, b in zip(stated, used, strict=False) if a != b]:
                what = f"{table} and another file number the classes of column {column!r} differently"
                raise ValueError(f"{what}, such as {differing[0]}; write both with one ClassLabel, or names as texts.")


def log_unread(folder: Path, images: Collection[str | None] | None = None) -> None:
    """Log the files of a folder that are not among the images, or by default the tables, that `datasets` has read."""
    files: Any = images
    if images is None:
        files = [*chain(*(load_dataset_builder(str(folder)).config.data_files or {}).values())]
    suffixes = {Path(file).suffix.lower() for file in files} if images is None else SUFFIXES | UNREADABLE
    root, read = Path(os.path.realpath(folder)), {os.path.abspath(file) for file in files if file}
    listed = {str(file) for file in list_files(root, suffixes, follow_links=True)}
    if others := read - listed:
        raise ValueError(f"`datasets` would read {min(others)}, which is of the system or not in {folder}; remove it.")
    if unread := sorted(listed - read):
        text = "%d of %d files in %s are in no split, such as %s: `datasets` takes names with train or test for splits,"
        text += " and reads no HEIC or raw photos, linked folders, and paths with '::', '__' or a line break."
        logger.warning(text, len(unread), len(listed), folder, os.path.relpath(unread[0], root))


def has_configs(folder: Path) -> bool:
    """Whether the card of a dataset says which files belong to it."""
    card = folder / "README.md"
    return card.is_file() and "\nconfigs:" in card.read_text(encoding="utf-8", errors="replace")


def has_metadata(folder: Path) -> bool:
    """Whether `datasets` reads the classes of a folder from a file, which names the images."""
    tables = list_files(folder, TABLES, follow_links=True)  # they are checked when they are loaded
    return any(b"file_name" in file.read_bytes() for file in tables if file.name in ImageFolder.METADATA_FILENAMES)


def has_tables(folder: Path) -> bool:
    """Whether `datasets` reads tables in a folder, or tar files, and not the images beside them."""
    tables = list_files(folder, {".arrow", ".parquet", ".tar"}, follow_links=True)
    return bool(tables) and not isinstance(load_dataset_builder(str(folder)), ImageFolder)
