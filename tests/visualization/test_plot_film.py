import gc
import sys
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from hf_sphere.visualization import View, plot_sphere, save_film

COLORS = [(255, 0, 0), (0, 128, 0), (10, 20, 250)]


@pytest.fixture(autouse=True)
def _needs_matplotlib() -> None:
    pytest.importorskip("matplotlib")


def frame(color=(255, 0, 0), size=(1.0, 0.5)):
    from matplotlib.figure import Figure

    return Figure(figsize=size, facecolor=[part / 255 for part in color])


def failing_frames():
    yield frame()
    raise RuntimeError("no more memory")


def test_a_gif_has_the_frames_in_order_and_in_color(tmp_path):
    save_film(map(frame, COLORS), tmp_path / "new" / "film.gif")
    with Image.open(tmp_path / "new" / "film.gif") as film:
        assert (film.n_frames, film.size) == (3, (100, 50))
        for number, color in enumerate(COLORS):
            film.seek(number)
            assert film.convert("RGB").getpixel((40, 20)) == color


def test_a_gif_loops_with_the_frame_durations(tmp_path):
    save_film(map(frame, COLORS), tmp_path / "film.gif", milliseconds=250)
    with Image.open(tmp_path / "film.gif") as film:
        for number in range(3):
            film.seek(number)
            assert film.info["duration"] == 250
        assert film.info["loop"] == 0


def test_static_parts_do_not_flicker(tmp_path):
    def spheres():
        for seed in range(3):
            points = torch.randn(300 * (seed + 1), 3, generator=torch.Generator().manual_seed(seed))
            yield plot_sphere(points, torch.arange(len(points)) % 3, ["a", "b", "c"], view=View(20.0, 30.0))

    save_film(spheres(), tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        drawn = []
        for number in range(3):
            film.seek(number)
            drawn.append(np.asarray(film.convert("RGB")).astype(int))
    corner = np.stack([image[:50, :50] for image in drawn])
    assert (corner == 255).all()


def test_only_one_figure_is_open_at_a_time(tmp_path):
    born = []

    def figures():
        for color in COLORS:
            gc.collect()
            assert not any(other() for other in born)
            figure = frame(color)
            born.append(weakref.ref(figure))
            yield figure
            del figure

    save_film(figures(), tmp_path / "film.gif")
    assert len(born) == 3


def test_an_error_leaves_no_files(tmp_path):
    with pytest.raises(RuntimeError, match="no more memory"):
        save_film(failing_frames(), tmp_path / "film.gif")
    assert list(tmp_path.iterdir()) == []


def test_an_error_keeps_an_existing_animation(tmp_path):
    save_film(map(frame, COLORS), tmp_path / "film.gif")
    with pytest.raises(RuntimeError, match="no more memory"):
        save_film(failing_frames(), tmp_path / "film.gif")
    assert [path.name for path in tmp_path.iterdir()] == ["film.gif"]
    assert Image.open(tmp_path / "film.gif").n_frames == 3


def test_an_existing_animation_is_replaced_completely(tmp_path):
    save_film(map(frame, COLORS), tmp_path / "film.gif")
    save_film(map(frame, COLORS[1:2]), tmp_path / "film.gif")
    assert [path.name for path in tmp_path.iterdir()] == ["film.gif"]
    assert Image.open(tmp_path / "film.gif").n_frames == 1


@pytest.mark.parametrize(
    ("figures", "name", "options", "message"),
    [
        ([], "film.gif", {}, "a film needs at least one figure"),
        ([frame, lambda: frame(size=(2.0, 1.0))], "film.gif", {}, r"the same size; got \(100, 50\) and \(200, 100\)"),
        ([frame], "film.mp4", {}, r"a film must be a \.gif; got 'film.mp4'"),
        ([frame], "film.gif", {"milliseconds": 10}, "at least 20 milliseconds; got 10"),
    ],
    ids=["no frame", "two sizes", "suffix", "duration"],
)
def test_invalid_input_is_rejected(tmp_path, figures, name, options, message):
    with pytest.raises(ValueError, match=message):
        save_film((make() for make in figures), tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[plots\]'"):
        save_film([], tmp_path / "film.gif")
