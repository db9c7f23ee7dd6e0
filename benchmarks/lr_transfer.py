"""How far the best learning rate of each optimizer moves when a network gets four times as wide.

python benchmarks/lr_transfer.py --data ../shared/data [--models resnet8] [--optimizers muon adamw]

ResNet-8 has 8, 16 and 32 channels in its first stage and learns 10,000 images of CIFAR-10, reduced to 16 pixels, in two
epochs; a character model with two layers of 8, 16 and 32 units learns the validation text of WikiText-2 in one epoch.
Learning rates fall linearly to 0. The `_hyperball` optimizers keep the norm of scale-invariant weights, which the
character model does not have; there, they keep that of all hidden matrices.

The best learning rate has the smallest loss on held-out data: with one seed, the best of 1/1024 to 1 in steps of two;
from there in steps of the square root of two; then by the mean of three seeds, until both neighbors of the best are
worse. Each run is appended to a file in `--work_dir`, and those in it are not repeated:
a stopped run continues, and models or optimizers may run in turn or at once, before a last run with all of them
collects the results. Writes `results/lr_transfer.json`.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import report, row
from datasets import load_dataset
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_sphere.optim import build_optimizer

OPTIMIZERS = ("adamw", "adam_srt", "muon", "muon_hyperball", "adamw_hyperball")
MODELS, WIDTHS = ("resnet8", "characters"), (8, 16, 32)
SEEDS, BATCH, CONTEXT = 3, 128, 64
SWEEP = range(-20, 1, 2)  # the first learning rates are the square root of two to these powers

Run = Callable[[float, int], Any]


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(before, channels, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, before, H, W) to (B, channels, H / stride, W / stride)."""
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet8(width: int) -> nn.Module:
    """Build ResNet-8 for small images."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], loss_of: Callable[..., Tensor]
) -> None:
    """Train on batches, with a learning rate that falls linearly to 0."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(batches))
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


class Images:
    """ResNet-8 on 10,000 training and 2,000 test images."""

    def __init__(self, data: Path) -> None:
        self.train, self.test = (
            self.read(str(data / "uoft-cs" / "cifar10"), part) for part in ("train[:10000]", "test[:2000]")
        )

    def read(self, name: str, split: str) -> tuple[Tensor, Tensor]:
        """Return images (N, 3, 16, 16) from -1 to 1 and labels (N,)."""
        images = load_dataset(name, split=split)
        column = "image" if "image" in images.column_names else "img"
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images[column]])).permute(0, 3, 1, 2)
        pixels = F.avg_pool2d(pixels.float() / 127.5 - 1, 2).contiguous(memory_format=torch.channels_last)
        return pixels, torch.tensor(images["label"])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the cross-entropy of a batch."""
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    def run(self, optimizer: str, width: int, lr: float, seed: int) -> float:
        """Train a model and return its loss on held-out data."""
        torch.manual_seed(seed)
        model = resnet8(width).to(memory_format=torch.channels_last)
        images, labels = self.train
        orders = [torch.randperm(len(images)).split(BATCH) for _ in range(2)]
        batches = [(images[part], labels[part]) for order in orders for part in order if len(part) == BATCH]
        train(model, build_optimizer(model, optimizer, images[:8], lr=lr), batches, self.loss)
        with torch.no_grad():
            return self.loss(model.eval(), self.test).item()


class Characters:
    """A transformer of two layers on the characters of a text, of which the last tenth is held out."""

    def __init__(self, data: Path) -> None:
        text = "".join(load_dataset(str(data / "Salesforce" / "wikitext"), split="validation")["text"])
        known = {character: number for number, character in enumerate(sorted(set(text)))}
        ids = torch.tensor([known[character] for character in text])
        self.rows, self.size = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT), len(known)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Compute the cross-entropy of the next characters."""
        return model(input_ids=batch, labels=batch).loss

    def run(self, optimizer: str, width: int, lr: float, seed: int) -> float:
        """Train a model and return its loss on held-out data."""
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=self.size, n_positions=CONTEXT, n_embd=width, n_layer=2, n_head=2, bos_token_id=0,
                eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )
        )  # fmt: skip
        known, held_out = self.rows[: -len(self.rows) // 10], self.rows[-len(self.rows) // 10 :]
        batches = [known[part] for part in torch.randperm(len(known)).split(BATCH // 2)]
        example = {"input_ids": known[:4], "labels": known[:4]}
        options: dict[str, Any] = {"hyperball_on": "matrices"} if optimizer.endswith("_hyperball") else {}
        train(model, build_optimizer(model, optimizer, example, lr=lr, **options), batches, self.loss)
        with torch.no_grad():
            return self.loss(model.eval(), held_out).item()


def remembered(file: Path, run: Run) -> Run:
    """Return a function that appends each result to a file, and does not repeat those in it."""
    done = {(lr, seed): loss for lr, seed, loss in map(json.loads, file.open())} if file.exists() else {}

    def look_up(lr: float, seed: int) -> float:
        if (lr, seed) not in done:
            done[lr, seed] = run(lr, seed)
            with file.open("a") as out:
                out.write(json.dumps([lr, seed, done[lr, seed]]) + "\n")
        return done[lr, seed]

    return look_up


def search(run: Run) -> tuple[int, dict[float, list[float]]]:
    """Return the best learning rate, as a power of the square root of two, and the losses of those with `SEEDS` seeds.

    Args:
        run: Loss at a learning rate for a seed.
    """
    losses: dict[float, list[float]] = {}

    def loss(power: int, seeds: int) -> float:
        found = losses.setdefault(2 ** (power / 2), [])
        while len(found) < seeds:
            value = run(2 ** (power / 2), len(found))
            found.append(value if math.isfinite(value) else math.inf)
        return statistics.mean(found[:seeds])

    best = min(SWEEP, key=lambda power: loss(power, 1))
    for seeds in (1, SEEDS):
        while (better := min((best, best - 1, best + 1), key=lambda power: loss(power, seeds))) != best:
            best = better
    return best, {lr: found for lr, found in sorted(losses.items()) if len(found) == SEEDS}


def main() -> None:
    """Search for each model, optimizer and width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with uoft-cs/cifar10 and Salesforce/wikitext")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/lr_transfer"))
    options = parser.parse_args()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, list[float]]] = {}
    for name in options.models:
        data: Any = {"resnet8": Images, "characters": Characters}[name](options.data)
        for optimizer in options.optimizers:
            powers: list[int] = []
            for width in WIDTHS:
                what = f"{name}, {optimizer}, width {width}"
                run = remembered(options.work_dir / f"{what}.jsonl", partial(data.run, optimizer, width))
                power, found = search(run)
                powers.append(power)
                best = 2 ** (power / 2)
                print(f"{what}: {best:.3g}", flush=True)
                curves[what] = {str(lr): losses for lr, losses in found.items()}
                rows.append(row(f"{what}: best learning rate", best))
                rows.append(row(f"{what}: loss", statistics.mean(found[best])))
            rows.append(row(f"{name}, {optimizer}: best at 4 x width / best", 2 ** ((powers[-1] - powers[0]) / 2)))
    report("lr_transfer", rows, curves=curves, seeds=SEEDS)


if __name__ == "__main__":
    main()
