"""The interface of batches, and the number of targets that the loss of a batch averages over."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

Batch = dict[str, Tensor]


class Batches(Protocol):
    """The interface that the training loop and the evaluation require.

    If the loss averages over something other than examples, such as the tokens of a language model, the class also has
    a method `num_targets(batch)` that returns their number. If processes get several examples at a time in turn, as
    with episodes, it has their number as `dealt_together`.
    """

    def __len__(self) -> int: ...

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, starting with batch `start`."""
        ...


def counts_targets(batches: Batches) -> bool:
    """Whether batches define the number of targets that their loss averages over."""
    return hasattr(batches, "num_targets")


def count_targets(batches: Batches, batch: Batch) -> int | Tensor:
    """Return the number of targets that the loss of a batch averages over; by default, the number of examples."""
    any_batches: Any = batches
    return any_batches.num_targets(batch) if counts_targets(batches) else count_examples(batch)


def global_places(batches: Batches | None, start: int, batch: Batch, accelerator: Accelerator | PartialState) -> Tensor:
    """Return the place of each example of a batch among all examples of an optimizer step, over all processes.

    Args:
        batches: The batches; they define how examples are dealt to processes. One at a time if None.
        start: Examples in earlier batches of the same step, on this process.
        batch: The batch.
        accelerator: Device, index and number of processes.

    Returns:
        int64, (B,), on the device of the accelerator.
    """
    together = getattr(batches, "dealt_together", 1)
    own = torch.arange(start, start + count_examples(batch), device=accelerator.device)
    turn = (own // together) * accelerator.num_processes + accelerator.process_index
    return turn * together + own % together


def count_examples(batch: Batch) -> int:
    """Return the number of examples of a batch."""
    return len(next(iter(batch.values())))


def loss_is_sum(model: nn.Module) -> bool:
    """Whether a model's loss is the sum over the batch instead of the mean."""
    return getattr(model, "loss_reduction", "mean") == "sum"
