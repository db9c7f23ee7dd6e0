import json
import shutil

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoProcessor,
    CLIPModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from hf_sphere import SphereViTConfig, SphereViTForImageClassification
from hf_sphere.embeddings import ImageEncoder, ImageIndex
from hf_sphere.metrics import search

QUIET = {"progress": False}


@pytest.fixture(scope="module")
def encoder(model):
    return ImageEncoder(model)


@pytest.fixture
def index(encoder, photos) -> ImageIndex:
    return ImageIndex.build(encoder, photos, **QUIET)


@torch.no_grad()
def embed(model: str, images: list[Image.Image]) -> torch.Tensor:
    """Embeddings by public interfaces of transformers only."""
    pixels = AutoImageProcessor.from_pretrained(model)(images, return_tensors="pt")
    return AutoModelForImageClassification.from_pretrained(model)(**pixels).embeddings


def test_neighbors_are_the_nearest_by_cosine(index, model, digits):
    found = index.search(digits[8:11], 3, **QUIET)
    similarities = torch.nn.functional.cosine_similarity(
        embed(model, digits[8:11])[:, None].double(), embed(model, digits[:7]).double(), dim=2
    )
    expected = similarities.sort(dim=1, descending=True)
    assert torch.equal(found.rows, expected.indices[:, :3])
    torch.testing.assert_close(found.distances, 1 - expected.values[:, :3], atol=1e-6, rtol=1e-4)


def test_an_index_knows_files_classes_and_certainties(index):
    assert index.images["file"][:2] == ["even/test_0.png", "even/test_1.png"]
    assert set(index.images) == {"file", "row", "source", "label", "prediction", "confidence", "concentration"}
    assert index.classes()[:6] == ["even"] * 3 + ["odd"] * 3
    assert index.classes()[6] == index.images["prediction"][6]  # it has no class folder


@pytest.mark.parametrize("head", ["cosine", "softmax", "hyperbolic"])
def test_the_distance_is_that_of_the_head(head, save_model, tmp_path, photos):
    index = ImageIndex.build(save_model(tmp_path / "model", head), photos, **QUIET)
    assert index.neighbor_search.distance == index.encoder.model.head.distance
    assert index.search(photos, 1, **QUIET).rows[:, 0].tolist() == list(range(7))


@pytest.mark.parametrize("kind", [None, "torch", "ivf", "hnsw"])
def test_a_saved_index_finds_the_same(kind, encoder, photos, digits, tmp_path):
    built = ImageIndex.build(encoder, photos, kind=kind, **QUIET)
    built.save(tmp_path / "index")
    loaded = ImageIndex.load(tmp_path / "index")
    for index in (built, loaded):
        assert index.search(digits[9], 7, **QUIET).rows.tolist() == built.search(digits[9], 7, **QUIET).rows.tolist()
    assert loaded.images == built.images
    assert loaded.open_image(4).convert("L").tobytes() == digits[4].tobytes()
    assert not any(file.suffix in (".pkl", ".pt", ".npy", ".bin") for file in (tmp_path / "index").iterdir())


def test_only_new_images_are_added(index, photos, digits, tmp_path):
    assert index.add(photos, **QUIET) == 0
    digits[8].save(photos / "odd" / "new.png")
    assert index.add(photos, **QUIET) == 1
    assert index.add("digits", **QUIET, batch_size=500) == 360 or len(index) > 300
    index.save(tmp_path / "index")
    loaded = ImageIndex.load(tmp_path / "index", index.encoder)
    assert loaded.search(digits[8], 2, **QUIET).distances.max() < 1e-9  # the new image, and the same of the data set
    row = loaded.images["file"].index("test/8")
    assert loaded.open_image(row).convert("L").tobytes() == digits[8].tobytes()


def test_images_in_memory_are_added_though_their_names_are_equal(encoder, digits):
    index = ImageIndex.build(encoder, digits[:2], **QUIET)
    assert index.add(digits[2], **QUIET) == 1
    assert index.search(digits[2], 1, **QUIET).rows.tolist() == [[2]]


