"""Fine-tuning of a backbone: rates by layer, frozen stages, a linear probe first, compilation."""

import copy

import pytest
import torch
from small_runs import make_model
from torch import nn

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.data.options import ImageSourceOptions
from hf_sphere.training import RecipeArguments
from hf_sphere.training.optimization import build_scheduler, optimizer_from_arguments
from hf_sphere.training.tasks.classification import ModelArguments
from hf_sphere.training.tasks.image import freeze


@pytest.fixture(scope="module")
def model():
    config = SphereVisionConfig(backbone="resnet10t", image_size=32, head="cosine", num_labels=3)
    return SphereVisionForImageClassification(config)


def rates(model, **options) -> dict[str, float]:
    """Learning rate by parameter."""
    args = RecipeArguments(output_dir="run", learning_rate=0.1, **options)
    optimizer = optimizer_from_arguments(model, args)
    build_scheduler(optimizer, args, 10)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adam_srt"])
def test_rates_decay_by_layer_as_in_timm(model, optimizer):
    found = rates(model, layer_decay=0.5, optim=optimizer)
    assert set(found) == {name for name, _ in model.named_parameters()}
    blocks = {name.split("layer")[1][0]: rate for name, rate in found.items() if "backbone.layer" in name}
    assert blocks == pytest.approx({"1": 0.0125, "2": 0.025, "3": 0.05, "4": 0.1})
    assert found["sphere_vision.backbone.conv1.0.weight"] == pytest.approx(0.00625)
    assert found["head.weight"] == 0.1
    args = RecipeArguments(output_dir="run", learning_rate=0.1, layer_decay=0.5, optim=optimizer)
    assert optimizer_from_arguments(model, args).param_groups[0]["lr"] == 0.1  # which is shown


def test_two_sources_of_weights_and_layer_decay_without_a_backbone_are_errors(make_args):
    with pytest.raises(AttributeError, match="no attribute 'base_model'"):
        optimizer_from_arguments(make_model(), make_args(layer_decay=0.5))
    with pytest.raises(ValueError, match="pretrained_backbone and backbone_weights exclude each other"):
        ModelArguments(pretrained_backbone=True, backbone_weights="a.safetensors")
    options = ImageSourceOptions(image_size=[64])  # which the preprocessing of a backbone does not replace
    options.fill({"image_size": [224, 224], "image_mean": [0.5]})
    assert (options.image_size, options.image_mean) == ([64], [0.5])


def test_the_backbone_is_frozen_in_the_linear_probe(model):
    model = copy.deepcopy(model)
    args = ModelArguments(linear_probe_epochs=1)
    freeze(args, model, 0)
    model.train()
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.log_temperature", "head.weight"]
    assert not any(module.training for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    freeze(args, model, 1)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_compiled_model_trains_and_resumes_like_an_uncompiled_one(make_loop, monkeypatch, tmp_path):
    calls = []

    def compile_quickly(module, **options):
        calls.append(module)
        module._compiled_call_impl = torch.compile(module._call_impl, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", compile_quickly)
    plain = make_loop(make_model(dropout=0.0), num_train_epochs=2, output_dir=str(tmp_path / "plain"))
    plain.run()
    make_loop(make_model(dropout=0.0), num_train_epochs=1, torch_compile=True).run()
    resumed = make_loop(make_model(seed=1, dropout=0.0), num_train_epochs=2, resume_from_checkpoint="latest")
    resumed.run()
    assert len(calls) == 1
    for name, value in plain.trained_model.state_dict().items():
        torch.testing.assert_close(resumed.trained_model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
