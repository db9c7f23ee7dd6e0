"""The interface of a task. Task modules import nothing heavy, so that arguments are parsed before torch is imported."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hf_sphere.training.arguments import TrainingArguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

    from hf_sphere.data.provenance import DataRecord
    from hf_sphere.training.run import Run


@dataclass(frozen=True)
class Prepared:
    """The data and model of a task when training starts.

    The data has `train`, `evaluation` and `validation` (or None), batches with `epoch()`, and the name `eval_split`.
    """

    model: Any  # a transformers model, on its device
    data: Any
    processor: Any  # image processor or tokenizer, which converts raw data to inputs; saved with the model
    record: "DataRecord | None" = None  # the images of the parts; saved with the model


@dataclass(frozen=True)
class Description:
    """Content of a model card besides settings and results."""

    title: str  # heading
    summary: str  # one paragraph
    model: Mapping[str, Any]  # properties of the model by name
    dataset: str  # name of the data set as passed by the user
    held_out: str = "a held-out part of the training split"  # validation data, for the sentence on the selection
    tags: Sequence[str] = ()  # further tags of the card
    packages: Sequence[str] = ()  # further packages whose versions are listed
    evaluated_on: str = ""  # evaluation data, if that is not a whole split


TASKS: "dict[str, type[Task]]" = {}
"""Tasks by name."""


class Task(ABC):
    """One kind of training. The first line of a subclass's docstring is shown by `--help`.

    Args:
        *parts: Instances of the dataclasses in `arguments`.

    Attributes:
        name: Unique name; that of its file.
        arguments: Dataclasses of the command line, `TrainingArguments` or a subclass among them.
        metric: Metric for selecting the best epoch, without its prefix.
        higher_is_better: Whether larger values of `metric` are better.
        headline: Metrics in the last line on the console and in the `model-index` of the card.
        pipeline_tag: The transformers pipeline for the model, if there is one.
        numerics: Raised when a change of the code changes the results of this task; `benchmarks/reproduce.py` then
            repeats its runs.
        args: Training arguments.
    """

    name: ClassVar[str]
    arguments: ClassVar[tuple[type, ...]]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool]
    headline: ClassVar[tuple[str, ...]]
    pipeline_tag: ClassVar[str | None] = None
    numerics: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            tasks = sorted({**TASKS, cls.name: cls}.items())
            TASKS.clear()
            TASKS.update(tasks)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.args: TrainingArguments = self.part(TrainingArguments)
        given = {name: value for part in parts for name, value in vars(part).items()}
        if self.args.num_train_epochs == 0 and (not given.get("model_name_or_path") or given.get("from_scratch")):
            raise ValueError("num_train_epochs 0 only evaluates a saved model, and this one is new; train it.")

    def part(self, kind: type) -> Any:
        """Return the arguments of a class, or None if the task has none of it."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @abstractmethod
    def prepare(self, run: "Run") -> Prepared:
        """Load the data and build the model."""

    def before_epoch(self, model: Any, epoch: int) -> None:  # noqa: B027
        """Change the model before epoch `epoch`, counted from 0; nothing by default."""

    @abstractmethod
    def measure(self, output: Any, batch: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
        """Return metrics of one batch besides the loss, each a scalar tensor and a mean over the batch."""

    @abstractmethod
    def describe(self, prepared: Prepared) -> Description:
        """Return the model's description for the model card."""

    @classmethod
    def selectable_metrics(cls, prefix: str) -> list[str]:
        """Return the metrics that can select the best epoch, without `prefix`: `train`, `eval` or `validation`."""
        return list(dict.fromkeys([cls.metric, *cls.headline, "loss"]))

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return metrics computed from the means over an epoch."""
        return {}

    def evaluate(self, model: "nn.Module", batches: Any, accelerator: "Accelerator") -> dict[str, float]:
        """Evaluate a model on a split, over all processes."""
        from hf_sphere.training.evaluation import evaluate

        means = evaluate(model, batches, accelerator, self.measure)
        return means | self.derive(means)

    def compare(self, prepared: Prepared, run: "Run", results: Mapping[str, Any]) -> dict[str, Any]:
        """Return further results of the final model, for `all_results.json`, and print them; nothing by default.

        Args:
            prepared: The data and the trained model.
            run: The run.
            results: Its results, such as `eval_<metric>`.
        """
        return {}

    def finish(self, prepared: Prepared, accelerator: "Accelerator") -> dict[str, float]:
        """Fit parts of the model after training and before the last evaluation; return further results."""
        return {}
