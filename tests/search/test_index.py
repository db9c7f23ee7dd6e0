import copy
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, Image as ImageFeature
from PIL import Image
from safetensors.torch import save_file
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
from hf_sphere.search import EmbeddingSpace, ImageEncoder, ImageIndex, ImageSource, TextEncoder, neighbor_search
from hf_sphere.utils.files import write_manifest

QUIET = {"progress": False}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VIT = SIZES | {"image_size": 8, "patch_size": 4}
STATE = {"size", "time", "digest", "settings"}


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


def test_an_index_knows_files_classes_and_certainties_and_is_shown_without_its_images(index, model, photos, digits):
    columns = {"id", "file", "row", "source", "label", "prediction", "confidence", "concentration"}
    assert index.images["file"][:2] == ["even/test_0.png", "even/test_1.png"]
    assert {*index.images} == columns | STATE
    assert index.classes()[:6] == ["even"] * 3 + ["odd"] * 3
    assert index.classes()[6] == index.images["prediction"][6]  # it has no class folder
    assert index.classes(mark="?")[5:] == ["odd", index.images["prediction"][6] + "?"]
    assert repr(index) == f"ImageIndex(7 images, model {model!r})"
    assert (index.space.groups, index.space.calibration.num_groups) == (None, 7)
    found = index.search(digits[8], 2, **QUIET)
    assert (found.p_values, found.accepted) == (None, None)
    index.add(digits[8], **QUIET)
    assert [index.path(row) for row in (3, 7)] == [str(photos / "odd" / "test_3.png"), "image 0"]


@pytest.mark.parametrize("head", ["cosine", "softmax", "hyperbolic"])
def test_the_distance_is_that_of_the_head(head, save_model, tmp_path, photos):
    index = ImageIndex.build(save_model(tmp_path / "model", head), photos, **QUIET)
    assert index.space.neighbor_search.distance == index.encoder.model.head.metric()["distance"]
    assert index.search(photos, 1, **QUIET).rows[:, 0].tolist() == list(range(7))


@pytest.mark.parametrize("kind", [None, "torch", "ivf", "hnsw"])
def test_a_saved_index_finds_the_same(kind, encoder, photos, digits, tmp_path):
    built = ImageIndex.build(encoder, photos, kind=kind, **QUIET)
    built.save(tmp_path / "index")
    loaded = ImageIndex.load(tmp_path / "index")
    assert torch.equal(loaded.search(digits[9], 7, **QUIET).rows, built.search(digits[9], 7, **QUIET).rows)
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
    assert loaded.search(digits[8], 2, **QUIET).distances.max() < 1e-9  # the new image, and the same of the dataset
    row = loaded.images["file"].index("test/8")
    assert loaded.open_image(row).convert("L").tobytes() == digits[8].tobytes()


def test_images_in_memory_are_added_though_their_names_are_equal(encoder, digits):
    index = ImageIndex.build(encoder, digits[:2], **QUIET)
    assert index.add(digits[2], **QUIET) == 1
    assert index.add([digits[1], digits[3]], **QUIET) == 2
    assert index.search(digits[2], 1, **QUIET).rows.tolist() == [[2]]


def test_search_within_classes_and_of_constant_images(index, digits):
    assert set(index.search(digits[9], 3, classes=["odd"], **QUIET).rows[0].tolist()) <= {3, 4, 5, 6}
    with pytest.raises(ValueError, match="k must be an integer from 1 to 0; got 1"):
        index.search(digits[9], 1, classes=["cat"], **QUIET)
    with pytest.raises(ValueError, match="classes must be a list of texts"):
        index.search(digits[9], 1, classes="odd", **QUIET)
    found = index.search([Image.new("L", (8, 8), value) for value in (0, 128, 255)], 7, **QUIET)
    assert found.distances.isfinite().all()


def test_without_faiss_the_search_is_exact(encoder, photos, tmp_path, monkeypatch):
    ImageIndex.build(encoder, photos, kind="ivf", **QUIET).save(tmp_path / "index")
    expected = ImageIndex.load(tmp_path / "index", encoder).search(photos, 3, **QUIET)
    monkeypatch.setattr(neighbor_search.importlib.util, "find_spec", lambda name: None)
    loaded = ImageIndex.load(tmp_path / "index", encoder)
    torch.testing.assert_close(loaded.search(photos, 3, **QUIET).distances, expected.distances)
    assert loaded.space.neighbor_search.kind == "torch"


