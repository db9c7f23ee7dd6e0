"""The loss of all examples of an optimizer step together, whose batches are encoded one by one; see `cached_step`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from hf_sphere.losses.cached import step_in_chunks
from hf_sphere.nn import HeadOutput, PoleRegression
from hf_sphere.nn.heads.base import heads_of
from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.training.evaluation import Batch, global_places, inputs_of


def batches_per_step(model: nn.Module, pair_batch: int, batch_size: int, args: Any, accelerator: Accelerator) -> int:
    """Return how many batches of a process are `pair_batch` examples; a `ValueError` says what it does not allow."""
    if len(heads_of(model)) != 1 or any(isinstance(module, PoleRegression) for module in model.modules()):
        raise ValueError("pair_batch is for models whose loss is that of one head, such as image classifiers.")
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
    """Fill the gradients of the loss of all examples of some batches, averaged over processes.

    The loss is that of the head, or `loss_func` of its embeddings and the labels, times `weight`. Returned are the
    output of the head and the labels. `seed` and `together` are for `before_forward`; see `Head` and `global_places`.
    """
    inner: Any = accelerator.unwrap_model(model)
    (head,), labels = heads_of(inner), torch.cat([batch["labels"] for batch in batches])
    outputs: list[Any] = []

    def compute_loss(embeddings: Tensor) -> Tensor:
        head.before_forward(seed, global_places(together, 0, {"labels": labels}, accelerator))
        with accelerator.autocast():
            if loss_func is None:
                head.warn_if_divided(1, accelerator.num_processes)
                outputs.append(head(embeddings, labels))
            else:
                outputs.append(HeadOutput(None, loss_func({"embeddings": head.transform(embeddings)}, labels)))
        loss = outputs[0].loss * weight
        return loss if accelerator.scaler is None else accelerator.scaler.scale(loss)

    # Not through DistributedDataParallel, which expects gradients of the head in each backward pass.
    step_in_chunks(partial(inputs_of, head, inner, forward=inner.forward), compute_loss, batches)
    shards = class_shards(inner)
    for name, parameter in inner.named_parameters() if accelerator.num_processes > 1 else ():
        if parameter.grad is not None and name not in shards:
            parameter.grad = accelerator.reduce(parameter.grad, "mean")
    return outputs[0], {"labels": labels}
