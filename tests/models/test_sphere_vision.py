import logging
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from fresh_python import run_fresh
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call, grad, vmap
from torchvision.transforms.v2 import functional as tvF
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
    SphereVisionImageProcessor,
    SphereVisionModel,
)
from hf_sphere.models.backbones import BACKBONES
from hf_sphere.nn import HEADS


def small_config(**options) -> SphereVisionConfig:
    return SphereVisionConfig(**{"backbone": "lenet5", "num_channels": 1, "image_size": 28, "num_labels": 4} | options)


def new_model(**options) -> SphereVisionForImageClassification:
    return SphereVisionForImageClassification(small_config(**options))


def small_model(**options) -> SphereVisionForImageClassification:
    return new_model(**options).eval()


def images(count: int = 3, channels: int = 1, side: int = 28) -> torch.Tensor:
    return torch.randn(count, channels, side, side)


def small_processor() -> SphereVisionImageProcessor:
    size = {"height": 28, "width": 28}
    return SphereVisionImageProcessor(num_channels=1, size=size, image_mean=[0.13], image_std=[0.3])


@pytest.mark.parametrize("head", sorted(HEADS))
def test_saved_model_gives_the_same_logits_of_spherized_embeddings(head, tmp_path):
    spherization = None if head == "spherized" else {"radius": 5.0}
    model, x = small_model(head=head, spherization=spherization), torch.randn(3, 1, 28, 28)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert type(loaded) is SphereVisionForImageClassification
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_pipeline_classifies_an_image_with_class_names(tmp_path):
    for part in (small_model(id2label={0: "cat", 1: "dog", 2: "owl", 3: "emu"}), small_processor()):
        part.save_pretrained(tmp_path)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    answer = pipeline("image-classification", model=str(tmp_path))(picture)
    assert {entry["label"] for entry in answer} == {"cat", "dog", "owl", "emu"}
    assert sum(entry["score"] for entry in answer) == pytest.approx(1.0)
    loaded = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(loaded) is SphereVisionImageProcessor
    assert loaded.to_dict() == small_processor().to_dict()


@pytest.mark.parametrize("backbone", ["resnet18", "resnet20_cifar", "vit_tiny_patch16_224", "convnext_atto"])
def test_new_model_has_timm_initialization(backbone):
    torch.manual_seed(1)
    options = {"img_size": 32} if "vit" in backbone else {}
    expected = timm.create_model(backbone, num_classes=0, in_chans=3, **options).state_dict()
    torch.manual_seed(1)
    config = SphereVisionConfig(backbone=backbone, backbone_kwargs=options, image_size=32)
    model = SphereVisionForImageClassification(config)
    actual, weight = model.sphere_vision.backbone.state_dict(), model.head.classifier.linear.weight
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert weight.abs().max() <= weight.shape[1] ** -0.5  # as torch's Linear, and no normal distribution of 0.02


def test_xavier_initialization_applies_to_backbone_embedding_and_linear_classifier():
    torch.manual_seed(0)
    model = small_model(backbone="lenet5_bn", embedding_dim=60, num_labels=50, head="softmax", initialization="xavier")
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == 5
    for layer in layers:
        kernel = layer.weight[0, 0].numel()
        bound = (6 / (kernel * (layer.weight.shape[0] + layer.weight.shape[1]))) ** 0.5
        assert 0.97 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        assert layer.bias.abs().max() == 0


@pytest.mark.settings(missing=lambda missing: {"tensor": missing})
@pytest.mark.parametrize(
    ("options", "missing", "expected"),
    [
        ({"embedding_dim": 60, "head": "softmax", "initialization": "xavier"}, "layers.0.bias", 0.0),
        ({"embedding_dim": 60, "head": "softmax", "initialization": "xavier"}, "projection.bias", 0.0),
        ({}, "spherization.scaling", 5.0),
        ({"backbone": "resnet20_cifar"}, "layer1.0.bn2.weight", 0.0),  # timm zero-initializes residual branches
    ],
)
def test_missing_tensors_alone_are_initialized_on_loading(options, missing, expected, tmp_path):
    model = small_model(**options)
    for value in model.state_dict().values():
        value += 1
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    [name] = [name for name in tensors if name.endswith(missing)]
    kept = {key: value for key, value in tensors.items() if key != name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).state_dict()
    assert (loaded[name] == expected).all()
    assert all(torch.equal(loaded[key], value) for key, value in kept.items())