def test_kinds_that_cannot_search_are_refused_before_images_are_embedded(encoder, photos, monkeypatch):
    monkeypatch.setattr(ImageIndex, "add", pytest.fail)
    with monkeypatch.context() as patch:
        patch.setattr(neighbor_search.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[faiss\]'"):
            ImageIndex.build(encoder, photos, kind="hnsw", **QUIET)
    monkeypatch.setattr(encoder, "metric", {"distance": "hyperbolic", "curvature": 1.0})
    with pytest.raises(ValueError, match="FAISS does not support the hyperbolic distance"):
        ImageIndex.build(encoder, photos, kind="flat", **QUIET)


def test_bad_images_are_named_or_skipped(encoder, photos, caplog):
    (photos / "bad.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"bad.png cannot be read as an image.*--skip_invalid"):
        ImageIndex.build(encoder, photos, **QUIET)
    index = ImageIndex.build(encoder, photos, skip_invalid=True, **QUIET)
    assert "Skipped: bad.png" in caplog.text
    assert (index.add(photos, skip_invalid=True, **QUIET), len(index)) == (0, 7)
    with pytest.raises(ValueError, match="none of the 1 images can be read"):
        ImageIndex.build(encoder, photos / "bad.png", skip_invalid=True, **QUIET)


def test_transparent_parts_have_the_color_of_the_processor(encoder, monkeypatch):
    monkeypatch.setattr(encoder, "colors", (1, [128] * 3))
    drawing, gray = Image.new("LA", (8, 8)), Image.new("L", (8, 8), 128)
    (_, columns), *_ = encoder.encode([drawing, gray], progress=False)
    assert columns["embedding"][0].tolist() == columns["embedding"][1].tolist()


def test_texts_of_siglip_have_the_length_of_its_training(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(["<pad>", "a", "b"])}))
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", model_max_length=9)
    text = SIZES | {"vocab_size": 3, "max_position_embeddings": 5, "projection_size": 16, "pad_token_id": 0}
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=VIT)).eval()
    model.save_pretrained(tmp_path)
    SiglipProcessor(SiglipImageProcessor(size={"height": 8, "width": 8}), tokenizer).save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.get_text_features(input_ids=torch.tensor([[1, 0, 0, 0, 0], [1, 2, 0, 0, 0]])).pooler_output
    found = ImageEncoder(str(tmp_path)).encode_texts(["a", "a b"])
    torch.testing.assert_close(found, expected)


def test_other_folders_damaged_files_and_other_models_are_named(index, model, save_model, tmp_path):
    folder = tmp_path / "index"
    index.save(folder)
    with pytest.raises(ValueError, match=r"is of another model than .*other"):
        ImageIndex.load(folder, save_model(tmp_path / "other", seed=1))
    for none in (model, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=r"index.json"):
            ImageIndex.load(none)
    with pytest.raises(FileExistsError, match="is not replaced: it has other files, such as"):
        index.save(model)
    for name in ("images.parquet", "embeddings.safetensors", "index.json", "manifest.json"):
        copy = shutil.copytree(folder, tmp_path / name)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.* is damaged|is damaged: {name}"):
            ImageIndex.load(copy)


def test_a_crafted_index_with_columns_of_other_rows_is_an_error(index, tmp_path):
    index.save(tmp_path / "index")
    save_file({"embeddings": torch.zeros(3, 6)}, tmp_path / "index" / "embeddings.safetensors")
    write_manifest(tmp_path / "index")
    with pytest.raises(ValueError, match="has 7 rows for 3 embeddings"):
        ImageIndex.load(tmp_path / "index", index.encoder)


@pytest.mark.parametrize("source", ["folder", "files", "link", "dataset"])
def test_an_index_opens_no_other_picture_than_the_one_that_was_indexed(source, index, photos, digits, tmp_path):
    secret = tmp_path / "private" / "secret.png"
    secret.parent.mkdir()
    digits[9].save(secret)
    index.save(tmp_path / "index")
    name, file, split = str(secret.parent), "secret.png", None
    if source == "files":
        name, file = "", str(secret)
    elif source == "link":
        (photos / "secret.png").symlink_to(secret)
        name = str(photos)
    elif source == "dataset":
        name, split = str(tmp_path / "tables"), "train"
        Path(name).mkdir()
        pq.write_table(pa.table({"image": [{"bytes": None, "path": str(secret)}] * 9}), Path(name, "train.parquet"))
    for digest in (index.images["digest"], [None] * 7):
        about = tmp_path / "index" / "index.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | {"sources": [[name, split]]}))
        table = pq.read_table(about.with_name("images.parquet")).to_pydict() | {"file": [file] * 7, "digest": digest}
        pq.write_table(pa.table(table), about.with_name("images.parquet"))
        write_manifest(about.parent)
        with pytest.raises((ValueError, OSError), match=r"secret.png cannot be opened: .*(add it again|outside it)"):
            ImageIndex.load(tmp_path / "index", index.encoder).open_image(0)


# Changes


def change_preprocessing(photos: Path, model: Path) -> None:
    file = model / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.3]}))


