"""Quantizers of transformers skip the maps after a spherization, which 8 bits per weight would destroy."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, fit_spherization
from hf_sphere.nn import HEADS


def skipped(model: Any, *, given: list[str] | None = None) -> list[str]:
    """Names of the modules that a quantizer skips, as each one computes them, with or without names from the user."""
    return HfQuantizer.get_modules_to_not_convert(model, given, model._keep_in_fp32_modules)


@torch.no_grad()
def round_to_int8(model: Any, patterns: list[str]) -> Any:
    """Round the weights of a copy's linear layers to 8 bits per row, as bitsandbytes and torchao do."""
    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and should_convert_module(name, patterns):
            step = layer.weight.abs().amax(dim=1, keepdim=True) / 127
            layer.weight.copy_((layer.weight / step).round() * step)
    return model


@torch.no_grad()
def hidden_states(model: Any, ids: Tensor) -> Tensor:
    return model.base_model(ids).last_hidden_state.float()


def test_int8_weights_keep_the_output_of_a_fitted_encoder(family):
    torch.manual_seed(0)
    sizes = {"intermediate_size": 256, "initializer_range": 0.1, "num_hidden_layers": 2}
    reference, fitted = family.plain(**sizes), family.model(**sizes)
    fitted.load_state_dict(reference.state_dict(), strict=False)
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in torch.randint(5, 50, (20, 4, 30))]
    fit_spherization(fitted, reference, batches)
    ids = torch.randint(5, 50, (4, 30))
    expected = hidden_states(fitted, ids)
    similarities = {}
    for name, patterns in {"all": [], "marked": skipped(fitted)}.items():
        states = hidden_states(round_to_int8(fitted, patterns), ids)
        similarities[name] = F.cosine_similarity(states, expected, dim=-1).mean().item()
    assert similarities["all"] < 0.98  # what the marks prevent
    assert similarities["marked"] > 0.999


@pytest.mark.parametrize("given", [None, ["cls"]], ids=["default", "given"])
@pytest.mark.parametrize("suffix", ["", ".weight"], ids=["bitsandbytes", "torchao"])
@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_quantizers_skip_the_maps_after_a_spherization(family, kind, suffix, given):
    model = family.model(kind, spherized_layers=[0, 2])
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    converted = {name for name in linear if should_convert_module(name + suffix, skipped(model, given=given))}
    layer = f"{'' if kind == 'Model' else family.model_type + '.'}encoder.layer"
    assert {f"{layer}.0.output.spherical.linear", f"{layer}.2.output.spherical.linear"} <= linear - converted
    assert {f"{layer}.1.output.dense", f"{layer}.2.intermediate.dense"} <= converted
    if kind == "ForSequenceClassification":
        model = family.model(kind, spherized_layers=[], spherized_classifier=True)
        assert not should_convert_module("classifier.projection" + suffix, skipped(model, given=given))


@pytest.mark.parametrize(("head", "linear"), [("angular", "head.linear"), ("spherized", "head.classifier.linear")])
def test_quantizers_skip_the_spherical_maps_of_a_head_also_in_float16(head, linear, tmp_path):
    config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=28, head=head)
    model, x = SphereVisionForImageClassification(config).eval(), torch.randn(2, 1, 28, 28)
    patterns = skipped(model, given=None if head == "angular" else [])
    assert not should_convert_module(linear, patterns)
    assert should_convert_module("sphere_vision.backbone.layers.7", patterns)
    model.save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path, dtype=torch.float16).eval()
    torch.testing.assert_close(loaded(x).logits.float(), model(x).logits, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["ForMaskedLM", "ForSequenceClassification"])
def test_model_loaded_in_float16_predicts_the_same_with_these_maps_in_float32(family, kind, tmp_path):
    model = family.model(kind, spherized_classifier=kind == "ForSequenceClassification")
    model.save_pretrained(tmp_path)
    loaded = family.model_class(kind).from_pretrained(tmp_path, dtype=torch.float16).eval()
    assert loaded.base_model.encoder.layer[-1].output.spherical.linear.weight.dtype == torch.float32
    batch = family.batch()
    logits = loaded(**batch).logits
    assert logits.dtype == torch.float16
    torch.testing.assert_close(logits.float(), model(**batch).logits, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backbone", ["lenet5", "mlp"])
@pytest.mark.parametrize("head", sorted(HEADS))
@torch.no_grad()
def test_maps_that_torch_quantizes_predict_the_same(head, backbone):
    torch.manual_seed(0)
    sizes = {"num_channels": 1, "image_size": 28, "num_labels": 5, "embedding_dim": 8}
    model = SphereVisionForImageClassification(SphereVisionConfig(backbone=backbone, head=head, **sizes)).eval()
    x = torch.randn(4, 1, 28, 28)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, which moves it to torchao
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    similarity = F.cosine_similarity(quantized(x).embeddings, model(x).embeddings)
    assert similarity.min() > 0.99
    expected = model(x).logits
    torch.testing.assert_close(quantized(x).logits, expected, rtol=0, atol=0.05 * expected.abs().max().item())
