import itertools
import sys
from typing import Any

import pytest

from hf_sphere.visualization import plot_training_curves

History = list[dict[str, float]]


@pytest.fixture(autouse=True)
def _needs_matplotlib() -> None:
    pytest.importorskip("matplotlib")


def history(*accuracies: float) -> History:
    return [{"epoch": float(epoch), "eval_accuracy": value} for epoch, value in enumerate(accuracies, 1)]


def axes_of(curves: dict[str, list[History]], **options: Any):
    (axes,) = plot_training_curves(curves, **{"metric": "eval_accuracy"} | options).axes
    return axes


def points(line) -> list[tuple[float, float]]:
    return [(pytest.approx(x), pytest.approx(y, rel=1e-5)) for x, y in zip(*line.get_data(), strict=True)]


def band(collection) -> set[tuple[float, float]]:
    return {(round(x, 4), round(y, 4)) for x, y in collection.get_paths()[0].vertices.tolist()}


def test_a_curve_shows_accuracies_in_percent():
    (line,) = axes_of({"adam": [history(0.25, 0.5)]}).get_lines()
    assert points(line) == [(1.0, 25.0), (2.0, 50.0)]


def test_a_curve_can_be_drawn_against_another_key():
    run = [{"epoch": 1.0, "minutes": 1.5, "eval_accuracy": 0.25}, {"epoch": 2.0, "minutes": 2.5, "eval_accuracy": 0.5}]
    axes = axes_of({"adam": [run]}, against="minutes")
    assert points(axes.get_lines()[0]) == [(1.5, 25.0), (2.5, 50.0)]
    assert axes.get_xlabel() == "minutes"


def test_metrics_other_than_accuracy_are_not_scaled():
    run = [{"epoch": 1.0, "train_loss": 2.5}, {"epoch": 2.0, "train_loss": 1.5}]
    axes = axes_of({"adam": [run]}, metric="train_loss")
    assert points(axes.get_lines()[0]) == [(1.0, 2.5), (2.0, 1.5)]
    assert axes.get_ylabel() == "train loss"


def test_one_run_has_no_band():
    assert len(axes_of({"adam": [history(0.25, 0.5)]}).collections) == 0


def test_several_runs_are_drawn_as_mean_and_range():
    axes = axes_of({"adam": [history(0.2, 0.5), history(0.4, 0.5), history(0.3, 0.8)]})
    assert points(axes.get_lines()[0]) == [(1.0, 30.0), (2.0, 60.0)]
    assert band(axes.collections[0]) == {(1.0, 20.0), (2.0, 50.0), (2.0, 80.0), (1.0, 40.0)}


def test_runs_of_different_length_are_cut_to_the_shortest():
    axes = axes_of({"adam": [history(0.2, 0.4, 0.9), history(0.4, 0.6)], "sgd": [history(0.1, 0.2, 0.3, 0.4)]})
    assert points(axes.get_lines()[0]) == [(1.0, 30.0), (2.0, 50.0)]
    assert len(axes.get_lines()[1].get_xdata()) == 4


def test_runs_without_epochs_are_omitted():
    axes = axes_of({"adam": [[], history(0.2, 0.4)], "sgd": [[]], "adam_srt": []})
    assert [points(line) for line in axes.get_lines()] == [[(1.0, 20.0), (2.0, 40.0)]]
    assert len(axes.collections) == 0


@pytest.mark.parametrize("curves", [{}, {"adam": []}, {"adam": [[]], "sgd": []}], ids=str)
def test_empty_input_is_rejected(curves):
    with pytest.raises(ValueError, match="no run has eval_accuracy to draw"):
        plot_training_curves(curves, metric="eval_accuracy")


def test_runs_without_the_metric_are_rejected():
    with pytest.raises(ValueError, match="no run has eval_accuracy to draw"):
        plot_training_curves({"adam": [[{"epoch": 1.0, "validation_accuracy": 0.5}]]}, metric="eval_accuracy")


def test_axes_and_title_are_labeled():
    axes = axes_of({"adam": [history(0.5)]}, title="cifar10-resnet20")
    assert (axes.get_title(), axes.get_xlabel()) == ("cifar10-resnet20", "epoch")
    assert axes.get_ylabel() == "evaluation accuracy, %"


def test_the_legend_is_sorted_by_the_final_value():
    legend = axes_of({"adam": [history(0.9, 0.5)], "sgd": [history(0.1, 0.7)], "adam_s": [history(0.6)]}).get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["sgd  70.00", "adam_s  60.00", "adam  50.00"]


def test_legend_colors_match_the_curves():
    axes = axes_of({"adam": [history(0.5)], "sgd": [history(0.7)], "adam_s": [history(0.6)]})
    drawn = {line.get_label(): line.get_color() for line in axes.get_lines()}
    handles, texts = axes.get_legend().legend_handles, axes.get_legend().get_texts()
    shown = {text.get_text().split()[0]: handle.get_color() for handle, text in zip(handles, texts, strict=True)}
    assert shown == drawn


def test_curves_with_equal_final_values_are_all_in_the_legend():
    legend = axes_of({"adam": [history(0.5)], "sgd": [history(0.5)]}).get_legend()
    assert sorted(text.get_text() for text in legend.get_texts()) == ["adam  50.00", "sgd  50.00"]


def test_seven_curves_are_distinguishable():
    lines = axes_of({f"kind {number}": [history(number / 10, 0.5)] for number in range(7)}).get_lines()
    assert len({line.get_color() for line in lines}) == 7
    assert all(one.get_linestyle() != other.get_linestyle() for one, other in itertools.pairwise(lines))


@pytest.mark.parametrize(("epochs", "marked"), [(11, True), (12, False)])
def test_single_epochs_are_marked_if_there_are_few(epochs, marked):
    (line,) = axes_of({"adam": [history(*[0.5] * epochs)]}).get_lines()
    assert (line.get_marker() == "o") == marked


@pytest.mark.parametrize(("name", "start"), [("curves.png", b"\x89PNG"), ("curves.pdf", b"%PDF")])
def test_the_figure_is_written_into_a_new_folder(tmp_path, name, start):
    path = tmp_path / "new" / name
    plot_training_curves({"adam": [history(0.25, 0.5)]}, metric="eval_accuracy", path=path)
    assert path.read_bytes().startswith(start)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[plots\]'"):
        plot_training_curves({"adam": [history(0.5)]}, metric="eval_accuracy")
