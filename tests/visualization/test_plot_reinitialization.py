from typing import Any

import numpy as np
import pytest

from hf_sphere.visualization import plot_reinitialization


def layer(*accuracies: float | None, random: float | None = None) -> dict[str, Any]:
    """A layer reset to epochs 0, 5, 10, ..."""
    draws = None if random is None else {"mean": random, "deviation": None, "values": [random]}
    return {"snapshots": {str(5 * at): value for at, value in enumerate(accuracies)}, "random": draws}


def robustness(accuracy: float = 0.9, **layers: dict[str, Any]) -> dict[str, Any]:
    return {"accuracy": accuracy, "layers": layers, "missing": []}


def labels_of(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def columns_of(figure) -> list[list[float]]:
    """Values of the cells by column; nan for missing cells."""
    (mesh,) = figure.axes[0].collections
    return mesh.get_array().filled(np.nan).T.tolist()


def test_cells_are_accuracies_in_percent_by_layer_from_top_to_bottom_and_epoch_in_numerical_order():
    layers = {"a": {"snapshots": {"10": 0.3, "0": 0.1, "5": 0.2}, "random": None}, "b": layer(0.5, 0.75, 1.0)}
    figure = plot_reinitialization(robustness(**layers))
    assert columns_of(figure) == [pytest.approx([10, 50]), pytest.approx([20, 75]), pytest.approx([30, 100])]
    axes = figure.axes[0]
    assert (labels_of(axes.yaxis), labels_of(axes.xaxis)) == (["a", "b"], ["0", "5", "10"])
    assert axes.yaxis_inverted()
    assert figure.legends == []  # which would explain missing cells


def test_random_draws_are_in_the_last_column():
    figure = plot_reinitialization(robustness(a=layer(0.1, 0.5, random=0.25)))
    assert columns_of(figure) == [pytest.approx([10]), pytest.approx([50]), pytest.approx([25])]
    assert [line.get_xdata() for line in figure.axes[0].get_lines()] == [[2, 2]]  # sets them apart
    assert labels_of(figure.axes[0].xaxis)[-1] == "random\nweights"


@pytest.mark.parametrize(("snapshots", "apart"), [((0.1,), [[1, 1]]), ((), [])])
def test_random_draws_are_set_apart_from_snapshots_if_there_are_any(snapshots, apart):
    figure = plot_reinitialization(robustness(a=layer(*snapshots, random=0.25)))
    assert [line.get_xdata() for line in figure.axes[0].get_lines()] == apart


def test_missing_cells_are_empty_and_explained():
    short = layer(0.3, random=0.1)  # has no epoch 5
    figure = plot_reinitialization(robustness(a=layer(0.1, None), b=short))
    missing = [[row for row, value in enumerate(column) if np.isnan(value)] for column in columns_of(figure)]
    assert missing == [[], [0, 1], [0]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["not measured"]


def test_a_relative_drop_is_in_percent_of_the_accuracy_of_the_trained_model():
    figure = plot_reinitialization(
        robustness(accuracy=0.8, a=layer(0.2, 0.8, random=0.6)), quantity="relative_drop", metric="top-5 accuracy"
    )
    assert columns_of(figure) == [pytest.approx([75]), pytest.approx([0]), pytest.approx([25])]
    bar = figure.axes[1]
    assert bar.get_ylabel() == "drop, % of the top-5 accuracy (80.0 %)"
    assert [line.get_ydata() for line in bar.get_lines() if len(line.get_ydata()) == 1] == [pytest.approx([0])]


@pytest.mark.parametrize(("accuracy", "scale"), [(0.9, (10, 90)), (0.2, (10, 50)), (0.05, (5, 50))])
def test_the_color_range_covers_the_cells_and_the_trained_model_which_is_marked(accuracy, scale):
    figure = plot_reinitialization(robustness(accuracy=accuracy, a=layer(0.1, 0.5)))
    assert [mesh.get_clim() for mesh in figure.axes[0].collections] == [pytest.approx(scale)]
    bar = figure.axes[1]
    assert bar.get_ylabel() == f"accuracy, % (as trained: {100 * accuracy:.1f})"
    marks = [line.get_ydata() for line in bar.get_lines() if len(line.get_ydata()) == 1]
    assert marks == [pytest.approx([100 * accuracy])]


def test_layers_are_named_as_in_their_backbone_and_shortly():
    layers = {"sphere_vision.backbone.layers.0": layer(0.1), "head.linear": layer(0.2)}
    assert labels_of(plot_reinitialization(robustness(**layers)).axes[0].yaxis) == ["layers.0", "head.linear"]
