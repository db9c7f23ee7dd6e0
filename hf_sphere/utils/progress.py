"""Progress bars."""

import os
from typing import Any

from tqdm.auto import tqdm


def progress_bar(*args: Any, disable: bool = False, **options: Any) -> Any:
    """Return a bar of tqdm, which `TQDM_DISABLE` disables."""
    options["disable"] = disable or os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
    return tqdm(*args, **options)