@pytest.mark.parametrize("backbone", ["resnet20_cifar", "resnet18_cifar", "resnet18", "vgg16_cifar"])
def test_torch_initialization_resets_every_layer_of_the_backbone(backbone):
    model = SphereVisionModel(SphereVisionConfig(backbone=backbone, image_size=32, initialization="torch"))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            bound = layer.weight[0].numel() ** -0.5  # uniform within 1 / sqrt(fan-in)
            assert 0.9 * bound < layer.weight.abs().max() <= bound
            assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        elif isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all()  # timm sets those at the end of a residual branch to 0
            assert (layer.bias == 0).all()


def test_buffers_that_are_not_saved_are_rebuilt_on_loading(tmp_path):
    config = SphereVisionConfig(backbone="swin_tiny_patch4_window7_224", image_size=224, num_labels=3)
    model = SphereVisionForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    for (name, buffer), (_, other) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name


def test_pretrained_weights_are_requested_on_demand_alone_and_survive_the_initialization(monkeypatch, tmp_path):
    create, asked = timm.create_model, []

    def filled(*args, pretrained, **kwargs):
        asked.append(pretrained)
        net = create(*args, pretrained=False, **kwargs)
        nn.init.constant_(net.conv1.weight, 0.25)
        return net

    monkeypatch.setattr(timm, "create_model", filled)
    model = SphereVisionForImageClassification(SphereVisionConfig(backbone="resnet18"), pretrained=True)
    assert (model.sphere_vision.backbone.conv1.weight == 0.25).all()
    model.save_pretrained(tmp_path)
    AutoModelForImageClassification.from_pretrained(tmp_path)
    assert asked[0]
    assert len(asked) > 1
    assert not any(asked[1:])


@pytest.mark.parametrize(("head", "replaces"), [("spherized", True), ("softmax", False)])
def test_spherized_head_replaces_the_last_activation(head, replaces):
    assert (small_model(head=head).sphere_vision(torch.randn(8, 1, 28, 28)).embeddings.min() < 0) == replaces
    model = SphereVisionForImageClassification(SphereVisionConfig(backbone="resnet20_cifar", head=head)).eval()
    nn.init.ones_(model.sphere_vision.backbone.layer3[-1].bn2.weight)  # timm zero-initializes residual branches
    assert (model.sphere_vision(torch.randn(8, 3, 32, 32)).embeddings.min() < 0) == replaces


