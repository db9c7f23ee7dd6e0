"""Losses of mixed images, with shares of one or two classes as by mixup and CutMix, and of accumulated batches."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_sphere.geometry.checks import IGNORED, is_readable

logger = logging.getLogger(__name__)


def reduce_mixed_loss(
    head: Any,
    embeddings: Tensor,
    logits: Tensor | None,
    labels: Tensor | None,
    mixed_labels: Tensor | None,
    mixed_share: Tensor | None,
) -> Tensor:
    """Compute the mean or sum of the losses of examples with two labels each; see `Head.forward`."""
    shapes = [None if each is None else tuple(each.shape) for each in (labels, mixed_labels, mixed_share)]
    if labels is None or mixed_labels is None or mixed_share is None or labels.ndim != 1 or len({*shapes}) > 1:
        raise ValueError(f"mixed images need labels, mixed_labels and mixed_share, each of shape (B,); got {shapes}.")
    require(((mixed_share >= 0) & (mixed_share <= 1)).all(), "mixed_share must be from 0 to 1.")
    head.check_labels(mixed_labels)
    if head.compares_examples():
        raise ValueError(f"head {head.name!r} compares the images of a batch, and has no loss of mixed ones.")
    # At once, so that both labels have the same random numbers, and both classes are among sampled ones.
    both = torch.cat([labels, mixed_labels.long()])
    losses = head.used_losses(torch.cat([embeddings] * 2), None if logits is None else torch.cat([logits] * 2), both)
    shares = torch.cat([1 - mixed_share, mixed_share]).to(losses.dtype)
    total = torch.dot(losses, shares)
    if head.reduction == "sum":
        return total
    return total / shares.masked_fill(both == IGNORED, 0.0).sum().clamp_min(torch.finfo(shares.dtype).tiny)


def pop_mixed(options: dict[str, Any]) -> dict[str, Any]:
    """Remove `mixed_labels` and `mixed_share` from the options of a model's forward pass, and return them.

    If they were its parameters, the Trainer would take both for labels and evaluate no batch without them.
    """
    names = options.keys() & {"mixed_labels", "mixed_share"}
    return dict(zip(names, map(options.pop, names), strict=True))


def refuse_mixed(options: Mapping[str, Any]) -> None:
    """Raise an error if the options of a model or head without a loss of mixed images have their labels."""
    if options.get("mixed_labels") is not None or options.get("mixed_share") is not None:
        raise ValueError("mixed images need a model with a head for classes, one of `hf_sphere.nn.HEADS`.")


def divide_soft_labels(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes of labels (B, K) with the largest and second largest fraction, and the latter, each (B,)."""
    shares, classes = labels.to(torch.promote_types(labels.dtype, torch.float32)).topk(min(2, labels.shape[1]), dim=1)
    is_complete = ((shares.sum(1) - 1).abs() < 4e-3).all() & (labels >= 0).all()  # rounding of bfloat16
    needed = "labels (batch,), or soft labels with the sum 1 of one or two classes; smooth labels by the head"
    require(is_complete, f"problem_type 'single_label_classification' requires {needed}.")
    return classes[:, 0], classes[:, -1], shares[:, -1] if labels.shape[1] > 1 else 0 * shares[:, 0]


def refuse_soft_labels(labels: Tensor) -> None:
    """Raise an error if labels (B, K) look like shares of classes: fractions with the sum 1 in every row."""
    is_fractional = ((labels > 0) & (labels < 1)).any()
    message = (
        "labels with fractions that add up to 1 are mixed images, or several classes per image with "
        "probabilities; set problem_type of the model to single_label_classification or multi_label_classification."
    )
    require(~(is_fractional & ((labels.sum(1) - 1).abs() < 1e-3).all()), message)


def require(condition: Tensor, message: str) -> None:
    """Raise a `ValueError` unless the condition holds, or have another device raise an error later."""
    if not is_readable(condition):
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


def find_targets(labels: Tensor) -> Tensor:
    """Return where labels are targets: not -100, but also the value -100, and class 156 as uint8, which equals it."""
    return (labels.long() != IGNORED) | labels.is_floating_point()


def weighted_by_targets(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `forward` of a model whose loss is a mean over its targets, so that it takes `num_items_in_batch`.

    The Trainer passes this number of targets, labels other than -100, of an optimizer step. The loss is then the
    contribution of the batch to the mean over them. A loss that is a sum needs no weight.
    """
    position = list(inspect.signature(forward).parameters).index("labels") - 1  # not counting `self`

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        labels = args[position] if len(args) > position else kwargs.get("labels")
        if num_items_in_batch is None or labels is None:
            return output
        count, total = find_targets(labels).sum(), torch.as_tensor(num_items_in_batch, device=labels.device)
        if self.training and not torch.compiler.is_compiling():
            _warn_of_uncounted(self, labels, count, total)
        total = total.maximum(count)  # the Trainer omits some targets
        warn_if_divided = getattr(getattr(self, "head", None), "warn_if_divided", None)  # some encoders' head has none
        if self.training and warn_if_divided is not None:
            warn_if_divided(count, total)
        if any(getattr(module, "reduction", "mean") == "sum" for module in self.children()):
            return output
        wide = torch.promote_types(output[0].dtype, torch.float32)
        # The mean over no targets is NaN in the plain encoders.
        loss = torch.where(count > 0, output[0], 0.0) * (count.to(wide) / total.clamp_min(1))
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output.loss = loss
        return output

    wrapped.has_targets = True  # type: ignore[attr-defined]
    return wrapped


def _warn_of_uncounted(model: Any, labels: Tensor, count: Tensor, total: Tensor) -> None:
    """Log a message, once, if a Trainer omits targets of a batch in the total of a step that has other batches."""
    if getattr(model, "are_targets_counted", False) or not (labels.is_floating_point() or labels.dtype == torch.uint8):
        return
    counted = labels.ne(IGNORED).sum()
    if ((counted < count) & (counted != total)).any():
        model.are_targets_counted = True
        what = "labels of -100 (a value, or 156 as uint8)"
        logger.warning(
            f"The Trainer does not count {what}, so a step on several batches is too large. Use SphereTrainer."
        )
