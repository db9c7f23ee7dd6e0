"""Distance of the filters of each layer from their initialization."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hf_sphere.hyperplanes.layers import LayerSelection
from hf_sphere.hyperplanes.results import SavedResult
from hf_sphere.hyperplanes.weight_files import LayerWeight, Source, open_layers


@dataclass(frozen=True)
class LayerDistance:
    """Distance of the weights of a layer, without biases, from the initial ones.

    Attributes:
        l2: |W - W0|_2 / |W0|_2, over all weights.
        l_inf: |W - W0|_inf / |W0|_inf, the largest change of a weight relative to the largest initial weight.
        relative: False if all initial weights are zero or there are none; both distances are then absolute.
    """

    l2: float
    l_inf: float
    relative: bool


@dataclass(frozen=True)
class Distances(SavedResult):
    """Distances of all layers; prints as a table.

    Attributes:
        layers: Distances by module path.
    """

    layers: Mapping[str, LayerDistance]

    def __str__(self) -> str:
        width = max(len("layer"), *map(len, self.layers))
        lines = [f"{'layer':<{width}} {'L2':>9} {'L inf':>9}"]
        for name, layer in self.layers.items():
            mark = "" if layer.relative else "  absolute"
            lines.append(f"{name:<{width}} {layer.l2:>9.4g} {layer.l_inf:>9.4g}{mark}")
        return "\n".join(lines)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """See `SavedResult.from_dict`."""
        return cls({name: LayerDistance(**layer) for name, layer in content["layers"].items()})


def distance_from_initialization(
    model: Source, initial: Source, layers: LayerSelection = "conv", include_1x1: bool = False
) -> Distances:
    """Compute the distance of each layer from its initialization, in float64, in the order of `model`.

    `model` is a module, a state dict, a snapshot, or the path of safetensors files, and `initial` the same model before
    training, in any of these forms. For the other arguments, see `iterate_layers`.

    Raises:
        ValueError: If the architectures differ (the message names the layers or the shapes), a weight is not finite, or
            `iterate_layers` raises it.

    Example:
        >>> distance_from_initialization(network, network).layers["0"].l2
        0.0
    """
    trained, untrained = open_layers(model, layers, include_1x1), open_layers(initial, layers, include_1x1)
    if only := sorted(trained.keys() ^ untrained.keys()):
        names = ", ".join(only[:5])
        raise ValueError(f"only one of the model and its initialization has {names}. Architectures must match.")
    return Distances({name: _distance(read(), untrained[name]()) for name, read in trained.items()})


def _distance(trained: LayerWeight, initial: LayerWeight) -> LayerDistance:
    if trained.weight.shape != initial.weight.shape:
        shapes = f"{tuple(trained.weight.shape)}, but {tuple(initial.weight.shape)}"
        raise ValueError(f"{trained.name} has filters of shape {shapes} in the initialization: other architectures.")
    if not initial.weight.numel():
        return LayerDistance(0.0, 0.0, relative=False)
    squares = initial_squares = largest = initial_largest = 0.0
    for after, before in zip(trained.chunks(), initial.chunks(), strict=True):
        change = after - before
        squares += float(change.square().sum())
        initial_squares += float(before.square().sum())
        largest = max(largest, float(change.abs().max()))
        initial_largest = max(initial_largest, float(before.abs().max()))
    if initial_squares == 0:
        return LayerDistance(squares**0.5, largest, relative=False)
    return LayerDistance((squares / initial_squares) ** 0.5, largest / initial_largest, relative=True)
