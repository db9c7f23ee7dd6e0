from types import SimpleNamespace

import numpy as np
import pytest
import torch
from figure_texts import legend_of
from scipy.stats import binomtest

from hf_sphere.metrics import class_angles
from hf_sphere.visualization import plot_class_angles, plot_reliability, plot_risk_coverage


def bins_of(*bins: tuple[float, float, int]) -> SimpleNamespace:
    """Bins of (confidence, accuracy, count)."""
    confidence, accuracy, count = zip(*bins, strict=True)
    return SimpleNamespace(
        confidence=torch.tensor(confidence), accuracy=torch.tensor(accuracy), count=torch.tensor(count)
    )


def curves_of(figure) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in figure.axes[0].get_lines()}


class TestReliability:
    def test_a_bin_that_is_not_empty_is_a_point_in_percent_with_its_number_of_images_below(self):
        bins = bins_of((0.3, 0.25, 40), (float("nan"), float("nan"), 0), (0.9, 0.8, 10))
        figure = plot_reliability(bins, title="digits", caption="error 5 %")
        ((points, *_),) = (container.lines for container in figure.axes[0].containers)
        assert points.get_xydata() == pytest.approx(np.array([[30.0, 25.0], [90.0, 80.0]]), rel=1e-5)
        (bars,) = figure.axes[1].collections
        assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[0.0, 40.0], [0.0, 10.0]]
        assert (figure.get_suptitle(), figure.get_supxlabel()) == ("digits", "error 5 %")

    @pytest.mark.parametrize(("right", "count"), [(15, 25), (0, 3), (3, 3), (999, 1000)])
    def test_a_point_has_the_confidence_interval_of_its_accuracy(self, right, count):
        expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
        (container,) = plot_reliability(bins_of((0.6, right / count, count))).axes[0].containers
        ((ends,),) = (bars.get_segments() for bars in container.lines[2])
        assert ends[:, 1] == pytest.approx([100 * expected.low, 100 * expected.high], abs=1e-3)

    @pytest.mark.parametrize(
        ("lowest", "start"),
        [(0.0, 0.0), (20.0, 0.0), (50.0, 30.0), (90.0, 80.0), (95.5, 90.0), (99.0, 98.0), (100, 99.5)],
    )
    def test_the_axes_start_at_a_round_number_with_room_for_the_lowest_point(self, lowest, start):
        axes, below = plot_reliability(bins_of((lowest / 100, 1.0, 40), (1.0, 1.0, 10))).axes
        assert axes.get_xlim() == axes.get_ylim() == below.get_xlim()
        assert axes.get_xlim()[0] == start
        assert axes.get_xlim()[1] > 100.0


def curve(*risks: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(1, len(risks) + 1) / len(risks), torch.tensor(risks)


class TestRiskCoverage:
    def test_curves_and_the_total_error_rate_are_drawn_in_percent_and_labeled_once(self):
        figure = plot_risk_coverage({"confidence": curve(0.0, 0.25), "concentration": curve(0.5, 0.25)})
        drawn = curves_of(figure)
        assert drawn["confidence"] == [(50.0, 0.0), (100.0, 25.0)]
        assert {y for _, y in drawn["all kept"]} == {25.0}
        assert legend_of(figure) == ["confidence", "concentration", "all kept"]
        of_models = {"a": curve(0.0, 0.25), "b": curve(0.5, 0.5)}  # which have no common total
        assert legend_of(plot_risk_coverage(of_models)) == ["a", "b"]

    def test_the_first_few_images_do_not_set_the_scale(self):
        risk = torch.full((100,), 0.02)
        risk[0] = 1.0
        top = plot_risk_coverage({"confidence": (torch.arange(1, 101) / 100, risk)}).axes[0].get_ylim()[1]
        assert 2.0 < top < 3.0

    @pytest.mark.parametrize("risks", [[(0.0, 0.25, 0.25), (0.0, 0.5, 0.25)], [(0.0, 0.0)], [(1.0,)]], ids=str)
    def test_the_rest_of_every_curve_is_inside_the_axes(self, risks):
        figure = plot_risk_coverage({f"{index}": curve(*each) for index, each in enumerate(risks)})
        bottom, top = figure.axes[0].get_ylim()
        assert bottom < 0.0 <= 100 * max(map(max, risks)) < top
        assert curves_of(figure)["0"][-1] == (100.0, 100 * risks[0][-1])

    def test_both_ends_of_a_long_curve_are_drawn(self):
        risk = torch.linspace(0, 0.5, 50_000)
        drawn = curves_of(plot_risk_coverage({"confidence": (torch.arange(1, 50_001) / 50_000, risk)}))["confidence"]
        assert len(drawn) < 10_000
        assert (drawn[0][1], drawn[-1][1]) == (0.0, 50.0)


def test_both_histograms_have_the_same_area():
    figure = plot_class_angles(torch.randn(60, 3), torch.arange(60) % 3)
    for stairs in figure.axes[0].patches:
        values, edges, _ = stairs.get_data()
        assert edges.tolist() == list(range(181))
        assert values.sum() == pytest.approx(100.0)


def test_the_means_are_marked_and_labeled():
    points, labels = torch.randn(60, 3), torch.arange(60) % 3
    within, between = (angles.mean().item() for angles in class_angles(points, labels))
    figure = plot_class_angles(points, labels, title="digits")
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [pytest.approx(within), pytest.approx(between)]
    words = ["within a class", f"mean {within:.1f}°", "between classes", f"mean {between:.1f}°"]
    assert sorted(legend_of(figure)) == sorted(words)
    assert figure.get_suptitle() == "digits"


def test_collapsed_classes_are_at_the_ends_of_the_axis():
    points = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [-3.0, 0.0]])
    first, _, second, _ = plot_class_angles(points, torch.tensor([0, 0, 1, 1])).axes[0].patches
    assert first.get_data()[0][0] == pytest.approx(100.0)
    assert second.get_data()[0][-1] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("count", "caption"), [(60, "all 1,770 pairs"), (1002, "a sample of 500,000 pairs of each kind, of 501,501 in all")]
)
def test_the_caption_names_the_measured_pairs(count, caption):
    assert plot_class_angles(torch.randn(count, 3), torch.arange(count) % 3).get_supxlabel() == caption