def test_a_loaded_index_can_be_saved(encoder, photos, tmp_path):
    ImageIndex.build(encoder, photos, kind="ivf", **QUIET).save(tmp_path / "index")
    for folder in (tmp_path / "copy", tmp_path / "index"):
        loaded = ImageIndex.load(tmp_path / "index", encoder)
        loaded.save(folder)
        expected = loaded.search(photos, 2, **QUIET).rows
        assert torch.equal(ImageIndex.load(folder, encoder).search(photos, 2, **QUIET).rows, expected)


def test_search_within_classes(index, digits):
    assert set(index.search(digits[9], 3, classes=["odd"], **QUIET).rows[0].tolist()) <= {3, 4, 5, 6}
    with pytest.raises(ValueError, match="no image has the class cat; there are even, odd"):
        index.search(digits[9], 1, classes=["cat"], **QUIET)


def test_a_constant_image_has_neighbors(index):
    found = index.search([Image.new("L", (8, 8), value) for value in (0, 128, 255)], 7, **QUIET)
    assert found.distances.isfinite().all()


def test_without_faiss_the_search_is_exact(encoder, photos, tmp_path, monkeypatch, caplog):
    ImageIndex.build(encoder, photos, kind="ivf", **QUIET).save(tmp_path / "index")
    expected = ImageIndex.load(tmp_path / "index", encoder).search(photos, 3, **QUIET)
    monkeypatch.setattr(search.importlib.util, "find_spec", lambda name: None)
    loaded = ImageIndex.load(tmp_path / "index", encoder)
    torch.testing.assert_close(loaded.search(photos, 3, **QUIET).distances, expected.distances)
    assert loaded.neighbor_search.kind == "torch"
    assert "FAISS is not installed, so the search is exact" in caplog.text


def test_bad_images_are_named_or_skipped(encoder, photos, caplog):
    (photos / "bad.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"bad.png cannot be read as an image.*--skip_unreadable_images"):
        ImageIndex.build(encoder, photos, **QUIET)
    assert len(ImageIndex.build(encoder, photos, skip_unreadable=True, **QUIET)) == 7
    assert "Skipped: bad.png" in caplog.text
    with pytest.raises(ValueError, match="none of the 1 images can be read"):
        ImageIndex.build(encoder, photos / "bad.png", skip_unreadable=True, **QUIET)


def test_a_truncated_photo_is_named_before_any_image_is_embedded(encoder, tmp_path, monkeypatch):
    for name in ("0.jpg", "1.jpg"):
        Image.effect_noise((60, 60), 50).save(tmp_path / name)
    (tmp_path / "1.jpg").write_bytes((tmp_path / "1.jpg").read_bytes()[:-99])
    monkeypatch.setattr(encoder, "_embed", lambda *_, **__: pytest.fail("embedded"))
    with pytest.raises(ValueError, match=r"^1\.jpg cannot be read as an image: .*truncated"):
        list(encoder.encode(tmp_path, batch_size=1))


def test_transparent_parts_have_the_color_of_the_processor(encoder, monkeypatch, caplog):
    monkeypatch.setattr(encoder.processor, "background_color", [128] * 3)
    drawing, gray = Image.new("LA", (8, 8)), Image.new("L", (8, 8), 128)
    (_, columns), *_ = encoder.encode([drawing, gray], progress=False)
    assert columns["embedding"][0].tolist() == columns["embedding"][1].tolist()
    assert "1 of 2 images have an alpha channel or a transparent color" in caplog.text


def test_adding_only_unreadable_images_adds_none(index, photos, caplog):
    (photos / "bad.png").write_bytes(b"")
    assert index.add(photos, skip_unreadable=True, **QUIET) == 0
    assert len(index) == 7
    with pytest.raises(ValueError, match="none of the 1 images can be read"):
        index.search(photos / "bad.png", skip_unreadable=True, **QUIET)


def test_a_file_reached_by_a_link_has_the_name_that_it_has_in_the_index(index, photos, tmp_path):
    (tmp_path / "link").symlink_to(photos)
    found = index.search(tmp_path / "link" / "even" / "test_1.png", 1, **QUIET)
    assert found.queries["file"] == [index.path(found.rows.item())]


def test_files_are_embedded_without_a_source(encoder, model, photos, digits):
    ((rows, columns),) = encoder.encode([photos / "even" / "test_0.png", digits[1]], **QUIET)
    assert rows.tolist() == [0, 1]
    torch.testing.assert_close(columns["embedding"], embed(model, digits[:2]))


def test_texts_of_siglip_have_the_length_of_its_training(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(["<pad>", "a", "b"])}))
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", model_max_length=9)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": 3, "max_position_embeddings": 5, "projection_size": 16, "pad_token_id": 0}
    config = SiglipConfig(text_config=text, vision_config=small | {"image_size": 8, "patch_size": 4})
    model = SiglipModel(config).eval()
    model.save_pretrained(tmp_path)
    SiglipProcessor(SiglipImageProcessor(size={"height": 8, "width": 8}), tokenizer).save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.get_text_features(input_ids=torch.tensor([[1, 0, 0, 0, 0], [1, 2, 0, 0, 0]])).pooler_output
    found = ImageEncoder(str(tmp_path)).encode_texts(["a", "a b"])
    torch.testing.assert_close(found, expected)