def change_classes(photos: Path, model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": {"0": "straight", "1": "crooked"}}))


def overwrite(photos: Path, model: Path) -> None:
    Image.effect_noise((8, 8), 90).save(photos / "even" / "test_0.png")


def remove(photos: Path, model: Path) -> None:
    (photos / "even" / "test_0.png").unlink()


CHANGES = [
    (change_preprocessing, "the preprocessing of the model changed after 7 images were embedded", 7),
    (change_classes, "the class names of the model changed after 7 images were embedded", 7),
    (overwrite, "1 images have another size or time, such as .*test_0.png", 1),
    (remove, "1 images are missing, such as .*test_0.png", 0),
]


@pytest.mark.parametrize(("change", "message", "embedded"), CHANGES, ids=[change.__name__ for change, _, _ in CHANGES])
def test_changes_are_told_once_and_what_they_concern_is_embedded_again(
    change, message, embedded, save_model, photos, tmp_path, caplog, monkeypatch
):
    model = save_model(tmp_path / "model")
    ImageIndex.build(model, photos, **QUIET).save(tmp_path / "index")
    assert ImageIndex.load(tmp_path / "index").changes() == []
    caplog.clear()
    change(photos, tmp_path / "model")
    index = ImageIndex.load(tmp_path / "index")
    (text,) = caplog.messages
    assert re.search(f"^The index .*index is not up to date: {message}", text)
    rows: list[int] = []
    embed = index.encoder._embed
    monkeypatch.setattr(index.encoder, "_embed", lambda names, **inputs: rows.extend(names) or embed(names, **inputs))
    assert index.add(photos, **QUIET) == 0
    assert len(rows) == embedded
    assert sorted(index.images["id"]) == list(range(7))
    if change is not remove:
        assert index.changes() == []
        fresh = ImageIndex.build(model, photos, **QUIET)
        torch.testing.assert_close(index.embeddings, fresh.embeddings)
        assert index.images == fresh.images


def test_a_touched_image_is_not_embedded_again(index, photos, monkeypatch):
    os.utime(photos / "test_6.png", (1, 1))
    assert len(index.changes()) == 1
    monkeypatch.setattr(index.encoder, "encode", lambda *_, **__: pytest.fail("embedded"))
    assert index.add(photos, **QUIET) == 0
    assert index.changes() == []


def test_an_image_that_replaces_another_one_is_embedded_again_and_the_other_is_missing(index, photos, digits, caplog):
    (photos / "even" / "test_1.png").replace(photos / "even" / "test_0.png")
    assert index.add(photos, **QUIET) == 0
    assert "1 rows of the index are no longer in" in caplog.text
    assert index.images["id"] == list(range(7))
    assert index.changes() == [f"1 images are missing, such as {photos}/even/test_1.png"]
    assert sorted(index.search(digits[1], 2, **QUIET).rows[0].tolist()) == [0, 1]
    assert index.remove(photos / "even" / "test_1.png") == 1
    assert index.changes() == []


def test_moved_images_are_new_ones_and_those_that_are_gone_are_told_until_they_are_removed(index, photos, caplog):
    (photos / "even").rename(photos / "straight")
    assert index.add(photos, **QUIET) == 3
    assert f"3 rows of the index are no longer in {photos}, such as even/test_0.png; remove them." in caplog.text
    assert index.changes() == [f"3 images are missing, such as {photos}/even/test_0.png"]
    assert index.remove(photos / "even") == 3
    assert index.images["id"] == [3, 4, 5, 6, 7, 8, 9]
    assert (index.changes(), index.images["label"][-3:]) == ([], ["straight"] * 3)


@pytest.mark.parametrize("what", ["odd", "odd/test_3.png"])
def test_images_of_a_folder_in_it_are_not_added_again(what, index, photos):
    assert index.add(photos / what, **QUIET) == 0
    assert (len(index), index.changes(), index.open_image(3).size) == (7, [], (8, 8))


def test_a_reordered_data_set_is_noticed_and_embedded_again(encoder, digits, tmp_path, caplog):
    folder = tmp_path / "data"
    folder.mkdir()

    def write(order: list[int]) -> None:
        rows = Dataset.from_dict({"image": [digits[n] for n in order]}).cast_column("image", ImageFeature())
        rows.to_parquet(folder / "train.parquet")

    write([0, 1, 2, 3])
    ImageIndex.build(encoder, folder, **QUIET).save(tmp_path / "index")
    assert ImageIndex.load(tmp_path / "index", encoder).open_image(1).convert("L").tobytes() == digits[1].tobytes()
    assert caplog.messages == []
    write([3, 1, 0, 2])
    index = ImageIndex.load(tmp_path / "index", encoder)
    with pytest.raises(ValueError, match=r"train/0 cannot be opened: .*not the image that was indexed; add it"):
        index.open_image(0)
    assert index.add(folder, **QUIET) == 0
    assert caplog.messages[-1] == "3 rows of the index were embedded again."
    assert index.images["file"] == [f"train/{n}" for n in index.images["id"]] == [f"train/{n}" for n in range(4)]
    for row, number in enumerate([3, 1, 0, 2]):
        assert index.open_image(row).convert("L").tobytes() == digits[number].tobytes()
        assert index.search(digits[number], 1, **QUIET).rows.tolist() == [[row]]


@pytest.mark.parametrize("what", ["even", "even/test_0.png"])
def test_an_image_that_is_embedded_again_without_its_class_folder_keeps_its_class(what, index, photos):
    overwrite(photos, photos)
    assert index.add(photos / what, **QUIET) == 0
    assert index.images["label"][index.images["id"].index(0)] == "even"


def write_metadata(photos: Path, name: str, *, backwards: bool = False) -> None:
    files = sorted((path.relative_to(photos) for path in photos.rglob("*.png")), reverse=backwards)
    (photos / "metadata.csv").write_text("\n".join(["file_name,label", *(f"{file},{name}" for file in files)]))


@pytest.mark.parametrize("change", ["written", "deleted", "other classes", "backwards", "one more"])
def test_an_image_is_indexed_once_with_its_class_whatever_happens_to_the_metadata(
    change, encoder, photos, digits, monkeypatch
):
    for path in photos.rglob("test_*.png"):  # `datasets` takes the name for a split
        path.rename(path.with_name(path.name.removeprefix("test_")))
    if change != "written":
        write_metadata(photos, "first")
    index = ImageIndex.build(encoder, photos, **QUIET)
    ids = dict(zip(index.images["file"], index.images["id"], strict=True))
    if change == "one more":
        digits[8].save(photos / "a.png")
    if change == "deleted":
        (photos / "metadata.csv").unlink()
    else:
        write_metadata(photos, "second", backwards=change == "backwards")
    monkeypatch.setattr(encoder, "_embed", encoder._embed if change == "one more" else pytest.fail)
    assert index.add(photos, **QUIET) == (change == "one more")
    assert ids.items() <= dict(zip(index.images["file"], index.images["id"], strict=True)).items()
    assert len(index) == 7 + (change == "one more")
    assert set(index.images["label"]) == ({"even", "odd", ""} if change == "deleted" else {"second"})
    assert index.changes() == []
    assert all(index.open_image(row).size == (8, 8) for row in range(len(index)))


def test_images_that_left_a_data_set_are_told(encoder, digits, tmp_path, caplog):
    def write(images: list[Image.Image]) -> None:
        rows = Dataset.from_dict({"image": images}).cast_column("image", ImageFeature())
        rows.to_parquet(tmp_path / "train.parquet")

    write(digits[:4])
    index = ImageIndex.build(encoder, tmp_path, **QUIET)
    write(digits[:2])
    assert index.add(tmp_path, **QUIET) == 0
    assert f"2 rows of the index are no longer in {tmp_path}, such as train/2; remove them." in caplog.text


# Identities and removal


@pytest.mark.parametrize("what", ["test_6.png", "photos/test_6.png", "photos/odd", "absolute", "deleted"])
def test_images_are_removed_by_name_folder_and_source(what, index, photos, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    index.add("digits", **QUIET)
    row = index.images["file"].index("test/7")
    number = index.images["id"][row]
    given = {"absolute": str(photos), "deleted": "photos"}.get(what, what)
    if what == "deleted":
        shutil.rmtree(photos)
    removed = index.remove(given)
    assert removed == {"photos/odd": 3, "absolute": 7, "deleted": 7}.get(what, 1)
    row = index.images["id"].index(number)
    assert index.search(digits[7], 1, **QUIET).rows.tolist() == [[row]]
    assert index.open_image(row).convert("L").tobytes() == digits[7].tobytes()
    assert len(index.sources) == (1 if removed == 7 else 2)


def test_images_are_removed_by_id_and_identities_are_not_given_twice(index, photos, tmp_path):
    assert index.remove("test_6.png") == index.remove(3) == 1
    with pytest.raises(ValueError, match="3 does not name images of the index"):
        index.remove(3)
    index.save(tmp_path / "index")
    index = ImageIndex.load(tmp_path / "index", index.encoder)
    assert index.add(photos, **QUIET) == 2
    assert index.images["id"] == [0, 1, 2, 4, 5, 7, 8]


def test_removals_that_name_nothing_or_everything_are_errors(index, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "copy")
    index.add(tmp_path / "copy", **QUIET)
    for what, message in {
        "cat.png": "there is no such image, folder or dataset",
        "test_6.png": r"(photos|copy)/test_6.png, .*(copy|photos)/test_6.png",
        str(tmp_path): "names all images of the index; remove its folder instead",
    }.items():
        with pytest.raises(ValueError, match=message):
            index.remove(what)
    assert len(index) == 14


# Several processes


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_a_reader_keeps_its_version_while_the_index_is_extended(kind, encoder, photos, digits, tmp_path):
    ImageIndex.build(encoder, photos, kind=kind, **QUIET).save(tmp_path / "index")
    reader, writer = (ImageIndex.load(tmp_path / "index", encoder) for _ in range(2))
    before = reader.search(digits[9], 7, **QUIET)
    writer.add("digits", **QUIET)
    writer.remove(photos / "odd")
    writer.save(tmp_path / "index")
    after = reader.search(digits[9], 7, **QUIET)
    assert torch.equal(after.rows, before.rows)
    assert torch.equal(after.distances, before.distances)
    assert reader.open_image(3).convert("L").tobytes() == digits[3].tobytes()


def test_the_weights_and_not_the_name_identify_the_model(index, model, tmp_path):
    index.save(tmp_path / "index")
    moved = shutil.copytree(model, tmp_path / "moved")
    assert len(ImageIndex.load(tmp_path / "index", str(moved))) == 7
    assert json.loads((tmp_path / "index" / "index.json").read_text())["model"] == model


def test_an_index_finds_its_model_from_another_working_directory(save_model, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ImageIndex.build(save_model("model"), photos, **QUIET).save("index")
    monkeypatch.chdir(photos)
    assert ImageIndex.load(tmp_path / "index").encoder.name == str(tmp_path / "model")


def test_a_model_such_as_clip_is_searched_by_text(clip, photos, digits):
    index = ImageIndex.build(clip, photos, **QUIET)
    found = index.search_texts(["a b", "b"], 7)
    model, processor = index.encoder.model, AutoProcessor.from_pretrained(clip)
    with torch.no_grad():
        texts = model.get_text_features(**processor.tokenizer(["a b", "b"], padding=True, return_tensors="pt"))
        pixels = processor.image_processor([image.convert("RGB") for image in digits[:7]], return_tensors="pt")
        images = model.get_image_features(**pixels)
    texts, images = texts.pooler_output.double()[:, None], images.pooler_output.double()
    similarities = torch.nn.functional.cosine_similarity(texts, images, dim=2)
    torch.testing.assert_close(found.distances, 1 - similarities.gather(1, found.rows), atol=1e-5, rtol=1e-4)
    assert found.queries["file"] == ["a b", "b"]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["clip", "model", "encoder", "spherized"])
def test_every_encoder_is_computed_in_float32(kind, half, clip, model, tmp_path):
    saved = {
        "clip": lambda: CLIPModel.from_pretrained(clip),
        "model": lambda: AutoModelForImageClassification.from_pretrained(model),
        "encoder": lambda: ViTModel(ViTConfig(**VIT)),
        "spherized": lambda: SphereViTForImageClassification(SphereViTConfig(**VIT, head="cosine", num_labels=3)),
    }[kind]()
    saved.to(half).save_pretrained(tmp_path)
    if kind in ("clip", "model"):
        AutoProcessor.from_pretrained({"clip": clip, "model": model}[kind]).save_pretrained(tmp_path)
    else:
        ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in ImageEncoder(str(tmp_path)).model.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    """A tiny random CLIP model with a tokenizer of three tokens."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    vocabulary = {token: n for n, token in enumerate(["<|startoftext|>", "<|endoftext|>", "a</w>", "b</w>", "a", "b"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    text = SIZES | {"vocab_size": 6, "bos_token_id": 0, "eos_token_id": 1}
    CLIPModel(CLIPConfig(text_config=text, vision_config=VIT, projection_dim=8)).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    CLIPProcessor(CLIPImageProcessor(**sizes), tokenizer).save_pretrained(folder)
    return str(folder)


# Groups, calibration and levels


def build_digits(encoder, **options: Any) -> ImageIndex:
    return ImageIndex.build(encoder, ImageSource.of("digits", "train"), **QUIET, batch_size=500, **options)


def p_values(index: ImageIndex, count: int = 20) -> torch.Tensor:
    """The p-values of two neighbors of digits that are not in the index."""
    return index.search([ImageSource.of("digits").open(n) for n in range(count)], 2, false_accept=0.9, **QUIET).p_values


@pytest.mark.parametrize("kind", ["label", "column", "names"])
def test_groups_are_what_was_asked_for(kind, encoder, photos, digits):
    rows = Dataset.from_dict({"image": digits[:4], "person": ["ann", "bob", "ann", "bob"]})
    images, groups, expected = {
        "label": (photos / "even", "label", ["even"] * 3),
        "column": (rows.cast_column("image", ImageFeature()), "person", rows["person"][:]),
        "names": (digits[:3], [7, 8, 7], [7, 8, 7]),
    }[kind]
    if kind == "label":
        images = photos
        (photos / "test_6.png").unlink()
        expected = ["even"] * 3 + ["odd"] * 3
    index = ImageIndex.build(encoder, images, groups=groups, **QUIET)
    assert index.space.groups == index.images["group"] == expected


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("article", "no column 'article' for groups: .*; name a column, or give one name per row"),
        ("label", "groups must have a value in each of the 7 rows"),  # one image is in no class folder
        (["a"] * 6, "groups must have one name per row, 7; got 6"),
        (["a"] * 6 + [None], "groups must be all texts or all integers; got NoneType, str"),
    ],
)
def test_groups_that_are_not_there_are_an_error_before_the_work(groups, message, encoder, photos, monkeypatch):
    monkeypatch.setattr(encoder, "encode", lambda *_, **__: pytest.fail("embedded"))
    with pytest.raises((ValueError, TypeError), match=message):
        ImageIndex.build(encoder, photos, groups=groups, **QUIET)


def test_images_that_are_added_have_groups_too(encoder, digits, photos):
    index = ImageIndex.build(encoder, digits[:3], groups=["a", "b", "a"], **QUIET)
    index.add(digits[3:5], ["b", "c"], **QUIET)
    assert index.space.groups == ["a", "b", "a", "b", "c"]
    with pytest.raises(ValueError, match="the index has no groups; leave out groups"):
        ImageIndex.build(encoder, digits[:3], **QUIET).add(digits[4], ["a"], **QUIET)


@pytest.mark.parametrize(("score", "expected"), [("auto", "margin"), ("cosine", "cosine")])
def test_p_values_are_those_of_a_space_of_the_embeddings(score, expected, encoder):
    index = build_digits(encoder, groups="label", score=score)
    space = EmbeddingSpace.fit(index.embeddings, index.images["group"], score=score)
    assert index.space.score == space.score == expected
    images = ImageSource.of("digits")
    queries = torch.cat([columns["embedding"] for _, columns in encoder.encode(images, range(20), **QUIET)])
    torch.testing.assert_close(p_values(index), space.search(queries, 2, false_accept=0.9).p_values)
    found = index.search(images, 1, false_accept=0.5, **QUIET)
    assert torch.equal(found.accepted, found.p_values <= 0.5)
    by_distance = index.search(images, 3, **QUIET)
    assert (by_distance.measure, by_distance.p_values) == ("cosine", None)
    assert torch.equal(by_distance.distances, 1 - by_distance.scores)


def test_a_search_among_classes_accepts_no_more_than_among_all(encoder):
    index = build_digits(encoder)
    images = ImageSource.of("digits")
    best = index.search(images, 1, false_accept=0.9, **QUIET).p_values
    of_class = index.search(images, 1, classes=["3", "5"], false_accept=0.9, **QUIET).p_values
    assert (of_class >= best).all()


@pytest.mark.parametrize(("is_separate", "classes"), [(False, None), (True, None), (True, ["3", "5"])])
def test_a_search_with_a_level_searches_the_embeddings_once(encoder, monkeypatch, is_separate, classes):
    index, images = build_digits(encoder), ImageSource.of("digits")
    if is_separate:
        index.calibrate(images, **QUIET)
    expected, counts = index.search(images, 3, classes=classes, **QUIET), []
    search = neighbor_search.NeighborSearch.find
    monkeypatch.setattr(neighbor_search.NeighborSearch, "find", lambda *args: counts.append(args[2]) or search(*args))
    found = index.search(images, 3, classes=classes, false_accept=0.9, **QUIET)
    assert (len(counts), found.rows.tolist()) == (1, expected.rows.tolist())


@pytest.mark.parametrize("calibration", ["rows", "groups", "separate"])
@pytest.mark.parametrize("kind", [None, "ivf"])
def test_a_saved_index_has_the_same_p_values(kind, calibration, encoder, tmp_path):
    index = build_digits(encoder, groups="label" if calibration == "groups" else None, kind=kind)
    if calibration == "separate":
        index.calibrate("digits", "label", **QUIET)
    expected = p_values(index)
    index.save(tmp_path / "index")
    loaded = ImageIndex.load(tmp_path / "index", encoder)
    assert loaded.space._is_current
    assert torch.equal(p_values(loaded), expected)
    assert (loaded.space.groups, loaded.groups) == (index.space.groups, index.groups)
    assert repr(loaded.space) == repr(index.space)


@pytest.mark.parametrize("change", [overwrite, remove])
def test_the_calibration_is_that_of_the_changed_images(change, encoder, photos, tmp_path):
    (photos / "test_6.png").unlink()
    ImageIndex.build(encoder, photos, groups="label", **QUIET).save(tmp_path / "index")
    index = ImageIndex.load(tmp_path / "index", encoder)
    change(photos, photos)
    index.add(photos, **QUIET)
    if change is remove:
        index.remove(0)
    fresh = ImageIndex.build(encoder, photos, groups="label", **QUIET)
    assert sorted(index.space.groups) == sorted(fresh.space.groups)
    by_score = [sorted(each.space.calibration.scores[:, 0].tolist()) for each in (index, fresh)]
    assert by_score[0] == pytest.approx(by_score[1], abs=1e-6)


def test_a_group_of_the_calibration_images_is_not_added(encoder, digits):
    index = ImageIndex.build(encoder, digits[:2], groups=["ann", "bob"], **QUIET)
    index.calibrate(digits[2:4], ["eve", "joe"], **QUIET)
    with pytest.raises(ValueError, match="groups of calibration queries, such as 'eve'"):
        index.add(digits[4:6], ["eve", "ann"], **QUIET)
    assert (len(index), index.images["group"]) == (2, ["ann", "bob"])


def test_calibration_images_that_are_added_are_counted(encoder, digits, caplog):
    index = ImageIndex.build(encoder, digits[:2], **QUIET)
    index.calibrate(digits[2:4], **QUIET)
    index.add(digits[3:6], **QUIET)
    assert "1 of 2 calibration queries are rows of the space: 1. " in caplog.text


def test_bad_input_is_refused(index, digits, photos):
    with pytest.raises(ValueError, match="embeds no texts; search with images"):
        index.search_texts(["a digit"])
    for k, level in ((8, None), (0, 0.5), (-1, 0.5), (10_000, 0.5)):
        with pytest.raises(ValueError, match=f"k must be an integer from 1 to 7; got {k}"):
            index.search(digits[8], k, false_accept=level, **QUIET)
    with pytest.raises(ValueError, match="3 of the calibration images are in the index; leave them out"):
        index.calibrate(photos / "even", **QUIET)


def test_texts_have_a_level_by_a_calibration_with_texts(clip, photos, tmp_path):
    index = ImageIndex.build(clip, photos, **QUIET)
    with pytest.raises(ValueError, match=r"with images, whose similarities differ from texts.*calibrate it with texts"):
        index.search_texts(["a"], 1, false_accept=0.5)
    index.calibrate(ImageSource.of(["a", "b", "a b"], content="text"), **QUIET)
    index.save(tmp_path / "index")
    index = ImageIndex.load(tmp_path / "index")
    assert index.search_texts(["a"], 1, false_accept=0.5).p_values.item() >= 0.5  # the calibration has this text too
    with pytest.raises(ValueError, match="calibrated with texts, whose similarities differ from images"):
        index.search(photos, 1, false_accept=0.5, **QUIET)


# Vectors and texts


def test_vectors_that_are_not_unit_are_normalized_once_and_that_is_said(caplog):
    index = ImageIndex.build(None, 3 * torch.randn(5, 4), **QUIET)
    found = index.search(2 * index.embeddings, 1, **QUIET)
    assert found.distances.abs().max() < 1e-6
    assert caplog.text.count("are not unit vectors") == 1
    torch.testing.assert_close(index.embeddings.norm(dim=1), torch.ones(5))


def test_an_index_of_vectors_is_not_one_of_a_model(encoder, tmp_path):
    index = ImageIndex.build(None, torch.randn(5, 4), **QUIET)
    with pytest.raises(AttributeError, match="encode_texts"):
        index.search_texts(["a"])
    with pytest.raises(ValueError, match="the embeddings of the index have 4 dimensions"):
        index.add(torch.randn(2, 3), **QUIET)
    ImageIndex.build(None, torch.randn(5, 4), **QUIET).save(tmp_path / "index")
    with pytest.raises(ValueError, match="is of another model than"):
        ImageIndex.load(tmp_path / "index", encoder)


def test_rows_of_a_file_that_did_not_change_are_not_added_again(tmp_path):
    Dataset.from_dict({"embedding": torch.randn(5, 4).numpy()}).to_parquet(tmp_path / "a.parquet")
    ImageIndex.build(None, tmp_path / "a.parquet", **QUIET).save(tmp_path / "index")
    index = ImageIndex.load(tmp_path / "index")
    assert (index.changes(), index.add(tmp_path / "a.parquet", **QUIET)) == ([], 0)
    Dataset.from_dict({"embedding": torch.randn(6, 4).numpy()}).to_parquet(tmp_path / "a.parquet")
    assert index.add(tmp_path / "a.parquet", **QUIET) == 1
    assert sorted(index.images["id"]) == list(range(6))


def test_rows_that_changed_after_others_were_added_have_their_new_vectors(tmp_path):
    vectors, file = torch.nn.functional.normalize(torch.randn(200, 8)), tmp_path / "a.parquet"

    def write(count):
        Dataset.from_dict({"id": range(count), "vector": vectors[:count].numpy()}).to_parquet(file)

    write(100)
    index = ImageIndex.build(None, file, ids="id", **QUIET)
    write(160)  # into memory with room for more
    index.add(file, check=False, **QUIET)
    vectors[5] *= -1
    write(163)
    index.add(file, check=False, **QUIET)
    torch.testing.assert_close(index.embeddings, vectors[:163])


@pytest.fixture(scope="module")
def text_encoder(tmp_path_factory) -> TextEncoder:
    """A tiny random SentenceTransformer."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("texts"))
    SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=8)]).save(folder)
    return TextEncoder(folder)


