"""Image retrieval: embeddings trained on some classes and evaluated on others."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_sphere.data.options import OpenSetOptions
from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.tasks import Prepared, Task, classification
from hf_sphere.training.tasks.image import load_images, provide
from hf_sphere.utils.texts import show_metrics

if TYPE_CHECKING:
    from hf_sphere.data import ImageData
    from hf_sphere.training.run import Run

logger = logging.getLogger(__name__)

HEADLINE = ("recall_at_1", "map_at_r")


def prepare(
    run: "Run",
    model_args: classification.ModelArguments,
    data_args: classification.ImageDataArguments,
    args: RecipeArguments,
    classes: OpenSetOptions,
) -> Prepared:
    """Load the data and build the model; check that there are queries; evaluate a pretrained model."""
    from hf_sphere.training.evaluation import evaluate_frozen, evaluate_retrieval

    classification.check_head(model_args, data_args, args)
    setup = load_images(run, model_args, data_args, "retrieval", targets=classes, episodes=data_args.episodes)
    images, model = setup.images, classification.build_classifier(setup)
    evaluate = partial(evaluate_retrieval, accelerator=run.accelerator)
    prepared = provide(run, setup, model, "retrieval", evaluate=evaluate)
    check_queries(images)
    pretrained: dict[str, float] = {}
    names = ("model_name_or_path", "initial_weights", "pretrained_backbone", "backbone_weights")
    if any(getattr(model_args, name) for name in names):
        # A saved model of this task has trained embeddings; otherwise those of a new linear map would be random.
        is_saved = model_args.model_name_or_path is not None
        scores = (evaluate_retrieval if is_saved else evaluate_frozen)(model, images.evaluation, run.accelerator)
        pretrained = {f"frozen_{name}": scores[name] for name in HEADLINE}
    is_open = set(images.class_names).isdisjoint(images.eval_class_names)
    trained, evaluated = map(classification.shorten, (images.class_names, images.eval_class_names))
    description = replace(
        prepared.description,
        summary=f"{prepared.description.summary} Trained on {trained} and evaluated on {evaluated}.",
        evaluated_on=images.eval_split + " (classes not trained on)" * is_open,
    )
    return replace(prepared, description=description, compare=partial(compare, run, pretrained))


def check_queries(images: "ImageData") -> None:
    """Raise an error if no image of a split has a neighbor of its class, and warn if all of them are of one class."""
    evaluated = f"evaluation images ({', '.join(images.eval_class_names[:5])})"
    for what, batches in {evaluated: images.evaluation, "validation images": images.validation}.items():
        if batches is None:
            continue
        counts = batches.labels.unique(return_counts=True)[1]
        if len(counts) == 1:
            logger.warning("All %s are of one class, so retrieval is 100 %% right for any model; keep two.", what)
        if counts.max() < 2:
            raise ValueError(
                f"each class of the {what} has a single one, so no image has a neighbor of its class. Add images, "
                "or hold out other classes (--train_classes, --eval_fraction, --validation_fraction)."
            )


def compare(run: "Run", pretrained: Mapping[str, float], model: Any, results: Mapping[str, Any]) -> dict[str, float]:
    """Compare with the scores of the pretrained model."""
    if pretrained:
        run.accelerator.print(f"frozen    {'  '.join(show_metrics(pretrained))}  (pretrained, before training)")
    worse = [name for name in HEADLINE if results[f"eval_{name}"] < pretrained.get(f"frozen_{name}", 0.0)]
    if worse:
        logger.warning(
            "Fine-tuning made %s worse than that of the frozen, pretrained model. Try a smaller learning rate, "
            "fewer epochs, or use the pretrained model as it is.",
            " and ".join(worse),
        )
    return dict(pretrained)


TASK = Task(
    summary="Train embeddings on some classes, for retrieval among images of other classes.",
    example="hf-sphere train retrieval --dataset_name digits --image_size 28 \\\n"
    "    --train_classes 5 --output_dir outputs/five",
    arguments=(classification.ModelArguments, classification.ImageDataArguments, RecipeArguments, OpenSetOptions),
    prepare=prepare,
    metric="recall_at_1",
    headline=HEADLINE,
    model_name="SphereVisionForImageClassification",
    pipeline_tag="image-feature-extraction",
)
