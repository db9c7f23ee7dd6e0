"""How far the filters of each layer went from their initialisation."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

from hf_sphere.analysis.layers import LayerSelection
from hf_sphere.analysis.saved_results import SavedResult
from hf_sphere.analysis.sources import LayerWeight, Source, open_layers
from hf_sphere.utils.snapshots import Snapshot, find_snapshots


@dataclass(frozen=True)
class LayerDistance:
    """Distance of a layer's weights, biases apart, from its initial ones.

    Attributes:
        l2: |W - W0|_2 / |W0|_2, over all weights.
        l_inf: |W - W0|_inf / |W0|_inf, the largest change of a weight by the largest initial one.
        relative: False where the initial weights are all zero, or there are none: then both are not divided.
    """

    l2: float
    l_inf: float
    relative: bool


@dataclass(frozen=True, repr=False)
class Distances(SavedResult):
    """Distances of all layers. `str()` of it is a table.

    Attributes:
        layers: By the module's path.
    """

    layers: Mapping[str, LayerDistance]

    def __repr__(self) -> str:
        return f"Distances({len(self.layers)} layers)"

    def __str__(self) -> str:
        width = max([len("layer"), *map(len, self.layers)])
        lines = [f"{'layer':<{width}} {'L2':>9} {'L inf':>9}"]
        for name, layer in self.layers.items():
            mark = "" if layer.relative else "  absolute"
            lines.append(f"{name:<{width}} {layer.l2:>9.4g} {layer.l_inf:>9.4g}{mark}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and dictionaries, as JSON has them."""
        return {"layers": {name: asdict(layer) for name, layer in self.layers.items()}}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Make it of what `to_dict` returned.

        Raises:
            ValueError: If something is missing.
        """
        try:
            return cls({name: LayerDistance(**layer) for name, layer in content["layers"].items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these are no distances as to_dict returns them: {error!r}.") from error


def distance_from_initialization(
    model: Source, initial: Source, layers: LayerSelection = "conv", include_1x1: bool = False
) -> Distances:
    """Compute how far each layer is from its initialisation, in float64.

    Args:
        model: A module, a state dict, a snapshot, or the path of safetensors files; see `iterate_layers`.
        initial: The same before training, in any of these forms.
        layers: Which kinds; `all` are both.
        include_1x1: Also convolutions whose kernel is a single point.

    Returns:
        The distances of each layer, in the order of `model`.

    Raises:
        ValueError: If they are not of one architecture (a layer that only one has, or two shapes, are named), a weight
            is not finite, and as `iterate_layers` does.
    """
    trained, untrained = open_layers(model, layers, include_1x1), open_layers(initial, layers, include_1x1)
    for owner, own, other in (("the model", trained, untrained), ("its initialisation", untrained, trained)):
        alone = [name for name in own if name not in other]
        if alone:
            raise ValueError(
                f"only {owner} has the layer {alone[0]}"
                f"{f' (and {len(alone) - 1} more)' if len(alone) > 1 else ''}; the other side has "
                f"{', '.join(list(other)[:5])}{', ...' if len(other) > 5 else ''}. Both must be of one "
                "architecture, and both wrapped or both not, as by torch.compile or DistributedDataParallel."
            )
    return Distances({name: _distance(layer.read(), untrained[name].read()) for name, layer in trained.items()})


def distances_along_training(
    snapshots: Sequence[Snapshot | str | PathLike],
    initial: Source | None = None,
    layers: LayerSelection = "conv",
    include_1x1: bool = False,
) -> dict[int, Distances]:
    """Compute the distances of each snapshot of a training.

    Args:
        snapshots: Snapshots, or paths of such; those that are not there are named in a warning and left out.
        initial: The model before training; the first snapshot if left out.
        layers: Which kinds; `all` are both.
        include_1x1: Also convolutions whose kernel is a single point.

    Returns:
        Distances by epoch.

    Raises:
        TypeError: If `snapshots` is a single one and no list.
        FileNotFoundError: If none is there, or the first one is not and `initial` was left out.
        ValueError: If two are of one epoch, and as `distance_from_initialization` does.
    """
    if isinstance(snapshots, str | PathLike | Snapshot):
        raise TypeError(f"snapshots must be a list, also of one; got a {type(snapshots).__name__}.")
    found, missing = find_snapshots(snapshots)
    if not found:
        raise FileNotFoundError(f"none of the {len(missing)} snapshots is there: {', '.join(map(str, missing))}.")
    epochs = [snapshot.epoch for snapshot in found]
    twice = sorted({epoch for epoch in epochs if epochs.count(epoch) > 1})
    if twice:
        raise ValueError(f"several snapshots are of epoch {', '.join(map(str, twice))}; give one of each epoch.")
    if initial is None:
        first = Path(snapshots[0].path if isinstance(snapshots[0], Snapshot) else snapshots[0])
        if first in missing:
            raise FileNotFoundError(
                f"{first} is not there, which the distances are to be measured from. Give `initial`: the model before "
                "training, or another snapshot."
            )
        initial = found[0]
    if missing:
        warnings.warn(f"snapshots that are not there are left out: {', '.join(map(str, missing))}.", stacklevel=2)
    distances = {}
    for snapshot in found:
        try:
            distances[snapshot.epoch] = distance_from_initialization(snapshot, initial, layers, include_1x1)
        except ValueError as error:
            raise ValueError(f"snapshot {snapshot.path.name}: {error}") from error
    return distances


def _distance(trained: LayerWeight, initial: LayerWeight) -> LayerDistance:
    if trained.weight.shape != initial.weight.shape:
        raise ValueError(
            f"{trained.name} has the filters {tuple(trained.weight.shape)}, but {tuple(initial.weight.shape)} in the "
            "initialisation (number of filters, inputs of each). Both must be of one architecture."
        )
    squares = initial_squares = largest = initial_largest = 0.0
    for after, before in zip(trained.chunks(), initial.chunks(), strict=True):
        if not before.numel():  # a layer without inputs or outputs
            continue
        change = after - before
        squares += float(change.square().sum())
        initial_squares += float(before.square().sum())
        largest = max(largest, float(change.abs().max()))
        initial_largest = max(initial_largest, float(before.abs().max()))
    if initial_squares == 0:
        return LayerDistance(squares**0.5, largest, relative=False)
    return LayerDistance((squares / initial_squares) ** 0.5, largest / initial_largest, relative=True)
