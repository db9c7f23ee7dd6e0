"""What a language model may be trained for: its measures, and the measure that chooses."""

from collections.abc import Mapping
from dataclasses import dataclass

from accelerate import Accelerator
from torch import nn

from hf_sphere.data.text_batches import TextBatches
from hf_sphere.training.evaluation import evaluate
from hf_sphere.training.measures import Measure, measure_tokens, perplexity


@dataclass(frozen=True)
class TextTask:
    """One kind of training; the attributes are those of `hf_sphere.training.tasks.ImageTask`."""

    measure: Measure
    metric: str
    higher_is_better: bool
    headline: tuple[str, ...]
    pipeline_tag: str | None = None

    def evaluate(self, model: nn.Module, batches: TextBatches, accelerator: Accelerator) -> dict[str, float]:
        """Measure a model over all processes' shares of a split."""
        means = evaluate(model, batches, accelerator, self.measure)
        return means | self.derive(means)

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics that follow from the means over an epoch: the perplexity."""
        return perplexity(means)


MASKED_LM = TextTask(
    measure=measure_tokens,
    metric="loss",
    higher_is_better=False,
    headline=("perplexity", "accuracy"),
    pipeline_tag="fill-mask",
)
