"""A loss of pairs that also compares the examples of a batch with those of earlier batches."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_sphere.geometry.checks import IGNORED
from hf_sphere.losses.pairs import SupConLoss, gather_points
from hf_sphere.nn.processes import Exchange


class CrossBatchSupConLoss(SupConLoss):
    """`SupConLoss` of a batch with a memory of earlier embeddings.

    In training, the embeddings of all processes replace the oldest ones in the memory after their loss, so the first
    batch has the value of `SupConLoss`. An example that occurs again while it is in the memory is its own
    positive. Embeddings in the memory have no gradient. In eval mode, the memory is not used.

    Args:
        embedding_dim: Length d of the embeddings.
        size: Number of embeddings in the memory, at least the batch of all processes; `state_dict` has them.
        **options: See `SupConLoss`.

    Raises:
        ValueError: If a batch is larger than the memory.

    Reference:
        Wang et al., "Cross-batch memory for embedding learning", CVPR 2020.

    Example:
        >>> CrossBatchSupConLoss(4, size=4096)(embeddings, labels).shape
        torch.Size([])
    """

    def __init__(self, embedding_dim: int, size: int, **options: Any) -> None:
        super().__init__(**options)
        self.memory, self.memory_labels, self.position = (
            nn.Buffer(torch.zeros(size, embedding_dim)),
            nn.Buffer(torch.full((size,), IGNORED)),
            nn.Buffer(torch.zeros((), dtype=torch.int64)),
        )

    def compute_loss(self, points: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean over the examples of the batch with positives in the batch or the memory."""
        if not self.training:
            return super().compute_loss(points, labels)
        others, rows = gather_points(points)
        count, size, labels = len(others), len(self.memory), Exchange(labels, shared=True).gather(labels).long()
        if count > size:
            raise ValueError(f"a memory of {size} embeddings is smaller than a batch of {count}; increase its size.")
        all_points = torch.cat([others, self.memory.to(others.dtype)])
        loss = self.compare(points, all_points, torch.cat([labels, self.memory_labels]), rows, count)
        replaced = (self.position + torch.arange(count, device=labels.device)) % size
        self.memory.index_copy_(0, replaced, others.detach().to(self.memory.dtype))
        self.memory_labels.index_copy_(0, replaced, labels)
        self.position.add_(count).remainder_(size)
        return loss
