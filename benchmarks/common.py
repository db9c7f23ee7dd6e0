"""Helpers for the benchmarks: paired timing, a table, a JSON file."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parent.parent / "results" / "pictures"
"""What `docs/_tools/pictures` draws and no other result holds."""


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_in_turn(
    functions: Mapping[str, Callable[[], Any]], rounds: int = 7, warmup: int = 2
) -> dict[str, list[float]]:
    """Time functions in turn, so that changes of the machine's speed affect all of them; return their seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(warmup + rounds):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median of the ratios of paired measurements."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def report(name: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Print rows `{"what", "value", "bound", "holds"}` as a table and write them to `results/<name>.json`."""
    width = max(len(row["what"]) for row in rows)
    print(f"\n{name}")
    for row in rows:
        bound = f"   {row['bound']}   {'ok' if row['holds'] else 'MISSED'}" if "bound" in row else ""
        print(f"  {row['what']:<{width}}  {row['value']:>10.4g}{bound}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    about = {"device": device, "machine": platform.machine(), "torch": torch.__version__}
    RESULTS.mkdir(exist_ok=True)
    suffix = "-cuda" if torch.cuda.is_available() else ""
    path = RESULTS / f"{name}{suffix}.json"
    path.write_text(json.dumps({"benchmark": name, **about, "rows": list(rows), **more}, indent=2) + "\n")
    print(f"  -> {path.relative_to(RESULTS.parent.parent)}")


def keep_for_pictures(name: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file for the pictures of the documentation, a line per entry, floats with four digits."""

    def shorten(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: shorten(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [shorten(entry) for entry in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(shorten(value))}" for key, value in content.items())
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / f"{name}.json").write_text(f"{{\n{lines}\n}}\n", "utf-8")


def row(what: str, value: float, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    """Create a line of a report, with its bound if there is one."""
    if at_most is not None:
        return {"what": what, "value": value, "bound": f"at most {at_most:g}", "holds": value <= at_most}
    if at_least is not None:
        return {"what": what, "value": value, "bound": f"at least {at_least:g}", "holds": value >= at_least}
    return {"what": what, "value": value}
