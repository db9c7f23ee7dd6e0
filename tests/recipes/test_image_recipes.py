"""From a folder of images to predictions, an index, a search and an ONNX file, from the command line."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from case_selection import each
from PIL import Image
from training_runs import ROOT
from transformers import ViTConfig, ViTImageProcessor, ViTModel, pipeline
from two_processes import run_two

from hf_sphere.commands.index import main as index_images
from hf_sphere.data.provenance import DataRecord, fingerprint, identify_rows
from hf_sphere.data.sources import load_splits
from hf_sphere.evaluation import evaluate_embeddings
from hf_sphere.models import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.ood import fit_rejection
from hf_sphere.search import ImageEncoder, ImageIndex, ImageSource
from hf_sphere.search.encoder import VectorEncoder
from hf_sphere.search.extract import finished_batches
from hf_sphere.search.store import read_embeddings

SIZE = {"height": 8, "width": 8}


def save(folder: Path, **options: Any) -> str:
    """Save a small untrained classifier of digits with its processor."""
    torch.manual_seed(0)
    given = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 16}, "num_channels": 1, "image_size": 8}
    model = SphereVisionForImageClassification(SphereVisionConfig(**given, **options)).eval()
    if options["head"] == "vmf":
        model.head.initialize_from_data(torch.randn(20, 6))
    model.save_pretrained(folder)
    SphereVisionImageProcessor(num_channels=1, size=SIZE, image_mean=[0.5], image_std=[0.5]).save_pretrained(folder)
    return str(folder)


def save_problem(folder: Path, problem_type: str) -> str:
    """Save a model of a problem type, with its processor."""
    return save(folder, head="cosine", problem_type=problem_type, id2label={0: "a", 1: "b", 2: "c"})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A classifier with a concentration."""
    names = {0: "low", 1: "middle", 2: "high"}
    return save(tmp_path_factory.mktemp("model"), embedding_dim=6, head="vmf", id2label=names)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """A folder of nine images in two class folders."""
    folder, digits = tmp_path_factory.mktemp("photos"), ImageSource.of("digits")
    for index in range(9):
        file = folder / ("a" if index < 4 else "b") / f"{index}.png"
        file.parent.mkdir(exist_ok=True)
        digits.open(index).save(file)
    return folder


@pytest.fixture(scope="module")
def rejecting(model, tmp_path_factory) -> str:
    """The classifier, with a rejection of about half of the digits."""
    folder, digits = tmp_path_factory.mktemp("rejecting"), ImageSource.of("digits")
    loaded, processor = SphereVisionForImageClassification.from_pretrained(model), ImageEncoder(model).processor
    batch = processor([digits.open(index) for index in range(20, 80)], return_tensors="pt")
    fit_rejection(loaded, [dict(batch) | {"labels": torch.arange(60) % 3}], 0.5, "max_logit")
    for part in (loaded, processor):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(load_recipe, run_main):
    """Run a recipe with the words of a command line."""
    return lambda recipe, *words: run_main(load_recipe(recipe), list(map(str, words)))


@pytest.fixture(scope="module")
def build(run, model):
    """Build or change an index with the recipe."""
    return lambda *words: run("index", "--model_name_or_path", model, "--disable_tqdm", *words)


@pytest.fixture(scope="module")
def folder(build, photos, tmp_path_factory) -> Path:
    """The folder of an index of the photos."""
    folder = tmp_path_factory.mktemp("index") / "index"
    build("--images", photos, "--output_dir", folder)
    return folder


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """A copy of the index, to change."""
    return shutil.copytree(folder, tmp_path / "index")


@pytest.fixture
def query(photos) -> Path:
    """One of the photos."""
    return photos / "b" / "4.png"


@pytest.fixture
def search(run, folder, tmp_path):
    """Search with the recipe, and return the rows of its table."""

    def rows(*words: object, index: Path = folder) -> list[dict[str, str]]:
        run("search", "--index", index, "--table", tmp_path / "found.csv", *words)
        return list(csv.DictReader((tmp_path / "found.csv").open()))

    return rows


@pytest.fixture
def predict(run, model, photos, tmp_path):
    """Run the recipe on the photos, and return the path of its output."""

    def write(name: str, *words: str) -> Path:
        output = tmp_path / name
        run("predict", "--model_name_or_path", model, "--images", photos, "--output", output, *words)
        return output

    return write


# Predictions


def test_predictions_match_the_pipeline(predict, model, photos):
    table = pd.read_csv(predict("table.csv", "--top_k", "2"))
    columns = "file label prediction confidence concentration prediction_2 confidence_2"
    assert list(table) == columns.split()
    assert table["label"].tolist() == ["a"] * 4 + ["b"] * 5
    for row, best in zip(table.itertuples(), pipeline("image-classification", model)(_files(photos)), strict=True):
        assert (row.prediction, row.prediction_2) == (best[0]["label"], best[1]["label"])
        assert (row.confidence, row.confidence_2) == pytest.approx((best[0]["score"], best[1]["score"]), abs=1e-5)


def test_a_prediction_says_how_many_images_the_model_was_trained_on(predict, photos, tmp_path, capsys):
    model = save(tmp_path / "model", embedding_dim=6, head="vmf", id2label={0: "a", 1: "b"})
    predict("table.csv", "--model_name_or_path", model)
    assert "record" not in capsys.readouterr().out
    splits = load_splits(str(photos))
    rows = identify_rows(splits, "train", None, fingerprint(splits))
    DataRecord({"train": "train", "eval": "train"}, {"train": rows[:6]}, None).save(tmp_path / "model")
    predict("again.csv", "--model_name_or_path", model)
    assert "the model was trained on 6 of these images, so the accuracy is optimistic" in capsys.readouterr().out


def _files(photos: Path) -> list[str]:
    return [str(photos / name) for name in ImageSource.of(photos).names]


@torch.no_grad()
def loaded_with_output(model: str, files: list[str]) -> tuple[SphereVisionForImageClassification, Any]:
    """A saved model, and its output for files of images."""
    loaded = SphereVisionForImageClassification.from_pretrained(model).eval()
    processor = SphereVisionImageProcessor.from_pretrained(model)
    return loaded, loaded(**processor([Image.open(file) for file in files], return_tensors="pt"))


def classify_without_torch(*words: object, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "examples" / "onnx_without_torch.py", *words]
    return subprocess.run([*map(str, command)], env=os.environ | environment, capture_output=True, text=True)


