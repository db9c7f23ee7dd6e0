"""Images of an index: which have changed or moved since they were indexed, and opening them."""

import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

from datasets.utils.file_utils import xopen
from PIL.Image import Image as PILImage

from hf_sphere.data.folders import TABLES, leaves, list_files
from hf_sphere.data.image_files import open_image
from hf_sphere.search.source import ImageSource
from hf_sphere.search.space import EmbeddingSpace
from hf_sphere.search.vectors import Content
from hf_sphere.utils.checks import error_text
from hf_sphere.utils.pixels import convert_image
from hf_sphere.utils.progress import progress_bar


class ImageState(NamedTuple):
    """Size, time (only of a file) and digest of the content of an image; None if it cannot be read."""

    size: int | None
    time: int | None
    digest: str | None


States = dict[int, ImageState]
"""States of images by row."""


def predicted_class(columns: Mapping[str, Sequence[Any]], row: int, mark: str = "") -> str:
    """Return the prediction of a row and the `mark`, or `unknown` and, with a mark, its p-value; or an empty text."""
    names = ("prediction", "known", "p_value")
    prediction, known, p_value = (columns.get(name, {row: None})[row] for name in names)
    if known is False:
        return "unknown" if p_value is None or not mark else f"unknown (p = {p_value:.2g})"
    return prediction + mark if prediction else ""


def file_state(path: str) -> tuple[int, int] | None:
    """Return size and time of a regular file, or None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def table_states(name: str, split: str | None) -> dict[str, list[int]]:
    """Return size and time of each table of a dataset in a folder; no other source has any."""
    files = list_files(Path(name), TABLES) if split is not None and os.path.isdir(name) else []
    files += [Path(name)] if split is not None and os.path.isfile(name) else []
    return {str(file.relative_to(name)): list(file_state(str(file)) or ()) for file in files}


def place_of(name: str, split: str | None, file: str) -> Hashable:
    """Return what identifies the place of an image, or None for one in memory."""
    path = os.path.join(name, file)
    if split is not None and not (os.path.isabs(path) and os.path.isfile(path)):
        return path, split
    return path if os.path.isabs(path) else None


def identify(source: ImageSource, rows: Sequence[int], *, progress: bool = True) -> States:
    """Return the states of images of a source, by row, read in parallel threads."""
    with ThreadPool(min(16, len(rows) // 100 + 1)) as pool:
        states = pool.imap(partial(_identify, source), rows, chunksize=100)
        bar = progress_bar(states, "Reading", len(rows), unit=source.content, disable=not progress, leave=False)
        return dict(zip(rows, bar, strict=True))


def _identify(source: ImageSource, row: int) -> ImageState:
    if source.content != "image":
        cell = source.encoded[row]
        content = cell.encode() if source.content == "text" else cell.numpy().tobytes()
        return ImageState(len(content), None, _digest(content))
    record, name = source.encoded[row]["image"], os.path.join(source.name, source.names[row])
    path = record["path"] if record and record["bytes"] is None else None
    if path and source.split is not None and not _is_remote(path):
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    state = file_state(path) if path else None  # before it is read, so that a later change is noticed
    try:
        content = _read(record)
    except (OSError, ValueError):  # it is named when it is embedded
        return ImageState(None, None, None)
    is_named = os.path.isabs(name) and (source.split is None or path == name)
    return ImageState(len(content), state[1] if state and is_named else None, _digest(content))


def _read(record: dict[str, Any] | None, size: int | None = None) -> bytes:
    """Return the content of an encoded image; that of a file only if it is a regular one, and of a `size` if given."""
    if record and record["bytes"] is not None:
        return record["bytes"]
    path = record and record["path"]
    if path and _is_remote(path):
        with xopen(path, "rb") as file:
            return file.read()
    state = file_state(path) if path else None
    if not path or state is None or size not in (None, state[0]):
        raise ValueError("it has another size" if state else "it is missing")
    return Path(path).read_bytes()


def _is_remote(path: str) -> bool:
    """Whether `datasets` opens a path in a zip file, or from a server."""
    return not os.path.isabs(path) and "://" in path


def _digest(content: bytes) -> str:
    """Return a digest that identifies an image, and that nobody can compute who does not have the image."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(repr=False)
