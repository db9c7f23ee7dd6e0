"""Small image models, random images, and runs of the loop, also for several processes."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.data import Augmentation, ImagesInMemory
from hf_sphere.nn import Head, HeadOutput
from hf_sphere.training import RecipeArguments, TrainingLoop, initialize_from_data


def small_model(head: str | None, *, width: int = 8, kind: Any = SphereVisionForImageClassification, **options) -> Any:
    """A linear model of images (1, 6, 6) with three classes."""
    torch.manual_seed(0)
    options = {"backbone_kwargs": {"width": width}, "num_channels": 1, "image_size": 6, "num_labels": 3} | options
    return kind(SphereVisionConfig(backbone="linear_embedding", head=head, **options))


def random_images(count: int, *, classes: int = 3, labels: torch.Tensor | None = None, **options) -> ImagesInMemory:
    """Batches of random images of classes in turn, unless there are other labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 1, 6, 6), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % classes if labels is None else labels
    return ImagesInMemory(images, labels, mean=[0.5], std=[0.3], **options)


def run_loop(
    model: Any, batches: ImagesInMemory, folder: str | Path, accelerator: Accelerator | None = None, **arguments
) -> TrainingLoop:
    """Initialize a model from data, and train it."""
    initialize_from_data(model, batches)
    args = RecipeArguments(str(folder), disable_tqdm=True, **{"num_train_epochs": 2, "optim": "sgd"} | arguments)
    accelerator = accelerator or Accelerator(cpu=True)
    loop = TrainingLoop(model, batches, args, accelerator, evaluate=lambda _: {"accuracy": 0.0})
    loop.run()
    return loop


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


def make_model(seed: int = 0, **options) -> SmallClassifier:
    """Build a small classifier with seeded initial weights."""
    torch.manual_seed(seed)
    return SmallClassifier(**options)


def make_batches(
    count: int = 40, batch_size: int = 8, *, shuffle: bool = True, augment: bool = True, seed: int = 0, **options
) -> ImagesInMemory:
    """Make batches of random images and labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 1, 6, 6), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator)
    options |= {"batch_size": batch_size, "mean": [0.5], "std": [0.3], "shuffle": shuffle}
    if augment:
        options["augmentation"] = Augmentation(crop_padding=1, horizontal_flip=True, rotation=20.0)
    return ImagesInMemory(images, labels, **options)