def test_of_equally_probable_classes_the_first_are_predicted(load_recipe, tmp_path):
    batches = [(torch.arange(2), {"logits": torch.zeros(2, 50)})]
    about = {"weights": "", "model": None, "class_names": list(map(str, range(50)))}
    encoder = SimpleNamespace(**about, encode=lambda *_, **__: batches)
    encoder.name_cells = lambda _, rows, columns: {"row": rows.tolist(), "prediction": ["0", "0"]}
    source = MagicMock(names=["a", "b"], split=None)
    source.name, source.__len__.return_value = "", 2
    recipe = load_recipe("predict")
    args = recipe.PredictionArguments(model_name_or_path="", images="", output="table.csv", top_k=3)
    rows = recipe.predict(args, encoder, source, tmp_path / "unfinished")
    assert [[row[name] for name in ("prediction", "prediction_2", "prediction_3")] for row in rows] == [list("012")] * 2


def test_classes_of_a_multi_label_model_have_the_probabilities_of_the_pipeline(predict, photos, tmp_path, capsys):
    model = save_problem(tmp_path / "multi", "multi_label_classification")
    table = pd.read_csv(predict("table.csv", "--model_name_or_path", model))
    expected = [[each["score"] for each in row] for row in pipeline("image-classification", model)(_files(photos))]
    assert table[["confidence", "confidence_2", "confidence_3"]].values.tolist() == [
        pytest.approx(row, abs=1e-5) for row in expected
    ]
    assert "accuracy  none: the model is for multi_label_classification" in capsys.readouterr().out


def test_a_regression_has_values_and_neither_classes_nor_confidences(predict, photos, tmp_path, capsys):
    model = save_problem(tmp_path / "values", "regression")
    table = pd.read_csv(predict("table.csv", "--model_name_or_path", model))
    assert list(table) == ["file", "label", "value_a", "value_b", "value_c"]
    expected = loaded_with_output(model, _files(photos))[1].logits
    np.testing.assert_allclose(table[["value_a", "value_b", "value_c"]], expected, rtol=1e-5, atol=1e-5)
    assert "accuracy  none: the model is for regression" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_evaluation_and_index_have_what_the_problem_type_of_the_model_has(kind, run, search, photos, tmp_path):
    model, is_regression = save_problem(tmp_path / "model", kind), kind == "regression"
    words = ["--model_name_or_path", model, "--output_dir", tmp_path / "vectors"]
    run("extract", *words, "--dataset_name", photos, "--split", "all")
    data = read_embeddings(str(tmp_path / "vectors"))
    found = evaluate_embeddings(data, ood={"same": data})
    assert {"eval_accuracy", "ood_same_auroc_energy"}.isdisjoint(found.results)
    note = f"accuracy, calibration and risk are skipped: the model is for {kind}, not for one class per image."
    assert note in found.notes
    assert ("confidence" not in data.certainties) == is_regression
    run("index", "--model_name_or_path", model, "--images", photos, "--output_dir", tmp_path / "own")
    rows = search("--query", photos, "--model_name_or_path", model, index=tmp_path / "own")
    images = ImageIndex.load(tmp_path / "own").images
    assert ("confidence" in images, "confidence" in rows[0]) == (not is_regression,) * 2
    if not is_regression:
        scores = [each[0]["score"] for each in pipeline("image-classification", model)(_files(photos))]
        assert images["confidence"] == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_an_exported_file_is_read_by_its_problem_type_without_torch(kind, run, predict, photos, tmp_path):
    pytest.importorskip("onnxruntime")
    model, file = save_problem(tmp_path / "model", kind), tmp_path / "model.onnx"
    run("export", "--model_name_or_path", model, "--output", file)
    out = classify_without_torch(file, *_files(photos)).stdout
    table = pd.read_csv(predict("table.csv", "--model_name_or_path", model))
    names = {"regression": ["value_a", "value_b", "value_c"]}.get(kind, ["confidence", "confidence_2", "confidence_3"])
    found = [[float(word) for word in line.split()[2::2]] for line in out.splitlines()]
    np.testing.assert_allclose(found, table[names], rtol=1e-3, atol=1e-3)


def test_parquet_has_the_same_rows_as_csv_which_quotes_names_that_look_like_formulas(predict, photos, tmp_path):
    shutil.copytree(photos / "a", tmp_path / "images" / "=1+1")
    tables = {name: predict(name, "--images", str(tmp_path / "images")) for name in ("table.csv", "table.parquet")}
    table, exact = pd.read_csv(tables["table.csv"]), pd.read_parquet(tables["table.parquet"])
    assert exact["label"].tolist() == ["=1+1"] * 4
    quoted = exact.assign(**{column: "'" + exact[column] for column in ("file", "label")})
    pd.testing.assert_frame_equal(table, quoted, check_dtype=False)
    assert "prediction_3" in table
    assert "prediction_4" not in table  # there are three classes
    assert not {"known", "p_value", "classes"} & {*table}  # without a rejection


def test_an_interrupted_run_continues(predict, monkeypatch, caplog, tmp_path):
    expected = pd.read_csv(predict("whole.csv", "--batch_size", "2"))
    original, embedded = ImageEncoder._embed, []

    def interrupt(self, names, **inputs):
        if len(embedded) == 4:
            raise KeyboardInterrupt
        embedded.extend(names)
        return original(self, names, **inputs)

    with monkeypatch.context() as patch:
        patch.setattr(ImageEncoder, "_embed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            predict("table.csv", "--batch_size", "2")
    (finished,) = finished_batches(tmp_path / "table.csv").iterdir()
    found = pd.read_csv(predict("table.csv", "--batch_size", "3"))
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5)  # batches of other sizes may be rounded otherwise
    assert "Continuing after 4 of 9 images" in caplog.text
    assert not finished.parent.exists()


