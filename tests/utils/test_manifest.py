import json
import os
from pathlib import Path

import pytest

from hf_sphere.utils.files import MANIFEST_FILE, find_damage, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two files and a manifest."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    (tmp_path / "inner" / "b").write_text("text")
    (tmp_path / ".DS_Store").touch()  # of a file manager, so it is not in the manifest
    write_manifest(tmp_path)
    return tmp_path


def test_manifest_lists_names_sizes_and_checksums_and_other_files_are_ignored(folder):
    files = json.loads((folder / MANIFEST_FILE).read_text())["files"]
    assert files["inner/b"] == {"size": 4, "crc32": "3b8ba7c7"}
    assert sorted(files) == ["a", "inner/b"]
    assert find_damage(folder) is None
    (folder / "notes.txt").touch()
    assert find_damage(folder) is None
    assert find_damage(folder, ["a"]) is None
    assert find_damage(folder, ["a", "c"]) == "manifest.json is damaged: it does not list c"


@pytest.mark.parametrize("position", [0, (1 << 20) - 1, 1 << 20, (3 << 20) - 1])
def test_every_block_is_compared(folder, position):
    with (folder / "a").open("r+b") as file:
        file.seek(position)
        file.write(b"\x01")
    assert find_damage(folder) == "a is damaged: it does not match its checksum in manifest.json"


def test_missing_unreadable_and_truncated_files_are_found(folder):
    (folder / "inner" / "b").unlink()
    assert find_damage(folder) == "inner/b is missing"
    (folder / "inner").rmdir()
    (folder / "inner").touch()
    assert find_damage(folder).startswith("inner/b cannot be read: ")
    (folder / "a").write_bytes(b"abc")
    assert find_damage(folder) == "a is damaged: it has 3 bytes instead of 3,145,728"
    (folder / MANIFEST_FILE).unlink()
    assert find_damage(folder) == "manifest.json is missing"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": {"a": 3}}', '{"files": {"a": {}}}'])
def test_a_damaged_manifest_is_found(folder, text):
    (folder / MANIFEST_FILE).write_text(text)
    assert find_damage(folder) == "manifest.json is damaged"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("../b", "manifest.json is damaged: ../b is not below the folder"),
        ("/dev/zero", "manifest.json is damaged: /dev/zero is not below the folder"),
        ("pipe", "pipe is not a regular file"),
        ("inner", "inner is not a regular file"),
    ],
)
def test_a_manifest_that_names_no_file_of_the_folder_is_refused(name, damage, folder):
    os.mkfifo(folder / "pipe")
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": {name: {"size": 0, "crc32": "00000000"}}}))
    assert find_damage(folder) == damage
