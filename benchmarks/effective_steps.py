"""What optimizers do on the sphere: effective learning rates, weight decay, and SGD as an adaptive method.

python benchmarks/effective_steps.py --data ../shared/data

ResNet-8 with 16 channels in its first stage learns 10,000 images of CIFAR-10, reduced to 16 pixels, in five epochs;
learning rates fall linearly to 0. The 2,000 first test images are held out, for the choice of learning rates too.

1. The optimizers of Roburin et al., "A spherical perspective on learning with normalization layers", without weight
   decay (AdamW is Adam then), each with the best of five learning rates: effective learning rate, step angle and
   anisotropy of the second moment, by layer.
2. Adam and Adam-SRT with L2 regularization of different strength, each with the best of five learning rates.
3. SGD with L2 regularization beside the method that the paper shows to take the same steps on the sphere, Adam with one
   second moment per filter and weights of unit length, on the same batches.

Each run is appended to a file in `--work_dir`, and those in it are not repeated. Writes `results/effective_steps.json`
and, for pictures, `results/pictures/effective_steps.json`.
"""

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import keep_for_pictures, report, row
from lr_transfer import Images, resnet8
from torch import Tensor, nn

from hf_sphere.optim import build_optimizer, find_scale_invariant_weights, step_diagnostics

ADAPTIVE, SGD = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (0.03, 0.1, 0.3, 1.0, 3.0)
TITLES = {
    "sgd": "SGD", "sgd_mrt": "SGD-MRT", "adam": "Adam", "adam_s": "Adam-S", "adam_srt": "Adam-SRT", "adam_g": "Adam-G",
}  # fmt: skip
RATES = dict.fromkeys(TITLES, ADAPTIVE) | {"sgd": SGD, "sgd_mrt": SGD, "adam_g": (3e-3, 1e-2, 3e-2, 0.1, 0.3)}
DECAYS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
QUANTITIES = ("effective_learning_rate", "step_angle", "anisotropy")
"""The last one is the standard deviation of the second moment's root over the weights of a filter, by its mean."""
EPOCHS, BATCH, SEEDS, EVERY, CHANNELS = 5, 128, 3, 10, 16


class Study:
    """Runs of ResNet-8, and the file that keeps their results."""

    def __init__(self, data: Path, file: Path) -> None:
        self.images, self.file = Images(data), file
        self.done = dict(map(json.loads, file.open())) if file.exists() else {}

    def start(self, seed: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        """Return a network and the batches of a run."""
        torch.manual_seed(seed)
        model = resnet8(CHANNELS).to(memory_format=torch.channels_last)
        images, labels = self.images.train
        orders = [torch.randperm(len(images)).split(BATCH) for _ in range(EPOCHS)]
        return model, [(images[part], labels[part]) for order in orders for part in order if len(part) == BATCH]

    def run(self, optimizer: str, lr: float, decay: float, seed: int, measure: bool = False) -> dict[str, Any]:
        """Train and return the held-out accuracy in percent, and the effective steps of each layer if asked."""
        name = json.dumps([optimizer, lr, decay, seed, measure])
        if name not in self.done:
            self.done[name] = self.train(optimizer, lr, decay, seed, measure)
            with self.file.open("a") as out:
                out.write(json.dumps([name, self.done[name]]) + "\n")
            print(
                f"{optimizer}, lr {lr:g}, decay {decay:g}, seed {seed}: {self.done[name]['accuracy']:.2f} %", flush=True
            )
        return self.done[name]

    def train(self, name: str, lr: float, decay: float, seed: int, measure: bool) -> dict[str, Any]:
        """Train without looking at earlier results; see `run`."""
        model, batches = self.start(seed)
        options = {"momentum": 0.9} if name.startswith("sgd") else {}
        optimizer = build_optimizer(model, name, batches[0][0][:8], lr=lr, weight_decay=decay, **options)
        channels = find_scale_invariant_weights(model, batches[0][0][:8]).channel_dims
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(batches))
        steps: dict[str, list[dict[str, float]]] = {layer: [] for layer in channels}
        for number, batch in enumerate(batches):
            loss = self.images.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if measure and number % EVERY == 0:
                for layer, values in step_diagnostics(optimizer, channels, model).items():
                    steps[layer].append({key: values[key] for key in (*QUANTITIES, "weight_norm")})
            schedule.step()
        with torch.no_grad():
            logits = model.eval()(self.images.test[0])
        accuracy = 100 * (logits.argmax(1) == self.images.test[1]).double().mean().item()
        return {"accuracy": accuracy, "steps": steps if measure else {}}

    def best(self, optimizer: str, decay: float = 0.0) -> tuple[float, list[float]]:
        """Return the learning rate with the highest mean accuracy over the seeds, and its accuracies."""
        found = {
            lr: [self.run(optimizer, lr, decay, seed)["accuracy"] for seed in range(SEEDS)] for lr in RATES[optimizer]
        }
        return max(found.items(), key=lambda item: statistics.mean(item[1]))