@pytest.mark.parametrize("change", ["another image", "other contents", "another option", "rejection", "calibration"])
@each("change")
def test_batches_of_an_interrupted_run_on_other_data_or_with_other_decisions_are_not_used(
    change, predict, photos, rejecting, tmp_path, monkeypatch, caplog
):
    images, model = shutil.copytree(photos, tmp_path / "photos"), shutil.copytree(rejecting, tmp_path / "model")
    words = ["--images", str(images), "--model_name_or_path", str(model), "--batch_size", "2"]
    with monkeypatch.context() as patch:
        patch.setattr("hf_sphere.commands.predict.write_table", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            predict("table.csv", *words)
    config = json.loads((model / "config.json").read_text())
    if change == "another image":
        shutil.copy(images / "a" / "0.png", images / "a" / "00.png")
    elif change == "other contents":
        shutil.copy(images / "a" / "0.png", images / "b" / "4.png")
    elif change == "another option":
        words.append("--skip_invalid")
    elif change == "rejection":
        config["rejection"]["level"] = 0.2
    else:
        config["calibration"] = {"temperature": 3.0}
    (model / "config.json").write_text(json.dumps(config))
    rows = pd.read_csv(predict("table.csv", *words))
    assert "Continuing" not in caplog.text
    pd.testing.assert_frame_equal(rows, pd.read_csv(predict("fresh.csv", *words)))
    assert not finished_batches(tmp_path / "table.csv").exists()


def decisions_of(model: str, photos: Path) -> tuple[SphereVisionForImageClassification, Any]:
    """The model, and its output for the photos, in the order of their files."""
    loaded, output = loaded_with_output(model, _files(photos))
    assert set(output.known.tolist()) == {False, True}
    return loaded, output


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_table_has_the_decisions_and_the_classes_that_are_needed(suffix, predict, rejecting, photos, capsys):
    loaded, output = decisions_of(rejecting, photos)
    file = predict(f"table.{suffix}", "--model_name_or_path", rejecting, "--coverage", "0.5")
    unknown = int((~output.known).sum())
    assert f"unknown   {unknown} of 9 images, at level 0.5\n" in capsys.readouterr().out
    table = pd.read_csv(file) if suffix == "csv" else pd.read_parquet(file)
    assert table["known"].tolist() == output.known.tolist()
    assert table["p_value"].tolist() == pytest.approx(output.p_value.tolist())
    decision = (output.known, output.class_p_values)
    chosen = loaded.rejection.prediction_set(*decision, output.logits.argmax(1), 0.5)
    expected = [
        [name for name, is_in in zip(["low", "middle", "high"], row, strict=True) if is_in] for row in chosen.tolist()
    ]
    lists = table["classes"].map(json.loads if suffix == "csv" else list).tolist()
    assert [sorted(names) for names in lists] == [sorted(names) for names in expected]
    assert all(names[0] == prediction for names, prediction in zip(lists, table["prediction"], strict=True) if names)
    assert {bool(names) for names in lists} == {False, True}
    if suffix == "csv":
        assert set(pd.read_csv(file, dtype=str)["known"]) == {"true", "false"}


def test_unreadable_images_are_left_out_and_an_existing_file_replaced_only_if_requested(predict, photos, tmp_path):
    (photos / "b" / "bad.png").write_bytes(b"")
    try:
        with pytest.raises(ValueError, match=r"b/bad.png cannot be read as an image"):
            predict("table.csv")
        assert len(pd.read_csv(predict("table.csv", "--skip_invalid"))) == 9
    finally:
        (photos / "b" / "bad.png").unlink()
    (tmp_path / "table.csv").write_text("mine")
    with pytest.raises(FileExistsError, match="--overwrite_output"):
        predict("table.csv")
    with pytest.raises((ValueError, SystemExit)):
        predict("table.txt")
    assert len(pd.read_csv(predict("table.csv", "--overwrite_output"))) == 9


# Search


def test_search_writes_a_table_and_a_contact_sheet(search, photos, tmp_path):
    words = ["--query", photos / "b", "--top_k", "3", "--classes", "b", "--contact_sheet", tmp_path / "found.png"]
    rows = search(*words)
    assert len(rows) == 15
    assert [row["file"] for row in rows[::3]] == [str(photos / "b" / f"{index}.png") for index in range(4, 9)]
    assert {row["class"] for row in rows} == {"b"}
    assert set(rows[0]) >= {"distance", "query_concentration", "concentration", "confidence"}
    sheet = Image.open(tmp_path / "found.png")
    assert sheet.size == (4 * 160, 5 * 208)
    cells = [np.asarray(sheet.crop((3 + 160 * n, 3, 157 + 160 * n, 157))) for n in range(4)]
    assert np.array_equal(cells[0], cells[1])  # the query is its own nearest neighbor
    assert not np.array_equal(cells[0], cells[2])


def test_a_query_is_left_out_of_its_neighbors_if_asked(search, photos):
    def neighbors(*more: str) -> list[tuple[str, str]]:
        rows = search("--query", photos / "b", "--classes", "b", *more)
        return [(row["query"], row["file"]) for row in rows]

    every = neighbors("--top_k", "4")
    own = str(photos / "b")
    assert any(f"{own}/{query}" == file for query, file in every)
    assert neighbors("--top_k", "3", "--leave_out_query") == [(q, file) for q, file in every if file != f"{own}/{q}"]


def test_predicted_classes_have_a_question_mark(run, build, copy, query, photos, tmp_path, capsys):
    build("--images", shutil.copytree(photos / "b", tmp_path / "flat"), "--add_to", copy)
    capsys.readouterr()
    run("search", "--index", copy, "--query", query, "--top_k", "2")
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["class"].endswith("?") for row in rows] == [False, True]


def test_the_next_step_of_an_index_can_be_pasted(build, run, photos, tmp_path, capsys):
    source = shutil.copytree(photos, tmp_path / "my photos")
    build("--images", source, "--output_dir", tmp_path / "my index")
    _, _, *words = shlex.split(capsys.readouterr().out.rpartition("next step ")[2])
    run("search", *words)
    assert capsys.readouterr().out.startswith("query,rank,id,file")
    build("--images", "digits", "--output_dir", tmp_path / "index")
    assert capsys.readouterr().out.endswith("--query IMAGE\n")  # and no redirection of the shell


def test_images_are_added_to_and_removed_from_an_index_and_the_others_keep_their_ids(
    build, search, copy, query, photos, capsys
):
    build("--images", photos / "a", "--remove_from", copy)
    assert "removed   4 images of" in capsys.readouterr().out
    (row,) = search("--query", query, "--top_k", "1", index=copy)
    assert (row["id"], row["file"]) == ("4", str(query))
    build("--images", "digits", "--add_to", copy)
    assert "added     355 of 355 images" in capsys.readouterr().out
    assert len(ImageIndex.load(copy)) == 360


def test_simultaneous_additions_lose_nothing(start, copy, photos, tmp_path):
    others = [shutil.copytree(photos, tmp_path / name) for name in ("first", "second", "third")]
    words = ["--add_to", copy, "--disable_tqdm"]
    processes = [start("-m", "hf_sphere.commands.main", "index", "--images", images, *words) for images in others]
    for process in processes:
        assert process.wait() == 0, process.stdout.read()
    index = ImageIndex.load(copy)
    assert len(index) == 36
    for row in range(len(index)):  # each name has the embedding of its image
        assert index.open_image(row).size == (8, 8)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def indexed(folder: Path) -> tuple[list, torch.Tensor]:
    index = ImageIndex.load(folder)
    return [index.images[name] for name in ("id", "file", "label", "prediction", "digest")], index.embeddings


