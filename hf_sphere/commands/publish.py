"""Upload a trained model with its card to the Hub.

hf-sphere publish outputs/birds --repo_id me/birds
hf-sphere publish hub_cards/mnist-lenet5-plain --repo_id mnist-lenet5-plain --private

Weights, settings, vocabularies, results and card are uploaded; checkpoints, logs and other files are not. Nothing is
uploaded if a text has credentials or local paths, or a file is a link out of the folder; they are listed. Log in with
`hf auth login` before, or set `HF_TOKEN`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from hf_sphere.utils.arguments import Arguments, argument, named_first, parse_arguments


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
    from hf_sphere.models.saved import load_saved
    from hf_sphere.training.model_card import CARD_FILE, split_files, upload

    folder = Path(args.folder)
    files, others = split_files(folder) if folder.is_dir() else ([], [])
    needed = ["config.json", CARD_FILE]
    if {*needed} <= {file.name for file in files}:
        is_of_images = load_saved(folder).main_input_name == "pixel_values"
        needed.append("preprocessor_config.json" if is_of_images else "tokenizer_config.json")
    if missing := [name for name in needed if folder / name not in files]:
        raise ValueError(f"{folder} is incomplete: it has no {missing[0]}; name the folder of a finished training.")
    for file in files:
        print(f"upload    {file.relative_to(folder)}, {file.stat().st_size:,} bytes")
    print(f"left out  {', '.join(others)}\n" if others else "", end="")
    print(f"uploaded to {upload(folder, args.repo_id, private=args.private or None)}")
