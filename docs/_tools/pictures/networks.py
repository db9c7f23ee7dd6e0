"""Pictures of networks: their layers, embeddings, decision boundaries, calibration, and comparisons of heads."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from hf_sphere.visualization.figures import LINE_COLORS, new_figure
from hf_sphere.visualization.scene import Panel, Scene
from hf_sphere.visualization.sphere import SphereScene, View, choose_view

from .style import FIXED, INK, MUTED, ROOT, WIDTH, Panels, label, panel, picture, read

PREFIX = "sphere_vision.backbone."
LABELS = {"true": "true labels", "random": "random labels"}


@picture
def lenet9() -> Panels:
    """LeNet-9 with true and random labels: masses of the layers, and accuracy with one layer reset."""
    for kind, content in read("results/pictures/lenet9.json").items():
        start, end = (np.array(list(content["masses"][epoch].values())) for epoch in ("0", "200"))
        rows = range(len(start))
        figure, axes = panel(f"Share of projections ≤ 0, {LABELS[kind]}", 2.2, xlim=(0, 1.04))
        axes.barh(rows, end[:, 2] - end[:, 1], 0.7, left=end[:, 1], color="0.85")
        axes.hlines(rows, start[:, 0], end[:, 0], color=LINE_COLORS[0], linewidth=1)
        axes.plot(start[:, 0], rows, "o", color=LINE_COLORS[0], fillstyle="none", markersize=6)
        axes.plot(end[:, 0], rows, "o", color=LINE_COLORS[0], markersize=6)
        axes.set_yticks(rows, [name.removeprefix(PREFIX) for name in content["masses"]["0"]])
        axes.invert_yaxis()
        yield f"lenet9-masses-{kind}", figure
        layers = content["reset"]["layers"]
        epochs = list(next(iter(layers.values()))["snapshots"])
        values = [[*layer["snapshots"].values(), layer["random"]["mean"]] for layer in layers.values()]
        figure, axes = panel(f"One layer reset, {LABELS[kind]}", 2.9, ylabel="layer")
        draw_cells(axes, 100 * np.array(values))
        axes.set_xticks(range(len(values[0])), [*epochs, "new"])
        axes.set_yticks(range(len(layers)), [name.removeprefix(PREFIX) for name in layers])
        axes.set_xlabel("to this epoch, or to new random weights")
        yield f"lenet9-reset-{kind}", figure


def draw_cells(axes: Any, values: np.ndarray) -> None:
    """Draw a heat map with numbers, in the same colors on light and dark pages."""
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    rows, columns = values.shape
    corners = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    axes.pcolormesh(*corners, values, cmap="viridis", vmin=0, vmax=100, gid=FIXED)
    for (row, column), value in np.ndenumerate(values):
        style = {"color": "white" if value < 60 else "black", "gid": f"{FIXED}-{row}-{column}"}
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", **style)
    axes.invert_yaxis()


@picture
def mnist_3d() -> Panels:
    """MNIST test images on the sphere in three dimensions, with four heads."""
    data = load_file(ROOT / "results" / "pictures" / "mnist_3d.safetensors")
    names = [str(digit) for digit in range(10)]

    def scene(head: str, view: View | None = None) -> Scene:
        directions = None if head.startswith("spherized") else data[f"{head}.directions"].double()
        return SphereScene(Panel(data[head].double(), data["labels"].long(), directions), names, view)

    figure = new_figure(WIDTH, 2.1)
    cells = figure.subplots(1, 2)
    octant = choose_view(torch.eye(3).double().abs())
    for axes, head, title in zip(cells, ("spherized", "spherized10"), ("radius 1", "radius 10"), strict=True):
        draw_scene(figure, axes, scene(head, View(octant.elevation, octant.azimuth)), f"Spherized, {title}")
    yield "mnist_3d-spherized", figure
    for head in ("cosine", "prototype", "vmf"):
        figure = new_figure(WIDTH, 2.1)
        axes = figure.subplots()
        view = choose_view(data[head].double())
        draw_scene(figure, axes, scene(head, View(view.elevation, view.azimuth, both_sides=True)), f"{head} head")
        yield f"mnist_3d-{head}", figure


def draw_scene(figure: Any, axes: Any, scene: Scene, title: str) -> None:
    """Draw a sphere with the names of its classes."""
    scene.draw(axes, scale=0.35)
    axes.set_title(title)
    figure.draw_without_rendering()
    scene.draw_names(axes, 9.0)


@picture
def toy_task() -> Panels:
    """Inputs of the last layers of a plain and a spherized network, with the line between the classes."""
    for kind, content in read("results/pictures/toy_task.json").items():
        points, labels = np.array(content["points"]), np.array(content["labels"])
        weight, bias = np.array(content["weight"]), np.array(content["bias"])
        limits = (-0.2, 1.2) if kind == "spherized" else (-0.2, 1.0)
        figure, axes = panel(f"{kind.capitalize()}: inputs of the last layer", 3.4, xlim=limits, ylim=limits)
        axes.set_aspect("equal")
        if kind == "spherized":
            turn = np.linspace(0, np.pi / 2, 91)
            axes.plot(np.cos(turn), np.sin(turn), color="0.85", linewidth=5, solid_capstyle="round", zorder=0)
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.axvline(0, color=MUTED, linewidth=0.8)
        for each, color in enumerate(LINE_COLORS[:2]):
            chosen = points[labels == each]
            axes.plot(*chosen.T, ".", color=color)
            label(axes, f"class {each}", chosen.mean(0).tolist(), color, xytext=(10, 6))
        difference, offset = weight[1] - weight[0], bias[1] - bias[0]
        nearest = -offset * difference / (difference @ difference)
        along = np.array([-difference[1], difference[0]])
        line = np.stack([nearest - 100 * along, nearest + 100 * along])
        axes.plot(*line.T, color=INK, linewidth=1, scalex=False, scaley=False)
        yield f"toy_task-{kind}", figure


@picture
def calibration() -> Panels:
    """Accuracy against confidence, as trained and with a fitted temperature."""
    figure, axes = panel("Accuracy, %", 2.9, xlabel="confidence, %", xlim=(20, 102), ylim=(20, 104))
    axes.plot((20, 100), (20, 100), "--", color=MUTED, linewidth=1)
    curves = read("benchmarks/results/calibration.json")["curves"]
    for (title, curve), color, at in zip(curves.items(), LINE_COLORS, ((44, 76), (62, 50)), strict=False):
        axes.plot(100 * np.array(curve["confidence"]), 100 * np.array(curve["accuracy"]), "o-", color=color)
        label(axes, title, at, color, xytext=(0, 0), ha="right" if at[0] < 50 else "left")
    yield "calibration", figure


@picture
def compare_heads() -> Panels:
    """Accuracies of heads on a frozen backbone, and intervals of their differences from softmax."""
    heads = read("results/pictures/compare_heads.json")
    lines = range(len(heads))
    figure, axes = panel("Accuracy of each seed, and mean, %", 1.7)
    for line, head in enumerate(heads.values()):
        axes.plot(head["runs"], [line] * len(head["runs"]), "o", color=LINE_COLORS[0], fillstyle="none", markersize=5)
        axes.plot(np.mean(head["runs"]), line, "|", color=INK, markersize=14, markeredgewidth=2)
    axes.set_yticks(lines, heads)
    axes.invert_yaxis()
    yield "compare_heads-seeds", figure
    figure, axes = panel("Difference from softmax, points", 1.7)
    axes.axvspan(-0.5, 0.5, color="0.92", zorder=0)
    axes.axvline(0, color=MUTED, linewidth=1)
    for line, head in enumerate(heads.values()):
        if "difference" in head:
            axes.plot([head["low"], head["high"]], [line, line], color=LINE_COLORS[0], linewidth=2)
            axes.plot(head["difference"], line, "|", color=INK, markersize=14, markeredgewidth=2)
    axes.set_yticks(lines, heads)
    axes.set_ylim(len(heads) - 0.5, -0.5)
    yield "compare_heads-differences", figure


@picture
def contact_sheet() -> Panels:
    """A query and its five nearest neighbors in an index."""
    strip = np.asarray(Image.open(ROOT / "results" / "pictures" / "horses.png"))
    found = read("results/pictures/horses.json")
    figure = new_figure(WIDTH, 2.9)
    cells = figure.subplots(2, 3).flatten()
    for axes, (number, text) in zip(cells, [(0, "query: 00007.png"), *enumerate(found)], strict=True):
        axes.imshow(strip[:, 32 * number : 32 * number + 32], interpolation="bilinear")
        axes.set(xticks=[], yticks=[], xlabel=text)
        axes.spines[:].set_visible(False)
    yield "contact_sheet", figure
