"""Distributions on the unit sphere, as `torch.distributions` has them: von Mises-Fisher and uniform."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl
from torch.distributions.constraints import Constraint

from hf_sphere.geometry.bessel import (
    log_uniform_density,
    log_vmf_growth,
    log_vmf_normalizer,
    mean_resultant_length,
    mean_resultant_length_complement,
    mean_resultant_length_slope,
)
from hf_sphere.geometry.sampling import sample_points

_SCALAR = torch.Size()


class _UnitVector(Constraint):
    """Vectors of norm one along the last axis, to a tolerance that float16 meets."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(value.to(torch.promote_types(value.dtype, torch.float32)), dim=-1)
        tolerance = max(1e-5, 4 * torch.finfo(value.dtype).eps)
        return (norms - 1).abs() <= tolerance


unit_vector: Constraint = _UnitVector()
"""Support of the distributions of this module."""


class VonMisesFisher(Distribution):
    """The von Mises-Fisher distribution: the normal distribution of the unit sphere.

    Its density is `C_d(kappa) exp(kappa mu.x)`. A concentration of 0 is the uniform distribution. Exact in any
    dimension d >= 2 and at any concentration, whatever the dtype of the parameters: computed in float32 or better.
    Nothing waits for the device, unless arguments are validated.

    Args:
        loc: Mean direction mu, (..., d), of norm one.
        concentration: kappa, (...), from 0 to 1e8; batch shapes broadcast.
        validate_args: Whether to check arguments and values, as everywhere in `torch.distributions`.

    Raises:
        TypeError: If `loc` is not of a floating dtype.
        ValueError: If `loc` has no axis of length 2 or more, the batch shapes do not broadcast, or, where arguments are
            validated, a value lies outside of what it may be.

    Example:
        >>> mean = torch.nn.functional.normalize(torch.randn(5, 128), dim=-1)
        >>> VonMisesFisher(mean, torch.full((5,), 40.0)).rsample((10,)).shape
        torch.Size([10, 5, 128])

    Reference:
        Mardia and Jupp, "Directional statistics", 2000, section 9.3.2.
    """

    arg_constraints = {"loc": unit_vector, "concentration": constraints.nonnegative}
    support = unit_vector
    has_rsample = True

    loc: Tensor
    concentration: Tensor

    def __init__(self, loc: Tensor, concentration: Tensor | float, validate_args: bool | None = None) -> None:
        if loc.ndim < 1 or loc.shape[-1] < 2:
            raise ValueError(
                f"loc must be unit vectors (..., d) with d of at least 2; got the shape {tuple(loc.shape)}."
            )
        if not loc.is_floating_point():
            raise TypeError(f"loc must be of a floating dtype; got {loc.dtype}.")
        if isinstance(concentration, Tensor):
            loc = loc.to(torch.promote_types(loc.dtype, concentration.dtype))
        concentration = torch.as_tensor(concentration, dtype=loc.dtype, device=loc.device)
        try:
            batch_shape = torch.broadcast_shapes(loc.shape[:-1], concentration.shape)
        except RuntimeError:
            raise ValueError(
                f"loc is {tuple(loc.shape)}, so that concentration must broadcast with {tuple(loc.shape[:-1])}; got "
                f"{tuple(concentration.shape)}."
            ) from None
        self.loc = loc.expand(*batch_shape, loc.shape[-1])
        self.concentration = concentration.expand(batch_shape)
        super().__init__(batch_shape, loc.shape[-1:], validate_args)

    def expand(self, batch_shape: Any, _instance: "VonMisesFisher | None" = None) -> "VonMisesFisher":
        """Return the distribution with its batch axes expanded to `batch_shape`."""
        new = self._get_checked_instance(VonMisesFisher, _instance)
        new.loc = self.loc.expand(*batch_shape, self.dim)
        new.concentration = self.concentration.expand(batch_shape)
        super(VonMisesFisher, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def dim(self) -> int:
        """Number of coordinates d."""
        return self.event_shape[0]

    @property
    def mean_resultant_length(self) -> Tensor:
        """Length A_d(kappa) of the mean, (...)."""
        return mean_resultant_length(self.concentration, self.dim)

    @property
    def mean(self) -> Tensor:
        """A_d(kappa) mu, inside of the sphere: (..., d)."""
        return self.mean_resultant_length[..., None] * self.loc

    @property
    def mode(self) -> Tensor:
        """The mean direction, (..., d)."""
        return self.loc

    @property
    def dispersion(self) -> Tensor:
        """1 - A_d(kappa), (...): the mean of 1 - mu.x, also known as circular or spherical variance."""
        return mean_resultant_length_complement(self.concentration, self.dim)

    @property
    def variance(self) -> Tensor:
        """Variance of each coordinate, (..., d); they add up to 1 - A^2."""
        across, extra = self._variances()
        return (across[..., None] + extra[..., None] * self.loc.square()).to(self.loc.dtype)

    @property
    def covariance_matrix(self) -> Tensor:
        """Covariance of the coordinates, (..., d, d)."""
        across, extra = self._variances()
        identity = torch.eye(self.dim, dtype=across.dtype, device=self.loc.device)
        outer = self.loc[..., :, None] * self.loc[..., None, :]
        return (across[..., None, None] * identity + extra[..., None, None] * outer).to(self.loc.dtype)

    def _variances(self) -> tuple[Tensor, Tensor]:
        """Variance of a coordinate across the mean direction, A / kappa, and what the one along it has beyond that."""
        concentration = _precise(self.concentration)
        along = mean_resultant_length_slope(concentration, self.dim)
        # The variances add up to 1 - A^2, so those across follow without a division by kappa.
        rest = mean_resultant_length_complement(concentration, self.dim)
        across = (rest * (2 - rest) - along) / (self.dim - 1)
        return across, along - across

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density with respect to the area of the sphere, in nats: (...)."""
        if self._validate_args:
            self._validate_sample(value)
        concentration = _precise(self.concentration)
        at_mean = concentration + log_vmf_normalizer(concentration, self.dim)
        wide = torch.promote_types(self.loc.dtype, torch.float32)
        gap = (self.loc.to(wide) - value).square().sum(-1) / 2  # 1 - mu.x, without cancellation
        return (at_mean - concentration * gap).to(torch.promote_types(self.loc.dtype, value.dtype))

    def entropy(self) -> Tensor:
        """Differential entropy in nats: (...)."""
        concentration = _precise(self.concentration)
        length = mean_resultant_length(concentration, self.dim)
        return (-log_vmf_normalizer(concentration, self.dim) - concentration * length).to(self.loc.dtype)

    def rsample(self, sample_shape: Any = _SCALAR, generator: torch.Generator | None = None) -> Tensor:
        """Draw points, differentiable by direction and concentration: sample_shape + (..., d).

        Args:
            sample_shape: Leading axes to add.
            generator: Source of randomness; torch's global one if None.
        """
        wide = torch.promote_types(self.loc.dtype, torch.float32)
        concentration = self.concentration.to(wide).expand(torch.Size(sample_shape) + self.batch_shape)
        return sample_points(self.loc.to(wide), concentration, generator).to(self.loc.dtype)


class HypersphericalUniform(Distribution):
    """The uniform distribution on the unit sphere.

    Args:
        dim: Number of coordinates d, at least 2.
        batch_shape: Shape of a batch of such distributions.
        dtype: Dtype of samples; torch's default if None.
        device: Device of samples; torch's default if None.
        validate_args: Whether to check values, as everywhere in `torch.distributions`.

    Raises:
        ValueError: If `dim` is below 2.
    """

    arg_constraints = {}
    support = unit_vector
    has_rsample = True

    def __init__(
        self,
        dim: int,
        batch_shape: Any = _SCALAR,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        validate_args: bool | None = None,
    ) -> None:
        log_uniform_density(dim)  # refuses what is no dimension
        self._like = torch.empty(0, dtype=dtype, device=device)
        if not self._like.is_floating_point():
            raise TypeError(f"points of a sphere are of a floating dtype; got {self._like.dtype}.")
        super().__init__(torch.Size(batch_shape), torch.Size([int(dim)]), validate_args)

    def expand(self, batch_shape: Any, _instance: "HypersphericalUniform | None" = None) -> "HypersphericalUniform":
        """Return the distribution with its batch axes expanded to `batch_shape`."""
        new = self._get_checked_instance(HypersphericalUniform, _instance)
        new._like = self._like
        super(HypersphericalUniform, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def __repr__(self) -> str:
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"HypersphericalUniform({self.dim}{batch})"

    @property
    def dim(self) -> int:
        """Number of coordinates d."""
        return self.event_shape[0]

    @property
    def mean(self) -> Tensor:
        """The centre of the sphere: zeros, (..., d)."""
        return self._like.new_zeros(self._extended_shape())

    @property
    def variance(self) -> Tensor:
        """Variance of each coordinate, 1 / d: (..., d)."""
        return self._like.new_full(self._extended_shape(), 1 / self.dim)

    def log_prob(self, value: Tensor) -> Tensor:
        """Minus the logarithm of the sphere's area, in nats: (...)."""
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        return value.new_full(shape, log_uniform_density(self.dim))

    def entropy(self) -> Tensor:
        """Logarithm of the sphere's area, in nats: (...)."""
        return self._like.new_full(self.batch_shape, -log_uniform_density(self.dim))

    def rsample(self, sample_shape: Any = _SCALAR, generator: torch.Generator | None = None) -> Tensor:
        """Draw points: sample_shape + (..., d); see `VonMisesFisher.rsample`."""
        wide = torch.promote_types(self._like.dtype, torch.float32)
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, generator=generator, dtype=wide, device=self._like.device)
        return torch.nn.functional.normalize(noise, dim=-1).to(self._like.dtype)


