"""Losses of pairs of embeddings, in blocks: exact, with memory linear in the batch size, and on several processes."""

import logging
import math
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.checks import IGNORED, check_integers, is_readable
from hf_sphere.geometry.decorators import WithGradients, opaque
from hf_sphere.nn.class_softmax import BLOCK, class_blocks, sum_over_other_classes
from hf_sphere.nn.heads.base import Head
from hf_sphere.nn.labels import require
from hf_sphere.nn.layers import read_scalar, register_scalar
from hf_sphere.nn.processes import Exchange, count_processes, scale_gradient
from hf_sphere.utils.checks import check_number

logger = logging.getLogger(__name__)

HOW_TO_PAIR = "For pairs (a, b), pass torch.cat([a, b]) and the labels torch.arange(len(a)).repeat(2)."


class PairLoss(nn.Module):
    """Base class of losses of the cosines between normalized embeddings, divided by a temperature.

    The embeddings are compared with those of all processes of the default group, which may have batches of different
    sizes. The mean of the losses, and of the gradients, over the processes is that of one process with all examples.
    Cosines are computed in blocks, again in the backward pass, in float32 or better.

    Args:
        temperature: Positive; the initial one if it is learned.
        learn_temperature: Whether its logarithm is a parameter.

    Raises:
        ValueError: If the temperature is not positive, or shapes of embeddings and labels do not match.
        TypeError: If the labels are no integers.
    """

    log_temperature: Tensor

    def __init__(self, temperature: float, learn_temperature: bool) -> None:
        super().__init__()
        self.initial_log_temperature = math.log(check_number("temperature", temperature, "(0, inf)"))
        register_scalar(self, "log_temperature", self.initial_log_temperature, learn_temperature)

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: None = None) -> Tensor:
        """Compute the scalar loss of embeddings (B, d) with labels (B,), where examples with -100 are ignored.

        `indices_tuple` is for the trainers of pytorch-metric-learning, without a miner.
        """
        if indices_tuple is not None:
            raise ValueError(f"{type(self).__name__} uses all pairs of a batch; leave out indices_tuple, the miner.")
        if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
            shapes = f"{tuple(embeddings.shape)} and {tuple(labels.shape)}"
            raise ValueError(f"embeddings and labels must have the shapes (B, d) and (B,); got {shapes}. {HOW_TO_PAIR}")
        check_integers(labels)
        labels = labels.long()  # as uint8, the class 156 would equal -100
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings = embeddings.masked_fill((labels == IGNORED)[:, None], 0.0)  # they may not be finite
            return self.compute_loss(Head.normalize(embeddings), labels)

    @abstractmethod
    def compute_loss(self, points: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of unit vectors (B, d), float32 or better, with labels (B,)."""

    def extra_repr(self) -> str:
        """Describe the loss in a printed model."""
        learned = ", learned" if isinstance(self.log_temperature, nn.Parameter) else ""
        return f"temperature={self.log_temperature.exp().item():.4g}{learned}"

    def scale(self, points: Tensor) -> Tensor:
        """Divide unit vectors by the temperature."""
        log_temperature = read_scalar(self, "log_temperature", self.initial_log_temperature, points.dtype)
        return points * log_temperature.neg().exp()


class SupConLoss(PairLoss):
    """Supervised contrastive loss: the mean cross-entropy of an example's positives among all other examples.

    Positives of an example are the others with its label. Examples without any have no loss of their own; a batch
    without positives has the loss 0.

    Args:
        temperature: See `PairLoss`.
        learn_temperature: See `PairLoss`.

    Reference:
        Khosla et al., "Supervised contrastive learning", NeurIPS 2020, equation 2.

    Example:
        >>> SupConLoss(temperature=0.1)(embeddings, labels).shape
        torch.Size([])
    """

    def __init__(self, temperature: float = 0.1, *, learn_temperature: bool = False) -> None:
        super().__init__(temperature, learn_temperature)
        self._may_warn = True

    def compute_loss(self, points: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean over all examples that have positives."""
        others, rows = gather_points(points)
        return self.compare(points, others, Exchange(labels, shared=True).gather(labels), rows, len(others))

    def compare(self, points: Tensor, others: Tensor, labels: Tensor, rows: slice, count: int) -> Tensor:
        """Compute the mean over the examples with positives among the first `count` of all others (N, d), labels (N,).

        The points (B, d) of this process are at `rows` of the others.
        """
        used = labels != IGNORED
        group, counts = _group(labels)
        positives = torch.where(used, counts[group] - 1, 0)
        total = (positives[:count] > 0).sum()
        if not torch.compiler.is_compiling() and self._may_warn:
            # Reading it synchronizes another device: only for the first batch there.
            is_useless = bool((total == 0) | (positives + 1 == used.sum()).any())
            self._may_warn = is_readable(labels) and not is_useless
            if is_useless:
                text = "A batch has no two examples with the same label, or only one label, so that its SupConLoss "
                logger.warning(text + "separates no classes; sample several examples per class (P x K sampling).")
        # The sum over positives follows from that over the class, so that only the log-sum-exp needs all pairs.
        of_class = torch.zeros_like(others[: len(counts)]).index_add(0, group, others)
        queries, positives = self.scale(points), positives[rows]
        attraction = (queries * (of_class[group[rows]] - points)).sum(-1) / positives.clamp_min(1)
        ignored = torch.where(used, 0.0, -torch.inf).to(points.dtype)
        positions = torch.arange(rows.start, rows.stop, device=points.device)
        log_sum = sum_over_other_classes(queries, others, ignored, positions)[0]
        losses = torch.where(positives > 0, log_sum - attraction, 0.0)
        return losses.sum() * (count_processes() / total.clamp_min(1).to(losses.dtype))  # float32 without the dtype


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
        ValueError: If a batch is larger than the memory, or `torch.utils.checkpoint` computes the loss again.

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
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0:  # in a backward pass
            raise ValueError("a checkpoint computes the loss again when the memory has changed; leave it out.")
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


class InfoNCELoss(PairLoss):
    """Symmetric cross-entropy of the partner of each example among the partners of all, as in CLIP.

    A batch consists of pairs, two examples with the same label each, for instance two views of an image. Each example
    is compared with the second ones of all pairs if it is the first of its own, and otherwise with the first ones. A
    label on several processes means a different pair on each.

    Args:
        temperature: See `PairLoss`.
        learn_temperature: See `PairLoss`.

    Raises:
        ValueError: If a label has not exactly two examples.

    Reference:
        van den Oord, Li and Vinyals, "Representation learning with contrastive predictive coding", 2018; symmetric and
        with a learned temperature as in Radford et al., "Learning transferable visual models from natural language
        supervision", ICML 2021.

    Example:
        >>> InfoNCELoss()(embeddings, torch.arange(60) // 2).shape
        torch.Size([])
    """

    def __init__(self, temperature: float = 0.07, *, learn_temperature: bool = True) -> None:
        super().__init__(temperature, learn_temperature)

    def compute_loss(self, points: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean over all examples, without a device synchronization."""
        if len(labels) % 2:
            points, labels = F.pad(points, (0, 0, 0, 1)), F.pad(labels.long(), (0, 1), value=IGNORED)
        labels, order = labels.long().sort(stable=True)
        last = (labels == IGNORED).sort(stable=True)[1]  # ignored examples after all others
        order, pairs = order[last], labels[last].unflatten(0, (-1, 2))
        used = pairs[:, 0] != IGNORED
        is_paired = (pairs[:, 0] == pairs[:, 1]).all() & ((pairs[1:, 0] != pairs[:-1, 1]) | ~used[1:]).all()
        got = ""
        if is_readable(labels) and not is_paired:
            got = f"; got {labels[labels != IGNORED].unique(return_counts=True)[1].unique().tolist()}"
        require(is_paired, f"{type(self).__name__} needs exactly two examples of each label{got}. {HOW_TO_PAIR}")
        first, second = points[order].unflatten(0, (-1, 2)).unbind(1)
        ignored = torch.where(used, 0.0, -torch.inf).to(points.dtype)
        ignored = Exchange(ignored, shared=True).gather(ignored)
        total = self.compare(first, second, used, ignored)
        return total * (count_processes() / (ignored == 0.0).sum().clamp_min(1).to(total.dtype))

    def compare(self, first: Tensor, second: Tensor, used: Tensor, ignored: Tensor) -> Tensor:
        """Sum the losses of pairs (N, d) that are `used` (N,); `ignored` (M,) is -inf for others, of all processes."""
        return (self._match(first, second, used, ignored) + self._match(second, first, used, ignored)) / 2

    def _match(self, points: Tensor, partners: Tensor, used: Tensor, ignored: Tensor) -> Tensor:
        """Sum the cross-entropies of the partners (N, d) of points (N, d) among those of all processes."""
        all_partners, rows = gather_points(partners)
        queries, positions = self.scale(points), torch.arange(rows.start, rows.stop, device=points.device)
        log_sum = sum_over_other_classes(queries, all_partners, ignored, positions)[0]
        return torch.where(used, -F.logsigmoid((queries * partners).sum(-1) - log_sum), 0.0).sum()


class SigLIPLoss(InfoNCELoss):
    """Binary cross-entropy of whether examples form a pair, for all first and second examples; see `InfoNCELoss`.

    The logit is the cosine, divided by the temperature, plus a bias; both are learned. The losses of a pair with the
    second examples of all pairs are summed.

    Args:
        temperature: The initial one.
        bias: The initial bias.

    Raises:
        ValueError: If a label has not exactly two examples.

    Reference:
        Zhai et al., "Sigmoid loss for language image pre-training", ICCV 2023, with its initial values.

    Example:
        >>> SigLIPLoss()(embeddings, torch.arange(60) // 2).shape
        torch.Size([])
    """

    def __init__(self, temperature: float = 0.1, bias: float = -10.0) -> None:
        super().__init__(temperature)
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    def compare(self, first: Tensor, second: Tensor, used: Tensor, ignored: Tensor) -> Tensor:
        """See `InfoNCELoss.compare`."""
        others, rows = gather_points(second)
        queries, bias = self.scale(first), self.bias.to(first.dtype)
        positions = torch.where(used, torch.arange(rows.start, rows.stop, device=first.device), -1)
        inputs = queries, others, bias + ignored
        return WithGradients.apply(*_sum_pairs(*(value.detach() for value in inputs), positions), *inputs)


@opaque(lambda x, *others: (x.new_empty(()), *map(torch.empty_like, (x, *others[:2]))))
def _sum_pairs(points: Tensor, others: Tensor, bias: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum the binary cross-entropies of logits `x.y + b` of points whose partners are at `own`, -1 for none."""
    total, used = points.new_zeros(()), (own >= 0)[:, None]
    grad_points, grad_others, grad_bias = map(torch.zeros_like, (points, others, bias))
    for block in class_blocks(len(others), len(points), points.device, BLOCK):
        logits = torch.addmm(bias[block], points, others[block].T)
        is_pair = own[:, None] == torch.arange(block.start, block.stop, device=own.device)
        total -= F.logsigmoid(torch.where(is_pair, logits, -logits)).mul_(used).sum()
        grad_logits = torch.where(is_pair, -(-logits).sigmoid(), logits.sigmoid()).mul_(used)
        grad_points.addmm_(grad_logits, others[block])
        grad_others[block] = grad_logits.T @ points
        grad_bias[block] = grad_logits.sum(0)
    return total, grad_points, grad_others, grad_bias


def _group(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the group (N,) of each label, and the size of each, 0 after the last: (N,); `unique` would synchronize."""
    labels, order = labels.sort()
    changes = F.pad(labels[1:] != labels[:-1], (1, 0)) if len(labels) else labels
    groups = torch.empty_like(order).scatter_(0, order, changes.cumsum(0))
    return groups, torch.zeros_like(order).index_add(0, groups, torch.ones_like(order))


def gather_points(points: Tensor) -> tuple[Tensor, slice]:
    """Gather points (B, d) of all processes, with the sum of their gradients, and the place of this process's."""
    exchange = Exchange(points, shared=True)
    return scale_gradient(exchange.gather(points), 1 / count_processes()), exchange.own
