"""The job `publish`; the uploads themselves are tested in `tests/hub`."""

import json
import shutil
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import transformers.utils.hub  # noqa: F401  (it uses `HfApi` in an annotation, which a double does not allow)
from doubles import hub
from httpx import Request, Response
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file

from hf_sphere.commands import publish
from hf_sphere.utils.texts import find_private


@pytest.fixture
def folder(root, tmp_path):
    """A copy of a card folder with weights."""
    return shutil.copytree(root / "hub_cards" / "mnist-lenet5-plain", tmp_path / "model")


@pytest.fixture
def commits(monkeypatch) -> dict[str, bytes]:
    """The files that were uploaded to `me/model`."""
    uploads: dict[str, dict[str, bytes]] = {"me/model": {}}
    monkeypatch.setattr("huggingface_hub.HfApi", hub(uploads))
    return uploads["me/model"]


def upload(folder: Path) -> None:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    publish.upload(folder, names, "model")


def test_checkpoints_logs_pickles_local_paths_and_what_does_not_belong_to_a_model_stay(folder, commits, capsys):
    for name in ("checkpoint-10/model.safetensors", "logs/events", "snapshots/1.safetensors", "best/config.json"):
        (folder / name).parent.mkdir()
        (folder / name).touch()
    left = [
        ".local_paths.json",
        ".run.lock",
        "customers.json",
        "draft.md",
        "more.safetensors",
        "notes.pdf",
        "notes.txt",
    ]
    for name in (*left, "pytorch_model.bin"):
        (folder / name).write_text("private")
    publish.main([str(folder), "--repo_id", "model"])
    kept = {"README.md", "config.json", "preprocessor_config.json", "model.safetensors", ".eval_results/results.yaml"}
    assert set(commits) == kept
    names = ", ".join(sorted([*left, "pytorch_model.bin", "best", "checkpoint-10", "logs", "snapshots"]))
    assert f"left out  {names}\n" in capsys.readouterr().out


PRIVATE = [
    *("hf_" + "a" * 30, "ghp_" + "A1b" * 12, "https://user:password@host/a.git", "AKIA" + "Z" * 16),
    *("sk-" + "a1" * 12, "password=correct-horse", "-----BEGIN RSA PRIVATE KEY-----"),
    *("/home/alice/photos", "file:///home/alice/a.png", "C:\\Users\\alice\\photos", "/Users/alice/a.png"),
    "~alice/photos",
    *("\\\\server\\share\\a", "/data/alice/photos/a.png"),
]


@pytest.mark.parametrize("name", ["config.json", "README.md"])
@pytest.mark.parametrize("text", PRIVATE)
def test_an_upload_of_private_text_stops_with_a_list(folder, commits, name, text):
    with (folder / name).open("a") as file:
        file.write(f"\n{json.dumps(text)}\n")
    with pytest.raises(ValueError, match=rf"what must not be public: {name}, line \d+: a (credential|local path), "):
        upload(folder)
    assert not commits


def test_a_card_that_is_not_utf8_is_uploaded(folder, commits):
    card = (folder / "README.md").read_bytes()
    (folder / "README.md").write_bytes(card + b"\nM\xfcnchen\n")
    upload(folder)
    assert commits["README.md"].endswith("\nM\ufffdnchen\n".encode())


def test_metadata_of_weights_and_links_out_of_the_folder_stop_the_upload(folder, commits, tmp_path):
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", {"format": "pt", "from": "/home/alice/model"})
    (folder / "run.json").symlink_to(shutil.copy(folder / "config.json", tmp_path / "secret.json"))
    said = r"run.json is a link out of it; model.safetensors, line 1: a local path, /home/alice/model"
    with pytest.raises(ValueError, match=said):
        upload(folder)
    assert not commits


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
    with pytest.raises(
        ValueError, match=r"none is incomplete: it has no config.json; name the folder of a finished training"
    ):
        publish.main([str(tmp_path / "none"), "--repo_id", "model"])


def test_an_invalid_name_is_refused_when_the_command_line_is_parsed(folder, capsys):
    with pytest.raises(SystemExit):
        publish.main([str(folder), "--repo_id", "a/b/c"])
    assert "Repo id must be" in capsys.readouterr().err


def test_an_error_of_the_hub_is_one_sentence_with_the_command_to_try_again(folder, monkeypatch):
    error = HfHubHTTPError("server\n\nerror", response=Response(500, request=Request("POST", "https://hub")))
    monkeypatch.setattr(HfApi, "create_repo", create_autospec(HfApi.create_repo, side_effect=error))
    said = r"^the upload failed: server error\. .*; to try again: hf-sphere publish .*model --repo_id model$"
    with pytest.raises(ConnectionError, match=said):
        upload(folder)


def test_no_card_of_this_library_is_refused(root):
    for card in sorted((root / "hub_cards").iterdir()):
        texts = [file.read_text() for file in card.rglob("*") if file.suffix in (".md", ".json", ".yaml")]
        assert [found for text in texts for found in find_private(text)] == []
