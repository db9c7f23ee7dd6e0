"""Images as people have them: folders of files, without a test split, with damaged files among them."""

import bz2
import gzip
import io
import logging
import os
import re
import shutil
import socket
import tarfile
import zipfile

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, IterableDatasetDict
from PIL import Image as PILImage
from transformers import (
    CLIPImageProcessor,
    ConvNextImageProcessor,
    DeiTImageProcessor,
    EfficientNetImageProcessor,
    LevitImageProcessor,
    PoolFormerImageProcessor,
    ViTImageProcessor,
)

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.data import (
    Augmentation,
    CorruptImageError,
    ImageDataOptions,
    ImageSourceOptions,
    load_image_data,
    load_image_split,
)
from hf_sphere.data.decoding import ImageShape
from hf_sphere.data.folders import list_files
from hf_sphere.data.provenance import fingerprint
from hf_sphere.data.sources import as_splits, load_splits
from hf_sphere.search import ImageSource
from hf_sphere.utils.model_sources import preprocessing_of
from hf_sphere.utils.pixels import convert_image


def load_stream(name):
    options = {"image_size": 8, "num_channels": 3, "image_mean": [0.5], "image_std": [0.5], "class_names": ["a"]}
    options |= {"streaming": True, "max_train_samples": 2, "max_eval_samples": 2, "eval_split": "train"}
    for _ in load_image_data(ImageDataOptions(name, **options, dataloader_num_workers=0)).train:
        pass


TINY = SphereVisionConfig(backbone="linear_embedding", num_channels=1, image_size=8, num_labels=3)


def folder(tmp_path, **counts: int):
    """Write images of given classes (none: directly into the folder) and return the folder."""
    generator = np.random.default_rng(0)
    for name, count in counts.items():
        where = tmp_path / "pictures" / ("" if name == "unlabeled" else name)
        where.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            PILImage.fromarray(generator.integers(0, 255, (8, 8, 3), np.uint8)).save(where / f"{index}.png")
    return tmp_path / "pictures"


def test_several_sizes_are_refused_if_none_is_set_and_one_gray_image_leaves_the_colors(tmp_path):
    path = folder(tmp_path, cats=4, dogs=4)
    for name in ("cats", "dogs"):
        PILImage.new("L", (20, 30)).save(path / name / "0.png")
    with pytest.raises(ValueError, match=r"several sizes, such as 8 x 8 and 30 x 20. Set image_size"):
        load_image_data(ImageDataOptions(str(path)), batch_size=2)
    data = load_image_data(ImageDataOptions(str(path), image_size=[16]), batch_size=2)
    assert data.shape == ImageShape(3, 16, 16)


