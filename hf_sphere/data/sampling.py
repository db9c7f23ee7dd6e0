"""The order of the examples of an epoch: random, or episodes of P classes with K images each (P x K sampling)."""

import logging
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hf_sphere.utils.checks import check_integer
from hf_sphere.utils.seeds import mix_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Episodes:
    """P x K sampling: an epoch is a list of episodes with K images each of P classes.

    Attributes:
        classes: Number of classes in an episode, P.
        examples: Images per class, K.
        count: Episodes per epoch, over all processes.
        per_batch: Episodes per batch and process; the last batch of an epoch may have fewer.
        distinct: Raise an error if a class has fewer than `examples` images, instead of repeating images in an episode.
        origin: Sentence for error messages that names the options that set these numbers.
    """

    classes: int
    examples: int
    count: int
    per_batch: int = 1
    distinct: bool = False
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("classes", "examples", "count", "per_batch"):
            check_integer(f"{name} of episodes", getattr(self, name), 1)

    @property
    def size(self) -> int:
        """Images in an episode."""
        return self.classes * self.examples

    @property
    def batch_size(self) -> int:
        """Images in a batch."""
        return self.size * self.per_batch


@dataclass(eq=False, repr=False)
class EpisodeSampler(Sampler[list[int]]):
    """Samples episodes, with the images of a class contiguous; usable as `batch_sampler` of a `DataLoader`.

    The classes of an episode are distinct, and so are the images of a class, unless it has too few of them. That is an
    error if `episodes.distinct` is set. Otherwise a warning is logged, and the images are repeated equally often, up to
    a difference of one. An episode is determined only by `seed`, the epoch and its number. Processes get interleaved
    episodes of the same list, the same number each; if necessary, the list is repeated from its start.

    Args:
        labels: (N,) class of each image, any integers; the classes are those that occur.
        episodes: The P x K sampling.
        seed: Seed of the sampling.
        process_index: Index of this process.
        num_processes: Number of processes that share the episodes.

    Raises:
        ValueError: If labels are not integers, or episodes have more classes than the data or more distinct images than
            a class, or the process index is out of range.

    Example:
        >>> sampler = EpisodeSampler(labels, Episodes(classes=2, examples=3, count=5))
        >>> len(sampler), len(next(iter(sampler)))
        (5, 6)
    """

    labels: Any
    episodes: Episodes
    _: KW_ONLY
    seed: int = 0
    process_index: int = 0
    num_processes: int = 1

    epoch = 0

    def __post_init__(self) -> None:
        # Else episodes would be lost.
        check_integer("process_index", self.process_index, 0, self.num_processes - 1)
        episodes, labels = self.episodes, torch.as_tensor(self.labels).cpu()
        if labels.dim() != 1 or (len(labels) and labels.is_floating_point()):
            raise ValueError(f"episodes need integer labels of shape (N,); got {labels.dtype}, {tuple(labels.shape)}.")
        classes, counts = labels.unique(return_counts=True)
        problem, origin = "", episodes.origin
        if episodes.classes > len(classes):
            problem = f"of {episodes.classes} different classes cannot be drawn from {len(classes)}"
            origin = origin or "An open set divides its classes, see `OpenSetOptions(train_classes=...)`."
        elif episodes.distinct and (least := int(counts.min())) < episodes.examples:
            smallest = f"class {classes[counts.argmin()]} has {least}; use at most {least}"
            problem = f"takes {episodes.examples} different images of a class, but {smallest}"
        if problem:
            raise ValueError(f"an episode {problem}. {origin}".rstrip())
        rounds = math.ceil(episodes.count / self.num_processes) * self.num_processes
        numbers = range(self.process_index, rounds, self.num_processes)
        self._episode_indices = [number % episodes.count for number in numbers]
        self._members = labels.argsort(stable=True).split(counts.tolist())  # of each class
        if self.process_index == 0 and (small := int((counts < episodes.examples).sum())):
            text = "%d of %d classes have fewer than the %d images of an episode, which are repeated within it."
            logger.warning(text, small, len(counts), episodes.examples)

    def __len__(self) -> int:
        """Batches per epoch and process."""
        return math.ceil(self.num_episodes / self.episodes.per_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch, sampled lazily."""
        for start in range(0, self.num_episodes, self.episodes.per_batch):
            batch = self._episode_indices[start : start + self.episodes.per_batch]
            yield [index for episode in batch for index in self._draw(self.epoch, episode).tolist()]

    @property
    def num_episodes(self) -> int:
        """Episodes per epoch and process."""
        return len(self._episode_indices)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose episodes are sampled."""
        self.epoch = epoch

    def indices(self, epoch: int, *, every: bool = False) -> Tensor:
        """Sample the episodes of this process, or `every` one, of an epoch: int64, (episodes, classes x examples)."""
        numbers = range(self.episodes.count) if every else self._episode_indices
        return torch.stack([self._draw(epoch, index) for index in numbers])

    def _draw(self, epoch: int, index: int) -> Tensor:
        # The time of `sample` is linear in the number of draws; that of a permutation, in the size of the class.
        draws = Random(mix_seed(self.seed, epoch, index + 1))
        drawn: list[Tensor] = []
        for members in draws.sample(self._members, self.episodes.classes):
            whole, remainder = divmod(self.episodes.examples, len(members))
            positions = range(len(members))
            drawn.append(members[[*positions] * whole + draws.sample(positions, remainder)])
        return torch.cat(drawn)


@dataclass(kw_only=True, eq=False, repr=False)
class SharedExamples:
    """Base of batches of images and texts: each process gets interleaved parts of one order of the examples."""

    batch_size: Any = None
    device: Any = "cpu"
    shuffle: bool = False
    seed: int = 0
    process_index: int = 0
    num_processes: int = 1
    num_examples: int = field(init=False)
    """Examples in the split, over all processes, including those not used in an epoch."""

    _weights = None  # of examples that are drawn with replacement, (N,)

    def __len__(self) -> int:
        """Batches per epoch and process."""
        return math.ceil(self._num_local() / self.batch_size)

    @property
    def examples_per_epoch(self) -> int:
        """Examples in the batches of an epoch, over all processes, with repetitions."""
        share = min(self._num_local(), len(self) * self.batch_size)
        # Examples are repeated so that each process gets as many.
        repeats = self.shuffle or getattr(self, "episodes", None) is not None
        return share * self.num_processes if repeats else self.num_examples

    def _num_local(self) -> int:
        if self.shuffle:
            return math.ceil(self.num_examples / self.num_processes)
        return len(range(self.process_index, self.num_examples, self.num_processes))

    def _order(self, epoch: int) -> Tensor:
        count, generator = self.num_examples, torch.Generator()
        if not self.shuffle:
            return torch.arange(count)[self.process_index :: self.num_processes]  # none if there are fewer
        generator.manual_seed(mix_seed(self.seed, epoch))
        if self._weights is None:
            order = torch.randperm(count, generator=generator)
        else:
            order = self._weights.multinomial(count, replacement=True, generator=generator)
        # Repeated from its start to divide evenly among the processes.
        total = self._num_local() * self.num_processes
        return order.repeat(math.ceil(total / count))[:total][self.process_index :: self.num_processes]


def draw_subset(count: int, size: int, seed: int) -> Tensor:
    """Return the indices of `size` random examples of `count`, in increasing order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].sort().values
