"""Texts for terminals, tables and publication, whose parts may come from others, and sentences on shortages."""

import csv
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_sphere.utils.checks import error_text

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than line ends and tabs, those that change the direction of a text, and surrogates."""

_BAR = re.compile(r"\r|(\n|\x1b\[A)*$")
"""What progress bars begin with, or write alone to move the cursor."""

_FORMULA = re.compile(r"(?![-+]?(\d*\.?\d+(e[-+]?\d+)?|inf)$)\s*[-=+@\uff0b\uff0d\uff1d\uff20]|[\t\r\n]", re.IGNORECASE)
"""Beginning of a cell that a spreadsheet takes for a formula; a number is none."""


def printable(text: str) -> str:
    r"""Replace control characters by their escape sequences, such as `\x1b`; a terminal would obey them."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class PrintableStream:
    """A stream that writes texts as `printable` returns them, except for the cursor movements of progress bars."""

    def __init__(self, stream: Any, has_colors: bool) -> None:
        self._stream, self._has_colors = stream, has_colors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Whether libraries may color what they write."""
        return self._has_colors and self._stream.isatty()

    def write(self, text: str) -> int:
        """Write a text."""
        bar = _BAR.match(text)
        end = bar.end() if bar else 0
        text, encoding = text[:end] + printable(text[end:]), getattr(self._stream, "encoding", None) or "utf-8"
        return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def write_csv(rows: Sequence[Mapping[str, Any]], file: Any) -> None:
    """Write rows as CSV, with a `'` before texts that a spreadsheet would take for a formula, such as `=1+1`."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(rows[0])
    for row in rows:
        cells = ["" if row.get(name) is None else printable(str(row[name])) for name in rows[0]]
        writer.writerow([f"'{cell}" if _FORMULA.match(cell) else cell for cell in cells])


_MEMORY = re.compile(
    r"out of memory|(can't|cannot|could not|failed to|unable to) allocate|not enough memory|bad_?alloc|alloc_failed"
    r"|insufficient shared memory|failed to map segment|killed by signal: killed|can't start new thread",
    re.IGNORECASE,
)
_DISK = re.compile(  # the last three are messages of torch
    r"no space left|quota exceeded|file too large|not enough disk|file write failed|iostream error|unexpected pos \d",
    re.IGNORECASE,
)
_LACK = re.compile(
    r"operator '(aten::\w+)\S* is not currently|Could not run '(aten::\w+).* from the '(?!\w*CPU)"
    r"|Cannot convert a .*to (float64)|aspect (fp64) is not"
)


def shortage(error: BaseException) -> str | None:
    """Return a sentence if memory, a disk or an operation of a device is lacking, also as a cause; else None."""
    cause: BaseException | None = error
    errors = list[BaseException]()  # those that a traceback lists
    while cause and cause not in errors:  # an error can be its own cause
        errors.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    # The message of an import does not say why; that of another process continues with its traceback.
    named = next((each for each in errors if not isinstance(each, ImportError)), errors[-1])
    text = error_text(named).partition(" Original Traceback")[0].rstrip(".")
    if any(isinstance(each, MemoryError) or _MEMORY.search(str(each)) for each in errors):
        return f"not enough memory: {text}. Smaller batches, images or networks, and fewer workers, need less."
    if any(_DISK.search(str(each)) for each in errors):
        return f"the disk or its quota is full: {text}. Free some space, or write to another disk."
    if isinstance(named, (RuntimeError, TypeError)) and (lack := _LACK.search(str(named))):
        how = "Set PYTORCH_ENABLE_MPS_FALLBACK=1 to run missing operations of mps on the CPU, or"
        what = next(filter(None, lack.groups()))
        return f"the device lacks {what}: {text}. {how} ACCELERATE_USE_CPU=true to run everything there."
    return None


def damage(error: Exception) -> str:
    """Return why an image cannot be read; exhausted memory, which is no fault of the image, is raised again."""
    if shortage(error):
        raise error
    return error_text(error).rstrip(".")


INTERVAL = "_interval"
"""Suffix of the names of metrics that are the half-width of another metric's 95 % interval."""