WORDS = ["no", "dog", "cat", "bird", "red", "blue", "sees", "eats"]


def test_texts_are_indexed_with_their_groups_and_found(text_encoder, tmp_path):
    rows = [{"text": f"{a} {b} {c}", "who": a} for a in WORDS[1:4] for b in WORDS[6:] for c in WORDS[4:6]]
    ImageIndex.build(text_encoder, (row for row in rows), groups="who", **QUIET).save(tmp_path / "index")
    index = ImageIndex.load(tmp_path / "index")
    assert index.images["text"] == [row["text"] for row in rows]
    found = index.search_texts(["cat eats red"], 1, false_accept=0.9)
    assert index.images["text"][found.rows.item()] == "cat eats red"
    again = index.search(ImageSource.of(["cat eats red"], content="text"), 1, false_accept=0.9, **QUIET)
    assert torch.equal(again.p_values, found.p_values)
    assert index.space.groups == [row["who"] for row in rows]


def test_texts_whose_queries_have_a_prompt_have_no_level_before_they_are_calibrated_by_queries(text_encoder, tmp_path):
    encoder = copy.deepcopy(text_encoder)
    encoder.model.prompts["query"] = "red "
    encoder = TextEncoder(encoder.model)
    texts = [f"{a} {b} {c}" for a in WORDS[1:4] for b in WORDS[6:] for c in WORDS[4:6]]
    index = ImageIndex.build(encoder, texts, **QUIET)
    with pytest.raises(ValueError, match=r"queries in another way than the texts.*hf-sphere index --calibration"):
        index.search_texts(["dog sees"], 1, false_accept=0.5)
    queries = ["blue eats", "sees sees", "bird blue"]
    index.calibrate(queries, **QUIET)
    assert index.search_texts(["dog sees"], 1, false_accept=0.5).p_values.item() >= 0.25
    torch.testing.assert_close(index.space._queries[0], torch.nn.functional.normalize(encoder.encode_texts(queries)))
    index.save(tmp_path / "index")
    encoder.preprocessing = {"other": 1}
    index = ImageIndex.load(tmp_path / "index", encoder)
    with pytest.raises(ValueError, match="preprocessing of the model has changed since the calibration"):
        index.search_texts(["dog sees"], 1, false_accept=0.5)


