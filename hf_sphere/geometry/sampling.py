"""Reparameterized samples of the von Mises-Fisher distribution, by the tangent-normal decomposition.

A sample is `x = w mu + sqrt(1 - w^2) v`, where the cosine w has the univariate density
`exp(kappa w) (1 - w^2)^((d-3)/2)` up to a constant, and the tangent v is uniform on the unit sphere orthogonal to mu.

Randomness can come from a generator or from integer keys. Numbers that are functions of keys are the same in any batch,
on any device and in compiled code. They come from SplitMix64: the number at index i of the stream of a key is
`splitmix((key + i) * GAMMA)`.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.bessel import bounded, mean_resultant_length_complement
from hf_sphere.geometry.decorators import cache_constants, differentiable_once
from hf_sphere.utils.seeds import GAMMA, splitmix

BITS = {torch.float32: 24, torch.float64: 53}
"""Random bits of a uniform number: those of the significand."""

PROPOSALS_PER_ROUND = 4
"""Proposals per sample on the CPU, where rounds are repeated until every sample has an accepted proposal."""

PROPOSALS_WITHOUT_ROUNDS = 32
"""Proposals per sample on other devices, where testing for acceptance would synchronize. The acceptance rate is at
least 0.658, so all proposals of a sample are rejected with a probability of 1e-15."""

LARGEST_CACHED_NOISE = 2**20
"""Maximum number of values in a cached fixed noise; 8 MiB."""

NODES = {torch.float32: 14, torch.float64: 48}
"""Number of Gauss-Legendre nodes for the derivative with respect to the concentration."""


def keyed_integers(keys: Tensor | int, indices: Tensor) -> Tensor:
    """Return the numbers (int64, uniform over all values) at `indices` of the streams of keys; shapes broadcast.

    They may be keys of further streams.
    """
    return splitmix((keys + indices) * GAMMA)  # inductor computes `indices * GAMMA` of an `arange` without overflow


def keyed_uniforms(keys: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1), float32 or float64; see `keyed_integers`."""
    bits = BITS[dtype]
    return keyed_integers(keys, indices).bitwise_right_shift_(64 - bits).to(dtype).mul_(0.5**bits).add_(0.5)


