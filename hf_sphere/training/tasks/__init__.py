"""The tasks that models are trained for, one file each: what a task loads, builds, measures, and writes on the card.

To add a task, add a file to this folder that defines `TASK`, and a row to `TASKS` with its name. In a program of your
own, a `Task` with a `name` is registered when it is created. Nothing heavy is imported here and by the files, so that
arguments are parsed before torch is imported.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_sphere.utils.checks import check_choice, check_not_text, check_unique

if TYPE_CHECKING:
    from hf_sphere.data.provenance import DataRecord
    from hf_sphere.training.evaluation import Measure


TASKS = {
    "classification": "image classifiers",
    "retrieval": "image encoders for retrieval, evaluated on unseen classes",
    "regression": "predictors of a number",
    "joint": "predictors of a class and a number",
    "few_shot": "few-shot classifiers, on episodes",
    "masked_lm": "masked language models, plain or spherized",
}
"""What the tasks of this folder train, by the name of their file."""

OWN_TASKS: dict[str, "Task"] = {}
"""Tasks by name that are defined outside of this folder."""


@dataclass
class Task:
    """One kind of training, as a recipe's command line and `all_results.json` show it.

    Attributes:
        summary: Shown by `--help`, with
        example: a command.
        arguments: Dataclasses of the command line, `RecipeArguments` or a subclass among them.
        prepare: Loads the data and builds the model; called with the `Run` and an instance of each of `arguments`.
        metric: Metric for selecting the best epoch, without its prefix; see `--metric_for_best_model`.
        headline: Metrics in the last line on the console and in the `model-index` of the card.
        model_name: Class of the model, in `hf_sphere.models`, if it is the same for all arguments.
        pipeline_tag: The transformers pipeline for the model, if there is one.
        numerics: Raised when a change of the code changes results; `benchmarks/reproduce.py` then repeats the runs.
        unused: Arguments that must not be set, `NAME` or `NAME=VALUE`, since the task does not use them.
        name: Name to register a task under that is defined outside of this folder.
    """

    summary: str
    arguments: tuple[type, ...]
    prepare: "Callable[..., Prepared]"
    metric: str
    headline: tuple[str, ...]
    model_name: str = ""
    pipeline_tag: str | None = None
    numerics: int = 1
    unused: tuple[str, ...] = ()
    name: str = ""
    example: str = ""

    def __post_init__(self) -> None:
        for name in ("headline", "unused"):
            check_not_text(name, getattr(self, name))
        if self.name:
            self.name = self.name.replace("-", "_")
            before = find_task(self.name).prepare.__module__ if self.name in task_names() else None
            check_unique("task", self.name, self.prepare.__module__, before)
            OWN_TASKS[self.name] = self


@dataclass(frozen=True)
class Description:
    """Content of a model card besides settings and results."""

    title: str  # heading
    summary: str  # one paragraph
    model: Mapping[str, Any]  # properties of the model by name
    dataset: str  # name of the dataset as passed by the user
    held_out: str = "a held-out part of the training split"  # validation data, for the sentence on the selection
    tags: Sequence[str] = ()  # further tags of the card
    packages: Sequence[str] = ()  # further packages whose versions are listed
    evaluated_on: str = ""  # evaluation data, if that is not a whole split


@dataclass(frozen=True)
class Prepared:
    """What a task provides when training starts: data, model, metrics, and the description of the card.

    The model that the functions get is the trained one, which may be the average of `model`.

    Attributes:
        model: A transformers model, on its device.
        data: Batches with `epoch()` as `train`, `evaluation` and `validation` (or None), and the name `eval_split`.
        processor: Image processor or tokenizer, which converts raw data to inputs; saved with the model.
        description: The model's description for the card.
        measure: Returns the metrics of one batch besides the loss, each a scalar tensor and a mean over the batch.
        derive: Returns metrics computed from the means over an epoch.
        evaluate: Returns the metrics of a model on a split, over all processes; by default those of `measure`.
        before_epoch: Changes the model before an epoch, counted from 0.
        finish: Fits parts of the model after training and before the last evaluation; returns further results.
        compare: Returns further results of the trained model, and prints them; also gets its results, `eval_<metric>`.
        record: The images of the splits; saved with the model.
    """

    model: Any
    data: Any
    processor: Any
    description: Description
    measure: "Measure"
    derive: Callable[[Mapping[str, float]], dict[str, float]] = lambda means: {}
    evaluate: Callable[[Any, Any], dict[str, float]] | None = None
    before_epoch: Callable[[Any, int], None] = lambda model, epoch: None
    finish: Callable[[Any], dict[str, float]] | None = None
    compare: Callable[[Any, Mapping[str, Any]], dict[str, Any]] | None = None
    record: "DataRecord | None" = None


def task_names() -> list[str]:
    """Return the names of the tasks.

    Example:
        >>> task_names()
        ['classification', 'few_shot', 'joint', 'masked_lm', 'regression', 'retrieval']
    """
    return sorted([*TASKS, *OWN_TASKS])


def find_task(name: str) -> Task:
    """Return a task.

    Args:
        name: One of `task_names()`.

    Raises:
        ValueError: If there is no such task; the message lists the names.

    Example:
        >>> find_task("retrieval").metric
        'recall_at_1'
    """
    if name in TASKS:
        return importlib.import_module(f"{__name__}.{name}").TASK
    check_choice("the task", name, task_names())
    return OWN_TASKS[name]
