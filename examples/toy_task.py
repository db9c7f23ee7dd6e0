"""The toy task of the spherization paper, with a figure of its decision hyperplanes.

python examples/toy_task.py [--output_dir outputs/toy_task] [--seed 0]

A plain and a spherized network classify two clusters of 100 points in the plane, near (0, 0) and (1, 1). Both end in a
linear layer, whose decision boundary is (w1 - w0) x + b1 - b0 = 0. In the plain network, with two sigmoid units, that
line can be anywhere. After spherization all points lie on a quarter of the unit circle and there is no bias: the line
passes through the origin, and only the angle separates the classes. (Sigmoid units learn slowly: with some seeds, such
as 2, the plain network has not separated the classes after 100 epochs.)
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers.utils import logging

import hf_sphere  # noqa: F401  (registers the models with transformers)
from hf_sphere.data import ImageDataOptions, load_image_split
from hf_sphere.utils.snapshots import list_snapshots
from hf_sphere.visualization import check_matplotlib
from hf_sphere.visualization.figures import save_figure

KINDS = ("plain", "spherized")
COLORS = ("#3f90da", "#ffa90e")


def main() -> None:
    """Train both networks and draw their decision boundaries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/toy_task"))
    parser.add_argument("--num_train_epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 7.8), layout="constrained")
    rows = figure.subplots(len(KINDS), 3)
    headings = (
        "inputs and predictions, after training",
        "inputs of the last layer, before training",
        "the same, after training",
    )
    for axes, heading in zip(rows[0], headings, strict=True):
        axes.set_title(heading)
    for row, kind in zip(rows, KINDS, strict=True):
        print(f"\nTraining, {kind}", flush=True)
        train(kind, args.output_dir / kind, args.num_train_epochs, args.seed)
        accuracy = json.loads((args.output_dir / kind / "all_results.json").read_text())["eval_accuracy"]
        print(f"    test accuracy {100 * accuracy:.1f} %", flush=True)
        draw(row, kind, args.output_dir / kind, accuracy)
    handles, labels = rows[0, 2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    path = args.output_dir / "hyperplanes.png"
    save_figure(figure, path)
    print(f"\n{path}")


def train(kind: str, output_dir: Path, epochs: int, seed: int) -> None:
    """Train a configuration."""
    command = [
        *("train", "classification", "--config", f"spherization/toy-{kind}"),
        *("--output_dir", str(output_dir), "--num_train_epochs", str(epochs), "--snapshot_epochs", str(epochs)),
        *("--seed", str(seed)),
    ]
    print("    hf-sphere " + " ".join(command), flush=True)
    subprocess.run(
        [sys.executable, "-m", "hf_sphere.commands.main", *command, "--overwrite_output_dir"],
        check=True,
        stdout=subprocess.DEVNULL,
    )


@torch.inference_mode()
def draw(row: Any, kind: str, run: Path, accuracy: float) -> None:
    """Draw the plane of the inputs, and the inputs of the last layer before and after training."""
    model = AutoModelForImageClassification.from_pretrained(run).eval()
    processor = AutoImageProcessor.from_pretrained(run)
    options = ImageDataOptions("two_clusters", image_mean=processor.image_mean, image_std=processor.image_std)
    (batch,) = load_image_split(options, "test", batch_size=200).batches.epoch()
    points, labels = batch["pixel_values"], batch["labels"]  # (200, 1, 1, 2): the two pixels are the coordinates

    row[0].set_ylabel("second input")
    row[0].set_xlabel("first input")
    row[0].annotate(
        kind,
        (-0.3, 0.5),
        xycoords="axes fraction",
        size="x-large",
        weight="bold",
        rotation=90,
        ha="center",
        va="center",
    )
    draw_predictions(row[0], model)
    draw_points(row[0], points.flatten(1), labels)
    row[0].set(xticks=[-0.5, 0, 0.5, 1, 1.5], yticks=[-0.5, 0, 0.5, 1, 1.5])
    snapshots = list_snapshots(run)
    for axes, snapshot in ((row[1], snapshots[0]), (row[2], snapshots[-1])):
        load_model(model, snapshot.path)
        seen = model(points).embeddings
        if kind == "spherized":
            turn = torch.linspace(0, torch.pi / 2, 91)
            axes.plot(turn.cos(), turn.sin(), color="0.8", linewidth=6, solid_capstyle="round", zorder=0)
        limits = find_limits(seen) if kind == "plain" else (-0.6, 1.25)
        axes.set(xlim=limits, ylim=limits, xlabel="first embedding coordinate", ylabel="second embedding coordinate")
        axes.locator_params(nbins=5)
        draw_hyperplane(axes, *last_layer(model), limits)
        draw_points(axes, seen, labels)
    place = {"transform": row[2].transAxes, "ha": "right"}
    row[2].text(0.97, 0.04, f"test accuracy {100 * accuracy:.1f} %", **place)
    for axes in row:
        axes.set_aspect("equal")
        axes.axhline(0, color="0.85", linewidth=0.8, zorder=-1)
        axes.axvline(0, color="0.85", linewidth=0.8, zorder=-1)


def last_layer(model: Any) -> tuple[Tensor, Tensor]:
    """Return weights (2, 2) and biases (2,) of the classifier."""
    linear = model.head.classifier.linear if model.config.head == "spherized" else model.head.linear
    return linear.weight, torch.zeros(2) if linear.bias is None else linear.bias


def find_limits(seen: Tensor) -> tuple[float, float]:
    """Return the limits of a square around the points and the origin."""
    reach = 1.3 * max(seen.abs().max().item(), 0.3)
    return -0.6 * reach, reach


def draw_points(axes: Any, points: Tensor, labels: Tensor) -> None:
    """Draw points of the plane, colored by class."""
    for label, color in enumerate(COLORS):
        chosen = points[labels == label]
        name = f"class {label}, near ({label}, {label})"
        axes.scatter(*chosen.T, s=22, color=color, edgecolors="white", linewidths=0.4, label=name, zorder=3)


def draw_predictions(axes: Any, model: Any) -> None:
    """Shade the plane of the inputs by the predicted class."""
    side = torch.linspace(-0.5, 1.5, 201)
    grid = torch.cartesian_prod(side, side)
    logits = model(grid[:, None, None, :]).logits
    lead = (logits[:, 1] - logits[:, 0]).reshape(201, 201).T  # margin of class 1
    axes.contourf(side, side, lead, levels=[-1e9, 0.0, 1e9], colors=COLORS, alpha=0.15)
    if lead.min() < 0 < lead.max():
        axes.contour(side, side, lead, levels=[0.0], colors="0.3", linewidths=1.5)


def draw_hyperplane(axes: Any, weight: Tensor, bias: Tensor, limits: tuple[float, float]) -> None:
    """Draw the class weights from the origin, and the line on which both classes are equally likely."""
    difference, offset = weight[1] - weight[0], (bias[1] - bias[0]).item()
    nearest = -offset * difference / difference.dot(difference)
    along = torch.stack([-difference[1], difference[0]]) / difference.norm()
    line = torch.stack([nearest - 100 * along, nearest + 100 * along])
    axes.plot(*line.T, color="0.3", linewidth=1.5, label="both classes equally likely")
    length = 0.35 * limits[1] / weight.norm(dim=1).max().item()
    axes.plot([], [], color="0.3", marker=">", label="class weights $w_k$ (rescaled)")
    for label, color in enumerate(COLORS):
        tip = length * weight[label]
        axes.annotate("", tip.tolist(), (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2})
        beyond = (14 * tip / tip.norm()).tolist()  # the name is beyond the tip of the arrow
        place = {"xytext": beyond, "textcoords": "offset points", "ha": "center", "va": "center"}
        axes.annotate(f"$w_{label}$", tip.tolist(), color=color, size=13, **place)


if __name__ == "__main__":
    main()
