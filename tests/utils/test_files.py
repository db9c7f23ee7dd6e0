import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from hf_sphere.utils.files import (
    MANIFEST_FILE,
    atomic_file,
    atomic_files,
    atomic_folder,
    check_writable,
    find_damage,
    lock_folder,
    read_json,
    read_whole,
    restore_folder,
    write_json,
    write_manifest,
    write_text,
)


def names(folder: Path) -> list[str]:
    """All files and folders below a folder, hidden ones included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds the file `old`."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()
    return tmp_path / "folder"


# Files


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)], ids=oct)
@pytest.mark.parametrize("write", [atomic_file, atomic_files, atomic_folder])
def test_file_modes_follow_the_umask(write, mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        with write(tmp_path / "new") as unfinished:
            file = unfinished if write is atomic_file else unfinished / "file"
            file.touch()
            file.chmod(0o600)  # like some versions of safetensors
    finally:
        os.umask(before)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    file = tmp_path / "a" / "b" / "file"
    write_json(file, {"path": Path("x")})  # creates the folder
    assert json.loads(file.read_text()) == {"path": "x"}
    file.chmod(0o600)
    with atomic_file(file) as unfinished:
        unfinished.write_text("new")
        assert file.read_text() != "new"
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) != 0o600
    assert names(file.parent) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("write", [atomic_file, atomic_files, atomic_folder])
def test_an_error_keeps_what_was_there_and_leaves_nothing_temporary(write, error, folder, tmp_path):
    is_file = write is atomic_file
    with pytest.raises(error), write(folder / "old" if is_file else folder) as unfinished:  # noqa: PT012
        (unfinished if is_file else unfinished / "old").write_text("half")
        raise error
    assert names(tmp_path) == ["folder", "folder/old"]
    assert (folder / "old").read_text() == ""


def test_several_files_replace_files_of_the_same_name_and_keep_others_also_if_two_overlap(folder):
    write_text(folder / "model", "old")
    with atomic_files(folder) as unfinished:
        (unfinished / "model").write_text("new")
        with atomic_files(folder) as second:
            (second / "config").touch()
        assert (folder / "model").read_text() == "old"
    assert names(folder) == ["config", "model", "old"]
    assert (folder / "model").read_text() == "new"


# Folders


def test_a_folder_appears_or_replaces_the_old_one_when_the_block_ends(folder, tmp_path):
    for path in (tmp_path / "new", folder):
        before = names(path)
        with atomic_folder(path) as unfinished:
            (unfinished / "file").touch()
            assert names(path) == before
    assert names(tmp_path) == ["folder", "folder/file", "new", "new/file"]


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
    """The folder, as if a process was killed between the two renames of its replacement."""
    folder.rename(folder.with_name(".folder.replaced"))
    folder.with_name(".folder.0123abcd.unfinished").mkdir()
    return folder


def test_a_replacement_killed_between_its_renames_is_restored(folder, tmp_path):
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)]).returncode == 9
    assert not folder.exists()
    restore_folder(folder)
    assert names(folder) == ["old"]
    (tmp_path / ".folder.replaced").mkdir()
    restore_folder(folder)  # which keeps a complete folder
    with atomic_folder(folder):
        pass
    assert names(tmp_path) == ["folder"]


def test_the_next_replacement_restores_the_folder_even_if_it_fails(interrupted, tmp_path):
    with pytest.raises(ValueError, match="stop"), atomic_folder(interrupted):
        raise ValueError("stop")
    assert names(tmp_path) == ["folder", "folder/old"]


def test_leftovers_of_a_folder_or_file_are_removed_but_not_those_of_another(folder, tmp_path):
    for name in (".folder.0123abcd.unfinished", ".folder.replaced", ".folder.b.0123abcd.unfinished"):
        (tmp_path / name).mkdir()
    (tmp_path / ".folder.replaced" / "older").touch()
    with atomic_folder(folder) as unfinished:
        (unfinished / "file").touch()
    assert names(tmp_path) == [".folder.b.0123abcd.unfinished", "folder", "folder/file"]
    (tmp_path / ".file.0123abcd.unfinished").touch()
    with lock_folder(tmp_path / "file"):
        assert (tmp_path / ".file.lock.unfinished").exists()
    assert names(tmp_path) == [".folder.b.0123abcd.unfinished", "folder", "folder/file"]


# Several writers

WRITE = """
import sys
from pathlib import Path
from hf_sphere.utils.files import atomic_folder, lock_folder

folder, number = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
with atomic_folder(folder) as unfinished:
    for name in "ab":
        (unfinished / name).write_text(number)
with lock_folder(added := folder.with_name("added")):
    path = added / "numbers"
    numbers = path.read_text() if path.exists() else ""
    with atomic_folder(added) as unfinished:
        (unfinished / "numbers").write_text(f"{numbers}{number} ")
