import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_sphere.training import prepare_output_dir
from hf_sphere.training.output_dir import LOCK_FILE, locked, read_settings, write_settings


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_output_directory_is_created_with_its_parents_and_may_have_hidden_files(tmp_path):
    for _ in range(2):
        prepare_output_dir(tmp_path / "a" / "b", overwrite=False, resume=False)
        (tmp_path / "a" / "b" / ".gitignore").touch()
    assert ".gitignore" in names(tmp_path / "a" / "b")


def test_unfinished_files_of_a_killed_run_are_removed_and_other_hidden_files_kept(tmp_path):
    for resume in (True, False):
        for name in ("snapshots", ".checkpoint-2.unfinished", ".other-run"):
            (tmp_path / name).mkdir(exist_ok=True)
        unfinished = (".run.json.7.unfinished", "snapshots/.epoch-0003.safetensors.7.unfinished")
        for name in (*unfinished, ".checkpoint-backup", ".checkpoint-2.unfinished/.half.unfinished"):
            (tmp_path / name).touch()
        (tmp_path / ".other-run" / ".run.json.7.unfinished").touch()  # which that run may be writing
        prepare_output_dir(tmp_path, overwrite=not resume, resume=resume)
        assert names(tmp_path) == [".checkpoint-backup", ".other-run", "snapshots"][: 2 + resume]
        assert names(tmp_path / ".other-run") == [".run.json.7.unfinished"]
        assert not resume or names(tmp_path / "snapshots") == []


MARKS = ["checkpoint-5", "run.json", "all_results.json"]


def leave(mark: str, folder: Path) -> None:
    (folder / mark).mkdir() if mark.startswith("checkpoint") else (folder / mark).write_text("{}")


@pytest.mark.parametrize("mark", [*MARKS, "README.md", "model.safetensors", "data.txt"])
def test_folder_with_a_run_or_other_files_is_left_unchanged_and_the_error_lists_the_options(mark, tmp_path):
    leave(mark, tmp_path)
    with pytest.raises(FileExistsError) as refusal:
        prepare_output_dir(tmp_path, overwrite=False, resume=False)
    resume = ["--resume_from_checkpoint latest"] if mark in MARKS else ["files that no run wrote"]
    for word in (str(tmp_path), mark, "--output_dir", "--overwrite_output_dir", *resume):
        assert word in str(refusal.value)
    assert names(tmp_path) == [mark]
    prepare_output_dir(tmp_path, overwrite=True, resume=False)
    assert names(tmp_path) == ([] if mark in MARKS else [mark])


def test_resuming_leaves_the_run_unchanged_and_overwriting_removes_only_the_run(tmp_path):
    for mark in MARKS:
        leave(mark, tmp_path)
    for overwrite in (False, True):
        prepare_output_dir(tmp_path, overwrite=overwrite, resume=True)
        assert names(tmp_path) == sorted(MARKS)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "checkpoint-5-kept").mkdir()
    prepare_output_dir(tmp_path, overwrite=True, resume=False)
    assert names(tmp_path) == ["checkpoint-5-kept", "notes.txt"]


def test_settings_are_published_without_absolute_paths_and_read_with_those_of_the_last_run(tmp_path):
    settings = {"recipe": "train", "dataset_name": "/data/birds", "seed": 3}
    write_settings(tmp_path, settings)
    assert json.loads((tmp_path / "run.json").read_text()) == {**settings, "dataset_name": "birds"}
    assert read_settings(tmp_path) == settings
    write_settings(tmp_path, {"dataset_name": "digits"})
    assert read_settings(tmp_path) == {"dataset_name": "digits"}


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


def test_a_folder_in_use_is_refused_until_its_process_is_killed(other_run, tmp_path):
    with pytest.raises(FileExistsError, match=f"{tmp_path} is in use by another process[.]"):
        lock(tmp_path)
    other_run.kill()
    other_run.wait()
    assert names(tmp_path) == [LOCK_FILE]
    with locked(tmp_path):
        lock(tmp_path)  # again by the same process
        assert names(tmp_path) == [LOCK_FILE]
    assert names(tmp_path) == []
