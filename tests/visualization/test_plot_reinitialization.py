import itertools
from typing import Any

import numpy as np
import pytest

from hf_sphere.visualization import plot_reinitialization


def layer(*accuracies: float | None, random: float | None = None, deviation: float | None = 0.02) -> dict[str, Any]:
    """A layer reset to epochs 0, 5, 10, ..."""
    draws = None if random is None else {"mean": random, "deviation": deviation, "values": [random]}
    return {"snapshots": {str(5 * at): value for at, value in enumerate(accuracies)}, "random": draws}


def robustness(accuracy: float = 0.9, **layers: dict[str, Any]) -> dict[str, Any]:
    return {"accuracy": accuracy, "layers": layers, "missing": []}


def large(rows: int, columns: int) -> dict[str, Any]:
    return robustness(**{f"features.{row}": layer(*[0.5] * columns, random=0.1) for row in range(rows)})


def numbers_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def labels_of(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def columns_of(figure) -> list[list[float]]:
    """Values of the cells by column; nan for missing cells."""
    return [mesh.get_array().filled(np.nan).flatten().tolist() for mesh in figure.axes[0].collections]


def sides_of(figure) -> list[tuple[float, float]]:
    """Left and right end of each column."""
    corners = [mesh.get_coordinates()[0, :, 0] for mesh in figure.axes[0].collections]
    return [(left, right) for left, right in corners]


def test_a_cell_shows_an_accuracy_in_percent_in_the_row_of_its_layer_and_the_column_of_its_epoch():
    figure = plot_reinitialization(robustness(a=layer(0.1, 0.5), b=layer(0.2, 0.75)))
    assert columns_of(figure) == [pytest.approx([10, 20]), pytest.approx([50, 75])]
    assert numbers_of(figure) == ["10.0", "50.0", "20.0", "75.0"]
    assert figure.legends == []  # which would explain missing cells
    axes = figure.axes[0]
    assert (labels_of(axes.yaxis), labels_of(axes.xaxis)) == (["a", "b"], ["0", "5"])
    assert axes.yaxis_inverted()
    assert numbers_of(plot_reinitialization(robustness(accuracy=0.0, a=layer(0.0, 0.0)))) == ["0.0", "0.0"]


def test_epochs_are_sorted_numerically():
    layers = {"a": {"snapshots": {"10": 0.3, "0": 0.1, "5": 0.2}, "random": None}}
    figure = plot_reinitialization(robustness(**layers))
    assert labels_of(figure.axes[0].xaxis) == ["0", "5", "10"]
    assert columns_of(figure) == [pytest.approx([10]), pytest.approx([20]), pytest.approx([30])]


def test_random_draws_are_in_a_separate_column_with_the_deviation_of_several():
    figure = plot_reinitialization(robustness(a=layer(0.1, 0.5, random=0.25)))
    first, second, draws = sides_of(figure)
    assert first[1] == second[0]
    assert draws[0] > second[1]
    assert labels_of(figure.axes[0].xaxis)[-1] == "random\nweights"
    assert numbers_of(figure)[-1] == "25.0 ± 2.0"
    alone = plot_reinitialization(robustness(a=layer(random=0.25, deviation=None)))
    assert (numbers_of(alone), labels_of(alone.axes[0].xaxis)) == (["25.0"], ["random\nweights"])
    assert alone.axes[0].get_xlabel() == ""


def test_missing_cells_are_hatched_and_explained():
    short = layer(0.3, random=0.1)  # has no epoch 5
    figure = plot_reinitialization(robustness(a=layer(0.1, None), b=short))
    hatched = [(patch.get_x(), patch.get_y()) for patch in figure.axes[0].patches if patch.get_hatch()]
    assert hatched == [(1, -0.5), (sides_of(figure)[2][0], -0.5), (1, 0.5)]
    assert numbers_of(figure) == ["10.0", "30.0", "10.0 ± 2.0"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["not measured"]


def test_the_accuracy_of_the_trained_model_is_marked_on_the_color_bar():
    bar = plot_reinitialization(robustness(accuracy=0.912, a=layer(0.1))).axes[1]
    assert bar.get_ylabel() == "accuracy, % (as trained: 91.2)"
    assert [line.get_ydata() for line in bar.get_lines() if len(line.get_ydata()) == 1] == [pytest.approx([91.2])]


def test_a_relative_drop_is_in_percent_of_the_accuracy_of_the_trained_model():
    figure = plot_reinitialization(
        robustness(accuracy=0.8, a=layer(0.2, 0.8, random=0.6)), quantity="relative_drop", metric="top-5 accuracy"
    )
    assert columns_of(figure) == [pytest.approx([75]), pytest.approx([0]), pytest.approx([25])]
    assert numbers_of(figure) == ["75.0", "0.0", "25.0 ± 2.5"]
    bar = figure.axes[1]
    assert bar.get_ylabel() == "drop, % of the top-5 accuracy (80.0 %)"
    assert [line.get_ydata() for line in bar.get_lines() if len(line.get_ydata()) == 1] == [pytest.approx([0])]


@pytest.mark.parametrize("quantity", ["relative_drop", "accuracy"])
def test_critical_layers_are_dark_with_white_numbers(quantity):
    figure = plot_reinitialization(robustness(a=layer(0.1, 0.9)), quantity=quantity)
    assert [text.get_color() for text in figure.axes[0].texts] == ["white", "black"]


@pytest.mark.parametrize(("accuracy", "scale"), [(0.9, (10, 90)), (0.2, (10, 50)), (0.05, (5, 50))])
def test_the_color_range_covers_the_cells_and_the_trained_model(accuracy, scale):
    figure = plot_reinitialization(robustness(accuracy=accuracy, a=layer(0.1, 0.5)))
    assert [mesh.get_clim() for mesh in figure.axes[0].collections] == [pytest.approx(scale)] * 2


@pytest.mark.parametrize(("columns", "number"), [(8, "50.0"), (15, "50"), (30, None)])
def test_numbers_have_as_many_digits_as_fit(columns, number):
    figure = plot_reinitialization(large(4, columns))
    assert (numbers_of(figure) or [None])[0] == number


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (8, 9), (16, 15), (60, 7)])
def test_numbers_fit_in_their_cells(rows, columns):
    figure = plot_reinitialization(large(rows, columns))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    sides = sides_of(figure)
    assert len(axes.texts) == rows * (columns + 1)
    for place, text in enumerate(axes.texts):
        row, column = divmod(place, columns + 1)
        left, right = sides[column]
        (x0, y0), (x1, y1) = axes.transData.transform([(left, row + 0.5), (right, row - 0.5)])
        box = text.get_window_extent()
        assert x0 < box.x0 < box.x1 < x1
        assert y0 < box.y0 < box.y1 < y1


