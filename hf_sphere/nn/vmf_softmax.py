"""The sum over classes in the von Mises-Fisher softmax."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_sphere.geometry.autograd import differentiable_once
from hf_sphere.geometry.bessel import partition_and_ratio
from hf_sphere.nn.class_softmax import add_to_own_rows, class_blocks, own_rows

BLOCK = {"cpu": 2**18, "other": 2**24}
"""Values per block: on the CPU a block fits in the cache of a core; on other devices the size limits the memory."""


def log_class_sum(
    direction: Tensor,
    cosine: Tensor,
    sine: Tensor,
    tangents: Tensor,
    class_weights: Tensor,
    inverse_temperature: Tensor,
    labels: Tensor,
    *,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum over the classes of the von Mises-Fisher softmax: `logsumexp_k [log C(|w_k|) - log C(|w_k + beta x|)]`.

    A term is the log-mean of exp(beta x.y) over samples y of class k. The samples x are given relative to the mean
    directions of their distributions, `x = cosine * mu +- sine * v`, and never materialized: their dot products with
    the class weights follow from those of mu and v. The noise v rotates rigidly with mu, so its gradient requires no
    further matrix product.

    Args:
        direction: Mean directions mu, unit vectors (B, d), float32 or float64.
        cosine: (S, B), of S samples of each distribution.
        sine: (S, B), of the same samples, nonnegative.
        tangents: Unit vectors v orthogonal to mu, (ceil(S/2), B, d), with a positive sign in the first half of the
            samples and a negative one in the second.
        class_weights: Mean direction times concentration of each class, w: (K, d).
        inverse_temperature: beta, a scalar.
        labels: Own class of each example, (B,), int64; outside 0..K-1 if it is none of these classes.
        recompute: Whether the backward pass computes the blocks of classes again. Otherwise fewer than three matrices
            (S B, K) are saved for it.

    Returns:
        The sums, (S, B), and the weights of the own classes, (B, d), zero where there is none. Once differentiable with
        respect to all but the tangents.

    Reference:
        Scott, Gallagher and Mozer, "von Mises-Fisher loss: an exploration of embedding geometries for supervised
        learning", ICCV 2021.
    """
    inputs = direction, cosine, sine, tangents, class_weights, inverse_temperature
    return _LogClassSum.apply(*inputs, labels, recompute)


class _LogClassSum(torch.autograd.Function):
    """With u = |w + beta x|^2 a term is G(u) - G(|w|^2), and dG/du is half of A(kappa) / kappa at kappa^2 = u."""

    @staticmethod
    def forward(
        ctx: Any,
        direction: Tensor,
        cosine: Tensor,
        sine: Tensor,
        tangents: Tensor,
        weights: Tensor,
        beta: Tensor,
        labels: Tensor,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        own = partition_and_ratio(weights.square().sum(1), weights.shape[1])
        inputs = direction, cosine, sine, tangents, weights, beta, own.log_partition
        kept: list[Tensor] = []
        sums = []
        for part in _blocks(len(weights), cosine):
            peak, terms, *others = _block(*inputs, part=part)
            sums.append(peak + terms.sum(-1).log())
            kept += [] if recompute else [peak, terms, *others]
        result = torch.stack(sums).logsumexp(0)
        ctx.save_for_backward(*inputs, own.ratio, labels, result, *kept)
        ctx.set_materialize_grads(False)
        return result, own_rows(weights, labels)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor | None, by_own: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, own_ratio, labels, sums = ctx.saved_tensors[:10]
        kept = ctx.saved_tensors[10:]
        direction, cosine, sine, tangents, weights, beta, _ = inputs
        gradient = torch.zeros_like(sums) if gradient is None else gradient
        half = len(tangents)
        signed = _signed(sine, half)
        by_direction, by_weights = torch.zeros_like(direction), torch.empty_like(weights)
        by_cosine, by_signed, total = torch.zeros_like(cosine), torch.zeros_like(cosine), torch.zeros_like(beta)
        for number, part in enumerate(_blocks(len(weights), cosine)):
            peak, terms, ratio, along, across = kept[5 * number : 5 * number + 5] or _block(*inputs, part=part)
            share = terms * (gradient * (peak - sums).exp())[..., None]
            at_own = share.sum((0, 1)) * own_ratio[part]
            by_square = share.mul_(ratio)  # twice the gradient with respect to u
            at_class = by_square.sum((0, 1))
            by_cosine += (by_square * along).sum(-1)
            by_signed[:half] += (by_square[:half] * across).sum(-1)
            by_signed[half:] += (by_square[half:] * across[: len(cosine) - half]).sum(-1)
            by_along = (by_square * cosine[..., None]).sum(0)
            by_across = _fold(by_square.mul_(signed[..., None]), half)
            by_direction.addmm_(by_along, weights[part])
            by_products = by_along.T @ direction + by_across.flatten(0, 1).T @ tangents.flatten(0, 1)
            by_weights[part] = torch.addcmul(beta * by_products, (at_class - at_own)[:, None], weights[part])
            total += at_class.sum()
        # A rotation of mu rotates v as well: dx = w dmu - s (v.dmu) mu. This preserves the distribution;
        # differentiating the construction of v from noise would only add noise of zero mean.
        by_direction -= (_fold(signed * by_cosine, half)[..., None] * tangents).sum(0)
        by_beta = beta * total + (by_cosine * cosine + by_signed * signed).sum()
        if by_own is not None:
            add_to_own_rows(by_weights, labels, by_own)
        by_sine = _signed(by_signed, half) * beta
        return by_direction * beta, by_cosine * beta, by_sine, None, by_weights, by_beta, None, None


def _block(
    direction: Tensor,
    cosine: Tensor,
    sine: Tensor,
    tangents: Tensor,
    weights: Tensor,
    beta: Tensor,
    log_partition: Tensor,
    *,
    part: slice,
) -> tuple[Tensor, ...]:
    """Return the largest term of each sum over a block of classes, the others relative to it, and their factors."""
    half, weights = len(tangents), weights[part]
    height, reach = (2 * beta * part[..., None] for part in (cosine, _signed(sine, half)))
    along, across = direction @ weights.T, tangents @ weights.T
    lengths = torch.addcmul(weights.square().sum(1) + beta.square(), height, along)
    lengths[:half].addcmul_(reach[:half], across)
    lengths[half:].addcmul_(reach[half:], across[: len(cosine) - half])
    # Rounding must not make squares negative.
    growth, ratio = partition_and_ratio(lengths.clamp_min_(0), weights.shape[1])
    growth.sub_(log_partition[part])
    peak = growth.amax(-1)
    return peak, growth.sub_(peak[..., None]).exp_(), ratio, along, across


def _signed(sine: Tensor, half: int) -> Tensor:
    """Negate the sines of the second half of the samples."""
    return torch.cat([sine[:half], -sine[half:]])


def _fold(values: Tensor, half: int) -> Tensor:
    """Sum, in place, over the samples that share a tangent."""
    values[: len(values) - half] += values[half:]
    return values[:half]


def _blocks(classes: int, samples: Tensor) -> Iterator[slice]:
    return class_blocks(classes, samples.numel(), samples.device, BLOCK)
