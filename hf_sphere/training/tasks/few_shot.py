"""Few-shot classification: prototypical networks, plain or spherized, trained on episodes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_sphere import data
from hf_sphere.data.options import ImageDataOptions, OpenSetOptions
from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.measures import measure_classification
from hf_sphere.training.tasks.image import EncoderArguments, HeadDescription, ImageTask, check_same_architecture
from hf_sphere.utils.arguments import Options, argument

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from hf_sphere.data import Episodes, ImageData
    from hf_sphere.models import SphereVisionConfig

VALIDATION_EPISODES = 500


@dataclass
class FewShotArguments(OpenSetOptions):
    """Episodes, and how their queries are classified."""

    way: int = argument(5, "Classes per episode.", ge=2)
    shot: int = argument(5, "Support images per class; their mean embedding is the prototype.", ge=1)
    query: int = argument(15, "Query images per class.", ge=1)
    episodes_per_epoch: int = argument(100, "Training episodes per epoch, over all processes.", ge=1)
    episodes_per_step: int = argument(1, "Training episodes per forward pass and process.", ge=1)
    validation_episodes: int | None = argument(
        None,
        "Validation episodes, the same ones after each epoch, if there are validation images; "
        f"{VALIDATION_EPISODES} if not set.",
        ge=2,
    )
    eval_episodes: int = argument(600, "Evaluation episodes.", ge=2)
    metric: Literal["euclidean", "cosine"] | None = argument(
        None, "Similarity of queries and prototypes; if not set, that of the saved model, else euclidean."
    )
    temperature: float | None = argument(
        None, "Divisor of the similarities; if not set, that of the saved model, else 1.", gt=0
    )
    spherization: Options | None = argument(
        None,
        "Options for spherizing the embeddings (`{}` for the defaults); if not set, as in the saved model, else "
        "not spherized.",
    )

    def episodes(self, count: int, per_batch: int = 1) -> "Episodes":
        """Return episodes in which no image is both support and query."""
        origin = (
            f"--way {self.way} is the number of classes, --shot {self.shot} and --query {self.query} those of images."
        )
        return data.Episodes(self.way, self.shot + self.query, count, per_batch, distinct=True, origin=origin)


class FewShotClassification(ImageTask):
    """Train embeddings on episodes of a few classes, to recognize unseen classes from a few images of each."""

    name = "few_shot"
    data_task = "few_shot"
    arguments = (EncoderArguments, ImageDataOptions, TrainingArguments, FewShotArguments)
    model_name = "SphereVisionForFewShotClassification"
    metric = "accuracy"
    higher_is_better = True
    headline = ("accuracy",)
    default_backbone = "conv4"
    is_open_set = True
    measure = staticmethod(measure_classification)

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.few_shot: FewShotArguments = self.part(FewShotArguments)

    def episodes(self) -> "dict[str, Episodes | None]":
        """Return the episodes of training, validation and evaluation."""
        few_shot, count = self.few_shot, self.few_shot.validation_episodes
        validation = None
        if self.data_args.validation_split is not None or self.data_args.validation_fraction:
            validation = few_shot.episodes(VALIDATION_EPISODES if count is None else count)
        elif count is not None:
            raise ValueError(f"validation_episodes {count} needs --validation_split or --validation_fraction.")
        return {
            "episodes": few_shot.episodes(few_shot.episodes_per_epoch, few_shot.episodes_per_step),
            "validation_episodes": validation,
            "eval_episodes": few_shot.episodes(few_shot.eval_episodes),
        }

    def batches(self, image_data: "ImageData") -> Any:
        """Return the episodes as batches of support and query images."""
        return data.FewShotData.of(image_data, self.few_shot.shot, eval_batch_size=self.args.per_device_eval_batch_size)

    def model_settings(self, image_data: "ImageData", saved: "SphereVisionConfig | None" = None) -> dict[str, Any]:
        """Return similarity, temperature and spherization."""
        settings = super().model_settings(image_data, saved)
        if self.args.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is for models with a head; a few-shot model has none.")
        if self.args.loss_reduction == "sum":
            raise ValueError("few-shot models do not support loss_reduction sum: their loss is a mean; leave it out.")
        requested = {"metric": self.few_shot.metric, "temperature": self.few_shot.temperature}
        before = (saved.few_shot_kwargs or {}) if saved is not None else {}
        default = {"metric": "euclidean", "temperature": 1.0}
        settings["few_shot_kwargs"] = default | before | {k: v for k, v in requested.items() if v is not None}
        spherization = None if self.few_shot.spherization is None else dict(self.few_shot.spherization)
        if saved is None:
            settings["spherization"] = spherization
        elif spherization is not None:
            if saved.spherization not in (None, spherization):
                raise ValueError(
                    f"spherization is {spherization} but {self.model_args.model_name_or_path} has "
                    f"{saved.spherization}; leave spherization out."
                )
            settings["spherization"] = spherization
        return settings

    def check_saved(self, config: "SphereVisionConfig") -> None:
        """Check the architecture of the encoder; the saved image model may be of any class."""
        check_same_architecture(self.model_args, config)

    def evaluate(self, model: "nn.Module", batches: Any, accelerator: "Accelerator") -> dict[str, float]:
        """Return the mean accuracy over the episodes of a split, with its interval."""
        from hf_sphere.training.evaluation import evaluate_few_shot

        return evaluate_few_shot(model, batches, accelerator)

    def heads(self, model: Any) -> list[str]:
        """Return spherization and metric of the prototypes."""
        spherized = ["spherized"] if model.config.spherization is not None else []
        return [*spherized, f"{model.classifier.metric} prototypes"]

    def describe_head(self, config: "SphereVisionConfig") -> HeadDescription:
        """Return the description of episodes and prototypes for the model card."""
        few_shot, compared = self.few_shot, config.few_shot_kwargs or {}
        metric, temperature = compared["metric"], compared["temperature"]
        properties = {}
        if config.spherization is not None:
            properties["spherization"] = f"of the embeddings {config.spherization or ''}"
        properties["episodes"] = f"{few_shot.way}-way {few_shot.shot}-shot, {few_shot.query} queries of each class"
        properties["comparison"] = f"with the mean embedding of each class, `{metric}`, temperature {temperature:g}"
        return HeadDescription(["classes not seen in training"], f"{metric} prototypes", "few-shot", properties)
