"""Few-shot classification: prototypical networks, plain or spherized, trained on episodes."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from hf_sphere import data
from hf_sphere.data.options import ImageDataOptions, OpenSetOptions
from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.tasks import Prepared, Task
from hf_sphere.training.tasks.image import EncoderArguments, Setup, build_model, load_images, provide
from hf_sphere.utils.arguments import Options, argument

if TYPE_CHECKING:
    from hf_sphere.data import Episodes
    from hf_sphere.training.run import Run

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
        None, f"Validation episodes, the same ones after each epoch; {VALIDATION_EPISODES} if not set.", ge=2
    )
    eval_episodes: int = argument(600, "Evaluation episodes.", ge=2)
    metric: Literal["euclidean", "cosine"] | None = argument(
        None, "Similarity of queries and prototypes; if not set, that of the saved model, else euclidean."
    )
    temperature: float | None = argument(None, "Divisor of similarities; if not set, of the saved model, else 1.", gt=0)
    spherization: Options | None = argument(
        None, "Options for spherizing the embeddings (`{}` for the defaults); if not set, as in the saved model."
    )

    def episodes(self, count: int, per_batch: int = 1) -> "Episodes":
        """Return episodes in which no image is both support and query."""
        origin = f"--way {self.way} is the number of classes, --shot {self.shot} and --query {self.query} count images."
        return data.Episodes(self.way, self.shot + self.query, count, per_batch, distinct=True, origin=origin)


def prepare(
    run: "Run",
    model_args: EncoderArguments,
    data_args: ImageDataOptions,
    args: RecipeArguments,
    few_shot: FewShotArguments,
) -> Prepared:
    """Load the data as episodes, and build the model."""
    from hf_sphere.training.evaluation import evaluate_few_shot

    count = few_shot.validation_episodes
    validates = data_args.validation_split is not None or bool(data_args.validation_fraction)
    if count is not None and not validates:
        raise ValueError(f"validation_episodes {count} needs --validation_split or --validation_fraction.")
    setup = load_images(
        run,
        model_args,
        data_args,
        "few_shot",
        targets=few_shot,
        episodes=few_shot.episodes(few_shot.episodes_per_epoch, few_shot.episodes_per_step),
        validation_episodes=few_shot.episodes(count or VALIDATION_EPISODES) if validates else None,
        eval_episodes=few_shot.episodes(few_shot.eval_episodes),
    )
    model = build_few_shot(setup, few_shot)
    metric, spherization = model.config.few_shot_kwargs["metric"], model.config.spherization
    comparison = f"`{metric}`, temperature {model.config.few_shot_kwargs['temperature']:g}"
    properties = {
        "episodes": f"{few_shot.way}-way {few_shot.shot}-shot, {few_shot.query} queries of each class",
        "comparison": f"with the mean embedding of each class, {comparison}",
    }
    if spherization is not None:
        properties["spherization"] = f"of the embeddings {spherization or ''}"
    return provide(
        run,
        setup,
        model,
        "classes not seen in training",
        properties,
        data=data.few_shot_data(setup.images, few_shot.shot, eval_batch_size=args.per_device_eval_batch_size),
        evaluate=partial(evaluate_few_shot, accelerator=run.accelerator),
    )


def build_few_shot(setup: Setup, few_shot: FewShotArguments) -> Any:
    """Build a few-shot model, or load the encoder of a saved model of any class; see `build_model`."""
    saved, spherization = setup.saved, None if few_shot.spherization is None else dict(few_shot.spherization)
    requested = {"metric": few_shot.metric, "temperature": few_shot.temperature}
    classifier = {"metric": "euclidean", "temperature": 1.0} | ((saved and saved.few_shot_kwargs) or {})
    settings: dict[str, Any] = {"few_shot_kwargs": classifier | {k: v for k, v in requested.items() if v is not None}}
    if spherization is not None:
        if saved is not None and saved.spherization not in (None, spherization):
            name = setup.model_args.model_name_or_path
            raise ValueError(f"spherization is {spherization} but {name} has {saved.spherization}; leave it out.")
        settings["spherization"] = spherization
    return build_model(setup, settings)


TASK = Task(
    summary="Train embeddings on episodes of a few classes, to recognize unseen classes from a few images of each.",
    example="hf-sphere train few-shot --config digits-linear-1shot-plain-cosine",
    arguments=(EncoderArguments, ImageDataOptions, RecipeArguments, FewShotArguments),
    prepare=prepare,
    metric="accuracy",
    headline=("accuracy",),
    model_name="SphereVisionForFewShotClassification",
    unused=("label_smoothing_factor", "loss_reduction=sum"),
)
