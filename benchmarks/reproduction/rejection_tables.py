"""Tables of the rejection of unknown images; see `reproduction.benchmark_tables`."""

import statistics
from collections.abc import Mapping
from typing import Any

from reproduction.tables import join_lines

Rows = Mapping[str, Mapping[str, Any]]


def level(rows: Rows, content: Mapping[str, Any]) -> str:
    """Known images that are rejected and prediction sets, by calibration."""
    lines = []
    for what in (name.removesuffix(": known rejected") for name in rows if name.endswith(": known rejected")):
        known, *others = (
            rows[f"{what}: {key}"]
            for key in ("known rejected", "unknown rejected", "accuracy", "accuracy of those not rejected",
                        "true class in the set", "classes in the set")
        )  # fmt: skip
        shares = [f"{100 * line['value']:.1f} %" for line in others[:-1]]
        share = f"{100 * known['value']:.1f} (± {100 * known['error']:.1f}) %"
        lines.append([*what.split(", "), share, *shares, f"{others[-1]['value']:.2f}"])
    titles = ["images", "calibration", "known rejected", "two other classes rejected", "accuracy", "if not rejected"]
    return join_lines([*titles, "set has the class", "classes in a set"], sorted(lines), [])


def unknown(rows: Rows, content: Mapping[str, Any]) -> str:
    """Unknown images that are rejected at equal level, by score."""
    found = {(*name.split(", ", 2),): row for name, row in rows.items() if "change" in row}
    sets = sorted(dict.fromkeys(key[:2] for key in found))
    lines = []
    for score in dict.fromkeys(key[2] for key in found):
        cells = []
        for row in (found.get((*key, score)) for key in sets):
            change = "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * value for value in row["change"])) if row else ""
            of_seeds = [100 * value for value in row["seeds"]] if row else []
            mean = f"{statistics.mean(of_seeds):.1f} ± {statistics.stdev(of_seeds):.1f}" if row else ""
            cells.append(f"{mean}; {change}" if score.startswith("auto") else mean)
        lines.append([score if score[0].isupper() or score == "fDBD" else f"`{score}`", *cells])
    return join_lines(["score", *(": ".join(key) for key in sets)], lines, [])


def runtime(rows: Rows, content: Mapping[str, Any]) -> str:
    """Decisions in ONNX and cost, by score."""
    lines = []
    for score in (name.split(", ")[1].split(":")[0] for name in rows if "batch of 1," in name):
        far, close = (
            rows[f"ONNX, {score}, 10,000 images of MNIST: other decisions, score {where} 1e-5 of the threshold"][
                "value"
            ]
            for where in ("not within", "within")
        )
        ratios = [rows[f"batch of {size}, {score}: time with / without"]["value"] for size in (512, 1)]
        lines.append([f"`{score}`", f"{far}", f"{close}", *(f"{ratio:.3f}" for ratio in ratios)])
    titles = ["score", "other decisions in ONNX", "within 1e-5 of the threshold", "time, batch of 512"]
    return join_lines([*titles, "one image"], lines, [])
