import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_sphere.utils.files import atomic_file, atomic_files, atomic_folder, restore_folder, write_json, write_text

Write = Callable[[Path], None]


def names(folder: Path) -> list[str]:
    """All files and folders below a folder, hidden ones included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds the file `old`."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()
    return tmp_path / "folder"


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def write_safetensors(path: Path) -> None:
    with atomic_file(path) as unfinished:
        save_file({"weight": torch.ones(2)}, unfinished)
        unfinished.chmod(0o600)  # like some versions of the library


def write_in_folder(path: Path) -> None:
    with atomic_folder(path.parent / "new") as unfinished:
        write_private(unfinished / path.name)


def write_among_files(path: Path) -> None:
    with atomic_files(path.parent / "new") as unfinished:
        write_private(unfinished / path.name)


def write_private(path: Path) -> None:
    path.touch()
    path.chmod(0o600)


# Mode


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)], ids=oct)
@pytest.mark.parametrize(
    "write", [lambda path: write_text(path, "text"), write_safetensors, write_in_folder, write_among_files]
)
def test_file_modes_follow_the_umask(write: Write, mask: int, mode: int, tmp_path: Path):
    with umask(mask):
        write(tmp_path / "file")
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_the_mode_of_a_replaced_file_follows_the_umask(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o600)
    with umask(0o022):
        write_text(tmp_path / "file", "text")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


# Files


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    write_text(tmp_path / "file", "old")
    with atomic_file(tmp_path / "file") as unfinished:
        unfinished.write_text("new")
        assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "file").read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_the_folder_of_a_file_is_created(tmp_path):
    write_json(tmp_path / "a" / "b" / "file.json", {"path": Path("x")})
    assert json.loads((tmp_path / "a" / "b" / "file.json").read_text()) == {"path": "x"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_keeps_the_old_file_and_leaves_no_temporary_file(error, tmp_path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(error), atomic_file(tmp_path / "file") as unfinished:  # noqa: PT012
        unfinished.write_text("half")
        raise error
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_an_error_before_anything_is_written_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="stop"), atomic_file(tmp_path / "file"):
        raise ValueError("stop")
    assert names(tmp_path) == []


def test_several_files_replace_files_of_the_same_name_and_keep_others(folder):
    write_text(folder / "model", "old")
    with atomic_files(folder) as unfinished:
        (unfinished / "model").write_text("new")
        (unfinished / "config").touch()
        assert (folder / "model").read_text() == "old"
    assert names(folder) == ["config", "model", "old"]
    assert (folder / "model").read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_keeps_all_old_files(error, folder):
    write_text(folder / "model", "old")
    with pytest.raises(error), atomic_files(folder) as unfinished:  # noqa: PT012
        (unfinished / "model").write_text("new")
        raise error
    assert (folder / "model").read_text() == "old"
    assert names(folder) == ["model", "old"]


def test_two_overlapping_replacements_in_one_folder_both_arrive(folder):
    with atomic_files(folder) as first:
        (first / "model").touch()
        with atomic_files(folder) as second:
            (second / "config").touch()
    assert names(folder) == ["config", "model", "old"]


# Folders


def test_a_folder_appears_when_the_block_ends(tmp_path):
    with atomic_folder(tmp_path / "new") as unfinished:
        (unfinished / "file").touch()
        assert not (tmp_path / "new").exists()
    assert names(tmp_path) == ["new", "new/file"]


def test_a_folder_replaces_the_old_one(folder, tmp_path):
    with atomic_folder(folder) as unfinished:
        (unfinished / "file").touch()
    assert names(tmp_path) == ["folder", "folder/file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_keeps_the_old_folder_and_leaves_no_temporary_folder(error, folder, tmp_path):
    with pytest.raises(error), atomic_folder(folder) as unfinished:  # noqa: PT012
        (unfinished / "file").touch()
        raise error
    assert names(tmp_path) == ["folder", "folder/old"]


KILLED = """
import os, sys
from pathlib import Path
from hf_sphere.utils.files import atomic_folder

rename = Path.rename

def rename_once(self, target):
    Path.rename = lambda *args: os._exit(9)  # as if killed: no cleanup
    return rename(self, target)

Path.rename = rename_once
with atomic_folder(sys.argv[1]) as unfinished:
    (unfinished / "file").touch()
"""


@pytest.fixture
def interrupted(folder: Path) -> Path:
    """The folder, after a process was killed between the two renames of its replacement."""
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)]).returncode == 9
    assert not folder.exists()
    return folder


def test_a_replacement_killed_between_its_renames_is_restored(interrupted):
    restore_folder(interrupted)
    assert names(interrupted) == ["old"]


def test_the_next_replacement_restores_the_folder_even_if_it_fails(interrupted, tmp_path):
    with pytest.raises(ValueError, match="stop"), atomic_folder(interrupted):
        raise ValueError("stop")
    assert names(tmp_path) == ["folder", "folder/old"]


def test_the_next_replacement_removes_leftovers_of_a_killed_one(interrupted, tmp_path):
    with atomic_folder(interrupted) as unfinished:
        (unfinished / "new").touch()
    assert names(tmp_path) == ["folder", "folder/new"]


def test_leftovers_next_to_a_complete_folder_are_removed(folder, tmp_path):
    for name in (".folder.unfinished", ".folder.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "older").touch()
    with atomic_folder(folder) as unfinished:
        (unfinished / "file").touch()
    assert names(tmp_path) == ["folder", "folder/file"]


def test_restoring_keeps_a_complete_folder(folder, tmp_path):
    (tmp_path / ".folder.replaced").mkdir()
    restore_folder(folder)
    assert names(tmp_path) == ["folder", "folder/old"]
