import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import load_dataset
from PIL import Image

from hf_sphere.data import ImageData, ImageDataOptions, ImageSplit, OpenSetOptions, load_image_data, load_image_split
from hf_sphere.data.published_images import READERS

RECIPE = "prepare"

BROKEN = b"not an image"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty folder for data in its published layout."""
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


@pytest.fixture
def prepare(recipe: ModuleType, source: Path, output: Path) -> Callable[..., None]:
    """Run the recipe on the data in `source`, without checking the published counts."""

    def run(kind: str, *words: str, expect_counts: bool = False) -> None:
        options = ["--source", str(source), "--output", str(output), "--disable_tqdm"]
        recipe.main([kind, *options, "--expect_counts", str(expect_counts), *words])

    return run


@pytest.fixture
def load(output: Path) -> Callable[..., ImageData]:
    """Load the prepared data without normalization."""

    def load_prepared(
        task: str = "classification", size: int | None = None, train_classes: int | None = None
    ) -> ImageData:
        targets = None if train_classes is None else OpenSetOptions(train_classes)
        return load_image_data(raw(output, size), task, targets=targets, progress=False)

    return load_prepared


@pytest.fixture
def load_split(output: Path) -> Callable[[str], ImageSplit]:
    """Load a split of the prepared data without normalization, as images of 8 x 8."""
    return lambda split: load_image_split(raw(output, 8), split)


def raw(output: Path, size: int | None) -> ImageDataOptions:
    options = {"image_mean": [0.0], "image_std": [1.0], "cache_dir": str(output.parent / "decoded")}
    return ImageDataOptions(
        str(output), image_size=None if size is None else [size], dataloader_num_workers=0, **options
    )


def put(path: Path, gray: int, size: tuple[int, int] = (8, 8)) -> bytes:
    """Save a constant gray image as JPEG or PNG, depending on its suffix, and return its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    Image.new("L", size, gray).save(buffer, "PNG" if path.suffix.lower() == ".png" else "JPEG")
    path.write_bytes(buffer.getvalue())
    return buffer.getvalue()


def seen(batches) -> list[tuple[int, int]]:
    """Original gray value and label of each image."""
    pairs = []
    for batch in batches.epoch():
        grays = (batch["pixel_values"].mean((1, 2, 3)) * 255).round().int().tolist()
        pairs += zip(grays, batch["labels"].tolist(), strict=True)
    return pairs


def put_imagenet(source: Path, *, train: int = 2, test: int = 1, classes: tuple[str, ...] = ("n01", "n02")) -> None:
    """The plain layout; gray values are 100 per class plus an image number, counted on in the test split."""
    for label, name in enumerate(classes):
        for number in range(train + test):
            split = "train" if number < train else "test"
            put(source / split / name / f"{number}.png", 100 * label + number)


