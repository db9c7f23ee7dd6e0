"""The von Mises-Fisher distribution, and its Kullback-Leibler divergences."""

import torch
from torch import Tensor
from torch.distributions import register_kl

from hf_sphere.distributions.directional import DirectionalDistribution, upcast
from hf_sphere.distributions.hyperspherical_uniform import HypersphericalUniform, check_same_sphere
from hf_sphere.geometry import bessel
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.geometry.sampling import sample_cosine


class VonMisesFisher(DirectionalDistribution):
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

        A mixture of the five, by torch:

        >>> shares = torch.distributions.Categorical(torch.ones(5))
        >>> mixture = torch.distributions.MixtureSameFamily(shares, VonMisesFisher(mean, torch.full((5,), 40.0)))
        >>> mixture.log_prob(mixture.sample((10,))).shape
        torch.Size([10])

    Reference:
        Mardia and Jupp, "Directional statistics", 2000, section 9.3.2.
    """

    @classmethod
    def fit(cls, points: Tensor, weights: Tensor | None = None) -> "VonMisesFisher":
        """Return the distribution with the maximum likelihood of given points. Differentiable.

        The concentration of few points in many dimensions is biased upward, as all maximum-likelihood scales are. That
        of identical points, whose likelihood has no maximum, is the largest one that float64 resolves.

        Args:
            points: Points, (..., n, d) with n of at least 1; only their directions are used.
            weights: Nonnegative weights with a positive sum, (..., n); equal if None.

        Returns:
            Distribution with the batch shape (...).

        Raises:
            ValueError: If there are no points, a point is zero or not finite, or the weights are invalid.
        """
        if points.ndim < 2 or points.shape[-2] == 0 or points.shape[-1] < 2:
            raise ValueError(f"points must have the shape (..., n, d), n >= 1, d >= 2; got {tuple(points.shape)}.")
        weights = points.new_ones(points.shape[-2]) if weights is None else weights
        if not (weights.isfinite() & (weights >= 0)).all() or (weights.sum(-1) <= 0).any():
            raise ValueError("weights must be finite and nonnegative, with a positive sum.")
        if not points.isfinite().all() or (points == 0).all(-1).any():
            raise ValueError("points must be finite and not zero: a zero vector has no direction. Remove such points.")
        shares = upcast(weights) / upcast(weights).sum(-1, keepdim=True)
        mean = (shares[..., None] * project_to_sphere(upcast(points))).sum(-2)
        length = torch.linalg.vector_norm(mean, dim=-1).clamp(max=1 - torch.finfo(mean.dtype).eps)
        concentration = bessel.concentration_from_mean_resultant_length(length, points.shape[-1])
        dtype = torch.promote_types(points.dtype, torch.float32)  # half dtypes have too few digits for both
        return cls(project_to_sphere(mean).to(dtype), concentration.to(dtype))

    @property
    def mean_resultant_length(self) -> Tensor:
        """Norm A_d(kappa) of the mean, (...)."""
        return bessel.mean_resultant_length(self.concentration, self.dim)

    @property
    def dispersion(self) -> Tensor:
        """Spherical variance 1 - A_d(kappa), (...): the mean of 1 - mu.x."""
        return bessel.mean_resultant_length_complement(self.concentration, self.dim)

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

    def _sample_cosine(self, concentration: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        return sample_cosine(concentration, self.dim, generator)

    def _divergence_from_uniform(self) -> Tensor:
        # Without the cancellation of `kappa A - G`.
        concentration = _upcast_concentration(self.concentration)
        rest = bessel.mean_resultant_length_complement(concentration, self.dim)
        return bessel.log_vmf_peak(concentration, self.dim) - concentration * rest


def _upcast_concentration(concentration: Tensor) -> Tensor:
    """Upcast, after a reduction of concentrations whose products with 1 - mu.x, at most 2, would overflow."""
    wide = torch.promote_types(concentration.dtype, torch.float32)
    return upcast(concentration.to(wide).clamp(max=0.25 * torch.finfo(wide).max))


@register_kl(VonMisesFisher, VonMisesFisher)
def _kl_vmf_vmf(p: VonMisesFisher, q: VonMisesFisher) -> Tensor:
    check_same_sphere(p, q)
    ours, theirs = _upcast_concentration(p.concentration), _upcast_concentration(q.concentration)
    gap = (upcast(p.loc) - upcast(q.loc)).square().sum(-1) / 2  # 1 - mu_p.mu_q, without cancellation
    peaks = bessel.log_vmf_peak(ours, p.dim) - bessel.log_vmf_peak(theirs, p.dim)
    rest = bessel.mean_resultant_length_complement(ours, p.dim)
    divergence = peaks + rest * (theirs - ours) + (1 - rest) * theirs * gap
    return divergence.to(torch.promote_types(p.loc.dtype, q.loc.dtype))


@register_kl(HypersphericalUniform, VonMisesFisher)
def _kl_uniform_vmf(p: HypersphericalUniform, q: VonMisesFisher) -> Tensor:
    check_same_sphere(p, q)
    divergence = bessel.log_vmf_partition(_upcast_concentration(q.concentration), p.dim).to(q.loc.dtype)
    return divergence.expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))
