import sys

import pytest
import torch

from hf_sphere.visualization import plot_sphere, project_to_sphere


def test_projected_points_have_unit_norm():
    shown, _ = project_to_sphere(torch.randn(50, 8))
    torch.testing.assert_close(shown.norm(dim=-1), torch.ones(50, dtype=torch.float64))


def test_points_on_a_small_sphere_keep_their_angles():
    points = torch.nn.functional.normalize(torch.randn(50, 3, dtype=torch.float64), dim=-1)
    frame = torch.linalg.qr(torch.randn(8, 3, dtype=torch.float64)).Q
    shown, _ = project_to_sphere(7.0 * points @ frame.T)
    torch.testing.assert_close(shown @ shown.T, points @ points.T)


def test_more_dimensions_than_there_are_is_refused():
    with pytest.raises(ValueError, match="points of 2 coordinates cannot be shown in 3 dimensions"):
        project_to_sphere(torch.randn(5, 2))


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    plot_sphere(torch.randn(30, 5), torch.arange(30) % 3, ["a", "b", "c"], path=tmp_path / "sphere.png")
    assert (tmp_path / "sphere.png").read_bytes().startswith(b"\x89PNG")


def test_every_class_is_in_the_legend_and_the_projection_is_said():
    pytest.importorskip("matplotlib")
    figure = plot_sphere(torch.randn(30, 5), torch.arange(30) % 3, ["a", "b", "c"])
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a", "b", "c"]
    assert "5 coordinates, projected" in figure.get_supxlabel()


def test_points_in_three_dimensions_are_not_said_to_be_projected():
    pytest.importorskip("matplotlib")
    figure = plot_sphere(torch.randn(30, 3), torch.arange(30) % 3, ["a", "b", "c"], directions=torch.eye(3))
    assert figure.get_supxlabel() == ""


def test_directions_of_projected_points_are_refused():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="directions can be drawn only on points of 3 coordinates; these have 5"):
        plot_sphere(torch.randn(3, 5), torch.arange(3), ["a", "b", "c"], directions=torch.randn(3, 5))


def test_points_on_a_circle_are_refused():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="points of at least 3 coordinates; got 2"):
        plot_sphere(torch.randn(3, 2), torch.arange(3), ["a", "b", "c"])


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[plots\]'"):
        plot_sphere(torch.randn(3, 3), torch.arange(3), ["a", "b", "c"])
