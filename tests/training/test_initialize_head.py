import copy

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
)
from hf_sphere.nn import HEADS, Head
from hf_sphere.training import RunState, initialize_head
from hf_sphere.training.checkpoints import load_checkpoint, save_checkpoint


class CenteredHead(Head):
    """A head that measures the mean of the embeddings before training and remembers what it was shown."""

    name = "centered"
    replaces_activation = False  # the backbone keeps its dropout
    needs_data_initialization = True

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__(embedding_dim, num_classes)
        self.linear = nn.Linear(embedding_dim, num_classes)
        self.register_buffer("center", torch.zeros(embedding_dim))
        self.shown: Tensor | None = None

    def transform(self, embeddings: Tensor) -> Tensor:
        return embeddings - self.center

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        return self.linear(embeddings)

    def initialize_from_data(self, embeddings: Tensor) -> None:
        self.shown = embeddings
        self.center.copy_(embeddings.mean(0))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.center)


del HEADS["centered"]  # only the fixture below adds it


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
def embed(model: nn.Module, batches) -> Tensor:
    """Embeddings in eval mode, by a plain loop."""
    model.eval()
    return torch.cat([model.base_model(batch["pixel_values"]).embeddings for batch in batches.epoch(0, augment=False)])


@torch.no_grad()
def embed_as_in_training(model: nn.Module, batches) -> Tensor:
    """Embeddings of a copy in training mode that has lost its dropout, by a plain loop."""
    trained = copy.deepcopy(model).train()
    for module in trained.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return torch.cat([trained.base_model(b["pixel_values"]).embeddings for b in batches.epoch(0, augment=False)])


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.base_model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    return [name for name, value in model.base_model.state_dict().items() if not torch.equal(value, before[name])]


def frozen(model: SphereVisionForImageClassification) -> SphereVisionForImageClassification:
    """A model like another one, with statistics of its own that are kept in training."""
    config = SphereVisionConfig(**model.config.to_dict() | {"freeze_batch_norm": True})
    other = SphereVisionForImageClassification(config)
    for norm in other.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 1.0, 2.0)
    return other.train()


def test_a_head_is_calibrated_on_embeddings_normalised_by_the_batch_and_without_dropout(model, make_batches):
    expected = embed_as_in_training(model, make_batches())
    initialize_head(model, make_batches())
    torch.testing.assert_close(model.head.shown, expected)


def test_with_frozen_batch_norms_it_is_calibrated_on_embeddings_in_eval_mode(model, make_batches):
    model = frozen(model)
    initialize_head(model, make_batches())
    torch.testing.assert_close(model.head.shown, embed(model, make_batches()))


def test_dropout_and_batch_norm_would_show_in_the_embeddings(model, make_batches):
    """So that the two tests above can fail."""
    by_batch, by_statistics = embed_as_in_training(model, make_batches()), embed(model, make_batches())
    assert not torch.allclose(by_batch, by_statistics, atol=1e-3)
    pixels = next(make_batches().epoch(0, augment=False))["pixel_values"]
    with_dropout = model.train().base_model(pixels).embeddings
    assert not torch.allclose(with_dropout, by_batch[: len(pixels)], atol=1e-3)


@pytest.mark.parametrize("freeze_batch_norm", [True, False])
def test_a_vmf_head_starts_its_training_with_the_concentration_of_its_classes(make_batches, freeze_batch_norm):
    config = SphereVisionConfig(
        backbone="lenet5_bn", num_channels=1, image_size=6, embedding_dim=16, num_labels=3, head="vmf",
        freeze_batch_norm=freeze_batch_norm,
    )  # fmt: skip
    model, batches = SphereVisionForImageClassification(config), make_batches(augment=False)
    initialize_head(model, batches)
    model.train()
    points = torch.cat([model(**batch).embeddings.detach() for batch in batches.epoch(0)])
    assert points.abs().mean().item() * 16**0.5 == pytest.approx(model.head.initial_concentration, rel=1e-4)
    # How far the norm is above that depends on the shape of the distribution: a quarter, were it Gaussian.
    assert 1.0 < points.norm(dim=-1).mean().item() / model.head.initial_concentration < 1.5


def test_calibration_leaves_weights_and_batch_norm_statistics_as_they_are(model, make_batches):
    before = state_of(model)
    initialize_head(model, make_batches())
    assert changed(model, before) == []


