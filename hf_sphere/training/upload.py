"""The upload of a model with its card to the Hub."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.constants import EVAL_RESULTS_FOLDER
from huggingface_hub.errors import LocalTokenNotFoundError

from hf_sphere.training.output_dir import RUN_FILE
from hf_sphere.utils.checks import error_text
from hf_sphere.utils.privacy import hide_private, hide_tokens

CARD_FILE = "README.md"

_SUFFIXES = {".json", ".safetensors", ".md", ".txt", ".model", ".jinja"}
"""Suffixes of the files that are uploaded: weights, settings, results, vocabularies and card; no pickles."""


def split_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files of a folder to upload, and the names of the files and folders that stay."""
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix in _SUFFIXES and path.name[0] != "."]
    files += [path for path in folder.glob(f"{EVAL_RESULTS_FOLDER}/*.yaml") if path.is_file()]
    uploaded = {path.relative_to(folder).parts[0] for path in files}
    return sorted(files), sorted({path.name for path in folder.iterdir()} - uploaded)


def upload(folder: Path, files: Sequence[Path], repo_id: str, *, private: bool | None = None) -> str:
    """Upload files of a folder in one commit, without access tokens, and the card without local paths.

    The repository is created if there is none, `private` or by default as its owner has set. Its name is returned with
    that of the owner. All errors of the Hub are a `ConnectionError`.
    """
    hub = HfApi()
    try:
        repo_id = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
        operations = [CommitOperationAdd(p.relative_to(folder).as_posix(), _public_content(p, repo_id)) for p in files]
        hub.create_commit(repo_id, operations, commit_message="Upload trained model")
    except Exception as error:  # huggingface_hub also raises the errors of its HTTP library
        raise ConnectionError(f"the upload failed: {_explain(error, repo_id)}.") from error
    return repo_id


def _public_content(path: Path, repo_id: str) -> bytes | str:
    """Return the content of a text file without private text, or the path of another file."""
    if path.suffix == ".safetensors":
        return str(path)
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    text = rename_model(text, repo_id) if path.name == CARD_FILE else text
    return (hide_private(text) if path.name in (CARD_FILE, RUN_FILE) else hide_tokens(text)).encode()


def rename_model(card: str, name: str) -> str:
    """Return the text of a card whose code loads the model by another name."""
    model = re.search(r'\bmodel(?:_id)? ?= ?("[^"\n]+")', card)
    return card.replace(model[1], json.dumps(name)) if model else card


def _explain(error: Exception, repo_id: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401 or isinstance(error, LocalTokenNotFoundError):
        return "the Hub does not accept your token, or there is none; log in with hf auth login, or set HF_TOKEN"
    if status == 403:
        return f"your token may not write to {repo_id}; use one that may, or another name"
    return error_text(error).rstrip(".")