def put_tiny_imagenet(source: Path) -> None:
    """The layout of Tiny ImageNet, with its unlabeled test images."""
    for label, name in enumerate(("n01", "n02")):
        for number in range(2):
            put(source / "train" / name / "images" / f"{name}_{number}.JPEG", 100 * label + number)
        (source / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t7\t7\n")
    for number, gray in enumerate((102, 2, 3)):
        put(source / "val" / "images" / f"val_{number}.JPEG", gray)
    lines = ["val_0.JPEG\tn02\t0\t0\t7\t7", "val_1.JPEG\tn01\t0\t0\t7\t7", "val_2.JPEG\tn01\t0\t0\t7\t7"]
    (source / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    put(source / "test" / "images" / "test_0.JPEG", 9)


def put_omniart(source: Path, train: list[tuple] | None = None, test: list[tuple] | None = None) -> None:
    """Rows of (omni_id, creation_year, school); the gray value of an image is its identifier."""
    rows = {
        "train": train or [(1, 1650, "dutch"), (2, "1500.5", "italian"), (3, 1700, "dutch")],
        "test": test or [(11, 1600, "italian"), (12, 1666, "dutch")],
    }
    for split, artworks in rows.items():
        lines = ["omni_id,artist,creation_year,century,school"]
        lines += [f'{number},"Last, First",{year},17,{school}' for number, year, school in artworks]
        (source / f"{split}_complete.csv").write_text("\n".join(lines) + "\n")
        for number, _, _ in artworks:
            put(source / split / f"{number}.jpg", number)


def put_cub(source: Path) -> None:
    """Three images of birds, two of them for training."""
    files = {1: "001.Black_footed_Albatross/a.jpg", 2: "002.Blue_Jay/b.jpg", 3: "002.Blue_Jay/c.jpg"}
    for number, file in files.items():
        put(source / "images" / file, number)
    (source / "images.txt").write_text("".join(f"{number} {file}\n" for number, file in files.items()))
    (source / "image_class_labels.txt").write_text("1 1\n2 2\n3 2\n")
    (source / "train_test_split.txt").write_text("1 1\n2 1\n3 0\n")
    (source / "classes.txt").write_text("1 001.Black_footed_Albatross\n2 002.Blue_Jay\n")


PRODUCTS = {
    "train": {1: "3 1 bicycle_final/a_0.JPG", 2: "3 1 bicycle_final/a_1.JPG", 3: "1 4 coffee_maker_final/b_0.JPG"},
    "test": {4: "12 1 bicycle_final/c_0.JPG", 5: "9 4 coffee_maker_final/d_0.JPG", 6: "9 4 coffee_maker_final/d_1.JPG"},
}
"""Entries of the lists by gray value: class, super class and path."""


def put_products(source: Path) -> None:
    """Six photographs of four products."""
    for split, rows in PRODUCTS.items():
        lines = ["image_id class_id super_class_id path", *(f"{number} {row}" for number, row in rows.items())]
        (source / f"Ebay_{split}.txt").write_text("\n".join(lines) + "\n")
        for number, row in rows.items():
            put(source / row.split()[-1], number, size=(10 + number, 9))


BIRDS = {
    "train": {1: "wren/a.jpg,Wren", 2: "wren/b.jpg,Wren", 3: "tit/a.jpg,Great tit"},
    "val": {4: "crow.png,Crow"},
    "test": {5: "jay_0.jpg,Jay", 6: "jay_1.jpg,Jay", 7: "kite.jpg,Kite"},
}
"""The lines of each list by the gray value of the image."""


def put_class_split(source: Path, folder: str = "", **changed: dict[int, str]) -> None:
    """Seven photographs of five birds, with the lists next to the images or in a folder."""
    (source / folder).mkdir(exist_ok=True)
    for split, rows in (BIRDS | changed).items():
        (source / folder / f"{split}.csv").write_text("\n".join(["filename,label", *rows.values()]) + "\n")
        for number, row in rows.items():
            put(source / "images" / row.split(",")[0], number)


LAYOUTS = {
    "imagenet200": put_imagenet,
    "tiny_imagenet": put_tiny_imagenet,
    "omniart": put_omniart,
    "cub200": put_cub,
    "sop": put_products,
    "class_split": put_class_split,
}

PRODUCT_LIST, VALIDATION = "image_id class_id super_class_id path\n", "val/val_annotations.txt"

FIRST = "--skip_missing skips them. First: "
CELL = f"rows have an empty, invalid or unknown cell, or no readable image; {FIRST}"

DAMAGED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "imagenet200": [
        ({"test/n03/0.png": 0}, f"1 of 7 {CELL}split test, path .*n03"),
        ({"train/n01": None, "train/n02": None}, f"4 of 4|2 of 2 {CELL}"),
        ({"test": None}, "no image of the test split in .*source; is it the right"),
        ({"test/n02/2.png": BROKEN}, rf"1 of 6 {CELL}split test, path .*2\.png"),
    ],
    "tiny_imagenet": [
        ({"val/images/val_1.JPEG": None}, rf"1 of 7 {CELL}split test, path .*val_1\.JPEG"),
        ({VALIDATION: "val_0.JPEG\tn02\nval_1 n01\n"}, f"{CELL}split test, path .*val_1 n01, label nan"),
    ],
    "omniart": [
        *[
            ({"test_complete.csv": (column, "other")}, rf"columns expected but not found: \['{column}'\]")
            for column in ("omni_id", "creation_year", "school")
        ],
        ({"test_complete.csv": None}, "No such file or directory: '.*test_complete.csv'"),
        ({"train/2.jpg": None}, r"2 of 5 rows .*2\.jpg, label nan"),  # the only one of its class
        ({"test_complete.csv": ("dutch", "flemish")}, rf"{CELL}.*12\.jpg"),
        *[
            ({"train_complete.csv": change}, rf"{CELL}split train, .*2\.jpg")
            for change in (("1500.5", ""), ("1500.5", "about 1600"), ("1500.5", "nan"), ("italian", ""))
        ],
    ],
    "cub200": [
        ({"images.txt": None}, r"No such file or directory: '.*/images\.txt'"),
        *[
            ({f"{name}.txt": "1 1\n2 1\n"}, rf"1 of 3 {CELL}.*c\.jpg")
            for name in ("image_class_labels", "train_test_split")
        ],
        ({"images/002.Blue_Jay/b.jpg": None}, rf"1 of 3 {CELL}split train, path .*b\.jpg"),
        ({"image_class_labels.txt": "1 1\n2 2\n3 7\n"}, rf"{CELL}split test.*c\.jpg, label nan"),
        ({"train_test_split.txt": "1 1\n2 1\n3 x\n"}, rf"{CELL}split nan.*c\.jpg"),
        ({"images/002.Blue_Jay/c.jpg": BROKEN}, rf"{CELL}.*c\.jpg"),
    ],
    "sop": [
        ({"bicycle_final/c_0.JPG": None}, rf"1 of 6 {CELL}.*c_0\.JPG"),
        ({"Ebay_train.txt": (PRODUCT_LIST, "")}, "columns expected but not found"),
        ({"Ebay_train.txt": ("1 3 1", "1 x 1")}, "invalid literal for int.*'x'"),
        ({"Ebay_train.txt": PRODUCT_LIST}, "found no image of the train split"),
    ],
    "class_split": [
        ({"val.csv": None}, "No such file or directory: '.*val.csv'"),
        ({"val.csv": "crow.png,Crow\n"}, "columns expected but not found"),
        ({"val.csv": (",Crow", "")}, f"{CELL}.*filename crow.png, label ,"),
        ({"val.csv": (",Crow", ",")}, f"{CELL}.*filename crow.png, label ,"),
        ({"images/wren/b.jpg": None}, rf"1 of 7 {CELL}.*b\.jpg"),
        ({"val.csv": (",Crow", ",Wren")}, "1 of the classes are in another split, too"),
    ],
}
"""By layout, changes of its files (None: removed; a pair: one text replaced by another), and messages."""


def change(path: Path, content: Any) -> None:
    if content is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif isinstance(content, int):
        put(path, content)
    elif isinstance(content, tuple):
        path.write_text(path.read_text().replace(*content, 1))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("layout", "changes", "message"), [(layout, *row) for layout, rows in DAMAGED.items() for row in rows]
)
def test_damaged_data_is_an_error_that_names_the_damage_and_writes_nothing(
    layout, changes, message, source, prepare, tmp_path
):
    LAYOUTS[layout](source)
    for name, content in changes.items():
        change(source / name, content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare("imagenet200" if layout == "tiny_imagenet" else layout)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def put_tiny_with_words(source: Path) -> None:
    put_tiny_imagenet(source)
    (source / "words.txt").write_text("n00\tentity\nn02\tgoldfish, Carassius auratus\nn01\ttench\n")


TINY_TRAIN, TINY_TEST = [(0, 0), (1, 0), (100, 1), (101, 1)], [(102, 1), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("kind", "make", "names", "train", "test"),
    [
        ("imagenet200", put_imagenet, ["n01", "n02"], TINY_TRAIN, [(2, 0), (102, 1)]),
        ("imagenet200", put_tiny_imagenet, ["n01", "n02"], TINY_TRAIN, TINY_TEST),
        ("imagenet200", put_tiny_with_words, ["tench", "goldfish, Carassius auratus"], TINY_TRAIN, TINY_TEST),
        ("cub200", put_cub, ["Black footed Albatross", "Blue Jay"], [(1, 0), (2, 1)], [(3, 1)]),
    ],
)
def test_splits_load_with_class_names_and_labels(kind, make, names, train, test, source, prepare, load):
    """The validation images of Tiny ImageNet are its test split; numbers and underscores of birds are left out."""
    make(source)
    prepare(kind)
    data = load()
    assert data.class_names == names
    assert sorted(seen(data.train)) == train
    assert seen(data.evaluation) == test


def test_image_suffixes_are_case_insensitive_and_files_stored_unchanged_with_their_names(source, prepare, load, output):
    put_imagenet(source)
    encoded = put(source / "train" / "n01" / "a.JPG", 30)
    put(source / "train" / "n01" / "b.Jpeg", 40)
    (source / "train" / "n01" / "notes.txt").write_text("no image")
    (source / "train" / "n01" / "._a.JPG").write_bytes(BROKEN)
    put(source / "train" / ".cache" / "c.jpg", 50)
    prepare("imagenet200")
    assert sorted(gray for gray, _ in seen(load().train)) == [0, 1, 30, 40, 100, 101]
    rows = load_dataset(str(output))["train"].cast_column("image", datasets.Image(decode=False))
    assert {"bytes": encoded, "path": "a.JPG"} in rows["image"][:]


class TestOmniart:
    def test_schools_and_years_load_as_two_targets(self, source, prepare, load):
        put_omniart(source)
        prepare("omniart")
        data = load(task="joint")
        assert data.class_names == ["dutch", "italian"]
        assert data.value_range == (1500.5, 1700.0)
        assert seen(data.evaluation) == [(11, 1), (12, 0)]
        (batch,) = data.evaluation.epoch()
        assert torch.equal(batch["regression_labels"], torch.tensor([1600.0, 1666.0]))
        assert load(task="regression").evaluation.labels.tolist() == [1600.0, 1666.0]

    def test_unusable_rows_are_skipped_on_request_and_counted(self, source, prepare, load, capsys):
        train = [(1, 1650, "dutch"), (2, 1500, "italian"), (3, 1700, "dutch"), (4, "", "dutch"), (5, 1620, "dutch")]
        put_omniart(source, train, [(11, 1600, "italian"), (12, 1666, "dutch"), (13, 1500, "flemish")])
        (source / "train" / "3.jpg").unlink()
        (source / "train" / "5.jpg").write_bytes(BROKEN)
        prepare("omniart", "--skip_missing")
        data = load()
        assert sorted(seen(data.train)) == [(1, 0), (2, 1)]
        assert seen(data.evaluation) == [(11, 1), (12, 0)]
        said = capsys.readouterr().out
        for why in (
            "3 rows of the train split that have an empty, invalid or unknown cell, or no readable image.",
            "1 rows of the test split that have an empty, invalid or unknown cell, or no readable image.",
        ):
            assert f"Left out: {why}" in said

    def test_a_school_without_training_images_is_not_a_class(self, source, prepare, load):
        put_omniart(source, test=[(12, 1666, "dutch")])
        (source / "train" / "2.jpg").unlink()
        prepare("omniart", "--skip_missing")
        assert load().class_names == ["dutch"]


class TestProducts:
    def test_lists_load_as_an_open_set_with_numbers_as_class_names(
        self, source, prepare, load, load_split, caplog, output
    ):
        put_products(source)
        prepare("sop")
        data = load(task="retrieval", size=8)
        assert not caplog.records  # shared classes would cause a warning
        assert (data.class_names, data.eval_class_names) == (["1", "3"], ["9", "12"])
        assert sorted(seen(data.train)) == [(1, 1), (2, 1), (3, 0)]
        assert seen(data.evaluation) == [(4, 1), (5, 0), (6, 0)]
        split = load_split("test")
        assert (split.class_names, seen(split.batches)) == (["9", "12"], [(4, 1), (5, 0), (6, 0)])
        with pytest.raises(ValueError, match="label 12 of image 0 in split 'test' is missing or none"):
            load(size=8)
        splits = load_dataset(str(output))
        for split, expected in (("train", [0, 0, 1]), ("test", [0, 1, 1])):
            assert splits[split].features["super_class"].names == ["bicycle", "coffee_maker"]  # their folders
            assert splits[split]["super_class"][:] == expected


class TestClassSplit:
    @pytest.mark.parametrize("folder", ["", "split"])
    def test_three_lists_load_as_splits_with_disjoint_classes_of_any_number(
        self, folder, source, prepare, output, load, load_split, caplog, capsys
    ):
        put_class_split(source, folder)
        prepare("class_split", expect_counts=True)
        assert "Warning" not in capsys.readouterr().out
        expected = {
            "train": (["Great tit", "Wren"], [(1, 1), (2, 1), (3, 0)]),
            "validation": (["Crow"], [(4, 0)]),
            "test": (["Jay", "Kite"], [(5, 0), (6, 0), (7, 1)]),
        }
        assert set(load_dataset(str(output))) == set(expected)
        for split, (names, pairs) in expected.items():
            loaded = load_split(split)
            assert (loaded.class_names, seen(loaded.batches)) == (names, pairs)
        data = load(task="retrieval", size=8)
        assert (data.class_names, data.eval_class_names) == (["Great tit", "Wren"], ["Jay", "Kite"])
        assert not caplog.records  # shared classes would cause a warning


class TestCounts:
    @pytest.mark.parametrize(
        ("kind", "said"),
        [
            ("imagenet200", "200 classes expected, 2 found; 100,000 train images expected, 4 found; 10,000 test "),
            ("omniart", "46 classes expected, 2 found"),
            ("cub200", "5,994 train images expected, 2 found; 5,794 test images expected, 1 found"),
            ("sop", "11,318 train classes expected, 2 found; 11,316 test "),
        ],
    )
    def test_counts_that_differ_from_the_published_ones_are_an_error_that_states_both_or_a_warning(
        self, kind, said, source, prepare, output, capsys
    ):
        LAYOUTS[kind](source)
        with pytest.raises(ValueError, match=f"{said}.*--expect_counts false"):
            prepare(kind, expect_counts=True)
        assert not output.exists()
        prepare(kind)
        assert f"Warning: {said.split(';')[0]}." in capsys.readouterr().out

    def test_unreadable_images_are_not_counted(self, source, prepare, output, monkeypatch):
        put_products(source)
        counts = {"train classes": 2, "test images": 3, "train images": 3}
        monkeypatch.setitem(READERS, "sop", (READERS["sop"][0], counts))
        (source / "bicycle_final" / "a_0.JPG").write_bytes(BROKEN)
        with pytest.raises(ValueError, match="3 train images expected, 2 found"):
            prepare("sop", "--skip_missing", expect_counts=True)
        assert not output.exists()
        put_products(source)
        prepare("sop", expect_counts=True)


class TestOutput:
    @pytest.mark.parametrize("kind", ["imagenet200", "omniart", "cub200", "sop", "class_split"])
    def test_a_table_is_printed(self, kind, source, prepare, capsys):
        LAYOUTS[kind](source)
        prepare(kind)
        said = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["split", "images", "classes", "size"] in said
        assert "train" in [words[0] for words in said if words]

    def test_prepared_data_is_replaced_only_on_request_and_loads_at_one_size(self, source, prepare, load):
        put_cub(source)
        prepare("cub200")
        put(source / "images" / "002.Blue_Jay" / "c.jpg", 77)
        put(source / "images" / "002.Blue_Jay" / "b.jpg", 2, size=(30, 11))
        with pytest.raises(FileExistsError, match=r"already exists.*--overwrite_output_dir"):
            prepare("cub200")
        prepare("cub200", "--overwrite_output_dir")
        data = load(size=16)
        assert seen(data.evaluation) == [(77, 1)]
        pixels = np.concatenate([batch["pixel_values"].numpy() for batch in data.train.epoch()])
        assert pixels.shape == (2, 1, 16, 16)

    def test_a_folder_with_other_contents_is_not_replaced(self, source, prepare, output):
        put_cub(source)
        output.mkdir()
        (output / "thesis.tex").touch()
        with pytest.raises(FileExistsError, match=r"already exists: .*thesis\.tex is not prepared data"):
            prepare("cub200", "--overwrite_output_dir")
        assert (output / "thesis.tex").exists()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["cub200", "--overwrite_output_dir", "--output", "SOURCE/.."], "source is not prepared data"),
            (["cub200", "--source", "nowhere"], "No such file or directory: 'nowhere/images.txt'"),
            (["imagenet200", "--source", "nowhere"], "found no image of the train split in nowhere; is it the right"),
            (["imagenet"], "imagenet200"),
        ],
    )
    def test_an_unknown_kind_or_source_and_an_output_that_has_it_are_refused(
        self, words, message, source, prepare, capsys
    ):
        put_cub(source)
        with pytest.raises((ValueError, OSError, SystemExit)) as refusal:
            prepare(*(word.replace("SOURCE", str(source)) for word in words))
        assert re.search(message, f"{refusal.value} {capsys.readouterr().err}")
        assert (source / "classes.txt").exists()
