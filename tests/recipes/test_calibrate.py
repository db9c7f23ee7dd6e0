"""The argument `--calibrate` of the classification recipes."""

import pytest
from training_runs import DIGITS, SLANTS, output_on_digits

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.metrics import probability_scores
from hf_sphere.nn import calibration

RECIPE = "train_image_classification"
QUICK = [*DIGITS, "--max_train_samples", "400", "--validation_fraction", "0.5"]
QUICK += ["--head", "cosine", "--head_kwargs", "{scale: 64.0}"]
HELD_OUT = ["--num_train_epochs", "0", "--eval_split", "test[:40%]", "--validation_split", "test[40%:]"]
SCORES = ["nll", "brier", "calibration_error_equal_mass_l2", "calibration_error_equal_width_l1"]


@pytest.fixture(scope="module")
def calibrated(run_in, tmp_path_factory):
    """The folder of a run calibrated by temperature; read only."""
    return run_in(tmp_path_factory.mktemp("calibrated") / "run", "--calibrate", "temperature")


@pytest.fixture
def train_saved(load_recipe, run_main, cache, tmp_path, calibrated):
    """Run the recipe with the calibrated model, and return the folder."""

    def run(*words: str):
        argv = ["--model_name_or_path", str(calibrated), "--dataset_name", "digits", "--disable_tqdm", *cache, *words]
        run_main(load_recipe("train_image_classification"), [*argv, "--output_dir", str(tmp_path / "second")])
        return tmp_path / "second"

    return run


def test_the_loaded_model_has_the_reported_scores_which_the_card_has(calibrated, results_of):
    plain = SphereVisionForImageClassification.from_pretrained(calibrated)
    plain.config.calibration = None
    results = results_of(calibrated)
    for prefix, model in (("eval", None), ("eval_uncalibrated", plain)):
        output, labels = output_on_digits(calibrated, model)
        for name, value in probability_scores(output.logits, labels).items():
            assert results[f"{prefix}_{name}"] == pytest.approx(value, rel=1e-3, abs=1e-6)
    assert results["eval_nll"] < results["eval_uncalibrated_nll"]
    assert results["validation_nll_change"] + results["validation_nll_change_interval"] < 0
    card = (calibrated / "README.md").read_text()
    assert all(f"| eval_{name} |" in card and f"| eval_uncalibrated_{name} |" in card for name in SCORES)
    assert "| calibrate | temperature |" in card
    assert "| validation_nll_change |" in card


def test_calibration_does_not_change_training(calibrated, train, results_of):
    plain = train()
    assert results_of(plain)["eval_loss"] == results_of(calibrated)["eval_loss"]
    assert results_of(plain)["history"] == results_of(calibrated)["history"]
    assert SphereVisionConfig.from_pretrained(plain).calibration is None


def test_vector_scaling_has_a_temperature_and_a_shift_of_each_class_also_of_joint_prediction(
    load_recipe, run_main, cache, tmp_path, results_of
):
    argv = [*QUICK, *SLANTS, "--embedding_dim", "9", *cache, "--calibrate", "vector", "--output_dir", str(tmp_path)]
    run_main(load_recipe("train_joint_prediction"), argv)
    calibration = SphereVisionConfig.from_pretrained(tmp_path).calibration
    assert [len(calibration[name]) for name in ("temperature", "shift")] == [10, 10]
    assert results_of(tmp_path)["eval_nll"] < results_of(tmp_path)["eval_uncalibrated_nll"]


def test_a_saved_model_is_calibrated_without_training(train_saved, calibrated):
    folder = train_saved(*HELD_OUT, "--calibrate", "vector")
    assert isinstance(SphereVisionConfig.from_pretrained(folder).calibration["temperature"], list)


def test_evaluation_keeps_the_calibration_of_a_saved_model_and_training_removes_it(train_saved, calibrated):
    saved = SphereVisionConfig.from_pretrained(calibrated).calibration
    assert SphereVisionConfig.from_pretrained(train_saved("--num_train_epochs", "0")).calibration == saved
    further = train_saved("--num_train_epochs", "1", "--max_train_samples", "40", "--overwrite_output_dir")
    assert SphereVisionConfig.from_pretrained(further).calibration is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--validation_split", "test[:30%]"], "106 of the 106 validation images are among the 355 evaluation images"),
        (["--validation_split", "train[:20%]", "--max_train_samples", "1442"], "288 of the 288 validation images are"),
        ([], r"calibrate temperature needs validation images .set validation_split or"),
        (["--calibrate", "vector", "--validation_split", "test[:8]"], "vector needs validation images of all classes"),
    ],
)
def test_calibration_images_that_do_not_fit_are_refused_before_training(train, tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        train("--calibrate", "temperature", "--validation_fraction", "0", *words)
    assert not (tmp_path / "run" / "config.json").exists()


def test_images_that_a_saved_model_was_trained_on_are_refused(train_saved):
    words = ["--num_train_epochs", "0", "--validation_fraction", "0.5", "--seed", "0", "--calibrate", "temperature"]
    with pytest.raises(ValueError, match="93 of the 721 validation images are among the 200 training images"):
        train_saved(*words)


@pytest.mark.parametrize("kind", ["temperature", "vector"])
def test_a_calibration_that_is_not_shown_to_help_is_not_kept(train_saved, results_of, monkeypatch, caplog, kind):
    fit = calibration.fit_and_validate
    monkeypatch.setattr(calibration, "fit_and_validate", lambda *given: (fit(*given)[0], -0.1, 0.2))
    folder = train_saved(*HELD_OUT, "--calibrate", kind)
    results = results_of(folder)
    assert "not kept, since it is not shown to help: in a cross-validation of 213 images it changes t" in caplog.text
    assert "likelihood by -0.1 ± 0.2." in caplog.text
    assert SphereVisionConfig.from_pretrained(folder).calibration is None
    assert results["eval_nll"] == results["eval_uncalibrated_nll"]
    assert results["validation_nll_change"] == -0.1
