"""The common part of the distributions around a mean direction on the unit sphere."""

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

from hf_sphere.distributions.hyperspherical_uniform import HypersphericalUniform, check_same_sphere, unit_vector
from hf_sphere.geometry.bessel import log_uniform_density
from hf_sphere.geometry.sampling import points_around


class DirectionalDistribution(Distribution):
    """A distribution around a mean direction mu, whose density depends only on the cosine w = mu.x."""

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

    def expand(self, batch_shape: Any, _instance: Self | None = None) -> Self:
        """Return a distribution expanded to `batch_shape`."""
        new = self._get_checked_instance(type(self), _instance)
        new.loc = self.loc.expand(*batch_shape, self.dim)
        new.concentration = self.concentration.expand(batch_shape)
        super(DirectionalDistribution, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def dim(self) -> int:
        """Number of coordinates d."""
        return self.event_shape[0]

    @property
    @abstractmethod
    def mean_resultant_length(self) -> Tensor:
        """Norm of the mean, (...)."""

    @abstractmethod
    def _variances(self) -> tuple[Tensor, Tensor]:
        """Variance orthogonal to the mean direction, and the excess of the variance along it."""

    @abstractmethod
    def _sample_cosine(self, concentration: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Draw one cosine w per concentration; return w and sqrt(1 - w^2)."""

    @abstractmethod
    def _divergence_from_uniform(self) -> Tensor:
        """Kullback-Leibler divergence from the uniform distribution, (...)."""

    @property
    def mean(self) -> Tensor:
        """Mean, which lies inside the sphere: (..., d)."""
        return self.mean_resultant_length[..., None] * self.loc

    @property
    def mode(self) -> Tensor:
        """The mean direction, (..., d)."""
        return self.loc

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

    def entropy(self) -> Tensor:
        """Differential entropy in nats: (...)."""
        return (-log_uniform_density(self.dim) - self._divergence_from_uniform()).to(self.loc.dtype)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw reparameterized samples, differentiable with respect to both parameters: sample_shape + (..., d).

        Args:
            sample_shape: Leading axes of the result.
            generator: Random number generator; torch's global one if None.
        """
        wide = torch.promote_types(self.loc.dtype, torch.float32)
        concentration = self.concentration.to(wide).expand(torch.Size(sample_shape) + self.batch_shape)
        cosine, sine = self._sample_cosine(concentration, generator)
        return points_around(self.loc.to(wide), cosine, sine, generator).to(self.loc.dtype)


def upcast(values: Tensor) -> Tensor:
    """Upcast to float64 where the device supports it, since terms computed from the values cancel."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


@register_kl(DirectionalDistribution, HypersphericalUniform)
def _kl_directional_uniform(p: DirectionalDistribution, q: HypersphericalUniform) -> Tensor:
    check_same_sphere(p, q)
    return p._divergence_from_uniform().to(p.loc.dtype).expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))
