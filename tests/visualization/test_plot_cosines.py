import sys

import pytest
import torch
import torch.nn.functional as F

from hf_sphere.visualization import histograms as module, plot_cosines

TRIANGLE = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])


@pytest.fixture(autouse=True)
def _needs_matplotlib() -> None:
    pytest.importorskip("matplotlib")


def bars(points: torch.Tensor, **options) -> dict[float, int]:
    """Center and height of every nonempty bar."""
    (stairs,) = plot_cosines(points, **options).axes[0].patches
    values, edges, _ = stairs.get_data()
    return {(a + b) / 2: int(v) for v, a, b in zip(values, edges[:-1], edges[1:], strict=True) if v}


def marks(figure) -> dict[float, str]:
    return {line.get_xdata()[0]: line.get_label() for line in figure.axes[0].get_lines()}


def cosines_of_pairs(points: torch.Tensor) -> torch.Tensor:
    unit = F.normalize(points.double(), dim=1)
    return torch.stack([unit[i] @ unit[j] for i in range(len(unit)) for j in range(i)])


def test_every_pair_is_counted_once():
    assert sum(bars(torch.randn(30, 4)).values()) == 30 * 29 / 2


def test_bars_count_the_cosines_of_their_bins():
    points = torch.randn(20, 3, dtype=torch.float64)
    cosines, drawn = cosines_of_pairs(points), bars(points)
    half = (cosines.max() - cosines.min()).item() / 79 / 2
    counted = {middle: int(((cosines - middle).abs() < half).sum()) for middle in drawn}
    assert counted == drawn


def test_chunked_computation_gives_the_same_figure(monkeypatch):
    points = torch.randn(40, 5)
    whole = bars(points)
    parts = module._cosines_of_pairs(F.normalize(points.double(), dim=1))
    assert len(list(parts)) == 1

    def row_by_row(unit):
        for row in range(len(unit) - 1):
            yield unit[row + 1 :] @ unit[row]

    monkeypatch.setattr(module, "_cosines_of_pairs", row_by_row)
    assert bars(points) == pytest.approx(whole)


def test_norms_have_no_effect():
    points = torch.randn(12, 3, dtype=torch.float64)
    assert bars(points) == pytest.approx(bars(points * torch.rand(12, 1).add(0.5)))


def test_the_largest_cosine_is_marked_on_its_bar():
    points = torch.randn(20, 3, dtype=torch.float64)
    ((place, label),) = marks(plot_cosines(points)).items()
    largest = cosines_of_pairs(points).max().item()
    assert place == pytest.approx(largest)
    assert place == pytest.approx(max(bars(points)))
    assert label == f"largest {largest:.4f}"


def test_the_bound_is_marked_next_to_the_largest_cosine():
    found = marks(plot_cosines(torch.eye(3), bound=-0.5))
    assert found == {0.0: "largest 0.0000", -0.5: "no placement is below -0.5000"}


def test_an_attained_bound_is_noted_in_the_label_of_the_largest_cosine():
    assert list(marks(plot_cosines(TRIANGLE, bound=-0.5)).values()) == ["largest -0.5000, the smallest possible"]


def test_marks_and_bars_are_inside_the_axes():
    left, right = plot_cosines(TRIANGLE, bound=-0.9).axes[0].get_xlim()
    assert left < -0.9 < -0.5 < right


def test_marks_are_explained_once_outside_of_the_bars():
    (legend,) = (figure := plot_cosines(torch.eye(3), bound=-0.5)).legends
    assert len(legend.get_texts()) == 2
    assert figure.axes[0].get_legend() is None


def test_two_points_are_one_bar():
    points = torch.tensor([[1.0, 0.0], [-2.0, 0.0]])
    ((place, height),) = bars(points).items()
    assert (place, height) == (pytest.approx(-1.0), 1)
    assert marks(plot_cosines(points, bound=-1.0)) == {-1.0: "largest -1.0000, the smallest possible"}


def test_equal_cosines_are_one_visible_bar():
    axes = plot_cosines(TRIANGLE).axes[0]
    (stairs,) = axes.patches
    values, edges, _ = stairs.get_data()
    left, right = axes.get_xlim()
    assert list(values) == [3.0]
    assert (edges[-1] - edges[0]) / (right - left) > 0.01


def test_a_single_point_is_rejected():
    with pytest.raises(ValueError, match="cosines need at least two points; got 1"):
        plot_cosines(torch.randn(1, 3))


def test_the_title_can_be_set():
    assert plot_cosines(TRIANGLE, title="3 prototypes").axes[0].get_title() == "3 prototypes"


@pytest.mark.parametrize(("name", "start"), [("cosines.png", b"\x89PNG"), ("cosines.pdf", b"%PDF")])
def test_the_figure_is_written_into_a_new_folder(tmp_path, name, start):
    plot_cosines(TRIANGLE, path=tmp_path / "new" / name)
    assert (tmp_path / "new" / name).read_bytes().startswith(start)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[plots\]'"):
        plot_cosines(TRIANGLE)
