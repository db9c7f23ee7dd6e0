"""Results that are saved as JSON and loaded without loss, and the accuracies of a model with its layers reset."""

import statistics
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any, Self

from hf_sphere.utils.files import read_json, write_json

WIDTH = 100  # columns of the printed table
_CELL = 8


class SavedResult:
    """Base class of result dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Create a result from the output of `to_dict`."""
        raise NotImplementedError

    def save(self, path: str | PathLike) -> None:
        """Write a JSON file."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | PathLike) -> Self:
        """Read a file written by `save`."""
        return cls.from_dict(read_json(path))


@dataclass(frozen=True)
class LayerRobustness:
    """Accuracies with one layer reset to other weights.

    Attributes:
        snapshots: Accuracies with the weights of each snapshot, by its label (epoch or position in the list), in the
            order of the list.
        random: Accuracies with each random initialization.
    """

    snapshots: dict[str, float] = field(default_factory=dict)
    random: list[float] = field(default_factory=list)

    @property
    def random_mean(self) -> float | None:
        """Mean over the random initializations, None without any."""
        return statistics.fmean(self.random) if self.random else None

    @property
    def random_deviation(self) -> float | None:
        """Sample standard deviation over the random initializations, None for fewer than two."""
        return statistics.stdev(self.random) if len(self.random) > 1 else None

    @property
    def reset(self) -> float | None:
        """Accuracy with the first snapshot, or, if there is none, the mean over the random initializations."""
        return next(iter(self.snapshots.values()), self.random_mean)


@dataclass(frozen=True)
class ReinitializationRobustness(SavedResult):
    """Accuracies with each layer reset in turn; prints as a table.

    Attributes:
        accuracy: Accuracy of the trained model.
        layers: Accuracies by layer path, in the order in which the model defines the layers.
        missing: Paths of missing snapshots.
    """

    accuracy: float
    layers: dict[str, LayerRobustness]
    missing: list[str] = field(default_factory=list)

    def critical_layers(self, drop: float = 0.05) -> list[str]:
        """Return the layers whose reset reduces the accuracy by more than `drop`, the largest loss first.

        A layer is reset to the first snapshot or, without snapshots, to random weights; their mean accuracy is used.
        """
        resets = {name: layer.reset for name, layer in self.layers.items()}
        losses = {name: self.accuracy - reset for name, reset in resets.items() if reset is not None}
        return sorted((name for name, loss in losses.items() if loss > drop + 1e-9), key=lambda name: -losses[name])

    def to_dict(self) -> dict[str, Any]:
        """Return the accuracies, with mean and deviation of the random ones, as JSON-compatible values."""
        layers = {}
        for name, layer in self.layers.items():
            random = {"mean": layer.random_mean, "deviation": layer.random_deviation, "values": layer.random}
            layers[name] = {"snapshots": layer.snapshots, "random": random if layer.random else None}
        return {"accuracy": self.accuracy, "layers": layers, "missing": self.missing}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """See `SavedResult.from_dict`."""
        layers = {
            name: LayerRobustness(layer["snapshots"], layer["random"]["values"] if layer["random"] else [])
            for name, layer in content["layers"].items()
        }
        return cls(content["accuracy"], layers, content["missing"])

    def __str__(self) -> str:
        return self.table()

    def table(self, drop: float = 0.05) -> str:
        """Return a line per layer, a column per snapshot, and the names of the `critical_layers(drop)`.

        If there are too many snapshots for the width, some are omitted, but never the first or the last.
        """
        names = {path: path or "(the model)" for path in self.layers}
        labels = list(next(iter(self.layers.values())).snapshots)
        width = min(max(len("layer"), *map(len, names.values())), WIDTH // 2)
        columns = min(len(labels), (WIDTH - width - 18) // _CELL)  # 18 for the random weights
        shown = [labels[round(at * (len(labels) - 1) / max(1, columns - 1))] for at in range(columns)]
        omitted = f"; {len(shown)} of {len(labels)} snapshots shown" if len(shown) < len(labels) else ""
        has_random = any(layer.random for layer in self.layers.values())
        header = [*shown, "random"] if has_random else shown
        lines = [f"accuracy of the trained model: {self.accuracy:.4f}{omitted}"]
        lines.append("layer".ljust(width) + "".join(label.rjust(_CELL) for label in header))
        for path, layer in self.layers.items():
            values = [layer.snapshots[label] for label in shown] + ([layer.random_mean] if layer.random else [])
            cells = "".join(f"{value:{_CELL}.4f}" for value in values)
            deviation = "" if layer.random_deviation is None else f" ± {layer.random_deviation:.4f}"
            lines.append(f"{names[path][-width:]:<{width}}{cells}{deviation}")
        critical = self.critical_layers(drop)
        reset = f"snapshot {labels[0]}" if labels else "random weights"
        lists = {
            f"lose more than {drop:g} when reset to {reset} (critical)": [names[path] for path in critical],
            f"lose at most {drop:g}": [names[path] for path in self.layers if path not in critical],
        } | ({"missing snapshots": self.missing} if self.missing else {})
        for what, listed in lists.items():
            lines += textwrap.wrap(f"{what}: {', '.join(listed) or 'none'}", WIDTH, subsequent_indent="  ")
        return "\n".join(lines)
