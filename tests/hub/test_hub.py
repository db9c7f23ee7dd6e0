"""Uploads to and downloads from a model hub over HTTP; the hub is a server on 127.0.0.1."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles import running
from fresh_python import run_fresh
from hub_server import Hub

from hf_sphere.models.sphere_encoder import ENCODERS

TOKEN = "hf_SecretOfTheTests"
CLIENT = Path(__file__).with_name("hub_client.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running(server := Hub(TOKEN)):
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The home and the outputs of the client."""
    return tmp_path_factory.mktemp("hub_client")


def run_client(hub: Hub, folder: Path, *words: object) -> str:
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    own |= {"HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "NO_PROXY": "*"}
    ended = run_fresh(
        [sys.executable, CLIENT, *words], capture_output=True, text=True, timeout=600, env=os.environ | own
    )
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed
    return printed


@pytest.fixture(scope="module")
def pushed(hub, folder) -> dict:
    """What a process uploads and loads again. The first commit and the next upload of weights are interrupted."""
    hub.interruptions += ["/commit/", "/objects/"]
    (folder / "push.txt").write_text(run_client(hub, folder, "push", folder / "pushed.json"))
    return json.loads((folder / "pushed.json").read_text())


@pytest.fixture(scope="module")
def trained(pushed, hub, folder) -> dict:
    """What another process loads, after a training run whose first upload is interrupted."""
    hub.interruptions += ["/commit/"]
    (folder / "train.txt").write_text(run_client(hub, folder, "train", folder / "pushed.json", folder / "run"))
    return json.loads((folder / "trained.json").read_text())


def test_models_of_every_family_and_processors_are_the_same_after_a_download_and_in_another_process(pushed, trained):
    assert len(pushed) == 5 + 4 + len(ENCODERS) - 1
    for name, seen in pushed.items():
        assert trained["loaded"][name] == seen["after"], name
        assert "hf_sphere" in seen["after"]["tags"], name
        assert seen["after"] == seen["before"] | {"tags": seen["after"]["tags"]}, name


def test_an_upload_whose_commit_was_interrupted_can_be_repeated(pushed, hub):
    first, *others = pushed
    assert pushed[first]["failure"] == "RemoteProtocolError"
    assert not any(pushed[name]["failure"] for name in others)
    assert "/objects/" not in hub.interruptions  # which huggingface_hub repeats itself


def test_a_trained_model_is_uploaded_with_card_and_results(trained, hub):
    own = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", ".gitattributes"}
    assert set(trained["files"]) == own | {"run.json", "all_results.json", "training_data.json"}
    assert "tester/digits-model" in trained["card"]


def test_a_run_whose_upload_was_interrupted_is_published_later_with_a_list_of_what(trained, folder):
    printed = (folder / "train.txt").read_text()
    assert "the upload failed: Server disconnected" in printed
    assert f"to try again: hf-sphere publish {folder / 'run'} --repo_id tester/digits-model" in printed
    assert "uploaded to tester/digits-model" in printed
    listed = (folder / "train.txt").read_text().splitlines()
    assert [line for line in listed if line.startswith("upload    model.safetensors, ")]
    (left,) = {line for line in listed if line.startswith("left out  ")}
    assert {".local_paths.json", "checkpoint-1"} <= set(left.removeprefix("left out  ").split(", "))


def test_a_card_folder_is_published_with_its_own_name_in_the_code(trained, hub):
    files = hub.repos["tester/lenet5"]
    assert {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"} <= set(files)
    assert ".eval_results/results.yaml" in files
    assert b'model_id = "tester/lenet5"' in files["README.md"]
    assert b'"hub_cards' not in files["README.md"]
    assert hub.created["tester/lenet5"]["visibility"] == "private"


def test_the_token_is_in_no_file_and_no_output(trained, folder, hub):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"run.json", "README.md", "train.txt", "pushed.json"} <= {path.name for path in files}
    contents = {str(path): path.read_bytes() for path in files}
    contents |= {f"{repo}/{path}": data for repo, files in hub.repos.items() for path, data in files.items()}
    assert [name for name, content in contents.items() if TOKEN.encode() in content] == []
