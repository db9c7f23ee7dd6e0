"""The rejection of unknown images by `hf-sphere train classification --reject` and `hf-sphere reject`."""

import json
import re
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from training_runs import DIGITS, output_on_digits
from transformers import AutoImageProcessor
from two_processes import run_two

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.commands import reject, train as commands_train
from hf_sphere.data.provenance import DataRecord
from hf_sphere.data.sources import load_splits

RECIPE = "train_image_classification"
QUICK = [*DIGITS[:2], *DIGITS[4:], "--per_device_train_batch_size", "40"]  # all of the images
QUICK += ["--head", "cosine", "--head_kwargs", "{scale: 64.0}"]


@pytest.fixture(scope="module")
def trained(run_in, tmp_path_factory):
    """The folder of a run with a rejection; read only."""
    return run_in(tmp_path_factory.mktemp("trained") / "run", "--reject", "0.1", "--validation_fraction", "0.2")


@pytest.fixture(scope="module")
def plain(run_in, tmp_path_factory):
    """The folder of a run without a rejection, trained on a part of the images; read only."""
    return run_in(tmp_path_factory.mktemp("plain") / "run", "--train_split", "train[:700]")


@pytest.fixture
def fit(run_alone, tmp_path):
    """Run `hf-sphere reject`, and return the folder that it writes."""

    def run(model, *words: str):
        output = tmp_path / "rejecting"
        argv = ["--model_name_or_path", str(model), "--images", "digits", *words, "--output_dir", str(output)]
        run_alone(reject.main, argv)
        return output

    return run


@pytest.fixture
def fit_in_place(run_alone):
    return lambda model, *words: run_alone(reject.main, ["--model_name_or_path", str(model), *map(str, words)])


def buffers(folder) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("rejection.")}


def same(one, other) -> bool:
    first, second = buffers(one), buffers(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


RECORD = "training_data.json"


class TestTraining:
    def test_the_saved_model_rejects_the_reported_share_of_the_evaluation_images(self, trained, results_of):
        known = output_on_digits(trained)[0].known
        assert results_of(trained)["eval_rejected"] == pytest.approx(1 - known.double().mean().item(), abs=0.003)
        assert 0 < results_of(trained)["eval_rejected"] < 0.2

    def test_the_results_and_the_card_have_what_was_chosen(self, trained, results_of):
        saved, chosen = SphereVisionConfig.from_pretrained(trained).rejection, results_of(trained)["rejection"]
        assert (chosen["level"], chosen["score"], chosen["num_images"]) == (0.1, saved["score"], saved["num_images"])
        share = 100 * results_of(trained)["eval_rejected"]
        card, fitted = (trained / "README.md").read_text(), f"score {saved['score']} at level 10 %"
        assert f"{fitted}, {saved['num_images']} images, rejects {share:.1f} % of the eval" in card
        assert "| reject | 0.1 |" in card
        assert "- `eval_rejected`: fraction of the evaluation images" in card

    def test_a_tenth_of_the_training_images_is_reserved(self, trained):
        ids = DataRecord.read(trained).ids
        assert len(ids["rejection"]) == round(0.1 * 1442 + 0.5)
        assert json.loads((trained / "run.json").read_text())["rejection_fraction"] == 0.1
        assert sum(len(part) for part in ids.values()) == 1797 == len(torch.cat([*ids.values()]).unique())

    def test_the_rejection_does_not_depend_on_the_calibration_and_on_a_resumption(self, train, trained):
        words = ["--reject", "0.1", "--validation_fraction", "0.2"]
        calibrated = train(*words, "--calibrate", "temperature", name="calibrated")
        assert SphereVisionConfig.from_pretrained(calibrated).calibration is not None
        assert same(calibrated, trained)
        train(*words, "--stop_after_steps", "20")
        assert same(train(*words, "--resume_from_checkpoint", "latest"), trained)

    def test_the_rejection_is_that_of_the_best_epoch(self, train, fit):
        words = ["--load_best_model_at_end", "--learning_rate", "1e3", "--num_train_epochs", "3"]
        best = train("--reject", "0.1", *words)
        assert same(best, fit(best, "--level", "0.1"))

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--reject", "0.01"], r"level 0\.01 needs 99 images, and as many .* so 198; there are 73 for the level"),
            (
                ["--reject", "0.1", "--rejection_fraction", "0.01"],
                r"there are 8 for the level\. Hold out more",
            ),
            (["--reject", "0.1", "--eval_split", "train[:30%]"], "rejection images are among the 433 eval"),
            (["--reject", "0.1", "--validation_split", "train[:50%]"], "among the 721 validation images"),
            (["--reject", "0.1", "--shard_classes"], "reject does not apply to num_train_epochs 0 or shard_classes"),
        ],
    )
    def test_a_rejection_that_cannot_be_fitted_is_refused_before_training(
        self, train, tmp_path, words, message, capsys
    ):
        with pytest.raises((ValueError, SystemExit)) as refusal:
            train(*words)
        assert re.search(message, f"{refusal.value} {capsys.readouterr().err}")
        assert not (tmp_path / "run" / "config.json").exists()

    def test_evaluation_keeps_the_rejection_of_a_saved_model_and_training_removes_it(self, train, trained, results_of):
        evaluated = train("--num_train_epochs", "0", *self.start(trained), name="evaluated")
        assert same(evaluated, trained)
        assert results_of(evaluated)["eval_rejected"] == results_of(trained)["eval_rejected"]
        assert "rejects" in (evaluated / "README.md").read_text()
        further = train("--train_split", "train[:80]", *self.start(trained), name="further")
        assert SphereVisionConfig.from_pretrained(further).rejection is None
        assert not buffers(further)
        assert "eval_rejected" not in results_of(further)

    def test_images_that_a_saved_model_was_trained_on_are_refused(self, train, plain, trained):
        with pytest.raises(ValueError, match="rejection images are among the 1,366 training images"):
            train("--reject", "0.1", *self.start(plain))
        again = train("--reject", "0.1", "--validation_fraction", "0.2", *self.start(trained))  # the same seed
        assert torch.equal(*(DataRecord.read(each).ids["rejection"] for each in (again, trained)))

    @staticmethod
    def start(model) -> list[str]:
        return ["--model_name_or_path", str(model), "--backbone_kwargs", "{}", "--backbone", "linear_embedding"]


