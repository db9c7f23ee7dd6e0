"""No text of a figure is small, cut or covered, also for long names, many classes and long titles."""

import pytest
import torch
from figure_texts import problems
from test_every_figure import FIGURES, OPTIONS
from torch import nn

from hf_sphere import visualization
from hf_sphere.comparison import compare_runs
from hf_sphere.hyperplanes import projection_statistics
from hf_sphere.visualization import Panel

TITLE = (
    "a title that is longer than a figure is wide, such as the path of a model and that of a dataset, and more words"
)
COUNTS = (2, 20, 50, 200)


def classes(count: int, dim: int = 3, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return points and labels without the class in the middle, and names of 40 characters."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.arange(8 * count) % count
    labels = labels[labels != count // 2]
    middles = torch.randn(count, dim, generator=generator) + shift
    points = middles[labels] + 0.25 * torch.randn(len(labels), dim, generator=generator)
    return points, labels, [f"class number {index:03d} of a long name, {'x' * 7}" for index in range(count)]


@pytest.mark.parametrize("name", FIGURES)
def test_with_a_long_title(name):
    figure = getattr(visualization, name)(*FIGURES[name], **OPTIONS.get(name, {}), title=TITLE)
    assert problems(figure) == []


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("dim", "shift"), [(3, 0.0), (3, 6.0), (64, 0.0)], ids=["all sides", "a cluster", "projected"])
def test_a_sphere_with_long_names(dim, shift, count):
    points, labels, names = classes(count, dim, shift)
    assert problems(visualization.plot_sphere(points, labels, names, directions=torch.randn(count, dim))) == []


@pytest.mark.parametrize("count", COUNTS[:3])
def test_a_circle_with_long_names(count):
    points, labels, names = classes(count, 2)
    assert problems(visualization.plot_circle(points, labels, names, title=TITLE)) == []


@pytest.mark.parametrize("count", COUNTS[:3])
@pytest.mark.parametrize("dim", [2, 3])
def test_a_gallery_with_long_names_and_titles(dim, count):
    points, labels, names = classes(count, dim)
    panels = {"one": Panel(points, labels, torch.randn(count, dim)), TITLE: Panel(points, labels)}
    panels["positive"] = Panel(points.abs(), labels)
    assert problems(visualization.plot_gallery(panels, names, dim=dim, title=TITLE)) == []


@pytest.mark.parametrize("count", [2, 20])
def test_a_comparison_of_runs_with_long_names(count):
    names = classes(count)[2]
    runs = {name: {seed: 60 + line + seed**0.5 for seed in range(5)} for line, name in enumerate(names)}
    comparison = compare_runs(runs, reference=names[0], higher_is_better=True, perfect=100, margin=0.5)
    assert problems(visualization.plot_comparison(comparison, title=TITLE)) == []


@pytest.mark.parametrize("count", [1, 60])
def test_figures_of_layers(count):
    network = nn.Sequential(*[nn.Conv2d(8, 8, 3) for _ in range(count)])
    statistics = projection_statistics(network).to_dict()
    training = {"epochs": [{"epoch": epoch, "projections": statistics, "train_accuracy": 0.5} for epoch in (0, 1, 200)]}
    cells = {"snapshots": {str(epoch): 0.5 for epoch in (0, 1, 25, 100)}, "random": {"mean": 0.1, "deviation": 0.02}}
    layers = {f"backbone.stages.{index}.layers.convolution": cells for index in range(count)}
    for figure in (
        visualization.plot_projection_masses(statistics, title=TITLE),
        visualization.plot_projection_histograms(training, title=TITLE),
        visualization.plot_projections_along_training(training, title=TITLE),
        visualization.plot_reinitialization({"accuracy": 0.9, "layers": layers, "missing": []}, title=TITLE),
    ):
        assert problems(figure) == []
