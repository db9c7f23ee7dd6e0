import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_sphere.training import prepare_output_dir
from hf_sphere.training.output_dir import LOCK_FILE, check_output_dir, locked, read_settings, write_settings


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_output_directory_is_created_with_its_parents_and_may_have_hidden_files_or_checkpoints(tmp_path):
    prepare_output_dir(tmp_path / "a" / "b", overwrite=False, resume=False)
    (tmp_path / "a" / "b" / ".gitignore").touch()
    prepare_output_dir(tmp_path / "a" / "b", overwrite=False, resume=False)
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "a" / "b").rename(tmp_path / ".b")
    (tmp_path / "a").rmdir()
    prepare_output_dir(tmp_path, overwrite=False, resume=True)


def test_unfinished_files_of_a_killed_run_are_removed_and_other_hidden_files_kept(tmp_path):
    unfinished = (".run.json.7.unfinished", "snapshots/.epoch-0003.safetensors.7.unfinished")
    for resume in (True, False):
        for name in ("snapshots", ".checkpoint-2.unfinished"):
            (tmp_path / name).mkdir(exist_ok=True)
        for name in (*unfinished, ".checkpoint-backup", ".checkpoint-2.unfinished/half"):
            (tmp_path / name).touch()
        prepare_output_dir(tmp_path, overwrite=not resume, resume=resume)
        assert names(tmp_path) == [".checkpoint-backup", "snapshots"][: 1 + resume]
        assert not resume or names(tmp_path / "snapshots") == []


def leave(mark: str, folder: Path) -> Path:
    path = folder / mark
    path.mkdir() if mark.startswith("checkpoint") else path.write_text("{}")
    return path


MARKS = ["checkpoint-5", "run.json", "all_results.json"]


@pytest.mark.parametrize("mark", MARKS)
def test_folder_with_another_run_is_left_unchanged_and_the_error_lists_the_options(tmp_path, mark):
    path = leave(mark, tmp_path)
    with pytest.raises(FileExistsError) as refusal:
        prepare_output_dir(tmp_path, overwrite=False, resume=False)
    for word in (str(tmp_path), mark, "--output_dir", "--resume_from_checkpoint latest", "--overwrite_output_dir"):
        assert word in str(refusal.value)
    assert path.exists()


def test_resuming_leaves_the_run_unchanged_and_overwriting_removes_only_the_run(tmp_path):
    for mark in MARKS:
        leave(mark, tmp_path)
    for overwrite in (False, True):
        prepare_output_dir(tmp_path, overwrite=overwrite, resume=True)
        assert names(tmp_path) == sorted(MARKS)
    (tmp_path / "best").mkdir()
    (tmp_path / "notes.txt").touch()
    prepare_output_dir(tmp_path, overwrite=True, resume=False)
    assert names(tmp_path) == ["notes.txt"]


# Directories that are not those of a run


FOREIGN = ["README.md", "model.safetensors", "notes.txt", "data"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_that_is_no_run_is_refused_unless_requested(tmp_path, name):
    (tmp_path / name).mkdir() if name == "data" else (tmp_path / name).touch()
    for resume in (False, True):
        with pytest.raises(FileExistsError, match=rf"files that no run wrote \({name}\)\. .*--overwrite_output_dir"):
            prepare_output_dir(tmp_path, overwrite=False, resume=resume)
    prepare_output_dir(tmp_path, overwrite=True, resume=False)
    assert name != "README.md" or names(tmp_path) == ["README.md"]


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_damaged_settings_are_reported_with_their_file(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"{tmp_path / 'run.json'} is damaged: .*--overwrite_output_dir"):
        check_output_dir(tmp_path, overwrite=False, resume=True)


def test_settings_are_published_without_absolute_paths_and_read_with_those_of_the_last_run(tmp_path):
    settings = {"recipe": "train", "dataset_name": "/data/birds", "seed": 3}
    write_settings(tmp_path, settings)
    assert json.loads((tmp_path / "run.json").read_text()) == {**settings, "dataset_name": "birds"}
    assert read_settings(tmp_path) == settings
    write_settings(tmp_path, {"dataset_name": "digits"})
    assert read_settings(tmp_path) == {"dataset_name": "digits"}


# Locks


HOLD = """
import sys
from filelock import FileLock

lock = FileLock(sys.argv[1])
lock.acquire()
print(" process 7 on a-host", file=open(sys.argv[1], "w"), flush=True)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path) -> Iterator[subprocess.Popen]:
    """Another process that has locked `tmp_path`."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / LOCK_FILE)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        yield process
        process.kill()


def lock(folder: Path) -> None:
    with locked(folder):
        pass


def test_a_folder_in_use_is_refused_with_the_process_and_host_until_it_is_killed(other_run, tmp_path):
    with pytest.raises(FileExistsError, match=f"{tmp_path} is in use by process 7 on a-host[.]"):
        lock(tmp_path)
    other_run.kill()
    other_run.wait()
    assert names(tmp_path) == [LOCK_FILE]
    with locked(tmp_path):
        lock(tmp_path)  # again by the same process
        assert names(tmp_path) == [LOCK_FILE]
    assert names(tmp_path) == []
