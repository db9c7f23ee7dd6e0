import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionForJointPrediction
from hf_sphere.data import ImagesInMemory
from hf_sphere.nn import HEADS, Head
from hf_sphere.training import (
    CLASSIFICATION,
    JOINT,
    REGRESSION,
    ImageTask,
    RunState,
    calibrate_head,
    evaluate,
)
from hf_sphere.training.checkpoints import load_checkpoint, save_checkpoint
from hf_sphere.training.evaluation import fit_confidence, loss_is_sum


class CenteredHead(Head):
    """A head that measures the mean of the embeddings before training and remembers what it was shown."""

    name = "centered"
    replaces_activation = False  # the backbone keeps its dropout
    needs_calibration = True

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__(embedding_dim, num_classes)
        self.linear = nn.Linear(embedding_dim, num_classes)
        self.register_buffer("center", torch.zeros(embedding_dim))
        self.shown: Tensor | None = None

    def represent(self, embeddings: Tensor) -> Tensor:
        return embeddings - self.center

    def classify(self, points: Tensor) -> Tensor:
        return self.linear(points)

    def calibrate(self, embeddings: Tensor) -> None:
        self.shown = embeddings
        self.center.copy_(embeddings.mean(0))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.center)


@pytest.fixture
def model(monkeypatch) -> SphereVisionForImageClassification:
    """A model with batch norm, dropout and the head above, in training mode."""
    monkeypatch.setitem(HEADS, "centered", CenteredHead)
    config = SphereVisionConfig(
        backbone="visualization_cnn",
        backbone_kwargs={"drop_rate": 0.5},
        num_channels=1,
        image_size=6,
        head="centered",
        num_labels=3,
    )
    return SphereVisionForImageClassification(config).train()


@torch.no_grad()
def embed(model: SphereVisionForImageClassification, batches) -> Tensor:
    """Embeddings in eval mode, by a plain loop."""
    model.eval()
    return torch.cat([model.base_model(batch["pixel_values"]).embeddings for batch in batches.epoch(0, augment=False)])


def test_a_head_is_calibrated_on_embeddings_of_training_images_in_eval_mode(model, make_batches):
    calibrate_head(model, make_batches())
    torch.testing.assert_close(model.head.shown, embed(model, make_batches()))


def test_dropout_and_batch_norm_would_show_in_the_embeddings(model, make_batches):
    """So that the test above can fail."""
    pixels = next(make_batches().epoch(0))["pixel_values"]
    in_training = model.base_model(pixels).embeddings
    assert not torch.allclose(in_training, embed(model, make_batches())[: len(pixels)], atol=1e-3)


def test_calibration_leaves_weights_and_batch_norm_statistics_as_they_are(model, make_batches):
    before = {name: value.clone() for name, value in model.base_model.state_dict().items()}
    calibrate_head(model, make_batches())
    after = model.base_model.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("training", [True, False])
def test_calibration_leaves_the_mode_as_it_is(model, make_batches, training):
    model.train(training)
    calibrate_head(model, make_batches())
    assert {module.training for module in model.modules()} == {training}


def test_calibration_leaves_no_gradients(model, make_batches):
    calibrate_head(model, make_batches())
    assert not model.head.shown.requires_grad


@pytest.mark.parametrize("limit", [8, 13])
def test_calibration_stops_at_the_number_of_examples(model, make_batches, limit):
    calibrate_head(model, make_batches(), max_examples=limit)
    assert len(model.head.shown) == limit


def test_a_head_that_asks_for_no_calibration_sees_nothing(model, make_batches, monkeypatch):
    monkeypatch.setattr(CenteredHead, "needs_calibration", False)
    calibrate_head(model, make_batches())
    assert model.head.shown is None


def test_what_calibration_has_measured_is_saved_and_loaded_with_the_model(model, make_batches, tmp_path):
    calibrate_head(model, make_batches())
    model.save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.head.center, model.head.shown.mean(0), rtol=0, atol=0)