def _precise(values: Tensor) -> Tensor:
    """Bring numbers of which there is one a distribution to float64, where the device has it: their terms cancel."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def _check_same_sphere(p: Any, q: Any) -> None:
    if p.dim != q.dim:
        raise ValueError(
            f"the distributions live in {p.dim} and {q.dim} dimensions; a divergence needs the same sphere."
        )


@register_kl(VonMisesFisher, VonMisesFisher)
def _kl_vmf_vmf(p: VonMisesFisher, q: VonMisesFisher) -> Tensor:
    _check_same_sphere(p, q)
    ours, theirs = _precise(p.concentration), _precise(q.concentration)
    gap = (_precise(p.loc) - _precise(q.loc)).square().sum(-1) / 2  # 1 - mu_p.mu_q, without cancellation
    growths = log_vmf_growth(theirs, p.dim) - log_vmf_growth(ours, p.dim)
    divergence = growths + mean_resultant_length(ours, p.dim) * (ours - theirs + theirs * gap)
    return divergence.to(torch.promote_types(p.loc.dtype, q.loc.dtype))


@register_kl(VonMisesFisher, HypersphericalUniform)
def _kl_vmf_uniform(p: VonMisesFisher, q: HypersphericalUniform) -> Tensor:
    _check_same_sphere(p, q)
    concentration = _precise(p.concentration)
    divergence = concentration * mean_resultant_length(concentration, p.dim) - log_vmf_growth(concentration, p.dim)
    return divergence.to(p.loc.dtype).expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))


@register_kl(HypersphericalUniform, VonMisesFisher)
def _kl_uniform_vmf(p: HypersphericalUniform, q: VonMisesFisher) -> Tensor:
    _check_same_sphere(p, q)
    divergence = log_vmf_growth(_precise(q.concentration), p.dim).to(q.loc.dtype)
    return divergence.expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))


@register_kl(HypersphericalUniform, HypersphericalUniform)
def _kl_uniform_uniform(p: HypersphericalUniform, q: HypersphericalUniform) -> Tensor:
    _check_same_sphere(p, q)
    return p._like.new_zeros(torch.broadcast_shapes(p.batch_shape, q.batch_shape))


__all__ = ["HypersphericalUniform", "VonMisesFisher", "unit_vector"]
