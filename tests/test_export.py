"""Does a model compute the same in onnxruntime and as an exported program as in torch?"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_sphere
from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForFewShotClassification,
    SphereVisionForImageClassification,
    SphereVisionModel,
)
from hf_sphere.export import export_onnx
from hf_sphere.nn.heads import HEADS, build_head
from hf_sphere.nn.rejection import SCORES
from hf_sphere.ood import fit_rejection

TEXTS = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24}
TEXTS |= {"vocab_size": 50, "max_position_embeddings": 40, "type_vocab_size": 2}
MORE = {"DistilBert": {"hidden_dim": 24}, "ModernBert": {"pad_token_id": 0}}
IMAGES = {"backbone": "lenet5", "num_channels": 1, "image_size": 28, "num_labels": 7, "embedding_dim": 11}


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
    expected = {name: value for name, value in model(**batch).items() if isinstance(value, Tensor)}
    torch.testing.assert_close(run_onnx(path, batch), expected, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("head", sorted(HEADS))
def test_onnx_file_of_each_head_equals_the_model_at_any_batch_size(head, tmp_path):
    model = image_model(head=head, backbone="linear_embedding", backbone_kwargs={"width": 8})
    path = tmp_path / "new" / "model.onnx"
    model.set_calibration({"temperature": [0.5, 1.0, 1.5, 2.0, 0.8, 1.2, 0.7], "shift": [-0.1, 0.1, *[0.0] * 5]})
    export_onnx(model, path)
    for size in (1, 7):
        assert_same(path, model, {"pixel_values": torch.randn(size, 1, 28, 28)})


@pytest.mark.parametrize(("score", "by_class"), [*((score, False) for score in SCORES), ("mahalanobis", True)])
def test_onnx_file_of_a_model_with_a_rejection_decides_the_same(score, by_class, tmp_path):
    torch.manual_seed(0)
    options = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}, "embedding_dim": 6, "num_labels": 3}
    model, path = image_model(**options, head="vmf", head_kwargs={"prediction": "mean"}), tmp_path / "model.onnx"
    model.head.initialize_from_data(torch.randn(20, 6))
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


@pytest.mark.parametrize(
    ("backbone", "options"), [("resnet10t", {}), ("vit_tiny_patch16_224", VIT)], ids=["convolutions", "transformer"]
)
def test_onnx_file_of_a_timm_backbone_equals_it_at_any_batch_size(backbone, options, tmp_path):
    sizes = {"num_channels": 3, "image_size": 32, "embedding_dim": 8}
    model = image_model(backbone=backbone, backbone_kwargs=options, **sizes)
    export_onnx(model, tmp_path / "model.onnx")
    for size in (1, 7):
        assert_same(tmp_path / "model.onnx", model, {"pixel_values": torch.randn(size, 3, 32, 32)})


@pytest.mark.parametrize("image_size", [8, (8, 12)], ids=["square", "rectangle"])
def test_onnx_file_of_a_spherized_vit_equals_it_at_any_batch_size(image_size, tmp_path):
    sizes = {name: TEXTS[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size")}
    images = {"image_size": image_size, "patch_size": 4, "num_channels": 1}
    config = hf_sphere.SphereViTConfig(**sizes, **images, num_hidden_layers=1)
    model = hf_sphere.SphereViTForImageClassification(config).eval()
    export_onnx(model, tmp_path / "model.onnx")
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    for size in (1, 7):
        assert_same(tmp_path / "model.onnx", model, {"pixel_values": torch.randn(size, 1, *sides)})


def text_model(name: str, **sizes: int) -> Any:
    """A small spherized encoder, by the name of its class without `Sphere`."""
    kind, prefix = getattr(hf_sphere, f"Sphere{name}"), name.partition("For")[0].removesuffix("Model")
    return kind(kind.config_class(**TEXTS | MORE.get(prefix, {}) | sizes)).eval()


def texts(size: int, length: int, *names: str) -> dict[str, Tensor]:
    """Token ids, a mask that excludes the end of the first text, and further inputs of zeros and ones by name."""
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[0, length // 2 + 1 :] = 0
    others = {name: torch.randint(2, (size, length)) for name in names}
    return {"input_ids": torch.randint(5, 50, (size, length)), "attention_mask": mask, **others}


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "RobertaForSequenceClassification"])
def test_onnx_file_of_a_text_model_equals_it_at_any_batch_size_and_length(name, tmp_path):
    model = text_model(name)
    export_onnx(model, tmp_path / "model.onnx")
    for size, length in ((1, 5), (7, 30)):
        assert_same(tmp_path / "model.onnx", model, texts(size, length, "token_type_ids"))


@pytest.mark.parametrize("name", ["DistilBertForSequenceClassification", "ModernBertForMaskedLM"])
def test_onnx_file_of_a_text_model_without_token_types_equals_it(name, tmp_path):
    model = text_model(name, num_hidden_layers=1)
    export_onnx(model, tmp_path / "model.onnx")
    for size, length in ((1, 5), (7, 30)):
        assert_same(tmp_path / "model.onnx", model, texts(size, length))


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_exported_program_of_a_text_model_equals_it(name):
    model, batch = text_model(name), texts(3, 9, "token_type_ids")
    program = torch.export.export(model, (), batch)
    torch.testing.assert_close(program.module()(**batch).logits, model(**batch).logits, rtol=1e-5, atol=1e-6)


def test_onnx_file_of_an_encoder_with_one_token_type_has_no_token_type_ids(tmp_path):
    model = text_model("RobertaForMaskedLM", type_vocab_size=1)
    export_onnx(model, tmp_path / "model.onnx")
    assert_same(tmp_path / "model.onnx", model, texts(2, 9))


def test_compiled_head_has_the_loss_gradients_and_predictions_of_eager_mode():
    head = build_head("spherized", 6, 4)
    compiled, embeddings, labels = torch.compile(head), torch.randn(5, 6), torch.arange(5) % 4
    results = []
    for run in (head.train(), compiled):
        loss = run(embeddings, labels).loss
        results.append((loss, *torch.autograd.grad(loss, list(head.parameters()))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    head.eval()
    torch.testing.assert_close(compiled(embeddings).logits, head(embeddings).logits, rtol=1e-4, atol=1e-4)


def test_onnx_file_of_an_encoder_has_each_output_once(tmp_path):
    model = SphereVisionModel(SphereVisionConfig(**IMAGES, spherization={})).eval()
    export_onnx(model, tmp_path / "model.onnx")
    batch = {"pixel_values": torch.randn(3, 1, 28, 28)}
    found = run_onnx(tmp_path / "model.onnx", batch)
    assert list(found) == ["embeddings"]  # which the model also returns as pooler_output
    torch.testing.assert_close(found["embeddings"], model(**batch).embeddings, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_model_in_half_precision_is_exported_in_float32(dtype, tmp_path):
    model = image_model(head="spherized").to(dtype)
    export_onnx(model, tmp_path / "model.onnx")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert_same(tmp_path / "model.onnx", model.float(), {"pixel_values": torch.randn(3, 1, 28, 28)})


def test_temperature_is_exported(tmp_path):
    model = image_model(head="vmf")
    model.set_calibration({"temperature": 2.0})
    export_onnx(model, tmp_path / "model.onnx")
    assert_same(tmp_path / "model.onnx", model, {"pixel_values": torch.randn(3, 1, 28, 28)})


@pytest.mark.parametrize(("fault", "message"), [("differs", "the logits differ"), ("fails", "onnxruntime cannot run")])
def test_file_that_onnxruntime_does_not_compute_replaces_none(fault, message, tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    run = runtime.InferenceSession.run

    def wrong(*args: Any) -> Any:
        if fault == "fails":
            raise RuntimeError("no kernel for bfloat16")
        return [output + 0.1 for output in run(*args)]

    (tmp_path / "model.onnx").write_text("earlier")
    monkeypatch.setattr(runtime.InferenceSession, "run", wrong)
    with pytest.raises(RuntimeError, match=message):
        export_onnx(image_model(head="cosine"), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_text() == "earlier"


def test_export_changes_neither_mode_nor_random_numbers(tmp_path):
    model = image_model(head="cosine").train()
    model.sphere_vision.backbone.eval()
    modes, numbers = [module.training for module in model.modules()], torch.get_rng_state()
    export_onnx(model, tmp_path / "model.onnx")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), numbers)


def test_missing_package_is_reported_with_the_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[onnx\]'"):
        export_onnx(image_model(), tmp_path / "model.onnx")


def test_folders_damaged_weights_and_models_with_other_inputs_are_not_exported(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder. Use for instance .*model\.onnx"):
        export_onnx(image_model(), tmp_path)
    config = SphereVisionConfig(backbone="conv4", image_size=28, num_channels=1, head=None)
    with pytest.raises(ValueError, match=r"requires pixel_values, support_pixel_values.*Export its encoder"):
        export_onnx(SphereVisionForFewShotClassification(config), tmp_path / "model.onnx")
    model = image_model(head="softmax")
    torch.nn.init.constant_(next(model.parameters()), torch.nan)
    with pytest.raises(ValueError, match="the logits are not finite, so the model is not exported"):
        export_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