@pytest.mark.parametrize("columns", [1, 12, 30])
def test_column_names_do_not_overlap(columns):
    figure = plot_reinitialization(large(60, columns))
    figure.draw_without_rendering()
    shown = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in shown]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert (shown[0].get_text(), shown[-1].get_text()) == ("0", "random\nweights")


def test_layers_of_our_backbones_are_named_as_in_the_backbone_and_long_names_shortened():
    layers = {"sphere_vision.backbone.layers.0": layer(0.1), "head.linear": layer(0.2)}
    assert labels_of(plot_reinitialization(robustness(**layers)).axes[0].yaxis) == ["layers.0", "head.linear"]
    names = [f"resnet.encoder.stages.{stage}.layers.0.layer.1.convolution" for stage in range(2)]
    figure = plot_reinitialization(robustness(**{name: layer(0.5) for name in names}))
    assert labels_of(figure.axes[0].yaxis) == ["stages.0", "stages.1"]


def test_bad_input_is_refused():
    for layers in ({}, {"a": layer()}, {"a": layer(None, None)}):
        with pytest.raises(ValueError, match="there are no accuracies to draw"):
            plot_reinitialization(robustness(**layers))
    with pytest.raises(ValueError, match="accuracy of 0, so a relative drop is undefined"):
        plot_reinitialization(robustness(accuracy=0.0, a=layer(0.1)), quantity="relative_drop")
