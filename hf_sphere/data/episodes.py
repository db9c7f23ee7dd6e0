"""Episodes for metric learning: batches of a few classes, with so many images of each."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hf_sphere.utils.seeds import mix_seed

logger = logging.getLogger(__name__)

_NAMED = 3
"""Classes that a warning names."""


@dataclass(frozen=True)
class Episodes:
    """An epoch as a list of episodes.

    Attributes:
        classes: Different classes in an episode.
        examples: Images of each of them.
        count: Episodes an epoch, over all processes.
        per_batch: Episodes a batch and process; the last batch of an epoch may hold fewer.
        distinct: Refuse classes with fewer images than `examples`, instead of repeating theirs within an episode.
        origin: Which settings the numbers come from, a sentence for messages.
    """

    classes: int
    examples: int
    count: int
    per_batch: int = 1
    distinct: bool = False
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("classes", "examples", "count", "per_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of episodes must be at least 1; got {getattr(self, name)}.")

    @property
    def size(self) -> int:
        """Images in an episode."""
        return self.classes * self.examples

    @property
    def batch_size(self) -> int:
        """Images in a batch."""
        return self.size * self.per_batch


def check_episodes(labels: Tensor, episodes: Episodes, names: Sequence[str] | None = None, what: str = "an") -> None:
    """Refuse episodes that cannot be drawn.

    Args:
        labels: (N,) class of each image, integers.
        episodes: The episodes.
        names: Name of each class, by label, for the message.
        what: Which episode, for the message: the words before it.

    Raises:
        ValueError: If there are fewer classes, or where images must be distinct, fewer images in a class.
    """
    classes, counts = labels.unique(return_counts=True)
    origin = f" {episodes.origin}" if episodes.origin else ""
    if episodes.classes > len(classes):
        # An episode of one class has nothing to tell apart, so it is no advice.
        advice = "ask for at most as many as there are" if len(classes) > 1 else "use images of more classes"
        raise ValueError(
            f"{what} episode of {episodes.classes} different classes cannot be drawn from {len(classes)}; "
            f"{advice}.{origin}"
        )
    too_small = int((counts < episodes.examples).sum())
    if episodes.distinct and too_small:
        order = counts.argsort(stable=True)[: min(too_small, _NAMED)].tolist()
        smallest = [(classes[place].item(), counts[place].item()) for place in order]
        fewest = int(counts.min())
        # Nor is one of a single image of each class, which has no other to be compared with.
        ask = f"Ask for at most {fewest}, or leave these classes out"
        advice = ask if fewest > 1 else "Leave these classes out, or use more images"
        named = ", ".join(f"{names[label] if names else f'class {label}'} has {count}" for label, count in smallest)
        raise ValueError(
            f"{what} episode takes {episodes.examples} different images of a class, but {too_small} of {len(classes)} "
            f"classes have fewer ({named}{', ...' if too_small > _NAMED else ''}). {advice}.{origin}"
        )


class EpisodeSampler(Sampler[list[int]]):
    """Draws episodes, a class behind the other; usable as `batch_sampler` of a `DataLoader`.

    The classes of an episode differ, and so do the images of a class, unless the class has too few of them. That is an
    error where they must be distinct; otherwise each of its images occurs, and none more than once more often than
    another, of which a warning tells when the sampler is made. An episode follows from (`seed`, epoch, its number)
    alone. Several processes get interleaved episodes of the same list, equally many each, for which the list is
    continued from its start if need be; each takes so many of its own as a batch has.

    Args:
        labels: (N,) class of each image, integers of any kind; classes are those that occur.
        episodes: How many episodes, and of what.
        seed: Seed of the draws.
        process_index: Which of the processes this is.
        num_processes: How many processes share the episodes.

    Raises:
        ValueError: If labels are not integers, episodes ask for more classes than there are or for more distinct
            images than a class has, or there is no such process.
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        episodes: Episodes,
        *,
        seed: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
    ) -> None:
        if not 0 <= process_index < num_processes:
            raise ValueError(
                f"there must be a process, and they count from 0 to num_processes - 1; got process_index="
                f"{process_index} and num_processes={num_processes}."
            )
        labels = torch.as_tensor(labels).cpu()
        if labels.dim() != 1 or (len(labels) and labels.is_floating_point()):
            raise ValueError(
                f"episodes are drawn by class, from integer labels of shape (N,); got {labels.dtype} of shape "
                f"{tuple(labels.shape)}."
            )
        check_episodes(labels, episodes)
        classes, counts = labels.unique(return_counts=True)
        self.episodes = episodes
        self.seed = seed
        self.epoch = 0
        rounds = math.ceil(episodes.count / num_processes) * num_processes
        self._numbers = [number % episodes.count for number in range(process_index, rounds, num_processes)]
        # The images of a class are a stretch of this order.
        self._by_class = labels.argsort(stable=True)
        self._starts = (counts.cumsum(0) - counts).tolist()
        self._counts = counts.tolist()
        if process_index == 0:
            self._warn_of_small_classes(classes, counts)

    def __len__(self) -> int:
        """Batches an epoch and process."""
        return math.ceil(self.num_episodes / self.episodes.per_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after another, drawn when they are asked for."""
        for start in range(0, self.num_episodes, self.episodes.per_batch):
            numbers = self._numbers[start : start + self.episodes.per_batch]
            yield [index for number in numbers for index in self._draw(self.epoch, number).tolist()]

    @property
    def num_episodes(self) -> int:
        """Episodes an epoch and process."""
        return len(self._numbers)

    def set_epoch(self, epoch: int) -> None:
        """Choose which epoch's episodes come next."""
        self.epoch = epoch

    def indices(self, epoch: int) -> Tensor:
        """Draw all episodes of an epoch for this process, int64 of shape (episodes, classes x examples)."""
        return torch.stack([self._draw(epoch, number) for number in self._numbers])

    def all_indices(self, epoch: int) -> Tensor:
        """Draw all episodes of an epoch, whatever the processes, int64 of shape (count, classes x examples)."""
        return torch.stack([self._draw(epoch, number) for number in range(self.episodes.count)])

    def _draw(self, epoch: int, number: int) -> Tensor:
        # `sample` takes time in proportion to what it draws, a permutation in proportion to the size of the class.
        draws = Random(mix_seed(self.seed, epoch, number + 1))
        places: list[int] = []
        for chosen in draws.sample(range(len(self._counts)), self.episodes.classes):
            start, count = self._starts[chosen], self._counts[chosen]
            members = range(start, start + count)
            whole, rest = divmod(self.episodes.examples, count)
            for _ in range(whole):
                places += members
            places += draws.sample(members, rest)
        return self._by_class[places]

    def _warn_of_small_classes(self, classes: Tensor, counts: Tensor) -> None:
        small = counts < self.episodes.examples
        if not small.any():
            return
        some = list(zip(classes[small].tolist(), counts[small].tolist(), strict=True))[:_NAMED]
        named = ", ".join(f"class {label} has {count}" for label, count in some)
        logger.warning(
            "%d of %d classes have fewer than the %d images that an episode takes of a class (%s%s): theirs are "
            "repeated within it.",
            int(small.sum()),
            len(classes),
            self.episodes.examples,
            named,
            ", ..." if small.sum() > _NAMED else "",
        )