def index_in_one_of_two(rank: int, words: list[str]) -> None:
    index_images(words)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--output_dir"], ["--add_to"]])
def test_two_processes_share_an_index_that_equals_that_of_one(words, build, model, folder, tmp_path):
    """The images are divided unevenly, as 178 batches of 2, of which the last has one image."""
    one, two = tmp_path / "one", tmp_path / "two"
    if words == ["--add_to"]:
        for copied in (one, two):
            shutil.copytree(folder, copied)
    words = ["--model_name_or_path", model, "--images", "digits", "--batch_size", "2", "--disable_tqdm", *words]
    printed = run_two(index_in_one_of_two, [*map(str, [*words, two])])
    build(*words[2:], one)
    (names, embeddings), (expected_names, expected) = indexed(two), indexed(one)
    assert names == expected_names
    torch.testing.assert_close(embeddings, expected)
    assert "".join(printed).count("wrote     ") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


KILLED = """
import os, signal, sys
from hf_sphere.commands.index import main
from hf_sphere.search import ImageEncoder
embed, most = ImageEncoder._embed, int(sys.argv[2])
def count(self, names, **inputs):
    with open(sys.argv[1], "a") as file:
        file.write("".join(name + "\\n" for name in names))
    if len(open(sys.argv[1]).readlines()) > most:
        os.kill(os.getpid(), signal.SIGKILL)
    return embed(self, names, **inputs)
ImageEncoder._embed = count
main(sys.argv[3:])
"""


@pytest.mark.slow
def test_a_killed_build_continues_and_embeds_only_what_is_missing(start, build, model, tmp_path):
    words = ["--model_name_or_path", model, "--images", "digits", "--batch_size", "50", "--disable_tqdm"]
    outputs = []
    for most in (200, 10**9):
        file = tmp_path / f"{most}.txt"
        process = start("-c", KILLED, file, most, *words, "--output_dir", tmp_path / "index")
        outputs.append((process.communicate(timeout=300)[0], process.returncode, len(file.read_text().split())))
    (_, killed, _), (printed, code, embedded) = outputs
    assert (killed, code) == (-signal.SIGKILL, 0), outputs
    assert embedded == 355 - 200
    assert "Continuing after 200 of 355 images" in printed
    build(*words[2:], "--output_dir", tmp_path / "whole")
    (names, embeddings), (expected_names, expected) = indexed(tmp_path / "index"), indexed(tmp_path / "whole")
    assert names == expected_names
    assert torch.equal(embeddings, expected)
    assert not finished_batches(tmp_path / "index").exists()


@pytest.mark.parametrize("words", [["--output_dir", "new"], ["--add_to", "index"], ["--output_dir", "."]])
def test_an_index_that_cannot_be_written_is_an_error_before_the_work(words, build, copy, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ImageEncoder, "encode", lambda *_, **__: pytest.fail("embedded"))
    if "." not in words:
        monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=OSError(30, "Read-only file system")))
    with pytest.raises(OSError, match=r"Read-only file system|cannot be replaced: it is the working directory"):
        build("--images", photos, *words)


@pytest.mark.parametrize("words", [["--add_to"], ["--overwrite_output_dir", "--output_dir"]])
def test_a_folder_with_other_files_is_an_error_before_the_work(words, build, copy, monkeypatch):
    (copy / "notes.txt").touch()
    monkeypatch.setattr(ImageEncoder, "encode", lambda *_, **__: pytest.fail("embedded"))
    with pytest.raises(FileExistsError, match=r"index is not replaced: .*notes.txt"):
        build("--images", "digits", *words, copy)


@pytest.mark.parametrize("name", ["none/index", ""])
def test_additions_to_no_index_leave_no_folder(name, build, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"there is no index none/index; build it|name a folder in it"):
        build("--images", photos, "--add_to", name)
    assert list(tmp_path.iterdir()) == []


def test_following_the_message_after_an_interrupted_replacement_loses_no_index(build, copy, photos, tmp_path):
    copy.rename(tmp_path / ".index.replaced")
    with pytest.raises(FileExistsError, match="is not empty"):
        build("--images", photos / "b", "--output_dir", copy)
    assert len(ImageIndex.load(copy)) == 9


def test_no_image_that_replaced_the_indexed_one_is_shown(load_recipe, build, search, query, photos, tmp_path):
    changed = shutil.copytree(photos, tmp_path / "photos")
    build("--images", changed, "--output_dir", tmp_path / "index")
    shutil.copy(changed / "a" / "0.png", changed / "b" / "4.png")
    words = ["--query", query, "--top_k", "1", "--contact_sheet", tmp_path / "found.png"]
    search(*words, index=tmp_path / "index")
    sheet = np.asarray(Image.open(tmp_path / "found.png"))
    assert (sheet[3:157, 163:317] == 255).all()
    index = ImageIndex.load(tmp_path / "index")
    drawn = load_recipe("page").draw(index, index.search(query, 1))
    assert "missing or changed" in drawn
    assert "<td>b/4.png</td>" in drawn
    assert "<img" not in drawn
    assert "data-row" not in drawn  # nothing to search by


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> Path:
    """A folder of 40 images that look like none of the photos."""
    folder, numbers = tmp_path_factory.mktemp("noise"), np.random.default_rng(0)
    for index in range(40):
        pixels = numbers.integers(0, 2, (8, 8), dtype=np.uint8) * 255
        Image.fromarray(pixels).save(folder / f"rejected_{index}.png")
    return folder


def test_a_level_marks_matches_in_the_table_the_console_and_the_contact_sheet(search, photos, noise, tmp_path, capsys):
    queries = tmp_path / "queries"
    queries.mkdir()
    for file in (photos / "a" / "2.png", noise / "rejected_0.png"):
        shutil.copy(file, queries)
    words = ["--query", queries, "--top_k", "2", "--false_accept", "0.2", "--contact_sheet", tmp_path / "found.png"]
    rows = search(*words)
    assert [row["accepted"] for row in rows] == ["true", "false", "false", "false"]
    assert rows[0]["p_value"] == "0.2"
    assert all(float(row["p_value"]) > 0.2 for row in rows[1:])
    assert "matches   1 of 2 queries have a match at 20 % false accepts" in capsys.readouterr().err
    sheet = np.asarray(Image.open(tmp_path / "found.png"))
    images = [[sheet[at * 208 + 3 : at * 208 + 157, n * 160 + 3 : n * 160 + 157] for n in range(3)] for at in range(2)]
    assert [[image.min() >= 170 for image in line] for line in images] == [[False, False, True], [False, True, True]]


