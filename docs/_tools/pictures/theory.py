"""Pictures of formulas: densities, prototypes, steps of optimizers, settings of the spherization."""

import math

import numpy as np
import torch
from matplotlib.ticker import NullLocator
from scipy.stats import beta

from hf_sphere.geometry import log_vmf_normalizer, mean_resultant_length
from hf_sphere.prototypes import place_prototypes
from hf_sphere.visualization.figures import LINE_COLORS, new_figure
from hf_sphere.visualization.scene import Panel
from hf_sphere.visualization.sphere import SphereScene, View

from .style import INK, MUTED, WIDTH, Panels, label, label_ends, panel, picture, read

DIMS = (3, 16, 128, 512)


@picture
def cosines() -> Panels:
    """Densities of the cosine of two random directions, by dimension."""
    figure, axes = panel("Density of the cosine of random directions", xlabel="cosine", ylim=(0, 10))
    axes.set_xticks(np.linspace(-1, 1, 5))
    grid = np.linspace(-1, 1, 1001)
    for dim, color, place in zip(DIMS, LINE_COLORS, (0.7, 0.35, 0.12, 0.06), strict=False):
        density = beta((dim - 1) / 2, (dim - 1) / 2, -1, 2).pdf
        axes.plot(grid, density(grid), color=color)
        label(axes, f"d = {dim}", (place, density(place)), color, xytext=(4, 7))
    yield "cosines", figure


@picture
def concentration() -> Panels:
    """Density by angle on the sphere in three dimensions, and mean resultant length by concentration."""
    figure, axes = panel("Density in three dimensions, by κ", yscale="log")
    angles = torch.linspace(0, math.pi, 400, dtype=torch.float64)
    for kappa, color, place in zip((1.0, 4.0, 16.0, 64.0), LINE_COLORS, (150, 130, 78, 37), strict=False):
        constant = log_vmf_normalizer(torch.tensor(kappa, dtype=torch.float64), 3)
        axes.plot(angles.rad2deg(), torch.exp(constant + kappa * angles.cos()), color=color)
        height = math.exp(constant + kappa * math.cos(math.radians(place)))
        label(axes, f"κ = {kappa:g}", (place, height), color, xytext=(3, 7))
    axes.set(xlim=(0, 180), ylim=(1e-6, 300), xticks=range(0, 181, 45), xlabel="angle to the mean direction, degrees")
    yield "concentration-density", figure
    figure, axes = panel("Mean resultant length, by dimension", xscale="log", xlabel="concentration κ", ylim=(0, 1.02))
    kappas = torch.logspace(-1, 5, 400, dtype=torch.float64)
    for dim, color, place in zip(DIMS, LINE_COLORS, (0.8, 0.62, 0.44, 0.26), strict=False):
        lengths = mean_resultant_length(kappas, dim)
        axes.plot(kappas, lengths, color=color)
        label(axes, f"d = {dim}", (float(kappas[(lengths > place).int().argmax()]), place), color)
    yield "concentration-length", figure


@picture
def ten_points() -> Panels:
    """Ten prototypes in three dimensions: the points, and their cosines beside those of random points."""
    points = place_prototypes(10, 3).prototypes.double()
    generator = torch.Generator().manual_seed(0)
    random = torch.nn.functional.normalize(torch.randn(10, 3, generator=generator).double(), dim=1)
    figure = new_figure(WIDTH, 2.0)
    axes = figure.subplots()
    view = View(20.0, 30.0, both_sides=True)
    SphereScene(Panel(points, torch.zeros(10).long()), ["prototype"], view).draw(axes, scale=3.0)
    for cloud in axes.collections:
        cloud.set(facecolor=LINE_COLORS[0], alpha=1.0)
    axes.set_title("Ten prototypes")
    yield "ten_points-sphere", figure
    figure, axes = panel("Cosines of the 45 pairs, sorted", 2.0, xlabel="pair", ylim=(-1.05, 1.1))
    for name, vectors, color, at in (
        ("prototypes", points, LINE_COLORS[0], (18, 0.4)),
        ("random points", random, LINE_COLORS[1], (8, 0.72)),
    ):
        found = (vectors @ vectors.T)[torch.triu(torch.ones(10, 10), 1).bool()].sort(descending=True).values
        axes.plot(range(1, 46), found, ".", color=color)
        label(axes, f"{name}: at most {found.max():.2f}", at, color, xytext=(8, 6))
    yield "ten_points-cosines", figure


