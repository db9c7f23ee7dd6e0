"""Draw the pictures of the pages that no command or benchmark draws.

python docs/_tools/pictures.py
"""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch

from hf_sphere.geometry import log_vmf_normalizer, mean_resultant_length
from hf_sphere.prototypes import place_prototypes

DOCS = Path(__file__).parents[1]
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]  # of Okabe and Ito, safe for color-blind readers
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=COLORS),
    "figure.constrained_layout.use": True,
}


def draw_cosines() -> None:
    """Densities of the cosine of two random directions, by dimension."""
    figure, axes = plt.subplots(figsize=(6, 2.8))
    cosines = np.linspace(-1, 1, 2001)[1:-1]
    for dim in (3, 16, 128, 512):
        constant = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - 0.5 * math.log(math.pi)
        axes.plot(cosines, np.exp(constant + (dim - 3) / 2 * np.log1p(-(cosines**2))), label=f"d = {dim}")
    axes.set(xlabel="cosine of two random directions", ylabel="density", xlim=(-1, 1), ylim=(0, None))
    axes.legend(frameon=False)
    save(figure, "concepts/cosines.png")


def draw_concentration() -> None:
    """Density by angle on the sphere in three dimensions, and mean resultant length by concentration."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.9))
    angles = torch.linspace(0, math.pi, 400, dtype=torch.float64)
    for concentration in (1.0, 4.0, 16.0, 64.0):
        kappa = torch.tensor(concentration, dtype=torch.float64)
        density = torch.exp(log_vmf_normalizer(kappa, 3) + kappa * angles.cos())
        left.plot(angles.rad2deg(), density, label=rf"$\kappa$ = {concentration:g}")
    left.set(xlabel="angle to the mean direction, degrees", ylabel="density, d = 3", xlim=(0, 180), ylim=(1e-6, 300))
    left.set_yscale("log")
    left.set_xticks(range(0, 181, 45))
    concentrations = torch.logspace(-1, 5, 400, dtype=torch.float64)
    for dim in (3, 16, 128, 512):
        right.plot(concentrations, mean_resultant_length(concentrations, dim), label=f"d = {dim}")
    right.set(xscale="log", xlabel=r"concentration $\kappa$", ylabel="mean resultant length", ylim=(0, 1.02))
    left.legend(frameon=False, loc="upper right", ncols=2)
    right.legend(frameon=False)
    save(figure, "concepts/concentration.png")


def draw_prototypes() -> None:
    """Ten prototypes in three dimensions: the points, and their cosines beside those of random points."""
    points = place_prototypes(10, 3).prototypes.double()
    random = torch.nn.functional.normalize(
        torch.randn(10, 3, generator=torch.Generator().manual_seed(0)).double(), dim=1
    )
    figure = plt.figure(figsize=(8, 3.2))
    sphere = figure.add_subplot(1, 2, 1, projection="3d", computed_zorder=False)
    u, v = np.mgrid[0 : 2 * np.pi : 40j, 0 : np.pi : 20j]
    sphere.plot_wireframe(np.cos(u) * np.sin(v), np.sin(u) * np.sin(v), np.cos(v), color="0.85", linewidth=0.5)
    eye = np.array([math.cos(math.radians(-60)), math.sin(math.radians(-60)), math.tan(math.radians(30))])
    in_front = points.numpy() @ eye > 0
    for chosen, alpha in ((~in_front, 0.3), (in_front, 1.0)):
        sphere.scatter(*points[chosen].T, s=45, color=COLORS[0], alpha=alpha, depthshade=False)
        for point in points[chosen]:
            sphere.plot(
                *torch.stack([torch.zeros(3).double(), point]).T, color=COLORS[0], alpha=0.5 * alpha, linewidth=1
            )
    sphere.set_box_aspect((1, 1, 1), zoom=1.5)
    sphere.set_axis_off()
    axes = figure.add_subplot(1, 2, 2)
    for name, vectors, color in (("random points", random, COLORS[1]), ("prototypes", points, COLORS[0])):
        cosines = (vectors @ vectors.T)[torch.triu(torch.ones(10, 10), 1).bool()].sort(descending=True).values
        axes.plot(range(1, 46), cosines, ".", label=name, color=color)
        axes.axhline(cosines.max(), color=color, linewidth=0.8, linestyle=":")
    axes.plot([], [], color="0.3", linewidth=0.8, linestyle=":", label="largest cosine")
    axes.set(xlabel="pairs, sorted", ylabel="cosine of a pair", ylim=(-1.05, 1.05))
    axes.legend(frameon=False)
    save(figure, "prototypes/ten_points.png")


def draw_false_accepts() -> None:
    """False accepts at 5 % of three thresholds for the bundled digits, as SVG, whose text follows a dark background."""
    rows = json.loads((DOCS.parent / "benchmarks" / "results" / "matching.json").read_text())["rows"]
    rates = {row["what"].removeprefix("Digits: accepted at 5% by "): row["value"] for row in rows}
    copies = rates["Digits: copies accepted at 5% by p-values"]
    bars = {
        "Theory: cosines of random directions": (rates["the best of random directions"], COLORS[1]),
        "Pooled: cosine that 5 % of all pairs exceed": (rates["pooled pairs"], COLORS[3]),
        "Groups: EmbeddingSpace": (rates["p-values"], COLORS[0]),
    }
    lines = ['<text y="16" font-weight="bold">Accepted, though nothing matches</text>']
    for number, (title, (rate, color)) in enumerate(bars.items()):
        top, width = 46 + 54 * number, 326 * rate
        lines += [
            f'<text y="{top}">{title}</text>',
            f'<rect y="{top + 7}" width="{width:.1f}" height="22" fill="{color}"/>',
            f'<text x="{width + 8:.1f}" y="{top + 23}" font-weight="bold">{100 * rate:.1f} %</text>',
            f'<path d="M{0.05 * 326:.1f} {top + 4}v28" stroke-width="2"/>',
        ]
    lines.append('<text y="209">Line: the 5 % that were asked for.</text>')
    lines.append(f'<text y="229">EmbeddingSpace accepts {100 * copies:.0f} % of copies in 4 grays.</text>')
    style = "text{fill:#222}path{stroke:#222}@media(prefers-color-scheme:dark){text{fill:#ddd}path{stroke:#ddd}}"
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 236" font-family="sans-serif" font-size="14">'
    path = DOCS / "search" / "false_accepts.svg"
    path.write_text("\n".join([head, f"<style>{style}</style>", *lines, "</svg>", ""]))
    print(path)


def read_runs(pattern: str) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of `results/runs` whose name matches, by their name without the seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((DOCS.parent / "results" / "runs").glob(f"{pattern}.json")):
        run = json.loads(path.read_text())
        groups.setdefault(run["group"], []).append(run)
    return groups


def draw_optimizers(network: str, metric: str, *rows: dict[str, str]) -> None:
    """A network on CIFAR-10: validation accuracy by learning rate, and accuracy by epoch with its range.

    Args:
        network: Start of the names of the runs.
        metric: Accuracy that the runs have by epoch.
        rows: For each row of panels, titles of the optimizers by the rest of the name.
    """
    figure, panels = plt.subplots(len(rows), 2, figsize=(8, 3 * len(rows)), squeeze=False)
    split = "test" if metric.startswith("eval") else "validation"
    for (left, right), names in zip(panels, rows, strict=True):
        for number, (name, title) in enumerate(names.items()):
            color = [*COLORS, "0.4", "#D55E00"][number]
            style = {"marker": "osD^vPX"[number], "markersize": 4, "color": color}
            sweep = read_runs(f"{network}-{name}-5epochs-tuning-learning_rate*")
            rates = sorted(
                (float(group.rpartition("rate")[2]), 100 * run["metrics"]["validation_accuracy"])
                for group, (run,) in sweep.items()
            )
            left.plot(*zip(*rates, strict=True), **style)
            runs = read_runs(f"{network}-{name}-5epochs-seed*").get(f"{network}-{name}-5epochs", [])
            if not runs:
                continue  # only its learning rates are known so far
            accuracies = 100 * np.array([run["history"][metric] for run in runs])
            epochs = np.arange(1, accuracies.shape[1] + 1)
            right.fill_between(epochs, accuracies.min(0), accuracies.max(0), alpha=0.15, linewidth=0, color=color)
            right.plot(epochs, accuracies.mean(0), label=title, **style)
        right.legend(frameon=False, fontsize=8, loc="lower right")
        left.set(xscale="log", xlabel="learning rate", ylabel="validation accuracy, %")
        right.set(xlabel="epoch", ylabel=f"{split} accuracy, %", xticks=epochs)
    panels[0, 0].set(title="by learning rate")
    panels[0, 1].set(title="by epoch")
    save(figure, f"optimizers/{network}.png")


def draw_dimensions() -> None:
    """Accuracy on MNIST by the number of dimensions: mean and range of the runs of `results/runs`."""
    runs = read_runs("mnist-lenet5-*").items()
    accuracies = {name: [100 * run["metrics"]["eval_accuracy"] for run in group] for name, group in runs}
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.8))
    heads = {"ten prototypes": "mnist-lenet5-d{}"}
    heads |= {head: f"mnist-lenet5-d3-heads-head{head}-embedding_dim{{}}" for head in ("softmax", "cosine")}
    for panel, smallest in zip(panels, (2, 4), strict=True):
        for (title, pattern), color, marker in zip(heads.items(), COLORS, "osD", strict=False):
            dims = [dim for dim in range(smallest, 10) if pattern.format(dim) in accuracies]
            found = [accuracies[pattern.format(dim)] for dim in dims]
            low, high = (list(map(choose, found)) for choose in (min, max))
            panel.fill_between(dims, low, high, color=color, alpha=0.2, linewidth=0)
            panel.plot(dims, [np.mean(values) for values in found], color=color, marker=marker, label=title)
        panel.axhline(np.mean(accuracies["mnist-lenet5-plain"]), color="0.4", ls="--", label="softmax, 84 dimensions")
        panel.set(xlabel="dimensions", ylabel="test accuracy, %", title=f"from {smallest} dimensions on")
    panels[0].legend(frameon=False, loc="lower right", fontsize=8)
    save(figure, "prototypes/dimensions.png")


def draw_transport() -> None:
    """Two steps of SGD on a circle: momentum kept as it is, and transported to the new weights."""
    x, momentum = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.55])
    y = x - momentum
    transported = (x.dot(y) * momentum - momentum.dot(y) * x) / y.dot(y)
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.4))
    for panel, buffer, title in zip(axes, (momentum, transported), ("SGD", "SGD-MRT"), strict=True):
        circle = np.linspace(-np.pi / 2.2, np.pi / 9, 200)
        for radius, style in ((1.0, "-"), (float(y.norm()), ":")):
            panel.plot(radius * np.cos(circle), radius * np.sin(circle), color="0.7", linestyle=style, linewidth=1)
        draw_arrow(panel, x, -momentum, COLORS[0], "step")
        draw_arrow(panel, y, -buffer, COLORS[1], "next step, momentum " + ("kept" if title == "SGD" else "transported"))
        for point, name in ((x, "x"), (y, "y")):
            panel.plot(*point, "o", color="black", markersize=4)
            panel.annotate(name, point, (6, 4), textcoords="offset points")
        panel.plot(0, 0, "+", color="0.4")
        panel.set(title=title, aspect="equal", xlim=(-0.1, 1.35), ylim=(-1.25, 0.4), xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
        panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.02), fontsize=8)
    save(figure, "optimizers/transport.png")


def draw_arrow(axes: plt.Axes, start: torch.Tensor, vector: torch.Tensor, color: str, label: str) -> None:
    """Draw a vector from a point."""
    axes.quiver(*start, *vector, color=color, label=label, angles="xy", scale_units="xy", scale=1, width=0.012)


def save(figure: plt.Figure, name: str) -> None:
    """Write a picture to the folder of the documentation."""
    path = DOCS / name
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    print(path)


def main() -> None:
    """Draw all pictures."""
    mpl.use("Agg")
    with mpl.rc_context(STYLE):
        draw_cosines()
        draw_concentration()
        draw_prototypes()
        draw_false_accepts()
        draw_dimensions()
        names = {"adamw": "AdamW", "adam_srt": "Adam-SRT", "muon": "Muon", "muon_hyperball": "Muon-hyperball"}
        draw_optimizers("cifar10-fast", "eval_accuracy", {"softmax": "SGD", **names})
        paper = {"sgd": "SGD", "sgd_mrt": "SGD-MRT", "adam": "Adam", "adam_g": "Adam-G", "adam_s": "Adam-S"}
        paper |= {"adam_srt": "Adam-SRT", "adamw": "AdamW"}
        others = {"adamw": "AdamW", "muon": "Muon", "muon_hyperball": "Muon-hyperball"}
        others |= {"adamw_hyperball": "AdamW-hyperball"}
        draw_optimizers("cifar10-resnet20", "validation_accuracy", paper, others)
        draw_transport()


if __name__ == "__main__":
    main()
