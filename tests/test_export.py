"""Does a model compute the same in onnxruntime as in torch?"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_encoders import BERT, DISTILBERT, Encoder
from torch import Tensor

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForFewShotClassification,
    SphereVisionForImageClassification,
    SphereVisionModel,
)
from hf_sphere.export import export_onnx
from hf_sphere.nn.heads import HEADS
from hf_sphere.nn.rejection import SCORES
from hf_sphere.ood import fit_rejection

ROBERTA = Encoder("roberta")
IMAGES = {"backbone": "lenet5", "num_channels": 1, "image_size": 28, "num_labels": 7, "embedding_dim": 11}


COLOR = {"num_channels": 3, "image_size": 32}


def image_model(**options: Any) -> SphereVisionForImageClassification:
    return SphereVisionForImageClassification(SphereVisionConfig(**IMAGES | options)).eval()


def run_onnx(path: Path, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a file in onnxruntime, with the batch as its only inputs; outputs by name."""
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    session = runtime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    assert [given.name for given in session.get_inputs()] == list(batch)
    outputs = session.run(names, {name: tensor.numpy() for name, tensor in batch.items()})
    return dict(zip(names, map(torch.from_numpy, outputs), strict=True))


@torch.no_grad()
def assert_same(path: Path, model: Any, batch: dict[str, Tensor]) -> None:
    """Assert that outputs have the names of the model's and are within 1e-4."""
    expected: dict[str, Tensor] = {}
    for name, value in model(**batch).items():
        if isinstance(value, Tensor) and not any(value is other for other in expected.values()):  # each output once
            expected[name] = value
    torch.testing.assert_close(run_onnx(path, batch), expected, rtol=0.0, atol=1e-4)


class Together(torch.nn.Module):
    """Image models of the same inputs as one, whose outputs begin with their names: a graph instead of one each."""

    main_input_name = "pixel_values"

    def __init__(self, models: dict[str, Any]) -> None:
        super().__init__()
        self.models = torch.nn.ModuleDict(models)
        self.config, self.device = next(iter(models.values())).config, torch.device("cpu")

    def forward(self, pixel_values: Tensor, return_dict: bool = True) -> dict[str, Tensor]:
        outputs = {name: model(pixel_values) for name, model in self.models.items()}
        return {f"{name}_{key}": value for name, output in outputs.items() for key, value in output.items()}


LINEAR = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}}


def test_onnx_file_of_every_head_equals_the_model_at_any_batch_size(tmp_path):
    models: dict[str, Any] = {name: image_model(**LINEAR, head=name) for name in HEADS}
    for model in models.values():
        model.set_calibration({"temperature": [0.5, 1.0, 1.5, 2.0, 0.8, 1.2, 0.7], "shift": [-0.1, 0.1, *[0.0] * 5]})
    models["encoder"] = SphereVisionModel(SphereVisionConfig(**IMAGES | LINEAR, spherization={})).eval()
    model, path = Together(models), tmp_path / "new" / "model.onnx"
    export_onnx(model, path)
    for size in (1, 7):
        assert_same(path, model, {"pixel_values": torch.randn(size, 1, 28, 28)})


@pytest.mark.settings(score=lambda score: {}, by_class=lambda by_class: {"by class": by_class})
@pytest.mark.parametrize(("score", "by_class"), [("mahalanobis", True), *((score, False) for score in SCORES)])
def test_onnx_file_of_a_model_with_a_rejection_decides_the_same(score, by_class, tmp_path):
    torch.manual_seed(0)
    head = "vmf" if score == "concentration" else "softmax"
    model, path = image_model(**LINEAR, head=head, embedding_dim=6, num_labels=3), tmp_path / "model.onnx"
    batches = [(torch.randn(120, 1, 28, 28), torch.arange(120) % 3)]
    fit_rejection(model, batches, 0.1, score, by_class=by_class)
    model.set_calibration({"temperature": 2.0})
    export_onnx(model, path, {"rejection": "of the caller"} if by_class else None)
    pixels = torch.randn(500, 1, 28, 28)
    exported, output = run_onnx(path, {"pixel_values": pixels}), model(pixels)
    for name in ("known", "p_value", "class_p_values", "logits"):
        differs = (exported[name].float() - output[name].float()).abs() > 1e-4
        assert differs.float().mean() < 0.01  # rounding moves a score past another
    assert 0.5 < output.known.float().mean() < 1


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}


