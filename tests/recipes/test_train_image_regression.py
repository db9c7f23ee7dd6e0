from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from torch import Tensor

from hf_sphere import SphereVisionForRegression, SphereVisionImageProcessor
from hf_sphere.data import ImageDataOptions, ValueOptions, load_image_data
from hf_sphere.data.sources import load_splits

RECIPE = "train_image_regression"
# A linear map to a circle for the slant of the bundled digits: 200 images per epoch in 10 steps.
QUICK = ["--dataset_name", "digits", "--max_train_samples", "200", "--per_device_train_batch_size", "20"]
QUICK += ["--backbone", "linear_embedding", "--backbone_kwargs", "{width: 32}", "--embedding_dim", "2"]
QUICK += ["--computed_value", "slant", "--learning_rate", "0.01", "--num_train_epochs", "2", "--disable_tqdm"]
# Slants of the evaluation images exceed the range of those 200.
CLIPPED = FINISHED = ["--out_of_range", "clip"]


@pytest.fixture(scope="module")
def slants(cache) -> Tensor:
    """Slants of the images of the test split."""
    options = ImageDataOptions(cache_dir=cache[1])
    data = load_image_data(options, "regression", targets=ValueOptions(computed_value="slant"), progress=False)
    return data.evaluation.labels


@torch.no_grad()
def error_on_digits(folder: Path, slants: Tensor) -> float:
    """Mean absolute error on the test split, computed with public interfaces only."""
    processor = SphereVisionImageProcessor.from_pretrained(folder)
    model = SphereVisionForRegression.from_pretrained(folder).eval()
    pixels = processor(load_splits("digits")["test"]["image"][:], return_tensors="pt")
    return (model(**pixels).predictions - slants).abs().mean().item()


# Output


@pytest.mark.parametrize("words", [[], ["--bf16"]], ids=["float32", "bfloat16"])
def test_the_model_learns(train, results_of, slants, words):
    always_the_mean = (slants - slants.mean()).abs().mean().item()
    folder = train(*CLIPPED, "--num_train_epochs", "10", *words)
    assert results_of(folder)["eval_mean_absolute_error"] < 0.75 * always_the_mean


def test_the_saved_model_and_processor_reproduce_the_reported_error(finished, results_of, slants):
    results = results_of(finished)
    assert error_on_digits(finished, slants) == pytest.approx(results["eval_mean_absolute_error"], rel=1e-4)
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
