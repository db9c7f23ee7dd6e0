"""Folders of image files, and of tables that contain or name images."""

import json
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features, config, load_dataset_builder
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from huggingface_hub.constants import HF_HUB_CACHE

from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.files import is_of_system

logger = logging.getLogger(__name__)

UNREADABLE = {".arw", ".avif", ".cr2", ".cr3", ".dng", ".heic", ".heif", ".jxl", ".nef", ".raf"}
"""Suffixes of photos that `datasets` does not read."""

SUFFIXES = {
    *(".apng", ".avif", ".bmp", ".gif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
    *(".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif", ".tiff", ".webp"),
}
"""Suffixes of the image files of a folder."""

TABLES = {".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tar", ".zip"}
"""Suffixes of files that contain images, or name them."""

MOST_BRACKETS = 500
"""Lines of JSON with fewer opening brackets are not checked for their depth."""


def list_files(folder: Path, suffixes: Collection[str], *, follow_links: bool = False) -> list[Path]:
    """Return the files below a folder with one of the suffixes, sorted; not hidden ones and those of the system.

    The folder may be a link. A link in it to a file or folder outside it is an error, unless links are followed. A path
    that is not UTF-8 text or a regular file is an error.
    """
    files, outside, root = list[Path](), list[Path](), Path(os.path.realpath(folder))
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".") and not is_of_system(name)]
        linked = [Path(parent, name) for name in folders if os.path.islink(os.path.join(parent, name))]
        leaving = [link for link in linked if leaves(root, link)]
        # What is linked inside is listed there, and a folder around this one would have no end.
        followed = {link.name for link in leaving if follow_links and not root.is_relative_to(os.path.realpath(link))}
        folders[:] = [name for name in folders if name in followed or Path(parent, name) not in linked]
        found = [Path(parent, n) for n in names if n[0] != "." and os.path.splitext(n)[1].lower() in suffixes]
        outside += leaving + [file for file in found if file.is_symlink() and file.exists() and leaves(root, file)]
        files += found
    check_names(files)
    for file in files:
        check_regular(file)
    if outside and not follow_links:
        refuse(f"{folder} has {len(outside):,} link(s) to what is outside it", sorted(map(str, outside)))
    return sorted(files)


def refuse(problem: str, outside: Sequence[str]) -> NoReturn:
    """Raise an error that lists the first of the files that are outside a folder."""
    how = "Copy the files into the folder; only training follows links, with --follow_links"
    raise ValueError(f"{problem}: {', '.join(outside[:5])}. {how}.")


def find_outside(dataset: str, names: Iterable[str | None]) -> list[str]:
    """Return which names of files in the tables of a dataset are on this machine, but not in its folder or a cache."""
    roots = [Path(os.path.realpath(root)) for root in (dataset, HF_HUB_CACHE, config.HF_DATASETS_CACHE)]
    paths = {name: name.rpartition("::")[2].removeprefix("file://") for name in names if name}  # also of an archive
    is_local = {name: os.path.isabs(path) or "://" not in path for name, path in paths.items()}
    return [name for name, path in paths.items() if is_local[name] and all(leaves(root, path) for root in roots)]


def leaves(root: Path, path: str | os.PathLike) -> bool:
    """Whether a path leads out of a folder, which is named without links; files of the Hub's cache are beside it."""
    target = Path(os.path.realpath(path))
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    return not (target.is_relative_to(root) or target.is_relative_to(blobs))


def check_names(files: Iterable[Path]) -> None:
    """Raise an error if the path of a file is not text in the locale, which `datasets` cannot store."""
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            path, encoding = os.fsencode(file), sys.getfilesystemencoding()
            how = "rename the file or its folder, or set a UTF-8 locale, such as PYTHONUTF8=1"
            raise ValueError(f"the path {path!r} is not {encoding.upper()} text; {how}.") from None


