"""Compare heads where they are said to help: ETF on rare classes with softmax, AdaFace on blurred queries with others.

python benchmarks/imbalance_and_blur.py --data ../shared/data

MNIST has an imbalance of 100: the number of training images falls exponentially from 5,000 of the digit 0 to 50 of the
digit 9, and the accuracy is that of the last three digits. Omniglot is trained on 136 characters, with half of the
images blurred at random. Blurred images of other characters are the queries for the sharp images of other drawers.
Without a margin AdaFace is the cosine head, which is the control; sharp queries show whether a head has trained at all.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import report, row
from datasets import load_dataset
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification

DIM, BATCH = 64, 128
RARE = [7, 8, 9]


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 28, 28) from 0 to 1, bright on dark, and labels (N,)."""
    data = load_dataset(str(folder), split=split)
    images = [np.asarray(image.convert("L").resize((28, 28))) for image in data["image"]]
    pixels = torch.from_numpy(np.stack(images))[:, None].float() / 255
    return (1 - pixels if pixels.mean() > 0.5 else pixels), torch.tensor(data["label"])


def train(backbone: str, head: str, data: tuple[Tensor, Tensor], seed: int, steps: int, blur: bool) -> Any:
    """Train by SGD with a cosine schedule; with `blur`, half of each batch is blurred."""
    torch.manual_seed(seed)
    images, labels = data
    config = SphereVisionConfig(
        backbone=backbone, num_channels=1, image_size=28, embedding_dim=DIM, num_labels=int(labels.max()) + 1,
        head=head, head_kwargs={"scale": 16.0} if head in ("arcface", "adaface", "cosine") else {},
    )  # fmt: skip
    model = SphereVisionForImageClassification(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,))
        batch = images[chosen]
        if blur:
            batch[::2] = gaussian_blur(batch[::2], 9, float(torch.empty(()).uniform_(0.5, 3.0)))
        loss = model(batch, labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def predict(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and normalized embeddings."""
    outputs = [model(part) for part in images.split(512)]
    embeddings = torch.cat([output.embeddings for output in outputs])
    return torch.cat([output.logits for output in outputs]), F.normalize(embeddings, dim=-1)


def rare_accuracy(head: str, data: dict[str, Any], seed: int, steps: int) -> dict[str, float]:
    """Return the mean accuracy of the rare digits in percent."""
    logits, _ = predict(train("lenet5_bn", head, data["train"], seed, steps, blur=False), data["test"][0])
    labels = data["test"][1]
    right = logits.argmax(1) == labels
    shares = [right[labels == digit].float().mean().item() for digit in RARE]
    return {"accuracy % of rare digits": 100 * statistics.mean(shares)}


def recall(head: str, data: dict[str, Any], seed: int, steps: int) -> dict[str, float]:
    """Return Recall@1 of blurred and of sharp queries among sharp images in percent."""
    model = train("conv4", head, data["train"], seed, steps, blur=True)
    images, labels = data["test"]
    _, sharp = predict(model, images)
    _, blurred = predict(model, gaussian_blur(images, 9, 2.0))
    found = {}
    for name, queries in {"blurred": blurred, "sharp": sharp}.items():
        nearest = (queries @ sharp.T).fill_diagonal_(-1.0).argmax(1)
        found[f"Recall@1 % of {name} queries"] = 100 * (labels[nearest] == labels).float().mean().item()
    return found


def imbalanced(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keep 5,000 to 50 images of each digit."""
    images, labels = data
    kept = [(labels == digit).nonzero()[: round(5000 * 100 ** (-digit / 9)), 0] for digit in range(10)]
    return images[torch.cat(kept)], labels[torch.cat(kept)]


def main() -> None:
    """Compare each pair of heads with several seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with ylecun/mnist and brendenlake/omniglot")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, nargs=2, default=(3000, 600), help="steps on MNIST and on Omniglot")
    options = parser.parse_args()
    mnist, omniglot = (
        {split: read(options.data / name, split) for split in ("train", "test")}
        for name in ("ylecun/mnist", "brendenlake/omniglot")
    )
    mnist["train"] = imbalanced(mnist["train"])
    comparisons = [
        (rare_accuracy, mnist, ("etf", "softmax")),
        (recall, omniglot, ("adaface", "arcface", "cosine")),
    ]
    rows, values = [], {}
    for (measure, data, heads), steps in zip(comparisons, options.steps, strict=True):
        found = {head: [measure(head, data, seed, steps) for seed in range(options.seeds)] for head in heads}
        for what in found[heads[0]][0]:
            values |= {f"{what}, {head}": [one[what] for one in found[head]] for head in heads}
            means = {head: statistics.mean(values[f"{what}, {head}"]) for head in heads}
            rows += [row(f"{what}, {head}", mean) for head, mean in means.items()]
            for other in heads[1:]:
                rows.append(row(f"{what}: {heads[0]} - {other}", means[heads[0]] - means[other], at_least=0.0))
    report("imbalance_and_blur", rows, values=values, seeds=options.seeds, steps=options.steps)


if __name__ == "__main__":
    main()
