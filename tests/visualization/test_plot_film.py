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


def busy_frame(seed):
    """A frame of many colors, so that the compressed data exceed one block."""
    figure = frame((255, 255, 255), size=(3.0, 2.0))
    axes = figure.subplots()
    axes.imshow(np.random.default_rng(seed).random((40, 40, 3)))
    axes.text(5, 5, f"frame {seed}", color="red")
    return figure


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


@pytest.mark.parametrize("count", [1, 4])
def test_colorful_frames_keep_their_colors_in_a_gif(tmp_path, count):
    save_film(map(busy_frame, range(count)), tmp_path / "film.gif")
    save_film(map(busy_frame, range(count)), tmp_path / "frames")
    with Image.open(tmp_path / "film.gif") as film:
        for number in range(count):
            film.seek(number)
            exact = np.asarray(Image.open(tmp_path / "frames" / f"frame-{number + 1:04d}.png"), dtype=float)
            difference = np.abs(np.asarray(film.convert("RGB")) - exact)
            assert difference.mean() < 10
            assert difference.max() < 80


def test_static_parts_do_not_flicker(tmp_path):
    def spheres():
        for seed in range(3):
            points = torch.randn(300 * (seed + 1), 3, generator=torch.Generator().manual_seed(seed))
            yield plot_sphere(points, torch.arange(len(points)) % 3, ["a", "b", "c"], view=View(20.0, 30.0))

    save_film(spheres(), tmp_path / "film.gif")
    save_film(spheres(), tmp_path / "frames")
    exact = np.stack([np.asarray(Image.open(file)) for file in sorted((tmp_path / "frames").iterdir())])
    assert len(np.unique(exact.reshape(-1, 3), axis=0)) > 256
    with Image.open(tmp_path / "film.gif") as film:
        drawn = []
        for number in range(3):
            film.seek(number)
            drawn.append(np.asarray(film.convert("RGB")))
    for color in (255, 250):  # background and globe
        of_color = (exact == color).all(-1)
        assert of_color.sum() > 10_000
        assert (np.stack(drawn)[of_color] == color).all()
    still = (exact == exact[0]).all((0, -1))
    assert (np.stack(drawn)[:, still] == drawn[0][still]).all()
    assert np.abs(np.stack(drawn) - exact.astype(float)).mean() < 1


def test_an_animation_of_few_colors_keeps_them_all(tmp_path):
    save_film(map(frame, [(4 * value, value, 255 - value) for value in range(60)]), tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        for value in range(60):
            film.seek(value)
            assert film.convert("RGB").getpixel((40, 20)) == (4 * value, value, 255 - value)


def test_a_folder_contains_numbered_frames(tmp_path):
    save_film(map(frame, COLORS), tmp_path / "new" / "frames")
    files = sorted((tmp_path / "new" / "frames").iterdir())
    assert [file.name for file in files] == ["frame-0001.png", "frame-0002.png", "frame-0003.png"]
    assert [Image.open(file).getpixel((40, 20)) for file in files] == COLORS


@pytest.mark.parametrize("name", ["film.gif", "frames"])
def test_only_one_figure_is_open_at_a_time(tmp_path, name):
    born = []

    def figures():
        for color in COLORS:
            gc.collect()
            assert not any(other() for other in born)
            figure = frame(color)
            born.append(weakref.ref(figure))
            yield figure
            del figure

    save_film(figures(), tmp_path / name)
    assert len(born) == 3


@pytest.mark.parametrize("name", ["film.gif", "frames"])
def test_an_error_leaves_no_files(tmp_path, name):
    with pytest.raises(RuntimeError, match="no more memory"):
        save_film(failing_frames(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["film.gif", "frames"])
def test_an_error_keeps_an_existing_animation(tmp_path, name):
    save_film(map(frame, COLORS), tmp_path / name)
    with pytest.raises(RuntimeError, match="no more memory"):
        save_film(failing_frames(), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    frames = len(list((tmp_path / name).iterdir())) if name == "frames" else Image.open(tmp_path / name).n_frames
    assert frames == 3


@pytest.mark.parametrize("name", ["film.gif", "frames"])
def test_an_existing_animation_is_replaced_completely(tmp_path, name):
    save_film(map(frame, COLORS), tmp_path / name)
    save_film(map(frame, COLORS[1:2]), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    frames = len(list((tmp_path / name).iterdir())) if name == "frames" else Image.open(tmp_path / name).n_frames
    assert frames == 1


def test_a_folder_with_other_files_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt would be replaced"):
        save_film([frame()], tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("figures", "name", "options", "message"),
    [
        ([], "film.gif", {}, "a film needs at least one figure"),
        ([], "frames", {}, "a film needs at least one figure"),
        ([frame, lambda: frame(size=(2.0, 1.0))], "film.gif", {}, r"the same size; got \(100, 50\) and \(200, 100\)"),
        ([frame], "film.mp4", {}, r"a film must be a \.gif, or a folder .*; got 'film.mp4'"),
        ([frame], "film.gif", {"milliseconds": 10}, "at least 20 milliseconds; got 10"),
    ],
    ids=["no frame", "no frame for a folder", "two sizes", "suffix", "duration"],
)
def test_invalid_input_is_rejected(tmp_path, figures, name, options, message):
    with pytest.raises(ValueError, match=message):
        save_film((make() for make in figures), tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[plots\]'"):
        save_film([], tmp_path / "film.gif")
