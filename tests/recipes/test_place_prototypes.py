import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from case_selection import each
from safetensors import SafetensorError
from safetensors.torch import save_file

from hf_sphere.data.sources import load_splits
from hf_sphere.prototypes import METHODS, Placement, place_prototypes

RECIPE = "place"
QUICK = ["--disable_tqdm"]
FINISHED = ["--num_classes", "10", "--dim", "4", "--method", "lbfgs", "--restarts", "2", "--seed", "5"]

Place = Callable[..., Path]


@pytest.fixture
def place(train) -> Place:
    """Run the recipe into a folder below `tmp_path`."""
    return train


@pytest.fixture
def vectors(tmp_path) -> Callable[..., str]:
    """Write class vectors and return the options that refer to them."""

    def write(count: int = 10, name: str = "class_vectors", dtype: torch.dtype = torch.float32) -> str:
        save_file({name: torch.randn(count, 6).to(dtype)}, path := tmp_path / "vectors.safetensors")
        return str(path)

    return write


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Output


def test_the_prototypes_equal_those_of_the_library_and_results_report_their_quality(finished, results_of):
    expected = place_prototypes(10, 4, method="lbfgs", restarts=2, seed=5)
    placement, results = Placement.load(finished / "prototypes.safetensors"), results_of(finished)
    assert torch.equal(placement.prototypes, expected.prototypes)
    assert placement.class_names is None
    assert (results["separation"], results["bound"]) == pytest.approx((placement.separation, placement.bound))
    assert results["method"] == placement.method
    run = json.loads((finished / "run.json").read_text())
    assert (run["num_classes"], run["dim"], run["method"], run["seed"]) == (10, 4, "lbfgs", 5)


def test_the_placement_and_its_folder_which_is_named_after_the_numbers_are_printed_once(
    recipe, run_main, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    run_main(recipe, ["--num_classes", "4", "--dim", "3", "--disable_tqdm"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "4 prototypes in 3 dimensions" in line] == [lines[0]]
    assert sum("largest cosine" in line for line in lines) == 1
    file = Path("outputs", "prototypes", "4-3", "prototypes.safetensors")
    assert lines[-1] == f"saved {file}"
    assert file.is_file()


# Classes of a dataset


def test_number_and_names_come_from_the_data_set_also_if_the_number_is_given(place):
    placement = Placement.load(place("--dataset_name", "digits", "--dim", "3") / "prototypes.safetensors")
    assert placement.class_names == tuple(load_splits("digits")["train"].features["label"].names)
    assert len(placement.prototypes) == 10
    folder = place("--dataset_name", "two_clusters", "--num_classes", "2", "--dim", "3", name="two")
    assert len(Placement.load(folder / "prototypes.safetensors").prototypes) == 2


# Similarities of the classes


@pytest.mark.parametrize("ordering", ["ranking", "assignment"])
@each("ordering")
def test_with_class_vectors_the_results_report_how_well_their_order_is_preserved(place, results_of, vectors, ordering):
    dtype = torch.float16 if ordering == "assignment" else torch.float32
    words = ["--num_classes", "10", "--dim", "4", "--class_vectors", vectors(dtype=dtype), "--restarts", "1"]
    results = results_of(place(*words, "--ordering", ordering))
    assert 0.5 < results["triplet_accuracy"] <= 1.0


def test_a_file_without_vectors_of_the_classes_is_refused(place, vectors, tmp_path):
    words = ["--num_classes", "10", "--dim", "4", "--class_vectors"]
    with pytest.raises(ValueError, match="has no tensor class_vectors; it has: embeddings"):
        place(*words, vectors(name="embeddings"))
    with pytest.raises(ValueError, match=r"\b9\b.*\b10\b|\b10\b.*\b9\b"):
        place(*words, vectors(9))
    (tmp_path / "vectors.txt").write_text("0.1 0.2 0.3\n" * 10)
    with pytest.raises(SafetensorError):
        place(*words, str(tmp_path / "vectors.txt"))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors"):
        place(*words, str(tmp_path / "nowhere.safetensors"))


# Errors


FIVE = ["--dim", "3", "--num_classes", "5"]
DIGITS = ["--dim", "3", "--dataset_name", "digits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*DIGITS, "--num_classes", "9"], "--num_classes is 9, but digits has 10"),
        (["--dim", "1", "--num_classes", "5"], "dim must be an integer of at least 2; got 1"),
        (["--dim", "3", "--num_classes", "1"], "num_classes must be an integer of at least 2; got 1"),
        ([*DIGITS, "--train_split", "full"], "the data has train, test"),
        ([*DIGITS, "--label_column_name", "lable"], "no label column 'lable'; the data has"),
        (["--dim", "3"], "set the number of classes with --num_classes, or a dataset with --dataset_name"),
        ([*FIVE, "--text_model", "m"], "text_model m has no effect without dataset_name"),
        ([*FIVE, "--label_column_name", "l"], "label_column_name l has no effect without d"),
        ([*FIVE, "--template", "a {}"], "template a {} has no effect without text_model"),
        ([*DIGITS, "--text_model", "m", "--class_vectors", "v"], "class_vectors and text_model exclude each other"),
        ([*FIVE, "--method", "magic"], "invalid choice: 'magic'"),
        (["--num_classes", "5"], "required: --dim"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_refused_and_leave_no_folder(place, tmp_path, words, said, capsys):
    with pytest.raises((ValueError, SystemExit)) as refusal:
        place(*words)
    assert said in f"{refusal.value} {capsys.readouterr().err}"
    assert list(tmp_path.iterdir()) == []


def test_the_valid_methods_are_those_of_the_library(recipe):
    assert list(recipe.METHODS) == list(METHODS)


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
