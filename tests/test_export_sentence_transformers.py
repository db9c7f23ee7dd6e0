"""Does an ONNX file of a whole SentenceTransformer return the embeddings of `encode`, and have its settings?"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTImageProcessor, ViTModel

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


MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
CHAINS: dict[str, Any] = {
    "every pooling": lambda: ([], MODES),
    "dense": lambda: ([Dense(32, 12), Normalize()], "cls"),
    "centered": lambda: (
        [Spherize(32, delta=0.1), Dense(33, 33, activation_function=None, init_bias=-torch.rand(33)), Normalize()],
        "mean",
    ),
}


@pytest.mark.parametrize("chain", list(CHAINS))
def test_file_returns_the_embeddings_of_the_whole_chain_at_any_batch_size_and_length(chain, folder, tmp_path):
    modules, pooling = CHAINS[chain]()
    model, path = build(folder, *modules, pooling=pooling), tmp_path / "model.onnx"
    export_onnx(model, path)
    for texts in (TEXTS[:1], TEXTS, [" ".join(TEXTS)] * 5):  # the last is longer than max_seq_length
        np.testing.assert_allclose(run_file(path, texts), model.encode(texts), rtol=0.0, atol=1e-4)
    assert [*tmp_path.iterdir()] == [path]


def test_file_of_a_spherized_encoder_returns_its_embeddings(folder, tmp_path):
    SphereBertModel.from_pretrained(folder).save_pretrained(tmp_path / "encoder")
    transformers = pytest.importorskip("transformers")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "encoder")
    model = build(str(tmp_path / "encoder"), Spherize(32))
    export_onnx(model, tmp_path / "model.onnx")
    np.testing.assert_allclose(run_file(tmp_path / "model.onnx", TEXTS), model.encode(TEXTS), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("kind", ["vit", "sphere_vit"])
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
    with pytest.raises(ValueError, match="int8 is for text models"):
        export_onnx(model, path, int8=True)


def test_metadata_has_the_settings_that_a_user_of_the_file_needs(folder, tmp_path):
    prompts = {"query": "search: ", "document": ""}
    options = {"prompts": prompts, "default_prompt_name": "query", "truncate_dim": 12, "similarity_fn_name": "dot"}
    model, path = build(folder, Normalize(), pooling="cls", **options), tmp_path / "model.onnx"
    export_onnx(model, path, {"license": "mine"})
    metadata = read(path)
    settings = json.loads(metadata["embedding"])
    assert [module["type"] for module in settings["modules"]] == ["Transformer", "Pooling", "Normalize"]
    assert settings["modules"][1]["pooling_mode"] == "cls"
    expected = {"dimension": 12, "max_seq_length": 8, "similarity": "dot", "default_prompt_name": "query"}
    assert {name: settings[name] for name in expected} == expected
    assert settings["prompts"] == prompts
    assert metadata["license"] == "mine"
    texts = [prompts["query"] + text for text in TEXTS]
    np.testing.assert_allclose(run_file(path, texts), model.encode_query(TEXTS), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_tokenizer_of_the_file_truncates_on_the_side_of_the_model(side, folder, tmp_path):
    model = build(folder)
    model.tokenizer.truncation_side = side
    export_onnx(model, tmp_path / "model.onnx")
    longer = [" ".join(TEXTS)]
    np.testing.assert_allclose(run_file(tmp_path / "model.onnx", longer), model.encode(longer), rtol=0.0, atol=1e-4)


def test_export_changes_neither_tokenizer_nor_mode(folder, tmp_path):
    model = build(folder).train()
    model.preprocess(TEXTS)  # sets the truncation
    before = model.tokenizer.backend_tokenizer.to_str()
    export_onnx(model, tmp_path / "model.onnx")
    assert model.tokenizer.backend_tokenizer.to_str() == before
    assert model.training


def test_int8_file_is_smaller_and_keeps_directions(folder, tmp_path):
    model = build(folder, Normalize())
    export_onnx(model, tmp_path / "float.onnx")
    export_onnx(model, tmp_path / "int8.onnx", int8=True)
    sizes = [(tmp_path / f"{name}.onnx").stat().st_size for name in ("float", "int8")]
    tokenizer = len(read(tmp_path / "int8.onnx")["tokenizer"])
    assert sizes[1] - tokenizer < 0.8 * (sizes[0] - tokenizer)
    cosines = (run_file(tmp_path / "int8.onnx", TEXTS) * model.encode(TEXTS)).sum(1)
    assert cosines.min() > 0.99
    assert read(tmp_path / "int8.onnx").items() >= read(tmp_path / "float.onnx").items()


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


def test_int8_leaves_the_maps_after_a_spherization_in_float32(folder, tmp_path):
    onnx = pytest.importorskip("onnx")
    SphereBertModel.from_pretrained(folder).save_pretrained(tmp_path / "encoder")
    model = SphereBertModel.from_pretrained(tmp_path / "encoder").eval()
    export_onnx(model, tmp_path / "model.onnx", int8=True)
    weights = {each.name: each for each in onnx.load(tmp_path / "model.onnx").graph.initializer}
    kept = [name for name, each in weights.items() if each.data_type == 1 and len(each.dims) == 2]
    shapes = {tuple(weights[name].dims) for name in kept}
    linear = next(module.linear for module in model.modules() if isinstance(module, SphericalLinear))
    assert shapes & {tuple(linear.weight.shape), tuple(linear.weight.T.shape)}
    assert any(each.data_type == 3 for each in weights.values())


# What is refused


class Branching(torch.nn.Module):
    """Its result depends on values in Python."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        if features["sentence_embedding"].sum() > 0:
            features["sentence_embedding"] = -features["sentence_embedding"]
        return features