class IndexedImages:
    """Columns and sources of the images of an index; see `ImageIndex`."""

    encoder: Any
    images: dict[str, list[Any]]
    space: EmbeddingSpace
    sources: list[tuple[str, str | None]]
    groups: str | None = None
    calibrated_with: Content = "image"
    calibration_settings: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    ids: str | None = None
    extra: list[str] = field(default_factory=list)
    _tables: list[dict[str, list[int]]] = field(default_factory=list)
    _opened: dict[int, ImageSource] = field(default_factory=dict)

    def path(self, row: int) -> str:
        """Return the absolute path of an indexed image; of one of a dataset, the name of that and its own."""
        return os.path.join(self.sources[self.images["source"][row]][0], self.images["file"][row])

    def open_image(self, row: int) -> PILImage:
        """Open an indexed image from its source, if it still has the content that was indexed.

        So an index from someone else opens only images that its author had, whatever files it names. One that was in
        memory, is missing, cannot be read, or has another content is an error.
        """
        source, path, digest = self.images["source"][row], self.path(row), self.images["digest"][row]
        try:
            if self.place(row) is None or self.encoder.content != "image":
                raise ValueError("it was in memory, or is no image")
            record: Any = {"bytes": None, "path": path}
            name, split = self.sources[source]  # `datasets` extracts the files of archives elsewhere
            if split is None and os.path.isdir(name) and leaves(Path(os.path.realpath(name)), path):
                raise ValueError(f"it is outside {name}; copy it there, and add it again")
            if self.sources[source][1] is not None:
                if self.has_changed(source):
                    raise ValueError("its dataset has changed; add it again")
                if source not in self._opened:
                    self._opened[source] = ImageSource.of(name, split, column=self.columns.get(name))
                record = self._opened[source].encoded[self.images["row"][row]]["image"]
            content = _read(record, self.images["size"][row])
            if _digest(content) != digest:
                raise ValueError("it is not the image that was indexed; add it again")
            with open_image({"bytes": content, "path": None}) as image:
                return convert_image(image, 3)
        except Exception as error:  # of PIL and its plugins, of many classes
            raise ValueError(f"{path} cannot be opened: {error_text(error).rstrip('.')}.") from error

    def changes(self) -> list[str]:
        """Return what has changed since the images were embedded, one text each.

        Sizes and times of files are compared, also those of the tables of datasets in folders; datasets of the Hub
        are not loaded. `open_image` and `add` compare contents.
        """
        texts, current = [], self.encoder.settings.split("-")
        for position, name in ((0, "preprocessing"), (-1, "class names")):
            if count := sum(text.split("-")[position] != current[position] for text in self.images["settings"]):
                texts.append(f"the {name} of the model changed after {count:,} images were embedded")
        other = [n for n, time in enumerate(self.images["time"]) if time is not None and not self.is_as_indexed(n)]
        missing = [row for row in other if not os.path.isfile(self.path(row))]
        changed = sorted({*other} - {*missing})
        for rows, what in ((changed, "have another size or time"), (missing, "are missing or were moved")):
            texts += [f"{len(rows):,} images {what}, such as {self.path(row)}" for row in rows[:1]]
        sources = [name for n, (name, _) in enumerate(self.sources) if self.has_changed(n)]
        return texts + [f"the dataset {name} changed" for name in sources]

    def place(self, row: int) -> Hashable:
        """Return what identifies the place of an image, or None for one in memory."""
        name, split = self.sources[self.images["source"][row]]
        return place_of(name, split, self.images["file"][row])

    def is_as_indexed(self, row: int) -> bool:
        """Whether an image is a file with the recorded size and time."""
        return file_state(self.path(row)) == (self.images["size"][row], self.images["time"][row])

    def has_changed(self, source: int) -> bool:
        """Whether the tables of a dataset in a folder are not those that were recorded."""
        (name, split), tables = self.sources[source], self._tables[source]
        is_folder = split is not None and os.path.isabs(name)
        states = {file: file_state(str(Path(name, file))) for file in tables}
        return is_folder and (not tables or any(states[file] != tuple(tables[file]) for file in tables))

    def match(
        self, source: int, locations: Sequence[Hashable], indexed: Mapping[Hashable, int], states: States
    ) -> dict[int, int]:
        """Return the rows of those images of a source, given by its number, that the index has.

        An image has the row with its content, if that is at its place or was at one that has another content now, or
        else the row of its place. `locations` are the places of all images of the source, `indexed` the rows of the
        index by place, and `states` those of the images that are not known to be unchanged.
        """
        digests = self.images.get("digest", [])
        positions = {location: n for n, location in enumerate(locations)}

        def has_left(row: int) -> bool:
            (name, _), location = self.sources[self.images["source"][row]], self.place(row)
            if location is None:
                return False
            if location in positions:
                state = states.get(positions[location])
                return state is not None and state.digest != digests[row]
            path = name if self.images["time"][row] is None else self.path(row)
            is_of_source = name != "" and self.images["source"][row] == source
            return is_of_source or (os.path.isabs(path) and not os.path.exists(path))

        wanted = {state.digest for state in states.values()} - {None}
        left = defaultdict(list)
        for row in reversed(range(len(digests))):
            if digests[row] in wanted and has_left(row):
                left[digests[row]].append(row)
        here = {n: indexed[locations[n]] for n in states if locations[n] in indexed}
        rows = {n: row for n, row in here.items() if digests[row] == states[n].digest is not None}
        rows |= {n: left[state.digest].pop() for n, state in states.items() if n not in rows and left[state.digest]}
        taken = {*rows.values()}
        return {n: row for n, row in here.items() if row not in taken} | rows
