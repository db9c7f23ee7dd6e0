"""The plan of a comparison, which is the options of `hf-sphere compare`; nothing heavy is imported here."""

from dataclasses import dataclass

from hf_sphere.training.tasks.classification import head_choices
from hf_sphere.utils.arguments import Arguments, Options, argument

UNSEEN = "unseen_"
"""Prefix of the measures on classes that were left out of training."""

METRICS = (
    *("accuracy", "calibration_error", "recall_at_1", "map_at_r"),
    *(f"{UNSEEN}recall_at_1", f"{UNSEEN}map_at_r", f"{UNSEEN}auroc", f"{UNSEEN}few_shot_accuracy"),
)
"""Names of `hf_sphere.comparison.measures.MEASURES`."""


@dataclass(kw_only=True)
class _DataArguments(Arguments):
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
    skip_invalid: bool = argument(False, "Skip images that cannot be decoded.")


@dataclass(kw_only=True)
class _ArmArguments(Arguments):
    """What to compare."""

    heads: list[str] = argument(list, "Heads, with each backbone; the first is the reference.", choices=head_choices)
    backbones: list[str] = argument(
        list, "Backbones: names of timm, name=file of weights, folders or Hub ids of transformers or of saved models."
    )
    settings: str | None = argument(
        None,
        "YAML file of what to compare, by name: options of hf-sphere train classification, and the `grid` to tune.",
        not_with=["heads", "backbones"],
    )
    frozen: bool = argument(False, "Compute features of pretrained backbones once, and train a linear map and head.")
    finetune: int = argument(0, "Repeat this many best ones with trained backbones.", ge=0, le=64, only_with=["frozen"])
    embedding_dim: int | None = argument(None, "Embedding dimension; 128 with --frozen, else of the backbone.", ge=1)
    training: Options = argument(Options, "Options of hf-sphere train classification for all, a mapping.")


@dataclass(kw_only=True)
class Plan(_ArmArguments, _DataArguments):
    """Plan."""

    metric: str = argument("accuracy", "The measure that is tested, planned before the runs.", choices=METRICS)
    left_out_classes: float | None = argument(
        None, "Fraction of the classes left out, for measures unseen_*; 0.25 if one is tested, else 0.", ge=0, lt=1
    )
    seeds: int = argument(5, "Seeds of each.", ge=2, le=1000)
    num_settings: int = argument(12, "Settings of each in the first round of tuning.", ge=1, le=1000)
    num_train_epochs: int = argument(12, "Epochs of a full training.", ge=1)
    learning_rate: float | None = argument(None, "Start of the tuning; 3e-3 with --frozen, else 1e-3.", gt=0)
    output_dir: str = argument("outputs/comparison", "Folder of the results.")
    overwrite_output_dir: bool = argument(False, "Replace the comparison in output_dir.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.left_out_classes is None:
            self.left_out_classes = 0.25 if self.tests_unseen_classes else 0.0
        if self.learning_rate is None:
            self.learning_rate = 3e-3 if self.frozen else 1e-3
        if self.embedding_dim is None and self.frozen:
            self.embedding_dim = 128
        if self.frozen and not self.finetune and self.training:
            raise ValueError("--training is for trained backbones; leave out --frozen, or add --finetune.")
        if self.tests_unseen_classes and not self.left_out_classes:
            raise ValueError(f"--metric {self.metric} needs left-out classes; set --left_out_classes, such as 0.25.")

    @property
    def tests_unseen_classes(self) -> bool:
        """Whether the metric is one on classes that were left out of training."""
        return self.metric.startswith(UNSEEN)
