"""Training speed: the library's batches and loop on MNIST, and the memory format and precision of convolutions.

python benchmarks/image_training.py [--dataset_name ylecun/mnist]

The first part times an epoch of spherized LeNet-5 with the library and with a usual DataLoader loop. The dataset must
have 28 x 28 gray images; by default, a copy in `../shared/data` is used if there is one, and otherwise 60,000 synthetic
images. The second part times ResNet-20 on batches of CIFAR-10's shape; an epoch of CIFAR-10 has 391 of them.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from common import ratio, report, row, time_in_turn
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from hf_sphere.models import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.training import RecipeArguments, TrainingLoop
from hf_sphere.training.evaluation import measure_images

if TYPE_CHECKING:
    from datasets import Dataset

BATCH = 128
LOCAL = Path(__file__).parent.parent.parent / "shared" / "data" / "ylecun" / "mnist"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def new_model() -> nn.Module:
    """Build spherized LeNet-5."""
    torch.manual_seed(0)
    config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=28, num_labels=10)
    return SphereVisionForImageClassification(config).to(DEVICE)


def dataloader_epoch(rows: "Dataset") -> None:
    """Train one epoch as tutorials do: PIL decoding and ToTensor in two workers, `.item()` in each step."""
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.1307], [0.3081])])

    class Pictures(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            example = rows[index]
            return transform(example["image"]), example["label"]

    model = new_model().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_sum = correct = 0.0
    for images, labels in DataLoader(Pictures(), batch_size=BATCH, shuffle=True, num_workers=2):
        images, labels = images.to(DEVICE), labels.to(DEVICE)
        output = model(images, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        loss_sum += output.loss.item()
        correct += (output.logits.argmax(-1) == labels).sum().item()


def library_epoch(images: torch.Tensor, labels: torch.Tensor) -> None:
    """Train one epoch with the library's loop, including the checkpoint."""
    from hf_sphere.data import ImagesInMemory

    batches = ImagesInMemory(images, labels, batch_size=BATCH, mean=[0.1307], std=[0.3081], shuffle=True, device=DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        args = RecipeArguments(output_dir=folder, num_train_epochs=1, disable_tqdm=True)
        TrainingLoop(
            new_model(),
            batches,
            args,
            Accelerator(cpu=DEVICE == "cpu"),
            evaluate=lambda model: {"accuracy": 0.0},
            measure=measure_images,
        ).run()


def training_steps(
    memory_format: torch.memory_format,
    dtype: torch.dtype,
    steps: int = 8,
    backbone: str = "resnet20_cifar",
    head: str = "softmax",
) -> Callable[[], None]:
    """Return a function that trains a network for some steps."""
    torch.manual_seed(0)
    config = SphereVisionConfig(backbone=backbone, head=head, num_labels=10)
    model = SphereVisionForImageClassification(config).to(DEVICE, memory_format=memory_format).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    images = torch.randn(BATCH, 3, 32, 32, device=DEVICE).contiguous(memory_format=memory_format)
    labels = torch.randint(0, 10, (BATCH,), device=DEVICE)

    def run() -> None:
        for _ in range(steps):
            with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
                loss = model(images, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def load_rows(name: str | None) -> "Dataset":
    """Load MNIST, or generate images of its shape."""
    from datasets import ClassLabel, Dataset, Features, Image, load_dataset  # the steps of networks do without
    from PIL import Image as PILImage

    if name or LOCAL.is_dir():
        return load_dataset(name or str(LOCAL), split="train")
    pixels = np.random.default_rng(0).integers(0, 256, (60_000, 28, 28), dtype=np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(num_classes=10)})
    pictures = [PILImage.fromarray(p) for p in pixels]
    return Dataset.from_dict({"image": pictures, "label": [i % 10 for i in range(60_000)]}, features=features)


def main() -> None:
    """Time both loops in turn."""
    from hf_sphere.data.decoding import EncodedImages, ImageShape, decode_all

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset_name")
    rows = load_rows(parser.parse_args().dataset_name)
    with tempfile.TemporaryDirectory() as cache:
        images, kept = decode_all(EncodedImages(rows, "image", ImageShape(1, 28, 28)), cache_dir=cache, progress=False)
    labels = torch.tensor(rows["label"])[kept]
    seconds = time_in_turn(
        {"library": lambda: library_epoch(images, labels), "dataloader": lambda: dataloader_epoch(rows)},
        rounds=3,
        warmup=1,
    )
    last = torch.channels_last
    precisions = time_in_turn(
        {
            "contiguous fp32": training_steps(torch.contiguous_format, torch.float32),
            "fp32": training_steps(last, torch.float32),
            "contiguous bf16": training_steps(torch.contiguous_format, torch.bfloat16),
            "bf16": training_steps(last, torch.bfloat16),
        }
    )
    slowest = precisions["contiguous fp32"]
    report(
        "image_training",
        [
            row(
                "DataLoader loop / library, time of an epoch",
                ratio(seconds["dataloader"], seconds["library"]),
                at_least=2.2,
            ),
            row("library, s per epoch", min(seconds["library"])),
            row("DataLoader loop, s per epoch", min(seconds["dataloader"])),
            row("ResNet-20, fp32 / bf16 and channels last", ratio(slowest, precisions["bf16"]), at_least=1.8),
            row("ResNet-20, fp32 / fp32 and channels last", ratio(slowest, precisions["fp32"])),
            row("ResNet-20, fp32 / bf16", ratio(slowest, precisions["contiguous bf16"])),
            row("ResNet-20, s per epoch of CIFAR-10, fp32", 391 / 8 * min(slowest)),
            row("ResNet-20, s per epoch of CIFAR-10, bf16 and channels last", 391 / 8 * min(precisions["bf16"])),
        ],
    )


if __name__ == "__main__":
    main()
