import base64
import io
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import PIL.ImageFile
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image as ImageFeature, IterableDataset, List, Value
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_sphere.data.decoding import EncodedImages, ImageShape
from hf_sphere.search import ImageEncoder, ImageIndex, ImageSource, read_vectors


def test_a_folder_has_all_its_image_files_with_their_class_folders(photos):
    (photos / ".hidden").mkdir()
    Image.new("L", (2, 2)).save(photos / ".hidden" / "a.png")
    source = ImageSource.of(photos)
    assert source.names == [f"{'even/' * (n < 3)}{'odd/' * (2 < n < 6)}test_{n}.png" for n in range(7)]
    assert source.labels == ["even"] * 3 + ["odd"] * 3 + [""]
    assert (source.name, source.split, len(source)) == (str(photos), None, 7)


def test_a_data_set_has_its_split_rows_and_classes():
    source = ImageSource.of("digits")
    assert (source.name, source.split) == ("digits", "test")
    assert source.names[:2] == ["test/0", "test/1"]
    assert source.labels[:3] == ["5", "0", "9"]
    assert len(ImageSource.of("digits", "train")) > len(source)


def test_the_class_is_the_folder_of_the_file_as_in_training(photos):
    source = ImageSource.of(photos.parent)
    assert source.labels == ["even"] * 3 + ["odd"] * 3 + ["photos"]
    with pytest.raises(ValueError, match="without splits; leave out 'even'"):
        ImageSource.of(photos, "even")
    with pytest.raises(ValueError, match=r"no column 'species' for groups: .* has \['label'\]"):
        source.read_groups("species")


def test_classes_of_a_metadata_file_are_those_of_training(tmp_path, digits):
    for number, name in enumerate(["six.png", "even/two.png"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        digits[number].save(tmp_path / name)
    labels = {"six.png": "6", "even/two.png": "2"}
    rows = pd.DataFrame(labels.items(), columns=["file_name", "label"])
    for suffix, write in (("csv", rows.to_csv), ("parquet", rows.to_parquet)):
        write(tmp_path / f"metadata.{suffix}", index=False)
        source = ImageSource.of(tmp_path)
        assert dict(zip(source.names, source.labels, strict=True)) == labels
        assert (source.name, source.split) == (str(tmp_path), "all")
        (tmp_path / f"metadata.{suffix}").unlink()
    (tmp_path / "metadata.csv").write_text("title,taken\nA bird,2024\n")
    assert (len(ImageSource.of(tmp_path)), ImageSource.of(tmp_path).split) == (2, None)


def test_a_picture_beside_the_tables_of_a_data_set_is_not_the_data(tmp_path, digits):
    digits[0].save(tmp_path / "logo.png")
    for split in ("train", "test"):
        stored = Dataset.from_dict({"image": digits[:3], "label": ["a", "b", "a"]}).cast_column("image", ImageFeature())
        stored.to_parquet(tmp_path / f"{split}.parquet")
    source = ImageSource.of(tmp_path)
    assert (source.split, source.names, source.labels) == ("test", [f"test/{n}" for n in range(3)], ["a", "b", "a"])


@pytest.mark.parametrize("kind", [Dataset, DatasetDict, IterableDataset])
def test_a_data_set_in_memory_has_its_images_and_classes(kind, digits):
    features = Features({"img": ImageFeature(), "label": ClassLabel(names=["ant", "bee"])})
    data = Dataset.from_dict({"img": digits[:3], "label": [0, 1, 0]}, features)
    data = {DatasetDict: DatasetDict(test=data), IterableDataset: data.to_iterable_dataset()}.get(kind, data)
    source = ImageSource.of(data)
    assert (source.name, source.split) == ("", None)
    assert (source.names, source.labels) == (["image 0", "image 1", "image 2"], ["ant", "bee", "ant"])
    assert [source.open(n, 1).tobytes() for n in range(3)] == [digit.tobytes() for digit in digits[:3]]


def test_files_and_generators_of_images_are_accepted(digits, photos):
    source = ImageSource.of(digit for digit in digits[:3])
    assert [source.open(n, 1).tobytes() for n in range(3)] == [digit.tobytes() for digit in digits[:3]]
    source = ImageSource.of([photos / "test_6.png", digits[2]])
    assert source.names == [str(photos / "test_6.png"), "image 1"]
    assert source.open(1, channels=1).tobytes() == digits[2].tobytes()
    assert len(ImageSource.of(photos / "test_6.png")) == len(ImageSource.of(digits[0])) == 1
    assert ImageSource.of(source) is source


def test_an_opened_photo_has_the_pixels_of_its_file_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.effect_noise((24, 16), 50).convert("RGB").save(tmp_path / "photo.jpg", exif=exif)
    opened = Image.open(io.BytesIO((tmp_path / "photo.jpg").read_bytes()))
    of_file, of_image = ImageSource.of(tmp_path / "photo.jpg"), ImageSource.of(opened)
    assert of_image.open(0).size == (16, 24)
    assert of_image.open(0).tobytes() == of_file.open(0).tobytes()


def test_a_damaged_photo_that_was_opened_is_an_error(tmp_path):
    Image.effect_noise((60, 60), 50).save(tmp_path / "photo.jpg")
    (tmp_path / "photo.jpg").write_bytes((tmp_path / "photo.jpg").read_bytes()[:-99])
    with pytest.raises(OSError, match="truncated"):
        ImageSource.of([Image.open(tmp_path / "photo.jpg")])


def test_an_image_with_a_transparent_palette_keeps_its_transparency():
    image = Image.new("P", (2, 2))
    image.info["transparency"] = 0
    assert ImageSource.of(image).open(0).getpixel((0, 0)) == (255, 255, 255)


def test_a_test_split_without_labels_has_images_without_classes(tmp_path, digits):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["ant", "bee"])})
    Dataset.from_dict({"image": digits[:2], "label": [-1, -1]}, features).to_parquet(tmp_path / "test.parquet")
    assert ImageSource.of(tmp_path).labels == []


