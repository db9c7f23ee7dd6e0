"""Arguments of the image recipes: which model, which images, which targets."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_sphere.data.episodes import Episodes
from hf_sphere.data.options import ImageDataOptions
from hf_sphere.nn.heads import HEADS
from hf_sphere.training.arguments import described
from hf_sphere.utils.arguments import Options


@dataclass
class EncoderArguments:
    """Which image encoder."""

    model_name_or_path: str | None = field(
        default=None,
        metadata=described(
            "Start from this saved model (folder or Hub id), which brings its backbone and embedding; and its head, "
            "but for few-shot."
        ),
    )
    backbone: str | None = field(
        default=None,
        metadata=described(
            "Name of a timm model or of a backbone of this library; `lenet5` if not set, for few-shot `conv4`."
        ),
    )
    backbone_kwargs: Options = field(default_factory=Options, metadata=described("Options of the backbone, a mapping."))
    pretrained_backbone: bool = field(
        default=False, metadata=described("Start from timm's pretrained weights; reaches the Hub.")
    )
    embedding_dim: int | None = field(
        default=None, metadata=described("Length of the embeddings; the backbone's own if not set.")
    )
    freeze_batch_norm: bool | None = field(
        default=None,
        metadata=described(
            "Keep the statistics of the backbone's batch norms, as for pretrained ones; no, if not set."
        ),
    )


@dataclass
class ModelArguments(EncoderArguments):
    """Which image model: an encoder with a head."""

    head: str | None = field(
        default=None,
        metadata=described(f"Name of the head: {', '.join(HEADS)}; if not set `spherized`, with values `prototype`."),
    )
    head_kwargs: Options = field(default_factory=Options, metadata=described("Options of the head, a mapping."))
    prototypes_file: str | None = field(
        default=None,
        metadata=described(
            "Prototypes of head `prototype`, as recipes/place_prototypes.py writes; placed anew if not set."
        ),
    )


@dataclass
class RegressionArguments:
    """Which values, and how they are predicted."""

    value_column_name: str | None = field(default=None, metadata=described("Column of the values; found if not set."))
    computed_value: str | None = field(
        default=None,
        metadata=described("Predict a value computed from the image instead: slant (degrees) or intensity."),
    )
    value_range: list[float] | None = field(
        default=None, metadata=described("Lowest and highest value; those of the training split if not set.")
    )
    out_of_range: Literal["error", "clip"] | None = field(
        default=None,
        metadata=described(
            "Refuse values outside of the range, or take the nearest end for them; if not set, values are refused "
            "where value_range is given, and clipped where it is measured."
        ),
    )

    def __post_init__(self) -> None:
        if self.value_range is not None and (len(self.value_range) != 2 or self.value_range[0] >= self.value_range[1]):
            raise ValueError(f"value_range must be two numbers, the lower one first; got {self.value_range}.")


@dataclass
class JointArguments(RegressionArguments):
    """A regression beside the classes."""

    task_weight: float | None = field(
        default=None,
        metadata=described("Weight of the classification, 0 to 1, the regression has the rest; 0.25 if not set."),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_weight is not None and not 0.0 <= self.task_weight <= 1.0:
            raise ValueError(f"task_weight must lie between 0 and 1; got {self.task_weight}.")


@dataclass
class RetrievalArguments:
    """Which classes are trained on, and which are only searched for."""

    train_classes: int | None = field(
        default=None,
        metadata=described(
            "Pool both splits, train on the first so many classes and evaluate on the others; the splits' own classes "
            "if not set."
        ),
    )


class SwitchableOptions(Options):
    """A mapping for which the command line may say `null`, to take back what a YAML file gives."""

    def __new__(cls, value: str | Iterable[tuple[str, Any]] = ()) -> "SwitchableOptions | None":  # type: ignore[misc]
        """Make None of `null` or `none`."""
        return None if value in ("null", "none") else super().__new__(cls)


@dataclass
class FewShotArguments(RetrievalArguments):
    """Of what episodes are made, and how their queries are classified."""

    way: int = field(default=5, metadata=described("Classes of an episode."))
    shot: int = field(default=5, metadata=described("Support images of each class, whose mean is its prototype."))
    query: int = field(default=15, metadata=described("Query images of each class, to be classified."))
    episodes_per_epoch: int = field(default=100, metadata=described("Training episodes, over all processes."))
    episodes_per_step: int = field(
        default=1, metadata=described("Training episodes a process that a forward pass takes together.")
    )
    validation_episodes: int | None = field(
        default=None,
        metadata=described(
            "Episodes of the validation part, if there is one, that the epoch is chosen on, the same ones after each "
            "epoch; 500 if not set."
        ),
    )
    eval_episodes: int = field(default=600, metadata=described("Episodes that results are reported on."))
    metric: Literal["euclidean", "cosine"] | None = field(
        default=None,
        metadata=described(
            "What a query and a prototype are compared by; that of the saved model to start from, else euclidean, if "
            "not set."
        ),
    )
    temperature: float | None = field(
        default=None,
        metadata=described("What similarities are divided by; that of a saved model, else 1, if not set."),
    )
    spherization: SwitchableOptions | None = field(
        default=None,
        metadata=described(
            "Put the embeddings on a sphere, with these options (`{}` for the usual ones); as a saved model has it, "
            "else not, if not set or `null`."
        ),
    )

    def __post_init__(self) -> None:
        for name, least in (("validation_episodes", 2), ("eval_episodes", 2), ("way", 2)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}.")
        for name in ("shot", "query", "episodes_per_epoch", "episodes_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"temperature must be positive; got {self.temperature}.")

    def episodes(self, count: int, per_batch: int = 1) -> Episodes:
        """So many episodes, in which no image is both support and query."""
        origin = f"--way {self.way} is how many classes, --shot {self.shot} and --query {self.query} how many images"
        return Episodes(self.way, self.shot + self.query, count, per_batch, distinct=True, origin=f"{origin} of each.")


ImageSourceArguments = ImageDataOptions
TrainingImageArguments = ImageDataOptions


@dataclass
class ImageDataArguments(TrainingImageArguments):
    """Which images, and how they are changed and put together in training."""

    episode_classes: int | None = field(
        default=None, metadata=described("Make each training batch of so many classes, in place of a batch size.")
    )
    episode_examples: int | None = field(default=None, metadata=described("Images of each class in such a batch."))
    episodes_per_epoch: int | None = field(
        default=None, metadata=described("Such batches an epoch, over all processes.")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("episode_classes", "episode_examples", "episodes_per_epoch")
        given = [name for name in names if getattr(self, name) is not None]
        if given and len(given) < len(names):
            missing = ", ".join(name for name in names if name not in given)
            raise ValueError(f"{', '.join(given)} is given without {missing}; episodes need all three.")

    @property
    def episodes(self) -> Episodes | None:
        """What an epoch of episodes is made of, if there are any."""
        if self.episode_classes is None or self.episode_examples is None or self.episodes_per_epoch is None:
            return None
        return Episodes(self.episode_classes, self.episode_examples, self.episodes_per_epoch)