def test_an_index_of_images_of_another_preprocessing_has_no_level_until_they_are_embedded_again(encoder, digits):
    index, encoder = build_digits(encoder), copy.copy(encoder)
    index.encoder, encoder.preprocessing = encoder, encoder.preprocessing | {"other": 1}
    with pytest.raises(ValueError, match="preprocessing of the model has changed since"):
        index.search(digits[:1], 1, false_accept=0.9, **QUIET)


def test_empty_texts_of_a_file_are_left_out(text_encoder, tmp_path, caplog):
    (tmp_path / "a.txt").write_text("dog\n\ncat\n  \nbird\n")
    index = ImageIndex.build(text_encoder, tmp_path / "a.txt", **QUIET)
    assert index.images["file"] == ["train/0", "train/2", "train/4"]
    assert "2 of 5 texts are empty, and are left out" in caplog.text


@pytest.mark.parametrize(("groups", "message"), [([1, 2], "all texts or all integers"), (None, "one name per row")])
def test_groups_of_another_type_leave_an_index_as_it_was(groups, message):
    index = ImageIndex.build(None, torch.eye(4), groups=["a", "b"] * 2, **QUIET)
    with pytest.raises((ValueError, TypeError), match=message):
        index.add(torch.eye(4)[:2], groups, **QUIET)
    assert (len(index), len(index.images["id"])) == (4, 4)


