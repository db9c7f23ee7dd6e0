"""Outputs that cannot be written are found before the work, and two writers of one output do not mix."""

import threading
from pathlib import Path
from typing import Any

import pytest

from hf_sphere.training.output_dir import check_output_file, results_dir
from hf_sphere.utils.files import lock_folder

LATE = {
    "index": ["--images", "none", "--output_dir"],
    "projections": ["--output_dir"],
    "analogies": ["--output_dir"],
    "export": ["--output"],
    "extract": ["--dataset_name", "none", "--output_dir"],
    "predict": ["--images", "none", "--output"],
    "reinitialize": ["--output_dir"],
    "train_image_classification": ["--output_dir"],
}
"""Options before the output of recipes that take a model; neither it nor the data exist."""


@pytest.mark.parametrize("folder", ["x" * 300, "/proc/none"], ids=["long", "read-only"])
@pytest.mark.parametrize("recipe", LATE)
def test_an_output_that_cannot_be_written_is_found_before_anything_is_loaded(recipe, folder, load_recipe, run_main):
    output = f"{folder}/a.csv" if recipe == "predict" else folder
    words = [] if recipe.startswith("train") else ["--model_name_or_path", "none"]
    with pytest.raises(OSError, match=r"File name too long|it cannot be written"):
        run_main(load_recipe(recipe), [*words, *LATE[recipe], output])


@pytest.mark.parametrize("more", [[], ["--overwrite_output_dir"]])
@pytest.mark.parametrize("recipe", ["projections", "reinitialize"])
def test_results_are_never_written_to_a_model_folder(recipe, more, load_recipe, run_main, tmp_path):
    for name in ("model.safetensors", "run.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileExistsError, match="contains a model or a run"):
        run_main(load_recipe(recipe), ["--model_name_or_path", str(tmp_path), "--output_dir", str(tmp_path), *more])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"model.safetensors": "{}", "run.json": "{}"}


@pytest.mark.parametrize("option", ["--table", "--contact_sheet"])
def test_outputs_of_a_search_are_probed_before_the_index_is_loaded(option, load_recipe, run_main):
    with pytest.raises(OSError, match="it cannot be written"):
        run_main(load_recipe("search"), ["--index", "none", "--query", "none", option, "/proc/none/a"])


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_two_writers_of_one_output_do_not_mix(kind, tmp_path):
    def use(overwrite: bool) -> Any:
        if kind == "folder":
            return results_dir(tmp_path, ["all_results.json"], overwrite=overwrite)
        return lock_folder(tmp_path / "a.csv", wait=False)

    def write() -> None:
        try:
            with use(overwrite=True):
                pass
        except FileExistsError as error:
            refused.append(str(error))

    refused: list[str] = []
    with use(overwrite=False):
        second = threading.Thread(target=write)
        second.start()
        second.join()
    output = tmp_path if kind == "folder" else tmp_path / "a.csv"
    (message,) = refused
    assert message.startswith(f"{output} is in use by another process.")
    assert kind == "folder" or list(tmp_path.iterdir()) == []


def test_an_output_file_is_not_a_folder(tmp_path: Path):
    with pytest.raises(FileExistsError, match="exists and is no file"):
        check_output_file(str(tmp_path), overwrite=True)
