"""Projections of the filters of a network on (1, ..., 1), layer by layer, with tests for a bias.

After Gamba, Carlsson, Azizpour, Bjorkman, "Hyperplane Arrangements of Trained ConvNets Are Biased", 2020:
trained networks are biased to negative projections, random networks are not.

For an isotropic filter w in N dimensions, the normalized projection p = sum(w) / (|w| sqrt(N)) is the cosine of the
angle between w and a fixed vector: (p + 1) / 2 is exactly Beta((N-1)/2, (N-1)/2) distributed.

Initialization with i.i.d. normal weights is isotropic, and so is each single filter of an orthogonal initialization.
The default of torch is i.i.d. uniform weights, whose projections have nearly the same distribution: the distribution
functions differ by at most about 0.06 / N (measured; the Edgeworth expansion gives 0.055 / N). The Kolmogorov-Smirnov
test at level 0.05 detects it with a power of 80 % for about 350 N^2 filters and more, which hardly any layer has. The
sign test is exact for all weights that are symmetric about zero.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pandas import DataFrame
from scipy.special import bdtr, betainc
from scipy.stats import binom, kstest

from hf_sphere.comparison.significance import LEVEL, holm
from hf_sphere.hyperplanes.layers import LayerKind, LayerSelection, Source, iterate_layers
from hf_sphere.utils.files import write_json

Floats = NDArray[np.float64]

LAYER_WIDTH = 28

CENTERED = 1e-12  # cosines up to this size are rounding errors of 0, as of filters that weight standardization centers


@dataclass(frozen=True, kw_only=True)
class Projections:
    """Projections of filters, compared with isotropic filters.

    Statistics that need a live filter are None if there is none.

    Attributes:
        num_filters: F, including dead ones.
        num_dead: Number of filters whose weights are all zero, or that have none; they have no direction and are
            excluded from all statistics.
        mean: Mean of the projections.
        mass: Fraction of the projections that are <= 0.
        null_mass_low: Lower end of a range that contains the mass of the same number of isotropic filters with a
            probability of at least 95 %.
        null_mass_high: Upper end of this range.
        ks_statistic: Largest distance between the distribution functions of the normalized projections and of the null.
        ks_p_value: Probability of at least that distance under the null; None if all filters have one dimension.
        ks_p_value_adjusted: `ks_p_value` corrected for the number of layers (Holm).
        sign_p_value: p-value of the two-sided sign test of the projections.
        sign_p_value_adjusted: `sign_p_value` corrected for the number of layers (Holm).
        projections: Projections of the live filters, in order.
    """

    num_filters: int
    num_dead: int
    mean: float | None = None
    mass: float | None = None
    null_mass_low: float | None = None
    null_mass_high: float | None = None
    ks_statistic: float | None = None
    ks_p_value: float | None = None
    ks_p_value_adjusted: float | None = None
    sign_p_value: float | None = None
    sign_p_value_adjusted: float | None = None
    projections: list[float] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class LayerProjections(Projections):
    """Projections of the filters of a layer.

    Attributes:
        kind: `conv` or `linear`.
        dim: N, the number of inputs of a filter.
        dead: Indices of the dead filters.
    """

    kind: LayerKind
    dim: int
    dead: list[int] = field(repr=False)


@dataclass(frozen=True)
class ProjectionStatistics:
    """Projections of all layers of a network; prints as a table.

    The column `isotropic` is the range of masses that isotropic filters have with a probability of at least 95 %. A
    star means that one of two tests is below 0.05. Each is corrected for the number of layers, but not for the other
    test, so more than 5 % of networks of isotropic filters can have a star.

    Attributes:
        normalized: Whether filters have unit length for projections and means, in [-1, 1]. The tests always use
            unit length.
        layers: Projections by module path.
        net: All filters together. Its Kolmogorov-Smirnov test pools the values of the null distribution function of
            each layer at its projections, which are uniform for every layer; its p-values need no correction.
    """

    normalized: bool
    layers: Mapping[str, LayerProjections] = field(repr=False)
    net: Projections

    def __str__(self) -> str:
        names = (name if len(name) <= LAYER_WIDTH else f"..{name[2 - LAYER_WIDTH :]}" for name in self.layers)
        rows = DataFrame(map(_cells, [*self.layers.values(), self.net]), index=[*names, "all layers"])
        formats = dict.fromkeys(("mean", "mass", "p KS", "p sign"), "{:.3g}".format)
        table = rows.astype(dict.fromkeys(formats, float)).to_string(na_rep="-", formatters=formats)
        return f"{table}\n\n{_verdict(self.net)}"

    def summary(self) -> dict[str, Any]:
        """Return the statistics of the network and the number of biased layers, for a table of results."""
        biased = {name for name, one in self.layers.items() if is_significant(one.sign_p_value_adjusted)}
        other = {name for name, one in self.layers.items() if is_significant(one.ks_p_value_adjusted)}
        names = ("num_filters", "num_dead", "mean", "mass", "null_mass_low", "null_mass_high", "ks_p_value")
        return {
            "num_layers": len(self.layers),
            "num_layers_biased": len(biased),
            "num_layers_unlike_isotropic": len(biased | other),
            **{name: getattr(self.net, name) for name in (*names, "sign_p_value")},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return asdict(self)

    def save(self, path: str | PathLike) -> None:
        """Write a JSON file."""
        write_json(path, self.to_dict())


def projection_statistics(
    model: Source, layers: LayerSelection = "conv", normalize: bool = True, include_1x1: bool = False
) -> ProjectionStatistics:
    """Compute the projections of the filters of each layer on (1, ..., 1), and test whether they are biased.

    All computations are in float64. Layers are read one after another.

    Args:
        model: A module, a state dict, a snapshot, or the path of safetensors files; see `iterate_layers`.
        layers: Kinds of layers; `all` means both.
        normalize: Project filters of unit length, sum(w) / (|w| sqrt(N)), otherwise the unnormalized filters, sum(w).
            The tests use the former in both cases.
        include_1x1: Include pointwise (1x1) convolutions.

    Returns:
        Projections, their mean and mass, and the p-values of both tests, for each layer and for all layers together.

    Raises:
        ValueError: If a weight is not finite, or `iterate_layers` raises it.

    Example:
        >>> projection_statistics(network).net.num_filters
        8
    """
    described, arrays = dict[str, dict[str, Any]](), []
    for layer in iterate_layers(model, layers, include_1x1):
        parts = [(rows.sum(dim=1), torch.linalg.vector_norm(rows, dim=1)) for rows in layer.chunks()]
        sums, norms = map(torch.cat, zip(*parts, strict=True))
        cosines = sums / (norms * math.sqrt(layer.dim))
        sums[cosines.abs() <= CENTERED] = cosines[cosines.abs() <= CENTERED] = 0.0
        live = norms > 0
        dead = (~live).nonzero()[:, 0].tolist()
        cosines = cosines[live].clamp(-1, 1)  # rounding may exceed the range
        transform = projection_cdf(cosines.numpy(), layer.dim) if layer.dim > 1 else np.empty(0)
        arrays.append(((cosines if normalize else sums[live]).numpy(), transform))
        about = {"kind": layer.kind, "dim": layer.dim, "dead": dead}
        described[layer.name] = _statistics(*arrays[-1], len(dead)) | about
    for test in ("ks_p_value", "sign_p_value"):
        p_values = holm([statistics.get(test) for statistics in described.values()])
        for statistics, p_value in zip(described.values(), p_values, strict=True):
            statistics[f"{test}_adjusted"] = p_value
    num_dead = sum(statistics["num_dead"] for statistics in described.values())
    projections, transforms = map(np.concatenate, zip(*arrays, strict=True))
    net = Projections(**_statistics(projections, transforms, num_dead))
    return ProjectionStatistics(normalize, {name: LayerProjections(**each) for name, each in described.items()}, net)


def _statistics(projections: Floats, transform: Floats, num_dead: int) -> dict[str, Any]:
    """Return the fields of `Projections`; `transform` is the null distribution function at the projections."""
    count, p_value = len(projections), sign_test(projections)
    values: dict[str, Any] = {"num_filters": count + num_dead, "num_dead": num_dead}
    values |= {"projections": projections.tolist(), "sign_p_value": p_value, "sign_p_value_adjusted": p_value}
    if count:
        values |= {"mean": float(projections.mean()), "mass": float((projections <= 0).mean())}
        values["null_mass_low"], values["null_mass_high"] = mass_band(count)
    if len(transform):
        statistic, p_value = map(float, kstest(transform, "uniform", method="exact"))
        values |= {"ks_statistic": statistic, "ks_p_value": p_value, "ks_p_value_adjusted": p_value}
    return values


def projection_cdf(projections: Floats, dim: int) -> Floats:
    """Compute the distribution function of normalized projections (...) of isotropic filters, `dim` >= 2."""
    shape = (dim - 1) / 2
    return betainc(shape, shape, (np.clip(projections, -1, 1) + 1) / 2)


def sign_test(projections: Floats) -> float | None:
    """Return the two-sided, exact p-value of equally probable signs, without zeros; None if all are zero."""
    negative, positive = int((projections < 0).sum()), int((projections > 0).sum())
    if negative + positive == 0:
        return None
    return min(2 * float(bdtr(min(negative, positive), negative + positive, 0.5)), 1.0)  # both tails are equal


def is_significant(p_value: float | None) -> bool:
    """Return whether a p-value, corrected if it is one of several, is below `LEVEL`."""
    return p_value is not None and p_value < LEVEL


def mass_band(count: int) -> tuple[float, float]:
    """Return a range of the fraction of projections <= 0 of isotropic filters, with a probability of at least 95 %."""
    low, high = binom.interval(0.95, count, 0.5)
    return float(low) / count, float(high) / count


def _cells(row: Projections) -> dict[str, Any]:
    counts = {"filters": row.num_filters, "dead": row.num_dead, "N": getattr(row, "dim", "")}
    band = "-" if row.mass is None else f"{row.null_mass_low:.3f}-{row.null_mass_high:.3f}"
    p_values = {"p KS": row.ks_p_value_adjusted, "p sign": row.sign_p_value_adjusted}
    star = "*" if any(map(is_significant, p_values.values())) else "-"
    return {**counts, "mean": row.mean, "mass": row.mass, "isotropic": band, **p_values, "*": star}


def _verdict(net: Projections) -> str:
    """Return a sentence about the bias of the arrangement and its direction."""
    if net.mass is None:
        return "There are no live filters, so no test is possible."
    shares = f"{net.mass:.1%} are <= 0 (isotropic: {net.null_mass_low:.1%} to {net.null_mass_high:.1%})."
    if is_significant(net.sign_p_value):
        signs = np.sign(net.projections)  # not the mass, which counts zeros
        zeros = int((signs == 0).sum())
        note = f"\n{zeros} of the {len(signs)} projections are 0, which counts for neither side." if zeros else ""
        side = "positive" if signs.sum() > 0 else "negative"
        return f"The arrangement is biased to {side} projections: {shares}{note}"
    if is_significant(net.ks_p_value):
        return f"The arrangement is not isotropic (KS test), without a significant majority of one sign:\n{shares}"
    return f"No significant bias of the projections: {shares}"
