import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.nn import HEADS, Head
from hf_sphere.training import RunState, calibrate_head, count_correct, evaluate_classification
from hf_sphere.training.checkpoints import load_checkpoint, save_checkpoint


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


def test_correct_predictions_are_counted():
    logits = torch.tensor([[0.1, 0.9, 0.0], [2.0, 1.0, 0.0], [-3.0, -2.0, -1.0]])
    assert count_correct(logits, torch.tensor([1, 1, 2])) == 2


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
    assert evaluate_classification(model, batches, Accelerator(cpu=True)) == pytest.approx(expected)


def test_evaluation_puts_the_model_into_eval_mode(make_model, make_batches):
    model = make_model().train()
    evaluate_classification(model, make_batches(), Accelerator(cpu=True))
    assert not model.training


def test_evaluation_leaves_the_model_as_it_is(make_model, make_batches):
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate_classification(model, make_batches(), Accelerator(cpu=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_evaluation_draws_no_random_numbers(make_model, make_batches):
    model, before = make_model(), torch.get_rng_state()
    evaluate_classification(model, make_batches(), Accelerator(cpu=True))
    assert torch.equal(torch.get_rng_state(), before)
