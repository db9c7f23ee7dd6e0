"""The loss of all examples of an optimizer step together, whose batches are encoded one by one; see `cached_step`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from hf_sphere.losses.cached import step_in_chunks, warn_of_batch_norm
from hf_sphere.losses.pairs import SupConLoss
from hf_sphere.nn import Head, HeadOutput, PoleRegression
from hf_sphere.nn.heads.base import heads_of
from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.training.evaluation import Batch, global_places, inputs_of, loss_is_sum


def find_head(model: nn.Module, option: str) -> Head:
    """Return the head that computes the loss of a model; raise a `ValueError` that names an option if there is none."""
    heads = heads_of(model)
    if len(heads) != 1 or any(isinstance(module, PoleRegression) for module in model.modules()):
        raise ValueError(f"{option} is for models with the loss of one head, such as image classifiers.")
    return heads[0]


def add_supcon(model: nn.Module, weight: float) -> None:
    """Add SupConLoss of the embeddings, times a weight, to the loss of the head of a model in training."""
    supcon = SupConLoss()

    def add(head: Any, inputs: Any, options: Any, output: Any) -> Any:
        if not head.training or output.loss is None:
            return output
        if "mixed_labels" in options:
            raise ValueError("supcon_weight has no loss of mixed images; leave out mixup and cutmix.")
        return replace(output, loss=output.loss + weight * supcon(output.embeddings, inputs[1]))

    if loss_is_sum(model):
        raise ValueError("supcon_weight is for a mean loss; leave out the loss_reduction sum.")
    find_head(model, "supcon_weight").register_forward_hook(add, with_kwargs=True)


def batches_per_step(model: nn.Module, pair_batch: int, batch_size: int, args: Any, accelerator: Accelerator) -> int:
    """Return the number of batches of a process in a step, or raise a `ValueError` if `pair_batch` does not fit."""
    find_head(model, "pair_batch")
    count, rest = divmod(pair_batch, batch_size * accelerator.num_processes)
    if rest or not count:
        sizes = f"{batch_size} examples, on {accelerator.num_processes} process(es)"
        raise ValueError(f"pair_batch must be a multiple of the batches of {sizes}; got {pair_batch}.")
    is_sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    is_divided = args.gradient_accumulation_steps not in (1, count) or getattr(args, "n_gpu", 1) > 1
    if is_sharded or is_divided or args.torch_compile:
        others = "gradient_accumulation_steps, torch_compile, DataParallel, FSDP or DeepSpeed"
        raise ValueError(f"pair_batch cannot be combined with {others}; use only one of them.")
    return count


def backward_together(
    model: nn.Module,
    batches: Sequence[Batch],
    accelerator: Accelerator,
    seed: int,
    together: int,
    weight: float = 1.0,
    loss_func: Callable[..., Tensor] | None = None,
) -> tuple[Any, Batch]:
    """Fill the gradients of `weight` times the loss of all examples of some batches, averaged over processes.

    It is the loss of the head, with `seed` and `together` for `before_forward`, or `loss_func` of its embeddings and
    the labels. Returned are the output of the head and the labels.
    """
    inner: Any = accelerator.unwrap_model(model)
    (head,), names = heads_of(inner), {"mixed_labels", "mixed_share"} & batches[0].keys()
    labels = torch.cat([batch["labels"] for batch in batches])
    mixed = {name: torch.cat([batch[name] for batch in batches]) for name in names}
    output: Any = None

    def compute_loss(embeddings: Tensor) -> Tensor:
        nonlocal output
        head.before_forward(seed, global_places(together, 0, {"labels": labels}, accelerator))
        with accelerator.autocast():
            if loss_func is None:
                head.warn_if_divided(1, accelerator.num_processes)
                output = getattr(inner, "apply_head", head)(embeddings, labels, **mixed)
            elif mixed:
                raise ValueError("compute_loss_func has no loss of mixed images; leave out mixup and cutmix.")
            else:
                output = HeadOutput(None, loss_func({"embeddings": head.transform(embeddings)}, labels))
        loss = output.loss * weight
        return loss if accelerator.scaler is None else accelerator.scaler.scale(loss)

    warn_of_batch_norm(inner)
    # Not through DistributedDataParallel, which expects gradients of the head in each backward pass.
    step_in_chunks(partial(inputs_of, head, inner, forward=inner.forward), compute_loss, batches)
    for name, parameter in inner.named_parameters() if accelerator.num_processes > 1 else ():
        if parameter.grad is not None and name not in class_shards(inner):
            parameter.grad = accelerator.reduce(parameter.grad, "mean")
    return output, {"labels": labels}
