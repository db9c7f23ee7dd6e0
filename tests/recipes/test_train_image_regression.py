import pytest
from huggingface_hub import ModelCard
from torch import Tensor
from training_runs import DIGITS, SLANTS, output_on_digits

from hf_sphere import SphereVisionForRegression
from hf_sphere.data import ImageDataOptions, ValueOptions, load_image_data

RECIPE = "train_image_regression"
QUICK = [*DIGITS, *SLANTS, "--embedding_dim", "2"]


@pytest.fixture(scope="module")
def slants(cache) -> Tensor:
    """Slants of the images of the test split."""
    options = ImageDataOptions(cache_dir=cache[1])
    data = load_image_data(options, "regression", targets=ValueOptions(computed_value="slant"), progress=False)
    return data.evaluation.labels


# Output


@pytest.mark.parametrize("words", [[], ["--bf16"]], ids=["float32", "bfloat16"])
def test_the_model_learns(train, results_of, slants, words):
    always_the_mean = (slants - slants.mean()).abs().mean().item()
    folder = train("--num_train_epochs", "10", *words)
    assert results_of(folder)["eval_mean_absolute_error"] < 0.75 * always_the_mean


def test_the_saved_model_and_processor_reproduce_the_reported_error(finished, results_of, slants):
    results, model = results_of(finished), SphereVisionForRegression.from_pretrained(finished)
    error = (output_on_digits(finished, model)[0].predictions - slants).abs().mean().item()
    assert error == pytest.approx(results["eval_mean_absolute_error"], rel=1e-4)
    assert [name for name in results if "accuracy" in name] == []


def test_the_card_names_the_class_the_measured_error_in_its_unit_and_the_range(finished, results_of):
    card, error = ModelCard.load(finished / "README.md"), results_of(finished)["eval_mean_absolute_error"]
    assert "from hf_sphere import SphereVisionForRegression, SphereVisionImageProcessor" in card.text
    assert card.data.pipeline_tag is None
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("mean_absolute_error", round(error, 6))
    assert f"| eval_mean_absolute_error | {error:.4g} |" in card.text
    assert "computed from the angle to a pole |" in card.text
    assert not any(text in card.text for text in ("pipeline(", "| head |"))