def test_images_of_a_data_set_with_equal_file_names_have_names_of_their_own(tmp_path, digits):
    for number, name in enumerate(["a.png", "b.png"]):
        digits[number].save(tmp_path / name)
    stored = [{"bytes": (tmp_path / name).read_bytes(), "path": "0.png"} for name in ("a.png", "b.png")]
    (tmp_path / "parquet").mkdir()
    for path in ("0.png", None):
        stored[1]["path"] = path
        rows = Dataset.from_dict({"image": stored}, Features({"image": ImageFeature()}))
        rows.to_parquet(tmp_path / "parquet" / "test.parquet")
        assert ImageSource.of(tmp_path / "parquet").names == ["test/0", "test/1"]


def animated(path: Path) -> None:
    Image.new("L", (4, 4)).save(path, save_all=True, append_images=[Image.new("L", (4, 4), 255)])


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("empty.png", lambda path: path.write_bytes(b""), "cannot identify image file"),
        ("text.jpg", lambda path: path.write_text("no image"), "cannot identify image file"),
        ("film.gif", animated, "it is animated; save one of its frames"),
        ("scan.tiff", lambda path: Image.new("F", (4, 4)).save(path), "have no known range"),
    ],
)
def test_a_bad_image_is_named(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(ValueError, match=f"^{name} cannot be read as an image: .*{message}"):
        ImageSource.of(tmp_path).open(0)


def test_huge_images_folders_without_images_and_unknown_splits_are_rejected(tmp_path, photos, monkeypatch):
    (tmp_path / "empty").mkdir()
    for images, split, message in (
        (tmp_path / "empty", None, "empty"),
        ("digits", "nonsense", "no split 'nonsense'; the data has train, test"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            ImageSource.of(images, split)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match=r"^even/test_0.png cannot be read as an image: .*decompression bomb"):
        ImageSource.of(photos).open(0)


def test_exhausted_memory_is_not_a_damaged_image(tmp_path, monkeypatch, digits):
    def exhaust(*_: object) -> None:
        raise MemoryError

    digits[0].save(tmp_path / "a.png")
    source = ImageSource.of([tmp_path / "a.png"])
    images = EncodedImages(source.encoded, "image", ImageShape(1, 8, 8))
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", exhaust)
    for use in (lambda: source.open(0), lambda: images.__getitems__([0])):
        with pytest.raises(MemoryError):
            use()


def test_a_model_or_processor_that_cannot_be_is_an_error(save_model, tmp_path):
    folder = Path(save_model(tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    next(value for name, value in weights.items() if name.endswith("weight")).fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="is not finite: the file is damaged, or its training diverged"):
        ImageEncoder(str(folder))


# Texts and vectors

TEXTS = ["a cat", "a dog, red", "a bird"]


def write_rows(path: Path) -> Path:
    rows = Dataset.from_dict({"text": TEXTS, "label": ["x", "y", "x"], "article": [1, 1, 2]})
    if path.suffix == ".txt":
        path.write_text("\n".join(TEXTS))
    else:
        {".parquet": rows.to_parquet, ".csv": rows.to_csv, ".jsonl": rows.to_json}[path.suffix](path)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".txt"])
def test_a_file_of_rows_has_its_texts_and_classes(suffix, tmp_path):
    path = write_rows(tmp_path / f"texts{suffix}")
    source = ImageSource.of(path, content="text")
    assert (source.encoded, source.name, source.split) == (TEXTS, str(path), "train")
    assert source.labels == ([] if suffix == ".txt" else ["x", "y", "x"])
    assert source.names == ["train/0", "train/1", "train/2"]


@pytest.mark.parametrize("kind", ["list", "generator", "mappings", "dataset", "stream"])
def test_texts_in_memory_are_read_in_their_order(kind):
    rows = Dataset.from_dict({"text": TEXTS})
    texts = {
        "list": TEXTS,
        "generator": (text for text in TEXTS),
        "mappings": ({"text": text} for text in TEXTS),
        "dataset": rows,
        "stream": rows.to_iterable_dataset(),
    }[kind]
    source = ImageSource.of(texts, content="text")
    assert (source.encoded, source.names) == (TEXTS, ["text 0", "text 1", "text 2"])


def test_images_of_a_file_of_rows_are_opened_and_groups_are_the_cells_of_a_column(tmp_path, digits):
    rows = Dataset.from_dict({"image": digits[:3]}).cast_column("image", ImageFeature())
    rows.to_parquet(tmp_path / "digits.parquet")
    assert ImageSource.of(tmp_path / "digits.parquet").open(2, 1).tobytes() == digits[2].tobytes()
    assert ImageSource.of(write_rows(tmp_path / "a.csv"), content="text").read_groups("article") == [1, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "txt"}, r"no text column 'txt'; the data has the columns \['text', 'label', 'article'\]"),
        ({"content": "vector"}, r"found no vector column: none of .* is in \['text', .*Name it with --column"),
        ({"content": "vector", "column": "text"}, "column text of .*parquet must be .* texts such as .* need a model"),
        ({"content": "image", "column": "text"}, "column 'text' does not contain images"),
        ({"split": "test"}, "no split 'test'; the data has train"),
    ],
)
def test_other_columns_than_those_of_the_file_are_an_error_that_lists_them(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ImageSource.of(write_rows(tmp_path / "a.parquet"), **{"content": "text", **options})


@pytest.mark.parametrize(
    "labels",
    [Value("float32"), List(Value("int64")), {"a": Value("int64")}, Value("timestamp[s]"), ImageFeature()],
    ids=str,
)
def test_a_label_column_without_classes_has_no_labels(labels, digits):
    cells = {"float32": 0.5, "timestamp[s]": 0}.get(getattr(labels, "dtype", ""), digits[0])
    cells = [1] if isinstance(labels, List) else {"a": 1} if isinstance(labels, dict) else cells
    rows = Dataset.from_dict({"text": ["a"], "label": [cells]}, Features({"text": Value("string"), "label": labels}))
    assert ImageSource.of(rows, content="text").labels == []


@pytest.mark.parametrize("feature", [List(Value("float32")), List(Value("float32"), length=2)], ids=str)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_row_without_a_vector_is_named(feature, missing):
    vectors = [None if row == missing else [1.0, 0.0] for row in range(2)]
    rows = Dataset.from_dict({"vector": vectors}, Features({"vector": feature}))
    with pytest.raises(ValueError, match=f"must be finite and not zero; 1 of 2 are not, the first at index {missing}"):
        ImageIndex.build(None, ImageSource.of(rows, content="vector"))


def encode_base64(vectors: torch.Tensor) -> list[str]:
    return [base64.b64encode(vector.numpy().tobytes()).decode() for vector in vectors]


FORMATS = {
    "bfloat16": lambda v: list(v.bfloat16()),
    "base64": encode_base64,
    "a column of base64": lambda v: Dataset.from_dict({"v": encode_base64(v)})["v"],
    "names like base64": lambda v: pd.DataFrame(v.numpy(), columns=[f"vector{n}A" for n in range(4)]),
    "decimals": lambda v: [[Decimal(number) for number in row] for row in v.tolist()],
}


@pytest.mark.parametrize("convert", FORMATS.values(), ids=FORMATS)
def test_vectors_are_read_in_every_format_of_an_api(convert):
    vectors = torch.randn(5, 4)
    read = read_vectors(convert(vectors))
    assert read.dtype == torch.float32
    torch.testing.assert_close(read, vectors, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("convert", [torch.Tensor.tolist, torch.Tensor.half, encode_base64], ids=["lists", "16", "64"])
def test_vectors_of_a_parquet_file_are_read_in_its_format(convert, tmp_path):
    vectors = torch.randn(5, 4)
    cells = convert(vectors)
    cells = cells.numpy() if isinstance(cells, torch.Tensor) else cells
    Dataset.from_dict({"embedding": cells}).to_parquet(tmp_path / "v.parquet")
    read = ImageSource.of(tmp_path / "v.parquet", content="vector").encoded
    torch.testing.assert_close(read, vectors, rtol=1e-3, atol=1e-3)


def test_one_scale_of_integers_does_not_change_cosines():
    integers = torch.randint(-128, 128, (5, 4), dtype=torch.int8)
    cosines = [torch.nn.functional.normalize(read_vectors(integers, scale=scale)) for scale in (1.0, 0.01)]
    torch.testing.assert_close(*cosines)


def test_quantized_vectors_are_those_of_their_ranges():
    quantization = pytest.importorskip("sentence_transformers.quantization")
    vectors = torch.randn(200, 4) * torch.tensor([1.0, 2.0, 0.1, 5.0]) + 0.3
    ranges = torch.stack([vectors.amin(0), vectors.amax(0)]).numpy()
    integers = quantization.quantize_embeddings(vectors.numpy(), "int8", ranges=ranges)
    scale = (ranges[1] - ranges[0]) / 255
    read = read_vectors(integers, scale=scale, offset=ranges[0] + 128 * scale)
    assert ((read - vectors).abs() <= 1.01 * torch.tensor(scale)).all()


def test_cut_vectors_are_normalized_again():
    vectors = torch.nn.functional.normalize(torch.randn(5, 8))
    cut = read_vectors(vectors, dim=3)
    torch.testing.assert_close(cut, torch.nn.functional.normalize(vectors[:, :3]))


def test_a_file_whose_name_looks_like_a_pattern_is_read(tmp_path):
    assert ImageSource.of(write_rows(tmp_path / "a[1]*?.csv"), content="text").encoded == TEXTS


@pytest.mark.parametrize(
    "groups",
    [
        *(torch.tensor([1, 1, 2]), torch.tensor([1, 1, 2]).numpy(), (1, 1, 2), pa.array([1, 1, 2])),
        *(pa.chunked_array([[1], [1, 2]]), [*pa.array([1, 1, 2])], pd.Series([1, 1, 2], dtype="Int64")),
    ],
)
def test_groups_are_names_of_any_sequence(groups):
    assert ImageSource.of(TEXTS, content="text").read_groups(groups) == [1, 1, 2]


def test_bad_input_is_refused():
    for images in (5, {"image": 1}, b"", [None], np.zeros((2, 2))):
        with pytest.raises(TypeError):
            ImageSource.of(images)
    with pytest.raises(ValueError, match="groups must be all texts or all integers; got list"):
        ImageSource.of(Dataset.from_dict({"text": ["a"], "words": [["a"]]}), content="text").read_groups("words")
    with pytest.raises(AttributeError):
        ImageSource.of(Dataset.from_dict({"text": ["a", None]}), content="text")
    with pytest.raises(ValueError, match="texts must be a list of texts, at least one; got 1"):
        ImageSource.of([1, 2], content="text")
