"""Random points of the von Mises-Fisher distribution: their height above the equator, and the way round the axis.

A point is `x = w mu + sqrt(1 - w^2) v`: the cosine w to the mean direction has a density of one variable,
`exp(kappa w) (1 - w^2)^((d-3)/2)` up to a constant, and v is uniform on the unit sphere across mu.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.autograd import differentiable_once
from hf_sphere.geometry.bessel import mean_resultant_length_complement
from hf_sphere.geometry.constants import kept

PROPOSALS_IN_A_ROUND = 4
"""Proposals a point on the CPU, where looking whether one was accepted costs nothing; rounds are repeated."""

PROPOSALS_AT_ONCE = 32
"""Proposals a point elsewhere: 0.658 are accepted at least, so that 1e-15 of the points see none they can take."""

LARGEST_KEPT = 2**20
"""Numbers of fixed noise that are kept from one call to the next, 8 MiB of them."""

NODES = {torch.float32: 14, torch.float64: 48}
"""Nodes of the Gauss-Legendre rule of the derivative by the concentration."""


def sample_points(loc: Tensor, concentration: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw a point for each concentration (...), round mean directions (..., d) that broadcast with them: (..., d)."""
    cosine, sine = sample_cosine(concentration, loc.shape[-1], generator)
    shape = (*concentration.shape, loc.shape[-1])
    normals = torch.randn(shape, generator=generator, dtype=loc.dtype, device=loc.device)
    return _Join.apply(loc, cosine, sine, normals)[0]


def tangent_directions(loc: Tensor, normals: Tensor) -> Tensor:
    """Project Gaussian noise (..., d) across unit vectors that broadcast with it, and normalise."""
    across = torch.addcmul(normals, (normals * loc).sum(-1, keepdim=True), loc, value=-1)
    if loc.shape[-1] < 8:
        # In few dimensions noise may lie close to the axis; a second projection takes what rounding left.
        across = torch.addcmul(across, (across * loc).sum(-1, keepdim=True), loc, value=-1)
    return across / torch.linalg.vector_norm(across, dim=-1, keepdim=True).clamp_min_(torch.finfo(loc.dtype).tiny)