def show_metrics(metrics: Mapping[str, Any], names: Collection[str] | None = None) -> Iterator[str]:
    """Format metrics, all or some, for the console, each with its interval if there is one; counts are left out."""
    for name in metrics if names is None else names:
        if name in metrics and not name.endswith(INTERVAL) and "_num_" not in name:
            yield f"{name} {show_metric(name, metrics[name], metrics.get(f'{name}{INTERVAL}'))}"


def show_metric(name: str, value: float, interval: float | None = None) -> str:
    """Format a metric for the console: accuracy and recall in percent, times in seconds, others with 4 digits.

    The half-width of an interval follows its metric: `95.31 ± 0.22 %`.
    """
    if re.search("accuracy|recall|precision|map_at_r|rejected", name):
        around = "" if interval is None else f" ± {100 * interval:.2f}"
        return f"{100 * value:.2f}{around} %"
    if "num_" in name:
        return f"{value:g}"
    return f"{value:.3g}" if "rate" in name else f"{value:.4g}{' s' * name.endswith('runtime')}"


_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
_FOLDERS = re.compile(r"(?<![\w./:~])(?:/[^/\s'\",{}]+)+/(?=[^/\s])")  # not in URLs and relative paths

_CREDENTIALS = re.compile(
    r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|npm_|pypi-|sk-|[rs]k_(?:live|test)_|xox[abeprs]-|SG\.|ya29\.)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bdapi[0-9a-f]{32}|\bhooks\.slack\.com/services/\w"
    r"|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b[a-z][a-z0-9+.-]*://(?:[^\s/@:\"']*:[^\s/@\"']+|[^\s/@:\"']{16,})@"
    r"|(?i:(?:\bBearer|authorization\\?[\"']?\s*[:=]\s*\\?[\"']?Basic)\s+[\w.~+/-]{16,}"
    r"|\b(?:sig|X-Amz-Signature|X-Goog-Signature)=[\w%+/-]{16,}"
    r"|(?:access|api|auth|github|hf|hub|refresh|secret|wandb)[_-]?token\\?[\"']?\s*[:=]\s*\\?[\"']?[\w.-]{12,}"
    r"|(?:password|passwd|\bpwd|(?:api|account|private|secret)[_-]?(?:access[_-]?)?key|client[_-]?secret)\\?[\"']?"
    r"\s*[:=]\s*\\?[\"']?[^\s\"',\\]{8,})"
)
_USER_PATHS = re.compile(
    r"file:/|\b[A-Z]:(?:\\+|/)\w|(?<![\w\\])\\{2,4}[\w.-]+\\+\w|(?<![\w./~])~[A-Za-z][\w.-]*/\w"
    r"|(?<![\w.])/(?:home|Users|root)/[^\s\"',]"
    r"|(?<![\w/.-])[A-Za-z][\w.-]*[\w-]:/(?!/)\w|(?<![\w:/.])//[\w.-]+/\w|(?:[\"'=]|^\s*|:\s)~[A-Za-z][\w.-]*(?=[\"']|\s*$)"
)


def find_private(text: str, *, paths: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text, from 1, that have credentials of any kind or, with `paths`, paths of users, and what.

    Of a credential only the first characters are shown.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if found := _CREDENTIALS.search(line):
            yield number, f"a credential, {found[0][:6]}..."
        if paths and (path := _USER_PATHS.search(line) or _FOLDERS.search(line)):
            shown = re.split(r"[\s\"',]", line[path.start() :])[0][:60]
            yield number, f"a local path, {shown}"


def hide_private(value: Any, *, paths: bool = True) -> Any:
    """Replace access tokens of the Hub and, with `paths`, absolute paths in a text, or all of a mapping or list.

    A path becomes relative to the working directory if it is below it; otherwise only its last part is kept.
    """
    if isinstance(value, Mapping):
        return {name: hide_private(item, paths=paths) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_private(item, paths=paths) for item in value]
    if not isinstance(value, str):
        return value
    text = _TOKEN.sub("<token>", value)
    if not paths:
        return text
    if here := str(Path.cwd()).rstrip("/"):
        text = re.sub(rf"(?<![\w.~]){re.escape(here)}/", "", text)
    return Path(text).name or text if Path(text).is_absolute() else _FOLDERS.sub("", text)
