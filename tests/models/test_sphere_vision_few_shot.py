"""Few-shot classification models and encoders with spherized embeddings."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import logging as transformers_logging

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForFewShotClassification,
    SphereVisionForImageClassification,
    SphereVisionForRegression,
    SphereVisionModel,
)
from hf_sphere.nn import Spherization
from hf_sphere.training.evaluation import loss_is_sum


def small_config(**options: Any) -> SphereVisionConfig:
    """Config for images of 8 x 8 pixels and a backbone of 12 ReLU units."""
    own: dict[str, Any] = {"backbone": "mlp", "backbone_kwargs": {"widths": [12]}, "num_channels": 1, "image_size": 8}
    return SphereVisionConfig(**own | {"num_labels": 4} | options)


def small_model(**options: Any) -> SphereVisionForFewShotClassification:
    return SphereVisionForFewShotClassification(small_config(**options)).eval()


def episodes(*count: int, channels: int = 1, side: int = 8) -> dict[str, Tensor]:
    """Episodes of 3 classes with 2 examples each, and 6 queries."""
    return {
        "pixel_values": torch.randn(*count, 6, channels, side, side),
        "support_pixel_values": torch.randn(*count, 3, 2, channels, side, side),
        "labels": torch.randint(3, (*count, 6)),
    }


def pictures(count: int = 5) -> Tensor:
    return torch.randn(count, 1, 8, 8)


# Episodes


@pytest.mark.parametrize("spherization", [None, {"radius": 5.0}])
@pytest.mark.parametrize("few_shot_kwargs", [None, {"metric": "cosine", "temperature": 64.0}])
def test_queries_are_compared_with_the_support(spherization, few_shot_kwargs):
    model, episode = small_model(spherization=spherization, few_shot_kwargs=few_shot_kwargs), episodes()
    output = model(**episode)
    queries = model.sphere_vision(episode["pixel_values"]).embeddings
    prototypes = [model.sphere_vision(examples).embeddings.mean(0) for examples in episode["support_pixel_values"]]
    prototypes = torch.stack(prototypes)
    if few_shot_kwargs is None:
        expected = -(queries[:, None] - prototypes).square().sum(-1)
    else:
        expected = 1000 * (F.cosine_similarity(queries[:, None], prototypes, dim=-1) - 1) / 64
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, episode["labels"]))
    torch.testing.assert_close(output.embeddings, queries)
    torch.testing.assert_close(output.prototypes, prototypes)


def test_batched_episodes_match_single_ones_and_are_encoded_in_one_batch():
    model, batch, seen = small_model(backbone="lenet5_bn", backbone_kwargs=None), episodes(3), []
    alone = [model(**{name: value[i] for name, value in batch.items()}) for i in range(3)]
    model.sphere_vision.register_forward_hook(lambda module, given, output: seen.append(given[0].shape))
    together = model(**batch)
    for name in ("logits", "embeddings", "prototypes"):
        torch.testing.assert_close(together[name], torch.stack([each[name] for each in alone]))
    torch.testing.assert_close(together.loss, torch.stack([each.loss for each in alone]).mean())
    assert seen == [(3 * (6 + 3 * 2), 1, 8, 8)]
    assert not loss_is_sum(model)


# Saving and loading


KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "encoder": (SphereVisionModel, {}),
    "spherized encoder": (SphereVisionModel, {"spherization": {"radius": 3.0}}),
    "classifier after ReLU": (SphereVisionForImageClassification, {"head": "softmax"}),
    "classifier instead of ReLU": (SphereVisionForImageClassification, {"head": "cosine"}),
    "regression": (SphereVisionForRegression, {"embedding_dim": 5, "value_range": [0.0, 1.0]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_of_another_model_loads_without_warnings(kind, tmp_path, monkeypatch):
    model_class, options = KINDS[kind]
    other, x = model_class(small_config(**options)).eval(), pictures()
    other.save_pretrained(tmp_path)
    said: list[Any] = []
    monkeypatch.setattr(transformers_logging.get_logger("transformers.modeling_utils"), "warning", said.append)
    model = SphereVisionForFewShotClassification.from_pretrained(tmp_path).eval()
    assert said == []
    assert torch.equal(model.base_model(x).embeddings, other.base_model(x).embeddings)
    model.save_pretrained(tmp_path / "again")  # its configuration no longer has a head
    again = SphereVisionModel.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(x).embeddings, other.base_model(x).embeddings)


# Spherized embeddings


def spherized(**options: Any) -> SphereVisionModel:
    return SphereVisionModel(small_config(spherization={}, **options)).eval()


def test_spherization_replaces_the_last_activation_or_follows_the_projection(tmp_path):
    model, x = spherized(), pictures()
    nn.init.constant_(model.spherization.scaling, 1.5)
    expected = Spherization(12, scaling=1.5)(model.backbone.forward_features(x))
    torch.testing.assert_close(model(x).embeddings, expected)
    assert model.embedding_dim == 13
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "spherization" not in name}
    assert len(weights) - len(kept) == 2
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {"spherization": {"scaling": 3.0, "radius": 2.0}}  # missing, so initialized from the configuration
    layer = SphereVisionForFewShotClassification.from_pretrained(tmp_path, **options).sphere_vision.spherization
    assert (layer.scaling.item(), layer.radius.item()) == (3.0, 2.0)
    model = spherized(embedding_dim=3)
    features = model.backbone(x)
    assert features.min() == 0  # the activation is kept if the linear map follows it
    torch.testing.assert_close(model(x).embeddings, Spherization(3)(model.projection(features)))
    assert model.embedding_dim == 4


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("options", [{"head": None}, {"head": "cosine"}, {"spherization": {}}, {"embedding_dim": 3}])
def test_final_activation_follows_the_configuration(keeps, options):
    backbone = SphereVisionModel(small_config(final_activation=keeps, **options)).eval().backbone
    assert (backbone(pictures()).min() == 0) == keeps


# Options


@pytest.mark.parametrize(
    ("given", "meant"), [("haed", "head"), ("num_classes", "num_labels"), ("margin", "head_kwargs")]
)
def test_a_setting_that_resembles_a_known_one_is_named_in_a_warning(given, meant, tmp_path):
    with pytest.warns(UserWarning, match=f"SphereVisionConfig has no setting '{given}'; is it '{meant}'?") as caught:
        SphereVisionConfig(**{given: 4})
    assert caught[0].filename == __file__
    weights = [1.0, 2.0, 0.5, 1.0]  # a tensor is saved as numbers
    small_config(head="softmax", head_kwargs={"class_weights": torch.tensor(weights)}).save_pretrained(tmp_path)
    assert SphereVisionConfig.from_pretrained(tmp_path).head_kwargs == {"class_weights": weights}
