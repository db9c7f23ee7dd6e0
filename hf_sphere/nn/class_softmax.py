"""Sums over the classes of a softmax, without the matrix of all logits."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.bessel import partition_and_ratio
from hf_sphere.geometry.decorators import cache_outside_graphs, differentiable_once, opaque

BLOCK = {"cpu": 2**20, "other": 2**24}
"""Logits per block: on the CPU a block fits in the cache of a core; on other devices the size limits the memory."""

SAMPLE_BLOCK = {"cpu": 2**18, "other": 2**24}
"""The same for the logits of samples of von Mises-Fisher distributions."""

SMALLEST_BLOCK = 32
"""Minimum number of classes per block, however large the batch."""


def sum_over_other_classes(
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    normalize: bool = False,
    sum_logits: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Sum over all classes but an example's own, in blocks of classes.

    The logit of a class is `w.x + b`, with C centers per class the largest of their products. The memory is that of a
    few blocks of logits, which the backward pass computes again (Chen et al., "Training deep nets with sublinear memory
    cost", 2016). The own class is masked instead of subtracted, so that its loss stays accurate however large its logit
    is, and a margin can replace that logit.

    The inputs are x, (B, d), float32 or float64; w, (K, d) or (K, C, d), of any dtype, divided by its norms if
    `normalize`; b, (K,), or None; and the labels, (B,), for which nothing is masked outside 0..K-1. Returned are the
    log-sum-exp, (B,), -inf if there is no other class; with `sum_logits` the sum of the logits, (B,); and the weights
    of the own class, (B, d) or (B, C, d), not normalized, zero where there is none. Once differentiable.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        return _OtherClasses.apply(embeddings, weight, bias, labels, normalize, sum_logits)


def class_blocks(num_classes: int, per_class: int, device: torch.device, sizes: dict[str, int]) -> Iterator[slice]:
    """Yield slices of the classes with about as many values each as `sizes` allows on a device."""
    size = sizes["cpu" if device.type == "cpu" else "other"] // max(per_class, 1)
    size = min(max(size, SMALLEST_BLOCK), max(num_classes, 1))
    for start in range(0, num_classes, size):
        yield slice(start, min(start + size, num_classes))


def own_rows(weight: Tensor, labels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the rows of a tensor (K, ...) at labels (B,), in its dtype if None, zero for labels outside 0..K-1."""
    return weight[labels.clamp(0, len(weight) - 1)].to(dtype or weight.dtype) * _is_inside(weight, labels)


def add_to_own_rows(weight: Tensor, labels: Tensor, values: Tensor) -> None:
    """Add values (B, ...) in place to the rows of a tensor (K, ...) at labels (B,); not for labels outside 0..K-1."""
    values = values * _is_inside(weight, labels)
    weight.index_add_(0, labels.clamp(0, len(weight) - 1), values.to(weight.dtype))


def _is_inside(weight: Tensor, labels: Tensor) -> Tensor:
    """Return 1 where a label is a row of a tensor and 0 elsewhere, with axes that broadcast with the rows."""
    inside = (labels >= 0) & (labels < len(weight))
    return inside.view(-1, *(1,) * (weight.ndim - 1))