"""


def test_processes_leave_one_complete_folder_and_lose_nothing_under_a_lock(folder, tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", WRITE, str(folder)]
    writers = [subprocess.Popen([*words, str(number)], **pipes) for number in range(4)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert names(tmp_path) == ["added", "added/numbers", "folder", "folder/a", "folder/b"]
    assert (folder / "a").read_text() == (folder / "b").read_text()
    assert sorted((tmp_path / "added" / "numbers").read_text().split()) == [str(number) for number in range(4)]


def test_threads_replace_a_folder_and_a_reader_gets_one_version_of_it(folder, tmp_path):
    stop = threading.Event()

    def replace(number: int) -> None:
        while not stop.is_set():
            with atomic_folder(folder) as unfinished:
                for name in "ab":
                    (unfinished / name).write_text(str(number))
            number += 2
            time.sleep(0.02)

    def read(current: Path) -> tuple[str, str]:
        first = (current / "a").read_text()
        time.sleep(0.01)
        return first, (current / "b").read_text()

    with atomic_folder(folder) as unfinished:
        for name in "ab":
            (unfinished / name).write_text("old")
    writers = [threading.Thread(target=replace, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    try:
        pairs = [read_whole(folder, read) for _ in range(20)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert all(first == second for first, second in pairs)
    assert len(set(pairs)) > 1
    assert names(tmp_path) == ["folder", "folder/a", "folder/b"]
    assert (folder / "a").read_text() == (folder / "b").read_text()


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_reader_restores_a_replacement_that_was_killed(is_linked, interrupted, tmp_path):
    (tmp_path / "link").symlink_to(interrupted)
    path = tmp_path / "link" if is_linked else interrupted
    check_writable(path)
    assert read_whole(path, names) == ["old"]
    assert names(tmp_path) == ["folder", "folder/old", "link"]


def test_an_error_of_a_reader_is_raised_if_nothing_was_replaced(folder, tmp_path):
    for error in (ValueError("damaged"), FileNotFoundError("no file")):
        with pytest.raises(type(error), match=str(error)):
            read_whole(folder, mock.Mock(side_effect=error))
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "none", lambda current: (current / "file").read_text())


def test_a_writer_that_waits_logs_it(folder, caplog, monkeypatch):
    monkeypatch.setattr("hf_sphere.utils.files.SECONDS_TO_MESSAGE", 0.1)

    def write() -> None:
        with atomic_folder(folder):
            pass

    with lock_folder(folder):
        waiting = threading.Thread(target=write)
        waiting.start()
        while not caplog.text:
            time.sleep(0.01)
    waiting.join()
    assert f"Waiting for another process, which writes {folder}." in caplog.text


# Links, and checks before the work


@pytest.fixture
def link(folder: Path, tmp_path: Path) -> Path:
    """A link to the folder."""
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    return tmp_path / "link"


def test_a_linked_folder_is_replaced_behind_its_link_every_time(link, folder, tmp_path):
    for number in range(3):
        with atomic_folder(link) as unfinished:
            (unfinished / str(number)).touch()
        assert names(folder) == [str(number)]
    assert link.is_symlink()
    assert names(tmp_path) == ["folder", "folder/2", "link"]


def test_a_linked_file_keeps_its_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/file")
    (tmp_path / "elsewhere" / "file").write_text("old")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "elsewhere" / "file").read_text() == "new"
    with atomic_files(tmp_path) as unfinished:
        (unfinished / "link").write_text("newer")
    assert (tmp_path / "elsewhere" / "file").read_text() == "newer"
    assert names(tmp_path) == ["elsewhere", "elsewhere/file", "link"]


@pytest.mark.parametrize("text", ["[]", "{", None])
def test_a_damaged_json_file_is_named(text, tmp_path):
    path = tmp_path / "about.json"
    path.symlink_to("/dev/zero") if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=r"about\.json is (damaged|not a regular file)"):
        read_json(path)


def test_a_check_writes_nothing(folder, link, tmp_path):
    before = names(tmp_path)
    for name in ("new", "a/b/new", "link"):
        check_writable(tmp_path / name)
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("path", "is_folder", "message"),
    [
        (".", True, "it is the working directory or a mount; name a folder in it"),
        ("/proc", True, "it is the working directory or a mount"),
        ("/proc/index", True, "it cannot be written"),  # on a read-only disk
        ("file", True, "exists and is no folder"),
        ("folder", False, "exists and is no file"),
        ("/dev/null", False, "exists and is no file"),
    ],
)
def test_what_cannot_be_written_is_found_before_the_work(path, is_folder, message, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(OSError, match=message):
        check_writable(path, is_folder=is_folder)
    assert names(tmp_path) == ["file", "folder", "folder/old"]


# Manifests


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A folder with two files and a manifest."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    (tmp_path / "inner" / "b").write_text("text")
    (tmp_path / ".DS_Store").touch()  # of a file manager, so it is not in the manifest
    write_manifest(tmp_path)
    return tmp_path


def test_manifest_lists_names_sizes_and_checksums_and_other_files_are_ignored(listed):
    files = json.loads((listed / MANIFEST_FILE).read_text())["files"]
    assert files["inner/b"] == {"size": 4, "crc32": "3b8ba7c7"}
    assert sorted(files) == ["a", "inner/b"]
    (listed / "notes.txt").touch()
    assert find_damage(listed) is None
    assert find_damage(listed, ["a"]) is None
    assert find_damage(listed, ["a", "c"]) == "c is missing"


@pytest.mark.parametrize("position", [0, (1 << 20) - 1, 1 << 20, (3 << 20) - 1])
def test_every_block_is_compared(listed, position):
    with (listed / "a").open("r+b") as file:
        file.seek(position)
        file.write(b"\x01")
    assert find_damage(listed) == "a is damaged: it does not match its checksum in manifest.json"


def test_missing_and_truncated_files_and_manifests_are_found(listed):
    (listed / "inner" / "b").unlink()
    assert find_damage(listed) == "inner/b is missing"
    (listed / "a").write_bytes(b"abc")
    assert find_damage(listed).startswith("a is damaged")
    for text in ("", "{", "[]", "{}", '{"files": {"a": 3}}', '{"files": {"a": {}}}'):
        (listed / MANIFEST_FILE).write_text(text)
        assert find_damage(listed) == "manifest.json is damaged"
    (listed / MANIFEST_FILE).unlink()
    assert find_damage(listed, ["a"]) == "manifest.json is missing"