class OfOneSize(torch.nn.Module):
    """It remembers the size of the first batch."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["sentence_embedding"] = features["sentence_embedding"].view(2, 32)
        return features


@pytest.mark.parametrize("kind", [Branching, OfOneSize])
def test_a_module_without_a_forward_that_exports_is_named(kind, folder, tmp_path):
    with pytest.raises(ValueError, match=rf"module 3 \({kind.__name__}\) cannot be exported: "):
        export_onnx(build(folder, Normalize(), kind(), Normalize()), tmp_path / "model.onnx")
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
        (router, r"module 0 \(Router\) picks its modules by the input. Export one route"),
        (static, r"module 0 \(StaticEmbedding\) takes input_ids, offsets of text"),
        (prompted, r"module 1 \(Pooling\) leaves out prompts"),
        (torch.nn.Linear(2, 2), "Linear requires input"),
    ):
        with pytest.raises(ValueError, match=message):
            export_onnx(model, tmp_path / "model.onnx")


@pytest.mark.parametrize("options", [{"max_length": 4}, {"add_special_tokens": False}])
def test_a_tokenizer_with_options_that_the_file_lacks_is_refused(options, folder, tmp_path):
    transformer = Transformer(folder, max_seq_length=8, processing_kwargs={"text": options})
    model = st.SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
    with pytest.raises(ValueError, match=r"module 0 \(Transformer\) changes what its tokenizer returns"):
        export_onnx(model, tmp_path / "model.onnx")


# The command


def test_the_command_exports_a_model_with_spherize(folder, tmp_path, capsys):
    model = build(folder, Spherize(32))
    model.save_pretrained(str(tmp_path / "model"))
    for int8 in (False, True):
        words = ["--model_name_or_path", str(tmp_path / "model"), "--output", str(tmp_path / "model.onnx")]
        command.main([*words, "--overwrite_output", *["--int8"] * int8])
        found = run_file(tmp_path / "model.onnx", TEXTS)
        np.testing.assert_allclose(found, model.encode(TEXTS), rtol=0.0, atol=0.1 if int8 else 1e-4)
    assert "with the metadata model, embedding" in capsys.readouterr().out
    assert read(tmp_path / "model.onnx")["model"] == "SentenceTransformer"
