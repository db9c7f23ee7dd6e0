import base64
import gzip
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset

from hf_sphere import metrics
from hf_sphere.search.store import embeddings_writer, read_embeddings

RECIPE = "visualize"

pytest.importorskip("matplotlib")
HAS_PLOTLY = importlib.util.find_spec("plotly") is not None
needs_plotly = pytest.mark.skipif(not HAS_PLOTLY, reason="plotly is not installed")

Draw = Callable[..., Path]


@pytest.fixture(scope="module")
def run_of_digits(load_recipe, run_quickly, tmp_path_factory) -> Path:
    """A two-epoch run on digits with embeddings on the sphere in three dimensions and a snapshot per epoch."""
    words = ["--dataset_name", "digits", "--backbone", "simple_fnn", "--head", "spherized", "--embedding_dim", "2"]
    words += ["--num_train_epochs", "2", "--snapshot_epochs", "1", "--disable_tqdm"]
    run = run_quickly(load_recipe("train_image_classification"), words)
    return run(tmp_path_factory.mktemp("run") / "digits")


@pytest.fixture(scope="module")
def embeddings(load_recipe, run_main, run_of_digits, cache, tmp_path_factory) -> Path:
    """Embeddings of the test digits from that run; figures are written elsewhere."""
    folder = tmp_path_factory.mktemp("embeddings") / "digits-test"
    words = ["--model_name_or_path", str(run_of_digits), "--dataset_name", "digits", "--disable_tqdm", *cache]
    run_main(load_recipe("extract"), [*words, "--output_dir", str(folder)])
    return folder


@pytest.fixture
def draw(recipe, run_main, cache, tmp_path) -> Draw:
    """Run the recipe and return the folder of the figures."""

    def run(folder: Path, *words: object) -> Path:
        given = [] if "--output_dir" in words else ["--output_dir", str(tmp_path / "pictures")]
        run_main(recipe, ["--embeddings", str(folder), "--disable_tqdm", *cache, *given, *map(str, words)])
        return tmp_path / "pictures"

    return run


def write(folder: Path, points: torch.Tensor, labels: torch.Tensor | None = None) -> Path:
    """Write embeddings like those of another program."""
    columns = {"embedding": points} | ({} if labels is None else {"label": labels})
    with embeddings_writer(folder, "test", {}, class_names=["a", "b", "c"]) as add:
        add(columns)
    return folder


def write_about(folder: Path, source: Path, **changes: str) -> None:
    """Replace the description of embeddings by that of others, except for the sizes."""
    about, own = (json.loads((path / "embeddings.json").read_text()) for path in (source, folder))
    (folder / "embeddings.json").write_text(json.dumps(about | own | changes))