class _OtherClasses(torch.autograd.Function):
    """The log-sum-exp and the sum of the logits `l_k = w_k.x + b_k` over k other than the own class y, and w_y.

    Their gradients with respect to l_k are `exp(l_k - log_sum)` and 1, both 0 at k = y. From their sum g_k, times the
    incoming gradients, follow those of x, `sum_k g_k w_k`, and, summed over the examples, of w_k, `g_k x`, and b_k,
    g_k.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        embeddings, weight, bias, labels, normalize, sum_logits = arguments
        log_sum, totals = _sum_blocks(*arguments)
        ctx.normalize = normalize
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(embeddings, weight, bias, labels, log_sum)
        # Compiled by torch 2.11, the gradient of an output that is converted at last would get lost.
        return log_sum, totals if sum_logits else None, own_rows(weight, labels, embeddings.dtype)

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, grad_log_sum: Tensor | None, grad_total: Tensor | None, grad_own: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        _, _, bias, labels, _ = saved = ctx.saved_tensors  # a checkpoint allows reading them once
        grad_embeddings, grad_weight, grad_bias = _differentiate_blocks(*saved, grad_log_sum, grad_total, ctx.normalize)
        if grad_own is not None:
            add_to_own_rows(grad_weight, labels, grad_own)
        return grad_embeddings, grad_weight, None if bias is None else grad_bias, None, None, None


@opaque(lambda x, *options: (x.new_empty(x.shape[:1]), x.new_empty(x.shape[0] if options[-1] else 0)))
def _sum_blocks(
    embeddings: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, normalize: bool, sum_logits: bool
) -> tuple[Tensor, Tensor]:
    log_sum = torch.full_like(embeddings[:, 0], -torch.inf)
    totals = embeddings.new_zeros(len(embeddings) * sum_logits)
    for block in _blocks(embeddings, weight):
        logits = _block(embeddings, weight, bias, block, normalize)[0]
        if sum_logits:
            totals += _set_own(logits, labels, block, 0.0).sum(1)
        logits = _set_own(logits, labels, block, -torch.inf)
        peak = logits.amax(1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
        block_sum = logits.sub_(peak).exp_().sum(1).log_().add_(peak[:, 0])
        log_sum = torch.logaddexp(log_sum, block_sum)
    return log_sum, totals


@opaque(
    lambda x, weight, bias, *_: tuple(map(torch.empty_like, (x, weight, weight[:0, ...] if bias is None else bias)))
)
def _differentiate_blocks(
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    log_sum: Tensor,
    grad_log_sum: Tensor | None,
    grad_total: Tensor | None,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of embeddings, weights and bias, which is empty if there is none."""
    log_sum = log_sum.clamp_min(torch.finfo(log_sum.dtype).min)[:, None]  # -inf without another class
    grad_embeddings, grad_weight = torch.zeros_like(embeddings), torch.empty_like(weight)
    grad_bias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    for block in _blocks(embeddings, weight):
        logits, rows, lengths, best = _block(embeddings, weight, bias, block, normalize)
        if grad_log_sum is None:
            grad_logits = logits.zero_()
        else:
            softmax = _set_own(logits, labels, block, -torch.inf).sub_(log_sum).exp_()
            grad_logits = softmax.mul_(grad_log_sum[:, None])
        if grad_total is not None:
            grad_logits = _set_own(grad_logits.add_(grad_total[:, None]), labels, block, 0.0)
        if bias is not None:
            grad_bias[block] = grad_logits.sum(0)
        if best is not None:  # (B, n) -> (B, n C): only the best center of a class has a gradient
            centers = grad_logits.new_zeros(*grad_logits.shape, weight.shape[1])
            grad_logits = centers.scatter_(2, best, grad_logits[..., None]).flatten(1)
        grad_embeddings.addmm_(grad_logits, rows)
        grad_rows = grad_logits.T @ embeddings
        if lengths is not None:  # of u = w / |w|: grad_w = (grad_u - <u, grad_u> u) / |w|
            grad_rows.sub_(rows * (rows * grad_rows).sum(1, keepdim=True)).div_(lengths)
        grad_weight[block] = grad_rows.view_as(grad_weight[block])
    return grad_embeddings, grad_weight, grad_bias


def _blocks(embeddings: Tensor, weight: Tensor) -> Iterator[slice]:
    per_class = len(embeddings) * (weight.shape[1] if weight.ndim == 3 else 1)
    return class_blocks(len(weight), per_class, embeddings.device, BLOCK)


