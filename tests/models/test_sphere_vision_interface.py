"""The interface of transformers: outputs, gradient checkpointing, problem types, label smoothing."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import Trainer, TrainingArguments, pipeline

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
    SphereVisionImageProcessor,
    SphereVisionModel,
)
from hf_sphere.models.backbones import BACKBONES


def config(**options) -> SphereVisionConfig:
    return SphereVisionConfig(**{"backbone": "lenet5", "num_channels": 1, "image_size": 28, "num_labels": 4} | options)


def images(count: int = 3, channels: int = 1, side: int = 28) -> torch.Tensor:
    return torch.randn(count, channels, side, side)


def classifier(**options) -> SphereVisionForImageClassification:
    return SphereVisionForImageClassification(config(**options))


# Hidden states and pooled output

SIZES = {"alexnet": 64, "conv4": 84, "conv4_maxpool": 84, "resnet12": 84, "wrn28": 80, "lenet9": 28}


@pytest.mark.settings(backbone=lambda name: {"backbone": name if name in BACKBONES else "timm"})
@pytest.mark.parametrize("backbone", [*BACKBONES, "vit_tiny_patch16_224", "convnext_atto", "resnet18"])
def test_every_backbone_returns_hidden_states_that_lead_to_the_same_embeddings(backbone):
    side = SIZES.get(backbone, 32)
    model = SphereVisionModel(SphereVisionConfig(backbone=backbone, image_size=side, embedding_dim=4)).eval()
    x = images(1, 3, side)
    if not hasattr(model.backbone, "forward_intermediates"):
        pytest.skip("DenseNet has no intermediate features before timm 1.0.31")
    output = model(x, output_hidden_states=True)
    assert len(output.hidden_states) > 1
    assert all(isinstance(state, torch.Tensor) for state in output.hidden_states)
    assert model(x).hidden_states is None
    torch.testing.assert_close(output.embeddings, model(x).embeddings)


VALUES = {"embedding_dim": 3, "value_range": [0.0, 1.0]}
MODELS = {
    SphereVisionForImageClassification: {},
    SphereVisionForRegression: VALUES,
    SphereVisionForJointPrediction: VALUES,
}


@pytest.mark.parametrize("model_class", MODELS)
def test_models_with_a_head_return_the_hidden_states_of_the_encoder(model_class):
    model, x = model_class(config(**MODELS[model_class])).eval(), images()
    expected = model.base_model(x, output_hidden_states=True).hidden_states
    torch.testing.assert_close(model(x, output_hidden_states=True).hidden_states, expected)
    assert model_class(config(**MODELS[model_class], output_hidden_states=True))(x).hidden_states is not None
    output = model.base_model(x)
    assert output.pooler_output is output.embeddings


@pytest.mark.parametrize("pool", [True, False])
def test_feature_extraction_pipeline_returns_the_embedding(pool):
    model = SphereVisionModel(config(embedding_dim=5)).eval()
    size = {"height": 28, "width": 28}
    processor = SphereVisionImageProcessor(num_channels=1, size=size, image_mean=[0.1], image_std=[0.3])
    picture = Image.fromarray(np.arange(784, dtype=np.uint8).reshape(28, 28))
    extract = pipeline("image-feature-extraction", model=model, image_processor=processor)
    expected = model(processor(picture, return_tensors="pt").pixel_values).embeddings
    torch.testing.assert_close(torch.tensor(extract(picture, pool=pool)), expected)


# Image processor


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_array_without_channels_is_a_gray_image(convert, channels):
    processor = SphereVisionImageProcessor(num_channels=channels, size={"height": 8, "width": 8})
    gray = convert(np.arange(28 * 20, dtype=np.uint8).reshape(28, 20))
    expected = processor(gray[None], return_tensors="pt").pixel_values
    for given in (gray, [gray], [gray, gray[None]]):
        found = processor(given, return_tensors="pt").pixel_values
        torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=0)


# Gradient checkpointing


# Problem types

TARGETS = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
MULTI_LABEL = {"problem_type": "multi_label_classification"}


@pytest.mark.parametrize("head", ["softmax", "spherized", "cosine"])
@pytest.mark.parametrize("options", [MULTI_LABEL, {}], ids=["configured", "by the labels"])
def test_multi_label_loss_is_the_binary_cross_entropy(head, options):
    output = classifier(head=head, **options).eval()(images(), labels=TARGETS.float())
    torch.testing.assert_close(output.loss, F.binary_cross_entropy_with_logits(output.logits, TARGETS.float()))


@pytest.mark.parametrize("shape", [(3,), (3, 1)], ids=str)
def test_loss_of_a_regression_is_the_squared_error_of_the_logits(shape):
    values = torch.rand(shape)
    output = classifier(head="softmax", problem_type="regression", num_labels=1).eval()(images(), labels=values)
    torch.testing.assert_close(output.loss, F.mse_loss(output.logits[:, 0], values.flatten()))


def trainer(model, labels, tmp_path, kind=Trainer, compute_loss_func=None, **options):
    data = [{"pixel_values": image, "labels": label} for image, label in zip(images(len(labels)), labels, strict=True)]
    options |= {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), **options)
    return kind(model, arguments, train_dataset=data, eval_dataset=data, compute_loss_func=compute_loss_func)


def test_transformers_trainer_trains_a_multi_label_classifier(tmp_path):
    run = trainer(classifier(head="cosine", **MULTI_LABEL), TARGETS.float(), tmp_path)
    assert np.isfinite(run.train().training_loss)
    assert run.predict(run.eval_dataset).predictions.shape == (3, 4)


# Label smoothing of the Trainer


def test_label_smoothing_of_the_trainer_but_not_of_the_head_warns_that_the_margin_is_not_used(tmp_path, caplog):
    smoothed = classifier(head="arcface", head_kwargs={"label_smoothing": 0.1})
    with caplog.at_level(logging.WARNING):
        trainer(smoothed, [0, 1, 2], tmp_path).train()
        assert "instead of its own loss" not in caplog.text
        trainer(classifier(head="arcface"), [0, 1, 2], tmp_path, label_smoothing_factor=0.1).train()
    messages = [message for message in caplog.messages if "instead of its own loss" in message]
    assert len(messages) == 1
    assert "leave out compute_loss_func and, unless it is a SphereTrainer, label_smoothing_factor" in messages[0]
