"""Accuracies of a model with one of its layers put back to other weights, as a table."""

import statistics
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from hf_sphere.analysis.saved_results import SavedResult

WIDTH = 100
"""Columns of the printed table."""

_CELL = 8


@dataclass(frozen=True)
class LayerRobustness:
    """Accuracies with other weights in one layer.

    Attributes:
        snapshots: Label of a snapshot, its epoch or its place in the list, to the accuracy with its weights; in the
            order of the list.
        random: Accuracy with each fresh draw.
    """

    snapshots: dict[str, float] = field(default_factory=dict)
    random: list[float] = field(default_factory=list)

    @property
    def random_mean(self) -> float | None:
        """Mean over the draws, None without any."""
        return statistics.fmean(self.random) if self.random else None

    @property
    def random_deviation(self) -> float | None:
        """Sample standard deviation over the draws, None of fewer than two."""
        return statistics.stdev(self.random) if len(self.random) > 1 else None

    @property
    def reset(self) -> float | None:
        """Accuracy with the first snapshot, or, if there is none, the mean over the draws."""
        return next(iter(self.snapshots.values()), self.random_mean)


@dataclass(frozen=True)
class ReinitializationRobustness(SavedResult):
    """What the layers' own weights are worth; prints as a table.

    Attributes:
        accuracy: Of the untouched model.
        layers: Accuracies by the path of the layer, in the order in which the model defines them.
        missing: Snapshots that were not there.
    """

    accuracy: float
    layers: dict[str, LayerRobustness]
    missing: list[str] = field(default_factory=list)

    def critical_layers(self, drop: float = 0.05) -> list[str]:
        """Return the layers whose reset costs more accuracy than `drop`, the worst first.

        A layer is reset to the first snapshot of the list or, where there are none, to fresh draws, whose mean counts.
        """
        resets = {name: layer.reset for name, layer in self.layers.items()}
        costs = {name: self.accuracy - reset for name, reset in resets.items() if reset is not None}
        return sorted((name for name, cost in costs.items() if cost > drop + 1e-9), key=lambda name: -costs[name])

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        layers = {}
        for name, layer in self.layers.items():
            random = {"mean": layer.random_mean, "deviation": layer.random_deviation, "values": layer.random}
            layers[name] = {"snapshots": layer.snapshots, "random": random if layer.random else None}
        return {"accuracy": self.accuracy, "layers": layers, "missing": self.missing}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Make it of what `to_dict` returned.

        Raises:
            ValueError: If something is missing.
        """
        try:
            layers = {
                name: LayerRobustness(dict(layer["snapshots"]), list((layer["random"] or {"values": []})["values"]))
                for name, layer in content["layers"].items()
            }
            return cls(content["accuracy"], layers, list(content["missing"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no robustness as to_dict returns it: {error!r}.") from error

    def __str__(self) -> str:
        return self.table()

    def table(self, drop: float = 0.05) -> str:
        """Return a line a layer, a column a snapshot, and in words which layers are critical.

        Of many snapshots those are shown that fit, the first and the last among them.

        Args:
            drop: As of `critical_layers`.
        """
        labels = list(next(iter(self.layers.values())).snapshots)
        random = any(layer.random for layer in self.layers.values())
        name_width = min(max(len("layer"), *(len(_name(name)) for name in self.layers)), WIDTH // 2)
        places = max(2, (WIDTH - name_width - 2 * _CELL * random) // _CELL)
        shown = labels
        if len(labels) > places:
            shown = [labels[round(i * (len(labels) - 1) / (places - 1))] for i in range(places)]
        lines = [f"accuracy of the untouched model: {self.accuracy:.4f}"]
        if len(shown) < len(labels):
            lines.append(f"{len(shown)} of {len(labels)} snapshots are shown")
        header = "".join(f"{label:>{_CELL}}" for label in shown) + ("random".rjust(_CELL) if random else "")
        lines.append(f"{'layer':<{name_width}}{header}")
        for name, layer in self.layers.items():
            cells = "".join(f"{layer.snapshots[label]:{_CELL}.4f}" for label in shown)
            if layer.random_mean is not None:
                cells += f"{layer.random_mean:{_CELL}.4f}"
            if layer.random_deviation is not None:
                cells += f" ± {layer.random_deviation:.4f}"
            lines.append(f"{_shorten(_name(name), name_width):<{name_width}}{cells}")
        critical = self.critical_layers(drop)
        others = [_name(name) for name in self.layers if name not in critical]
        reset = f"the first snapshot, {labels[0]}" if labels else "fresh random weights"
        for what, names in (
            (f"lose more than {drop:g} with {reset} (critical)", [_name(name) for name in critical]),
            ("lose no more than that", others),
        ):
            lines += textwrap.wrap(f"{what}: {', '.join(names) or 'none'}", WIDTH, subsequent_indent="  ")
        if self.missing:
            lines += textwrap.wrap(f"missing snapshots: {', '.join(self.missing)}", WIDTH, subsequent_indent="  ")
        return "\n".join(lines)


def _name(path: str) -> str:
    return path or "(the model)"


def _shorten(name: str, width: int) -> str:
    """Leave out the middle of a long name, whose ends tell most."""
    half = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - half]}…{name[-half:]}"