def clusters(dim: int, count: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    return F.one_hot(labels, max(dim, 3))[:, :dim] + 0.2 * torch.randn(count, dim, generator=generator), labels


def results_of(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())


# Figures


@needs_plotly
def test_by_default_all_available_figures_are_drawn(draw, embeddings):
    folder = draw(embeddings)
    names = {path.name for path in folder.iterdir()}
    assert names == {"sphere.png", "angles.png", "sphere.html", "all_results.json", "run.json", ".local_paths.json"}


@pytest.mark.parametrize(
    ("dim", "words", "name"),
    [(2, (), "circle.png"), (3, (), "sphere.png"), (7, (), "sphere.png"), (7, ("--dim", 2), "circle.png")],
)
def test_two_dimensions_are_drawn_on_the_circle_and_more_on_the_sphere(dim, words, name, draw, tmp_path):
    folder = draw(write(tmp_path / "own", *clusters(dim)), "--pictures", "sphere", *words)
    assert {path.name for path in folder.glob("*.png")} == {name}


@needs_plotly
def test_the_page_has_the_texts_of_a_table_of_embeddings(draw, tmp_path):
    points, _ = clusters(5, 6)
    (tmp_path / "own").mkdir()
    table = {"embedding": points.tolist(), "text": [f"sentence {row}" for row in range(5)] + [None]}
    Dataset.from_dict(table).to_parquet(tmp_path / "own" / "test.parquet")
    page = (draw(tmp_path / "own", "--pictures", "interactive") / "sphere.html").read_text()
    content = json.loads(gzip.decompress(base64.b64decode(re.search(r'id="content">([^<]*)<', page)[1])))
    assert content["texts"] == [f"sentence {row}" for row in range(5)] + [""]


@needs_plotly
def test_the_page_has_no_images_if_asked(draw, embeddings):
    words = ("--pictures", "interactive", "--overwrite_output_dir")
    before, after = (
        (draw(embeddings, *words, *more) / "sphere.html").stat().st_size for more in ((), ("--no_thumbnails",))
    )
    assert after < before


def test_the_gallery_is_drawn_with_several_embeddings_of_the_same_classes(draw, embeddings, tmp_path):
    both = [write(tmp_path / name, *clusters(dim)) for name, dim in (("one", 3), ("other", 5))]
    with pytest.raises(ValueError, match="have different classes, but one legend"):
        draw(both[0], "--beside", embeddings)
    folder = draw(both[0], "--beside", both[1], "--pictures", "gallery", "--max_samples", "50")
    assert (folder / "gallery.png").is_file()
    assert results_of(folder)["num_embeddings"] == 50


# Metrics


def test_results_are_the_metrics_of_the_directions(draw, embeddings):
    results, data = results_of(draw(embeddings, "--pictures", "angles")), read_embeddings(str(embeddings))
    unit, labels = F.normalize(data.embeddings.double(), dim=-1), data.labels
    names = ("mean_angle_within", "mean_angle_between")
    angles = (float(each.mean()) for each in metrics.class_angles(unit, labels))
    expected = dict(zip(names, angles, strict=True)) | {"num_embeddings": len(unit), "embedding_dim": 3}
    expected |= {"uniformity": metrics.uniformity(unit), "alignment": metrics.alignment(unit, labels)}
    expected |= {"effective_dimension": metrics.effective_dimension(unit)}
    assert results == pytest.approx(expected, rel=1e-5)


def test_without_labels_results_and_figures_have_no_classes(draw, tmp_path, capsys):
    folder = draw(write(tmp_path / "own", clusters(3)[0]), "--pictures", "sphere", "angles")
    assert {path.name for path in folder.glob("*.png")} == {"sphere.png"}
    assert set(results_of(folder)) == {"num_embeddings", "embedding_dim", "uniformity", "effective_dimension"}
    assert "without a column label" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "missing"),
    [
        ([0] * 6, {"mean_angle_between", "mean_angle_within"}),
        ([0, 1, 2], {"alignment", "mean_angle_within", "mean_angle_between"}),
    ],
    ids=["a single class", "single points"],
)
def test_undefined_metrics_are_noted_and_the_rest_is_computed(labels, missing, draw, tmp_path, capsys):
    points = clusters(3)[0][: len(labels)]
    folder = draw(write(tmp_path / "own", points, torch.tensor(labels)), "--pictures", "sphere", "angles")
    assert (folder / "sphere.png").is_file()
    assert missing.isdisjoint(results_of(folder))
    assert "uniformity" in results_of(folder)
    assert capsys.readouterr().out.count("Note: no ") == len(missing) + 1


# Errors and missing parts


@pytest.mark.parametrize(
    ("dim", "value", "words", "message"),
    [
        (1, 1.0, (), r"own: points of 1 coordinate\(s\) cannot be shown in 2 dimensions"),
        (2, 1.0, ("--dim", 3), r"own: points of 2 coordinate\(s\) cannot be shown in 3 dimensions"),
        (3, 0.0, (), "own: a zero vector has no direction; 1 of 90 points are zero, the first at index 4. Remove"),
        (3, math.nan, (), "own must be finite; 1 of 90 are not, the first at index 4"),
    ],
)
def test_embeddings_that_cannot_be_drawn_are_refused_before_anything_is_written(
    dim, value, words, message, draw, tmp_path
):
    points, labels = clusters(dim)
    points[4] *= value
    with pytest.raises(ValueError, match=message):
        draw(write(tmp_path / "own", points, labels), "--pictures", "sphere", *words)
    assert not (tmp_path / "pictures").exists()


def test_a_missing_extra_is_noted_or_an_error_if_its_figure_is_requested(draw, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    own = write(tmp_path / "own", *clusters(3))
    with pytest.raises(ImportError, match=r"hf_sphere\[plotly\]"):
        draw(own, "--pictures", "interactive")
    folder = draw(own)
    assert {path.name for path in folder.iterdir() if path.suffix in (".png", ".html")} == {"sphere.png", "angles.png"}
    assert "Note: no picture interactive: the interactive sphere requires plotly" in capsys.readouterr().out


@needs_plotly
def test_a_missing_dataset_or_model_and_other_classes_omit_only_thumbnails_or_directions(
    draw, embeddings, tmp_path, capsys
):
    moved = write(tmp_path / "own", *clusters(3))
    write_about(moved, embeddings, dataset=str(tmp_path / "gone"), model=str(tmp_path / "gone"))
    folder = draw(moved, "--pictures", "interactive", "sphere")
    assert {"sphere.html", "sphere.png"} <= {path.name for path in folder.iterdir()}
    printed = capsys.readouterr().out
    assert "Note: no thumbnails" in printed
    assert "Note: no directions of the classes" in printed
    write_about(moved, embeddings, model=json.loads((embeddings / "embeddings.json").read_text())["model"])
    draw(moved, "--pictures", "sphere", "--overwrite_output_dir")
    assert "the data and the model have different classes" in capsys.readouterr().out