def test_a_query_that_is_left_out_is_no_match_of_itself(search, photos, capsys):
    rows = search("--query", photos, "--top_k", "9", "--leave_out_query", "--false_accept", "0.3")
    matched = {row["query"] for row in rows if row["accepted"] == "true"}
    assert len(rows) == 72
    assert len(matched) < 9
    assert f"matches   {len(matched)} of 9 queries" in capsys.readouterr().err


def test_an_index_is_replaced_only_if_asked(build, copy, photos):
    words = ["--images", photos / "b", "--output_dir", copy]
    with pytest.raises(FileExistsError, match=r"is not empty.*--overwrite_output_dir, or add images to it with"):
        build(*words)
    assert len(ImageIndex.load(copy)) == 9
    build(*words, "--overwrite_output_dir")
    assert len(ImageIndex.load(copy)) == 5


@pytest.fixture
def vectors(tmp_path) -> Path:
    """A file of 20 vectors of ten articles."""
    rows = {"embedding": torch.randn(20, 4).tolist(), "article": [f"a{n // 2}" for n in range(20)]}
    pd.DataFrame(rows).to_parquet(tmp_path / "vectors.parquet")
    return tmp_path / "vectors.parquet"


def test_a_file_of_vectors_is_indexed_and_searched_at_a_level_without_a_model(run, search, vectors, tmp_path, capsys):
    folder = tmp_path / "index"
    words = [vectors, "--column", "embedding", "--group_column", "article", "--score", "cosine"]  # few random vectors
    run("index", *words, "--output_dir", folder)
    out = capsys.readouterr().out
    assert "added     20 of 20 vectors of" in out
    assert out.endswith("--query VECTORS --false_accept 0.2\n")  # 0.1 needs groups of more rows
    index = ImageIndex.load(folder)
    assert (index.groups, index.space.calibration.num_groups) == ("article", 10)
    words = ["--query", vectors, "--column", "embedding", "--top_k", "1", "--false_accept", "0.2"]
    rows = search(*words, index=folder)
    assert [row["id"] for row in rows] == [str(row) for row in range(20)]
    assert {row["accepted"] for row in rows} == {"true"}
    with pytest.raises(ValueError, match="--contact_sheet shows images; this is an index of vectors"):
        search("--query", vectors, "--contact_sheet", tmp_path / "a.png", index=folder)
    with pytest.raises(ValueError, match="has no model that embeds what a visitor enters; use hf-sphere search"):
        run("page", "--index", folder)


def test_an_index_is_calibrated_by_images_that_have_no_match(build, photos, tmp_path, capsys):
    build("--images", photos / "b", "--calibration", photos / "a", "--output_dir", tmp_path / "index")
    assert ImageIndex.load(tmp_path / "index").space.calibration.num_groups == 4
    build("--images", photos / "b", "--output_dir", tmp_path / "later")
    build("--images", photos / "b", "--calibration", photos / "a", "--add_to", tmp_path / "later")
    assert ImageIndex.load(tmp_path / "later").space.calibration.num_groups == 4
    with pytest.raises(ValueError, match="4 of the calibration images are in the index; leave them out"):
        build("--images", photos, "--calibration", photos / "a", "--output_dir", tmp_path / "other")


VECTORS = ["VECTORS", "--output_dir", "NEW"]
REMOVAL = ["--images", "a", "--remove_from", "INDEX"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*VECTORS, "--column", "vector"], "no vector column 'vector'; the data has the columns ['embedding', 'artic"),
        ([*VECTORS, "--column", "article"], "Incorrect padding"),
        ([*VECTORS, "--column", "embedding", "--group_column", "page"], "no column 'page' for groups"),
        ([*REMOVAL, "--add_to", "index"], "give one of --output_dir for a new index, --add_to and --remove_from"),
        ([*REMOVAL, "--split", "test"], "split and remove_from exclude each other"),
        ([*REMOVAL, "--kind", "ivf"], "kind ivf has no effect without output_dir"),
        ([*REMOVAL, "--group_column", "label"], "group_column label has no effect without output_dir"),
        ([*REMOVAL, "--overwrite_output_dir"], "overwrite_output_dir True has no effect without output_dir"),
        ([*REMOVAL, "--images", "cats"], "cats does not name images of the index"),
        (["--images", "digits"], ""),
    ],
)
def test_options_of_an_index_that_do_not_fit_are_errors(words, message, run, folder, vectors, tmp_path, capsys):
    names = {"VECTORS": vectors, "INDEX": folder, "NEW": tmp_path / "new"}
    with pytest.raises((ValueError, SystemExit)) as error:
        run("index", *(names.get(word, word) for word in words))
    assert message in str(error.value) + capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# Unknown images


@pytest.fixture(scope="module")
def rejecting_index(run, rejecting, photos, tmp_path_factory) -> Path:
    """An index of the photos without labels, by a model with a rejection."""
    folder, flat = tmp_path_factory.mktemp("index") / "index", tmp_path_factory.mktemp("flat")
    for file in _files(photos):
        shutil.copy(file, flat)
    run("index", "--model_name_or_path", rejecting, "--images", flat, "--output_dir", folder, "--disable_tqdm")
    return folder


def test_rejected_queries_and_neighbors_are_unknown_in_the_table(
    search, rejecting, rejecting_index, photos, tmp_path, capsys
):
    loaded, output = decisions_of(rejecting, photos)
    names = [loaded.config.id2label[index] for index in output.logits.argmax(1).tolist()]
    p_values = output.p_value.tolist()
    expected = [
        f"{name}?" if known else f"unknown (p = {p:.2g})"
        for name, p, known in zip(names, p_values, output.known.tolist(), strict=True)
    ]
    sheet = tmp_path / "found.png"
    rows = search("--query", photos, "--top_k", "1", "--contact_sheet", sheet, index=rejecting_index)
    assert [row["class"] for row in rows] == [row["query_class"] for row in rows] == expected
    assert sheet.exists()
    count = sum(map(bool, output.known.logical_not()))
    assert f"unknown   {count} of {len(names)} queries, at the level of the model" in capsys.readouterr().err
    found = search("--query", photos, "--top_k", "1", "--classes", "unknown", index=rejecting_index)
    assert {row["class"][:7] for row in found} == {"unknown"}


def test_the_page_shows_no_prediction_of_a_rejected_image(rejecting, rejecting_index, photos, load_recipe):
    output, page = decisions_of(rejecting, photos)[1], load_recipe("page")
    index = ImageIndex.load(rejecting_index)
    for file, known, p_value in zip(_files(photos), output.known.tolist(), output.p_value.tolist(), strict=True):
        shown = page.show(index, file, "", [], 9)
        assert ("<p>Query: prediction " in shown) == known
        assert (f"<b>Unknown</b> to the model at its level of 50 % (p = {p_value:.2g})" in shown) == (not known)
        classes = re.findall('<b>([^<]*)</b> <span class="distance"', shown)
        assert sum(name.startswith("unknown (p = ") for name in classes) == int((~output.known).sum())


