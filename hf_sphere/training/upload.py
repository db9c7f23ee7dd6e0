"""The upload of a model with its card to the Hub."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.constants import EVAL_RESULTS_FOLDER
from huggingface_hub.errors import LocalTokenNotFoundError

from hf_sphere.data.folders import leaves
from hf_sphere.training.output_dir import RESULTS_FILE, RUN_FILE
from hf_sphere.utils.checks import error_text
from hf_sphere.utils.files import RECORD_FILE
from hf_sphere.utils.privacy import find_private, hide_private

CARD_FILE = "README.md"

PUBLIC_FILES = {
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("preprocessor_config.json", "processor_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *(CARD_FILE, RUN_FILE, RESULTS_FILE, RECORD_FILE),
}
"""Files of a model that are uploaded, besides shards of weights and vocabularies."""

_VOCABULARIES = {
    *("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
}
"""Files whose tokens may look like paths."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def split_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files of a folder that belong to a model, to be uploaded, and the names of what stays."""
    names = PUBLIC_FILES | _VOCABULARIES
    files = [path for path in folder.iterdir() if path.name in names or _SHARD.fullmatch(path.name)]
    files = [path for path in [*files, *folder.glob(f"{EVAL_RESULTS_FOLDER}/*.yaml")] if path.is_file()]
    uploaded = {path.relative_to(folder).parts[0] for path in files}
    return sorted(files), sorted({path.name for path in folder.iterdir()} - uploaded)


def upload(folder: Path, files: Sequence[Path], repo_id: str, *, private: bool | None = None) -> str:
    """Upload files of a folder in one commit; access tokens and local paths are removed from the card and `run.json`.

    The repository is created if there is none, `private` or by default as its owner has set. Its name is returned with
    that of the owner. Credentials or local paths in what would be uploaded, and links out of the folder, are a
    `ValueError` that lists them, and all errors of the Hub are a `ConnectionError`.
    """
    if private_texts := [f"{path.relative_to(folder)}{what}" for path in files for what in _find_private(folder, path)]:
        more = f" and {len(private_texts) - 20:,} more" if len(private_texts) > 20 else ""
        hint = "Nothing was uploaded; remove them, or copy what is linked"
        raise ValueError(f"{folder} has what must not be public: {'; '.join(private_texts[:20])}{more}. {hint}.")
    hub = HfApi()
    try:
        repo_id = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
        operations = [CommitOperationAdd(p.relative_to(folder).as_posix(), _public_content(p, repo_id)) for p in files]
        hub.create_commit(repo_id, operations, commit_message="Upload trained model")
    except Exception as error:  # huggingface_hub also raises the errors of its HTTP library
        status, why = getattr(getattr(error, "response", None), "status_code", None), error_text(error).rstrip(".")
        if status == 401 or isinstance(error, LocalTokenNotFoundError):
            why = "the Hub does not accept your token, or there is none; log in with hf auth login, or set HF_TOKEN"
        elif status == 403:
            why = f"your token may not write to {repo_id}; use one that may, or another name"
        raise ConnectionError(f"the upload failed: {why}.") from error
    return repo_id


def _find_private(folder: Path, path: Path) -> Iterator[str]:
    """Yield what must not be public in a file, with its line."""
    if leaves(Path(os.path.realpath(folder)), path):
        yield " is a link to a file outside the folder"
        return
    content = _public_content(path, "")
    if isinstance(content, str):  # the header of safetensors may have texts
        with path.open("rb") as file:
            content = file.read(int.from_bytes(file.read(8), "little"))
    for line, what in find_private(content.decode(errors="replace"), paths=path.name not in _VOCABULARIES):
        yield f", line {line}: {what}"


def _public_content(path: Path, repo_id: str) -> bytes | str:
    """Return the content of a file, of the card and `run.json` without private text; of weights their path."""
    if path.suffix == ".safetensors":
        return str(path)
    if path.name not in (CARD_FILE, RUN_FILE):
        return path.read_bytes()
    text = path.read_text(encoding="utf-8", errors="replace")
    return hide_private(rename_model(text, repo_id) if path.name == CARD_FILE else text).encode()


def rename_model(card: str, name: str) -> str:
    """Return the text of a card whose code loads the model by another name."""
    model = re.search(r'\bmodel(?:_id)? ?= ?("[^"\n]+")', card)
    return card.replace(model[1], json.dumps(name)) if model else card
