"""The interface of a task. Task modules import nothing heavy, so that arguments are parsed before torch is imported."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hf_sphere.training.arguments import TrainingArguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

    from hf_sphere.training.run import Run


@dataclass(frozen=True)
class Prepared:
    """What a task has loaded and built when training starts.

    Attributes:
        model: A model of transformers, on its device.
        data: `train`, `evaluation` and `validation` (or None): batches with `epoch()`; and `eval_split`, the name of
            the split behind `evaluation`.
        processor: Turns raw data into inputs, an image processor or a tokenizer; saved beside the model.
        summary: Data and model in a few lines, for the console.
    """

    model: Any
    data: Any
    processor: Any
    summary: str


@dataclass(frozen=True)
class Description:
    """What a model card states about a model beside settings and results.

    Attributes:
        title: Heading.
        summary: One paragraph.
        model: Properties of the model by name.
        dataset: Name of the data set as given.
        held_out: What the epoch was chosen on, if that was not the evaluation split.
        tags: Further tags of the card.
        packages: Packages whose versions matter beside those that every model needs.
    """

    title: str
    summary: str
    model: Mapping[str, Any]
    dataset: str
    held_out: str = "a held-out part of the training split"
    tags: Sequence[str] = ()
    packages: Sequence[str] = ()


class Task(ABC):
    """One kind of training. The first line of a subclass's docstring is shown by `--help`.

    Args:
        *parts: Instances of the dataclasses in `arguments`.

    Attributes:
        name: Unique name; that of its file.
        arguments: Dataclasses of the command line, `TrainingArguments` or a subclass among them.
        metric: Metric that chooses the best epoch, without its prefix.
        higher_is_better: Whether larger values of `metric` are better.
        headline: Metrics shown in the last line of a run and in the model card's index.
        pipeline_tag: The pipeline of transformers that runs the model, if there is one.
        args: How to train.
    """

    name: ClassVar[str]
    arguments: ClassVar[tuple[type, ...]]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool]
    headline: ClassVar[tuple[str, ...]]
    pipeline_tag: ClassVar[str | None] = None

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.args: TrainingArguments = self.part(TrainingArguments)

    def part(self, kind: type) -> Any:
        """Return the arguments of a class, None if the task has none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @abstractmethod
    def prepare(self, run: "Run") -> Prepared:
        """Load the data and build the model."""

    @abstractmethod
    def measure(self, output: Any, batch: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
        """Return metrics of one batch beside the loss, each a scalar tensor and a mean over the batch."""

    @abstractmethod
    def describe(self, prepared: Prepared) -> Description:
        """Return what the model card states about the model."""

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return metrics that follow from the means over an epoch."""
        return {}

    def evaluate(self, model: "nn.Module", batches: Any, accelerator: "Accelerator") -> dict[str, float]:
        """Measure a model on a split, over all processes."""
        from hf_sphere.training.evaluation import evaluate

        means = evaluate(model, batches, accelerator, self.measure)
        return means | self.derive(means)

    def finish(self, prepared: Prepared, accelerator: "Accelerator") -> None:  # noqa: B027
        """Fit what is fitted after training, before the last evaluation; nothing by default."""
