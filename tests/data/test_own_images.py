"""Images as people have them: folders of files, without a test split, with damaged files among them."""

import numpy as np
import pytest
from PIL import Image as PILImage

from hf_sphere.data import CorruptImageError


@pytest.fixture
def folder(tmp_path):
    """Write images of given classes (none: directly into the folder) and return the folder."""

    def write(**counts: int):
        generator = np.random.default_rng(0)
        for name, count in counts.items():
            where = tmp_path / "pictures" / ("" if name == "unlabeled" else name)
            where.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                PILImage.fromarray(generator.integers(0, 255, (8, 8, 3), np.uint8)).save(where / f"{index}.png")
        return tmp_path / "pictures"

    return write


class TestFileNames:
    def test_images_of_a_class_folder_are_named_relative_to_it(self, folder, load_one):
        images = load_one(str(folder(cats=2, dogs=1)), "train")
        assert images.file_names == ["cats/0.png", "cats/1.png", "dogs/0.png"]

    def test_names_are_indexed_by_row_if_classes_and_images_are_left_out(self, folder, load_one):
        path = folder(cats=3, dogs=3)
        (path / "dogs" / "1.png").write_bytes(b"")
        images = load_one(str(path), "train", select_class=lambda name: name == "dogs", skip_corrupt_images=True)
        rows = images.batches.epoch_rows().tolist()
        assert [images.file_names[row] for row in rows] == ["dogs/0.png", "dogs/2.png"]

    def test_an_unlabeled_folder_has_names_and_no_classes(self, folder, load_one):
        images = load_one(str(folder(unlabeled=2)), "train")
        assert (images.file_names, images.class_names) == (["0.png", "1.png"], [])

    def test_images_without_files_have_no_names(self, load_one):
        assert load_one("digits").file_names == []


class TestDamagedFiles:
    def damage(self, path, kind: str) -> None:
        if kind == "animated":
            frames = [PILImage.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 255)]
            frames[0].save(path / "cats" / "9.gif", save_all=True, append_images=frames[1:])
        elif kind == "huge":
            header = PILImage.new("1", (1, 1))
            header.save(path / "cats" / "9.png")
            data = bytearray((path / "cats" / "9.png").read_bytes())
            data[16:24] = (100_000).to_bytes(4, "big") * 2  # the sides that the file claims
            (path / "cats" / "9.png").write_bytes(bytes(data))
        else:
            (path / "cats" / "9.png").write_bytes(b"" if kind == "empty" else b"no image")

    @pytest.mark.parametrize("kind", ["unreadable", "empty", "huge", "animated"])
    def test_a_damaged_file_is_an_error_that_names_it(self, kind, folder, load_one):
        path = folder(cats=2, dogs=2)
        self.damage(path, kind)
        with pytest.raises(CorruptImageError, match=r"cats/9\.(png|gif)\) of the split .*--skip_corrupt_images"):
            load_one(str(path), "train")

    def test_skipped_files_are_named(self, folder, load_one, caplog):
        path = folder(cats=2, dogs=2)
        self.damage(path, "animated")
        assert load_one(str(path), "train", skip_corrupt_images=True).num_images == 4
        assert "Left out 1 corrupt image(s) of 5: " in caplog.text
        assert "cats/9.gif." in caplog.text