def test_an_index_opens_with_and_without_the_rejection_of_its_model(
    run, model, rejecting, copy, rejecting_index, photos, query, search
):
    for index, other in ((copy, rejecting), (rejecting_index, model)):
        rows = search("--query", query, "--model_name_or_path", other, index=index)
        assert len(rows) == 5
        assert ("query_class" in rows[0]) == (index == copy)
    run("index", "--model_name_or_path", rejecting, "--images", photos, "--add_to", copy, "--disable_tqdm")
    assert set(ImageIndex.load(copy, rejecting).images["known"]) == {False, True}


# ONNX


@pytest.fixture(scope="module")
def exported(run, model, tmp_path_factory) -> Path:
    """The exported classifier."""
    pytest.importorskip("onnxruntime")
    file = tmp_path_factory.mktemp("onnx") / "model.onnx"
    run("export", "--model_name_or_path", model, "--output", file)
    return file


def test_the_metadata_states_the_preprocessing_and_a_file_is_not_replaced_unless_asked(exported, model, run):
    onnx = pytest.importorskip("onnx")
    metadata = {entry.key: entry.value for entry in onnx.load(exported).metadata_props}
    preprocessing = json.loads(metadata["preprocessing"])
    assert preprocessing["size"] == {"height": 8, "width": 8}
    assert (preprocessing["image_mean"], preprocessing["num_channels"]) == ([0.5], 1)
    assert json.loads(metadata["class_names"]) == ["low", "middle", "high"]
    assert metadata["distance"] == "cosine"
    before = exported.stat().st_mtime_ns
    with pytest.raises(FileExistsError, match="or replace it with --overwrite_output"):
        run("export", "--model_name_or_path", model, "--output", exported)
    assert exported.stat().st_mtime_ns == before


def test_an_exported_file_classifies_without_torch(exported, model, photos, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not needed')")
    deep = tmp_path / "16_bits.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (8, 8), dtype=np.uint16)).save(deep)
    files = [*_files(photos), str(deep)]
    result = classify_without_torch(exported, *files, PYTHONPATH=str(tmp_path))
    lines = [line.split() for line in result.stdout.splitlines()]
    reference, output = loaded_with_output(model, files)
    confidences, classes = output.logits.softmax(1).max(1)
    assert [line[1] for line in lines] == [reference.config.id2label[index] for index in classes.tolist()]
    assert [float(line[2]) for line in lines] == pytest.approx(confidences.tolist(), abs=1e-4)
    assert [float(line[4]) for line in lines] == pytest.approx(output.concentration.tolist(), rel=1e-3)


def test_an_exported_file_says_unknown_without_torch(run, predict, rejecting, exported, photos, tmp_path, capsys):
    file = tmp_path / "model.onnx"
    run("export", "--model_name_or_path", rejecting, "--output", file)
    assert capsys.readouterr().out.endswith("distance, rejection\n")
    out = classify_without_torch(file, *_files(photos), "--coverage", "0.5").stdout
    table = pd.read_csv(predict("table.csv", "--model_name_or_path", rejecting, "--coverage", "0.5"))
    for line, row in zip(out.splitlines(), table.itertuples(), strict=True):
        words = line.split(maxsplit=5)
        if row.known:
            assert (words[1], json.loads(words[5])) == (row.prediction, json.loads(row.classes))
        else:
            assert words[1:3] == ["unknown", "p-value"]
            assert float(words[3]) == pytest.approx(row.p_value, abs=1e-4)
    for words, message in [
        ([file, "no.png", "--coverage", "0.6"], "--coverage must be above 0 and at most 0.5"),
        ([file, "no.png"], "No such file"),
        ([exported, *_files(photos), "--coverage", "0.5"], "--coverage needs a model whose rejection"),
    ]:
        refused = classify_without_torch(*words)
        assert (refused.returncode, message in refused.stderr) == (2, True)
        assert "Traceback" not in refused.stderr
    onnx = pytest.importorskip("onnx")
    metadata = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    about = {"score": "max_logit", "level": 0.5, "by_class": False, "num_images": 60}
    assert json.loads(metadata["rejection"]) == about


def test_an_exported_encoder_of_transformers_states_its_preprocessing_if_it_is_known(run, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("hf_sphere.export.export_onnx", lambda model, output, metadata, **_: written.append(metadata))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(tmp_path / "vit")
    words = ["--model_name_or_path", tmp_path / "vit", "--output", tmp_path / "vit.onnx"]
    run("export", *words)
    ViTImageProcessor(size={"height": 8, "width": 8}, resample=3).save_pretrained(tmp_path / "vit")
    run("export", *words)
    assert "preprocessing" not in written[0]
    assert json.loads(written[1]["preprocessing"])["resample"] == 3


# The page


def test_bad_input_is_refused(run, folder, search, query):
    with pytest.raises(ValueError, match="embedding"):
        run("evaluate", "--embeddings", folder)
    for words, count in (([], 9), (["--classes", "b"], 5)):
        with pytest.raises(ValueError, match=f"--top_k must be at most {count}, the number of images to find; got 10"):
            search("--query", query, "--top_k", "10", *words)
    with pytest.raises(ValueError, match=r"false_accept=0\.1 needs 19 calibration groups; there are 9"):
        search("--query", query, "--false_accept", "0.1")
    with pytest.raises(SystemExit):
        run("search", "--index", folder)


def test_a_query_that_is_left_out_needs_another_image_to_find(build, search, query, tmp_path):
    assert len(search("--query", query, "--top_k", "9", "--leave_out_query")) == 8
    (tmp_path / "one").mkdir()
    image = shutil.copy(query, tmp_path / "one")
    build("--images", tmp_path / "one", "--output_dir", tmp_path / "index")
    with pytest.raises(ValueError, match="no image is left to find; leave out --leave_out_query"):
        search("--query", image, "--leave_out_query", "--top_k", "1", index=tmp_path / "index")


@pytest.fixture(scope="module")
def address(run, folder, free_port) -> Iterator[str]:
    """URL of the search page, which is served by a thread."""
    gradio, pages = pytest.importorskip("gradio"), []
    launch = gradio.Blocks.launch
    with pytest.MonkeyPatch.context() as patch:
        options = {"prevent_thread_lock": True, "quiet": True}
        patch.setattr(
            gradio.Blocks, "launch", lambda page, **more: pages.append(page) or launch(page, **more | options)
        )
        run("page", "--index", folder, "--port", free_port)
    yield f"http://127.0.0.1:{free_port}"
    pages[0].close(verbose=False)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        *((name, 200) for name in ("localhost", "127.0.0.1:7860", "LOCALHOST:1", "[::1]:7860")),
        *((name, 400) for name in ("evil.example", "evil.example:80", "localhost.evil.example", "8.8.8.8", "", "[")),
    ],
)
def test_the_page_answers_only_requests_for_its_host(address, sent, status):
    for path in ("/", "/config", "/gradio_api/info"):
        assert httpx.get(f"{address}{path}", headers={"Host": sent}).status_code == status


