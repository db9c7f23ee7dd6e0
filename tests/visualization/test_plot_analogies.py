import pytest
from figure_texts import legend_of

from hf_sphere.visualization import plot_analogy_accuracies


def result(
    model: str = "bert", benchmark: str = "sat", scoring: str = "pmi", accuracy: float = 0.4, **more: float
) -> dict:
    names = {"model": model, "benchmark": benchmark, "scoring": scoring, "eval_accuracy": accuracy}
    interval = {"eval_accuracy_low": accuracy - 0.05, "eval_accuracy_high": accuracy + 0.08}
    return {**names, **interval, "chance_level": 0.2, **more}


def bars_of(axes) -> list[tuple[float, float]]:
    """Center and height of each bar."""
    return [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]


def test_a_bar_shows_an_accuracy_in_percent_with_its_interval():
    figure = plot_analogy_accuracies([result(accuracy=0.4), result(benchmark="u2", accuracy=0.3)])
    assert bars_of(figure.axes[0]) == [(pytest.approx(0.0), pytest.approx(40)), (pytest.approx(1.0), pytest.approx(30))]
    (bar,) = (part for part in figure.axes[0].containers if hasattr(part, "has_yerr"))
    assert bar.lines[2][0].get_segments()[0][:, 1] == pytest.approx([35, 48])
    both = [result(accuracy=0.0, eval_accuracy_low=0.0), result("b", accuracy=1.0, eval_accuracy_high=1.0)]
    assert [height for _, height in bars_of(plot_analogy_accuracies(both).axes[0])] == [0, 100]


def test_bars_of_several_models_are_side_by_side():
    figure = plot_analogy_accuracies([result(model=name, benchmark=b) for name in ("a", "b", "c") for b in ("x", "y")])
    middles = sorted(middle for middle, _ in bars_of(figure.axes[0]))
    assert middles == pytest.approx([-0.8 / 3, 0, 0.8 / 3, 1 - 0.8 / 3, 1, 1 + 0.8 / 3])


def test_the_guessing_line_spans_the_group():
    axes = plot_analogy_accuracies([result("a"), result("b")]).axes[0]
    ((guessing,),) = (part.get_segments() for part in axes.collections if part.get_label() == "guessing")
    assert guessing[:, 1] == pytest.approx([20, 20])
    assert guessing[0, 0] < -0.4
    assert guessing[1, 0] > 0.4


def test_every_scoring_has_its_own_panel_on_a_shared_scale():
    figure = plot_analogy_accuracies([result(scoring=name) for name in ("pmi", "perplexity", "marginal_bias")])
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == ["pmi", "perplexity", "marginal bias"]
    figure = plot_analogy_accuracies([result(accuracy=0.1), result(scoring="perplexity", accuracy=0.9)])
    first, second = (axes.get_ylim() for axes in figure.axes)
    assert first == second
    assert first[0] == 0
    assert 98 < first[1] <= 101


def test_a_model_without_a_result_for_a_scoring_leaves_a_gap():
    figure = plot_analogy_accuracies([result("a"), result("b"), result("b", scoring="perplexity")])
    assert bars_of(figure.axes[1]) == [(pytest.approx(0.2), pytest.approx(40))]
    assert legend_of(figure) == ["a", "b", "guessing"]