def check_depth(tables: Iterable[Path]) -> None:
    """Raise an error for lines of JSON so deeply nested that pyarrow, which reads them, would end the process."""
    for table in (table for table in tables if table.suffix.lower() in (".json", ".jsonl")):
        with table.open("rb") as lines:
            for line in lines:
                if line.count(b"[") + line.count(b"{") > MOST_BRACKETS:
                    try:
                        json.loads(line)
                    except RecursionError as error:
                        raise ValueError(f"{table} is nested too deeply to be read; remove it.") from error
                    except ValueError:  # it is named when it is read
                        pass


def check_found(folder: Path, files: Sequence[Path]) -> None:
    """Raise an error if `datasets` would leave out files or their classes without a word, for their path."""
    root = folder.resolve()
    for parent, names, _ in os.walk(folder):
        if system := next((name for name in names if is_of_system(name) and name[0] not in "._"), None):
            reason = "is a folder of the system, whose images `datasets` would read; remove it, or copy the others"
            raise ValueError(f"{Path(parent, system)} {reason}.")
    for file in files:
        if not file.exists():
            raise ValueError(f"{file} is a link to nothing, which `datasets` would leave out; remove it.")
        lost = re.search(r"\n|::", str(file)) or re.search(
            r"\\(?=.*/)|(?<![^/])__(?=.*/)", str(file.relative_to(folder))
        )
        if lost:
            reason = f"`datasets` loses images, or their classes, with {lost[0]!r} in their path; rename it"
            raise ValueError(f"{str(file)!r} cannot be read: {reason}.")
    linked = [parent for parent in {file.parent for file in files} if not parent.resolve().is_relative_to(root)]
    if linked:
        link = next(path for path in (linked[0], *linked[0].parents) if path.is_symlink())
        count = f"its {sum(file.is_relative_to(link) for file in files)} file(s) would be lost"
        how = "Replace it by a folder of links (cp -rs)"
        raise ValueError(f"{link} is a link to a folder, which `datasets` does not follow: {count}. {how}.")


def check_class_names(tables: Iterable[Path], features: Mapping[str, Any]) -> None:
    """Raise an error if a file numbers its classes otherwise than the one whose names `datasets` uses for all."""
    for table in tables:
        for column, feature in Features.from_arrow_schema(_read_schema(table)).items():
            stated, used = (getattr(each, "names", []) for each in (feature, features.get(column)))
            if differing := [f"{a!r} and {b!r}" for a, b in zip(stated, used, strict=False) if a != b]:
                what = f"{table} and another file number the classes of column {column!r} differently"
                raise ValueError(f"{what}, such as {differing[0]}; write both with one ClassLabel, or names as texts.")


def _read_schema(table: Path) -> pa.Schema:
    """Return the schema of a parquet or arrow file; empty for others."""
    if table.suffix == ".parquet":
        return pq.read_schema(table)
    if table.suffix != ".arrow":
        return pa.schema([])
    with pa.memory_map(str(table)) as stored:
        try:
            return pa.ipc.open_stream(stored).schema
        except pa.ArrowInvalid:
            return pa.ipc.open_file(stored).schema


def log_unread(folder: Path) -> None:
    """Log the files of a folder that are in no split, if its card does not say which ones belong to it."""
    if not folder.is_dir() or has_configs(folder):
        return
    files = load_dataset_builder(str(folder)).config.data_files or {}
    read = {os.path.realpath(file) for each in files.values() for file in each}
    both = list_files(folder, {Path(file).suffix.lower() for file in read}, follow_links=True)
    if unread := [file for file in both if os.path.realpath(file) not in read]:
        text = "%d of %d files in %s are in no split, such as %s: `datasets` takes names with train or test for splits."
        logger.warning(text, len(unread), len(both), folder, unread[0].relative_to(folder))


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
    if not list_files(folder, {".arrow", ".parquet", ".tar"}, follow_links=True):
        return False
    try:
        return not isinstance(load_dataset_builder(str(folder)), ImageFolder)
    except (OSError, ValueError):  # `load_splits` raises it again, with the name of the folder
        return True
