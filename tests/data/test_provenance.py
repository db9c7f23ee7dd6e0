"""The identity of rows, and the record of the images of a training run."""

import base64
import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from hf_sphere.data import ImageDataOptions, ImageSourceOptions, OpenSetOptions, load_image_data, load_image_split
from hf_sphere.data.provenance import DataRecord, fingerprint, identify_rows
from hf_sphere.data.sources import load_splits, read_split

STATISTICS = {"image_mean": [0.5], "image_std": [0.5]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty images of each of two classes, without splits."""
    generator = np.random.default_rng(0)
    for row in range(40):
        path = tmp_path / "pictures" / "ab"[row % 2] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PILImage.fromarray(generator.integers(0, 255, (8, 8), np.uint8)).save(path)
    return tmp_path / "pictures"


def load(name: str | Path, record: DataRecord | None, split: str | None = "training", **options):
    loaded = load_image_split(ImageSourceOptions(str(name), **STATISTICS, **options), split, record=record)
    return loaded, loaded.ids[loaded.batches.epoch_rows()]


def train(name: str | Path, *, task: str = "classification", targets=None, **options) -> DataRecord:
    return load_image_data(ImageDataOptions(str(name), **options), task, targets=targets, progress=False).record


@pytest.mark.parametrize(
    "name", ["test", "all", "train+test", "train[10:20]", "held_out(train, 0.2, seed=3)", "kept(all, 0.5, seed=0)"]
)
def test_a_row_has_the_same_identity_in_every_part(name):
    splits = load_splits("digits")
    data = fingerprint(splits)
    images = dict(
        zip(identify_rows(splits, "all", "label", data).tolist(), read_split(splits, "all")["image"], strict=True)
    )
    ids = identify_rows(splits, name, "label", data).tolist()
    assert [images[one].tobytes() for one in ids] == [i.tobytes() for i in read_split(splits, name, "label")["image"]]


def test_a_pool_of_parts_has_the_rows_of_each():
    splits = load_splits("digits")
    parts = ["kept(train, 0.2, seed=0)", "test[:5]"]
    each = [identify_rows(splits, part, "label", 1) for part in parts]
    assert torch.equal(identify_rows(splits, "+".join(parts), "label", 1), torch.cat(each))
    of_pool = identify_rows(splits, "held_out(kept(train+test, 0.2, seed=0), 0.5, seed=1)", "label", 1)
    assert len(set(of_pool.tolist()) & set(torch.cat(each).tolist())) > 400


def test_a_copy_of_the_data_has_the_same_identities_and_other_data_have_others(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    one, two = (fingerprint(load_splits(str(path))) for path in (folder, tmp_path / "copy"))
    assert one == two != fingerprint(load_splits("digits"))


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"eval_fraction": 0.5, "eval_seed": 3}, {"validation_fraction": 0.25}),
        *({"rejection_fraction": 0.25}, {"max_train_samples": 7}),
    ],
    ids=str,
)
def test_the_split_training_has_the_images_that_were_trained_on(folder, tmp_path, options):
    record = train(folder, **options)
    record.save(tmp_path)
    record = DataRecord.read(tmp_path)
    loaded, ids = load(folder, record)
    assert set(ids.tolist()) == set(record.ids["train"].tolist())
    assert loaded.recorded == {"train": len(ids), "eval": 0} | dict.fromkeys(set(record.ids) - {"train", "eval"}, 0)
    assert not torch.isin(load(folder, record, "evaluation")[1], ids).any()
    for part in {"validation", "rejection"} & {*record.ids}:
        assert torch.equal(load(folder, record, part)[1], record.ids[part].sort().values)


@pytest.mark.parametrize("options", [{}, {"max_train_samples": 400}, {"image_size": [128]}], ids=str)
def test_images_reserved_for_rejection_are_in_no_other_part_and_of_each_class(options):
    reading = {"progress": False, "seed": 3}
    options = ImageDataOptions("digits", validation_fraction=0.2, rejection_fraction=0.25, label_noise=1.0, **options)
    data = load_image_data(options, **reading)
    ids = [*data.record.ids.values()]
    assert data.record.ids.keys() == {"train", "validation", "rejection", "eval"}
    assert len(torch.cat(ids).unique()) == sum(map(len, ids))
    reserved, labels = data.rejection, torch.cat([batch["labels"] for batch in data.rejection.epoch()])
    assert torch.equal(labels, reserved.labels)
    true = load_image_split(ImageSourceOptions("digits", **STATISTICS), "rejection", record=data.record, progress=False)
    assert torch.equal(true.batches.labels.bincount(), labels.bincount())  # without label noise
    counts = labels.bincount() / len(labels)
    assert counts == pytest.approx(torch.full((10,), 0.1), abs=0.025)


def test_images_reserved_for_rejection_do_not_depend_on_those_for_validation():
    one, other = (train("digits", rejection_fraction=0.1, validation_fraction=fraction) for fraction in (0.0, 0.3))
    assert torch.equal(one.ids["rejection"], other.ids["rejection"])


def test_images_that_are_left_out_are_not_among_those_of_training(folder):
    (folder / "a" / "0.png").write_bytes(b"no image")
    options = {"image_size": [8], "num_channels": 1}
    record = train(folder, skip_invalid=True, eval_split="train[:2]", **options)
    assert len(record.ids["train"]) == load(folder, record, **options)[0].num_images == 39
    record = train("digits", sample_classes=4, corruption_seed=0)
    assert len(load("digits", record)[0].batches.labels.unique()) == 4


def test_the_default_is_the_evaluation_split_of_the_record_or_its_evaluation_images(folder):
    record = train(folder, eval_fraction=0.5, eval_seed=3)
    ids = load(folder, record, None)[1]
    assert torch.equal(ids.sort().values, record.ids["eval"].sort().values)
    assert torch.isin(load(folder, None, None)[1], record.ids["train"]).any()  # that of other options
    record = train("digits", task="retrieval", targets=OpenSetOptions(train_classes=6))
    loaded, ids = load("digits", record, None)
    assert torch.equal(ids, record.ids["eval"])
    assert sorted(loaded.batches.labels.unique().tolist()) == [6, 7, 8, 9]


def test_parts_are_held_out_by_the_label_column_of_the_training(embed):
    splits = load_splits("digits")
    other = [(7 * row) % 3 for row in range(len(splits["train"]))]
    name = embed(train=splits["train"].add_column("group", other))
    record = train(name, label_column_name="group")
    assert torch.equal(load(name, record, None)[1].sort().values, record.ids["eval"].sort().values)


def test_a_split_of_the_data_precedes_the_record_but_for_training(embed):
    splits = load_splits("digits")
    name = embed(train=splits["train"], validation=splits["test"].select(range(20)), test=splits["test"])
    record = train(name, validation_fraction=0.5)
    assert load(name, record, "validation")[0].num_images == 20
    name = embed(training=splits["train"].select(range(100)))
    record = train(name, train_split="training")
    assert load(name, record)[0].num_images == 80
    assert load(name, record, "training[:]")[0].num_images == 100


@pytest.mark.parametrize("change", ["add", "replace"])
def test_a_model_without_a_record_and_data_that_have_changed_are_errors(folder, change):
    message = r"no split 'training'; the data has train\. Choose .*: the model has no record of its training images"
    with pytest.raises(ValueError, match=message):
        load(folder, None)
    record = train(folder)
    PILImage.new("L", (8, 8)).save(folder / "a" / ("1000.png" if change == "add" else "0.png"))
    with pytest.raises(ValueError, match="trained on other data, or they have changed: their splits, sizes or imag"):
        load(folder, record)


@pytest.mark.parametrize(
    "change",
    [
        {"data": 10**30},
        {"names": {"train": "train"}},
        {"rows": {}},
        {"rows": {"train": "!", "eval": "!"}},
        {"rows": dict.fromkeys(("train", "eval"), base64.b85encode(zlib.compress(b"")).decode())},
        {"rows": dict.fromkeys(("train", "eval"), base64.b85encode(zlib.compress(bytes(1 << 25))).decode())},
    ],
)
def test_a_record_of_somebody_else_is_validated_before_it_is_used(change, folder, tmp_path):
    train(folder).save(tmp_path)
    path = tmp_path / "training_data.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"training_data\.json is damaged.*Restore it, or remove it"):
        DataRecord.read(tmp_path)


def test_a_model_that_is_trained_further_was_trained_on_both_and_images_for_evaluation_too_are_logged(folder, caplog):
    first, second = train(folder, train_split="train[:10]", eval_split="train[20:]"), train(folder, eval_seed=1)
    both = {*first.ids["train"].tolist(), *second.ids["train"].tolist()}
    assert set(second.after(first, trains=True).ids["train"].tolist()) == both
    evaluated = second.after(first, trains=False)
    assert torch.equal(evaluated.ids["train"], first.ids["train"])
    assert torch.equal(evaluated.ids["eval"], second.ids["eval"])
    shared = replace(first, ids=first.ids | {"eval": first.ids["train"]})
    shared.after(first, trains=False)
    assert f"The saved model was trained on {len(first.ids['train'])} of the evaluation images." in caplog.text
