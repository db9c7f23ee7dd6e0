import sys

import pytest
import torch

from hf_sphere.metrics import class_angles
from hf_sphere.visualization import plot_class_angles


@pytest.fixture(autouse=True)
def _needs_matplotlib() -> None:
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)


def texts_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_both_histograms_have_the_same_area():
    figure = plot_class_angles(torch.randn(60, 3), torch.arange(60) % 3)
    for stairs in figure.axes[0].patches:
        values, edges, _ = stairs.get_data()
        assert edges.tolist() == list(range(181))
        assert values.sum() == pytest.approx(100.0)


def test_the_means_are_marked_and_named():
    points, labels = torch.randn(60, 3), torch.arange(60) % 3
    within, between = (angles.mean().item() for angles in class_angles(points, labels))
    figure = plot_class_angles(points, labels, title="digits")
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [pytest.approx(within), pytest.approx(between)]
    assert sorted(texts_of(figure)) == sorted(
        ["within a class", f"mean {within:.1f}°", "between classes", f"mean {between:.1f}°"]
    )
    assert figure.get_suptitle() == "digits"


def test_a_title_is_no_formula(tmp_path):
    plot_class_angles(torch.randn(60, 3), torch.arange(60) % 3, title="$a^$", path=tmp_path / "angles.png")
    assert (tmp_path / "angles.png").is_file()


def test_classes_at_one_place_each_stand_at_the_ends_of_the_axis():
    points = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [-3.0, 0.0]])
    first, _, second, _ = plot_class_angles(points, torch.tensor([0, 0, 1, 1])).axes[0].patches
    assert first.get_data()[0][0] == pytest.approx(100.0)
    assert second.get_data()[0][-1] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("count", "caption"),
    [(60, "all 1,770 pairs"), (1002, "a sample of 500,000 pairs of each kind, of 501,501 in all")],
)
def test_the_caption_says_which_pairs_were_measured(count, caption):
    assert plot_class_angles(torch.randn(count, 3), torch.arange(count) % 3).get_supxlabel() == caption


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="need at least two classes"):
        plot_class_angles(torch.randn(5, 3), torch.zeros(5).long())


def test_the_picture_is_written_also_into_a_new_folder(tmp_path):
    plot_class_angles(torch.randn(60, 3), torch.arange(60) % 3, path=tmp_path / "new" / "angles.png")
    assert (tmp_path / "new" / "angles.png").read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[plots\]'"):
        plot_class_angles(torch.randn(60, 3), torch.arange(60) % 3)