def _block(
    embeddings: Tensor, weight: Tensor, bias: Tensor | None, block: slice, normalize: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the logits of a block of classes, its weights and their norms, and the best center of each class."""
    rows, lengths, best = weight[block].to(embeddings.dtype).flatten(0, -2), None, None
    if normalize:
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(1e-12)  # as in F.normalize
        rows = rows / lengths
    logits = F.linear(embeddings, rows, None if bias is None else bias[block].to(rows.dtype))
    if weight.ndim == 3:
        logits, best = logits.view(len(embeddings), -1, weight.shape[1]).max(-1)
        best = best[..., None]
    return logits, rows, lengths, best


def _set_own(values: Tensor, labels: Tensor, block: slice, value: float) -> Tensor:
    """Set, in place, the values (B, n) of a block of classes at the own class of each example."""
    columns = labels - block.start
    inside = (columns >= 0) & (columns < values.shape[1])
    at = columns.clamp_(0, values.shape[1] - 1)[:, None]
    return values.scatter_(1, at, values.gather(1, at).masked_fill_(inside[:, None], value))


def log_class_sum(
    direction: Tensor,
    cosine: Tensor,
    sine: Tensor,
    tangents: Tensor,
    class_vectors: Tensor,
    inverse_temperature: Tensor,
    labels: Tensor | None,
    *,
    recompute: bool = False,
) -> tuple[Tensor, Any]:
    """Sum over the classes of the von Mises-Fisher softmax: `logsumexp_k [log C(|w_k|) - log C(|w_k + beta x|)]`.

    A term is the log-mean of exp(beta x.y) over samples y of class k. The S samples x of each distribution are given
    relative to its mean direction, `x = cosine * mu +- sine * v`, and never materialized: their dot products with the
    class vectors follow from those of mu and v. The noise v rotates rigidly with mu, so its gradient requires no
    further product.

    The inputs are mu, (B, d), float32 or float64; cosines and sines, (S, B); v, orthogonal to mu, (ceil(S/2), B, d),
    negated for the second half of the samples; w, mean direction times concentration, (K, d); the scalar beta; and the
    labels, (B,), outside 0..K-1 for none of these classes, None if their weights are not needed. With `recompute`, the
    backward pass computes the blocks of classes again instead of saving them, almost three matrices (S B, K). Returned
    are the sums, (S, B), and the weights of the own classes, (B, d), zero where there is none, or None. Once
    differentiable.
    """
    return _LogClassSum.apply(direction, cosine, sine, tangents, class_vectors, inverse_temperature, labels, recompute)


class _LogClassSum(torch.autograd.Function):
    """The log-sum-exp of the terms `t_k = G(u_k) - G(|w_k|^2)`, with the log-partition function G.

    Here `u_k = |w_k + beta x|^2 = |w_k|^2 + beta^2 + 2 beta w_k.x`, and `w.x = c w.mu + s w.v` with the cosine c and
    the sine s, negative in the second half of the samples. The samples with a tangent v are computed as one small
    matrix product: of their coefficients (beta c, beta s), (2, 2), with the products w.mu and w.v, (2, K).

    The derivative with respect to t_k is the softmax p_k, and `dG/du` is half of the ratio `r = A(kappa) / kappa` at
    `kappa^2 = u`. With `q_k = p_k r_k`, twice the derivative with respect to u_k, the gradient of the coefficients is
    the sum over k of q_k times the products, and that of the products the sum over the samples of q_k times the
    coefficients, from which follow those of mu and w_k; w_k besides has `(q_k - p_k r(|w_k|)) w_k`, and beta
    `beta sum_k q_k`.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        direction, cosine, sine, tangents, weights, beta, labels, recompute = arguments
        if len(cosine) % len(tangents):  # an odd number of samples: each gets a tangent
            tangents = torch.cat([tangents, -tangents[: len(cosine) - len(tangents)]])
        signs = _signs(len(cosine) // len(tangents), cosine.dtype, cosine.device)
        samples = torch.stack([cosine, sine], dim=-1).unflatten(0, (-1, len(tangents))).permute(1, 2, 0, 3) * signs
        inputs = direction, tangents, samples * beta, weights, beta
        saved: list[Tensor] = []
        sums = []
        for block in class_blocks(len(weights), cosine.numel(), cosine.device, SAMPLE_BLOCK):
            block_sums, *others = _sample_block(inputs, block)
            sums.append(block_sums)
            saved += [] if recompute else [block_sums, *others]
        result = sums[0] if len(sums) == 1 else torch.stack(sums).logsumexp(0)
        ctx.save_for_backward(*inputs, samples, labels, result, *saved)
        ctx.set_materialize_grads(False)
        return result.permute(2, 0, 1).flatten(0, 1), None if labels is None else own_rows(weights, labels)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_sums: Tensor | None, grad_own: Tensor | None) -> tuple[Tensor | None, ...]:
        direction, tangents, coefficients, weights, beta, samples, labels, sums, *saved = ctx.saved_tensors
        inputs = direction, tangents, coefficients, weights, beta
        if grad_sums is None:
            grad_sums = torch.zeros_like(sums)
        else:
            grad_sums = grad_sums.unflatten(0, (-1, len(tangents))).permute(1, 2, 0)
        grad_weights = torch.empty_like(weights)
        totals: list[Tensor] = []
        blocks = list(class_blocks(len(weights), sums.numel(), sums.device, SAMPLE_BLOCK))
        for index, block in enumerate(blocks):
            block_sums, *values = saved[4 * index : 4 * index + 4] or _sample_block(inputs, block)
            slopes, excess, products = values
            factors = grad_sums if len(blocks) == 1 else grad_sums * (block_sums - sums).exp()  # of p and q
            grad_coefficients = (slopes @ products.mT).mul_(factors[..., None])
            grad_along, grad_across = ((coefficients * factors[..., None]).mT @ slopes).unbind(2)
            grad_along = grad_along.sum(0)
            rows = weights[block]
            flat = factors.flatten()
            outer = torch.mul((flat @ excess.flatten(0, 2))[:, None], rows, out=grad_weights[block])
            outer.addmm_(grad_along.T, direction).addmm_(grad_across.flatten(0, 1).T, tangents.flatten(0, 1))
            parts = [grad_along @ rows, grad_coefficients, (flat @ slopes.flatten(0, 2)).sum()]
            totals = [total.add_(part) for total, part in zip(totals, parts, strict=True)] if totals else parts
        grad_direction, grad_coefficients, total = totals
        # A rotation of mu rotates v as well: dx = w dmu - s (v.dmu) mu. This preserves the distribution;
        # differentiating the construction of v from noise would only add noise of zero mean.
        turns = (grad_coefficients[..., :1].mT @ coefficients[..., 1:])[..., 0].permute(1, 2, 0)  # (B, 1, T)
        grad_direction = torch.baddbmm(grad_direction[:, None], turns, tangents.transpose(0, 1), alpha=-1)[:, 0]
        grad_beta = torch.addcmul((grad_coefficients * samples).sum(), beta, total)
        grad_samples = grad_coefficients.mul_(beta) * _signs(samples.shape[2], samples.dtype, samples.device)
        grad_cosine, grad_sine = (grad.permute(2, 0, 1).flatten(0, 1) for grad in grad_samples.unbind(-1))
        if grad_own is not None:
            add_to_own_rows(grad_weights, labels, grad_own)
        return grad_direction, grad_cosine, grad_sine, None, grad_weights, grad_beta, None, None


def _sample_block(inputs: Sequence[Tensor], block: slice) -> tuple[Tensor, ...]:
    """Return the sums over a block of n classes, (T, B, S / T), and what their gradients are computed from.

    That are q and `q - p r(|w|)`, (T, B, S / T, n), and the products, (T, B, 2, n), for T tangents.
    """
    direction, tangents, coefficients, weights, beta = inputs
    rows = weights[block]
    across = tangents @ rows.T
    products = torch.stack([(direction @ rows.T).expand_as(across), across], dim=2)
    own = torch.linalg.vector_norm(rows, dim=1).square()
    base = torch.addcmul(own, beta, beta)
    squares = torch.baddbmm(base, coefficients.flatten(0, 1), products.flatten(0, 1), alpha=2)  # u
    # The own squares are evaluated together with the others. Rounding must not make these negative.
    together = torch.cat([squares.flatten(0, 1), own[None]]).clamp_min_(0)
    partition, ratio = partition_and_ratio(together, weights.shape[1])
    terms = partition[:-1].sub_(partition[-1]).unflatten(0, coefficients.shape[:-1])
    softmax = terms.softmax(-1)
    slopes = ratio[:-1].view_as(terms).mul_(softmax)
    sums = terms.amax(-1) - softmax.amax(-1).log()
    # Subtracted before they are summed: the sums are often almost equal.
    return sums, slopes, torch.addcmul(slopes, softmax, ratio[-1], value=-1), products


@cache_outside_graphs
def _signs(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Signs of cosine and sine of one or two samples with a tangent, (1 or 2, 2)."""
    index = torch.arange(2, dtype=dtype, device=device)
    return 1 - 2 * index[:count, None] * index
