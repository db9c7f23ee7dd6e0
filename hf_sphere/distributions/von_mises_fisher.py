"""The von Mises-Fisher distribution, and its Kullback-Leibler divergences."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

from hf_sphere.distributions.hyperspherical_uniform import HypersphericalUniform, check_same_sphere, unit_vector
from hf_sphere.geometry import bessel
from hf_sphere.geometry.sampling import sample_points


class VonMisesFisher(Distribution):
    """The von Mises-Fisher distribution, the analogue of the isotropic normal distribution on the unit sphere.

    Its density is `C_d(kappa) exp(kappa mu.x)`. A concentration of 0 gives the uniform distribution. Sampling is exact
    for any dimension d >= 2 and any concentration. Computations are in at least float32, regardless of the dtype
    of the parameters. Unless arguments are validated, no operation synchronizes with the device.

    Args:
        loc: Mean direction mu, (..., d), of unit norm.
        concentration: Concentration kappa, (...), at least 0 and finite; batch shapes broadcast.
        validate_args: Whether to validate arguments and values; see `torch.distributions.Distribution`.

    Raises:
        TypeError: If `loc` does not have a floating-point dtype.
        ValueError: If the last axis of `loc` is shorter than 2, if the batch shapes do not broadcast, or, with
            validation, if an argument violates its constraint.

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
            raise ValueError(f"loc must have the shape (..., d) with d of at least 2; got {tuple(loc.shape)}.")
        if not loc.is_floating_point():
            raise TypeError(f"loc must have a floating-point dtype; got {loc.dtype}.")
        if isinstance(concentration, Tensor):
            loc = loc.to(torch.promote_types(loc.dtype, concentration.dtype))
        concentration = torch.as_tensor(concentration, dtype=loc.dtype, device=loc.device)
        try:
            batch_shape = torch.broadcast_shapes(loc.shape[:-1], concentration.shape)
        except RuntimeError:
            shapes = f"{tuple(loc.shape[:-1])} of loc; got the shape {tuple(concentration.shape)}"
            raise ValueError(f"concentration must broadcast with the batch shape {shapes}.") from None
        self.loc = loc.expand(*batch_shape, loc.shape[-1])
        self.concentration = concentration.expand(batch_shape)
        super().__init__(batch_shape, loc.shape[-1:], validate_args)

    def expand(self, batch_shape: Any, _instance: "VonMisesFisher | None" = None) -> "VonMisesFisher":
        """Return a distribution expanded to `batch_shape`."""
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
        """Norm A_d(kappa) of the mean, (...)."""
        return bessel.mean_resultant_length(self.concentration, self.dim)

    @property
    def mean(self) -> Tensor:
        """Mean A_d(kappa) mu, which lies inside the sphere: (..., d)."""
        return self.mean_resultant_length[..., None] * self.loc

    @property
    def mode(self) -> Tensor:
        """The mean direction, (..., d)."""
        return self.loc

    @property
    def dispersion(self) -> Tensor:
        """Spherical variance 1 - A_d(kappa), (...): the mean of 1 - mu.x."""
        return bessel.mean_resultant_length_complement(self.concentration, self.dim)

    @property
    def variance(self) -> Tensor:
        """Variance of each coordinate, (..., d); the variances sum to 1 - A^2."""
        across, extra = self._variances()
        return (across[..., None] + extra[..., None] * self.loc.square()).to(self.loc.dtype)

    @property
    def covariance_matrix(self) -> Tensor:
        """Covariance matrix of the coordinates, (..., d, d)."""
        across, extra = self._variances()
        identity = torch.eye(self.dim, dtype=across.dtype, device=self.loc.device)
        outer = self.loc[..., :, None] * self.loc[..., None, :]
        return (across[..., None, None] * identity + extra[..., None, None] * outer).to(self.loc.dtype)

    def _variances(self) -> tuple[Tensor, Tensor]:
        """Variance A / kappa orthogonal to the mean direction, and the excess of the variance along it."""
        concentration = _upcast_concentration(self.concentration)
        along = bessel.mean_resultant_length_derivative(concentration, self.dim)
        # The variances sum to 1 - A^2, which gives the orthogonal ones without a division by kappa.
        rest = bessel.mean_resultant_length_complement(concentration, self.dim)
        across = (rest * (2 - rest) - along) / (self.dim - 1)
        return across, along - across

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density with respect to the surface measure of the sphere, in nats: (...)."""
        if self._validate_args:
            self._validate_sample(value)
        concentration = _upcast_concentration(self.concentration)
        peak = bessel.log_uniform_density(self.dim) + bessel.log_vmf_peak(concentration, self.dim)
        wide = torch.promote_types(self.loc.dtype, torch.float32)
        gap = (self.loc.to(wide) - value).square().sum(-1) / 2  # 1 - mu.x, without cancellation
        return (peak - concentration * gap).to(torch.promote_types(self.loc.dtype, value.dtype))

    def entropy(self) -> Tensor:
        """Differential entropy in nats: (...)."""
        concentration = _upcast_concentration(self.concentration)
        divergence = _divergence_from_uniform(concentration, self.dim)
        return (-bessel.log_uniform_density(self.dim) - divergence).to(self.loc.dtype)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw reparameterized samples, differentiable with respect to both parameters: sample_shape + (..., d).

        Args:
            sample_shape: Leading axes of the result.
            generator: Random number generator; torch's global one if None.
        """
        wide = torch.promote_types(self.loc.dtype, torch.float32)
        concentration = self.concentration.to(wide).expand(torch.Size(sample_shape) + self.batch_shape)
        return sample_points(self.loc.to(wide), concentration, generator).to(self.loc.dtype)