def test_invalid_searches_are_rejected(index, digits):
    with pytest.raises(ValueError, match="k must be from 1 to the number of references, 7; got 8"):
        index.search(digits[9], 8, **QUIET)
    with pytest.raises(ValueError, match="embeds no texts; search with images"):
        index.search_texts(["a digit"])


def test_other_folders_damaged_files_and_other_models_are_named(index, model, save_model, tmp_path):
    folder = tmp_path / "index"
    index.save(folder)
    with pytest.raises(ValueError, match=r"is of another model than .*other"):
        ImageIndex.load(folder, save_model(tmp_path / "other", seed=1))
    for none in (model, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=r"there is no .*index.json; build an index"):
            ImageIndex.load(none)
    with pytest.raises(FileExistsError, match="is not part of an index"):
        index.save(model)
    for name in ("images.parquet", "embeddings.safetensors", "index.json", "manifest.json"):
        copy = shutil.copytree(folder, tmp_path / name)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"the index .* is damaged: {name}"):
            ImageIndex.load(copy)


def test_a_missing_image_is_named(index, photos):
    (photos / "test_6.png").unlink()
    with pytest.raises((OSError, ValueError), match=r"test_6.png"):
        index.open_image(6)


def test_the_weights_and_not_the_name_identify_the_model(index, model, tmp_path):
    index.save(tmp_path / "index")
    moved = shutil.copytree(model, tmp_path / "moved")
    assert len(ImageIndex.load(tmp_path / "index", str(moved))) == 7
    assert json.loads((tmp_path / "index" / "index.json").read_text())["model"] == model


def test_the_error_for_a_model_that_was_moved_names_the_option(save_model, photos, tmp_path):
    ImageIndex.build(str(save_model(tmp_path / "gone")), photos, **QUIET).save(tmp_path / "index")
    (tmp_path / "gone").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"no folder or file .*gone.* was moved, name its folder"):
        ImageIndex.load(tmp_path / "index")


