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

from hf_sphere.geometry.bessel import bounded_root, complement_from_root
from hf_sphere.geometry.decorators import cache_constants, cache_outside_graphs, differentiable_once, number
from hf_sphere.utils.modules import assume_constant_result
from hf_sphere.utils.seeds import GAMMA, splitmix

BITS = {torch.float32: 24, torch.float64: 53}
"""Random bits of a uniform number: those of the significand."""

PROPOSALS_PER_ROUND = 4
"""Proposals per sample on the CPU, where rounds are repeated until every sample has an accepted proposal."""

PROPOSALS_WITHOUT_ROUNDS = 32
"""Proposals per sample on other devices, where testing for acceptance would synchronize. The acceptance rate is at
least 0.658, so all proposals of a sample are rejected with a probability of 1e-15."""

LARGEST_CACHED_NOISE = 2**20
"""Maximum number of values in a cached fixed noise, and in that of several seeds at once; 8 MiB."""

NODES = {torch.float32: 14, torch.float64: 48}
"""Number of Gauss-Legendre nodes for the derivative with respect to the concentration."""


def keyed_integers(keys: Tensor | int, indices: Tensor) -> Tensor:
    """Return the numbers (int64, uniform) at `indices` of the streams of keys, which may be keys of further streams."""
    return splitmix((keys + indices) * GAMMA)  # inductor computes `indices * GAMMA` of an `arange` without overflow


def keyed_uniforms(keys: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1), float32 or float64; see `keyed_integers`."""
    return _uniforms(keyed_integers(keys, indices), dtype)


def _uniforms(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    bits = BITS[dtype]
    return torch.add(number(0.5, dtype, numbers.device), numbers.bitwise_right_shift_(64 - bits), alpha=0.5**bits)


def keyed_normals(keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the first `count` standard normal numbers of the streams of keys: (...) -> (..., count)."""
    return _to_normals(keyed_uniforms(keys[..., None], indices(count + count % 2, keys.device), dtype), count)


@cache_outside_graphs
def indices(count: int, device: torch.device) -> Tensor:
    """Return the integers below a count."""
    return torch.arange(count, device=device)


def _to_normals(uniforms: Tensor, count: int) -> Tensor:
    """Box and Muller's method, by the sines of the angle and of its complement; 1 - u is never zero."""
    first, turns = uniforms.chunk(2, -1)
    radius = (1 - first).log_().mul_(-2).sqrt_()
    phases = _phases(1, uniforms.dtype, uniforms.device)[:, None]
    normals = torch.add(phases, turns[..., None, :], alpha=2 * math.pi).sin_().mul_(radius[..., None, :])
    return normals.flatten(-2)[..., :count]


def generator_argument(generator: torch.Generator | None) -> dict[str, Any]:
    """Return the argument of a function that draws: none without a generator, since sizes could not be dynamic."""
    return {} if generator is None else {"generator": generator}


