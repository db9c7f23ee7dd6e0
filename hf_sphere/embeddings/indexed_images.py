"""Images of an index: which have changed or moved since they were indexed, and opening them."""

import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

from datasets import config
from datasets.utils.file_utils import xopen
from huggingface_hub.constants import HF_HUB_CACHE
from PIL.Image import Image as PILImage

from hf_sphere.data.folders import TABLES, list_files
from hf_sphere.embeddings.encoder import ImageEncoder, ImageSource, open_converted
from hf_sphere.utils.arguments import error_text


class ImageState(NamedTuple):
    """Size, time (only of a file) and digest of the content of an image; None if it cannot be read."""

    size: int | None
    time: int | None
    digest: str | None


def file_state(path: str) -> tuple[int, int] | None:
    """Return size and time of a regular file, or None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def table_states(name: str, split: str | None) -> dict[str, list[int]]:
    """Return size and time of each table of a data set in a folder; no other source has any."""
    files = list_files(Path(name), TABLES) if split is not None and os.path.isdir(name) else []
    return {str(file.relative_to(name)): list(file_state(str(file)) or ()) for file in files}


def place_of(name: str, split: str | None, file: str) -> Hashable:
    """Return what identifies the place of an image, or None for one in memory."""
    path = os.path.join(name, file)
    return (path, split) if split is not None else path if os.path.isabs(path) else None


def read_image(record: dict[str, Any] | None, size: int | None = None) -> bytes:
    """Return the content of an encoded image of `datasets`; that of a file only if it is a regular one of that size.

    Raises:
        ValueError: If it is missing or another one.
        OSError: If it cannot be read.
    """
    if record is None or (record["bytes"] is None and record["path"] is None):
        raise ValueError("it is missing")
    if record["bytes"] is not None:
        return record["bytes"]
    if not os.path.isabs(record["path"]) and "://" in record["path"]:  # in a zip file, or remote
        with xopen(record["path"], "rb") as file:
            return file.read()
    state = file_state(record["path"])
    if state is None or size not in (None, state[0]):
        raise ValueError("there is no such file" if state is None else "it has another size")
    return Path(record["path"]).read_bytes()


def identify(source: ImageSource, rows: Sequence[int]) -> dict[int, ImageState]:
    """Return the states of images of a source, by row, read in parallel threads.

    Raises:
        ValueError: If a data set names a file of this machine that is not its own.
    """

    def states(rows: Sequence[int]) -> list[ImageState]:
        return [_identify(source, *pair) for pair in zip(rows, source.encoded[rows]["image"], strict=True)]

    parts = [rows[at : at + 100] for at in range(0, len(rows), 100)]
    with ThreadPool(min(16, max(len(parts), 1))) as pool:
        return dict(zip(rows, (state for part in pool.imap(states, parts) for state in part), strict=True))


def _identify(source: ImageSource, row: int, record: dict[str, Any] | None) -> ImageState:
    path = record["path"] if record and record["bytes"] is None else None
    name = os.path.join(source.name, source.names[row])
    if path is not None and source.split is not None and (os.path.isabs(path) or "://" not in path):
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        roots = (source.name, HF_HUB_CACHE, config.HF_DATASETS_CACHE)
        if not path.startswith(tuple(os.path.join(os.path.realpath(root), "") for root in roots)):
            raise ValueError(f"row {row} of {source.name} names the file {path}, which is not in it; copy it there.")
    state = file_state(path) if path else None  # before it is read, so that a later change is noticed
    try:
        content = read_image(record)
    except (OSError, ValueError):  # it is named when it is embedded
        return ImageState(None, None, None)
    is_named = os.path.isabs(name) and (source.split is None or path == name)
    return ImageState(len(content), state[1] if state and is_named else None, _digest(content))


def _digest(content: bytes) -> str:
    """Return a digest that identifies an image, and that nobody can compute who does not have the image."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class IndexedImages:
    """Columns and sources of the images of an index; see `ImageIndex`."""

    encoder: ImageEncoder
    images: dict[str, list[Any]]
    sources: list[tuple[str, str | None]]
    _tables: list[dict[str, list[int]]]
    _opened: dict[int, ImageSource]

    def path(self, row: int) -> str:
        """Return the absolute path of an indexed image; of one of a data set, the name of that and its own."""
        return os.path.join(self.sources[self.images["source"][row]][0], self.images["file"][row])

    def open_image(self, row: int) -> PILImage:
        """Open an indexed image from its source, if it still has the content that was indexed.

        So an index from someone else opens only images that its author had, whatever files it names.

        Raises:
            ValueError: If it was in memory, cannot be read, or has another content.
            OSError: If there is no such source any more.
        """
        number, path, digest = self.images["source"][row], self.path(row), self.images["digest"][row]
        try:
            if digest is None:
                raise ValueError("an older version indexed it, without a digest of its content; add it again")
            if self.place(row) is None:
                raise ValueError("it was in memory")
            record: Any = {"bytes": None, "path": path}
            if self.sources[number][1] is not None:
                if self.has_changed(number):
                    raise ValueError("its data set has changed; add it again")
                if number not in self._opened:
                    self._opened[number] = ImageSource.of(*self.sources[number])
                record = self._opened[number].encoded[self.images["row"][row]]["image"]
            content = read_image(record, self.images["size"][row])
            if _digest(content) != digest:
                raise ValueError("it is not the image that was indexed; add it again")
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} cannot be opened: {error_text(error).rstrip('.')}.") from error
        return open_converted({"bytes": content, "path": None}, path)

    def changes(self) -> list[str]:
        """Return what has changed since the images were embedded, one text each.

        Sizes and times of files are compared, also those of the tables of data sets in folders; data sets of the Hub
        are not loaded. `open_image` and `add` compare contents.
        """
        texts, current, settings = [], self.encoder.settings.split("-"), self.images["settings"]
        for part, name in enumerate(("preprocessing", "class names")):
            if count := sum(text is not None and text.split("-")[part] != current[part] for text in settings):
                texts.append(f"the {name} of the model changed after {count:,} images were embedded")
        moved = [n for n, time in enumerate(self.images["time"]) if time is not None and not self.is_as_indexed(n)]
        missing = {row for row in moved if not os.path.isfile(self.path(row))}
        for rows, what in (([*missing], "are missing or were moved"), (moved, "have another size or time")):
            if rows := [row for row in rows if (row in missing) == ("missing" in what)]:
                texts.append(f"{len(rows):,} images {what}, such as {self.path(rows[0])}")
        numbers = range(len(self.sources))
        texts += [f"the data set {self.sources[number][0]} changed" for number in numbers if self.has_changed(number)]
        if unknown := self.images["digest"].count(None):
            texts.append(f"changes of {unknown:,} images are unknown, because an older version indexed them")
        return texts

    def place(self, row: int) -> Hashable:
        """Return what identifies the place of an image, or None for one in memory."""
        name, split = self.sources[self.images["source"][row]]
        return place_of(name, split, self.images["file"][row])

    def is_as_indexed(self, row: int) -> bool:
        """Whether an image is a file with the recorded size and time."""
        return file_state(self.path(row)) == (self.images["size"][row], self.images["time"][row])

    def has_changed(self, number: int) -> bool:
        """Whether the tables of a data set in a folder are not those that were recorded."""
        (name, split), tables = self.sources[number], self._tables[number]
        if split is None or not os.path.isabs(name):
            return False
        return not tables or any(file_state(os.path.join(name, file)) != tuple(tables[file]) for file in tables)

    def match(
        self, number: int, places: Sequence[Hashable], known: Mapping[Hashable, int], states: Mapping[int, ImageState]
    ) -> dict[int, int]:
        """Return the rows of those images of a source that the index has.

        An image has the row with its content, if that is at its place or was at one that has another content now, or
        else the row of its place.

        Args:
            number: Number of the source.
            places: Place of each image of the source.
            known: Rows of the index by place.
            states: States of the images of the source that are not known to be unchanged.
        """
        digests = self.images.get("digest", [])
        positions = {place: n for n, place in enumerate(places)}

        def has_left(row: int) -> bool:
            (name, split), place = self.sources[self.images["source"][row]], self.place(row)
            if (n := positions.get(place)) is not None:
                return n in states and states[n].digest != digests[row]
            if split is not None and self.images["source"][row] == number:
                return True
            path = self.path(row) if split is None else name
            return place is not None and os.path.isabs(path) and not os.path.exists(path)

        wanted = {state.digest for state in states.values()} - {None}
        left = defaultdict(list)
        for row in (row for row, digest in enumerate(digests) if digest in wanted and has_left(row)):
            left[digests[row]].append(row)
        rows = {}
        for n, state in states.items():
            if (row := known.get(places[n], -1)) >= 0 and digests[row] == state.digest is not None:
                rows[n] = row
            elif left[state.digest]:
                rows[n] = left[state.digest].pop(0)
        taken = {*rows.values()}
        rest = {n: known[places[n]] for n in states if n not in rows and places[n] in known}
        return rows | {n: row for n, row in rest.items() if row not in taken}
