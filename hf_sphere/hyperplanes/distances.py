"""Distance of the filters of each layer from their initialization."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pandas import DataFrame

from hf_sphere.hyperplanes.layers import LayerSelection, LayerWeight, Source, open_layers


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
class Distances:
    """Distances of all layers; prints as a table.

    Attributes:
        layers: Distances by module path.
    """

    layers: Mapping[str, LayerDistance]

    def __str__(self) -> str:
        return DataFrame.from_dict(self.to_dict()["layers"], orient="index").to_string(float_format="{:.4g}".format)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return asdict(self)


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
    pairs = ((after - before, before) for after, before in zip(trained.chunks(), initial.chunks(), strict=True))
    norms = [[x.norm() for x in pair] + [x.abs().max() for x in pair] for pair in pairs]
    l2, initial_l2, l_inf, initial_l_inf = torch.tensor(norms, dtype=torch.float64).T
    relative = bool(initial_l2.any())
    divisors = (float(initial_l2.norm()), float(initial_l_inf.max())) if relative else (1.0, 1.0)
    return LayerDistance(float(l2.norm()) / divisors[0], float(l_inf.max()) / divisors[1], relative)
