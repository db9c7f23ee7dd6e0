"""One way from images and texts to embeddings."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Image, IterableDataset
from transformers import BertModel, PreTrainedTokenizerFast
from transformers.activations import GELUActivation

from hf_sphere.search import ImageEncoder, TextEncoder, load_encoder
from hf_sphere.search.extract import embed_batches

with contextlib.suppress(ImportError):  # tests of images do not need them
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    from hf_sphere.nn import Spherize

TEXTS = ["a dog", "the cat sat", "stocks fell", "a", "b c d"]


@pytest.fixture
def sentences(root, tmp_path) -> Path:
    """A folder with a SentenceTransformer, which has prompts."""
    pytest.importorskip("sentence_transformers")
    source = root / "tests" / "golden" / "analogy" / "tiny-bert"
    torch.manual_seed(0)
    BertModel.from_pretrained(source).save_pretrained(tmp_path / "bert")
    PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(tmp_path / "bert")
    transformer = Transformer(str(tmp_path / "bert"))
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), "mean")]
    prompts = {"query": "the ", "document": ""}
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(tmp_path / "sentences"))
    return tmp_path / "sentences"


def gather(batches) -> tuple[list[int], torch.Tensor]:
    rows, columns = zip(*batches, strict=True)
    return torch.cat(rows).tolist(), torch.cat([each["embedding"] for each in columns])


def test_texts_have_the_embeddings_of_the_sentence_transformer(sentences):
    encoder, expected = load_encoder(str(sentences)), SentenceTransformer(str(sentences), device="cpu")
    rows, embeddings = gather(encoder.encode(TEXTS, [1, 4], batch_size=2, progress=False))
    assert isinstance(encoder, TextEncoder)
    assert (rows, encoder.metric, encoder.class_names) == ([1, 4], {"distance": "cosine"}, [])
    torch.testing.assert_close(embeddings, torch.from_numpy(expected.encode([TEXTS[1], TEXTS[4]])))
    torch.testing.assert_close(encoder.encode_texts(TEXTS), torch.from_numpy(expected.encode_query(TEXTS)))
    assert not torch.equal(encoder.encode_texts(TEXTS), gather(encoder.encode(TEXTS, progress=False))[1])


def test_a_model_that_is_loaded_or_saved_in_half_precision_is_the_same_encoder(sentences):
    encoder, given = TextEncoder(str(sentences)), TextEncoder(SentenceTransformer(str(sentences), device="cpu"))
    assert (given.weights, given.settings) == (encoder.weights, encoder.settings)
    SentenceTransformer(str(sentences), device="cpu").half().save(str(sentences))
    assert {parameter.dtype for parameter in TextEncoder(str(sentences)).model.parameters()} == {torch.float32}


def test_the_distance_is_that_of_the_model(sentences):
    model = SentenceTransformer(str(sentences), device="cpu", similarity_fn_name="euclidean")
    assert TextEncoder(model).metric == {"distance": "euclidean"}
    model.similarity_fn_name = "dot"
    with pytest.raises(ValueError, match="compares embeddings by dot, which an index does not"):
        TextEncoder(model)
    model.append(Normalize())  # inner products of unit vectors are cosines
    assert TextEncoder(model).metric == {"distance": "cosine"}
    model.truncate_dim = 4  # after the last module
    with pytest.raises(ValueError, match="compares embeddings by dot"):
        TextEncoder(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", ["Spherize", "Normalize"])
def test_inner_products_of_embeddings_of_one_norm_are_cosines(last, dtype, sentences):
    model = SentenceTransformer(str(sentences), device="cpu", similarity_fn_name="dot")
    dim = model.get_embedding_dimension()
    model.append(Spherize(dim, radius=3.0) if last == "Spherize" else Normalize())
    assert TextEncoder(model.to(dtype)).metric == {"distance": "cosine"}


@pytest.mark.parametrize("texts", ["a dog", [], b"a dog", ["a", 3], [None]])
@pytest.mark.parametrize("method", ["encode", "encode_texts"])
def test_texts_are_a_list_of_at_least_one_text(method, texts, sentences):
    with pytest.raises(ValueError, match="texts must be a list of texts"):
        list(getattr(TextEncoder(str(sentences)), method)(texts))


@pytest.mark.parametrize("option", [{"truncate_dim": 3}, {"prompts": {"query": "other "}}])
def test_settings_that_the_model_records_are_used_and_identify_it(option, sentences):
    before = TextEncoder(str(sentences))
    file = sentences / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | option))
    encoder = TextEncoder(str(sentences))
    assert encoder.settings != before.settings
    assert encoder.weights == before.weights
    dim = before.encode_texts(["a"]).shape[1]
    assert encoder.encode_texts(["a"]).shape == (1, option.get("truncate_dim", dim))


@pytest.mark.parametrize(
    ("prompts", "default", "is_symmetric"),
    [
        ({}, None, True),
        ({"query": "the "}, None, False),
        ({"document": "the ", "query": "the "}, None, True),
        ({"passage": "the "}, None, True),  # sentence-transformers adds an empty prompt of documents
        ({"other": "the "}, "other", True),
    ],
)
def test_prompts_of_queries_and_documents_say_whether_both_are_embedded_alike(
    prompts, default, is_symmetric, sentences
):
    file = sentences / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"prompts": prompts, "default_prompt_name": default}))
    encoder = TextEncoder(str(sentences))
    assert encoder.is_symmetric == is_symmetric
    rows = gather(encoder.encode(TEXTS[:2], progress=False))[1]
    assert torch.allclose(encoder.encode_texts(TEXTS[:2]), rows, atol=1e-5) == is_symmetric


@pytest.mark.parametrize("way", ["task", "length"])
def test_modules_that_know_queries_from_documents_are_not_symmetric(way, sentences):
    model = SentenceTransformer(str(sentences), device="cpu", prompts={"query": "", "document": ""})
    assert TextEncoder(model).is_symmetric
    if way == "length":
        model[0].query_length = 3
    else:
        routes = {name: list(model) for name in ("query", "document")}
        model = SentenceTransformer(modules=[Router(routes, default_route="document")], device="cpu")
    assert not TextEncoder(model).is_symmetric


def test_a_plain_text_encoder_is_refused_because_its_pooling_is_unknown(sentences):
    with pytest.raises(ValueError, match=r"bert has no modules.json, so the pooling .* is unknown\. Save it"):
        TextEncoder(str(sentences.with_name("bert")))
    with pytest.raises(ValueError, match=r"BertModel is no image encoder.*sentence-transformers"):
        load_encoder(str(sentences.with_name("bert")))


def test_a_missing_model_of_texts_is_named_and_others_are_image_encoders(model, tmp_path):
    assert type(load_encoder(model)) is ImageEncoder
    for load in (TextEncoder, load_encoder):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            load(str(tmp_path / "nowhere"))


def test_without_sentence_transformers_the_extra_is_named(sentences, monkeypatch):
    monkeypatch.setattr("hf_sphere.utils.checks.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[sentence-transformers\]'"):
        load_encoder(str(sentences))


def test_embeddings_of_texts_that_are_not_finite_are_refused(sentences):
    encoder = TextEncoder(str(sentences))
    with torch.no_grad():
        next(encoder.model.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="embedding of a dog is not finite"):
        list(encoder.encode(TEXTS, progress=False))


# Sources


@pytest.mark.parametrize("kind", ["dataset", "stream", "generator", "list"])
def test_what_an_interrupted_run_embedded_is_used_for_every_kind_of_source(kind, model, digits, tmp_path, monkeypatch):
    def source():
        rows = Dataset.from_dict({"image": digits}).cast_column("image", Image())
        stream = IterableDataset.from_generator(lambda: ({"image": image} for image in digits))
        return {"dataset": rows, "stream": stream, "generator": (image for image in digits), "list": digits}[kind]

    encoder = ImageEncoder(model)
    expected = gather(encoder.encode(digits, progress=False))[1]
    options = {"batch_size": 5, "progress": False, "folder": tmp_path / "kept"}
    interrupted = encoder.encode(source(), **options)
    assert [next(interrupted)[0].tolist() for _ in range(2)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    seen = []
    embed = encoder._embed
    monkeypatch.setattr(encoder, "_embed", lambda names, **inputs: seen.extend(names) or embed(names, **inputs))
    rows, embeddings = gather(encoder.encode(source(), **options))
    assert (rows, len(seen)) == ([*range(12)], 2)
    torch.testing.assert_close(embeddings, expected)
    assert len(gather(encoder.encode(digits[::-1], **options))[0]) == 12
    assert len(seen) == 14  # other images


def test_texts_are_resumed(sentences, tmp_path):
    encoder, folder = TextEncoder(str(sentences)), tmp_path / "kept"
    expected = gather(encoder.encode(TEXTS * 9, batch_size=1, progress=False, folder=folder))
    encoder.model = None
    rows, embeddings = gather(encoder.encode(TEXTS * 9, progress=False, folder=folder))
    assert rows == expected[0]
    assert torch.equal(embeddings, expected[1])


def test_batches_without_readable_rows_are_left_out_and_not_read_again(tmp_path):
    reads = []

    def embed(batches):
        for batch in batches:
            reads.append(batch)
            rows = torch.tensor([row for row in batch if row > 2], dtype=torch.long)
            yield {"row": rows} | ({"embedding": rows[:, None]} if len(rows) else {})

    for _ in range(2):
        found = list(embed_batches(embed, range(8), batch_size=2, folder=tmp_path, progress=False))
        assert [rows.tolist() for rows, _ in found] == [[3], [4, 5], [6, 7]]
    assert reads == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


# Models of others


@pytest.mark.parametrize(
    "name", ["os.system", "custom.Module", "sentence_transformers.util.http_get", "torch.nn.Linear"]
)
def test_a_module_of_another_library_is_refused_before_it_is_imported(name, sentences, tmp_path, monkeypatch):
    modules = json.loads((sentences / "modules.json").read_text())
    (sentences / "custom.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    (sentences / "modules.json").write_text(json.dumps([*modules, {"idx": 2, "name": "2", "path": "", "type": name}]))
    monkeypatch.setattr("sentence_transformers.SentenceTransformer.__init__", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=rf"its {name} is code of others.*pass the model"):
        TextEncoder(str(sentences))
    assert not (tmp_path / "executed").exists()


def test_an_activation_of_another_library_is_refused_rather_than_replaced_by_tanh(sentences):
    modules = json.loads((sentences / "modules.json").read_text())
    kind = "sentence_transformers.base.modules.dense.Dense"
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": kind})
    (sentences / "modules.json").write_text(json.dumps(modules))
    dense = Dense(32, 32, activation_function=GELUActivation())
    (sentences / "2_Dense").mkdir()
    dense.save(str(sentences / "2_Dense"))
    with pytest.raises(ValueError, match=r"its transformers\.activations\.GELUActivation is code of"):
        TextEncoder(str(sentences))


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("config.json", {"model_type": "bert", "attn_implementation": "owner/kernel"}, "names the kernel"),
        ("sentence_bert_config.json", {"model_args": {"attn_implementation": "owner/kernel"}}, "names the kernel"),
        ("adapter_config.json", {"base_model_name_or_path": "other"}, "has an adapter"),
        ("1_Pooling/config.json", [], "cannot be loaded as SentenceTransformer"),
        ("modules.json", {"a": 1}, "cannot be loaded as SentenceTransformer"),
        ("modules.json", None, "is not a regular file"),
    ],
)
def test_files_that_would_load_something_else_or_are_damaged_are_one_error(file, settings, message, sentences):
    (sentences / file).unlink(missing_ok=True)
    if settings is None:
        (sentences / file).symlink_to("/dev/null")
    else:
        (sentences / file).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        TextEncoder(str(sentences))


def test_a_model_with_spherize_is_loaded_without_code_of_its_folder(sentences, tmp_path):
    model = SentenceTransformer(str(sentences), device="cpu")
    model.append(Spherize(model.get_embedding_dimension(), scaling=2.0))
    model.save(str(sentences))
    code = sentences / "hf_sphere" / "nn" / "sentence_embedding.py"
    code.parent.mkdir(parents=True)
    code.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    expected = torch.from_numpy(model.encode_query(["a dog"]))
    torch.testing.assert_close(TextEncoder(str(sentences)).encode_texts(["a dog"]), expected)
    assert not (tmp_path / "executed").exists()


def test_code_of_the_transformer_is_not_run(sentences, tmp_path, monkeypatch):
    (sentences / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    config = json.loads((sentences / "config.json").read_text())
    names = {name: "code.Anything" for name in ("AutoConfig", "AutoModel", "AutoTokenizer")}
    (sentences / "config.json").write_text(json.dumps(config | {"model_type": "custom", "auto_map": names}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="cannot be loaded as SentenceTransformer"):
        TextEncoder(str(sentences))
    assert not (tmp_path / "executed").exists()


def test_a_folder_without_weights_is_an_error(sentences):
    shutil.move(sentences / "model.safetensors", sentences / "other.safetensors")
    with pytest.raises((OSError, ValueError), match="sentences"):
        TextEncoder(str(sentences))
