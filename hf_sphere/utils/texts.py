"""Texts for terminals and tables, whose parts may come from others, and sentences for what a computer lacks."""

import csv
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_sphere.utils.arguments import error_text

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than line ends and tabs, those that change the direction of a text, and surrogates."""

_CURSOR = re.compile(r"(\n|\r|\x1b\[A)*")
"""What progress bars write to move the cursor, in a call of its own."""

_FORMULA = re.compile(r"(?![-+]?\d*\.?\d+(e[-+]?\d+)?$)\s*[-=+@\uff0b\uff0d\uff1d\uff20]|[\t\r\n]", re.IGNORECASE)
"""Beginning of a cell that a spreadsheet takes for a formula; a number is none."""


def printable(text: str) -> str:
    r"""Replace control characters by their escape sequences, such as `\x1b`; a terminal would obey them."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class PrintableStream:
    """A stream for a terminal that writes texts as `printable` returns them, and progress bars as they are."""

    def __init__(self, stream: Any, is_colored: bool) -> None:
        self._stream, self._is_colored = stream, is_colored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Whether it is a terminal that libraries may color."""
        return self._is_colored and self._stream.isatty()

    def write(self, text: str) -> int:
        """Write a text; a progress bar begins with a carriage return."""
        start = text.startswith("\r")
        return self._stream.write(text if _CURSOR.fullmatch(text) else text[:start] + printable(text[start:]))


def write_csv(rows: Sequence[Mapping[str, Any]], file: Any) -> None:
    """Write rows as CSV, with a `'` before texts that a spreadsheet would take for a formula, such as `=1+1`."""
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = {name: printable(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
        writer.writerow({n: f"'{c}" if isinstance(c, str) and _FORMULA.match(c) else c for n, c in cells.items()})


_SHORTAGES = {
    "not enough memory": (
        r"out of memory|(can't|cannot|could not|failed to|unable to) allocate|not enough memory|bad_?alloc|alloc_failed"
        r"|insufficient shared memory|killed by signal: killed|can't start new thread",
        (errno.ENOMEM,),
        "Smaller batches, images or networks, and fewer workers, need less.",
    ),
    "the disk is full": (
        # The last three are what torch reports.
        r"no space left|quota exceeded|file too large|not enough disk space|file write failed|iostream error"
        r"|unexpected pos \d+ vs",
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "Free some space, or write to another disk.",
    ),
}


def shortage(error: BaseException) -> str | None:
    """Return a sentence if memory or a disk is exhausted, also as the cause of another error; else None."""
    errors = list(_causes(error))
    for what, (pattern, numbers, hint) in _SHORTAGES.items():
        for cause in errors:
            is_memory = isinstance(cause, MemoryError) and what == "not enough memory"
            if is_memory or getattr(cause, "errno", None) in numbers or re.search(pattern, str(cause), re.IGNORECASE):
                # An import fails with a message that has nothing to do with it.
                named = next((each for each in errors if not isinstance(each, ImportError)), cause)
                # The rest of the message of a worker is its traceback.
                text = " ".join(str(named).partition("Original Traceback")[0].split()).rstrip(".")
                return f"{what}{f': {text}' * bool(text)}. {hint}"
    return None


def damage(error: Exception) -> str:
    """Return why an image cannot be read; a lack of memory, which is no fault of the image, is raised again."""
    if shortage(error):
        raise error
    return error_text(error).rstrip(".")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, as a traceback lists them."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