def _upcast(values: Tensor) -> Tensor:
    """Upcast to float64 where the device supports it, since terms computed from the values cancel."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def _upcast_concentration(concentration: Tensor) -> Tensor:
    """Upcast, after a reduction of concentrations whose products with 1 - mu.x, at most 2, would overflow."""
    wide = torch.promote_types(concentration.dtype, torch.float32)
    return _upcast(concentration.to(wide).clamp(max=0.25 * torch.finfo(wide).max))


def _divergence_from_uniform(concentration: Tensor, dim: int) -> Tensor:
    """Kullback-Leibler divergence from the uniform distribution, without the cancellation of `kappa A - G`."""
    rest = bessel.mean_resultant_length_complement(concentration, dim)
    return bessel.log_vmf_peak(concentration, dim) - concentration * rest


@register_kl(VonMisesFisher, VonMisesFisher)
def _kl_vmf_vmf(p: VonMisesFisher, q: VonMisesFisher) -> Tensor:
    check_same_sphere(p, q)
    ours, theirs = _upcast_concentration(p.concentration), _upcast_concentration(q.concentration)
    gap = (_upcast(p.loc) - _upcast(q.loc)).square().sum(-1) / 2  # 1 - mu_p.mu_q, without cancellation
    peaks = bessel.log_vmf_peak(ours, p.dim) - bessel.log_vmf_peak(theirs, p.dim)
    rest = bessel.mean_resultant_length_complement(ours, p.dim)
    divergence = peaks + rest * (theirs - ours) + (1 - rest) * theirs * gap
    return divergence.to(torch.promote_types(p.loc.dtype, q.loc.dtype))


@register_kl(VonMisesFisher, HypersphericalUniform)
def _kl_vmf_uniform(p: VonMisesFisher, q: HypersphericalUniform) -> Tensor:
    check_same_sphere(p, q)
    divergence = _divergence_from_uniform(_upcast_concentration(p.concentration), p.dim).to(p.loc.dtype)
    return divergence.expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))


@register_kl(HypersphericalUniform, VonMisesFisher)
def _kl_uniform_vmf(p: HypersphericalUniform, q: VonMisesFisher) -> Tensor:
    check_same_sphere(p, q)
    divergence = bessel.log_vmf_partition(_upcast_concentration(q.concentration), p.dim).to(q.loc.dtype)
    return divergence.expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))