def follow_sgd(study: Study, lr: float, decay: float, epochs: int) -> dict[str, list[float]]:
    """Train a network by SGD, and a copy by the equivalent method on the sphere, with the same batches, in float64.

    A filter x = r u of SGD with L2 regularization turns as u does in

        u <- (u - lr_k g / sqrt(v)) / |u - lr_k g / sqrt(v)|,   v <- beta v + |g|^2,   g = the gradient at u,

    with beta = (1 - lr decay)^4, lr_k = (2 beta)^-1/2 and v = r^4 / (2 lr^2 sqrt(beta)) at the start, up to terms of
    second order in the learning rate (the paper's theorem on SGD as AdamG*). Other weights have plain SGD in both.
    """
    first, batches = study.start(0)
    first = first.double()
    for norm in first.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps = 1e-12  # with 1e-5, filters of batch norm are not quite scale-invariant, and the two drift apart
    second = copy.deepcopy(first)
    filters = list(find_scale_invariant_weights(first, batches[0][0][:8].double()).channel_dims)
    one, two = dict(first.named_parameters()), dict(second.named_parameters())
    start = {name: F.normalize(one[name].detach().flatten(1), dim=1) for name in filters}
    beta = (1 - lr * decay) ** 4
    moments = {name: one[name].detach().flatten(1).square().sum(1) ** 2 / (2 * lr**2 * beta**0.5) for name in filters}
    with torch.no_grad():
        for name in filters:
            two[name].copy_(start[name].view_as(two[name]))
    found: dict[str, list[float]] = {key: [] for key in ("sgd", "sphere", "difference", "way")}
    for number, (images, labels) in enumerate(batches[: int(epochs * len(batches) / EPOCHS)]):
        losses = [F.cross_entropy(model(images.double()), labels) for model in (first, second)]
        gradients = [torch.autograd.grad(loss, list(w.values())) for loss, w in zip(losses, (one, two), strict=True)]
        with torch.no_grad():
            for (name, weight), gradient in zip(one.items(), gradients[0], strict=True):
                weight.sub_(lr * (gradient + decay * weight if name in moments else gradient))
            for (name, weight), gradient in zip(two.items(), gradients[1], strict=True):
                if name not in moments:
                    weight.sub_(lr * gradient)
                    continue
                u, g = weight.flatten(1), gradient.flatten(1)
                u = F.normalize(u - (2 * beta) ** -0.5 * g / moments[name].sqrt().unsqueeze(1), dim=1)
                moments[name].mul_(beta).add_(g.square().sum(1))
                weight.copy_(u.view_as(weight))
            if number % EVERY == 0:
                ends = {name: F.normalize(one[name].flatten(1), dim=1) for name in filters}
                apart = [angles(ends[name], two[name].flatten(1)) for name in filters]
                way = [angles(ends[name], start[name]) for name in filters]
                for key, value in {"sgd": losses[0], "sphere": losses[1], "difference": torch.cat(apart).mean(),
                                   "way": torch.cat(way).mean()}.items():  # fmt: skip
                    found[key].append(value.item())
    return found


def angles(first: Tensor, second: Tensor) -> Tensor:
    """Return the angles between unit vectors (N, D) in degrees, (N,), also the smallest ones exactly."""
    return torch.rad2deg(2 * torch.atan2((first - second).norm(dim=1), (first + second).norm(dim=1)))


def main() -> None:
    """Run the three parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with uoft-cs/cifar10")
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/effective_steps"))
    options = parser.parse_args()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    study = Study(options.data, options.work_dir / "runs.jsonl")
    rows: list[dict[str, Any]] = []
    steps: dict[str, Any] = {}
    for name, title in TITLES.items():
        lr, accuracies = study.best(name)
        rows += [row(f"{title}: learning rate", lr), row(f"{title}: accuracy %", statistics.mean(accuracies))]
        steps[name] = study.run(name, lr, 0.0, 0, measure=True)["steps"]
    decays: dict[str, list[list[float]]] = {}
    for name in ("adam", "adam_srt"):
        decays[name] = [study.best(name, decay)[1] for decay in DECAYS]
        for decay, values in zip(DECAYS, decays[name], strict=True):
            rows.append(row(f"{TITLES[name]}, L2 regularization {decay:g}: accuracy %", statistics.mean(values)))
    followed = {str(lr): follow_sgd(study, lr, 5e-4, epochs=1) for lr in (0.1, 0.01)}
    for lr, found in followed.items():
        rows.append(row(f"SGD, lr {lr}: angle travelled, degrees", found["way"][-1]))
        rows.append(row(f"SGD, lr {lr}: angle to Adam on the sphere, degrees", found["difference"][-1]))
    report("effective_steps", rows, decays=decays, equivalence=followed, seeds=SEEDS)
    keep_for_pictures("effective_steps", {name: select_layers(layers) for name, layers in steps.items()})


def select_layers(layers: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Return each quantity by step for the first, the middle and the last layer."""
    places = {"first": 0, "middle": len(layers) // 2, "last": -1}
    return {
        place: {quantity: [step[quantity] for step in list(layers.values())[index]] for quantity in QUANTITIES}
        for place, index in places.items()
    }


if __name__ == "__main__":
    main()