class TestUnreadFiles:
    @pytest.mark.parametrize(
        ("name", "shown"),
        [
            *(("dogs/phone.HEIC", "dogs/phone.HEIC"), ("a::b/0.png", "a::b/0.png"), ("__cats/0.png", "__cats/0.png")),
            *(("black\ncats/0.png", "black"), ("cats/9.png", "cats/9.png")),
        ],
    )
    def test_files_that_datasets_does_not_read_are_logged(self, tmp_path, name, shown, caplog):
        path = folder(tmp_path, cats=2, dogs=2)
        load_splits(str(path))
        assert not caplog.text
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).symlink_to("none.png") if name == "cats/9.png" else (path / name).write_bytes(b"")
        assert len(load_splits(str(path))["train"]) == 4
        assert f"1 of 5 files in {path} are in no split, such as {shown}" in caplog.text
        caplog.clear()
        load_splits(str(path), streaming=True)
        assert ("in no split" in caplog.text) == (not name.endswith("HEIC"))

    def test_names_of_splits_are_logged_but_not_files_that_a_list_leaves_out(self, tmp_path, caplog):
        path = folder(tmp_path, cats=5, dogs=5)
        (path / "metadata.csv").write_text("file_name,label\ncats/1.png,a\ncats/2.png,b\n")
        assert len(load_splits(str(path))["train"]) == 2
        assert not caplog.text
        (path / "metadata.csv").unlink()
        for name in ("cats", "dogs"):
            (path / name / "0.png").rename(path / name / "train_0.png")
        load_splits(str(path))
        assert f"8 of 10 files in {path} are in no split" in caplog.text

    @pytest.mark.parametrize("name", ["metadata.csv", "of.csv"])
    @pytest.mark.parametrize(("label", "warns"), [("007", True), (" 07", True), ("7", False), ("0", False)])
    def test_codes_of_a_table_that_lose_zeros_are_reported(self, tmp_path, name, label, warns, caplog):
        path = folder(tmp_path, cats=2) if name == "metadata.csv" else folder(tmp_path).parent
        (path / name).write_text(f'file_name,note,label\ncats/1.png,"a\n,b",{label}\ncats/0.png,,8\n')
        rows = load_splits(str(path if name == "metadata.csv" else path / name))["train"]
        assert sorted(rows["label"]) == [int(label), 8]
        text = f"{name}: column 'label' is read as numbers, so {label!r} is {int(label)}; if these are names, write a"
        assert (text in caplog.text) == warns
        assert bool(caplog.text) == warns

    @pytest.mark.parametrize("name", ["rows.tsv", "rows.csv.gz", "rows.tsv.bz2"])
    def test_codes_of_tables_with_tabs_or_compressed_that_lose_zeros_are_reported(self, name, tmp_path, caplog):
        open_table = {".gz": gzip.open, ".bz2": bz2.open}.get(name[name.rindex(".") :], open)
        with open_table(tmp_path / name, "wt") as file:
            file.write("note,label\na,007\nb,7\n".replace(",", "\t" if ".tsv" in name else ","))
        assert load_splits(str(tmp_path))["train"]["label"][:] == [7, 7]
        assert f"{name}: column 'label' is read as numbers, so '007' is 7" in caplog.text

    @pytest.mark.parametrize("streaming", [False, True])
    def test_codes_are_looked_for_block_by_block_and_in_the_first_one_of_a_stream(
        self, streaming, tmp_path, monkeypatch, caplog
    ):
        monkeypatch.setattr("hf_sphere.utils.loading.BLOCK", 1 << 10)
        (tmp_path / "rows.csv").write_text("label\n" + "12\n" * 1000 + "007\n")
        load_splits(str(tmp_path / "rows.csv"), streaming=streaming)
        assert ("so '007' is 7" in caplog.text) == (not streaming)

    @pytest.mark.parametrize("name", ["@eaDir", "$RECYCLE.BIN", "#recycle", "__MACOSX", "lost+found"])
    def test_images_in_folders_of_the_system_are_not_indexed_and_not_trained_on(self, tmp_path, name):
        path = folder(tmp_path, cats=2, **{name: 2})
        assert len(ImageSource.of(path)) == 2
        if name == "__MACOSX":  # which `datasets` leaves out, too
            assert len(load_splits(str(path))["train"]) == 2
            return
        with pytest.raises(ValueError, match=r"which is of the system or not in .*; remove it"):
            load_splits(str(path))


