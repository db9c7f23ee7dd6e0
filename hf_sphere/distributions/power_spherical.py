"""The power spherical distribution, and its Kullback-Leibler divergence from the uniform distribution."""

import math

import numpy as np
import torch
from torch import Tensor

from hf_sphere.distributions.directional import DirectionalDistribution, upcast
from hf_sphere.geometry.bessel import log_uniform_density


class PowerSpherical(DirectionalDistribution):
    """The power spherical distribution, with a density proportional to `(1 + mu.x)^kappa` on the unit sphere.

    It resembles the von Mises-Fisher distribution, and its samples need no rejection: (1 + w) / 2 for the cosine
    w = mu.x has a beta distribution. A concentration of 0 gives the uniform distribution. The gradient of a sample
    with respect to the concentration is that of torch's gamma samples, whose relative error is about 1e-4.
    Computations are in at least float32, regardless of the dtype of the parameters.

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
        >>> PowerSpherical(mean, torch.full((5,), 40.0)).rsample((10,)).shape
        torch.Size([10, 5, 128])

    Reference:
        De Cao and Aziz, "The power spherical distribution", INNF+ workshop at ICML 2020.
    """

    @property
    def mean_resultant_length(self) -> Tensor:
        """Norm kappa / (kappa + d - 1) of the mean, (...)."""
        return self.concentration / (self.concentration + (self.dim - 1))

    def _variances(self) -> tuple[Tensor, Tensor]:
        kappa, beta = upcast(self.concentration), (self.dim - 1) / 2
        total = kappa + 2 * beta
        along = 4 * (beta + kappa) * beta / (total.square() * (total + 1))
        across = (1 - (kappa / total).square() - along) / (self.dim - 1)
        return across, along - across

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density with respect to the surface measure of the sphere, in nats: (...)."""
        if self._validate_args:
            self._validate_sample(value)
        loc, value_, kappa = upcast(self.loc), upcast(value), upcast(self.concentration)
        # (1 + w) / 2 is 1 / (1 + t) with the squared tangent t of half the angle, accurate near mu and near -mu.
        tangent = (loc - value_).square().sum(-1) / (loc + value_).square().sum(-1)
        log_density = log_uniform_density(self.dim) + self._log_peak() - torch.special.xlog1py(kappa, tangent)
        return log_density.to(torch.promote_types(self.loc.dtype, value.dtype))

    def _log_peak(self) -> Tensor:
        """Logarithm of the ratio of the density at the mode to the uniform density, (...)."""
        kappa, beta = upcast(self.concentration), (self.dim - 1) / 2
        constant = math.lgamma(beta) - math.lgamma(2 * beta)
        return torch.lgamma(2 * beta + kappa) - torch.lgamma(beta + kappa) + constant

    def _divergence_from_uniform(self) -> Tensor:
        # Its derivative is kappa times the variance of log(1 + w). Small concentrations are integrated by quadrature,
        # because the terms of the closed form cancel.
        kappa, beta = upcast(self.concentration), (self.dim - 1) / 2
        nodes, weights = (
            torch.tensor(part, dtype=kappa.dtype, device=kappa.device) for part in np.polynomial.legendre.leggauss(12)
        )
        small = kappa < beta / 2
        at = torch.where(small, kappa, 0.0)[..., None] * (nodes + 1) / 2
        variances = torch.polygamma(1, beta + at) - torch.polygamma(1, 2 * beta + at)
        integral = kappa / 2 * (weights * at * variances).sum(-1)
        gap = torch.digamma(2 * beta + kappa) - torch.digamma(beta + kappa)  # -E[log((1 + w) / 2)]
        return torch.where(small, integral, self._log_peak() - kappa * gap)

    def _sample_cosine(self, concentration: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        beta = (self.dim - 1) / 2
        near = torch._standard_gamma(concentration + beta, generator=generator)
        far = torch._standard_gamma(torch.full_like(concentration, beta), generator=generator)
        # (1 + w) / 2 = near / (near + far), from which 1 - w^2 follows without cancellation.
        return (near - far) / (near + far), 2 * (near * far).sqrt() / (near + far)