SPHERE_VIT = {"image_size": (8, 12), "num_hidden_layers": 1}
IMAGE_MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolutions": (lambda: image_model(backbone="resnet10t", **COLOR), (3, 32, 32)),
    "transformer": (lambda: image_model(backbone="vit_tiny_patch16_224", backbone_kwargs=VIT, **COLOR), (3, 32, 32)),
    "spherized transformer": (lambda: Encoder("vit").model("ForImageClassification", **SPHERE_VIT), (1, 8, 12)),
}


@pytest.mark.settings(kind=lambda kind: {"architecture": kind})
@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_onnx_file_of_an_image_model_in_half_precision_equals_it_in_float32_and_changes_nothing(kind, tmp_path):
    build, shape = IMAGE_MODELS[kind]
    model = build().bfloat16().train()
    model.base_model.eval()
    modes, numbers = [module.training for module in model.modules()], torch.get_rng_state()
    export_onnx(model, tmp_path / "model.onnx")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), numbers)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    model = model.float().eval()
    for size in (1, 7):
        assert_same(tmp_path / "model.onnx", model, {"pixel_values": torch.randn(size, *shape)})


@pytest.mark.settings(encoder=lambda encoder: {"token types": encoder == BERT, "length": encoder == ROBERTA})
@pytest.mark.parametrize(
    ("encoder", "task"),
    [
        *((BERT, task) for task in ("Model", "ForMaskedLM")),
        *((encoder, "ForSequenceClassification") for encoder in (ROBERTA, DISTILBERT)),
        (Encoder("modernbert"), "ForMaskedLM"),
    ],
)
def test_onnx_file_of_a_text_model_equals_it_at_any_batch_size_and_length(encoder, task, tmp_path):
    types = {"type_vocab_size": 1} if encoder == ROBERTA else {}
    model = encoder.model(task, num_hidden_layers=1, **types)
    export_onnx(model, tmp_path / "model.onnx")
    for size, length in ((1, 5), (7, 30)):
        given = encoder.batch(size, length)
        given["attention_mask"][0, length // 2 + 1 :] = 0
        given |= {"token_type_ids": torch.randint(2, (size, length))} if encoder == BERT else {}
        assert_same(tmp_path / "model.onnx", model, given)


def test_file_that_onnxruntime_computes_differently_replaces_none(tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    run = runtime.InferenceSession.run
    (tmp_path / "model.onnx").write_text("earlier")
    monkeypatch.setattr(runtime.InferenceSession, "run", lambda *args: [output + 0.1 for output in run(*args)])
    with pytest.raises(RuntimeError, match="the logits differ"):
        export_onnx(image_model(head="cosine"), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_text() == "earlier"


def test_damaged_weights_and_models_with_other_inputs_are_not_exported(tmp_path, monkeypatch):
    config = SphereVisionConfig(backbone="conv4", image_size=28, num_channels=1, head=None)
    with pytest.raises(TypeError, match="support_pixel_values"):
        export_onnx(SphereVisionForFewShotClassification(config), tmp_path / "model.onnx")
    model = image_model(head="softmax")
    torch.nn.init.constant_(next(model.parameters()), torch.nan)
    with pytest.raises(RuntimeError, match="the logits differ from the model by nan"):
        export_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[onnx\]'"):
        export_onnx(image_model(), tmp_path / "model.onnx")