def test_the_hosts_of_a_page_are_those_that_it_was_started_with(load_recipe):
    hosts = load_recipe("page").own_hosts
    public = hosts("0.0.0.0", [])
    assert {"127.0.0.1", socket.gethostname()} < {*public}
    assert {"*", "evil.example"}.isdisjoint(public)
    assert {"photos.lan", "search.example"} < {*hosts("photos.lan", ["search.example"])}
    assert socket.gethostname() not in hosts("photos.lan", [])


def test_a_page_for_an_unknown_host_is_refused(run, folder, monkeypatch):
    with pytest.raises(ValueError, match=r"the host no/such/host .* is no address"):
        run("page", "--index", folder, "--host", "no/such/host")
    monkeypatch.setenv("GRADIO_SERVER_NAME", "nor/such/one")
    with pytest.raises(ValueError, match=r"the host nor/such/one .* is no address"):
        run("page", "--index", folder)


def test_the_page_shows_no_path_of_the_server(load_recipe, folder, photos):
    page, index = load_recipe("page"), ImageIndex.load(folder)
    files = [*photos.rglob("*.png")][:9]
    index.encoder.name = str(photos.parent / "model")
    given = ImageIndex.build(index.encoder, files)
    asked = [(index, None, "a bird"), (given, files[0], ""), (index, photos / "none.png", "")]
    texts = [page.show(*each, [], 3) for each in asked]
    assert "embeds no texts" in texts[0]
    assert files[0].name in texts[1]
    assert "none.png" in texts[2]
    assert [text for text in texts if str(photos.parent) in text] == []


@pytest.fixture
def page(page):
    """The search page, once it is ready."""
    page.get_by_text("Choose an image first").wait_for()
    return page


def upload(page, file):
    """Upload an image, instead of that which is there."""
    if (clear := page.get_by_label("Remove Image").or_(page.get_by_label("Clear"))).count():
        clear.first.click()
    page.locator("input[type=file]").first.set_input_files(file)


def boxes(page, selector):
    """Return left, top, right and bottom of elements, in pixels."""
    sides = (
        "all => all.map(each => each.getBoundingClientRect()).map(box => [box.left, box.top, box.right, box.bottom])"
    )
    return page.locator(selector).evaluate_all(sides)


def overlaps(one, other):
    """Whether two boxes have more than a pixel in common."""
    return all(min(one[2 + axis], other[2 + axis]) - max(one[axis], other[axis]) > 1 for axis in (0, 1))


def test_the_page_shows_classes_and_distances_below_images_in_columns_that_fit(page, folder, photos):
    upload(page, photos / "a" / "2.png")
    page.get_by_text("1 of 9 neighbors match at a false-accept level of 20 %").wait_for()
    neighbors = boxes(page, ".neighbor")
    assert len(neighbors) == 9
    assert len({left for left, *_ in neighbors}) == (2 if page.viewport_size["width"] < 500 else 5)
    assert all(
        len({bottom for _, top, _, bottom in neighbors if top == row}) == 1 for row in {box[1] for box in neighbors}
    )
    lines = boxes(page, ".neighbor img, .neighbor b, .neighbor .distance, .neighbor em")
    assert len(lines) == 4 * 9
    assert not any(overlaps(one, other) for number, one in enumerate(lines) for other in lines[:number])
    found = ImageIndex.load(folder).search(photos / "a" / "2.png", 9)
    texts = page.locator(".neighbor").all_inner_texts()
    for text, row, distance in zip(texts, found.rows[0], found.distances[0], strict=True):
        assert text.split("\n")[:2] == ["a" if row < 4 else "b", f"distance {round(float(distance), 6):.4g}"]
    sizes = page.locator(".neighbor :is(b, span, em)").evaluate_all(
        "all => all.map(each => getComputedStyle(each).fontSize)"
    )
    assert min(float(size.removesuffix("px")) for size in sizes) >= 11
    assert page.get_by_text("Query: prediction").is_visible()
    page.get_by_text("Details").click()
    assert page.locator("td", has_text="a/2.png").is_visible()


def test_a_click_on_a_neighbor_searches_by_it(page, photos):
    upload(page, photos / "a" / "2.png")
    name = page.locator(".neighbor").nth(1).get_attribute("data-row", timeout=60_000)
    page.locator(".neighbor").nth(1).focus()
    page.keyboard.press("Enter")
    page.locator(f".neighbor:first-child[data-row='{name}']").wait_for()
    assert page.locator(".neighbor").first.inner_text().split("\n")[1] == "distance 0"
    page.get_by_role("button", name="Search").click()  # the image that was chosen is the query now
    page.locator(f".neighbor:first-child[data-row='{name}']").wait_for()


def test_the_page_searches_in_chosen_classes(page, photos):
    page.get_by_role("button", name="More options").click()
    page.get_by_label("Classes").click()
    page.get_by_role("option", name="b").click()
    page.keyboard.press("Escape")
    upload(page, photos / "a" / "2.png")
    page.locator(".neighbor").first.wait_for()
    assert page.locator(".neighbor b").all_inner_texts() == ["b"] * 5


def test_the_slider_changes_the_answer_from_no_match_to_match(page, folder, tmp_path):
    digits = ImageSource.of("digits")
    found = ImageIndex.load(folder).search([digits.open(n) for n in range(9, 40)], 1, false_accept=0.2, progress=False)
    p_value, name = min((p, n) for n, p in enumerate(found.p_values[:, 0].tolist(), 9) if 0.2 < p <= 0.5)
    digits.open(name).save(tmp_path / "query.png")
    upload(page, tmp_path / "query.png")
    page.get_by_text("No match at a false-accept level of 20 %").wait_for()
    assert page.locator(".neighbor em").first.inner_text() == f"rejected, p {p_value:.2g}"
    level = page.get_by_role("slider", name="False accepts")
    assert (level.get_attribute("min"), level.input_value()) == ("0.2", "0.2")  # the lowest of nine groups
    level.focus()
    page.keyboard.press("End")
    page.get_by_text("neighbors match at a false-accept level of 50 %").wait_for()
    assert page.locator(".neighbor em").first.inner_text() == f"match, p {p_value:.2g}"


