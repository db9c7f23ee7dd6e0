import pytest
import torch

from hf_sphere.visualization import Panel, plot_gallery
from hf_sphere.visualization.circle import ROSE_NOTE

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


@pytest.mark.parametrize(("count", "columns", "parts"), [(1, 3, 1), (4, 3, 6), (4, 2, 4), (3, 1, 3)])
def test_panels_have_the_requested_number_of_columns(count, columns, parts):
    figure = plot_gallery({f"{number}": panel(3) for number in range(count)}, ABC, dim=3, columns=columns)
    assert len(figure.axes) == parts
    assert [axes.get_visible() for axes in figure.axes] == [True] * count + [False] * (parts - count)
    assert figure.axes[0].get_gridspec().ncols == min(columns, count)


def test_the_projection_is_described_below_its_panel():
    figure = plot_gallery({"three": panel(3), "eight": panel(8)}, ABC, dim=3)
    captions = [" ".join(text.get_text() for text in axes.texts).replace("\n", " ") for axes in figure.axes]
    assert "coordinates" not in captions[0]
    assert "8 coordinates, projected on the three leading principal directions" in captions[1]


def test_embeddings_with_norms_are_drawn_in_a_plane_next_to_a_circle():
    figure = plot_gallery({"plain": panel(2, lengths=True), "cosine": panel(2)}, ABC, dim=2)
    plane, circle = figure.axes
    assert (plane.axison, circle.axison) == (True, False)
    assert len(plane.collections[0].get_offsets()) == 30
    assert figure.get_supxlabel() == ROSE_NOTE
    assert plot_gallery({"plain": panel(2, lengths=True)}, ABC, dim=2).get_supxlabel() == ""


def test_a_sphere_seen_from_one_side_has_the_size_of_others_in_its_column():
    points = torch.randn(300, 3)
    panels = {"all sides": points, "octant": points.abs(), "a cluster": points + 20}
    figure = plot_gallery(
        {name: Panel(each, torch.arange(300) % 3) for name, each in panels.items()}, ABC, dim=3, columns=1
    )
    widths = [right - left for left, right in (axes.get_xlim() for axes in figure.axes)]
    heights = [high - low for low, high in (axes.get_ylim() for axes in figure.axes)]
    assert widths[0] == pytest.approx(2.16 + heights[0])
    assert widths[1] == pytest.approx(widths[0], rel=0.01)
    assert widths[2] / heights[2] == pytest.approx(widths[1] / heights[1])


@pytest.mark.parametrize(("dim", "marks"), [(2, "lines"), (3, "lines and diamonds")])
def test_directions_are_drawn_and_explained_once(dim, marks):
    parts = {name: panel(dim, directions=torch.eye(3)[:, :dim] + 0.1) for name in ("cosine", "vmf")}
    figure = plot_gallery(parts, ABC, dim=dim)
    assert sum(line.get_marker() == "D" for line in figure.axes[0].lines) == (3 if dim == 3 else 0)
    assert figure.get_supxlabel().splitlines()[-1] == f"{marks}: directions of the classes"
    assert not any("lines" in text.get_text() for axes in figure.axes for text in axes.texts)


@pytest.mark.parametrize(
    ("count", "panels", "is_named"), [(31, 1, True), (31, 2, False), (51, 1, False), (51, 2, False)]
)
def test_names_are_omitted_for_too_many_classes(count, panels, is_named):
    both = {name: Panel(torch.randn(count, 3), torch.arange(count)) for name in "ab"[:panels]}
    figure = plot_gallery(both, [f"{index}" for index in range(count)], dim=3)
    text = figure.get_supxlabel() + " ".join(text.get_text() for text in figure.axes[0].texts)
    assert (f"{count} classes: too many to draw their names" in text.replace("\n", " ")) != is_named


@pytest.mark.parametrize(
    ("panels", "options", "message"),
    [
        ({}, {"dim": 3}, "a gallery needs panels, .*; got 0 panels, dim=3 and columns=3"),
        ({"plain": panel(3)}, {"dim": 4}, "a gallery needs .*; got 1 panels, dim=4 and columns=3"),
        ({"plain": panel(3)}, {"dim": 3, "columns": 0}, "a gallery needs .*; got 1 panels, dim=3 and columns=0"),
        ({"cosine": panel(3), "plain": panel(2)}, {"dim": 3}, "plain: points of 2 coordinate"),
    ],
)
def test_invalid_panels_are_rejected(panels, options, message):
    with pytest.raises(ValueError, match=message):
        plot_gallery(panels, ABC, **options)
