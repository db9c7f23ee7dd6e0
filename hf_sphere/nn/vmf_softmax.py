"""The sum over classes in the von Mises-Fisher softmax, for as many classes as memory holds logits of."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_sphere.geometry.autograd import differentiable_once
from hf_sphere.geometry.bessel import partition_and_ratio

BLOCK = {"cpu": 2**18, "other": 2**24}
"""Values worked on at a time: on the CPU they stay in the cache of a core, elsewhere they bound the memory."""


def log_class_sum(
    direction: Tensor,
    cosine: Tensor,
    sine: Tensor,
    tangents: Tensor,
    class_weights: Tensor,
    inverse_temperature: Tensor,
) -> Tensor:
    """Sum the classes of the von Mises-Fisher softmax: `logsumexp_k [log C(|w_k|) - log C(|w_k + beta x|)]`.

    A term is the logarithm of the mean of exp(beta x.y) over points y of class k. The points x are given by how they
    lie to the mean directions of their distributions, `x = cosine * mu +- sine * v`, and never formed: their products
    with the class weights follow from those of mu and v, and since v is noise that turns rigidly with mu, its gradient
    needs no product of its own.

    Args:
        direction: Mean directions mu, unit vectors (B, d), float32 or float64.
        cosine: (S, B), of S points of each distribution.
        sine: (S, B), of the same points, not negative.
        tangents: Unit vectors v across mu, (ceil(S/2), B, d). The first half of the points takes them with a plus, the
            second half with a minus sign.
        class_weights: Mean direction times concentration of each class, w: (K, d).
        inverse_temperature: beta, a scalar.

    Returns:
        (S, B), once differentiable by all but the tangents. Classes are worked on in blocks; less than three
        matrices of S B x K numbers are kept for the gradient.

    Reference:
        Scott, Gallagher and Mozer, "von Mises-Fisher loss: an exploration of embedding geometries for supervised
        learning", ICCV 2021.
    """
    return _LogClassSum.apply(direction, cosine, sine, tangents, class_weights, inverse_temperature)


class _LogClassSum(torch.autograd.Function):
    """With u = |w + beta x|^2 a term is G(u) - G(|w|^2), and dG/du is half of A(kappa) / kappa at kappa^2 = u."""

    @staticmethod
    def forward(
        ctx: Any, direction: Tensor, cosine: Tensor, sine: Tensor, tangents: Tensor, weights: Tensor, beta: Tensor
    ) -> Tensor:
        squares = weights.square().sum(1)
        own = partition_and_ratio(squares, weights.shape[1])
        offsets = squares + beta.square()
        half = len(tangents)
        height, reach = (2 * beta * part[..., None] for part in (cosine, _signed(sine, half)))
        kept: list[Tensor] = []
        sums = []
        for part in _blocks(len(weights), cosine):
            along, across = direction @ weights[part].T, tangents @ weights[part].T
            lengths = torch.addcmul(offsets[part], height, along)
            lengths[:half].addcmul_(reach[:half], across)
            lengths[half:].addcmul_(reach[half:], across[: len(cosine) - half])
            # Rounding must not make a square negative.
            growth, ratio = partition_and_ratio(lengths.clamp_min_(0), weights.shape[1])
            growth.sub_(own.log_partition[part])
            peak = growth.amax(-1)
            terms = growth.sub_(peak[..., None]).exp_()
            sums.append(peak + terms.sum(-1).log())
            kept += [peak, terms, ratio, along, across]
        result = torch.stack(sums).logsumexp(0)
        ctx.save_for_backward(direction, cosine, sine, tangents, weights, beta, own.ratio, result, *kept)
        return result

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        direction, cosine, sine, tangents, weights, beta, own_ratio, sums, *kept = ctx.saved_tensors
        half = len(tangents)
        signed = _signed(sine, half)
        by_direction, by_weights = torch.zeros_like(direction), torch.empty_like(weights)
        by_cosine, by_signed, total = torch.zeros_like(cosine), torch.zeros_like(cosine), torch.zeros_like(beta)
        for number, part in enumerate(_blocks(len(weights), cosine)):
            peak, terms, ratio, along, across = kept[5 * number : 5 * number + 5]
            share = terms * (gradient * (peak - sums).exp())[..., None]
            at_own = share.sum((0, 1)) * own_ratio[part]
            by_square = share.mul_(ratio)  # twice the gradient by u
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
        # A rotation of mu takes v along: dx = w dmu - s (v.dmu) mu. It keeps the distribution; to differentiate how
        # noise became v would add nothing but noise of mean zero.
        by_direction -= (_fold(signed * by_cosine, half)[..., None] * tangents).sum(0)
        by_beta = beta * total + (by_cosine * cosine + by_signed * signed).sum()
        return by_direction * beta, by_cosine * beta, _signed(by_signed, half) * beta, None, by_weights, by_beta


def _signed(sine: Tensor, half: int) -> Tensor:
    """The second half of the points takes its tangents backwards."""
    return torch.cat([sine[:half], -sine[half:]])


def _fold(of_points: Tensor, half: int) -> Tensor:
    """Add up, in place, over the points that share a tangent."""
    of_points[: len(of_points) - half] += of_points[half:]
    return of_points[:half]


def _blocks(classes: int, points: Tensor) -> Iterator[slice]:
    """Slices of the classes, so many that a block has some given number of values."""
    size = BLOCK["cpu" if points.device.type == "cpu" else "other"] // max(points.numel(), 1)
    size = min(max(size, 32), max(classes, 1))
    for start in range(0, classes, size):
        yield slice(start, start + size)
