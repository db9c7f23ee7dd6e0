import pytest
import torch

from hf_sphere.metrics import class_angles
from hf_sphere.visualization import plot_class_angles


def texts_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


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
    assert sorted(texts_of(figure)) == sorted(
        ["within a class", f"mean {within:.1f}°", "between classes", f"mean {between:.1f}°"]
    )
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


def test_a_single_class_is_rejected():
    with pytest.raises(ValueError, match="need at least two classes"):
        plot_class_angles(torch.randn(5, 3), torch.zeros(5).long())