def test_frozen_statistics_stay_as_they_are_as_well(model, make_batches):
    model = frozen(model)
    before = state_of(model)
    initialize_head(model, make_batches())
    assert changed(model, before) == []


def test_the_test_above_sees_batch_norms_at_work(model, make_batches):
    """So that it can fail."""
    before = state_of(model)
    model.train().base_model(next(make_batches().epoch(0))["pixel_values"])
    assert any("num_batches_tracked" in name for name in changed(model, before))


class RefusalError(Exception):
    """Stands for whatever may go wrong."""


def refuse(*args, **kwargs):
    raise RefusalError


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", ["head", "images", "encoder"])
def test_calibration_that_fails_leaves_statistics_and_mode_as_they_were(
    model, make_batches, monkeypatch, where, training
):
    batches = make_batches()
    if where == "images":

        def breaks_off(*args, **kwargs):
            yield next(type(batches).epoch(batches))
            refuse()

        monkeypatch.setattr(batches, "epoch", breaks_off)
    else:
        method = (CenteredHead, "initialize_from_data") if where == "head" else (model.base_model.projection, "forward")
        monkeypatch.setattr(*method, refuse)
    model.train(training)
    before = state_of(model)
    with pytest.raises(RefusalError):
        initialize_head(model, batches)
    assert changed(model, before) == []
    assert {module.training for module in model.modules()} == {training}


def test_calibration_draws_no_random_numbers(model, make_batches):
    before = torch.get_rng_state()
    initialize_head(model, make_batches())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("training", [True, False])
def test_calibration_leaves_frozen_batch_norms_in_eval_mode(model, make_batches, training):
    model = frozen(model).train(training)
    initialize_head(model, make_batches())
    assert model.training is training
    assert not any(norm.training for norm in model.modules() if isinstance(norm, nn.BatchNorm2d))


@pytest.mark.parametrize("training", [True, False])
def test_calibration_leaves_the_mode_as_it_is(model, make_batches, training):
    model.train(training)
    initialize_head(model, make_batches())
    assert {module.training for module in model.modules()} == {training}


def test_calibration_leaves_no_gradients(model, make_batches):
    initialize_head(model, make_batches())
    assert not model.head.shown.requires_grad


@pytest.mark.parametrize("limit", [8, 13])
def test_calibration_stops_at_the_number_of_examples(model, make_batches, limit):
    initialize_head(model, make_batches(), max_examples=limit)
    assert len(model.head.shown) == limit


def test_a_head_that_asks_for_no_calibration_sees_nothing(model, make_batches, monkeypatch):
    monkeypatch.setattr(CenteredHead, "needs_data_initialization", False)
    initialize_head(model, make_batches())
    assert model.head.shown is None


def test_what_calibration_has_measured_is_saved_and_loaded_with_the_model(model, make_batches, tmp_path):
    initialize_head(model, make_batches())
    model.save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.head.center, model.head.shown.mean(0), rtol=0, atol=0)


def test_what_calibration_has_measured_is_in_a_checkpoint(model, make_batches, tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    initialize_head(model, make_batches())
    checkpoint = save_checkpoint(accelerator, tmp_path, RunState(step=1), keep=1)
    model.head.center.zero_()
    load_checkpoint(accelerator, checkpoint)
    torch.testing.assert_close(model.head.center, model.head.shown.mean(0), rtol=0, atol=0)


def test_beside_a_regression_a_head_is_calibrated_on_the_coordinates_it_sees(model, make_batches):
    options = {"embedding_dim": 4, "value_range": [0.0, 1.0]}
    joint = SphereVisionForJointPrediction(SphereVisionConfig(**model.config.to_dict() | options))
    expected = embed_as_in_training(joint, make_batches())[:, 1:]
    initialize_head(joint, make_batches())
    torch.testing.assert_close(joint.head.shown, expected)


def test_a_model_without_classes_needs_no_calibration(model, make_batches):
    options = {"embedding_dim": 4, "value_range": [0.0, 1.0], "head": None}
    regression = SphereVisionForRegression(SphereVisionConfig(**model.config.to_dict() | options)).train()
    initialize_head(regression, make_batches())
    assert regression.training


def test_any_iterable_of_batches_serves_to_calibrate(model, make_batches):
    initialize_head(model, make_batches())
    shown, model.head.shown = model.head.shown, None
    initialize_head(model, list(make_batches().epoch(augment=False)))
    assert torch.equal(model.head.shown, shown)
