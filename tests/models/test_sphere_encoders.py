"""Computation and training of the spherized text encoders."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from small_encoders import BERT
from torch import Tensor, nn

KINDS = ["Model", "ForMaskedLM", "ForSequenceClassification"]

every_kind = pytest.mark.parametrize("kind", KINDS)


def spherize_plainly(values: Tensor, scaling: float, radius: float, delta: float) -> Tensor:
    """Spherization by definition, angle by angle."""
    lowest = min(math.asin(delta ** (1 / values.shape[-1])), 0.99 * math.pi / 2)
    points, product = [], torch.full_like(values[..., 0], radius)
    for value in values.unbind(-1):
        angle = (math.pi / 2 - lowest) / (1 + (-scaling * value).exp()) + lowest
        points.append(product * angle.cos())
        product = product * angle.sin()
    return torch.stack([*points, product], dim=-1)


def random_scalings(model: nn.Module) -> None:
    """Give every weight a distinct value, so that initial values cannot pass for learned ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


# Values


@pytest.mark.parametrize(("layers", "indices"), [(None, (2,)), ((-1, 0), (0, 2)), ([2, 1, 0], (0, 1, 2))])
def test_spherized_layer_matches_the_formula(family, layers, indices):
    options = {"spherization_scaling": 2.0, "spherization_radius": 3.0, "spherization_delta": 1e-4}
    model = family.model("Model", spherized_layers=layers, **options).double()
    spherized = [index for index, layer in enumerate(model.encoder.layer) if hasattr(layer.output, "spherical")]
    assert model.config.spherized_layer_indices == tuple(spherized) == indices
    random_scalings(model)
    for index in indices:
        layer = model.encoder.layer[index]
        seen = SimpleNamespace()
        layer.intermediate.register_forward_pre_hook(lambda _, given, seen=seen: setattr(seen, "x", given[0]))
        layer.register_forward_hook(lambda _, given, result, seen=seen: setattr(seen, "y", result))
        model(**family.batch())
        values = seen.x @ layer.intermediate.dense.weight.T + layer.intermediate.dense.bias
        scaling = layer.output.spherical.spherization.scaling.item()
        points = spherize_plainly(values, scaling, radius=3.0, delta=1e-4)
        norm = layer.output.LayerNorm
        mapped = points @ layer.output.spherical.linear.weight.T + seen.x
        expected = F.layer_norm(mapped, (16,), norm.weight, norm.bias, eps=model.config.layer_norm_eps)
        torch.testing.assert_close(seen.y, expected, rtol=1e-11, atol=1e-11)


def test_classifier_has_a_half_width_spherized_layer(family):
    options = {"num_labels": 5, "spherization_scaling": 2.0, "spherized_classifier": True}
    model = family.model("ForSequenceClassification", **options).double()
    random_scalings(model)
    head = model.classifier
    assert (head.projection.in_features, head.projection.out_features) == (16, 7)
    assert (head.linear.in_features, head.linear.out_features, head.linear.bias) == (8, 5, None)
    encoded = getattr(model, family.model_type)(**family.batch())
    features = encoded.pooler_output if family == BERT else encoded.last_hidden_state[:, 0]
    values = features @ head.projection.weight.T + head.projection.bias
    points = spherize_plainly(values, head.spherization.scaling.item(), radius=1.0, delta=1e-6)
    expected = points @ head.linear.weight.T
    torch.testing.assert_close(family.output(model), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("layers", "asked"),
    [(None, {}), (None, {"spherized_classifier": True}), ([], {"spherized_classifier": True}), ([], {})],
    ids=["layer", "both", "classifier", "neither"],
)
def test_classifier_is_spherized_only_if_the_config_says_so(family, layers, asked):
    model = family.model("ForSequenceClassification", spherized_layers=layers, **asked)
    assert hasattr(model.classifier, "spherization") == bool(asked)
    assert any(hasattr(layer.output, "spherical") for layer in model.base_model.encoder.layer) == (layers is None)
    assert family.output(model).shape == (3, 2)


@pytest.mark.parametrize("learned", [True, False])
def test_scaling_and_radius_are_parameters_only_if_learned(family, learned):
    options = {"learn_spherization_scaling": learned, "learn_spherization_radius": not learned}
    model = family.model("Model", spherization_scaling=2.0, spherization_radius=3, **options)
    spherization = model.encoder.layer[-1].output.spherical.spherization
    assert (spherization.scaling.item(), spherization.radius.item()) == (2.0, 3.0)
    assert set(dict(spherization.named_parameters())) == {"scaling" if learned else "radius"}
    assert set(dict(spherization.named_buffers())) == {"radius" if learned else "scaling"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spherized_layers": [3]}, r"spherized_layers \[3\] contains layer 3, but the encoder has 3 layers"),
        ({"spherized_layers": [0, -4]}, r"contains layer -4.*or -3 to -1 from the end"),
        ({"spherized_layers": [1, 1]}, "contains a layer twice"),
        ({"spherized_layers": [0, -3]}, "contains a layer twice"),
        ({"spherization_delta": 1.0}, r"delta must be a number in \(0, 1\); got 1.0"),
        ({"spherization_radius": 0.0}, r"radius must be a number in \(0, inf\); got 0.0"),
        *(({"spherization_scaling": value}, "scaling must be finite and not 0") for value in (0, math.nan, math.inf)),
        ({"spherized_layers": "last"}, "spherized_layers"),
        ({"spherization_scaling": "5"}, "spherization_scaling"),
    ],
)
def test_invalid_settings_are_rejected(family, options, message):
    wrong_type = any(isinstance(value, str) for value in options.values())
    error = StrictDataclassFieldValidationError if wrong_type else StrictDataclassClassValidationError
    with pytest.raises(error, match=message):
        family.config(**options)
    with pytest.raises(ValueError, match="needs a hidden_size of at least 4; got 2"):
        family.model("ForSequenceClassification", hidden_size=2, spherized_classifier=True)


# Execution modes


def test_chunked_feed_forward_and_eager_attention_give_the_same_result(family):
    options = [{}, {"chunk_size_feed_forward": 2}, {"attn_implementation": "eager"}]
    expected, *outputs = [family.output(family.model(spherized_layers=[0, 2], **given)) for given in options]
    torch.testing.assert_close(outputs, [expected] * 2, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_gives_the_same_gradients(family):
    model = family.model(spherized_layers=[0, 2], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    layer, runs = model.base_model.encoder.layer[2], []
    layer.intermediate.register_forward_hook(lambda *_: runs.append(1))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            # The older name, deprecated since 5.23, is the only one in earlier versions.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(**family.batch(), labels=family.batch()["input_ids"]).loss.backward()
        gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    assert len(runs) == 3  # once without checkpointing, and once each in forward and backward with it
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


# PEFT uses a deprecated name of transformers.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_target_the_layers_of_the_plain_model_and_are_trained_with_the_classifier(family):
    peft = pytest.importorskip("peft")
    kind = "ForSequenceClassification"
    model, plain = (
        peft.get_peft_model(each, peft.LoraConfig(task_type="SEQ_CLS"))
        for each in (family.model(kind, spherized_classifier=True), family.plain(kind))
    )
    mine, its = (
        {name for name, module in each.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
        for each in (model, plain)
    )
    assert mine == its
    assert len(mine) == 6  # query and value in three layers
    model(**family.batch(), labels=torch.tensor([0, 1, 1])).loss.backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert all("lora_" in name or "classifier.modules_to_save" in name for name in trained)
    assert any(name.endswith("classifier.modules_to_save.default.spherization.scaling") for name in trained)