@picture
def transport() -> Panels:
    """Two steps of SGD on a circle: momentum kept as it is, and transported to the new weights."""
    x, momentum = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.55])
    y = x - momentum
    moved = (x.dot(y) * momentum - momentum.dot(y) * x) / y.dot(y)
    for name, title, buffer, kind in (
        ("sgd", "SGD: the momentum is kept", momentum, "next step,\naway from\nthe sphere"),
        ("sgd_mrt", "SGD-MRT: the momentum is transported", moved, "next step,\nalong the\nsphere"),
    ):
        figure, axes = panel(title, 2.5, aspect="equal", xlim=(-0.1, 1.6), ylim=(-1.2, 0.25), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)
        turn = np.linspace(-np.pi / 2.2, np.pi / 12, 200)
        for radius, style in ((1.0, "-"), (float(y.norm()), ":")):
            axes.plot(radius * np.cos(turn), radius * np.sin(turn), color=MUTED, linestyle=style, linewidth=1)
        for start, vector, color in ((x, -momentum, LINE_COLORS[0]), (y, -buffer, LINE_COLORS[1])):
            axes.quiver(*start, *vector, color=color, angles="xy", scale_units="xy", scale=1, width=0.015)
        label(axes, "step", (x - momentum / 2).tolist(), LINE_COLORS[0], xytext=(6, 0))
        label(axes, kind, (y - buffer / 2).tolist(), LINE_COLORS[1], xytext=(8, -6))
        for point, letter in ((x, "weights x"), (y, "weights y")):
            axes.plot(*point, "o", color=INK)
            label(axes, letter, point.tolist(), xytext=(7, 4))
        axes.plot(0, 0, "+", color=MUTED, markersize=8)
        label(axes, "origin", (0, 0), MUTED, xytext=(6, 8))
        yield f"transport-{name}", figure


@picture
def settings() -> Panels:
    """How slope and floor of the spherization share out length and gradient over the coordinates."""
    curves = read("results/pictures/spherization_settings.json")
    figure, axes = panel("Squared length in coordinates 1 to k, %", 2.6, xlabel="k", ylim=(0, 118))
    places = ((20, 105, "left"), (18, 84, "left"), (40, 49, "left"), (40, 18, "left"))
    for (name, values), color, (*at, side) in zip(curves.items(), LINE_COLORS, places, strict=False):
        axes.plot(range(1, len(values["length"]) + 1), values["length"], color=color)
        label(axes, name, at, color, ha=side)
    axes.plot([0, 65], [0, 100], ":", color=MUTED, linewidth=1)
    label(axes, "equal shares", (43, 68), MUTED, ha="right")
    yield "settings-length", figure
    figure, axes = panel("Gradient with respect to coordinate k", 2.6, xlabel="k", yscale="log")
    for (name, values), color in zip(curves.items(), LINE_COLORS, strict=False):
        axes.plot(range(1, len(values["gradient"]) + 1), values["gradient"], color=color, label=name)
    label_ends(figure, axes)
    yield "settings-gradient", figure


@picture
def vmf_accuracy() -> Panels:
    """Errors of the von Mises-Fisher functions in float64 against 40-digit arithmetic."""
    table = read("benchmarks/results/vmf_accuracy.json")["table"]
    dims = sorted({row["d"] for row in table})
    names = {"slope": "slope of A", "mean_resultant_length": "A", "log_normalizer": "log C"}
    figure, axes = panel("Largest error for κ = 0.001 to 10⁶, in 1e-16", ylim=(0, 6.5), xlabel="dimension d")
    for (name, title), color in zip(names.items(), LINE_COLORS, strict=False):
        errors = [1e16 * max(row[name] for row in table if row["d"] == dim) for dim in dims]
        axes.plot(dims, errors, "o-", color=color, label=title)
    axes.set_xscale("log")
    axes.set_xticks([2, 16, 128, 768, 4096], ["2", "16", "128", "768", "4096"])
    axes.xaxis.set_minor_locator(NullLocator())
    label_ends(figure, axes)
    yield "vmf_accuracy", figure
