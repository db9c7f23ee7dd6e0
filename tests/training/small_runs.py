"""Small image models, random images, and runs of the loop, also for several processes."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.data import ImagesInMemory
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
