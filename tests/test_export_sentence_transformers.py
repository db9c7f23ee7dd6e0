"""Does an ONNX file of a whole SentenceTransformer return the embeddings of `encode`, and have its settings?"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, ViTConfig, ViTImageProcessor, ViTModel

from hf_sphere import SphereBertModel, SphereViTConfig, SphereViTModel
from hf_sphere.commands import export as command
from hf_sphere.export import export_onnx
from hf_sphere.nn import SphericalLinear, Spherize

st = pytest.importorskip("sentence_transformers")
runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
tokenizers = pytest.importorskip("tokenizers")

from sentence_transformers.base.modules import Router  # noqa: E402
from sentence_transformers.sentence_transformer.modules import (  # noqa: E402
    Dense,
    Normalize,
    Pooling,
    StaticEmbedding,
    Transformer,
)

TEXTS = ["the cat is to the nurse", "the mountain", "a story is the relation between lamp and picture"]


@pytest.fixture
def folder(root) -> str:
    return str(root / "tests" / "golden" / "analogy" / "tiny-bert")


def build(folder: str, *modules: torch.nn.Module, pooling: str = "mean", **options: Any) -> Any:
    """A SentenceTransformer of a tiny encoder with a pooling and further modules."""
    torch.manual_seed(0)
    transformer = Transformer(folder, max_seq_length=8)
    pooled = Pooling(transformer.get_embedding_dimension(), pooling)
    return st.SentenceTransformer(modules=[transformer, pooled, *modules], device="cpu", **options)


def run_file(path: Path, texts: list[str]) -> np.ndarray:
    """Embed texts with the file alone: its tokenizer, and onnxruntime."""
    session = runtime.InferenceSession(path)
    encodings = tokenizers.Tokenizer.from_str(read(path)["tokenizer"]).encode_batch(texts)
    columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    names = [each.name for each in session.get_inputs()]
    inputs = {name: np.array([getattr(each, columns[name]) for each in encodings]) for name in names}
    return session.run(["sentence_embedding"], inputs)[0]


def read(path: Path) -> dict[str, str]:
    return runtime.InferenceSession(path).get_modelmeta().custom_metadata_map


@pytest.fixture
def spherized(folder, tmp_path) -> str:
    """Folder of a spherized encoder and its tokenizer."""
    SphereBertModel.from_pretrained(folder).save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "encoder")
    return str(tmp_path / "encoder")


MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_file_returns_the_embeddings_of_the_whole_chain_at_any_batch_size_and_length(side, spherized, tmp_path):
    dense = Dense(33, 33, activation_function=None, init_bias=-torch.rand(33))
    model, path = build(spherized, Spherize(32, delta=0.1), dense, Normalize()).train(), tmp_path / "new" / "model.onnx"
    model.tokenizer.truncation_side = side
    model.preprocess(TEXTS)  # sets the truncation
    before = model.tokenizer.backend_tokenizer.to_str()
    export_onnx(model, path)
    assert model.tokenizer.backend_tokenizer.to_str() == before
    assert model.training
    for texts in (TEXTS[:1], TEXTS, [" ".join(TEXTS)] * 5):  # the last is longer than max_seq_length
        np.testing.assert_allclose(run_file(path, texts), model.encode(texts), rtol=0.0, atol=1e-4)
    assert [*path.parent.iterdir()] == [path]


def test_file_of_every_pooling_has_the_settings_that_its_user_needs(folder, tmp_path):
    prompts = {"query": "search: ", "document": ""}
    options = {"prompts": prompts, "default_prompt_name": "query", "truncate_dim": 12, "similarity_fn_name": "dot"}
    model = build(folder, Dense(32 * len(MODES), 16), Normalize(), pooling=MODES, **options)
    export_onnx(model, tmp_path / "model.onnx", {"license": "mine"})
    metadata = read(tmp_path / "model.onnx")
    settings = json.loads(metadata["embedding"])
    assert [module["type"] for module in settings["modules"]] == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert [*settings["modules"][1]["pooling_mode"]] == MODES
    expected = {"dimension": 12, "max_seq_length": 8, "similarity": "dot", "default_prompt_name": "query"}
    assert {name: settings[name] for name in expected} == expected
    assert settings["prompts"] == prompts
    assert metadata["license"] == "mine"
    texts = [prompts["query"] + text for text in TEXTS]
    found = run_file(tmp_path / "model.onnx", texts)
    np.testing.assert_allclose(found, model.encode_query(TEXTS), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("kind", ["sphere_vit", "vit"])
def test_file_of_an_image_encoder_returns_its_embeddings_and_states_its_preprocessing(kind, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"image_size": 16, "patch_size": 8, "num_channels": 1}
    encoder = ViTModel(ViTConfig(**sizes)) if kind == "vit" else SphereViTModel(SphereViTConfig(**sizes))
    encoder.save_pretrained(tmp_path / "encoder")
    size = {"height": 16, "width": 16}
    processor = ViTImageProcessor(size=size, image_mean=[0.5], image_std=[0.25], do_convert_rgb=False)
    processor.save_pretrained(tmp_path / "encoder")
    modules = [Transformer(str(tmp_path / "encoder")), Pooling(16, "cls"), Normalize(), Spherize(16)]
    model, path = st.SentenceTransformer(modules=modules, device="cpu"), tmp_path / "model.onnx"
    export_onnx(model, path)
    images = [Image.fromarray(np.random.default_rng(0).integers(256, size=(20, 20), dtype=np.uint8))] * 3
    pixels = model.preprocess(images)["pixel_values"].numpy()
    embeddings = runtime.InferenceSession(path).run(["sentence_embedding"], {"pixel_values": pixels})[0]
    np.testing.assert_allclose(embeddings, model.encode(images), rtol=0.0, atol=1e-4)
    assert json.loads(read(path)["preprocessing"])["image_std"] == [0.25]


def test_an_int8_file_without_the_information_of_long_unit_embeddings_is_refused(folder, tmp_path):
    """One large activation, which the result does not depend on, rounds all others to 0."""
    weight = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))
    weight[:, 0] = 0.0
    model = build(folder, Dense(32, 2048, bias=False, activation_function=None, init_weight=weight), Normalize())
    with torch.no_grad():
        model[0].model.encoder.layer[-1].output.LayerNorm.weight[0] *= 1000.0
    with pytest.raises(RuntimeError, match=r"sentence_embedding differ from the model by .* Leave out int8"):
        export_onnx(model, tmp_path / "model.onnx", int8=True)
    assert not list(tmp_path.iterdir())


# What is refused


class OfOneSize(torch.nn.Module):
    """It remembers the size of the first batch."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["sentence_embedding"] = features["sentence_embedding"].view(2, 32)
        return features


