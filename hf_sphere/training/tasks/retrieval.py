"""Image retrieval: embeddings trained on some classes and evaluated on others."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_sphere.data.options import OpenSetOptions
from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.measures import show_metrics
from hf_sphere.training.tasks.base import Description, Prepared
from hf_sphere.training.tasks.classification import ImageClassification, ImageDataArguments, ModelArguments, shorten

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from hf_sphere.data import ImageData
    from hf_sphere.training.run import Run

logger = logging.getLogger(__name__)


class ImageRetrieval(ImageClassification):
    """Train embeddings on some classes, for retrieval among images of other classes."""

    name = "retrieval"
    data_task = "retrieval"
    arguments = (ModelArguments, ImageDataArguments, TrainingArguments, OpenSetOptions)
    metric = "recall_at_1"
    headline = ("recall_at_1", "map_at_r")
    pipeline_tag = "image-feature-extraction"
    is_open_set = True

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._frozen: dict[str, float] = {}

    def prepare(self, run: "Run") -> Prepared:
        """Load the data and build the model; check that there are queries; evaluate a pretrained model."""
        from hf_sphere.training.evaluation import evaluate_frozen

        prepared = super().prepare(run)
        data: ImageData = prepared.data
        named = f"evaluation images ({', '.join(data.eval_class_names[:5])})"
        for what, batches in {named: data.evaluation, "validation images": data.validation}.items():
            if batches is not None and batches.labels.unique(return_counts=True)[1].max() < 2:
                raise ValueError(
                    f"each class of the {what} has a single one, so no image has a neighbor of its class. Add images, "
                    "or hold out other classes (--train_classes, --eval_fraction, --validation_fraction)."
                )
        names = ("model_name_or_path", "initial_weights", "pretrained_backbone", "backbone_weights")
        if any(getattr(self.model_args, name) for name in names):
            # A saved model of this task has trained embeddings; otherwise those of a new linear map would be random.
            evaluate = evaluate_frozen if self.model_args.model_name_or_path is None else self.evaluate
            scores = evaluate(prepared.model, prepared.data.evaluation, run.accelerator)
            self._frozen = {f"frozen_{name}": scores[name] for name in self.headline}
        return prepared

    def describe(self, prepared: Prepared) -> Description:
        """Return the model's description, with the classes of training and evaluation."""
        description, data, where = super().describe(prepared), prepared.data, prepared.data.eval_split
        classes = f"Trained on {shorten(data.class_names)} and evaluated on {shorten(data.eval_class_names)}."
        if set(data.class_names).isdisjoint(data.eval_class_names):
            where += " (classes not trained on)"
        return replace(description, summary=f"{description.summary} {classes}", evaluated_on=where)

    def compare(self, prepared: Prepared, run: "Run", results: Mapping[str, Any]) -> dict[str, Any]:
        """Compare with the frozen, pretrained model, and add Recall@1 by decile of certainty."""
        from hf_sphere.training.evaluation import evaluate_certainty

        if self._frozen:
            run.print(f"frozen    {'  '.join(show_metrics(self._frozen))}  (pretrained, before training)")
        worse = [name for name in self.headline if results[f"eval_{name}"] < self._frozen.get(f"frozen_{name}", 0.0)]
        if worse:
            logger.warning(
                "Fine-tuning made %s worse than that of the frozen, pretrained model. Try a smaller learning rate, "
                "fewer epochs, or use the pretrained model as it is.",
                " and ".join(worse),
            )
        deciles = evaluate_certainty(prepared.model, prepared.data.evaluation, run.accelerator)
        for name, values in deciles.items():
            shown = " ".join(f"{100 * value:.1f}" for value in values)
            run.print(f"certainty Recall@1 by decile of {name}, %: {shown}")
        return self._frozen | ({"recall_at_1_by_decile": deciles} if deciles else {})

    @classmethod
    def selectable_metrics(cls, prefix: str) -> list[str]:
        """Return the metrics of training, or the retrieval scores."""
        return ["accuracy", "loss"] if prefix == "train" else ["recall_at_1", "r_precision", "map_at_r"]

    def evaluate(self, model: "nn.Module", batches: Any, accelerator: "Accelerator") -> dict[str, float]:
        """Return the retrieval scores of a split."""
        from hf_sphere.training.evaluation import evaluate_retrieval

        return evaluate_retrieval(model, batches, accelerator)