def test_the_page_explains_why_a_file_is_no_image(page, photos, tmp_path):
    whole = (photos / "a" / "2.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "words.png").write_text("no image")
    Image.fromarray(np.zeros((8, 8), np.int32)).save(tmp_path / "deep.tiff")
    reasons = {"cut.png": "truncated", "words.png": "cannot identify image file 'words.png'", "deep.tiff": "mode 'I'"}
    for name, reason in reasons.items():
        upload(page, tmp_path / name)
        page.get_by_text(re.compile(f"^{name} cannot be read as an image: .*{reason}")).wait_for()
        assert page.locator(".neighbor").count() == 0
        assert page.get_by_test_id("toast-body").count() == 0
    page.wrong = [text for text in page.wrong if "Failed to load resource" not in text]  # the browser cannot draw it


def test_names_of_any_length_and_script_fit_on_the_page(
    load_recipe, folder, photos, chromium, root, tmp_path, monkeypatch
):
    page, index = load_recipe("page"), ImageIndex.load(folder)
    names = ["a" * 60, "Spätburgunder und Grauburgunder", "雀と猫", "عصفور", "<img src=x onerror=alert(1)>"] * 2
    index.images["label"] = names[:9]
    style = (root / "hf_sphere" / "commands" / "page.css").read_text()
    drawn = page.show(index, str(photos / "a" / "2.png"), "", [], 9, 0.2)
    (tmp_path / "page.html").write_text(f"<meta charset=utf-8><style>{style}</style>{drawn}")
    for width in (1280, 390):
        opened = chromium.new_page(viewport={"width": width, "height": 900})
        opened.goto((tmp_path / "page.html").as_uri())
        assert sorted(opened.locator(".neighbor b").all_inner_texts()) == sorted(names[:9])
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        lines = boxes(opened, ".neighbor img, .neighbor b, .neighbor .distance, .neighbor em")
        assert not any(overlaps(one, other) for number, one in enumerate(lines) for other in lines[:number])
        opened.close()


class Letters(VectorEncoder):
    """An encoder of texts by the frequencies of their letters."""

    content, embeds_texts = "text", True

    def encode(self, source, rows, **_):
        """Yield the rows and the vectors of their texts."""
        yield torch.tensor(rows), {"embedding": self.encode_texts([source.encoded[row] for row in rows])}

    def encode_texts(self, texts):
        """Return unit vectors of texts."""
        counts = torch.tensor([[text.count(letter) + 0.1 for letter in "abcdefgh"] for text in texts])
        return torch.nn.functional.normalize(counts, dim=1)


def test_the_page_of_an_index_of_texts_shows_texts_and_is_searched_by_text(load_recipe):
    gradio = pytest.importorskip("gradio")
    page = load_recipe("page")
    texts = [f"{'abcdefgh'[n % 8] * 3}{'abcdefgh'[n // 8]} <b>" for n in range(16)]
    index = ImageIndex.build(Letters(), texts, progress=False)
    shown = page.show(index, None, texts[0], [], 2, 0.2)
    assert "<b>1 of 2 neighbors match</b> at a false-accept level of 20 %" in shown
    assert shown.index("aaaa &lt;b&gt;") < shown.index("match, p ") < shown.index("rejected, p ")
    assert "<b>No match</b>" in page.show(index, None, "hgfedcba", [], 2, 0.2)
    blocks = page.build_page(index).blocks.values()
    assert not any(block.visible for block in blocks if isinstance(block, gradio.Image))
    for text in ("", " ", None):
        assert "Enter a text first." in page.show(index, None, text, [], 2, 0.2)


def test_the_slider_is_disabled_with_the_reason_if_the_calibration_has_no_level(load_recipe):
    gradio = pytest.importorskip("gradio")
    page = load_recipe("page")
    for groups, calibrated_with, reason in [
        (["a", "b"], "text", "2 groups, whose lowest one is 66.7 %"),
        (["a"] * 4, "text", "one group"),
        (["a", "b", "c", "d"], "image", "the index is calibrated with images, whose similarities differ from texts"),
    ]:
        texts = ["abcd", "bcde", "cdef", "defg"][: len(groups)]
        index = ImageIndex.build(Letters(), texts, groups=groups, progress=False)
        index.calibrated_with = calibrated_with
        built = page.build_page(index)
        (slider,) = (block for block in built.blocks.values() if getattr(block, "label", "") == "False accepts")
        assert isinstance(slider, gradio.Slider)
        assert not slider.interactive
        assert slider.info.startswith("No level: ")
        assert reason in slider.info
        (find, *_) = (each.fn for each in built.fns.values() if each.name == "find")
        shown = find(None, "abcd", [], 2, 0.05)
        assert "distance" in shown

        assert "match" not in shown
    shown = page.show(index, None, "abcd", [], 2, 0.4)  # calibrated with images
    assert "No level: the index is calibrated with images, whose similarities differ from texts." in shown
    assert "rejected" not in shown


@pytest.mark.parametrize("target", ["file", "missing", "folder", "dataset"])
def test_visitors_of_the_page_cannot_name_files_folders_or_data_sets(target, address, photos):
    file = {
        "file": {"path": str(photos / "a" / "2.png")},
        "missing": {"path": str(photos / "a" / "none.png")},  # nor find out which files there are
        "folder": {"path": str(photos), "orig_name": "drawing.svg"},
        "dataset": {"path": "json", "orig_name": "drawing.svg"},
    }[target]
    call = f"{address}/gradio_api/call/find"
    event = httpx.post(call, json={"data": [file, "", [], 1, 0.2]}).json()["event_id"]
    answer = httpx.get(f"{call}/{event}", timeout=60).text
    assert "event: error" in answer
    assert "upload an image." in answer


def test_the_page_shows_texts_of_models_and_names_of_files_without_markup(load_recipe, folder, photos, monkeypatch):
    gradio = pytest.importorskip("gradio")
    page, index = load_recipe("page"), ImageIndex.load(folder)
    monkeypatch.setattr(index.encoder, "class_names", ["<img src=x>"] * len(index.encoder.class_names))
    for image in (str(photos / "a" / "2.png"), "<img src=x>.png"):
        assert "&lt;img src=x&gt;" in page.show(index, image, "", [], 1)
    (results,) = next(iter(page.build_page(index).fns.values())).outputs
    assert isinstance(results, gradio.HTML)  # Markdown would load images from any server