def cannot_export(model: torch.nn.Module, message: str, path: Path, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        export_onnx(model, path, **options)


def test_a_module_for_batches_of_one_size_is_not_exported(folder, tmp_path):
    with pytest.raises(torch.onnx.errors.OnnxExporterError):
        export_onnx(build(folder, OfOneSize(), Normalize()), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_modules_that_a_file_cannot_have_are_refused_by_name(folder, tmp_path):
    transformer = Transformer(folder)
    routes = {"query": [transformer, Pooling(32)], "document": [transformer, Pooling(32)]}
    router = st.SentenceTransformer(modules=[Router(routes, default_route="document")], device="cpu")
    words = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    static = st.SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=8)], device="cpu")
    prompted = build(folder, prompts={"query": "search: "})
    prompted.set_pooling_include_prompt(False)
    for model, message in (
        (router, r"module 0 \(Router\) picks its modules by the input"),
        (static, r"module 0 \(StaticEmbedding\) takes input_ids, offsets"),
        (prompted, r"module 1 \(Pooling\) leaves out prompts"),
    ):
        cannot_export(model, message, tmp_path / "model.onnx")


@pytest.mark.parametrize("options", [{"max_length": 4}, {"add_special_tokens": False}])
def test_a_tokenizer_with_options_that_the_file_lacks_is_refused(options, folder, tmp_path):
    transformer = Transformer(folder, max_seq_length=8, processing_kwargs={"text": options})
    model = st.SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
    cannot_export(model, r"module 0 \(Transformer\) changes what its tokenizer returns", tmp_path / "model.onnx")


# The command, and int8


def test_the_command_exports_a_model_whose_int8_file_is_smaller_and_keeps_spherized_maps(spherized, tmp_path, capsys):
    onnx = pytest.importorskip("onnx")
    model, files = build(spherized, Spherize(32)), [tmp_path / f"{name}.onnx" for name in ("float", "int8")]
    model.save_pretrained(str(tmp_path / "model"))
    for path in files:
        words = ["--model_name_or_path", str(tmp_path / "model"), "--output", str(path)]
        path.write_text("earlier")
        command.main([*words, "--overwrite_output", *["--int8"] * (path.stem == "int8")])
    assert "with the metadata model, embedding" in capsys.readouterr().out
    assert read(files[0])["model"] == "SentenceTransformer"
    assert read(files[1]).items() >= read(files[0]).items()
    expected, length = model.encode(TEXTS), len(read(files[1])["tokenizer"])
    np.testing.assert_allclose(run_file(files[0], TEXTS), expected, rtol=0.0, atol=1e-4)
    assert (run_file(files[1], TEXTS) * expected).sum(1).min() > 0.99  # of unit vectors
    sizes = [path.stat().st_size - length for path in files]
    assert sizes[1] < 0.9 * sizes[0]
    weights = {each.name: each for each in onnx.load(files[1]).graph.initializer}
    shapes = {tuple(each.dims) for each in weights.values() if each.data_type == 1 and len(each.dims) == 2}
    linear = next(module.linear for module in model.modules() if isinstance(module, SphericalLinear))
    assert shapes & {tuple(linear.weight.shape), tuple(linear.weight.T.shape)}
    assert any(each.data_type == 3 for each in weights.values())
