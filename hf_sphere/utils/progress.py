"""Progress bars."""

import io
import os
import sys
import time
from typing import Any

from tqdm.auto import tqdm

from hf_sphere.utils.commands import running

SECONDS = 60.0
"""Between lines where there is no terminal."""


class _Lines(tqdm):
    """A bar of a command that writes to a file or pipe: a line a minute."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.shown = time.monotonic()
        # tqdm's own output, which moves the cursor, is dropped.
        options |= {"file": io.StringIO(), "miniters": 1, "disable": False}
        super().__init__(*args, **options)

    def display(self, *args: Any, **options: Any) -> None:
        if (now := time.monotonic()) - self.shown >= SECONDS and self.n < (self.total or sys.maxsize):
            self.shown = now
            print(self, file=sys.stderr, flush=True)


def progress_bar(*args: Any, disable: bool = False, **options: Any) -> Any:
    """Return a bar of tqdm, which `TQDM_DISABLE` disables; commands without a terminal print a line a minute."""
    if not disable and running.get() and not sys.stderr.isatty():
        style = "{desc}: {n_fmt} of {total_fmt} {unit}s, about {remaining} left{postfix}"
        return _Lines(*args, **{"bar_format": style, **options})
    options["disable"] = disable or os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
    return tqdm(*args, **options)