def test_groups_that_are_no_names_and_a_calibration_without_them_are_errors_before_the_work(monkeypatch):
    monkeypatch.setattr("hf_sphere.search.encoder.VectorEncoder.encode", lambda *_, **__: pytest.fail("embedded"))
    rows = [{"embedding": [1.0, float(n)], "who": n, "size": n / 2} for n in range(4)]
    with pytest.raises(ValueError, match="all texts or all integers; got float"):
        ImageIndex.build(None, rows, groups="size", **QUIET)
    with pytest.raises(ValueError, match="no column 'who' for groups: the data has none"):
        ImageIndex.build(None, rows, groups="who", calibration=torch.eye(2), **QUIET)


def test_the_space_of_an_index_is_loaded_without_its_model(index, tmp_path):
    index.save(tmp_path / "index")
    space = EmbeddingSpace.load(tmp_path / "index")
    assert torch.equal(space.vectors, index.embeddings)
    with pytest.raises(FileExistsError, match="is an index with a model or sources, which would be lost"):
        space.save(tmp_path / "index")
    assert len(ImageIndex.load(tmp_path / "index")) == len(space)


def test_an_image_of_a_column_that_was_named_is_opened(encoder, digits, tmp_path):
    rows = Dataset.from_dict({"front": digits[:3], "back": digits[3:6]})
    for column in rows.column_names:
        rows = rows.cast_column(column, ImageFeature())
    rows.to_parquet(tmp_path / "pairs.parquet")
    source = ImageSource.of(tmp_path / "pairs.parquet", column="back")
    ImageIndex.build(encoder, source, **QUIET).save(tmp_path / "index")
    opened = ImageIndex.load(tmp_path / "index", encoder).open_image(1)
    assert opened.convert("L").tobytes() == digits[4].tobytes()
