"""Small model, data and loop that train quickly."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

from hf_sphere.data import Augmentation, ImagesInMemory
from hf_sphere.nn import Head, HeadOutput
from hf_sphere.training import RecipeArguments, TrainingLoop, evaluate as evaluate_on


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> Iterator[None]:
    """Exempt the objects of all imports from garbage collection, which the Trainer runs before training."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Forget the process-wide state of accelerate before and after a test."""

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    yield
    forget()


class Observer(Head):
    """A head that notes the epochs of training."""

    def __init__(self) -> None:
        super().__init__(16, 3)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class SmallClassifier(nn.Module):
    """Classify images (B, 1, 6, 6) into three classes. Batch norm and dropout make a step depend on the full state.

    `bad_at` lists the training forward passes, counted from 1, whose loss is NaN.
    """

    def __init__(self, *, dropout: float = 0.5, norm: bool = True, bad_at: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.hidden = nn.Linear(36, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(16, 3)
        self.bad_at = bad_at
        self.passes = 0
        self.observer = Observer()
        self.hidden_dtype: torch.dtype | None = None

    def forward(self, pixel_values: Tensor, labels: Tensor) -> HeadOutput:
        hidden = self.hidden(pixel_values.flatten(1))
        self.hidden_dtype = hidden.dtype
        logits = self.out(self.dropout(self.norm(hidden).relu()))
        loss = F.cross_entropy(logits.float(), labels)
        self.passes += self.training
        if self.training and self.passes in self.bad_at:
            loss = loss * float("nan")
        return HeadOutput(logits=logits, loss=loss)


def _make_model(seed: int = 0, **options) -> SmallClassifier:
    torch.manual_seed(seed)
    return SmallClassifier(**options)


def _make_batches(
    count: int = 40, batch_size: int = 8, *, shuffle: bool = True, augment: bool = True, seed: int = 0, **options
) -> ImagesInMemory:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 1, 6, 6), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator)
    options |= {"batch_size": batch_size, "mean": [0.5], "std": [0.3], "shuffle": shuffle}
    if augment:
        options["augmentation"] = Augmentation(crop_padding=1, horizontal_flip=True, rotation=20.0)
    return ImagesInMemory(images, labels, **options)


@pytest.fixture
def make_model() -> Callable[..., SmallClassifier]:
    """Build a small classifier with seeded initial weights."""
    return _make_model


@pytest.fixture
def make_batches() -> Callable[..., ImagesInMemory]:
    """Make batches of random images and labels."""
    return _make_batches


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., RecipeArguments]:
    """Make training arguments with an output folder below `tmp_path`."""

    def make(**options) -> RecipeArguments:
        options = {"output_dir": str(tmp_path / "run"), "disable_tqdm": True, "save_total_limit": 100} | options
        return RecipeArguments(**options)

    return make


@pytest.fixture
def make_loop(make_args: Callable[..., RecipeArguments]) -> Callable[..., TrainingLoop]:
    """Build a training loop with a new accelerator; other keywords are training arguments."""

    def make(
        model: nn.Module | None = None,
        batches: ImagesInMemory | None = None,
        *,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
        loop: dict | None = None,
        **options,
    ) -> TrainingLoop:
        args = make_args(**options)
        accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
        held_out = _make_batches(30, 16, shuffle=False, augment=False, seed=1)
        return TrainingLoop(
            _make_model() if model is None else model,
            _make_batches() if batches is None else batches,
            args,
            accelerator,
            evaluate=evaluate or (lambda model: evaluate_on(model, held_out, accelerator)),
            measure=lambda output, batch: {"correct": (output.logits.argmax(-1) == batch["labels"]).sum()},
            **(loop or {}),
        )

    return make
