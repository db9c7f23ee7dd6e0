import copy

import pytest
import torch
from small_runs import make_batches
from torch import Tensor, nn

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
)
from hf_sphere.nn import HEADS, Head
from hf_sphere.training import initialize_from_data


class CenteredHead(Head):
    """Head that measures the mean of the embeddings before training and stores its inputs."""

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
        backbone="visualization_cnn", backbone_kwargs={"drop_rate": 0.5}, num_channels=1, image_size=6,
        head="centered", num_labels=3,
    )  # fmt: skip
    return SphereVisionForImageClassification(config).train()


@torch.no_grad()
def embed(model: nn.Module, batches) -> Tensor:
    """Embeddings in eval mode, computed in a loop."""
    model.eval()
    return torch.cat([model.base_model(batch["pixel_values"]).embeddings for batch in batches.epoch(0, augment=False)])


@torch.no_grad()
def embed_as_in_training(model: nn.Module, batches) -> Tensor:
    """Embeddings of a copy in training mode without dropout, computed in a loop."""
    trained = copy.deepcopy(model).train()
    for module in trained.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return torch.cat([trained.base_model(b["pixel_values"]).embeddings for b in batches.epoch(0, augment=False)])


def frozen(model: SphereVisionForImageClassification) -> SphereVisionForImageClassification:
    """Copy of a model with frozen batch norms and distinct statistics."""
    config = SphereVisionConfig(**model.config.to_dict() | {"freeze_batch_norm": True})
    other = SphereVisionForImageClassification(config)
    for norm in other.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 1.0, 2.0)
    return other.train()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.settings(is_frozen=lambda is_frozen: {"is_frozen": is_frozen})
def test_head_is_initialized_with_batch_statistics_and_no_dropout_and_nothing_else_is_changed(
    model, training, is_frozen
):
    """Frozen batch norms keep their statistics."""
    model = frozen(model) if is_frozen else model
    expected = (embed if is_frozen else embed_as_in_training)(model, make_batches())
    model.train(training)
    model.base_model.eval()  # as an encoder that `from_pretrained` loaded into a model in training mode
    before, numbers = copy.deepcopy(model.base_model.state_dict()), torch.get_rng_state()
    modes = {name: module.training for name, module in model.named_modules()}
    initialize_from_data(model, make_batches())
    assert {name: module.training for name, module in model.named_modules()} == modes
    torch.testing.assert_close(model.base_model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), numbers)
    torch.testing.assert_close(model.head.shown, expected)
    assert not model.head.shown.requires_grad
    shown = model.head.shown
    initialize_from_data(model, list(make_batches().epoch(augment=False)))
    assert torch.equal(model.head.shown, shown)


def test_batches_that_can_be_read_once_initialize_backbone_and_head():
    config = SphereVisionConfig(
        backbone="airbench_cifar", backbone_kwargs={"widths": [4, 4, 4]}, num_channels=3, image_size=32, head="vmf"
    )
    once, again = (SphereVisionForImageClassification(config) for _ in range(2))
    again.load_state_dict(once.state_dict())
    images = [{"pixel_values": torch.randn(30, 3, 32, 32)} for _ in range(3)]
    initialize_from_data(once, iter(images))
    initialize_from_data(again, images)
    torch.testing.assert_close(once.state_dict(), again.state_dict(), rtol=0, atol=0)


def test_initialization_stops_at_max_examples_and_a_head_without_it_receives_no_data(model, monkeypatch):
    for limit in (8, 13):
        initialize_from_data(model, make_batches(), max_examples=limit)
        assert len(model.head.shown) == limit
    model.head.shown = None
    monkeypatch.setattr(CenteredHead, "needs_data_initialization", False)
    initialize_from_data(model, make_batches())
    assert model.head.shown is None


def test_joint_model_initializes_the_head_with_its_own_coordinates(model):
    options = {"embedding_dim": 4, "value_range": [0.0, 1.0]}
    joint = SphereVisionForJointPrediction(SphereVisionConfig(**model.config.to_dict() | options))
    expected = embed_as_in_training(joint, make_batches())[:, 1:]
    batches = make_batches().epoch(augment=False)
    initialize_from_data(joint, [batch | {"regression_labels": batch["labels"] / 2} for batch in batches])
    torch.testing.assert_close(joint.head.shown, expected)
    regression = SphereVisionForRegression(SphereVisionConfig(**model.config.to_dict() | options | {"head": None}))
    initialize_from_data(regression.train(), make_batches())  # it has no head
    assert regression.training
