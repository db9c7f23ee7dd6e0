"""The loss of one of the batches of an optimizer step, as the Trainer of transformers accumulates it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hf_sphere.geometry.checks import IGNORED


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
        count, total = (labels != IGNORED).sum(), torch.as_tensor(num_items_in_batch, device=labels.device)
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

    return wrapped