def keyed_normals(keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the first `count` standard normal numbers of the streams of keys: (...) -> (..., count)."""
    pairs = (count + 1) // 2
    uniforms = keyed_uniforms(keys[..., None], torch.arange(2 * pairs, device=keys.device), dtype)
    # Box and Muller's method; 1 - u is never zero.
    radius = (1 - uniforms[..., :pairs]).log_().mul_(-2).sqrt_()
    angle = uniforms[..., pairs:].mul_(2 * math.pi)
    return torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)], dim=-1)[..., :count]


def points_around(loc: Tensor, cosine: Tensor, sine: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw points in uniform directions around mean directions (..., d), at given cosines and sines (...): (..., d)."""
    shape = (*cosine.shape, loc.shape[-1])
    normals = torch.randn(shape, generator=generator, dtype=loc.dtype, device=loc.device)
    return _Point.apply(loc, cosine, sine, normals)[0]


def tangent_directions(loc: Tensor, normals: Tensor) -> Tensor:
    """Project Gaussian noise (..., d) onto the tangent spaces at unit vectors that broadcast with it, and normalize."""
    tangents = torch.addcmul(normals, (normals * loc).sum(-1, keepdim=True), loc, value=-1)
    if loc.shape[-1] < 8:
        # In few dimensions the noise may be nearly parallel to loc; a second projection removes the rounding error.
        tangents = torch.addcmul(tangents, (tangents * loc).sum(-1, keepdim=True), loc, value=-1)
    return tangents / torch.linalg.vector_norm(tangents, dim=-1, keepdim=True).clamp_min_(torch.finfo(loc.dtype).tiny)


def sample_cosine(
    concentration: Tensor, dim: int, generator: torch.Generator | None = None, *, keys: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one cosine w between sample and mean direction per concentration.

    Exact in any dimension and at any concentration, by Wood's rejection sampling in a form without cancellation. The
    derivative with respect to the concentration is given by implicit reparameterization, `dw/dkappa = -(dF/dkappa) / f`
    with the distribution function F and the density f of w.

    Args:
        concentration: Concentration kappa >= 0, of any shape, float32 or float64.
        dim: Number of coordinates d, at least 2.
        generator: Random number generator; torch's global one if None.
        keys: int64, of the shape of `concentration`. Replaces the generator: a sample depends only on its
            concentration and key, see `hf_sphere.geometry.sampling`.

    Returns:
        w and `sqrt(1 - w^2)`, both with the shape of `concentration` and once differentiable with respect to it. The
        sine keeps its full relative accuracy where w is close to 1.

    Reference:
        Wood, "Simulation of the von Mises Fisher distribution", Communications in Statistics 1994; Figurnov, Mohamed
        and Mnih, "Implicit reparameterization gradients", NeurIPS 2018.
    """
    flat = concentration.detach().reshape(-1)
    flat_keys = None if keys is None else keys.reshape(-1)
    on_cpu = flat.device.type == "cpu" and not torch.compiler.is_compiling()
    count = PROPOSALS_PER_ROUND if on_cpu else PROPOSALS_WITHOUT_ROUNDS

    def one_round(index: int, left: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        some = flat[left]
        if flat_keys is None:
            shape = (3, count, len(some))
            uniforms = torch.rand(shape, generator=generator, dtype=flat.dtype, device=flat.device)
        else:
            # The order of the proposals does not depend on the size of a round.
            indices = torch.arange(3 * count, device=flat.device).view(count, 3).T + 3 * count * index
            uniforms = keyed_uniforms(flat_keys[left], indices[..., None], flat.dtype)
        return _first_accepted(some, dim, uniforms)

    rounds = 0
    gap, rise, accepted = one_round(rounds, slice(None))
    while on_cpu and not (accepted | gap.isnan()).all():  # NaN concentrations accept no proposal
        rounds += 1
        left = (~accepted & ~gap.isnan()).nonzero()[:, 0]
        gap[left], rise[left], accepted[left] = one_round(rounds, left)
    gap, rise = gap.reshape(concentration.shape), rise.reshape(concentration.shape)
    return _Reparameterized.apply(concentration, gap, (gap * rise).sqrt(), dim)


class Noise(NamedTuple):
    """Random numbers that determine samples for given mean directions and concentrations.

    Attributes:
        uniforms: (3, n, ...), uniform numbers for n proposals of the cosine.
        normals: (..., d), Gaussian noise for the tangent.
    """

    uniforms: Tensor
    normals: Tensor


def fixed_noise(shape: tuple[int, ...], dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> Noise:
    """Return noise for samples of `shape` that depends only on the seed; in an exported model it is a constant."""
    return Noise(*(torch.as_tensor(array, dtype=dtype, device=device) for array in _fixed_numbers(shape, dim, seed)))


@torch.compiler.assume_constant_result
def _fixed_numbers(shape: tuple[int, ...], dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    size = math.prod(shape) * (3 * PROPOSALS_WITHOUT_ROUNDS + dim)
    draw = _draw_fixed_numbers if size <= LARGEST_CACHED_NOISE else _draw_fixed_numbers.__wrapped__
    return draw(shape, dim, seed)


@functools.lru_cache(maxsize=64)
def _draw_fixed_numbers(shape: tuple[int, ...], dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.random((3, PROPOSALS_WITHOUT_ROUNDS, *shape)), generator.standard_normal((*shape, dim))


def points_from_noise(loc: Tensor, concentration: Tensor, noise: Noise) -> Tensor:
    """Transform noise into samples (..., d), differentiable like those of `points_around`; leading axes broadcast."""
    cosine, sine = cosine_from_noise(concentration, loc.shape[-1], noise)
    return _Point.apply(loc, cosine, sine, noise.normals)[0]


def cosine_from_noise(concentration: Tensor, dim: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """Transform noise into cosines and sines, like `sample_cosine`; leading axes broadcast."""
    gap, rise, _ = _first_accepted(concentration.detach(), dim, noise.uniforms)
    return _Reparameterized.apply(concentration.expand(gap.shape), gap, (gap * rise).sqrt(), dim)


def propose(concentration: Tensor, dim: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Transform uniform numbers (3, ...) into Wood's proposals for concentrations that broadcast with (...).

    A proposal is a coordinate x of a uniform point on the sphere, shifted toward the mean by the Moebius transformation
    `w = (x + c) / (1 + c x)` with `c = 2 kappa / (sqrt(4 kappa^2 + (d-1)^2) + d - 1)`. In this form nothing cancels:
    the log acceptance probability is `(d - 1) (y / (1 + y) - log(1 + y))` with `y = c x`.

    Returns:
        `1 - w`, `1 + w` and whether the proposal is accepted.
    """
    first, second, third = uniforms
    # Two coordinates of a uniform point in polar form. Their squared radius is 1 - rest; in two dimensions it is 1.
    square_complement = (first.log() * (2 / (dim - 2))).exp() if dim > 2 else torch.zeros_like(first)
    radius = (1 - square_complement).sqrt()
    half = math.pi * second
    lower = square_complement / (1 + radius) + 2 * radius * half.sin().square()  # 1 - x
    upper = square_complement / (1 + radius) + 2 * radius * half.cos().square()  # 1 + x
    finite, shrinkage = bounded(concentration)
    root = (4 * finite.square() + (dim - 1) ** 2).sqrt() + (dim - 1)
    c = 2 * finite / root
    c_complement = 2 * (dim - 1) / (2 * finite + root) * shrinkage  # 1 - c
    denominator = c_complement + c * upper  # 1 + c x
    y = c * (0.5 * (upper - lower))
    accepted = third.log() <= (dim - 1) * (y / denominator - y.log1p())
    return c_complement * lower / denominator, (1 + c) * upper / denominator, accepted


def _first_accepted(concentration: Tensor, dim: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first accepted of n proposals (3, n, ...) for concentrations (...), and whether any is accepted."""
    gap, rise, accepted = propose(concentration, dim, uniforms)
    first = accepted.to(torch.uint8).argmax(dim=0, keepdim=True)
    return gap.gather(0, first)[0], rise.gather(0, first)[0], accepted.any(dim=0)


class _Point(torch.autograd.Function):
    """The sample `w mu + s v`, where v is Gaussian noise n projected onto the tangent space at mu and normalized.

    The gradient is written by hand to save memory: autograd would store six tensors of the size of the samples.
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
    def backward(ctx: Any, grad_point: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        loc, cosine, sine, normals, tangents = ctx.saved_tensors
        grad_cosine, grad_sine = (grad_point * loc).sum(-1), (grad_point * tangents).sum(-1)
        grad_loc = None
        if ctx.needs_input_grad[0]:
            # dx = w dmu - s (v.dmu) mu, since v rotates together with mu. The projection of the noise adds
            # -s (n.mu) / (n.v) times the part of dmu that is orthogonal to both mu and v.
            slip = sine * (normals * loc).sum(-1) / (normals * tangents).sum(-1)
            grad_loc = grad_point * (cosine - slip)[..., None]
            grad_loc = torch.addcmul(grad_loc, (slip * grad_sine - sine * grad_cosine)[..., None], tangents)
            grad_loc = grad_loc.sum_to_size(loc.shape)
        return grad_loc, grad_cosine, grad_sine, None


class _Reparameterized(torch.autograd.Function):
    """The cosine and the sine, with their derivatives with respect to the concentration."""

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
    def backward(ctx: Any, grad_cosine: Tensor, grad_sine: Tensor) -> tuple[Tensor | None, ...]:
        concentration, gap, sine = ctx.saved_tensors
        rate = _angle_rate(concentration, ctx.dim, gap, sine)
        return (grad_cosine * sine - grad_sine * (1 - gap)) * rate, None, None, None


def _angle_rate(concentration: Tensor, dim: int, gap: Tensor, sine: Tensor) -> Tensor:
    """Implicit-reparameterization derivative of the angle with respect to the concentration, negated.

    `-dtheta/dkappa = integral of |cos(phi) - A| g(phi) / g(theta)` over the angles phi on one side of theta, where
    `g(theta) = exp(kappa cos(theta)) sin(theta)^(d-2)` is the density of the angle up to a constant. Both sides give
    the same result, since the integral over all angles vanishes. The side away from the mean resultant is used, where
    the integrand has a constant sign and nothing cancels. `gap` is 1 - cos(theta) and `sine` is sin(theta).
    """
    angle = torch.atan2(sine, 1 - gap)
    above = mean_resultant_length_complement(concentration, dim) - gap  # cos(theta) - A
    direction = torch.where(above > 0, -1.0, 1.0).to(angle.dtype)  # toward the mean direction, or its antipode
    # Beyond about 7 standard deviations of the angle (float64: 10) the integrand is below the rounding error.
    finite, shrinkage = bounded(concentration)
    curvature = (finite.square() + (0.5 * (dim - 1)) ** 2).sqrt() + 0.5 * (dim - 1)
    reach = (10.0 if angle.dtype == torch.float64 else 7.0) * (shrinkage / curvature).sqrt()
    span = torch.minimum(reach, torch.where(direction < 0, angle, math.pi - angle))
    nodes, weights = (rule.reshape(-1, *(1,) * angle.ndim) for rule in _gauss_legendre(angle.dtype, angle.device))
    # Differences of cosines and of sines are written as products, so that the exponent stays accurate.
    half = 0.5 * (direction * span) * nodes
    between = angle + half
    chord = 2.0 * torch.sin(half)
    change = -chord * torch.sin(between)
    exponent = concentration * change
    if dim > 2:
        growth = chord * torch.cos(between) / sine.clamp_min(torch.finfo(sine.dtype).tiny)
        exponent = exponent + (dim - 2) * growth.clamp_min(torch.finfo(sine.dtype).eps - 1).log1p()
    return span * (weights * (above + change).abs() * exponent.exp()).sum(0)


@cache_constants
def _gauss_legendre(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss-Legendre rule on the interval from 0 to 1."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES[dtype])
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return torch.tensor(0.5 * nodes + 0.5, **options), torch.tensor(0.5 * weights, **options)
