"""Removal of access tokens and absolute paths from what is written, and a search for what would remain."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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


def hide_tokens(value: Any) -> Any:
    """Replace access tokens of the Hub in a text, or in all texts of a mapping or list."""
    return _map_texts(value, lambda text: _TOKEN.sub("<token>", text))


def hide_private(value: Any) -> Any:
    """Replace access tokens, and also absolute paths.

    A path becomes relative to the working directory if it is below it; otherwise only its last part is kept.
    """
    return _map_texts(hide_tokens(value), _hide_folders)


def _hide_folders(text: str) -> str:
    if here := str(Path.cwd()).rstrip("/"):
        text = re.sub(rf"(?<![\w.~]){re.escape(here)}/", "", text)
    return Path(text).name or text if Path(text).is_absolute() else _FOLDERS.sub("", text)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _map_texts(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
