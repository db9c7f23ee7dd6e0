import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from fresh_python import run_fresh
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call, grad, vmap
from torchvision.transforms.v2 import functional as tvF
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionImageProcessor,
    SphereVisionModel,
)
from hf_sphere.nn import HEADS


def small_config(**options) -> SphereVisionConfig:
    return SphereVisionConfig(**{"backbone": "lenet5", "num_channels": 1, "image_size": 28, "num_labels": 4} | options)


def small_model(**options) -> SphereVisionForImageClassification:
    return SphereVisionForImageClassification(small_config(**options)).eval()


def small_processor() -> SphereVisionImageProcessor:
    size = {"height": 28, "width": 28}
    return SphereVisionImageProcessor(num_channels=1, size=size, image_mean=[0.13], image_std=[0.3])


@pytest.fixture
def saved(tmp_path):
    model = small_model(id2label={0: "cat", 1: "dog", 2: "owl", 3: "emu"})
    model.save_pretrained(tmp_path)
    small_processor().save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize("head", sorted(HEADS))
def test_saved_model_gives_the_same_logits_of_spherized_embeddings(head, tmp_path):
    spherization = None if head == "spherized" else {"radius": 5.0}
    model, x = small_model(head=head, spherization=spherization), torch.randn(3, 1, 28, 28)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert type(loaded) is SphereVisionForImageClassification
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_pipeline_classifies_an_image_with_class_names(saved):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    answer = pipeline("image-classification", model=str(saved[1]))(picture)
    assert {entry["label"] for entry in answer} == {"cat", "dog", "owl", "emu"}
    assert sum(entry["score"] for entry in answer) == pytest.approx(1.0)
    loaded = AutoImageProcessor.from_pretrained(saved[1])
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


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_every_mode_become_grayscale_or_rgb(mode, channels):
    picture = Image.new(mode, (30, 20))
    processor = SphereVisionImageProcessor(
        num_channels=channels, size={"height": 28, "width": 28}, image_mean=[0.5] * channels, image_std=[0.5] * channels
    )
    assert processor(picture, return_tensors="pt")["pixel_values"].shape == (1, channels, 28, 28)
    for pixels in (torch.zeros(1, 28, 28, dtype=torch.uint8), torch.zeros(3, 28, 28, dtype=torch.uint8)):
        assert processor(pixels, return_tensors="pt")["pixel_values"].shape == (1, channels, 28, 28)


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