class TestResuming:
    def test_images_that_the_earlier_part_was_trained_on_and_a_run_without_a_record_are_refused(self, train):
        folder, resume = train("--stop_after_steps", "2"), ["--resume_from_checkpoint", "latest"]
        trained_on = r"145 of the 145 rejection images are among the 1,442 training images"
        for words in (["--reject", "0.1"], ["--reject", "0.1", "--seed", "1"]):
            with pytest.raises(ValueError, match=trained_on):
                train(*words, *resume)
        (folder / RECORD).unlink()
        with pytest.raises(ValueError, match=r"the images of the run to resume, in .* are not recorded"):
            train("--reject", "0.1", *resume)

    def test_the_record_has_the_training_images_of_all_parts(self, train):
        train("--train_split", "train[:50%]", "--num_train_epochs", "1")
        folder = train("--train_split", "train[50%:]", "--resume_from_checkpoint", "latest")
        assert len(DataRecord.read(folder).ids["train"]) == 1442


class TestCommand:
    def test_without_a_split_it_uses_the_reserved_images(self, trained, fit, capsys):
        assert same(fit(trained, "--level", "0.1"), trained)
        printed = capsys.readouterr().out
        assert "split train, reserved by its training: 145 images of 10 classes" in printed
        assert "(AUROC against classes left out in turn, a proxy)" in printed

    def test_a_new_folder_has_all_files_of_the_model(self, trained, fit):
        folder = fit(trained, "--level", "0.2", "--score", "energy")
        names = {path.name for path in folder.iterdir() if path.name[0] != "."}
        assert names == {*("config.json", "model.safetensors", "preprocessor_config.json"), "README.md", RECORD}
        card = (folder / "README.md").read_text()
        assert "score energy at level 20 %, 145 images |" in card
        assert card.count("| unknown images |") == 1
        assert "eval_rejected" not in card  # of the rejection of the training
        assert f'"{folder}"' not in card
        assert 'model_id = "rejecting"' in card

    def test_the_share_of_unknown_images_is_measured(self, trained, fit, capsys):
        folder = fit(trained, "--unknown", "two_clusters")
        measured = SphereVisionConfig.from_pretrained(folder).rejection["unknown"]
        assert f"unknown   {100 * measured['rejected']:.1f} % of 200 images are rejected" in capsys.readouterr().out

    def test_a_model_is_changed_in_place_with_its_other_files_and_record(self, plain, fit_in_place, tmp_path):
        folder = copied(plain, tmp_path)
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        fit_in_place(folder, "--images", "digits", "--split", "train[700:]")
        after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        changed = {name for name in after if name[0] != "." and after[name] != before.get(name)}
        assert changed == {"config.json", "model.safetensors", "README.md", RECORD}
        assert len(DataRecord.read(folder).ids["rejection"]) == 742
        weights = {name: t for name, t in load_file(folder / "model.safetensors").items() if "rejection" not in name}
        assert all(torch.equal(t, weights[name]) for name, t in load_file(plain / "model.safetensors").items())
        fit_in_place(folder, "--images", "digits", "--level", "0.2")  # again, with the images of the record
        assert SphereVisionConfig.from_pretrained(folder).rejection["level"] == 0.2

    def test_the_results_have_no_figures_of_an_earlier_rejection(self, trained, fit_in_place, tmp_path, results_of):
        folder = copied(trained, tmp_path)
        fit_in_place(folder, "--images", "digits", "--level", "0.2")
        removed = {*results_of(trained)} - {*results_of(folder)}
        assert {"rejection", "eval_rejected"} <= removed
        assert all(name == "rejection" or name.endswith("_rejected") for name in removed)

    def test_labels_are_found_by_their_names(self, plain, fit_in_place, tmp_path, capsys):
        folder, images = copied(plain, tmp_path), tmp_path / "images"
        rows = load_splits("digits")["train"].select(range(700, 1442))
        for row, (image, label) in enumerate(zip(rows["image"], rows["label"], strict=True)):
            if label in (3, 7):  # in the folders, classes 0 and 1
                (images / str(label)).mkdir(parents=True, exist_ok=True)
                image.save(images / str(label) / f"{row}.png")
        fit_in_place(folder, "--images", images, "--score", "max_softmax")
        printed = capsys.readouterr().out
        assert "images of 2 classes\nnote      no images of 0, 1, 2, 4, 5: the level may not hold for 8" in printed
        model = SphereVisionForImageClassification.from_pretrained(folder).eval()
        with torch.no_grad():
            inputs = AutoImageProcessor.from_pretrained(folder)([*rows["image"]], return_tensors="pt")
            p_values = model(**inputs).class_p_values
        of_threes = p_values[torch.tensor(rows["label"]) == 3]
        assert (of_threes[:, 3] > 0.1).float().mean() > 0.8
        assert (of_threes[:, 0] > 0.1).float().mean() < 0.2

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--split", "train"], "trained on 1,037 and validated on 260 of the 1,442 images of digits, split tra"),
            (["--split", "test"], "was evaluated on 355 of the 355 images"),
            (["--split", "all"], "trained on 1,037 and validated on 260 and evaluated on 355 of the 1,797"),
            (["--split", "nowhere"], "no split 'nowhere'"),
            (["--images", "two_clusters"], r"400 of the 400 images .* are of near .*, no classes of the model"),
            (["--images", "nowhere"], "nowhere is no file or folder"),
            (["--unknown", "digits"], "1,797 of the 1,797 images of digits are of 0, 1, 2, 3, 4, classes of the model"),
            (["--level", "0.01"], r"level 0\.01 needs 99 images.*there are 73"),
            (["--by_class"], "level 0.05 needs 19 images.* of each class"),
            (["--score", "concentration"], "the score concentration needs concentrations"),
        ],
    )
    def test_images_and_options_that_do_not_fit_are_refused(self, trained, fit, tmp_path, words, message, capsys):
        with pytest.raises((ValueError, OSError, SystemExit)) as refusal:
            fit(trained, *words)
        assert re.search(message, f"{refusal.value} {capsys.readouterr().err}")
        assert not (tmp_path / "rejecting").exists()

    def test_an_unreadable_image_is_refused_and_labels_are_needed_to_choose(
        self, plain, fit_in_place, tmp_path, capsys
    ):
        folder, images = copied(plain, tmp_path), tmp_path / "images"
        images.mkdir()
        for row in range(3):
            Image.new("L", (8, 8), 80 * row).save(images / f"{row}.png")
        before, words = (folder / "config.json").read_bytes(), ["--images", images, "--level", "0.3"]
        with pytest.raises(ValueError, match=r"needs labels.* A score such as energy needs none"):
            fit_in_place(folder, *words)
        (images / "b.png").write_bytes(b"no image")
        with pytest.raises(ValueError, match=r"b\.png.*--skip_invalid"):
            fit_in_place(folder, *words, "--score", "energy")
        assert (folder / "config.json").read_bytes() == before
        fit_in_place(folder, *words, "--score", "energy", "--skip_invalid")
        assert "3 images without labels" in capsys.readouterr().out
        assert SphereVisionConfig.from_pretrained(folder).rejection["num_images"] == 3

    @pytest.mark.parametrize("change", [{"architectures": ["SphereVisionModel"]}, {"problem_type": "regression"}])
    def test_a_model_without_one_class_per_image_is_refused(self, trained, fit, tmp_path, change):
        folder = copied(trained, tmp_path)
        config = json.loads((folder / "config.json").read_text()) | {"rejection": None}
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=r"no SphereVisionForImageClassification|this one is for regression"):
            fit(folder)


def train_in_one_of_two(rank: int, words: list[str]) -> None:
    commands_train.main(["classification", *words])


def test_a_model_of_two_processes_has_the_rejection_that_the_command_fits(fit, cache, tmp_path):
    words = [*QUICK, *cache, "--reject", "0.1", "--output_dir", str(tmp_path / "two")]
    printed = run_two(train_in_one_of_two, words)
    assert "".join(printed).count("rejection  score") == 1
    first, second = buffers(fit(tmp_path / "two", "--level", "0.1")), buffers(tmp_path / "two")
    assert all(torch.allclose(first[name], second[name], atol=1e-4) for name in first | second)
