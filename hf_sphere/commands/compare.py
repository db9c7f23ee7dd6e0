"""Compare heads, losses, backbones or other settings on a dataset, with a verdict.

hf-sphere compare photos --heads softmax cosine arcface vmf --frozen --backbones timm_model=weights.safetensors
hf-sphere compare photos --settings table.yaml --output_dir outputs/comparison

Every arm is tuned alike, by scores on images that are never tested, and then run with all seeds. The same
command resumes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sphere.training import output_dir
from hf_sphere.utils.arguments import Arguments, Options, argument, named_first, parse_arguments
from hf_sphere.utils.files import remove_folder
from hf_sphere.utils.loading import WEIGHTS_PAGE

if TYPE_CHECKING:
    from hf_sphere.comparison import RunComparison

MEASURES = (
    *("accuracy", "calibration_error", "recall_at_1", "map_at_r"),
    *("unseen_recall_at_1", "unseen_map_at_r", "unseen_auroc", "unseen_few_shot_accuracy"),
)  # those of `hf_sphere.comparison.measures`, which would import torch

TRIALS = "trials.jsonl"
FILES = (TRIALS, "comparison.md", "comparison.png", "comparison.json", output_dir.RUN_FILE)
FOLDERS = ("features", "models", "model", "finetuned")
FREE = {"output_dir", "overwrite_output_dir", "finetune"}


@dataclass
class DataArguments(Arguments):
    """Dataset."""

    dataset_name: str = argument(help="Hub id or folder of images, or `digits`. It can be the first argument.")
    dataset_config_name: str | None = argument(None, "Configuration of the dataset.")
    train_split: str = argument("train", "Split or part to train and tune on.")
    eval_split: str | None = argument(
        None, "Split or part to test on; if not set, `test`, else `validation`, else a new part for each seed."
    )
    eval_fraction: float = argument(
        0.2, "Fraction of the images to tune on and, without a test split, of the others to test on.", gt=0, lt=1
    )
    group_column: str | None = argument(None, "Column of groups, such as patients, that are not divided.")
    image_column_name: str | None = argument(None, "Image column; detected by name by default.")
    label_column_name: str | None = argument(None, "Label column; detected by name by default.")
    image_size: int | None = argument(None, "Image side in pixels; by default of the backbone.", ge=1, le=2**14)
    skip_unreadable_images: bool = argument(False, "Skip images that cannot be decoded.")


@dataclass
class ArmArguments(Arguments):
    """Arms."""

    heads: list[str] = argument(list, "Heads, with each backbone; the first arm is the reference.")
    backbones: list[str] = argument(
        list, "Backbones: names of timm, name=file of weights, folders or Hub ids of transformers or of saved models."
    )
    settings: str | None = argument(
        None, "YAML file of arms: options of hf-sphere train classification by name, and `grid`, the values to tune."
    )
    frozen: bool = argument(False, "Compute features of pretrained backbones once, and train a linear map and head.")
    finetune: int = argument(0, "After --frozen, repeat this many best arms with trained backbones.", ge=0, le=64)
    embedding_dim: int | None = argument(
        None, "Embedding dimension; 128 with --frozen, else that of the backbone.", ge=1
    )
    training: Options = argument(Options, "Options of hf-sphere train classification for all arms, a mapping.")


@dataclass
class PlanArguments(Arguments):
    """Plan."""

    metric: str = argument("accuracy", "The measure that is tested, planned before the runs.", choices=MEASURES)
    left_out_classes: float | None = argument(
        None, "Fraction of the classes left out, for measures unseen_*; 0.25 if one is tested, else 0.", ge=0, lt=1
    )
    seeds: int = argument(5, "Seeds of each arm.", ge=2, le=1000)
    num_settings: int = argument(12, "Settings of each arm in the first round of tuning.", ge=1, le=1000)
    num_train_epochs: int = argument(12, "Epochs of a full training.", ge=1)
    learning_rate: float | None = argument(None, "Start of the tuning; 3e-3 with --frozen, else 1e-3.", gt=0)
    output_dir: str = argument("outputs/comparison", "Folder of the results.")
    overwrite_output_dir: bool = argument(False, "Replace the comparison in output_dir.")


def main(argv: Sequence[str] | None = None) -> None:
    """Check the plan, run it, and write tables, figure and the model of the best arm."""
    types = (DataArguments, ArmArguments, PlanArguments)
    data, arms, plan = parse_arguments(types, named_first("dataset_name", argv), "Compare settings on a dataset.")
    check(arms, plan)
    folder = Path(plan.output_dir)
    settings = {**asdict(data), **asdict(arms), **asdict(plan)}
    find_earlier(folder, settings, arms, overwrite=plan.overwrite_output_dir)  # before the data is loaded
    from hf_sphere.comparison.planned import Comparing

    comparing = Comparing(data, arms, plan, folder, draw)
    settings |= comparing.contents()
    resume, overwrite = find_earlier(folder, settings, arms, overwrite=plan.overwrite_output_dir)
    with output_dir.results_dir(folder, FILES, overwrite=overwrite, resume=resume):
        for name in FOLDERS if overwrite else ():
            if (folder / name).exists():
                remove_folder(folder / name)
        for each in [folder, folder / "finetuned"][: 1 + bool(arms.finetune)]:
            each.mkdir(exist_ok=True)
            output_dir.write_settings(each, settings)
        comparing.run()


def find_earlier(folder: Path, settings: Any, arms: ArmArguments, *, overwrite: bool) -> tuple[bool, bool]:
    """Return whether a comparison in the folder is continued, and whether it is replaced; others are an error.

    One with other settings that failed before its first trial is replaced.
    """
    later = FREE | {"training"} if arms.frozen else FREE  # of a finished comparison that is continued by --finetune
    resume, finetuned = False, folder / "finetuned"
    try:
        resume = output_dir.can_resume_results(folder, settings, ignored=later, overwrite=overwrite)
        if arms.finetune and (finetuned / TRIALS).exists():
            output_dir.can_resume_results(finetuned, settings, ignored=FREE, overwrite=overwrite)
    except FileExistsError:
        is_comparison = "num_settings" in (output_dir.read_settings(folder) or {})
        if not is_comparison or (folder / TRIALS).exists():
            raise
        overwrite = True
    output_dir.check_results_dir(folder, overwrite=overwrite, resume=resume)
    return resume, overwrite


def draw(comparison: "RunComparison", title: str, path: Path) -> None:
    """Draw a comparison, if matplotlib is installed."""
    from hf_sphere import visualization

    try:
        visualization.plot_comparison(comparison, title=title, path=path)
    except ImportError as error:
        print(f"no figure: {error}")


def check(arms: ArmArguments, plan: PlanArguments) -> None:
    """Raise an error for arguments that contradict each other."""
    if arms.settings is not None and (arms.heads or arms.backbones):
        raise ValueError("--settings names the arms; leave out --heads and --backbones.")
    named = max(1, len(arms.heads)) * max(1, len(arms.backbones))
    if named == 1 and (arms.heads or arms.backbones):
        raise ValueError("a comparison needs at least two arms; name more --heads, --backbones or --settings.")
    for name in arms.backbones:
        if (file := name.partition("=")[2]) and not Path(file).is_file():
            raise FileNotFoundError(f"{file} (--backbones) is not a file. See {WEIGHTS_PAGE}.")
    if arms.finetune == 1 or len({*arms.heads}) < len(arms.heads) or len({*arms.backbones}) < len(arms.backbones):
        raise ValueError("name each of --heads and --backbones once, and compare at least two arms by --finetune.")
    if arms.finetune and not arms.frozen:
        raise ValueError("--finetune repeats arms of --frozen; add it, or leave out --finetune: all arms are trained.")
    if arms.frozen and arms.training and not arms.finetune:
        raise ValueError("--training is for backbones that are trained; leave it out with --frozen, or add --finetune.")
    if plan.metric.startswith("unseen_") and plan.left_out_classes == 0:
        raise ValueError(f"--metric {plan.metric} needs left-out classes; set --left_out_classes, for instance 0.25.")
