import numpy as np
import pytest
from datasets import ClassLabel, Features, Image, load_dataset

from hf_sphere.data import parquet
from hf_sphere.data.parquet import ParquetSplit

FEATURES = Features({"image": Image(), "label": ClassLabel(names=["ant", "bee"])})


@pytest.fixture
def write(tmp_path, encode):
    """Write images whose pixels are their index, and return the names of the files."""

    def write_images(count: int, split: str = "train") -> list[str]:
        with ParquetSplit(tmp_path / "made", split, FEATURES) as writer:
            for index in range(count):
                encoded = encode(np.full((4, 4), index, dtype=np.uint8))
                writer.add({"image": {"bytes": encoded, "path": f"{index}.png"}, "label": index % 2}, len(encoded))
        return sorted(path.name for path in (tmp_path / "made").iterdir())

    (tmp_path / "made").mkdir()
    return write_images


def marks(folder, split: str = "train") -> list[int]:
    return [np.asarray(image)[0, 0].item() for image in load_dataset(str(folder))[split]["image"]]


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 5, 100])
def test_rows_load_in_the_order_they_were_added(rows_at_a_time, write, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS_AT_A_TIME", rows_at_a_time)
    write(10)
    assert marks(tmp_path / "made") == list(range(10))


def test_splits_load_by_name_and_columns_with_their_types(write, tmp_path):
    assert write(4) == ["train-00000-of-00001.parquet"]
    write(2, "test")
    splits = load_dataset(str(tmp_path / "made"))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 4, "test": 2}
    assert splits["train"].features == FEATURES
    assert splits["train"]["label"][:] == [0, 1, 0, 1]


def test_many_bytes_are_written_to_several_files_that_load_in_order(write, encode, tmp_path, monkeypatch):
    one = len(encode(np.zeros((4, 4), dtype=np.uint8)))
    monkeypatch.setattr(parquet, "BYTES_A_FILE", int(3.5 * one))
    assert write(7) == [f"train-0000{number}-of-00003.parquet" for number in range(3)]
    assert marks(tmp_path / "made") == list(range(7))
    monkeypatch.setattr(parquet, "BYTES_A_FILE", 1)  # each image in a file of its own
    assert len(write(3)) == 3