def test_exported_samples_are_always_the_same_and_no_cache_is_filled_with_them():
    small = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}, "embedding_dim": 11}
    model, x = small_model(**small, head="vmf"), torch.randn(4, 1, 28, 28)  # no other test has filled its cache
    program = torch.export.export(model, (x,))
    exported = program.module()
    torch.testing.assert_close(exported(x).logits, model(x).logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(exported(x).logits, exported(x).logits)
    assert type(model(x).logits) is torch.Tensor  # the export leaves nothing in a cache


# Frozen batch norms


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("frozen", [True, False])
def test_only_frozen_batch_norms_keep_their_statistics_in_training(frozen):
    model, x = small_model(backbone="lenet5_bn", freeze_batch_norm=frozen).train(), torch.randn(8, 1, 28, 28)
    before = [buffer.clone() for norm in norms(model) for buffer in norm.buffers()]
    model(x, labels=torch.arange(8) % 4).loss.backward()
    after = [buffer for norm in norms(model) for buffer in norm.buffers()]
    assert len(before) == 9
    assert all(map(torch.equal, before, after)) is frozen
    assert all(p.grad.abs().sum() > 0 for norm in norms(model) for p in norm.parameters())  # scales and shifts
    assert torch.equal(model(x).logits, model.eval()(x).logits) is frozen


def test_frozen_batch_norms_always_stay_in_eval_mode_but_not_those_with_fixed_gains(tmp_path):
    model = SphereVisionForImageClassification(small_config(backbone="lenet5_bn", freeze_batch_norm=True))
    model.save_pretrained(tmp_path)
    for each in (model, AutoModelForImageClassification.from_pretrained(tmp_path)):
        assert not any(norm.training for norm in norms(each))  # from the start
        for mode in (True, False, True):
            each.train(mode)
            assert each.training is each.sphere_vision.training is each.head.training is mode
            assert not any(norm.training for norm in norms(each))
    model = SphereVisionForImageClassification(SphereVisionConfig(backbone="airbench_cifar", image_size=32)).train()
    assert [norm.training and not norm.weight.requires_grad for norm in norms(model)] == [True] * 6


def test_processor_resizes_scales_and_normalizes():
    pixels = torch.randint(0, 256, (1, 40, 40), dtype=torch.uint8)
    picture = Image.fromarray(pixels[0].numpy())
    expected = (tvF.resize(pixels, [28, 28], antialias=True).float() / 255 - 0.13) / 0.3
    torch.testing.assert_close(small_processor()(picture, return_tensors="pt")["pixel_values"][0], expected)
    picture = Image.fromarray(np.full((28, 28), 0x8000, dtype=np.uint16))  # which is not clipped
    pixels = small_processor()(picture, return_tensors="pt", do_normalize=False)["pixel_values"]
    torch.testing.assert_close(pixels, torch.full((1, 1, 28, 28), 128 / 255))


def test_per_example_gradients_of_the_full_model_match_a_loop():
    model, x, labels = small_model(), torch.randn(3, 1, 28, 28), torch.tensor([0, 1, 2])
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights, image, label):
        return functional_call(model, weights, (image[None], label[None])).loss

    together = vmap(grad(loss), (None, 0, 0))(weights, x, labels)["head.classifier.spherization.scaling"]
    single = [grad(loss)(weights, *pair) for pair in zip(x, labels, strict=True)]
    expected = torch.stack([gradients["head.classifier.spherization.scaling"] for gradients in single])
    torch.testing.assert_close(together, expected, rtol=1e-3, atol=1e-5)


def test_importing_the_library_is_lazy():
    heavy = "'torch', 'transformers', 'timm', 'sentence_transformers'"
    program = f"import sys, hf_sphere.losses; print([m for m in ({heavy}) if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_search_of_vectors_imports_neither_transformers_nor_datasets_nor_torchvision():
    program = """
import sys
sys.modules.update(dict.fromkeys(("transformers", "datasets", "torchvision", "timm", "accelerate")))  # not importable
import numpy as np
from hf_sphere.search import EmbeddingSpace
vectors = np.random.default_rng(0).standard_normal((100, 8))
space = EmbeddingSpace.fit(vectors, groups=np.arange(100) // 5)
print(space.identify(vectors[0], 0.1))
"""
    ended = run_fresh([sys.executable, "-c", program], capture_output=True, text=True, hugging_face=False)
    assert ended.stdout == "0\n", ended.stderr


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
    model, x = model_class(small_config(**MODELS[model_class])).eval(), images()
    expected = model.base_model(x, output_hidden_states=True).hidden_states
    torch.testing.assert_close(model(x, output_hidden_states=True).hidden_states, expected)
    assert model_class(small_config(**MODELS[model_class], output_hidden_states=True))(x).hidden_states is not None
    output = model.base_model(x)
    assert output.pooler_output is output.embeddings


