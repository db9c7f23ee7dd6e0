from pathlib import Path
from typing import Any

import pytest
from case_selection import each
from huggingface_hub import ModelCard
from training_runs import DIGITS, SLANTS, output_on_digits

from hf_sphere import SphereVisionForJointPrediction
from hf_sphere.data import ImageDataOptions, ValueOptions, load_image_data

RECIPE = "train_joint_prediction"
FINISHED = ["--num_train_epochs", "6"]
QUICK = [*DIGITS, *SLANTS, "--embedding_dim", "4"]


def measured_on_digits(folder: Path, cache: list[str]) -> dict[str, Any]:
    """Metrics on the test split."""
    options, targets = ImageDataOptions(cache_dir=cache[1]), ValueOptions(computed_value="slant")
    data = load_image_data(options, "joint", targets=targets, progress=False)
    output, labels = output_on_digits(folder, SphereVisionForJointPrediction.from_pretrained(folder))
    return {
        "accuracy": (output.logits.argmax(-1) == labels).float().mean().item(),
        "mean_absolute_error": (output.predictions - data.evaluation.regression_labels).abs().mean().item(),
    }


# Output


def test_the_model_learns_both_and_the_saved_one_reproduces_the_reported_metrics(finished, results_of, cache):
    first, results = results_of(finished)["history"][0], results_of(finished)
    assert results["eval_accuracy"] > 0.6
    assert results["eval_mean_absolute_error"] < first["eval_mean_absolute_error"]
    for name, value in measured_on_digits(finished, cache).items():
        assert value == pytest.approx(results[f"eval_{name}"], rel=1e-4)
    config = SphereVisionForJointPrediction.from_pretrained(finished).config
    assert config.id2label == {index: str(index) for index in range(10)}
    assert (config.head, config.task_weight, len(config.value_range)) == ("prototype", 0.25, 2)


def test_the_card_names_the_class_and_no_pipeline(finished):
    card = ModelCard.load(finished / "README.md")
    assert "from hf_sphere import SphereVisionForJointPrediction, SphereVisionImageProcessor" in card.text
    assert card.data.pipeline_tag is None
    assert "pipeline(" not in card.text


# The two tasks


def test_at_weight_0_the_loss_is_the_regression_loss_and_a_sum_applies_to_both(train, results_of):
    folder = train("--task_weight", "0", "--num_train_epochs", "4")
    history = results_of(folder)["history"]
    assert history[-1]["train_mean_absolute_error"] < history[0]["train_mean_absolute_error"]
    assert history[-1]["train_accuracy"] < 0.4
    folder = train("--task_weight", "0.6", "--loss_reduction", "sum", "--stop_after_steps", "1", name="sum")
    model = SphereVisionForJointPrediction.from_pretrained(folder)
    assert (model.config.task_weight, model.head.reduction, model.regression.reduction) == (0.6, "sum", "sum")


@pytest.mark.parametrize(
    ("words", "accuracy"),
    [
        (["--task_weight", "1"], 0.7),
        (["--head", "softmax", "--task_weight", "0.5"], 0.5),
        (["--head", "spherized", "--task_weight", "0.5"], 0.5),
        (["--bf16"], 0.6),
    ],
    ids=["classes only", "softmax", "spherized", "half precision"],
)
@each("words")
def test_classes_are_learned_by_other_weights_heads_and_precisions(words, accuracy, train, results_of):
    results = results_of(train(*words, "--num_train_epochs", "6"))
    assert results["eval_accuracy"] > accuracy
    history = results["history"]
    learned = results["eval_mean_absolute_error"] < history[0]["eval_mean_absolute_error"]
    assert learned or words != ["--bf16"]
