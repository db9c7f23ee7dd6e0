"""Per layer: the bias of the filters and the accuracy after a reset, and whether the two go together."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

from scipy.stats import spearmanr

SIGNIFICANT = 0.05
"""Corrected p-value of the sign test below which the filters of a layer are biased."""


def read_layers(folder: Path) -> dict[str, dict[str, float]]:
    """Return, by layer, what the jobs `projections` and `reinitialize` measured, from their folders.

    Only layers in both are returned: those with a weight that is projected. `drop` is the relative loss of accuracy
    when the layer is reset to its initialization.
    """
    bias, reset = folder / "projections" / "projections.json", folder / "reset" / "reinitialization.json"
    if not (bias.is_file() and reset.is_file()):
        return {}
    projected = json.loads(bias.read_text(encoding="utf-8"))["layers"]
    robustness = json.loads(reset.read_text(encoding="utf-8"))
    trained = robustness["accuracy"]
    return {
        name: {
            "mass": projected[name]["mass"],
            "sign_p_value_adjusted": projected[name]["sign_p_value_adjusted"],
            "reset_accuracy": layer["snapshots"]["0"],
            "drop": (trained - layer["snapshots"]["0"]) / trained,
        }
        for name, layer in robustness["layers"].items()
        if name in projected
    }


def compare_layers(layers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the rank correlation of bias and drop over the layers, and the mean drop with and without bias."""
    if len(layers) < 3:
        return {}
    bias = [abs(layer["mass"] - 0.5) for layer in layers.values()]
    drops = [layer["drop"] for layer in layers.values()]
    biased = [layer["sign_p_value_adjusted"] < SIGNIFICANT for layer in layers.values()]
    groups = {
        "layers/drop_biased": [drop for drop, is_biased in zip(drops, biased, strict=True) if is_biased],
        "layers/drop_unbiased": [drop for drop, is_biased in zip(drops, biased, strict=True) if not is_biased],
    }
    found = {"layers/rank_correlation": float(spearmanr(bias, drops).statistic)}
    return found | {name: statistics.fmean(values) for name, values in groups.items() if values}
