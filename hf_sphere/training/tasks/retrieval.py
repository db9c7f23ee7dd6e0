"""Image retrieval: embeddings trained on some classes and evaluated on others."""

from typing import TYPE_CHECKING, Any

from hf_sphere.data.options import OpenSetOptions
from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.tasks.classification import ImageClassification, ImageDataArguments, ModelArguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn


class ImageRetrieval(ImageClassification):
    """Train embeddings on some classes, for retrieval among images of other classes."""

    name = "retrieval"
    data_task = "retrieval"
    arguments = (ModelArguments, ImageDataArguments, TrainingArguments, OpenSetOptions)
    metric = "recall_at_1"
    headline = ("recall_at_1", "map_at_r")
    pipeline_tag = "image-feature-extraction"
    is_open_set = True

    @classmethod
    def selectable_metrics(cls, prefix: str) -> list[str]:
        """Return the metrics of training, or the retrieval scores."""
        return ["accuracy", "loss"] if prefix == "train" else ["recall_at_1", "r_precision", "map_at_r"]

    def evaluate(self, model: "nn.Module", batches: Any, accelerator: "Accelerator") -> dict[str, float]:
        """Return the retrieval scores of a split."""
        from hf_sphere.training.evaluation import evaluate_retrieval

        return evaluate_retrieval(model, batches, accelerator)
