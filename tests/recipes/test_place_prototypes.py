import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_sphere.data.sources import load_splits
from hf_sphere.prototypes import METHODS, Placement, place_prototypes

COMMAND = ("-m", "hf_sphere.commands.main", "place")

Place = Callable[..., Path]


@pytest.fixture(scope="module")
def place_in(load_recipe, run_main) -> Place:
    """Run the recipe into a given folder."""
    recipe = load_recipe("place_prototypes")

    def run(folder: Path, *words: str) -> Path:
        run_main(recipe, ["--output_dir", str(folder), "--disable_tqdm", *words])
        return folder

    return run


@pytest.fixture
def place(place_in, tmp_path) -> Place:
    """Run the recipe into a folder below `tmp_path`."""
    return lambda *words, name="placed": place_in(tmp_path / name, *words)


@pytest.fixture(scope="module")
def finished(place_in, tmp_path_factory) -> Path:
    """The folder of ten prototypes in four dimensions; read only."""
    words = ["--num_classes", "10", "--dim", "4", "--method", "lbfgs", "--restarts", "2", "--seed", "5"]
    return place_in(tmp_path_factory.mktemp("finished") / "placed", *words)


@pytest.fixture
def vectors(tmp_path) -> Callable[..., str]:
    """Write class vectors and return the options that refer to them."""

    def write(count: int = 10, name: str = "class_vectors") -> str:
        save_file({name: torch.randn(count, 6)}, path := tmp_path / "vectors.safetensors")
        return str(path)

    return write


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Output


def test_the_prototypes_equal_those_of_the_library_and_have_no_names(finished):
    expected = place_prototypes(10, 4, method="lbfgs", restarts=2, seed=5)
    placement = Placement.load(finished / "prototypes.safetensors")
    assert torch.equal(placement.prototypes, expected.prototypes)
    assert placement.class_names is None
    run = json.loads((finished / "run.json").read_text())
    assert (run["num_classes"], run["dim"], run["method"], run["seed"]) == (10, 4, "lbfgs", 5)


def test_the_results_report_the_quality_of_the_prototypes(finished, results_of):
    placement, results = Placement.load(finished / "prototypes.safetensors"), results_of(finished)
    assert (results["separation"], results["bound"]) == pytest.approx((placement.separation, placement.bound))
    assert (results["interrupted"], results["method"]) == (False, placement.method)


def test_the_placement_and_its_folder_are_printed_once(place, capsys):
    folder = place("--num_classes", "4", "--dim", "3")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "4 prototypes in 3 dimensions" in line] == [lines[0]]
    assert sum("largest cosine" in line for line in lines) == 1
    assert lines[-1] == f"saved {folder / 'prototypes.safetensors'}"


def test_the_default_folder_is_named_after_the_numbers(load_recipe, run_main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_main(load_recipe("place_prototypes"), ["--num_classes", "4", "--dim", "3", "--disable_tqdm"])
    assert (tmp_path / "outputs" / "prototypes" / "4-3" / "prototypes.safetensors").is_file()


# Classes of a dataset


def test_number_and_names_come_from_the_data_set_also_if_the_number_is_given(place):
    placement = Placement.load(place("--dataset_name", "digits", "--dim", "3") / "prototypes.safetensors")
    assert placement.class_names == tuple(load_splits("digits")["train"].features["label"].names)
    assert len(placement.prototypes) == 10
    folder = place("--dataset_name", "two_clusters", "--num_classes", "2", "--dim", "3", name="two")
    assert len(Placement.load(folder / "prototypes.safetensors").prototypes) == 2


# Similarities of the classes


@pytest.mark.parametrize("ordering", ["ranking", "assignment"])
def test_with_class_vectors_the_results_report_how_well_their_order_is_preserved(place, results_of, vectors, ordering):
    words = ["--num_classes", "10", "--dim", "4", "--class_vectors", vectors(), "--restarts", "1"]
    results = results_of(place(*words, "--ordering", ordering))
    assert 0.5 < results["triplet_accuracy"] <= 1.0


def test_class_vectors_in_half_precision_are_accepted(place, tmp_path):
    save_file({"class_vectors": torch.randn(4, 6).half()}, tmp_path / "half.safetensors")
    words = ["--num_classes", "4", "--dim", "3", "--class_vectors", str(tmp_path / "half.safetensors")]
    assert (place(*words, "--restarts", "1") / "prototypes.safetensors").is_file()


def test_a_file_without_vectors_of_the_classes_is_refused(place, vectors, tmp_path):
    words = ["--num_classes", "10", "--dim", "4", "--class_vectors"]
    with pytest.raises(ValueError, match="has no tensor class_vectors; it has: embeddings"):
        place(*words, vectors(name="embeddings"))
    with pytest.raises(ValueError, match=r"\b9\b.*\b10\b|\b10\b.*\b9\b"):
        place(*words, vectors(9))
    (tmp_path / "vectors.txt").write_text("0.1 0.2 0.3\n" * 10)
    with pytest.raises(ValueError, match=r"vectors\.txt is not a safetensors file"):
        place(*words, str(tmp_path / "vectors.txt"))


@pytest.mark.parametrize("name", ["nowhere.safetensors", "fifo", "/dev/zero", "."])
def test_a_missing_or_special_file_is_an_actionable_error(place, tmp_path, name):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError, match=f"there is no file .*{name}"):
        place("--num_classes", "10", "--dim", "4", "--class_vectors", str(tmp_path / name))


# Errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dim", "3", "--dataset_name", "digits", "--num_classes", "9"], "--num_classes is 9, but digits has 10"),
        (["--dim", "1", "--num_classes", "5"], "dim must be an integer of at least 2; got 1"),
        (["--dim", "3", "--num_classes", "1"], "num_classes must be an integer of at least 2; got 1"),
        (["--dim", "3", "--dataset_name", "digits", "--train_split", "full"], "the data has train, test"),
        (["--dim", "3", "--dataset_name", "digits", "--label_column_name", "lable"], "Did you mean 'label'?"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_refused_and_leave_no_folder(place, tmp_path, words, said):
    with pytest.raises(ValueError, match=r".") as refusal:
        place(*words)
    assert said in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dim", "3"], "set the number of classes with --num_classes, or a dataset with --dataset_name"),
        (["--dim", "3", "--num_classes", "5", "--text_model", "m"], "text_model m has no effect without dataset_name"),
        (
            ["--dim", "3", "--num_classes", "5", "--label_column_name", "l"],
            "label_column_name l has no effect without d",
        ),
        (["--dim", "3", "--num_classes", "5", "--template", "a {}"], "template a {} has no effect without text_model"),
        (
            ["--dim", "3", "--dataset_name", "digits", "--text_model", "m", "--class_vectors", "v"],
            "class_vectors and text_model exclude each other",
        ),
        (["--dim", "3", "--num_classes", "5", "--method", "magic"], "invalid choice: 'magic'"),
        (["--num_classes", "5"], "required: --dim"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_refused_by_the_parser(place, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        place(*words)
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_valid_methods_are_those_of_the_library(load_recipe):
    assert list(load_recipe("place_prototypes").METHODS) == list(METHODS)


# Existing output folders


def test_a_folder_with_prototypes_is_replaced_on_request_and_otherwise_unchanged(place, tmp_path):
    folder = place("--num_classes", "4", "--dim", "3")
    before = everything(folder)
    with pytest.raises(FileExistsError, match="already contains results") as refusal:
        place("--num_classes", "5", "--dim", "3")
    assert everything(folder) == before
    assert "--overwrite_output_dir" in str(refusal.value)
    assert "resume" not in str(refusal.value)  # there is no such option
    words = ["--num_classes", "5", "--dim", "3", "--overwrite_output_dir"]
    with pytest.raises(OSError, match="nowhere"):
        place(*words, "--class_vectors", str(tmp_path / "nowhere.safetensors"))
    assert everything(folder) == before
    assert len(Placement.load(place(*words) / "prototypes.safetensors").prototypes) == 5


# The recipe as a separate process


@pytest.mark.slow
def test_an_error_is_one_readable_line_and_status_1(start, tmp_path):
    words = ["--dataset_name", tmp_path / "nowhere", "--dim", 3]
    process = start(*COMMAND, "--output_dir", tmp_path / "placed", *words)
    printed, _ = process.communicate()
    assert process.returncode == 1
    (line,) = [line for line in printed.splitlines() if line.startswith(("Error:", "Traceback"))]
    assert "nowhere" in line


@pytest.mark.parametrize(("words", "status"), [("--help", 0), ("--unknown", 2)], ids=["help", "invalid arguments"])
def test_every_recipe_parses_arguments_without_importing_torch(root, words, status):
    code = f"""
import pathlib, runpy, sys
for path in sorted(pathlib.Path("recipes").glob("*.py")):
    sys.argv = [str(path), "{words}"]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        assert end.code == {status}, path
    assert not {{"torch", "transformers"}} & sys.modules.keys(), path
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert not process.returncode, process.stderr
