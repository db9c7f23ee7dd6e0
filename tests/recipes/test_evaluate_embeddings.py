import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset

from hf_sphere import visualization
from hf_sphere.metrics import (
    area_under_risk_coverage,
    calibration_errors,
    class_overlap,
    detection_scores,
    retrieval_scores,
    sampled_retrieval_scores,
)
from hf_sphere.ood import SCORES, OODDetector
from hf_sphere.search.store import embeddings_writer

RECIPE = "evaluate"

CLASSES = ["a", "b", "c"]
PLOTS = ["reliability.png", "risk_coverage.png"]

Columns = dict[str, torch.Tensor]
Write = Callable[..., Path]
Measure = Callable[..., Path]


@pytest.fixture
def measure(recipe, run_main, monkeypatch) -> Measure:
    """Run the recipe, with empty plots, and return the folder of the results."""
    for name in ("plot_reliability", "plot_risk_coverage"):
        monkeypatch.setattr(visualization, name, lambda *_, path, **__: path.touch())

    def run(embeddings: Path, *argv: object) -> Path:
        run_main(recipe, [str(embeddings), *map(str, argv)])
        return embeddings / "evaluation"

    return run


def columns_of(count: int = 60, *, concentration: bool = True, logits_scale: float = 2.0, seed: int = 0) -> Columns:
    """Embeddings near their class center, with mostly correct predictions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    points = F.one_hot(labels, 3) + 0.6 * torch.randn(count, 3, generator=generator)
    confidence, prediction = (logits_scale * points).softmax(-1).max(-1)
    columns = {"embedding": points, "label": labels, "prediction": prediction, "confidence": confidence}
    return columns | ({"concentration": points.norm(dim=-1) * 20} if concentration else {})


def write_columns(
    folder: Path,
    columns: Columns,
    *,
    class_names: list[str] = CLASSES,
    predicted_names: list[str] = CLASSES,
    **about: object,
) -> Path:
    names = {"class_names": class_names, "predicted_names": predicted_names}
    with embeddings_writer(folder, "test", about, **names) as add:
        add(columns)
    return folder


@pytest.fixture
def write(tmp_path) -> Write:
    """Write columns as embeddings."""
    return lambda columns, name="made-test", **options: write_columns(tmp_path / name, columns, **options)


@pytest.fixture(scope="module")
def default(recipe, run_main, tmp_path_factory) -> tuple[Path, str]:
    """The folder and printed output of evaluating `columns_of()` with default options; read only."""
    folder = write_columns(tmp_path_factory.mktemp("default") / "made-test", columns_of())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_main(recipe, ["--embeddings", str(folder)])
    return folder / "evaluation", printed.getvalue()


def without(columns: Columns, *names: str) -> Columns:
    return {name: values for name, values in columns.items() if name not in names}


def test_embeddings_whose_replacement_was_interrupted_are_evaluated(measure, write, tmp_path):
    write(columns_of()).rename(tmp_path / ".made-test.replaced")
    assert (measure(tmp_path / "made-test") / "all_results.json").is_file()


# Metrics


def test_accuracy_calibration_and_risk_equal_the_metrics_and_are_printed_and_plotted(default, results_of):
    columns, results, printed = columns_of(), results_of(default[0]), default[1]
    correct = columns["prediction"] == columns["label"]
    assert results["eval_accuracy"] == pytest.approx(correct.double().mean().item())
    assert results["eval_num_unknown_labels"] == 0
    assert not [name for name in results if name.startswith("eval_overlap")]  # without a threshold
    for name, value in calibration_errors(columns["confidence"], correct).items():
        assert results[f"eval_{name}"] == pytest.approx(value)
    for column, suffix in (("confidence", ""), ("concentration", "_concentration")):
        area = area_under_risk_coverage(columns[column], correct)
        assert results[f"eval_area_under_risk_coverage{suffix}"] == pytest.approx(area)
    for plot in PLOTS:
        assert (default[0] / plot).read_bytes().startswith(b"\x89PNG")
    assert "embeddings 60 x 3, classes 3, distance cosine" in printed
    for name in ("eval_accuracy", "eval_recall_at_1", "eval_map_at_r", "eval_sampled_r_precision"):
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{name} "))
        assert line.endswith(f" {100 * results[name]:.2f} %")


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_retrieval_equals_the_metric(write, measure, results_of, distance):
    columns = columns_of()
    results = results_of(measure(write(columns), "--ks", 1, 2, 4, "--distance", distance))
    expected = retrieval_scores(columns["embedding"], columns["label"], ks=(1, 2, 4), distance=distance)
    assert {name: results[f"eval_{name}"] for name in expected} == pytest.approx(expected)
    assert (results["eval_num_queries"], results["eval_num_excluded"]) == (60, 0)


@pytest.mark.parametrize(
    ("about", "argv"),
    [
        ({"distance": "hyperbolic", "curvature": 0.5}, []),
        ({}, ["--distance", "hyperbolic", "--curvature", 0.5]),
        ({"distance": "cosine"}, ["--distance", "hyperbolic", "--curvature", 0.5]),
    ],
    ids=["stored", "given", "given instead of the stored one"],
)
def test_the_distance_is_the_given_or_the_stored_one(write, measure, results_of, capsys, about, argv):
    columns = columns_of(concentration=False)
    columns["embedding"] = columns["embedding"] / 10
    folder = measure(write(columns, **about), *argv)
    expected = retrieval_scores(columns["embedding"], columns["label"], distance="hyperbolic", curvature=0.5)
    assert results_of(folder)["eval_map_at_r"] == pytest.approx(expected["map_at_r"])
    assert "distance hyperbolic" in capsys.readouterr().out


def test_uncertain_embeddings_are_sampled(write, measure, results_of):
    columns = columns_of()
    results = results_of(measure(write(columns), "--num_samples", 4, "--seed", 7))
    expected = sampled_retrieval_scores(
        columns["embedding"], columns["concentration"], columns["label"], num_samples=4, seed=7
    )
    for name, score in expected.items():
        measured = {end: results[f"eval_sampled_{name}{end}"] for end in ("", "_low", "_high")}
        assert measured == pytest.approx({"": score["mean"], "_low": score["low"], "_high": score["high"]})


@pytest.mark.parametrize(
    ("argv", "threshold", "distance"), [([], 10.5, "angular"), (["--overlap_distance", "euclidean"], 0.4, "euclidean")]
)
def test_class_overlap_equals_the_metric(write, measure, results_of, argv, threshold, distance):
    columns = columns_of()
    results = results_of(measure(write(columns), "--overlap_threshold", threshold, *argv))
    correct = columns["prediction"] == columns["label"]
    expected = class_overlap(columns["embedding"], columns["label"], correct, threshold=threshold, distance=distance)
    assert expected["num_pairs"] > 0
    assert {name: results[f"eval_overlap_{name}"] for name in expected} == expected


def test_unknown_labels_are_counted_and_excluded_from_accuracy_calibration_and_overlap(
    write, measure, results_of, capsys
):
    columns = columns_of()
    known = columns["label"] != 2
    correct = (columns["prediction"] == columns["label"])[known]
    results = results_of(measure(write(columns, class_names=["a", "b", "z"]), "--overlap_threshold", 20))
    assert results["eval_num_unknown_labels"] == 20
    assert results["eval_accuracy"] == pytest.approx(correct.double().mean().item())
    expected = calibration_errors(columns["confidence"][known], correct)["calibration_error_equal_mass_l2"]
    assert results["eval_calibration_error_equal_mass_l2"] == pytest.approx(expected)
    assert results["eval_num_queries"] == 60
    expected = class_overlap(columns["embedding"][known], columns["label"][known], correct, threshold=20.0)
    assert results["eval_overlap_num_overlaps"] == expected["num_overlaps"]
    assert "20 of 60 labels are not among the model's classes" in capsys.readouterr().out


OVERLAP = ["--overlap_threshold", 20]
OPEN_SET = {"class_names": ["x", "y", "z"]}


@pytest.mark.parametrize(
    ("changes", "options", "argv", "absent", "note"),
    [
        ({"count": 7}, {"num_training_images": 7}, [], "overlap", "the model was trained on 7 of these images, so"),
        ({}, {"num_calibration_images": 7}, [], "calibration", "calibrated on 7 of these images"),
        ({"zero": True}, {}, [], "sampled", "sampled retrieval is skipped: 1 embedding(s) are zero vectors"),
        ({}, {}, ["--num_samples", 0], "sampled", ""),
        ({}, {}, ["--distance", "hyperbolic", "--curvature", 1e-5], "sampled", ""),
        ({"zero": True}, {}, OVERLAP, "overlap", "class overlap is skipped: 1 embedding(s) are zero vectors"),
        ({}, OPEN_SET, OVERLAP, "overlap", "class overlap is skipped: no label is one of the model's classes"),
        ({}, OPEN_SET, [], "accuracy", "no label is one of the model's classes (an open set)"),
        ({"repeats": True}, {}, [], "recall", "retrieval is skipped: 30 row(s) repeat an image, which would be its"),
        ({"count": 3}, {}, [], "recall", "retrieval is skipped: no class has two images"),
        ({"one class": True}, {}, [], "recall", "retrieval is skipped: all images are of one class"),
    ],
)
def test_metrics_that_the_data_do_not_allow_are_skipped_with_a_note(
    write, measure, results_of, capsys, changes, options, argv, absent, note
):
    columns = columns_of(changes.get("count", 60))
    if "zero" in changes:
        columns["embedding"][5] = 0
    if "one class" in changes:
        columns["label"][:] = 0
    if "repeats" in changes:
        columns["row_id"] = torch.arange(60) // 2
    folder = measure(write(columns, **options), *argv)
    results = results_of(folder)
    assert not [name for name in results if absent in name]
    assert {"eval_accuracy", "eval_recall_at_1"} & results.keys()
    assert note in capsys.readouterr().out
    assert (folder / PLOTS[0]).exists() == (absent not in ("accuracy", "calibration") and options != OPEN_SET)


def test_ood_detection_uses_every_certainty(write, measure, results_of):
    own, other = columns_of(), without(columns_of(40, logits_scale=1.0, seed=1), "label")
    results = results_of(measure(write(own), "--out_of_distribution", write(other, "other.test")))
    for name in ("confidence", "concentration"):
        expected = detection_scores(own[name], other[name])
        assert results[f"ood_other.test_auroc_{name}"] == pytest.approx(expected["auroc"])
        assert results[f"ood_other.test_fpr_at_95_tpr_{name}"] == pytest.approx(expected["fpr_at_95_tpr"])


def test_ood_detection_uses_every_score_that_is_fitted_to_the_training_images(write, measure, results_of, capsys):
    sets = [columns_of(80), columns_of(seed=1), columns_of(seed=2, logits_scale=1.0)]
    sets = [columns | {"logits": 2.0 * columns["embedding"]} for columns in sets]
    train, own, other = (write(columns, name) for columns, name in zip(sets, ["train", "own", "other"], strict=True))
    results = results_of(measure(own, "--out_of_distribution", other, "--train_embeddings", train))
    for score in {"confidence", *SCORES} - {"max_softmax"}:
        assert {f"ood_other_{metric}_{score}" for metric in ("auroc", "fpr_at_95_tpr", "aupr")} <= results.keys()
    scores = [
        OODDetector("knn").fit_embeddings(sets[0]["embedding"]).score_embeddings(columns["embedding"])
        for columns in sets[1:]
    ]
    assert results["ood_other_auroc_knn"] == pytest.approx(detection_scores(*scores)["auroc"])
    assert "the OOD score with the highest mean AUROC is" in capsys.readouterr().out


def test_different_images_of_one_data_set_may_have_equal_embeddings(write, measure, results_of):
    own, train = (columns_of(80) | {"row_id": torch.arange(start, start + 80)} for start in (0, 80))
    other = write(columns_of(seed=1), "other")
    results = results_of(
        measure(write(own), "--out_of_distribution", other, "--train_embeddings", write(train, "train"))
    )
    assert "ood_other_auroc_knn" in results


def test_skipped_ood_scores_are_noted(write, measure, results_of, capsys):
    other = write(columns_of(seed=1, concentration=False), "other")
    results = results_of(measure(write(columns_of(concentration=False)), "--out_of_distribution", other))
    assert {name.rpartition("_")[2] for name in results if name.startswith("ood_")} == {"confidence", "norm"}
    printed = capsys.readouterr().out
    assert "OOD scores are fitted to the training images with --train_embeddings" in printed
    assert "OOD score energy is skipped: the score energy needs logits, which the data do not have" in printed


def test_ood_images_embedded_by_another_model_but_not_by_another_path_of_it_are_noted(
    write, measure, results_of, tmp_path, monkeypatch, capsys
):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    own = write(columns_of(), model=str(tmp_path / "model"))
    measure(own, "--out_of_distribution", write(columns_of(seed=1), "other1", model="model/"))
    assert "another model" not in capsys.readouterr().out
    paths = [tmp_path / "other1", write(columns_of(seed=2), "other2", model="second")]
    results = results_of(measure(own, "--out_of_distribution", *paths, "--overwrite_output_dir"))
    assert "was embedded by another model" in capsys.readouterr().out
    assert {f"ood_other{seed}_auroc_confidence" for seed in (1, 2)} <= results.keys()


def test_an_ood_split_of_another_name_is_noted(write, measure, results_of, tmp_path, capsys):
    with embeddings_writer(tmp_path / "other", "train", {}, class_names=CLASSES, predicted_names=CLASSES) as add:
        add(columns_of(seed=1))
    argv = ["--split", "test", "--out_of_distribution", tmp_path / "other"]
    assert "ood_other_auroc_confidence" in results_of(measure(write(columns_of()), *argv))
    assert "has no split 'test'; its only split, 'train', was read instead" in capsys.readouterr().out


# Labels that are not classes of the model


def test_labels_and_predictions_are_compared_by_name(write, measure, results_of):
    """Class 0 of the data is class 2 of the model."""
    columns = columns_of()
    expected = (columns["prediction"] == columns["label"]).double().mean().item()
    columns["prediction"] = 2 - columns["prediction"]
    results = results_of(measure(write(columns, predicted_names=CLASSES[::-1])))
    assert results["eval_accuracy"] == pytest.approx(expected)


def test_embeddings_without_predictions_have_only_retrieval_with_a_note(measure, results_of, tmp_path, capsys):
    columns = columns_of()
    (tmp_path / "other").mkdir()
    rows = {name: columns[name].tolist() for name in ("embedding", "label")}
    Dataset.from_dict(rows).to_parquet(tmp_path / "other" / "train.parquet")
    results = results_of(measure(tmp_path / "other"))
    expected = retrieval_scores(columns["embedding"], columns["label"])
    assert results["eval_map_at_r"] == pytest.approx(expected["map_at_r"])
    assert "eval_accuracy" not in results
    assert "risk are skipped: there is no column prediction" in capsys.readouterr().out


def test_classes_with_one_image_are_counted_and_noted(write, measure, results_of, capsys):
    columns = columns_of(7)  # three, two and two per class
    columns["label"][6] = 1
    columns["label"][3] = 2
    results = results_of(measure(write(columns)))
    assert (results["eval_num_queries"], results["eval_num_excluded"]) == (6, 1)
    assert "1 image(s) are not retrieval queries" in capsys.readouterr().out


# Files and printed output


def test_the_caption_has_both_calibration_errors_and_without_matplotlib_only_the_plots_are_missing(
    write, measure, results_of, monkeypatch, capsys
):
    captions = []

    def missing(*args, caption, **options):
        captions.append(caption)
        raise ImportError("plots need matplotlib")

    monkeypatch.setattr(visualization, "plot_reliability", missing)
    results = results_of(measure(write(columns_of())))
    assert "no plots: plots need matplotlib" in capsys.readouterr().out
    squared, plain = (100 * results[f"eval_calibration_error_{kind}"] for kind in ("equal_mass_l2", "equal_width_l1"))
    mass, width = f"{squared:.2f} % (equal mass, root mean square)", f"{plain:.2f} % (equal width, mean)"
    assert captions == [f"calibration error {mass}, {width}"]


def test_results_and_their_plots_are_replaced_only_on_request(write, measure, results_of, tmp_path, capsys):
    folder, results = write(columns_of()), tmp_path / "results"
    measure(folder, "--ks", 2, 1, "--output_dir", results)
    assert not (folder / "evaluation").exists()
    assert capsys.readouterr().out.count("eval_recall_at_2 ") == 1
    assert json.loads((results / "run.json").read_text())["ks"] == [2, 1]
    (results / "reliability.png").write_bytes(b"old")
    with pytest.raises(FileExistsError, match=r"already contains results.*--overwrite_output_dir"):
        measure(folder, "--max_samples", 30, "--output_dir", results)
    assert results_of(results)["eval_num_queries"] == 60
    measure(folder, "--max_samples", 30, "--output_dir", results, "--overwrite_output_dir")
    assert results_of(results)["eval_num_queries"] == 30
    assert (results / "reliability.png").read_bytes() != b"old"


def test_overwriting_removes_plots_that_are_not_written_again(write, measure, tmp_path):
    results = ["--output_dir", tmp_path / "results"]
    measure(write(columns_of()), *results)
    open_set = write(columns_of(), "open", class_names=["x", "y", "z"])
    measure(open_set, *results, "--overwrite_output_dir")
    assert not list((tmp_path / "results").glob("*.png"))


def test_an_interrupted_run_leaves_no_results(write, measure, monkeypatch):
    monkeypatch.setattr("hf_sphere.evaluation.evaluate.metrics.retrieval_scores", Mock(side_effect=KeyboardInterrupt))
    folder = write(columns_of())
    with pytest.raises(KeyboardInterrupt):
        measure(folder)
    assert not (folder / "evaluation").exists()


# Errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--distance", "hyperbolic"], "the hyperbolic distance needs --curvature"),
        (["--curvature", "1"], "and no other has one; this one is cosine"),
        (["--curvature", "1", "--distance", "cosine"], "and no other has one"),
        (["--split", "train"], r"no split 'train'; the data has test\. Choose one with --split"),
        (["--ks", "2", "0"], "ks must be at least 1; got 0."),
        (["--train_embeddings", "a"], "train_embeddings a has no effect without out_of_distribution"),
        (["--curvature", "-1"], "curvature must be above 0; got -1.0."),
        (["--num_samples", "-1"], "num_samples must be at least 0; got -1."),
        (["--max_samples", "0"], "max_samples must be at least 1; got 0."),
        (["--overlap_threshold", "0"], "overlap_threshold must be above 0; got 0.0."),
        (["--overlap_threshold", "200"], "overlap_threshold must be at most 180 degrees; got 200."),
        (["--overlap_threshold", "inf", "--overlap_distance", "euclidean"], "must be above 0 and finite; got inf."),
        (["--overlap_distance", "euclidean"], "overlap_distance euclidean has no effect without overlap_threshold"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_refused_before_any_measurement_and_leave_no_results(
    write, measure, argv, message, capsys
):
    folder = write(columns_of())
    with pytest.raises((ValueError, SystemExit)) as refusal:
        measure(folder, *argv)
    printed = capsys.readouterr()
    assert re.search(message, f"{refusal.value} {printed.err}")
    assert "accuracy" not in printed.out
    assert not (folder / "evaluation").exists()


BARE = without(columns_of(), "prediction", "confidence", "concentration")


@pytest.mark.parametrize(
    ("columns", "ood", "train", "argv", "message"),
    [
        (without(columns_of(), "label"), [], None, [], "has no column label; it has: embedding"),
        (BARE, [], None, OVERLAP, "has no column prediction; it has: embedding, label"),
        (columns_of(), [columns_of(concentration=False)], None, [], "has no column concentration"),
        (columns_of(), [columns_of(seed=1)] * 2, None, [], "have the same name: test, test"),
        (columns_of(), [columns_of(40, seed=1)], columns_of(), [], "60 of the 60 held-out inputs "),
        (columns_of(), [columns_of(seed=1)], columns_of(seed=1), [], "60 of the 60 inputs test are among the 60"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(write, measure, tmp_path, columns, ood, train, argv, message):
    if ood:
        argv = ["--out_of_distribution", *(write(each, f"{n}/test") for n, each in enumerate(ood))]
    if train is not None:
        argv = [*argv, "--train_embeddings", write(train, "train")]
    with pytest.raises(ValueError, match=message):
        measure(write(columns), *argv)
    assert not (tmp_path / "made-test" / "evaluation").exists()


def test_ood_detection_works_without_predictions(write, measure, results_of):
    results = results_of(measure(write(BARE), "--out_of_distribution", write(columns_of(seed=1), "other")))
    assert {name for name in results if "auroc" in name} == {"ood_other_auroc_norm"}


def test_the_output_of_a_hub_data_set_is_required_and_no_file(write, measure, tmp_path):
    with pytest.raises(ValueError, match=r"is not a folder\. If it is a dataset on the Hub, set --output_dir"):
        measure(Path("someone/embeddings"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot be written|is a file"):
        measure(write(columns_of()), "--output_dir", tmp_path / "file")