def test_what_calibration_has_measured_is_in_a_checkpoint(model, make_batches, tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    calibrate_head(model, make_batches())
    checkpoint = save_checkpoint(accelerator, tmp_path, RunState(step=1), keep=1)
    model.head.center.zero_()
    load_checkpoint(accelerator, checkpoint)
    torch.testing.assert_close(model.head.center, model.head.shown.mean(0), rtol=0, atol=0)


def test_beside_a_regression_a_head_is_calibrated_on_the_coordinates_it_sees(model, make_batches):
    options = {"embedding_dim": 4, "value_range": [0.0, 1.0]}
    joint = SphereVisionForJointPrediction(SphereVisionConfig(**model.config.to_dict() | options))
    calibrate_head(joint, make_batches())
    torch.testing.assert_close(joint.head.shown, embed(joint, make_batches())[:, 1:])


def test_a_model_without_classes_needs_no_calibration(make_batches):
    regression = task_model(REGRESSION)
    calibrate_head(regression, make_batches())
    assert not hasattr(regression, "head")


def plain_evaluation(model: nn.Module, batches) -> dict[str, float]:
    """Accuracy and mean loss over all images at once."""
    data = list(batches.epoch(0))
    pixels, labels = (torch.cat([batch[key] for batch in data]) for key in ("pixel_values", "labels"))
    with torch.no_grad():
        logits = model.eval()(pixel_values=pixels, labels=labels).logits
    loss = nn.functional.cross_entropy(logits, labels).item()
    return {"accuracy": (logits.argmax(-1) == labels).float().mean().item(), "loss": loss}


@pytest.mark.parametrize("batch_size", [1, 7, 40, 100])
def test_evaluation_is_that_of_all_images_at_once(make_model, make_batches, batch_size):
    model = make_model()
    expected = plain_evaluation(model, make_batches(shuffle=False, augment=False))
    batches = make_batches(40, batch_size, shuffle=False, augment=False)
    assert evaluate(model, batches, Accelerator(cpu=True)) == pytest.approx(expected)


def test_evaluation_puts_the_model_into_eval_mode(make_model, make_batches):
    model = make_model().train()
    evaluate(model, make_batches(), Accelerator(cpu=True))
    assert not model.training


def test_evaluation_leaves_the_model_as_it_is(make_model, make_batches):
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(model, make_batches(), Accelerator(cpu=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_evaluation_draws_no_random_numbers(make_model, make_batches):
    model, before = make_model(), torch.get_rng_state()
    evaluate(model, make_batches(), Accelerator(cpu=True))
    assert torch.equal(torch.get_rng_state(), before)


# Each task

TASKS = [CLASSIFICATION, REGRESSION, JOINT]
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def task_model(task: ImageTask, reduction: str = "mean") -> nn.Module:
    """A linear model of a task for images of 6 x 6 pixels, with three classes or values from 0 to 4."""
    sums = {"reduction": "sum"} if reduction == "sum" else {}
    config = SphereVisionConfig(
        backbone="linear_embedding",
        backbone_kwargs={"width": 8},
        num_channels=1,
        image_size=6,
        embedding_dim=4,
        num_labels=3,
        value_range=[0.0, 4.0],
        head="prototype" if task.has_classes else None,
        head_kwargs=sums,
        regression_kwargs=sums,
    )
    return task.model_class(config)


def task_batches(task: ImageTask, batch_size: int) -> ImagesInMemory:
    """Forty random images with the targets of a task."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (40, 1, 6, 6), dtype=torch.uint8, generator=generator)
    classes, values = torch.arange(40) % 3, torch.rand(40, generator=generator) * 4
    return ImagesInMemory(
        images,
        classes if task.has_classes else values,
        regression_labels=values if task is JOINT else None,
        batch_size=batch_size,
        mean=[0.5],
        std=[0.3],
    )


@torch.no_grad()
def plain_task_evaluation(task: ImageTask, model: nn.Module) -> dict[str, float]:
    """Measures of all images at once."""
    (batch,) = task_batches(task, 40).epoch()
    output = model.eval()(**batch)
    expected = {"loss": output.loss.item()}
    if task.has_classes:
        expected["accuracy"] = (output.logits.argmax(-1) == batch["labels"]).double().mean().item()
    if task.has_values:
        values = batch["regression_labels" if task is JOINT else "labels"]
        expected["mean_absolute_error"] = (output.predictions - values).abs().mean().item()
    return expected


@pytest.mark.parametrize("batch_size", [7, 40])
@every_task
def test_evaluation_of_a_task_is_that_of_all_images_at_once(task, batch_size):
    model = task_model(task)
    measured = evaluate(model, task_batches(task, batch_size), Accelerator(cpu=True), task.measure)
    assert measured == pytest.approx(plain_task_evaluation(task, model), rel=1e-5)


@every_task
def test_a_loss_that_is_a_sum_is_reported_as_the_mean_over_the_images(task):
    model = task_model(task, "sum")
    measured = evaluate(model, task_batches(task, 7), Accelerator(cpu=True), task.measure)
    expected = plain_task_evaluation(task, model)
    assert measured == pytest.approx(expected | {"loss": expected["loss"] / 40}, rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_task
def test_a_model_says_whether_its_loss_is_a_sum(task, reduction):
    assert loss_is_sum(task_model(task, reduction)) is (reduction == "sum")


def test_the_loss_of_a_model_that_does_not_say_is_a_mean(make_model):
    assert loss_is_sum(make_model()) is False


def test_the_confidence_is_fitted_to_held_out_images(make_batches):
    config = SphereVisionConfig(
        backbone="linear_embedding", backbone_kwargs={"width": 4}, num_channels=1, image_size=6, head="prototype",
        embedding_dim=4, num_labels=3,
    )  # fmt: skip
    model, batches = SphereVisionForImageClassification(config), make_batches(shuffle=False, augment=False)
    fit_confidence(model, batches, Accelerator(cpu=True))
    fitted = model.head.class_concentration.clone()
    model.head.reset_parameters()
    assert fitted != model.head.class_concentration
    with torch.no_grad():
        embeddings = torch.cat([model.base_model(batch["pixel_values"]).embeddings for batch in batches.epoch()])
    model.head.fit_concentration(embeddings, batches.labels)
    torch.testing.assert_close(fitted, model.head.class_concentration)


def test_a_head_without_a_fitted_confidence_is_left_alone(make_model, make_batches):
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit_confidence(model, make_batches(), Accelerator(cpu=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