@pytest.mark.parametrize("pool", [True, False])
def test_feature_extraction_pipeline_returns_the_embedding(pool):
    model = SphereVisionModel(small_config(embedding_dim=5)).eval()
    processor = small_processor()
    picture = Image.fromarray(np.arange(784, dtype=np.uint8).reshape(28, 28))
    extract = pipeline("image-feature-extraction", model=model, image_processor=processor)
    expected = model(processor(picture, return_tensors="pt").pixel_values).embeddings
    torch.testing.assert_close(torch.tensor(extract(picture, pool=pool)), expected)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_array_without_channels_is_a_gray_image(convert, channels):
    processor = SphereVisionImageProcessor(num_channels=channels, size={"height": 8, "width": 8})
    gray = convert(np.arange(28 * 20, dtype=np.uint8).reshape(28, 20))
    expected = processor(gray[None], return_tensors="pt").pixel_values
    for given in (gray, [gray], [gray, gray[None]]):
        found = processor(given, return_tensors="pt").pixel_values
        torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_every_mode_become_grayscale_or_rgb(channels):
    processor = SphereVisionImageProcessor(num_channels=channels, size={"height": 8, "width": 8}, do_normalize=False)
    color, level = torch.tensor([200, 100, 50], dtype=torch.uint8)[:, None, None].expand(3, 8, 8), 124  # its gray
    found = processor(color, return_tensors="pt").pixel_values[0]
    expected = color / 255 if channels == 3 else torch.full((1, 8, 8), level / 255)
    torch.testing.assert_close(found, expected)
    gray = torch.full((1, 8, 8), level, dtype=torch.uint8)
    found = processor(gray, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(found, torch.full((channels, 8, 8), level / 255))
    for mode in ("L", "RGB", "RGBA", "P", "1"):
        assert processor(Image.new(mode, (30, 20)), return_tensors="pt").pixel_values.shape == (1, channels, 8, 8)


# Problem types

TARGETS = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
MULTI_LABEL = {"problem_type": "multi_label_classification"}


@pytest.mark.parametrize("head", ["softmax", "spherized", "cosine"])
@pytest.mark.parametrize("options", [MULTI_LABEL, {}], ids=["configured", "by the labels"])
def test_multi_label_loss_is_the_binary_cross_entropy(head, options):
    output = new_model(head=head, **options).eval()(images(), labels=TARGETS.float())
    torch.testing.assert_close(output.loss, F.binary_cross_entropy_with_logits(output.logits, TARGETS.float()))


@pytest.mark.parametrize("shape", [(3,), (3, 1)], ids=str)
def test_loss_of_a_regression_is_the_squared_error_of_the_logits(shape):
    values = torch.rand(shape)
    output = new_model(head="softmax", problem_type="regression", num_labels=1).eval()(images(), labels=values)
    torch.testing.assert_close(output.loss, F.mse_loss(output.logits[:, 0], values.flatten()))


def trainer(model, labels, tmp_path, kind=Trainer, compute_loss_func=None, **options):
    data = [{"pixel_values": image, "labels": label} for image, label in zip(images(len(labels)), labels, strict=True)]
    options |= {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), **options)
    return kind(model, arguments, train_dataset=data, eval_dataset=data, compute_loss_func=compute_loss_func)


def test_transformers_trainer_trains_a_multi_label_classifier(tmp_path):
    run = trainer(new_model(head="cosine", **MULTI_LABEL), TARGETS.float(), tmp_path)
    assert np.isfinite(run.train().training_loss)
    assert run.predict(run.eval_dataset).predictions.shape == (3, 4)


# Label smoothing of the Trainer


def test_label_smoothing_of_the_trainer_but_not_of_the_head_warns_that_the_margin_is_not_used(tmp_path, caplog):
    smoothed = new_model(head="arcface", head_kwargs={"label_smoothing": 0.1})
    with caplog.at_level(logging.WARNING):
        trainer(smoothed, [0, 1, 2], tmp_path).train()
        assert "instead of its own loss" not in caplog.text
        trainer(new_model(head="arcface"), [0, 1, 2], tmp_path, label_smoothing_factor=0.1).train()
    messages = [message for message in caplog.messages if "instead of its own loss" in message]
    assert len(messages) == 1
    assert "leave out compute_loss_func and, unless it is a SphereTrainer, label_smoothing_factor" in messages[0]