class TestFolders:
    @pytest.mark.parametrize("what", ["file", "folder", "parent", "table", "file in a folder that is linked inside"])
    @pytest.mark.parametrize("read", [ImageSource.of, load_splits], ids=["index", "training"])
    def test_a_link_out_of_the_folder_is_an_error(self, tmp_path, what, read):
        path, elsewhere = folder(tmp_path, cats=2, dogs=2), tmp_path / "elsewhere"
        elsewhere.mkdir()
        for name in ("s.png", "t.csv"):
            shutil.copy(path / "cats" / "0.png", elsewhere / name)
        link = path / {"table": "t.csv"}.get(what, "cats/x.png")
        targets = {"folder": elsewhere, "parent": tmp_path, "table": elsewhere / "t.csv"}
        link.symlink_to(targets.get(what, elsewhere / "s.png"))
        if what.endswith("inside"):
            (path / "again").symlink_to(path / "cats")
        (tmp_path / "linked").symlink_to(path)
        if what == "table" and read is not load_splits:  # which an index does not read
            return
        with pytest.raises(ValueError, match=rf"links to 1 file\(s\) outside it: \S*{link.name}\. Copy"):
            read(str(tmp_path / "linked"))

    @pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "parquet with a URL", "parquet with an archive"])
    @pytest.mark.parametrize("read", [ImageSource.of, load_splits, load_stream])
    def test_a_table_that_names_an_image_outside_its_folder_is_an_error(self, tmp_path, kind, read, monkeypatch):
        monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1)
        path, secret = folder(tmp_path, cats=2), tmp_path / "secret.png"
        shutil.copy(path / "cats" / "0.png", secret)
        names = ["cats/0.png", "../secret.png", "cats/1.png"]
        if kind == "csv":
            (path / "metadata.csv").write_text("file_name,label\n" + "".join(f"{name},a\n" for name in names))
        elif kind == "jsonl":
            lines = [f'{{"file_name": "{name}", "label": "a"}}\n' for name in names]
            (path / "metadata.jsonl").write_text("".join(lines))
        else:
            with zipfile.ZipFile(tmp_path / "secret.zip", "w") as archive:
                archive.write(secret, "a.png")
            form = {"parquet": "{}", "parquet with a URL": "file://{}"}.get(kind, "zip://a.png::{}")
            other = secret.with_suffix(".zip" if "archive" in kind else ".png")
            cells = [{"bytes": None, "path": str(path / "cats" / "0.png")}, {"bytes": None, "path": form.format(other)}]
            table = Dataset.from_dict({"image": cells, "label": ["a"] * 2}).cast_column("image", Image(decode=False))
            table.to_parquet(path / "train.parquet")
        with pytest.raises(ValueError, match=r"outside it: .*secret\.(png|zip)\. Copy|escape the dataset directory"):
            read(str(path))

    @pytest.mark.parametrize("read", [load_splits, lambda name: ImageSource.of(name, content="text")])
    def test_a_link_out_of_a_folder_of_texts_is_an_error(self, tmp_path, read):
        (tmp_path / "texts").mkdir()
        (tmp_path / "secret.txt").write_text("a secret")
        (tmp_path / "texts" / "a.txt").symlink_to(tmp_path / "secret.txt")
        with pytest.raises(ValueError, match=r"links to 1 file\(s\) outside it: \S*a\.txt\. Copy"):
            read(str(tmp_path / "texts"))

    def test_training_follows_links_of_files_if_asked(self, tmp_path):
        path = folder(tmp_path, cats=4, dogs=4)
        for number in range(7):
            target = shutil.copy(path / "cats" / "0.png", tmp_path / f"{number}.png")
            (path / "cats" / f"x{number}.png").symlink_to(target)
        options = {"dataset_name": str(path), "keep_in_memory": "no"}
        listed = ", ".join(str(path / "cats" / f"x{number}.png") for number in range(5))
        with pytest.raises(ValueError, match=rf"links to 7 file\(s\) outside it: {re.escape(listed)}\. "):
            load_image_data(ImageDataOptions(**options))
        data = load_image_data(ImageDataOptions(**options, follow_links=True))
        assert sum(len(batches.labels) for batches in (data.train, data.evaluation)) == 15
        (path / "dogs").rename(tmp_path / "elsewhere")
        (path / "dogs").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match=r"links to 1 file\(s\) outside it: \S*dogs\. "):
            load_splits(str(path), follow_links=True)

    def test_links_inside_the_folder_and_to_it_are_not_followed_but_those_to_files_in_the_cache_of_the_hub(
        self, tmp_path
    ):
        path = folder(tmp_path, cats=2, dogs=2)
        (path / "again").symlink_to(path / "cats")
        (path / "dogs" / "loop").symlink_to(path)
        (tmp_path / "link").symlink_to(path)
        assert len(list_files(path, {".png"})) == len(load_splits(str(tmp_path / "link"))["train"]) == 4
        (tmp_path / "repo" / "blobs").mkdir(parents=True)
        for file in path.glob("*s/*.png"):
            blob = tmp_path / "repo" / "blobs" / f"{file.parent.name}{file.stem}"
            file.rename(blob)
            file.symlink_to(blob)
        (tmp_path / "repo" / "snapshots").mkdir()
        assert len(list_files(path.rename(tmp_path / "repo" / "snapshots" / "1a"), {".png"})) == 4

    @pytest.mark.parametrize("name", ["cats/9.png", "metadata.csv", "train.tar", "cats/socket.jpg"])
    def test_a_pipe_or_socket_is_an_error(self, tmp_path, name, monkeypatch):
        """Reading a pipe would wait for a writer."""
        path = folder(tmp_path, cats=2, dogs=2)
        monkeypatch.chdir(path)
        if "socket" in name:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(name)  # relative, since the paths of sockets are short
        else:
            os.mkfifo(name)
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            load_splits(str(path))

    def test_unlabeled_files_among_class_folders_and_a_device_that_a_table_names_are_errors(self, load_named, tmp_path):
        with pytest.raises(ValueError, match=r"found no label column.* folders at one depth, one per class"):
            load_named(str(folder(tmp_path, cats=2, dogs=2, unlabeled=1)))
        images = Features({"image": Image(decode=False)})
        (tmp_path / "table").mkdir()
        device = Dataset.from_dict({"image": [{"bytes": None, "path": "/dev/zero"}]}, images)
        device.to_parquet(tmp_path / "table" / "a.parquet")
        with pytest.raises(ValueError, match=r"names or links to 1 file.s. outside it: /dev/zero"):
            fingerprint(load_splits(str(tmp_path / "table")))

    @pytest.mark.parametrize("kind", ["webdataset", "zip", "bytes", "struct"])
    def test_images_in_other_files_are_read_and_columns_found(self, kind, tmp_path, load_one):
        files = sorted(folder(tmp_path, unlabeled=4).iterdir())
        (tmp_path / "other").mkdir()
        if kind == "webdataset":
            with tarfile.open(tmp_path / "other" / "train-0.tar", "w") as shard:
                for number, file in enumerate(files):
                    for name, data in ((f"{number}.png", file.read_bytes()), (f"{number}.cls", b"%d" % (number // 2))):
                        member = tarfile.TarInfo(name)
                        member.size = len(data)
                        shard.addfile(member, io.BytesIO(data))
        elif kind == "zip":
            with zipfile.ZipFile(tmp_path / "other" / "data.zip", "w") as archive:
                for file in files:
                    archive.write(file, file.name)
        else:
            cells = [file.read_bytes() if kind == "bytes" else {"bytes": file.read_bytes()} for file in files]
            pq.write_table(pa.table({"picture": cells}), tmp_path / "other" / "train.parquet")
        batches = load_one(str(tmp_path / "other"), "train").batches
        expected = torch.from_numpy(np.stack([np.asarray(PILImage.open(file)) for file in files]))
        pixels = next(batches.epoch())["pixel_values"]
        assert torch.equal((pixels * 255).round().byte(), expected.permute(0, 3, 1, 2))
        assert labels_of(batches) == ([0, 0, 1, 1] if kind == "webdataset" else [-1] * 4)

    def test_a_column_of_paths_is_an_error_with_the_cast(self, tmp_path, load_one):
        pq.write_table(pa.table({"image": ["0.png"]}), tmp_path / "train.parquet")
        with pytest.raises(ValueError, match=r"dataset\.cast_column\('image', datasets\.Image\(\)\)"):
            load_one(str(tmp_path), "train")


class TestDamagedFiles:
    @pytest.mark.parametrize("kind", ["huge", "animated"])
    def test_a_damaged_file_is_an_error_that_names_it_or_skipped(self, kind, tmp_path, load_one, caplog):
        path = folder(tmp_path, cats=2, dogs=2)
        if kind == "animated":
            frames = [PILImage.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 255)]
            frames[0].save(path / "cats" / "9.gif", save_all=True, append_images=frames[1:])
        else:
            data = bytearray((path / "cats" / "0.png").read_bytes())
            data[16:24] = (100_000).to_bytes(4, "big") * 2  # the sides that the file claims
            (path / "cats" / "9.png").write_bytes(bytes(data))
        with pytest.raises(CorruptImageError, match=r"cats/9\.(png|gif)\) of the split .*--skip_invalid"):
            load_one(str(path), "train")
        assert load_one(str(path), "train", skip_invalid=True).num_images == 4
        assert re.search(r"Left out 1 corrupt image.s. of 5: .*cats/9\.(png|gif)\.", caplog.text)

    def test_truncated_large_photos_are_named_before_training(self, tmp_path, load_named):
        path = folder(tmp_path, cats=5, dogs=5)
        for file in path.rglob("*.png"):
            file.unlink()
            PILImage.effect_noise((200, 200), 50).save(file.with_suffix(".jpg"))
        for name in ("cats/1.jpg", "cats/3.jpg"):
            (path / name).write_bytes((path / name).read_bytes()[:-500])
        with pytest.raises(CorruptImageError, match=r"cats/1\.jpg\).*truncated.*, nor can 1 other image"):
            load_named(str(path), eval_split="train")
        data = load_named(str(path), eval_split="train", skip_invalid=True)
        assert data.evaluation.num_examples == 8


def labels_of(batches) -> list[int]:
    return [label for batch in batches.epoch() for label in batch["labels"].tolist()]


class TestHeldOutPart:
    def test_it_is_stratified_and_reported(self, tmp_path, load_named, caplog):
        caplog.set_level(logging.INFO)
        data = load_named(str(folder(tmp_path, cats=10, dogs=20)))
        assert (labels_of(data.evaluation).count(0), labels_of(data.evaluation).count(1)) == (2, 4)
        assert data.train.num_examples == 24
        assert data.eval_split == "held_out(train, 0.2, seed=0)"
        assert "20 % of the images of train are held out, stratified by class, with seed 0" in caplog.text

    @pytest.mark.parametrize(("classes", "held_out"), [("ab", 1), ("abc", 1), ("abcd", 2), ("abcdef", 2)])
    def test_retrieval_holds_out_two_classes_where_two_are_left(self, classes, held_out, tmp_path, load_named, caplog):
        caplog.set_level(logging.INFO)
        data = load_named(str(folder(tmp_path, **dict.fromkeys(classes, 2))), task="retrieval")
        assert (data.class_names, data.eval_class_names) == ([*classes[:-held_out]], [*classes[-held_out:]])
        assert f"--train_classes {len(classes) - held_out}" in caplog.text

    def test_its_name_loads_the_same_images_later_whatever_the_seed_of_the_run(self, tmp_path, load_named, load_one):
        path = str(folder(tmp_path, cats=10, dogs=20))
        options = {"eval_fraction": 0.3, "eval_seed": 4, "image_mean": [0.0], "image_std": [1.0]}
        data = load_named(path, seed=7, **options)
        later = load_one(path, data.eval_split)
        seen = next(data.evaluation.epoch())["pixel_values"]
        for batches in (later.batches, load_named(path, seed=8, **options).evaluation):
            assert seen.equal(next(batches.epoch())["pixel_values"])
        kept = load_one(path, "kept(train, 0.3, seed=4)")
        assert kept.num_images + later.num_images == 30
        pixels = torch.cat([batch["pixel_values"] for part in (kept, later) for batch in part.batches.epoch()])
        assert len(pixels.unique(dim=0)) == 30

    def test_one_image_of_a_class_and_a_wrong_label_column_are_errors_that_name_it(
        self, tmp_path, load_named, load_one
    ):
        path = str(folder(tmp_path, cats=10, dogs=1))
        with pytest.raises(ValueError, match="The least populated class"):
            load_named(path)
        for load, split in ((load_named, {"eval_split": "train"}), (load_one, {"split": "train"})):
            with pytest.raises(ValueError, match=r"no label column 'labels'; the data has the columns"):
                load(path, label_column_name="labels", **split)

    def test_images_with_values_are_held_out_at_random(self, load_named, tmp_path):
        path = str(folder(tmp_path, cats=10, dogs=10))
        data = load_named(path, task="regression", computed_value="slant")
        assert (data.train.num_examples, data.evaluation.num_examples) == (16, 4)
        (tmp_path / "nothing").mkdir()
        with pytest.raises((OSError, ValueError), match="nothing"):
            load_named(str(tmp_path / "nothing"))


CROPPED = {"size": {"shortest_edge": 24}, "crop_size": {"height": 16, "width": 16}}
SPHERE = {"size": {"height": 16, "width": 20}, "image_mean": [0.1], "image_std": [0.4], "num_channels": 1}


class TestPreprocessingOfAModel:
    """Inputs of photos are those of the image processor, by any description of the model."""

    @pytest.fixture
    def photos(self, tmp_path):
        """Photos whose crops begin at whole pixels, where timm and transformers agree."""
        generator = np.random.default_rng(0)
        (tmp_path / "photos").mkdir()
        for index, (name, mode) in enumerate([("a.png", "RGB"), ("b.jpg", "RGB"), ("c.png", "RGBA"), ("d.jpg", "L")]):
            coarse = generator.integers(0, 255, (6, 5, 4), np.uint8)
            image = PILImage.fromarray(coarse, "RGBA").resize((48 + 24 * index, 48), PILImage.Resampling.BICUBIC)
            image.convert(mode).save(tmp_path / "photos" / name)
        return tmp_path / "photos"

    @pytest.mark.parametrize(
        "processor",
        [
            SphereVisionImageProcessor(**SPHERE),
            SphereVisionImageProcessor(**SPHERE | {"crop_pct": 0.8, "background_color": [9, 99, 199]}),
            ViTImageProcessor(size={"height": 16, "width": 20}, image_mean=[0.2, 0.3, 0.4]),
            ViTImageProcessor(size={"height": 16, "width": 20}, resample=3, do_normalize=False),
            ViTImageProcessor(size={"height": 16, "width": 20}, rescale_factor=1 / 127.5),
            ConvNextImageProcessor(size={"shortest_edge": 16}, crop_pct=0.5),
            ConvNextImageProcessor(size={"shortest_edge": 384}),  # stretched, as are larger ones
            CLIPImageProcessor(**CROPPED),
            PoolFormerImageProcessor(**CROPPED, crop_pct=0.5),  # not of the sizes
        ],
    )
    def test_they_are_those_of_the_image_processor(self, photos, processor, caplog):
        batches = load_image_split(photos, "all", like=processor).batches
        images = [PILImage.open(path) for path in sorted(photos.iterdir())]
        if not isinstance(processor, SphereVisionImageProcessor):
            images = [convert_image(image, 3) for image in images]
        expected = processor(images, return_tensors="pt")["pixel_values"]
        difference = (next(batches.epoch())["pixel_values"] - expected).abs().amax()
        level = processor.rescale_factor / min(processor.image_std if processor.do_normalize else [1.0])  # one of 255
        assert difference <= 1.01 * level
        assert "otherwise than by" not in caplog.text

    def test_a_warning_says_that_they_are_prepared_otherwise(self, photos, caplog):
        for processor in (
            DeiTImageProcessor(),  # stretches, and crops
            LevitImageProcessor(),  # larger by 256 / 224 than its size
            EfficientNetImageProcessor(),  # nearest pixels, and normalized twice
            ViTImageProcessor(resample=0),
            ViTImageProcessor(do_resize=False),
        ):
            caplog.clear()
            preprocessing_of(processor, ImageSourceOptions())
            assert f"otherwise than by {type(processor).__name__}" in caplog.text

    @pytest.mark.parametrize("like", ["timm:test_resnet", "model"])
    def test_they_are_those_of_timm(self, photos, like):
        like = timm.create_model("test_resnet", num_classes=3) if like == "model" else like
        batches = load_image_split(ImageSourceOptions(photos), "all", like=like).batches
        settings = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg("test_resnet").to_dict())
        transform = timm.data.create_transform(**settings)
        expected = [transform(convert_image(PILImage.open(path), 3)) for path in sorted(photos.iterdir())]
        assert (next(batches.epoch())["pixel_values"] - torch.stack(expected)).abs().amax() < 0.05

    def test_a_loaded_model_is_as_its_folder(self, photos, tmp_path):
        SphereVisionForImageClassification(TINY).save_pretrained(tmp_path / "model")
        SphereVisionImageProcessor(**SPHERE).save_pretrained(tmp_path / "model")
        loaded = SphereVisionForImageClassification.from_pretrained(tmp_path / "model")
        likes = [tmp_path / "model", str(tmp_path / "model"), loaded, SphereVisionImageProcessor(**SPHERE)]
        first, *others = [load_image_split(photos, "all", like=like).batches for like in likes]
        assert first.images.shape == (4, 1, 16, 20)
        assert all(batches.images.equal(first.images) and batches._shift.equal(first._shift) for batches in others)
        assert first._shift.flatten().tolist() == pytest.approx([-0.25])

    def test_bad_input_is_refused(self, photos):
        for option in ({"image_mean": [0.5]}, {"image_size": [9]}, {"crop_pct": 0.9}):
            options = ImageSourceOptions(str(photos), **option)
            with pytest.raises(ValueError, match=f"image processor, which sets --{next(iter(option))}; leave it out"):
                load_image_split(options, like=SphereVisionImageProcessor(**SPHERE))
        for like in (SphereVisionForImageClassification(TINY), torch.nn.Linear(2, 2), 5):
            named = f"this {type(like).__name__} was not loaded by its name"
            with pytest.raises(ValueError, match=rf"{named}, .*use load_image_split\(\.\.\., like=proc"):
                load_image_split(photos, like=like)
        with pytest.raises(ValueError, match=r"image_mean and image_std are required .* or a model \(like\)"):
            load_image_split(photos)


class TestSplitExpressions:
    def test_slices_and_unions_are_loaded(self, tmp_path, load_named, load_one):
        path = str(folder(tmp_path, cats=10, dogs=10))
        data = load_named(path, train_split="train[:30%]+train[-6:]", eval_split="train[30%:70%]")
        assert labels_of(data.evaluation) == [0] * 4 + [1] * 4
        assert sorted(labels_of(data.train)) == [0] * 6 + [1] * 6
        assert load_one("digits", "all").num_images == 1797

    def test_unfit_parts_cause_a_warning_and_invalid_ones_an_error(self, tmp_path, load_named, caplog):
        path = str(folder(tmp_path, cats=10, dogs=10))
        load_named(path, train_split="train[:50%]", eval_split="train[50%:]")
        assert "1 class(es) of the evaluation images have no training image: dogs." in caplog.text
        assert "in common" not in caplog.text
        parts = {"train_split": "train[:80%]", "validation_split": "train[70%:80%]", "eval_split": "train[80%:]"}
        load_named(path, **parts)
        both = "training images (train[:80%]) and validation images (train[70%:80%])"
        assert f"The {both} have 2 images in common." in caplog.text
        load_named(path, train_split="all", eval_split="train")
        assert "training images (all) and evaluation images (train) have 20 images in common." in caplog.text
        for name in ("train[:200%]", "test[:5]", "train[", "held_out(train, 7, seed=0)"):
            with pytest.raises(ValueError, match=r"no split '.*; the data has train\. Choose one with --eval_split: "):
                load_named(path, eval_split=name)


class TestDataSetsInPython:
    @pytest.fixture
    def rows(self) -> Dataset:
        images = [PILImage.new("RGB", (6, 6), (index, 0, 0)) for index in range(40)]
        features = Features({"image": Image(), "label": ClassLabel(names=["even", "odd"])})
        return Dataset.from_dict({"image": images, "label": [i % 2 for i in range(40)]}, features=features)

    def load(self, data, tmp_path, **options):
        options = ImageDataOptions(cache_dir=str(tmp_path), **options)
        return load_image_data(options, dataset=data, progress=False)

    def test_a_data_set_keeps_its_splits_or_is_divided_and_its_transform_is_not_applied(self, rows, tmp_path):
        changed = rows.with_transform(lambda batch: {"pixel_values": batch["image"]})
        divided = [self.load(data, tmp_path) for data in (rows, changed)]
        assert torch.equal(*(next(data.train.epoch(0))["pixel_values"] for data in divided))
        divided.append(self.load(DatasetDict(train=rows, test=rows.select(range(10))), tmp_path))
        sizes = [(data.train.num_examples, data.evaluation.num_examples) for data in divided]
        assert sizes == [(32, 8), (32, 8), (40, 10)]

    def test_streams_are_read_to_their_end(self, rows, tmp_path):
        data = self.load(rows.to_iterable_dataset(), tmp_path, max_train_samples=20)
        assert (data.train.num_examples, data.evaluation.num_examples) == (20, 8)
        streams = IterableDatasetDict({name: rows.to_iterable_dataset() for name in ("train", "validation")})
        data = self.load(streams, tmp_path, max_eval_samples=10)
        assert (data.train.num_examples, data.evaluation.num_examples, data.eval_split) == (40, 10, "validation")

    @pytest.mark.parametrize("known", [True, False], ids=["features", "no features"])
    def test_images_of_streams_keep_their_pixels(self, known, tmp_path):
        """Images of JPEG files were compressed again."""
        files = [tmp_path / f"{number}.jpg" for number in range(4)]
        for file in files:
            PILImage.effect_noise((20, 20), 50).save(file, quality=90)
        columns = {"image": [*map(str, files)], "label": [0, 0, 1, 1]}
        rows = Dataset.from_dict(columns).cast_column("image", Image()).to_iterable_dataset()
        if not known:
            rows = rows.map(lambda row: {"number": 1})
        stored = as_splits(rows.with_format("torch"))["train"]
        for cell, file in zip(stored.cast_column("image", Image())["image"], files, strict=True):
            np.testing.assert_array_equal(cell, PILImage.open(file))
        if known:
            encoded = stored.cast_column("image", Image(decode=False))["image"]
            assert [cell["bytes"] for cell in encoded] == [file.read_bytes() for file in files]


def test_class_balanced_sampling_draws_each_class_equally_often_on_average(tmp_path, load_named):
    path = str(folder(tmp_path, cats=40, dogs=10))
    data = load_named(path, class_balanced_sampling=True)
    drawn = [label for epoch in range(40) for batch in data.train.epoch(epoch) for label in batch["labels"].tolist()]
    assert len(drawn) == 40 * 40
    assert abs(np.mean(drawn) - 0.5) < 0.05  # four standard deviations
    assert data.train.epoch_rows(1).equal(data.train.epoch_rows(1))


@pytest.mark.parametrize("channels", [1, 3])
def test_rand_augment_changes_images_by_the_generator_and_nothing_else(channels):
    images = torch.randint(0, 256, (6, channels, 12, 12), dtype=torch.uint8)
    augment = Augmentation(rand_augment=(2, 9))
    before = torch.get_rng_state()
    first, again, other = (augment(images, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.get_rng_state().equal(before)
    assert first.equal(again)
    assert not first.equal(other)
    assert (first.shape, first.dtype) == (images.shape, torch.uint8)
