"""Images of an index: which have changed since they were indexed, and opening them."""

import hashlib
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

from datasets.utils.file_utils import xopen
from PIL.Image import Image as PILImage

from hf_sphere.data.sources import open_image
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


def predicted_class(columns: Mapping[str, Sequence[Any]], row: int, mark: str = "") -> str:
    """Return the prediction of a row and the `mark`, or `unknown` and, with a mark, its p-value; or an empty text."""
    names = ("prediction", "known", "p_value")
    prediction, known, p_value = (columns.get(name, {row: None})[row] for name in names)
    if known is False:
        return "unknown" if p_value is None or not mark else f"unknown (p = {p_value:.2g})"
    return prediction + mark if prediction else ""


def place_of(name: str, split: str | None, file: str, row_id: Any) -> Hashable:
    """Return the path of an image, the dataset and the id, if there is one, of another row, or None in memory."""
    path = os.path.join(name, file)
    if os.path.isabs(path) and (split is None or os.path.isfile(path)):
        return path
    return None if split is None else (name, split, file if row_id is None else row_id)


def file_state(path: str) -> tuple[int, int] | None:
    """Return size and time of a file, or None if there is none."""
    if not (os.path.isabs(path) and os.path.isfile(path)):
        return None
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def identify(source: ImageSource, rows: Sequence[int], *, progress: bool = True) -> dict[int, ImageState]:
    """Return the states of images of a source, by row, read in parallel threads."""

    def state_of(row: int) -> ImageState:
        cell, time = source.encoded[row], None
        if source.content == "image":
            time = (file_state(os.path.join(source.name, source.names[row])) or [None, None])[1]  # before it is read
            try:
                content = _read(cell["image"])
            except (OSError, ValueError):  # it is named when it is embedded
                return ImageState(None, None, None)
        else:
            content = cell.encode() if source.content == "text" else cell.numpy().tobytes()
        return ImageState(len(content), time, _digest(content))

    with ThreadPool(min(16, len(rows) // 100 + 1)) as pool:
        states = pool.imap(state_of, rows, chunksize=100)
        bar = progress_bar(states, "Reading", len(rows), unit=source.content, disable=not progress, leave=False)
        return dict(zip(rows, bar, strict=True))


def _read(record: dict[str, Any] | None) -> bytes:
    """Return the content of an encoded image."""
    if not record or (record["bytes"] is None and not record["path"]):
        raise ValueError("it is missing")
    if record["bytes"] is not None:
        return record["bytes"]
    with xopen(record["path"], "rb") as file:  # also in a zip file, or from a server
        return file.read()


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
    _opened: dict[int, ImageSource] = field(default_factory=dict)

    def path(self, row: int) -> str:
        """Return the absolute path of an indexed image; of one of a dataset, the name of that and its own."""
        return os.path.join(self.sources[self.images["source"][row]][0], self.images["file"][row])

    def open_image(self, row: int) -> PILImage:
        """Open an indexed image from its source, if it still has the content that was indexed.

        So an index from someone else opens only images that its author had, whatever files it names. One that was in
        memory, is missing, cannot be read, or has another content is an error.
        """
        source, path = self.images["source"][row], self.path(row)
        (name, split), record = self.sources[source], {"bytes": None, "path": path}
        try:
            if split is not None:  # `datasets` extracts the files of archives elsewhere
                if source not in self._opened:
                    self._opened[source] = ImageSource.of(name, split, column=self.columns.get(name))
                record = self._opened[source].encoded[self.images["row"][row]]["image"]
            # A pipe or device, which might have no end, has no size.
            has_size = split is not None or (file_state(path) or [None])[0] == self.images["size"][row]
            content = _read(record) if has_size else b""
            if _digest(content) != self.images["digest"][row]:
                raise ValueError("it is missing, or not the image that was indexed; add it again")
            with open_image({"bytes": content, "path": None}) as image:
                return convert_image(image, 3)
        except Exception as error:  # of PIL and its plugins, of many classes
            raise ValueError(f"{path} cannot be opened: {error_text(error).rstrip('.')}.") from error

    def changes(self) -> list[str]:
        """Return what has changed since the images were embedded, one text each.

        Sizes and times of files are compared; datasets are not loaded. `open_image` and `add` compare contents.
        """
        texts, current = [], self.encoder.settings.split("-")
        for position, name in ((0, "preprocessing"), (-1, "class names")):
            if count := sum(text.split("-")[position] != current[position] for text in self.images["settings"]):
                texts.append(f"the {name} of the model changed after {count:,} images were embedded")
        other = [n for n, time in enumerate(self.images["time"]) if time is not None and not self.is_as_indexed(n)]
        missing = [row for row in other if not os.path.isfile(self.path(row))]
        changed = sorted({*other} - {*missing})
        for rows, what in ((changed, "have another size or time"), (missing, "are missing")):
            texts += [f"{len(rows):,} images {what}, such as {self.path(row)}" for row in rows[:1]]
        return texts

    def is_as_indexed(self, row: int) -> bool:
        """Whether an image is a file with the recorded size and time."""
        return file_state(self.path(row)) == (self.images["size"][row], self.images["time"][row])

    def match(self, source: ImageSource, *, progress: bool) -> tuple[dict[int, int], dict[int, ImageState]]:
        """Return the rows of images of a source, by their places, and the states of those that are new or changed.

        Files with the recorded size and time, and embedded by the same settings, are unchanged; all others are read.
        """
        columns = [self.images.get(name, []) for name in ("source", "file", "id")]
        indexed = {
            place_of(self.sources[at][0], self.sources[at][1], file, None if self.ids is None else name): row
            for row, (at, file, name) in enumerate(zip(*columns, strict=True))
        }
        ids = [None] * len(source) if self.ids is None else source.ids
        names = zip(source.names, ids or [], strict=True)
        places = [place_of(source.name, source.split, file, name) for file, name in names]
        rows = {n: indexed[place] for n, place in enumerate(places) if place is not None and place in indexed}
        used, settings = self.images.get("settings", []), self.encoder.settings
        same = {n for n, row in rows.items() if used[row] == settings and self.is_as_indexed(row)}
        return rows, identify(source, [n for n in range(len(source)) if n not in same], progress=progress)
