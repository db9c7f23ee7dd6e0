"""How processes share the examples of a training epoch: each gets the same number."""

import logging
import math

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def shuffled(count: int, seed: int, num_processes: int, weights: Tensor | None = None) -> Tensor:
    """Return a random order of examples, repeated from its start so that it divides evenly among processes.

    With `weights` (`count`,), as many examples are drawn with replacement, with probabilities proportional to these.
    """
    generator = torch.Generator().manual_seed(seed)
    if weights is None:
        order = torch.randperm(count, generator=generator)
    else:
        order = weights.multinomial(count, replacement=True, generator=generator)
    total = math.ceil(count / num_processes) * num_processes
    return order.repeat(math.ceil(total / count))[:total]


def log_repetition(used: int, count: int, what: str) -> None:
    """Log a message if an epoch uses more examples or episodes than there are."""
    if used > count:
        logger.info(
            "Each epoch repeats %d of %d %s, so that every process gets equally many.", used - count, count, what
        )
