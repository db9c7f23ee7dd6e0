"""The uniform distribution on the unit sphere, and the support constraint of all distributions on it."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, transform_to
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform

from hf_sphere.geometry.bessel import log_uniform_density
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.geometry.sampling import generator_argument


class _UnitVector(Constraint):
    """Vectors of unit norm along the last axis, up to the rounding error of the dtype."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        rounded = value if value.is_floating_point() else wide  # integers are axes
        tolerance = max(1e-5, 4 * torch.finfo(rounded.dtype).eps)
        return (torch.linalg.vector_norm(wide, dim=-1) - 1).abs() <= tolerance


unit_vector: Constraint = _UnitVector()
"""Support of the distributions on the sphere."""


class _Normalize(Transform):
    """Map vectors to their directions; the inverse returns unit vectors unchanged. A zero vector stays zero."""

    domain = constraints.real_vector
    codomain = unit_vector

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Normalize)

    def _call(self, x: Tensor) -> Tensor:
        return project_to_sphere(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return y


transform_to.register(unit_vector, lambda _: _Normalize())


class HypersphericalUniform(Distribution):
    """The uniform distribution on the unit sphere.

    Args:
        dim: Number of coordinates d, at least 2.
        batch_shape: Batch shape.
        dtype: Dtype of samples; torch's default if None.
        device: Device of samples; torch's default if None.
        validate_args: Whether to validate values; see `torch.distributions.Distribution`.

    Raises:
        TypeError: If `dtype` is not a floating-point dtype.
        ValueError: If `dim` is below 2.
    """

    arg_constraints = {}
    support = unit_vector
    has_rsample = True

    def __init__(
        self,
        dim: int,
        batch_shape: Any = (),
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        validate_args: bool | None = None,
    ) -> None:
        log_uniform_density(dim)  # raises on an invalid dimension
        self._like = torch.empty(0, dtype=dtype, device=device)
        if not self._like.is_floating_point():
            raise TypeError(f"dtype must be a floating-point dtype; got {self._like.dtype}.")
        super().__init__(torch.Size(batch_shape), torch.Size([int(dim)]), validate_args)

    def expand(self, batch_shape: Any, _instance: "HypersphericalUniform | None" = None) -> "HypersphericalUniform":
        """Return a distribution expanded to `batch_shape`."""
        new = self._get_checked_instance(HypersphericalUniform, _instance)
        new._like = self._like
        super(HypersphericalUniform, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def dim(self) -> int:
        """Number of coordinates d."""
        return self.event_shape[0]

    @property
    def mean(self) -> Tensor:
        """Mean, the center of the sphere: zeros, (..., d)."""
        return self._like.new_zeros(self._extended_shape())

    @property
    def variance(self) -> Tensor:
        """Variance of each coordinate, 1 / d: (..., d)."""
        return self._like.new_full(self._extended_shape(), 1 / self.dim)

    def log_prob(self, value: Tensor) -> Tensor:
        """Negative logarithm of the surface area of the sphere, in nats: (...)."""
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        dtype = torch.promote_types(self._like.dtype, value.dtype)
        return value.new_full(shape, log_uniform_density(self.dim), dtype=dtype)

    def entropy(self) -> Tensor:
        """Logarithm of the surface area of the sphere, in nats: (...)."""
        return self._like.new_full(self.batch_shape, -log_uniform_density(self.dim))

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw samples, sample_shape + (..., d); see `VonMisesFisher.rsample`."""
        wide = torch.promote_types(self._like.dtype, torch.float32)
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=wide, device=self._like.device, **generator_argument(generator))
        return torch.nn.functional.normalize(noise, dim=-1).to(self._like.dtype)
