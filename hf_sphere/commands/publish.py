"""Upload a trained model with its card to the Hub.

hf-sphere publish outputs/birds --repo_id me/birds
hf-sphere publish hub_cards/mnist-lenet5-plain --repo_id mnist-lenet5-plain --private

Weights, settings, vocabularies, results and card are uploaded; checkpoints, logs and other files are not. Nothing is
uploaded if a text has credentials or local paths, or a file is a link out of the folder; they are listed. Log in with
`hf auth login` before, or set `HF_TOKEN`.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from hf_sphere.utils.arguments import Arguments, argument, named_first, parse_arguments
from hf_sphere.utils.checks import error_text
from hf_sphere.utils.files import RECORD_FILE
from hf_sphere.utils.texts import find_private

_VOCABULARIES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files whose tokens may look like paths."""

PUBLIC_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("preprocessor_config.json", "processor_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("README.md", "run.json", "all_results.json", RECORD_FILE, ".eval_results/*.yaml", "model-*-of-*.safetensors"),
    *_VOCABULARIES,
)
"""Files of a model that are uploaded."""


@dataclass
class PublishArguments(Arguments):
    """Model and repository."""

    folder: str = argument(help="Output folder of a training run; can also be passed without --folder.")
    repo_id: str = argument(help="Name of the repository, owner/name; without an owner it is yours.")
    private: bool = argument(False, "Create a private repository; one that exists keeps its visibility.")

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_repo_id(self.repo_id)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, check the folder and upload it."""
    (args,) = parse_arguments((PublishArguments,), named_first("folder", argv), __doc__)
    from hf_sphere.export import load_saved

    folder = Path(args.folder)
    files = sorted(path for pattern in PUBLIC_FILES for path in folder.glob(pattern) if path.is_file())
    names = [str(file.relative_to(folder)) for file in files]
    needed = ["config.json", "README.md"]
    if {*needed} <= {*names}:
        is_of_images = load_saved(folder).main_input_name == "pixel_values"
        needed.append("preprocessor_config.json" if is_of_images else "tokenizer_config.json")
    if missing := [name for name in needed if name not in names]:
        raise ValueError(f"{folder} is incomplete: it has no {missing[0]}; name the folder of a finished training.")
    for file, name in zip(files, names, strict=True):
        print(f"upload    {name}, {file.stat().st_size:,} bytes")
    if others := sorted({path.name for path in folder.iterdir()} - {Path(name).parts[0] for name in names}):
        print(f"left out  {', '.join(others)}")
    print(f"uploaded to {upload(folder, names, args.repo_id, private=args.private or None)}")


def upload(folder: Path, names: Sequence[str], repo_id: str, *, private: bool | None = None) -> str:
    """Upload files of a model in one commit; the code of its card then loads it from the Hub.

    The repository is created if there is none, `private` or by default as its owner has set. Its name is returned with
    that of the owner. Credentials, local paths, and links out of the folder are a `ValueError` that lists them, and all
    errors of the Hub are a `ConnectionError`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    from hf_sphere.training.model_card import rename_model

    root = folder.resolve()
    found = [f"{name} is a link out of it" for name in names if root not in (root / name).resolve().parents]
    for name in names:
        with (folder / name).open("rb") as file:
            size = int.from_bytes(file.read(8), "little") if name.endswith(".safetensors") else -1  # of its header
            text = file.read(size).decode(errors="replace")
        found += [f"{name}, line {line}: {what}" for line, what in find_private(text, paths=name not in _VOCABULARIES)]
    if found:
        what = f"{folder} has what must not be public: {'; '.join(found[:20])}"
        raise ValueError(f"{what}. Nothing was uploaded; remove it, and try again.")
    hub = HfApi()
    try:
        repo_id = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
        text = (folder / "README.md").read_bytes().decode(errors="replace")
        card = {"README.md": rename_model(text, repo_id).encode()}
        operations = [CommitOperationAdd(name, card.get(name, folder / name)) for name in names]
        hub.create_commit(repo_id, operations, commit_message="Upload trained model")
    except Exception as error:  # huggingface_hub also raises the errors of its HTTP library
        again = f"hf-sphere publish {shlex.quote(str(folder))} --repo_id {repo_id}"
        problem = f"the upload failed: {error_text(error).rstrip('.')}. Log in with hf auth login, or set HF_TOKEN"
        raise ConnectionError(f"{problem}; to try again: {again}") from error
    return repo_id
