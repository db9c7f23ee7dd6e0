"""The distributions around a mean direction on the unit sphere: von Mises-Fisher and power spherical."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

from hf_sphere.distributions.hyperspherical_uniform import HypersphericalUniform, unit_vector
from hf_sphere.geometry import bessel
from hf_sphere.geometry.bessel import log_uniform_density
from hf_sphere.geometry.checks import check_codes, check_floating, check_points
from hf_sphere.geometry.coordinates import widest_dtype
from hf_sphere.geometry.manifold import mean_direction, project_to_sphere
from hf_sphere.geometry.sampling import points_around, sample_cosine

_QUADRATURE = [array.tolist() for array in np.polynomial.legendre.leggauss(12)]
"""Nodes and weights of Gauss and Legendre's rule; torch.compile cannot call the function."""


class DirectionalDistribution(Distribution):
    """A distribution around a mean direction mu, whose density depends only on the cosine w = mu.x."""

    arg_constraints = {"loc": unit_vector, "concentration": constraints.nonnegative}
    support = unit_vector
    has_rsample = True

    loc: Tensor
    concentration: Tensor

    def __init__(self, loc: Tensor, concentration: Tensor | float, validate_args: bool | None = None) -> None:
        check_floating("loc", loc)
        if loc.ndim < 1 or loc.shape[-1] < 2:
            raise ValueError(f"loc must have the shape (..., d) with d of at least 2; got {tuple(loc.shape)}.")
        if isinstance(concentration, Tensor):
            loc = loc.to(torch.promote_types(loc.dtype, concentration.dtype))
        elif torch.finfo(loc.dtype).max < concentration < math.inf:
            raise ValueError(f"{concentration} is infinite in {loc.dtype}, the dtype of loc. Convert loc to float32.")
        concentration = torch.as_tensor(concentration, dtype=loc.dtype, device=loc.device)
        if loc.ndim > 1 and concentration.shape == (*loc.shape[:-1], 1):  # would broadcast to all pairs
            shapes = f"{tuple(loc.shape[:-1])}, without the last axis of loc; got {tuple(concentration.shape)}"
            raise ValueError(f"concentration must have the batch shape {shapes}. Use concentration.squeeze(-1).")
        batch_shape = torch.broadcast_shapes(loc.shape[:-1], concentration.shape)
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

    _spread: Callable[[], tuple[Tensor, Tensor]]
    """Complement 1 - A of the norm A of the mean, and the variance along the mean direction."""
    _log_density: Callable[[Tensor, Tensor], Tensor]
    """Log-density at values, from them and the concentration."""
    _sample_cosine: Callable[[Tensor, torch.Generator | None], tuple[Tensor, Tensor]]
    """Draw one cosine w per concentration; return w and sqrt(1 - w^2)."""
    _divergence: Callable[[], Tensor]
    """Kullback-Leibler divergence from the uniform distribution, (...)."""

    @property
    def _kappa(self) -> Tensor:
        return upcast(_bounded(self.concentration))

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
        complement, along = self._spread()
        # Those orthogonal to the mean direction follow from the sum, without a division by kappa.
        across = (complement * (2 - complement) - along) / (self.dim - 1)
        return (across[..., None] + (along - across)[..., None] * self.loc.square()).to(self.loc.dtype)

    def entropy(self) -> Tensor:
        """Differential entropy in nats: (...)."""
        return (-log_uniform_density(self.dim) - self._divergence()).to(self.loc.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density with respect to the surface measure of the sphere, in nats: (...)."""
        if self._validate_args:
            self._validate_sample(value)
        return self._log_density(value, self._kappa).to(torch.promote_types(self.loc.dtype, value.dtype))

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
    return values.to(widest_dtype(values))


@register_kl(DirectionalDistribution, HypersphericalUniform)
def _kl_uniform(p: DirectionalDistribution, q: HypersphericalUniform) -> Tensor:
    if p.dim != q.dim:
        raise ValueError(f"a divergence requires equal dimensions; the distributions have {p.dim} and {q.dim}.")
    divergence = p._divergence().to(p.loc.dtype)
    return divergence.expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))


class VonMisesFisher(DirectionalDistribution):
    """The von Mises-Fisher distribution, the analogue of the isotropic normal distribution on the unit sphere.

    Its density is `C_d(kappa) exp(kappa mu.x)`. A concentration of 0 gives the uniform distribution. Sampling is exact
    for any dimension d >= 2 and any concentration. Computations are in at least float32, regardless of the dtype
    of the parameters. Unless arguments are validated, no operation synchronizes with the device.

    Args:
        loc: Mean direction mu, (..., d), of unit norm.
        concentration: Concentration kappa, (...), at least 0; batch shapes broadcast. Those above a quarter of the
            largest number of the dtype, or of float32 for narrower ones, have the values of that one, also infinity.
        validate_args: Whether to validate arguments and values; see `torch.distributions.Distribution`.

    Raises:
        TypeError: If `loc` does not have a floating-point dtype.
        ValueError: If the last axis of `loc` is shorter than 2, if a finite concentration is infinite in the dtype of
            `loc`, or, with validation, if an argument violates its constraint.
        RuntimeError: If the batch shapes do not broadcast.

    Example:
        >>> mean = torch.nn.functional.normalize(torch.randn(5, 128), dim=-1)
        >>> VonMisesFisher(mean, torch.full((5,), 40.0)).rsample((10,)).shape
        torch.Size([10, 5, 128])

        A mixture of the five, by torch:

        >>> shares = torch.distributions.Categorical(torch.ones(5))
        >>> mixture = torch.distributions.MixtureSameFamily(shares, VonMisesFisher(mean, torch.full((5,), 40.0)))
        >>> mixture.log_prob(mixture.sample((10,))).shape
        torch.Size([10])

    Reference:
        Mardia and Jupp, "Directional statistics", 2000, section 9.3.2.
    """

    @classmethod
    def fit(cls, points: Tensor) -> "VonMisesFisher":
        """Return the distribution with the maximum likelihood of given points. Differentiable.

        The concentration of few points in many dimensions is biased upward (100 becomes about 180 with 10 points in 384
        dimensions), which `hf_sphere.cluster.VonMisesFisherMixture(1)` corrects. That of equal points, such as a single
        one, whose likelihood has no maximum, is the largest one that float64 resolves, with a warning. That of points
        whose mean is zero, such as antipodal ones, is 0; the mean direction is then arbitrary.

        Args:
            points: Points, (..., n, d) with n of at least 1; only their directions are used.

        Returns:
            Distribution with the batch shape (...).

        Raises:
            TypeError: If the points are 8-bit integers.
            ValueError: If there are no points, or a point is zero or not finite.
        """
        check_codes("points", points.dtype)
        check_points(upcast(points))
        mean = project_to_sphere(upcast(points)).mean(-2)
        eps = torch.finfo(mean.dtype).eps
        length = torch.linalg.vector_norm(mean, dim=-1).clamp(max=1 - eps)
        if equal := int((length >= 1 - 16 * eps).sum()):
            sets = f"{equal} of {length.numel()} sets"
            warnings.warn(f"the points of {sets} are equal; their concentration is unbounded.", stacklevel=2)
        concentration = bessel.concentration_from_mean_resultant_length(length, points.shape[-1])
        dtype = torch.promote_types(points.dtype, torch.float32)  # half dtypes have too few digits for both
        return cls(mean_direction(mean).to(dtype), concentration.to(dtype))

    @property
    def mean_resultant_length(self) -> Tensor:
        """Norm A_d(kappa) of the mean, (...)."""
        return bessel.mean_resultant_length(self.concentration, self.dim)

    def _spread(self) -> tuple[Tensor, Tensor]:
        functions = bessel.mean_resultant_length_complement, bessel.mean_resultant_length_derivative
        return tuple(function(self._kappa, self.dim) for function in functions)  # type: ignore[return-value]

    def _log_density(self, value: Tensor, kappa: Tensor) -> Tensor:
        peak = bessel.log_uniform_density(self.dim) + bessel.log_vmf_peak(kappa, self.dim)
        wide = torch.promote_types(self.loc.dtype, torch.float32)
        gap = (self.loc.to(wide) - value).square().sum(-1) / 2  # 1 - mu.x, without cancellation
        return peak - kappa * gap

    def _sample_cosine(self, concentration: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        return sample_cosine(concentration, self.dim, generator)

    def _divergence(self) -> Tensor:
        kappa = self._kappa
        peak, complement = bessel.log_vmf_peak_and_complement(kappa, self.dim)
        return peak - kappa * complement  # without the cancellation of `kappa A - G`


def _bounded(concentration: Tensor) -> Tensor:
    """Upcast to at least float32, and reduce concentrations whose products with 1 - mu.x, at most 2, would overflow."""
    wide = torch.promote_types(concentration.dtype, torch.float32)
    return concentration.to(wide).clamp(max=0.25 * torch.finfo(wide).max)


@register_kl(VonMisesFisher, VonMisesFisher)
def _kl_vmf_vmf(p: VonMisesFisher, q: VonMisesFisher) -> Tensor:
    ours, theirs = p._kappa, q._kappa
    gap = (upcast(p.loc) - upcast(q.loc)).square().sum(-1) / 2  # 1 - mu_p.mu_q, without cancellation
    peaks = bessel.log_vmf_peak(ours, p.dim) - bessel.log_vmf_peak(theirs, p.dim)
    complement = bessel.mean_resultant_length_complement(ours, p.dim)
    divergence = peaks + complement * (theirs - ours) + (1 - complement) * theirs * gap
    return divergence.to(torch.promote_types(p.loc.dtype, q.loc.dtype))


class PowerSpherical(DirectionalDistribution):
    """The power spherical distribution, with a density proportional to `(1 + mu.x)^kappa` on the unit sphere.

    It resembles the von Mises-Fisher distribution, and its samples need no rejection: (1 + w) / 2 for the cosine
    w = mu.x has a beta distribution. A concentration of 0 gives the uniform distribution. The gradient of a sample
    with respect to the concentration is the one of torch's gamma samples, with a relative error of about 1e-4.
    Computations are in at least float32, regardless of the dtype of the parameters. For arguments and errors, see
    `VonMisesFisher`.

    Example:
        >>> mean = torch.nn.functional.normalize(torch.randn(5, 128), dim=-1)
        >>> PowerSpherical(mean, torch.full((5,), 40.0)).rsample((10,)).shape
        torch.Size([10, 5, 128])

    Reference:
        De Cao and Aziz, "The power spherical distribution", INNF+ workshop at ICML 2020.
    """

    @property
    def mean_resultant_length(self) -> Tensor:
        """Norm kappa / (kappa + d - 1) of the mean, (...)."""
        concentration = _bounded(self.concentration)
        return (concentration / (concentration + (self.dim - 1))).to(self.loc.dtype)

    def _spread(self) -> tuple[Tensor, Tensor]:
        total = self._kappa + (self.dim - 1)
        complement = (self.dim - 1) / total
        return complement, complement * (2 - complement) / (total + 1)

    def _log_density(self, value: Tensor, kappa: Tensor) -> Tensor:
        loc, value = upcast(self.loc), upcast(value)
        # (1 + w) / 2 is 1 / (1 + t) with the squared tangent t of half the angle, accurate near mu and near -mu.
        tangent = (loc - value).square().sum(-1) / (loc + value).square().sum(-1)
        return log_uniform_density(self.dim) + self._log_peak() - torch.special.xlog1py(kappa, tangent)

    def _log_peak(self) -> Tensor:
        """Logarithm of the ratio of the density at the mode to the uniform density, (...)."""
        kappa, beta = self._kappa, (self.dim - 1) / 2
        return _gamma_ratio(beta + kappa, beta)[0] - _gamma_ratio(torch.full_like(kappa, beta), beta)[0]

    def _divergence(self) -> Tensor:
        # Its derivative is kappa times the variance of log(1 + w). Small concentrations are integrated by quadrature,
        # because the terms of the closed form cancel.
        kappa, beta = self._kappa, (self.dim - 1) / 2
        nodes, weights = (torch.tensor(array, dtype=kappa.dtype, device=kappa.device) for array in _QUADRATURE)
        small = kappa < beta / 2
        end = torch.where(small, kappa, 0.0)[..., None]
        at = end * (nodes + 1) / 2
        variances = torch.special.zeta(2.0, beta + at) - torch.special.zeta(2.0, 2 * beta + at)  # trigamma functions
        integral = (end / 2 * weights * at * variances).sum(-1)
        gap = _gamma_ratio(beta + kappa, beta)[1]
        closed = self._log_peak() - kappa * gap  # the gap is the mean of -log((1 + w) / 2)
        return torch.where(small, integral, closed)

    def _sample_cosine(self, concentration: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        concentration, beta = _bounded(concentration), (self.dim - 1) / 2
        near = torch._standard_gamma(concentration + beta, generator=generator)
        far = torch._standard_gamma(torch.full_like(concentration, beta), generator=generator)
        scale = torch.where(concentration > 1e18, 2.0**-60, 1.0)  # otherwise their product might overflow
        near, far = near * scale, far * scale
        # (1 + w) / 2 = near / (near + far), from which 1 - w^2 follows without cancellation.
        return (near - far) / (near + far), 2 * (near * far).sqrt() / (near + far)


def _gamma_ratio(x: Tensor, a: float) -> tuple[Tensor, Tensor]:
    """Return log(Gamma(x + a) / Gamma(x)) and its derivative with respect to x, for a <= x.

    Differences of Stirling's series, NIST Digital Library of Mathematical Functions, 5.11.1 and 5.11.2, since the
    functions themselves would cancel for large x.
    """
    z = x.clamp_min(16.0)
    growth, terms = torch.log1p(a / z), [(1 / y, (1 / y).square()) for y in (z, z + a)]
    near, far = (u * (1 / 12 - v * (1 / 360 - v * (1 / 1260 - v / 1680))) for u, v in terms)
    value = (z - 0.5) * growth + a * (z + a).log() - a + far - near
    near, far = (u / 2 + v * (1 / 12 - v * (1 / 120 - v * (1 / 252 - v / 240))) for u, v in terms)
    value = torch.where(x < 16, torch.lgamma(x + a) - torch.lgamma(x), value)
    return value, torch.where(x < 16, torch.digamma(x + a) - torch.digamma(x), growth + near - far)
