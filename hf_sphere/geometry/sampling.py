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

PROPOSALS_IN_A_ROUND = 6
"""Proposals a point on the CPU, where looking whether one was accepted costs nothing; rounds are repeated."""

PROPOSALS_AT_ONCE = 32
"""Proposals a point elsewhere: 0.658 are accepted at least, so that 1e-15 of the points see none they can take."""

NODES = {torch.float32: 16, torch.float64: 48}
"""Nodes of the Gauss-Legendre rule of the derivative by the concentration."""


def sample_points(loc: Tensor, concentration: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw a point for each mean direction (..., d) and concentration (...), float32 or float64: (..., d)."""
    cosine, sine = sample_cosine(concentration, loc.shape[-1], generator)
    normals = torch.randn(loc.shape, generator=generator, dtype=loc.dtype, device=loc.device)
    return _Join.apply(loc, cosine, sine, normals)[0]


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
    flat = concentration.detach().reshape(-1, 1)
    on_cpu = flat.device.type == "cpu" and not torch.compiler.is_compiling()

    def one_round(concentration: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (len(concentration), PROPOSALS_IN_A_ROUND if on_cpu else PROPOSALS_AT_ONCE, 3)
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
        uniforms: (..., n, 3), for n proposals of the cosine.
        normals: (..., d), for the way round the axis.
    """

    uniforms: Tensor
    normals: Tensor


def draw_noise(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None) -> Noise:
    """Draw noise for points of `shape`, with the number of coordinates, dtype and device of `like` (..., d)."""
    options: dict[str, Any] = {"generator": generator, "dtype": like.dtype, "device": like.device}
    uniforms = torch.rand((*shape, PROPOSALS_AT_ONCE, 3), **options)
    return Noise(uniforms, torch.randn((*shape, like.shape[-1]), **options))


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
    gap, rise, _ = _first_accepted(concentration.detach()[..., None], loc.shape[-1], noise.uniforms)
    cosine, sine = _Reparameterized.apply(concentration.expand(gap.shape), gap, (gap * rise).sqrt(), loc.shape[-1])
    return _Join.apply(loc, cosine, sine, noise.normals)[0]


def propose(concentration: Tensor, dim: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn uniform numbers (..., 3) into Wood's proposals for concentrations that broadcast with (...).

    A proposal is a coordinate x of a uniform point on the sphere, moved towards the mean by the Moebius map
    `w = (x + c) / (1 + c x)`; `c = 2 kappa / (sqrt(4 kappa^2 + (d-1)^2) + d - 1)` makes most of them acceptable. In
    these terms nothing cancels: the logarithm of the acceptance is `(d - 1) (y / (1 + y) - log(1 + y))`, `y = c x`.

    Returns:
        `1 - w`, `1 + w` and whether the proposal is accepted.
    """
    first, second, third = uniforms.unbind(-1)
    # Two coordinates of a uniform point in polar form: the squared radius is 1 - rest. In two dimensions it is 1.
    rest = (first.log() * (2 / (dim - 2))).exp() if dim > 2 else torch.zeros_like(first)
    radius = (1 - rest).sqrt()
    half = math.pi * second
    lower = rest / (1 + radius) + 2 * radius * half.sin().square()  # 1 - x
    upper = rest / (1 + radius) + 2 * radius * half.cos().square()  # 1 + x
    finite = concentration.clamp(max=0.25 * torch.finfo(concentration.dtype).max ** 0.5)
    root = (4 * finite.square() + (dim - 1) ** 2).sqrt() + (dim - 1)
    c = 2 * finite / root
    y = c * (0.5 * (upper - lower))
    gap = 2 * (dim - 1) / (2 * finite + root) * lower / (1 + y)
    return gap, (1 + c) * upper / (1 + y), third.log() <= (dim - 1) * (y / (1 + y) - y.log1p())


def _first_accepted(concentration: Tensor, dim: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of proposals (..., n, 3) for concentrations (..., 1), the first that is accepted, and whether there is one."""
    gap, rise, accepted = propose(concentration, dim, uniforms)
    first = accepted.to(torch.uint8).argmax(dim=-1, keepdim=True)
    return gap.gather(-1, first)[..., 0], rise.gather(-1, first)[..., 0], accepted.any(dim=-1)


class _Join(torch.autograd.Function):
    """The point with cosine w and sine s: `w mu + s v`, v the normalised part of Gaussian noise n across mu.

    By hand, as there are many points: autograd would keep six tensors of their size.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(loc: Tensor, cosine: Tensor, sine: Tensor, normals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        along = (normals * loc).sum(-1)
        across = torch.addcmul(normals, along[..., None], loc, value=-1)
        if loc.shape[-1] < 8:
            # In few dimensions noise may lie close to the axis; a second projection takes what rounding left.
            across = torch.addcmul(across, (across * loc).sum(-1, keepdim=True), loc, value=-1)
        stretch = sine / torch.linalg.vector_norm(across, dim=-1).clamp_min_(torch.finfo(loc.dtype).tiny)
        return torch.addcmul(across.mul_(stretch[..., None]), cosine[..., None], loc), along, stretch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        loc, cosine, sine, normals = inputs
        _, along, stretch = output
        ctx.mark_non_differentiable(along, stretch)
        ctx.save_for_backward(loc, cosine, sine, normals, along, stretch)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        loc, cosine, sine, normals, along, stretch = ctx.saved_tensors
        by_cosine = (gradient * loc).sum(-1)
        inverse = stretch / sine.clamp_min(torch.finfo(sine.dtype).tiny)  # 1 / |n - (n.mu) mu|
        by_sine = ((gradient * normals).sum(-1) - along * by_cosine) * inverse
        by_loc = None
        if ctx.needs_input_grad[0]:
            # Of the part across, v: it turns with mu, and only what is across v turns it.
            turned = stretch * along
            by_noise = turned * by_sine * inverse - stretch * by_cosine
            by_loc = gradient * (cosine - turned)[..., None]
            by_loc = torch.addcmul(by_loc, by_noise[..., None], normals).sum_to_size(loc.shape)
            by_loc = by_loc - (turned * by_sine * inverse * along)[..., None].sum_to_size((*loc.shape[:-1], 1)) * loc
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
    # The integrand ends where the density has fallen by 1e-13 (float64: 1e-22): that many standard deviations of the
    # angle, of which the larger of two estimates is taken, of the middle and of the place.
    curvature = (concentration.square() + (0.5 * (dim - 1)) ** 2).sqrt() + 0.5 * (dim - 1)
    reach = (10.0 if angle.dtype == torch.float64 else 7.0) / curvature.sqrt()
    span = torch.minimum(reach, torch.where(towards < 0, angle, math.pi - angle))
    nodes, weights = _gauss_legendre(angle.dtype, angle.device)
    # Differences of cosines and of sines as products, so that those of exponents keep their accuracy.
    half = 0.5 * (towards * span)[..., None] * nodes
    between = angle[..., None] + half
    chord = 2.0 * torch.sin(half)
    change = -chord * torch.sin(between)
    exponent = concentration[..., None] * change
    if dim > 2:
        growth = chord * torch.cos(between) / sine[..., None].clamp_min(torch.finfo(sine.dtype).tiny)
        exponent = exponent + (dim - 2) * growth.clamp_min(torch.finfo(sine.dtype).eps - 1).log1p()
    distance = (above[..., None] + change).abs()
    return span * (weights * distance * exponent.exp()).sum(-1)


@functools.lru_cache(maxsize=16)
def _gauss_legendre_kept(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    rule = np.polynomial.legendre.leggauss(NODES[dtype])
    with torch.inference_mode(False):
        nodes, weights = (torch.tensor(part, dtype=dtype, device=device) for part in rule)
        return 0.5 * nodes + 0.5, 0.5 * weights


@torch.compiler.assume_constant_result  # a compiler does not look into caches
def _gauss_legendre(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights on the interval from 0 to 1; kept, as another copy to a device would wait for it."""
    return _gauss_legendre_kept(dtype, device)
