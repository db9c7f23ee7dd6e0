"""Training batches straight from the shards of a streaming dataset."""

import io
import tarfile

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, IterableDatasetDict, Value, load_dataset
from made_up_images import ANIMALS, NOT_AN_IMAGE, RAW, encode, make_dataset, marked, noise, seen
from PIL import Image as PILImage

from hf_sphere.data import Augmentation, ImageDataOptions, load_image_data
from hf_sphere.data.decoding import decode_image
from hf_sphere.data.streams import ImageStream
from hf_sphere.utils.seeds import mix_seed

SIZES = [9, 0, 4, 10]  # images per shard, one of which is empty: 23 in all
STATED = {"image_size": 4, "num_channels": 3, "class_names": ["0", "1", "2"]} | RAW
COUNTS = {"max_train_samples": 23, "max_eval_samples": 23}


def shards(tmp_path, images=None, sizes=SIZES, labels=None) -> str:
    """Return a function that writes images as tar shards, labeled by their number modulo 3, and returns the folder."""
    images = [encode(image) for image in marked(sum(sizes), (6, 4, 3))] if images is None else images
    labels = [index % 3 for index in range(len(images))] if labels is None else labels
    folder, number = tmp_path / "shards", 0
    folder.mkdir()
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as archive:
            for index in range(number, number + size):
                for suffix, content in (("png", images[index]), ("cls", str(labels[index]).encode())):
                    entry = tarfile.TarInfo(f"{index:04d}.{suffix}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
        number += size
    return str(folder)


def load(source, **options):
    """Load a stream whose evaluation split is the training split."""
    names = ("batch_size", "seed", "process_index", "num_processes", "task", "episodes")
    more = {name: options.pop(name) for name in names if name in options}
    named, dataset = (source, None) if isinstance(source, str) else ("photos", source)
    options = {"streaming": True, "eval_split": "train", "dataloader_num_workers": 0} | options
    return load_image_data(ImageDataOptions(named, **options), dataset=dataset, **({"batch_size": 4} | more))


class TestOrder:
    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("processes", [1, 2, 5])
    def test_an_epoch_has_every_image_once_for_any_number_of_processes_and_workers(
        self, processes, num_workers, tmp_path
    ):
        """There are fewer shards than processes and workers."""
        folder, options = shards(tmp_path), STATED | COUNTS | {"batch_size": 3}
        sharing = {"num_processes": processes, "dataloader_num_workers": num_workers}
        parts = [load(folder, process_index=i, **sharing, **options) for i in range(processes)]
        trained = [seen(part.train, epoch=1) for part in parts]
        assert {len(part) for part in trained} == {-(-23 // processes)}
        in_turn = [pair for turn in zip(*trained, strict=True) for pair in turn]
        assert in_turn == seen(load(folder, **options).train, epoch=1) + in_turn[: -23 % processes]
        assert sorted(in_turn[:23]) == [(mark, mark % 3) for mark in range(23)]
        evaluated = [seen(part.evaluation) for part in parts]
        assert sorted(pair for part in evaluated for pair in part) == [(mark, mark % 3) for mark in range(23)]

    def test_epochs_and_seeds_have_their_own_order(self, tmp_path):
        folder = shards(tmp_path)
        data = [load(folder, seed=seed, shuffle_buffer_size=5, **STATED, **COUNTS) for seed in (0, 0, 1)]
        orders = [[mark for mark, _ in seen(each.train, epoch=epoch)] for each in data for epoch in (0, 1)]
        assert orders[:2] == orders[2:4]
        assert len({tuple(order) for order in orders}) == 4
        assert [mark for mark, _ in seen(data[0].evaluation)] == list(range(23))

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_resumed_epoch_has_the_same_batches(self, num_workers, tmp_path):
        augmentation = {"random_resized_crop": 0.2, "horizontal_flip": True, "color_jitter": [0.4, 0.4, 0.4, 0.1]}
        options = STATED | COUNTS | augmentation | {"dataloader_num_workers": num_workers}
        training = load(shards(tmp_path, [noise_png(i) for i in range(23)]), **options).train
        whole = list(training.epoch(2))
        assert len(whole) == len(training) == 6
        for start in (1, 3, 6):
            for one, other in zip(training.epoch(2, start=start), whole[start:], strict=True):
                assert all(torch.equal(one[name], other[name]) for name in one)

    def test_an_epoch_has_the_requested_number_of_images_and_a_stream_that_is_too_short_is_an_error(self, tmp_path):
        folder = shards(tmp_path)
        data = load(folder, max_train_samples=10, max_eval_samples=5, **STATED)
        epochs = [{mark for mark, _ in seen(data.train, epoch=epoch)} for epoch in range(8)]
        assert {len(epoch) for epoch in epochs} == {10}
        assert set.union(*epochs) == set(range(23))
        assert [mark for mark, _ in seen(data.evaluation)] == [0, 1, 2, 3, 4]
        assert (data.train.num_examples, data.train.examples_per_epoch, data.record) == (10, 10, None)
        data = load(folder, **STATED, max_train_samples=24, max_eval_samples=40)
        with pytest.raises(ValueError, match="'train' ended after 23 images of 24; set max_train_samples"):
            list(data.train.epoch())
        with pytest.raises(ValueError, match="'train' ended after 23 images of 40; set max_eval_samples"):
            list(data.evaluation.epoch())


def noise_png(seed: int) -> bytes:
    buffer = io.BytesIO()
    PILImage.fromarray(noise(20, 30, 3, seed=seed)).save(buffer, "PNG")
    return buffer.getvalue()


class TestSources:
    @pytest.mark.parametrize("kind", ["image", "bytes"])
    def test_parquet_of_images_or_bytes_is_read_without_a_copy(self, kind, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1, raising=False)
        files = [noise_png(seed) for seed in range(6)]
        cells = [{"bytes": file, "path": None} for file in files] if kind == "image" else files
        features = Features(
            {"image": Image() if kind == "image" else Value("binary"), "label": ClassLabel(names=ANIMALS)}
        )
        rows = Dataset.from_dict({"image": cells, "label": range(6)}, features=features)
        (tmp_path / "rows").mkdir()
        rows.to_parquet(tmp_path / "rows" / "train-00000-of-00001.parquet")
        cache = tmp_path / "hf_datasets"
        before = sorted(cache.rglob("*.arrow"))
        options = STATED | {"image_size": [20, 30], "class_names": None, "cache_dir": str(tmp_path / "decoded")}
        data = load(str(tmp_path / "rows"), max_train_samples=6, max_eval_samples=6, **options)
        for batch in (*data.train.epoch(), *data.evaluation.epoch()):
            for label, image in zip(batch["labels"].tolist(), batch["pixel_values"], strict=True):
                expected = np.asarray(PILImage.open(io.BytesIO(files[label])))
                assert np.array_equal((image * 255).round().byte().permute(1, 2, 0), expected)
        assert data.class_names == ANIMALS
        assert sorted(cache.rglob("*.arrow")) == before
        assert not (tmp_path / "decoded").exists()

    def test_a_streaming_dataset_of_your_own_is_read(self):
        rows = make_dataset(marked(9, (6, 4, 3)), [0, 1, 2] * 3)
        rows = rows.map(lambda row: {"more": 1}).to_iterable_dataset(num_shards=2)
        splits = IterableDatasetDict(train=rows, test=rows)
        data = load(
            splits, eval_split=None, max_train_samples=9, max_eval_samples=9, **(STATED | {"class_names": None})
        )
        assert isinstance(data.train, ImageStream)
        assert (data.eval_split, data.class_names) == ("test", ["0", "1", "2"])
        trained = seen(data.train)
        assert len(set(trained)) == 8  # the last batch of one image is left out
        assert all(label == mark % 3 for mark, label in trained)

    def test_the_size_that_a_dataset_states_is_used(self, tmp_path):
        rows = make_dataset(marked(8, (6, 4, 3)), [0, 1] * 4)
        rows.to_parquet(tmp_path / "train-00000-of-00001.parquet")
        card = "dataset_info:\n  splits:\n  - name: train\n    num_examples: 8\n    num_bytes: 1\n"
        (tmp_path / "README.md").write_text(f"---\n{card}---\n")
        data = load(load_dataset(str(tmp_path), streaming=True), **(STATED | {"class_names": None}))
        assert (data.train.num_examples, data.evaluation.num_examples) == (8, 8)

    def test_crops_are_those_of_images_from_disk(self, tmp_path):
        files = [noise_png(seed) for seed in range(8)]
        augmentation = {"random_resized_crop": 0.2, "horizontal_flip": True}
        data = load(shards(tmp_path, files, [8]), max_train_samples=8, max_eval_samples=8, **STATED, **augmentation)
        drawn = torch.cat([batch["pixel_values"] for batch in data.train.epoch(1)])
        order = [int(row[0]["path"][:4]) for row in data.train.split.read(mix_seed(0, 1))]
        for place, index in enumerate(order):
            record = {"bytes": files[index], "path": None}
            image = decode_image(record, data.shape, Augmentation(**augmentation), mix_seed(0, 1, place + 1))
            torch.testing.assert_close(drawn[place], image / 255, rtol=0, atol=1e-6)


class TestErrors:
    @pytest.mark.parametrize("label", [7, -1])
    def test_an_unknown_label_is_an_error(self, label, tmp_path):
        images = [encode(image) for image in marked(3, (6, 4, 3))]
        data = load(shards(tmp_path, images, [3], [0, 1, label]), max_train_samples=3, max_eval_samples=3, **STATED)
        with pytest.raises(ValueError, match=rf"label {label} .*0002.png, 0002, .*train-0.tar.*none of the 3 classes"):
            list(data.train.epoch())

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_corrupt_image_is_named_by_key_and_shard_or_left_out(self, num_workers, tmp_path, caplog):
        images = [encode(image) for image in marked(12, (6, 4, 3))]
        images[7] = NOT_AN_IMAGE
        folder, counts = shards(tmp_path, images, [5, 7]), {"max_train_samples": 12, "max_eval_samples": 12}
        options = STATED | counts | {"dataloader_num_workers": num_workers}
        with pytest.raises(ValueError, match=r"0007\.png, 0007, .*train-1\.tar, number .*cannot be decoded"):
            list(load(folder, **options).train.epoch())
        data = load(folder, skip_invalid=True, **options)
        assert sorted(seen(data.train)) == [(mark, mark % 3) for mark in range(12) if mark != 7]
        assert "0007.png" in caplog.text
        data = load(folder, skip_invalid=True, batch_size=1, **options)  # a batch without any image
        with pytest.raises(ValueError, match="cannot be decoded"):
            list(data.train.epoch())

    def test_what_is_not_stated_and_splits_that_cannot_be_streamed_are_errors(self, tmp_path):
        folder = shards(tmp_path)
        needed = "image_size, num_channels, image_mean, image_std, max_train_samples .*max_eval_samples .*class_names"
        with pytest.raises(ValueError, match=f"a stream is not read before training, so set {needed}"):
            load(folder)
        with pytest.raises(ValueError, match=r"eval_split \(no images can be held out\)"):
            load(folder, **STATED, **COUNTS, eval_split=None)
        with pytest.raises(ValueError, match=r"whole splits, train, but no 'train\[:80%\]'; choose --train_split"):
            load(folder, **STATED, **COUNTS, train_split="train[:80%]")
        with pytest.raises(TypeError, match="buffer_size"):
            list(load(make_dataset(marked(4)), **STATED | {"class_names": None}, **COUNTS).train.epoch())

    def test_columns_and_class_names_are_checked(self, tmp_path):
        rows = make_dataset(marked(4), [0, 1, 0, 1]).to_iterable_dataset()
        with pytest.raises(ValueError, match="found no label column"):
            load(rows.remove_columns("label"), **STATED, **COUNTS)
        with pytest.raises(ValueError, match="column 'label' does not contain images"):
            load(rows, image_column_name="label", **STATED, **COUNTS)
        rows = make_dataset(marked(4), [0, 1, 0, 1], feature=ClassLabel(names=["cat", "dog"])).to_iterable_dataset()
        with pytest.raises(ValueError, match=r"split 'train' has the classes \['cat', 'dog'\], but others"):
            load(rows, **STATED, **COUNTS)
        folder = shards(tmp_path)
        with pytest.raises(ValueError, match=r"set class_names \(different ones"):
            load(folder, **STATED | COUNTS | {"class_names": ["0", "1", "1"]})
        with pytest.raises(TypeError, match="not subscriptable"):
            load(folder, **STATED, **COUNTS).train.epoch_rows()

    def test_images_that_are_decoded_before_are_an_error(self):
        rows = make_dataset(marked(4), [0, 1, 2, 0]).to_iterable_dataset()
        sizes = STATED | {"max_train_samples": 4, "max_eval_samples": 4}
        with pytest.raises(AttributeError, match="PngImageFile"):
            list(load(rows.filter(lambda row: True), **sizes).train.epoch())
        encoded = rows.cast_column("image", Image(decode=False)).map(lambda row: row)
        assert sorted(seen(load(encoded, **sizes).train)) == [(mark, mark % 3) for mark in range(4)]
