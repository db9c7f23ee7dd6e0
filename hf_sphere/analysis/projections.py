"""Where the hyperplanes of a network's filters face: their projections on (1, ..., 1), layer by layer.

After Gamba, Carlsson, Azizpour, Bjorkman, "Hyperplane Arrangements of Trained ConvNets Are Biased", 2020: those of
trained networks are biased to negative projections, those of random ones are not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

import numpy as np
import torch

from hf_sphere.analysis.layers import LayerKind, LayerSelection
from hf_sphere.analysis.null_distribution import (
    Floats,
    holm,
    kolmogorov_smirnov,
    mass_band,
    projection_cdf,
    sign_test,
)
from hf_sphere.analysis.projection_table import projection_table
from hf_sphere.analysis.saved_results import SavedResult
from hf_sphere.analysis.sources import LayerWeight, Source, iterate_layers


@dataclass(frozen=True, repr=False)
class Projections:
    """Projections of some filters, and how they compare with those of isotropic ones.

    What a layer without live filters does not have is None.

    Attributes:
        num_filters: F, dead ones included.
        num_dead: Filters whose weights are all zero, or that have none; they have no direction and are part of nothing
            below.
        mean: Mean of the projections.
        mass: Share of the projections that are <= 0.
        null_mass_low: In at least 95 % of the cases the mass of so many isotropic filters is between this
        null_mass_high: and this.
        ks_statistic: Largest distance between the distribution functions of the normalised projections and of the null.
        ks_p_value: How probable at least that distance is under the null; None where all filters have one dimension.
        ks_p_value_adjusted: The same, corrected for the number of layers (Holm).
        sign_p_value: Two-sided sign test of the projections.
        sign_p_value_adjusted: The same, corrected for the number of layers (Holm).
        projections: Of the live filters, in their order.
    """

    num_filters: int
    num_dead: int
    mean: float | None
    mass: float | None
    null_mass_low: float | None
    null_mass_high: float | None
    ks_statistic: float | None
    ks_p_value: float | None
    ks_p_value_adjusted: float | None
    sign_p_value: float | None
    sign_p_value_adjusted: float | None
    projections: tuple[float, ...]

    def __repr__(self) -> str:
        mass = "None" if self.mass is None else f"{self.mass:.4g}"
        return f"{type(self).__name__}(num_filters={self.num_filters}, num_dead={self.num_dead}, mass={mass}, ...)"


@dataclass(frozen=True, repr=False)
class LayerProjections(Projections):
    """Projections of the filters of a layer.

    Attributes:
        kind: `conv` or `linear`.
        stage: Stage of the network that the layer is in; None in a file whose names do not number stages.
        block: Number of the layer among the analysed ones of its stage.
        dim: N, the inputs of a filter.
        dead: Numbers of the dead filters.
    """

    kind: LayerKind
    stage: int | None
    block: int | None
    dim: int
    dead: tuple[int, ...]


Kind = TypeVar("Kind", bound=Projections)


@dataclass(frozen=True, repr=False)
class ProjectionStatistics(SavedResult):
    """Projections of all layers of a network. `str()` of it is a table.

    In it a star means that one of two tests is below 0.05. Each is corrected over the layers for itself, so that 6 to
    8 % of networks of isotropic filters have one.

    Attributes:
        normalized: Whether projections and means are of filters of unit length, in [-1, 1]. Tests always are.
        layers: By the module's path.
        net: All filters together. Its Kolmogorov-Smirnov test is of the values of each layer's null distribution
            function, which are uniform whatever the layer; its p-values are of one test and need no correction.
    """

    normalized: bool
    layers: Mapping[str, LayerProjections]
    net: Projections

    def __repr__(self) -> str:
        return f"ProjectionStatistics({len(self.layers)} layers, normalized={self.normalized}, net={self.net!r})"

    def __str__(self) -> str:
        return projection_table(self.to_dict())

    def by_stage(self) -> dict[str, Any]:
        """Return the layout of the original program, stage and block numbers as strings.

        Returns:
            `{stage: {block: {"projections", "mean", "mass"}}, "net": {"projections", "mean", "mass"}}`. The original
            starts a stage at each max-pooling; see `hf_sphere.analysis.stages` for where ours differ.

        Raises:
            ValueError: If the stages are not known, as from a file whose names do not number them.
        """
        stages: dict[str, Any] = {}
        for name, layer in self.layers.items():
            if layer.stage is None:
                raise ValueError(
                    f"the stage of {name} is not known: the names of the file do not number stages, and it says "
                    "nothing of poolings. Compute the statistics of the model instead of the file."
                )
            stages.setdefault(str(layer.stage), {})[str(layer.block)] = _original(layer)
        return {**stages, "net": _original(self.net)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, lists and dictionaries, as JSON has them."""
        return {
            "normalized": self.normalized,
            "layers": {name: _plain(layer) for name, layer in self.layers.items()},
            "net": _plain(self.net),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Make it of what `to_dict` returned.

        Raises:
            ValueError: If something is missing.
        """
        try:
            layers = {name: _parsed(LayerProjections, layer) for name, layer in content["layers"].items()}
            return cls(bool(content["normalized"]), layers, _parsed(Projections, content["net"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these are no projection statistics as to_dict returns them: {error!r}.") from error


def projection_statistics(
    model: Source, layers: LayerSelection = "conv", normalize: bool = True, include_1x1: bool = False
) -> ProjectionStatistics:
    """Compute where the filters of each layer face, and test whether that could be chance.

    Filters are computed with in float64 whatever their dtype. Layers are read one after another.

    Args:
        model: A module, a state dict, a snapshot, or the path of safetensors files; see `iterate_layers`.
        layers: Which kinds; `all` are both.
        normalize: Project filters of unit length, sum(w) / (|w| sqrt(N)), else as they are, sum(w). The tests are of
            the former in both cases.
        include_1x1: Also convolutions whose kernel is a single point.

    Returns:
        Projections, their mean and mass and the p-values of both tests, of each layer and of all together.

    Raises:
        ValueError: If a weight is not finite, and as `iterate_layers` does.
    """
    read = [_project(layer) for layer in iterate_layers(model, layers, include_1x1)]
    transforms = [projection_cdf(one.normalized, one.dim) if one.dim > 1 else np.empty(0) for one in read]
    ks = [kolmogorov_smirnov(transform) for transform in transforms]
    signs = [sign_test(one.normalized) for one in read]
    ks_adjusted = holm([p_value for _, p_value in ks])
    signs_adjusted = holm(signs)

    described: dict[str, LayerProjections] = {}
    for at, one in enumerate(read):
        described[one.name] = LayerProjections(
            kind=one.kind,
            stage=one.stage,
            block=one.block,
            dim=one.dim,
            dead=one.dead,
            num_filters=len(one.dead) + len(one.raw),
            num_dead=len(one.dead),
            **_summary(one.normalized if normalize else one.raw),
            ks_statistic=ks[at][0],
            ks_p_value=ks[at][1],
            ks_p_value_adjusted=ks_adjusted[at],
            sign_p_value=signs[at],
            sign_p_value_adjusted=signs_adjusted[at],
        )

    all_normalized = np.concatenate([one.normalized for one in read])
    statistic, p_value = kolmogorov_smirnov(np.concatenate(transforms))
    sign = sign_test(all_normalized)
    net = Projections(
        num_filters=sum(layer.num_filters for layer in described.values()),
        num_dead=sum(layer.num_dead for layer in described.values()),
        **_summary(all_normalized if normalize else np.concatenate([one.raw for one in read])),
        ks_statistic=statistic,
        ks_p_value=p_value,
        ks_p_value_adjusted=p_value,
        sign_p_value=sign,
        sign_p_value_adjusted=sign,
    )
    return ProjectionStatistics(normalize, described, net)


@dataclass(frozen=True, eq=False)
class _Projected:
    """A layer of which only the projections of its live filters are kept."""

    name: str
    kind: LayerKind
    stage: int | None
    block: int | None
    dim: int
    raw: Floats
    normalized: Floats
    dead: tuple[int, ...]


def _project(layer: LayerWeight) -> _Projected:
    raw, normalized, dead = [], [], []
    for rows in layer.chunks():
        sums, norms = rows.sum(dim=1), torch.linalg.vector_norm(rows, dim=1)
        cosines = sums / (norms * math.sqrt(layer.dim))
        extreme = ~((norms > 1e-140) & (norms < 1e140))  # squares may have vanished or overflowed
        if layer.dim and extreme.any():
            peaks = rows[extreme].abs().amax(dim=1)
            scaled = rows[extreme] / peaks.where(peaks > 0, 1.0)[:, None]
            norms[extreme] = peaks
            cosines[extreme] = scaled.sum(dim=1) / (torch.linalg.vector_norm(scaled, dim=1) * math.sqrt(layer.dim))
        live = norms > 0
        raw.append(sums[live])
        normalized.append(cosines[live].clamp(-1, 1))  # rounding can lead beyond
        dead.append(~live)
    return _Projected(
        name=layer.name,
        kind=layer.kind,
        stage=layer.stage,
        block=layer.block,
        dim=layer.dim,
        raw=torch.cat(raw).numpy(),
        normalized=torch.cat(normalized).numpy(),
        dead=tuple(torch.cat(dead).nonzero()[:, 0].tolist()),
    )


def _summary(projections: Floats) -> dict[str, Any]:
    low, high = mass_band(len(projections))
    return {
        "mean": float(projections.mean()) if len(projections) else None,
        "mass": float((projections <= 0).mean()) if len(projections) else None,
        "null_mass_low": low,
        "null_mass_high": high,
        "projections": tuple(projections.tolist()),
    }


def _original(projections: Projections) -> dict[str, Any]:
    return {
        "projections": list(projections.projections),
        "mean": projections.mean,
        "mass": projections.mass,
    }


def _plain(projections: Projections) -> dict[str, Any]:
    values = {field.name: getattr(projections, field.name) for field in fields(projections)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _parsed(kind: type[Kind], content: Mapping[str, Any]) -> Kind:
    values: dict[str, Any] = {field.name: content[field.name] for field in fields(kind)}
    frozen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return kind(**frozen)
