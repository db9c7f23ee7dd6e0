"""The job `publish`; the uploads themselves are tested in `tests/hub`."""

import json
import shutil

import pytest
from httpx import Request, Response
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from hf_sphere.commands import publish


@pytest.fixture
def folder(root, tmp_path):
    """A copy of a card folder with weights."""
    return shutil.copytree(root / "hub_cards" / "mnist-lenet5-plain", tmp_path / "model")


@pytest.fixture
def commits(monkeypatch) -> dict[str, bytes]:
    """The files that were uploaded."""
    files: dict[str, bytes] = {}

    def commit(self, repo_id, operations, **_):
        files.update({each.path_in_repo: each.path_or_fileobj for each in operations})

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: type("Url", (), {"repo_id": f"me/{repo_id}"}))
    monkeypatch.setattr(HfApi, "create_commit", commit)
    return files


def test_checkpoints_logs_pickles_and_local_paths_stay(folder, commits, capsys):
    for name in ("checkpoint-10/model.safetensors", "logs/events", "snapshots/1.safetensors", "best/config.json"):
        (folder / name).parent.mkdir()
        (folder / name).touch()
    for name in (".local_paths.json", ".run.lock", "pytorch_model.bin", "notes.pdf"):
        (folder / name).touch()
    publish.main([str(folder), "--repo_id", "model"])
    assert set(commits) == {
        *("README.md", "config.json", "preprocessor_config.json", "model.safetensors"),
        ".eval_results/results.yaml",
    }
    left = ".local_paths.json, .run.lock, best, checkpoint-10, logs, notes.pdf, pytorch_model.bin, snapshots"
    assert f"left out  {left}\n" in capsys.readouterr().out


def test_private_text_is_not_uploaded(folder, commits):
    token = "hf_" + "a" * 30
    with (folder / "README.md").open("a") as card:
        card.write(f"\nTrained on /home/someone/images/birds with {token}.\n")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"note": token}))
    publish.main([str(folder), "--repo_id", "model"])
    assert b"Trained on birds with <token>." in commits["README.md"]
    assert token.encode() not in commits["config.json"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("README.md", "is incomplete: it has no README.md"),
        ("preprocessor_config.json", "is incomplete: it has no preprocessor_config.json"),
        ("model.safetensors", "no file named model.safetensors"),
        ("config.json", "is incomplete: it has no config.json"),
    ],
)
def test_an_incomplete_folder_is_refused_before_the_hub_is_asked(folder, commits, name, said):
    (folder / name).unlink()
    with pytest.raises((ValueError, OSError), match=said):
        publish.main([str(folder), "--repo_id", "model"])
    assert not commits


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none is not a folder; name the output folder of a training run"):
        publish.main([str(tmp_path / "none"), "--repo_id", "model"])


def test_an_invalid_name_is_refused_when_the_command_line_is_parsed(folder, capsys):
    with pytest.raises(SystemExit):
        publish.main([str(folder), "--repo_id", "a/b/c"])
    assert "Repo id must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "the upload failed: the Hub does not accept your token, or there is none; log in with hf auth login"),
        (403, "the upload failed: your token may not write to model"),
        (500, "the upload failed: server"),
    ],
)
def test_an_error_of_the_hub_is_one_sentence(folder, monkeypatch, status, said):
    def create(self, *_, **__):
        raise HfHubHTTPError("server\n\nerror", response=Response(status, request=Request("POST", "https://hub")))

    monkeypatch.setattr(HfApi, "create_repo", create)
    with pytest.raises(ConnectionError, match=said) as error:
        publish.main([str(folder), "--repo_id", "model"])
    assert "\n" not in str(error.value)