def test_an_index_finds_its_model_from_another_working_directory(save_model, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ImageIndex.build(save_model("model"), photos, **QUIET).save("index")
    monkeypatch.chdir(photos)
    assert ImageIndex.load(tmp_path / "index").encoder.name == str(tmp_path / "model")


def test_arrays_are_an_error_that_names_the_search_of_embeddings(encoder):
    for images in (torch.zeros(3, 4), [torch.zeros(4)]):
        with pytest.raises(TypeError, match=r"got an array.*hf_sphere.metrics.NeighborSearch"):
            ImageIndex.build(encoder, images, **QUIET)


def test_an_index_is_shown_without_its_images(index, model):
    assert repr(index) == f"ImageIndex(7 images, model {model!r})"


def test_predicted_classes_are_marked_on_request(index):
    assert index.classes(mark="?")[5:] == ["odd", index.images["prediction"][6] + "?"]


def test_a_path_identifies_an_image(index, photos, digits):
    index.add(digits[8], **QUIET)
    assert [index.path(row) for row in (3, 7)] == [str(photos / "odd" / "test_3.png"), "image 0"]


def test_a_model_such_as_clip_is_searched_by_text(clip, photos, digits):
    index = ImageIndex.build(clip, photos, **QUIET)
    found = index.search_texts(["a b", "b"], 7)
    model, processor = index.encoder.model, clip_processor(clip)
    with torch.no_grad():
        texts = model.get_text_features(**processor.tokenizer(["a b", "b"], padding=True, return_tensors="pt"))
        pixels = processor.image_processor([image.convert("RGB") for image in digits[:7]], return_tensors="pt")
        images = model.get_image_features(**pixels)
    similarities = torch.nn.functional.cosine_similarity(
        texts.pooler_output[:, None], images.pooler_output[None], dim=2
    ).double()
    torch.testing.assert_close(found.distances, 1 - similarities.gather(1, found.rows), atol=1e-5, rtol=1e-4)
    assert found.queries["file"] == ["a b", "b"]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["clip", "model", "encoder", "spherized"])
def test_every_encoder_is_computed_in_float32(kind, half, clip, model, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"image_size": 8, "patch_size": 4}
    saved = {
        "clip": lambda: CLIPModel.from_pretrained(clip),
        "model": lambda: AutoModelForImageClassification.from_pretrained(model),
        "encoder": lambda: ViTModel(ViTConfig(**sizes)),
        "spherized": lambda: SphereViTForImageClassification(SphereViTConfig(**sizes, head="cosine", num_labels=3)),
    }[kind]()
    saved.to(half).save_pretrained(tmp_path)
    if kind in ("clip", "model"):
        AutoProcessor.from_pretrained({"clip": clip, "model": model}[kind]).save_pretrained(tmp_path)
    else:
        ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in ImageEncoder(str(tmp_path)).model.parameters()} == {torch.float32}


def test_an_encoder_of_transformers_is_searched_without_training(photos, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    encoder = ViTModel(ViTConfig(**sizes)).eval()
    encoder.save_pretrained(tmp_path / "vit")
    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    processor.save_pretrained(tmp_path / "vit")
    ImageIndex.build(str(tmp_path / "vit"), photos, **QUIET).save(tmp_path / "index")
    index = ImageIndex.load(tmp_path / "index")
    pixels = processor(index.open_image(0).convert("RGB"), return_tensors="pt")
    with torch.no_grad():
        expected = encoder(**pixels).last_hidden_state[0, 0]
    torch.testing.assert_close(index.embeddings[0], expected, rtol=1e-4, atol=1e-4)


def test_a_spherized_encoder_with_a_head_is_indexed_with_it(photos, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = SphereViTConfig(**sizes, image_size=8, patch_size=4, head="spherized", num_labels=3)
    SphereViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
    index = ImageIndex.build(str(tmp_path / "vit"), photos, **QUIET)
    torch.testing.assert_close(index.embeddings.norm(dim=1), torch.full((len(index),), 5.0))  # the head's radius
    assert set(index.images["prediction"]) <= {"LABEL_0", "LABEL_1", "LABEL_2"}


def clip_processor(folder: str):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    """A tiny random CLIP model with a tokenizer of three tokens."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    vocabulary = {token: n for n, token in enumerate(["<|startoftext|>", "<|endoftext|>", "a</w>", "b</w>", "a", "b"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=small | {"vocab_size": 6, "bos_token_id": 0, "eos_token_id": 1},
        vision_config=small | {"image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    CLIPModel(config).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    CLIPProcessor(CLIPImageProcessor(**sizes), tokenizer).save_pretrained(folder)
    return str(folder)