def sample_cosine(concentration: Tensor, dim: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draw the cosine w between mean direction and point, one for each concentration.

    Exact in any dimension and at any concentration, by Wood's rejection from a beta distribution in a form without
    cancellation. The derivative by the concentration is that of the distribution function at constant probability
    (implicit reparameterisation), `dw/dkappa = -(dF/dkappa) / f`.

    Args:
        concentration: kappa, not negative, any shape, float32 or float64.
        dim: Number of coordinates d, at least 2.
        generator: Source of randomness; torch's global one if None.

    Returns:
        w and `sqrt(1 - w^2)`, the second of full relative accuracy also where w is close to 1; the shape of
        `concentration`, both once differentiable by it.

    Reference:
        Wood, "Simulation of the von Mises Fisher distribution", Communications in Statistics 1994; Figurnov, Mohamed
        and Mnih, "Implicit reparameterization gradients", NeurIPS 2018.
    """
    flat = concentration.detach().reshape(-1)
    on_cpu = flat.device.type == "cpu" and not torch.compiler.is_compiling()

    def one_round(concentration: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (3, PROPOSALS_IN_A_ROUND if on_cpu else PROPOSALS_AT_ONCE, len(concentration))
        uniforms = torch.rand(shape, generator=generator, dtype=flat.dtype, device=flat.device)
        return _first_accepted(concentration, dim, uniforms)

    gap, rise, taken = one_round(flat)
    while on_cpu and not (taken | gap.isnan()).all():  # a concentration that is NaN has no point
        left = (~taken & ~gap.isnan()).nonzero()[:, 0]
        gap[left], rise[left], taken[left] = one_round(flat[left])
    gap, rise = gap.reshape(concentration.shape), rise.reshape(concentration.shape)
    return _Reparameterized.apply(concentration, gap, (gap * rise).sqrt(), dim)


class Noise(NamedTuple):
    """Random numbers that become points once there are mean directions and concentrations.

    Attributes:
        uniforms: (3, n, ...), for n proposals of the cosine.
        normals: (..., d), for the way round the axis.
    """

    uniforms: Tensor
    normals: Tensor


def draw_noise(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None) -> Noise:
    """Draw noise for points of `shape`, with the number of coordinates, dtype and device of `like` (..., d)."""
    options: dict[str, Any] = {"generator": generator, "dtype": like.dtype, "device": like.device}
    uniforms = torch.rand((3, PROPOSALS_AT_ONCE, *shape), **options)
    return Noise(uniforms, torch.randn((*shape, like.shape[-1]), **options))


def fixed_noise(shape: tuple[int, ...], dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> Noise:
    """Return noise that is the same each time and on every device; in an exported model it is a constant."""
    return Noise(*(torch.as_tensor(part, dtype=dtype, device=device) for part in _fixed_numbers(shape, dim, seed)))


@torch.compiler.assume_constant_result
def _fixed_numbers(shape: tuple[int, ...], dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    size = math.prod(shape) * (3 * PROPOSALS_AT_ONCE + dim)
    return (_fixed_numbers_kept if size <= LARGEST_KEPT else _draw_fixed_numbers)(shape, dim, seed)


def _draw_fixed_numbers(shape: tuple[int, ...], dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.random((3, PROPOSALS_AT_ONCE, *shape)), generator.standard_normal((*shape, dim))


_fixed_numbers_kept = functools.lru_cache(maxsize=64)(_draw_fixed_numbers)


def points_from_noise(loc: Tensor, concentration: Tensor, noise: Noise) -> Tensor:
    """Turn noise into points: the same noise gives every distribution a point of its own law.

    Differentiable by direction and concentration, as `sample_points` is.

    Args:
        loc: Mean directions, (..., d).
        concentration: (...).
        noise: Its leading axes broadcast with those of the others.

    Returns:
        (..., d).
    """
    cosine, sine = cosine_from_noise(concentration, loc.shape[-1], noise)
    return _Join.apply(loc, cosine, sine, noise.normals)[0]


def cosine_from_noise(concentration: Tensor, dim: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """Turn noise into cosines and sines as `sample_cosine` draws them; leading axes broadcast."""
    gap, rise, _ = _first_accepted(concentration.detach(), dim, noise.uniforms)
    return _Reparameterized.apply(concentration.expand(gap.shape), gap, (gap * rise).sqrt(), dim)


def propose(concentration: Tensor, dim: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn uniform numbers (3, ...) into Wood's proposals for concentrations that broadcast with (...).

    A proposal is a coordinate x of a uniform point on the sphere, moved towards the mean by the Moebius map
    `w = (x + c) / (1 + c x)`; `c = 2 kappa / (sqrt(4 kappa^2 + (d-1)^2) + d - 1)` makes most of them acceptable. In
    these terms nothing cancels: the logarithm of the acceptance is `(d - 1) (y / (1 + y) - log(1 + y))`, `y = c x`.

    Returns:
        `1 - w`, `1 + w` and whether the proposal is accepted.
    """
    first, second, third = uniforms
    # Two coordinates of a uniform point in polar form: the squared radius is 1 - rest. In two dimensions it is 1.
    rest = (first.log() * (2 / (dim - 2))).exp() if dim > 2 else torch.zeros_like(first)
    radius = (1 - rest).sqrt()
    half = math.pi * second
    lower = rest / (1 + radius) + 2 * radius * half.sin().square()  # 1 - x
    upper = rest / (1 + radius) + 2 * radius * half.cos().square()  # 1 + x
    finite = concentration.clamp(max=0.25 * torch.finfo(concentration.dtype).max ** 0.5)
    root = (4 * finite.square() + (dim - 1) ** 2).sqrt() + (dim - 1)
    c = 2 * finite / root
    rest_of_c = 2 * (dim - 1) / (2 * finite + root)  # 1 - c
    denominator = rest_of_c + c * upper  # 1 + c x
    y = c * (0.5 * (upper - lower))
    accepted = third.log() <= (dim - 1) * (y / denominator - y.log1p())
    return rest_of_c * lower / denominator, (1 + c) * upper / denominator, accepted


def _first_accepted(concentration: Tensor, dim: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of n proposals (3, n, ...) for concentrations (...), the first that is accepted, and whether there is one."""
    gap, rise, accepted = propose(concentration, dim, uniforms)
    first = accepted.to(torch.uint8).argmax(dim=0, keepdim=True)
    return gap.gather(0, first)[0], rise.gather(0, first)[0], accepted.any(dim=0)


class _Join(torch.autograd.Function):
    """The point `w mu + s v`, where v is what Gaussian noise n has across mu, normalised.

    By hand, as there are many points: autograd would keep six tensors of their size.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(loc: Tensor, cosine: Tensor, sine: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
        tangents = tangent_directions(loc, normals)
        return torch.addcmul(sine[..., None] * tangents, cosine[..., None], loc), tangents

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        loc, cosine, sine, normals, tangents = ctx.saved_tensors
        by_cosine, by_sine = (gradient * loc).sum(-1), (gradient * tangents).sum(-1)
        by_loc = None
        if ctx.needs_input_grad[0]:
            # dx = w dmu - s (v.dmu) mu, as in a rotation that takes v along, and where the noise is not across mu:
            # what its projection adds, - s (n.mu) / (n.v) times the part of dmu that is across both.
            slip = sine * (normals * loc).sum(-1) / (normals * tangents).sum(-1)
            by_loc = gradient * (cosine - slip)[..., None]
            by_loc = torch.addcmul(by_loc, (slip * by_sine - sine * by_cosine)[..., None], tangents)
            by_loc = by_loc.sum_to_size(loc.shape)
        return by_loc, by_cosine, by_sine, None


class _Reparameterized(torch.autograd.Function):
    """The cosine and the sine, with their derivative by the concentration."""

    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: Tensor, gap: Tensor, sine: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        return 1 - gap, sine.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.dim = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, by_cosine: Tensor, by_sine: Tensor) -> tuple[Tensor | None, ...]:
        concentration, gap, sine = ctx.saved_tensors
        rate = _angle_rate(concentration, ctx.dim, gap, sine)
        return (by_cosine * sine - by_sine * (1 - gap)) * rate, None, None, None


def _angle_rate(concentration: Tensor, dim: int, gap: Tensor, sine: Tensor) -> Tensor:
    """Minus the derivative of the angle by the concentration, of a sample that keeps its probability.

    `-dtheta/dkappa = integral of |cos(phi) - A| g(phi) / g(theta)` over the angles phi beyond theta, where
    `g(theta) = exp(kappa cos(theta)) sin(theta)^(d-2)` is the density of the angle up to a constant. Beyond means away
    from the mean: the integrand does not change its sign there, so nothing cancels. Both sides give the same, as the
    integral over all angles vanishes.

    Args:
        concentration: kappa, any shape.
        dim: Number of coordinates d.
        gap: 1 - cos(theta) of the samples.
        sine: sin(theta) of the samples.
    """
    angle = torch.atan2(sine, 1 - gap)
    above = mean_resultant_length_complement(concentration, dim) - gap  # cos(theta) - A
    towards = torch.where(above > 0, -1.0, 1.0).to(angle.dtype)  # to the pole of the mean, or to its antipode
    # The integrand ends after about 7 standard deviations of the angle (float64: 10), where the dtype sees no more.
    curvature = (concentration.square() + (0.5 * (dim - 1)) ** 2).sqrt() + 0.5 * (dim - 1)
    reach = (10.0 if angle.dtype == torch.float64 else 7.0) / curvature.sqrt()
    span = torch.minimum(reach, torch.where(towards < 0, angle, math.pi - angle))
    nodes, weights = (part.reshape(-1, *(1,) * angle.ndim) for part in _gauss_legendre(angle.dtype, angle.device))
    # Differences of cosines and of sines as products, so that those of exponents keep their accuracy.
    half = 0.5 * (towards * span) * nodes
    between = angle + half
    chord = 2.0 * torch.sin(half)
    change = -chord * torch.sin(between)
    exponent = concentration * change
    if dim > 2:
        growth = chord * torch.cos(between) / sine.clamp_min(torch.finfo(sine.dtype).tiny)
        exponent = exponent + (dim - 2) * growth.clamp_min(torch.finfo(sine.dtype).eps - 1).log1p()
    return span * (weights * (above + change).abs() * exponent.exp()).sum(0)


@torch.compiler.assume_constant_result
def _gauss_legendre(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights on the interval from 0 to 1."""
    return _make_gauss_legendre(dtype, device)


@kept
def _make_gauss_legendre(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.legendre.leggauss(NODES[dtype])
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return torch.tensor(0.5 * nodes + 0.5, **options), torch.tensor(0.5 * weights, **options)