def points_around(loc: Tensor, cosine: Tensor, sine: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw points in uniform directions around mean directions (..., d), at given cosines and sines (...): (..., d)."""
    shape = (*cosine.shape, loc.shape[-1])
    normals = torch.randn(shape, dtype=loc.dtype, device=loc.device, **generator_argument(generator))
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
    """Draw one cosine w between sample and mean direction per concentration: w and `sqrt(1 - w^2)`, of its shape.

    Exact in any dimension and at any concentration, by Wood's rejection sampling in a form without cancellation: the
    sine keeps its full relative accuracy where w is close to 1. The derivative with respect to the concentration is
    given, once, by implicit reparameterization, `dw/dkappa = -(dF/dkappa) / f` with the distribution function F and the
    density f of w. With `keys`, int64, of the shape of the concentration, a sample depends only on its concentration
    and key, and not on a generator; see `hf_sphere.geometry.sampling`.

    Reference:
        Wood, "Simulation of the von Mises Fisher distribution", Communications in Statistics 1994; Figurnov, Mohamed
        and Mnih, "Implicit reparameterization gradients", NeurIPS 2018.
    """
    values = concentration.detach()
    on_cpu = values.device.type == "cpu" and not torch.compiler.is_compiling()
    count = PROPOSALS_PER_ROUND if on_cpu else PROPOSALS_WITHOUT_ROUNDS

    def one_round(index: int, left: Any) -> tuple[Tensor, Tensor]:
        some = values[left]
        if keys is None:
            shape = (3, count, *some.shape)
            uniforms = torch.rand(shape, dtype=some.dtype, device=some.device, **generator_argument(generator))
        else:
            uniforms = keyed_uniforms(keys[left], _proposals(count, some) + 3 * count * index, some.dtype)
        first, is_any = _first_accepted(some, dim, uniforms)
        return first, is_any.bool()

    rounds = 0
    sides, accepted = one_round(rounds, ...)
    while on_cpu and (left := ~(accepted | sides[0].isnan())).any():  # NaN concentrations accept no proposal
        rounds += 1
        sides[:, left], accepted[left] = one_round(rounds, left)
    return _Reparameterized.apply(concentration, sides, dim)


def _proposals(count: int, like: Tensor) -> Tensor:
    """Indices of the uniform numbers of proposals, (3, count, ...), whose order does not depend on the count."""
    return indices(3 * count, like.device).view(count, 3, *(1,) * like.ndim).transpose(0, 1)


class Noise(NamedTuple):
    """Random numbers that determine samples for given mean directions and concentrations."""

    uniforms: Tensor  # (3, n, ...), uniform numbers for n proposals of the cosine
    normals: Tensor  # (..., d), Gaussian noise for the tangent


def fixed_noise(shape: tuple[int, ...], dim: int, seed: int | range, dtype: torch.dtype, device: torch.device) -> Noise:
    """Return noise for samples of `shape` that depends only on the seed; a range of them adds an axis in front."""
    return Noise(*(torch.as_tensor(array, dtype=dtype, device=device) for array in _fixed_numbers(shape, dim, seed)))


def keyed_noise(keys: Tensor, of_normals: Tensor, dim: int, dtype: torch.dtype) -> Noise:
    """Return the numbers that `sample_cosine` and `keyed_normals` use for keys, from one evaluation of the hash."""
    proposals = keys + _proposals(PROPOSALS_WITHOUT_ROUNDS, keys).transpose(0, 1)  # which is flattened without a copy
    places = proposals, of_normals[..., None] + indices(dim + dim % 2, keys.device)
    uniforms = _uniforms(splitmix(torch.cat([part.flatten() for part in places]) * GAMMA), dtype)
    first, second = uniforms.split([part.numel() for part in places])
    return Noise(first.view_as(places[0]).transpose(0, 1), _to_normals(second.view_as(places[1]), dim))


def seeds_at_once(shape: tuple[int, ...], dim: int) -> int:
    """Return how many seeds a range for `fixed_noise` should have, so that its size is limited; at least 1."""
    return max(LARGEST_CACHED_NOISE // _count_fixed_numbers(shape, dim), 1)


def _count_fixed_numbers(shape: tuple[int, ...], dim: int) -> int:
    return math.prod(shape) * (3 * PROPOSALS_WITHOUT_ROUNDS + dim)


@assume_constant_result
def _fixed_numbers(shape: tuple[int, ...], dim: int, seed: int | range) -> tuple[Tensor, ...]:
    size = _count_fixed_numbers(shape, dim) * (1 if isinstance(seed, int) else len(seed))
    draw = _draw_fixed_numbers if size <= LARGEST_CACHED_NOISE else _draw_fixed_numbers.__wrapped__
    return tuple(map(torch.from_numpy, draw(shape, dim, seed)))


@functools.lru_cache(maxsize=64)
def _draw_fixed_numbers(shape: tuple[int, ...], dim: int, seed: int | range) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(seed, range):
        uniforms, normals = zip(*(_draw_fixed_numbers.__wrapped__(shape, dim, each) for each in seed), strict=True)
        return np.stack(uniforms, axis=2), np.stack(normals)
    generator = np.random.default_rng(seed)
    return generator.random((3, PROPOSALS_WITHOUT_ROUNDS, *shape)), generator.standard_normal((*shape, dim))


def points_from_noise(loc: Tensor, concentration: Tensor, noise: Noise) -> Tensor:
    """Transform noise into samples (..., d), differentiable like those of `points_around`; leading axes broadcast."""
    cosine, sine = cosine_from_noise(concentration, loc.shape[-1], noise)
    return _Point.apply(loc, cosine, sine, noise.normals)[0]


def cosine_from_noise(concentration: Tensor, dim: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """Transform noise into cosines and sines, like `sample_cosine`; leading axes broadcast."""
    sides, _ = _first_accepted(concentration.detach(), dim, noise.uniforms)
    return _Reparameterized.apply(concentration.expand(sides.shape[1:]), sides, dim)


def propose(concentration: Tensor, dim: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Transform uniform numbers (3, n, ...) into n of Wood's proposals for concentrations that broadcast with (...).

    A proposal is a coordinate x of a uniform point on the sphere, shifted toward the mean by the Moebius transformation
    `w = (x + c) / (1 + c x)` with `c = 2 kappa / (sqrt(4 kappa^2 + (d-1)^2) + d - 1)`. In this form nothing cancels:
    the log acceptance probability is `(d - 1) (1 - 1 / z - log z)` with `z = 1 + c x`.

    Returns `1 - w` and `1 + w`, (2, n, ...), and whether the proposals are accepted, (n, ...).
    """
    first, second, third = uniforms
    # Two coordinates of a uniform point in polar form. Their squared radius is 1 - rest; in two dimensions it is 1.
    square_complement = first.pow(2 / (dim - 2)) if dim > 2 else torch.zeros_like(first)
    radius = (1 - square_complement).sqrt_()
    phases = _phases(0, first.dtype, first.device).view(2, *(1,) * first.ndim)
    squares = torch.add(phases, second, alpha=math.pi).sin_().square()  # of the sine and cosine of half the angle
    halves = torch.addcmul(square_complement / (1 + radius), radius, squares, value=2)  # 1 - x and 1 + x
    concentration = concentration[(None,) * (first.ndim - 1 - concentration.ndim)]
    kappa, root = bounded_root(concentration, dim)
    c, c_complement = kappa / root, number(dim - 1, kappa.dtype, kappa.device) / (kappa + root)  # 1 - c
    z = torch.addcmul(c_complement, c, halves[1])
    sides = halves * torch.stack([c_complement, 1 + c])[:, None] / z
    # `z - 1` is exact where the terms almost cancel.
    excess = torch.add(third.log(), torch.addcdiv(z.log(), z - 1, z, value=-1), alpha=dim - 1)
    return sides, excess <= 0


@cache_outside_graphs
def _phases(quarters: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number of quarters of a turn, as an angle, and one quarter less."""
    return torch.arange(quarters, quarters - 2, -1, dtype=dtype, device=device) * (0.5 * math.pi)


def _first_accepted(concentration: Tensor, dim: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return `1 - w` and `1 + w` of the first accepted of n proposals, (2, ...), and 1 if any is accepted, else 0."""
    sides, accepted = propose(concentration, dim, uniforms)
    is_any, first = accepted.to(torch.uint8).max(dim=0, keepdim=True)
    return sides.gather(1, first.expand(2, *first.shape))[:, 0], is_any[0]


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
    def forward(concentration: Tensor, sides: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        gap, rise = sides
        return 1 - gap, (gap * rise).sqrt()  # in place, its gradient would get lost in torch 2.11, compiled

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        concentration, sides, ctx.dim = inputs
        ctx.save_for_backward(concentration, sides, *output)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_cosine: Tensor, grad_sine: Tensor) -> tuple[Tensor | None, ...]:
        concentration, sides, cosine, sine = ctx.saved_tensors
        rate = _angle_rate(concentration, ctx.dim, sides[0], cosine, sine)
        return torch.addcmul(grad_cosine * sine, grad_sine, cosine, value=-1) * rate, None, None


def _angle_rate(concentration: Tensor, dim: int, gap: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Implicit-reparameterization derivative of the angle with respect to the concentration, negated.

    `-dtheta/dkappa = integral of |cos(phi) - A| g(phi) / g(theta)` over the angles phi on one side of theta, where
    `g(theta) = exp(kappa cos(theta)) sin(theta)^(d-2)` is the density of the angle up to a constant. Both sides give
    the same result, since the integral over all angles vanishes. The side away from the mean resultant is used, where
    the integrand has a constant sign and nothing cancels. `gap` is 1 - cos(theta).
    """
    kappa, root = bounded_root(concentration, dim)
    above = complement_from_root(kappa, root, dim) - gap  # cos(theta) - A
    # Beyond about 7 standard deviations of the angle (float64: 10) the integrand is below the rounding error.
    reach = root.rsqrt_().mul_(10.0 if sine.dtype == torch.float64 else 7.0)
    # Positive toward the mean direction, negative toward its antipode.
    side = torch.copysign(number(1.0, sine.dtype, sine.device), above)
    span = torch.minimum(reach, torch.atan2(sine, side * cosine)).mul_(side)
    nodes, log_weights = _gauss_legendre(sine.dtype, sine.device)
    full, half = (span * nodes.view(2, -1, *(1,) * span.ndim)).sin_()  # of theta - phi, and of half of it
    # Differences of cosines and of sines are written as products, so that the exponent stays accurate.
    square = half.square()
    change = torch.addcmul(sine * full, cosine, square, value=-2)  # cos(phi) - cos(theta)
    exponent = torch.addcmul(log_weights.view(-1, *(1,) * span.ndim), kappa, change)
    if dim > 2:
        cotangent = cosine / sine.clamp_min(torch.finfo(sine.dtype).tiny)
        growth = torch.addcmul(-2 * square, cotangent, full, value=-1)  # sin(phi) / sin(theta) - 1
        exponent.add_(growth.clamp_min_(torch.finfo(sine.dtype).eps - 1).log1p_(), alpha=dim - 2)
    integrand = exponent.exp_().mul_(above + change)
    return integrand.sum(0).mul_(span)


@cache_constants
def _gauss_legendre(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes of the Gauss-Legendre rule on the intervals from 0 to 1 and to 1/2, and log-weights for the former."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES[dtype])
    nodes = 0.5 * nodes + 0.5
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return torch.tensor(np.stack([nodes, 0.5 * nodes]), **options), torch.tensor(np.log(0.5 * weights), **options)
