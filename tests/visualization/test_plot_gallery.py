import pytest
import torch

from hf_sphere.visualization import Panel, plot_gallery
from hf_sphere.visualization.sphere import ROSE_NOTE

ABC = ["a", "b", "c"]
LABELS = torch.arange(30) % 3


def panel(dim: int, **options) -> Panel:
    return Panel(torch.randn(30, dim), LABELS, **options)


@pytest.mark.parametrize("dim", [2, 3])
def test_each_panel_has_its_heading(dim):
    figure = plot_gallery({name: panel(dim) for name in ("cosine", "vmf")}, ABC, dim=dim, title="digits")
    assert [axes.get_title() for axes in figure.axes] == ["cosine", "vmf"]
    assert figure.get_suptitle() == "digits"


def test_one_legend_lists_all_shown_classes():
    first, second = (Panel(torch.eye(3)[:2], torch.tensor(labels)) for labels in ([0, 1], [0, 2]))
    (legend,) = plot_gallery({"first": first, "second": second}, [*ABC, "unseen"], dim=3).legends
    assert [text.get_text() for text in legend.get_texts()] == ABC


def test_the_projection_of_a_panel_is_described_with_its_name():
    caption = plot_gallery({"three": panel(3), "eight": panel(8)}, ABC, dim=3).get_supxlabel()
    assert "eight: 8 coordinates, projected on the three leading principal directions" in caption
    assert "three:" not in caption


def test_embeddings_with_norms_are_drawn_in_a_plane_next_to_a_circle():
    figure = plot_gallery({"plain": panel(2, lengths=True), "cosine": panel(2)}, ABC, dim=2)
    plane, circle = figure.axes
    assert (plane.axison, circle.axison) == (True, False)
    assert len(plane.collections[0].get_offsets()) == 30
    assert figure.get_supxlabel() == f"cosine: {ROSE_NOTE}"
    assert plot_gallery({"plain": panel(2, lengths=True)}, ABC, dim=2).get_supxlabel() == ""


@pytest.mark.parametrize(("dim", "marks"), [(2, "lines"), (3, "lines and diamonds")])
def test_directions_are_drawn_and_explained_once(dim, marks):
    parts = {name: panel(dim, directions=torch.eye(3)[:, :dim] + 0.1) for name in ("cosine", "vmf")}
    figure = plot_gallery(parts, ABC, dim=dim)
    assert sum(line.get_marker() == "D" for line in figure.axes[0].lines) == (3 if dim == 3 else 0)
    assert figure.get_supxlabel().splitlines()[-1] == f"{marks}: directions of the classes"


@pytest.mark.parametrize(("count", "is_named"), [(50, True), (51, False)])
def test_names_are_omitted_for_too_many_classes(count, is_named):
    both = {name: Panel(torch.randn(count, 3), torch.arange(count)) for name in "ab"}
    figure = plot_gallery(both, [f"{index}" for index in range(count)], dim=3)
    assert (f"{count} classes: too many to draw their names" in figure.get_supxlabel()) != is_named


def test_the_name_of_a_panel_that_cannot_be_drawn_is_in_the_error():
    with pytest.raises(ValueError, match="plain: points of 2 coordinate"):
        plot_gallery({"cosine": panel(3), "plain": panel(2)}, ABC, dim=3)
