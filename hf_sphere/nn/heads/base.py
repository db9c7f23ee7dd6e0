"""The one interface of every head: embeddings in, logits and a loss out."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.coordinates import is_batched

FIRST_LOG_TEMPERATURE = -2.773
"""Start of a learned temperature, unless a head is told otherwise: logits up to 16. At 0 they would be up to 1."""


@dataclass(frozen=True)
class HeadOutput:
    """What a head answers.

    Attributes:
        logits: (B, K). `argmax` is the prediction and `softmax` the confidence of the head.
        loss: Scalar, if labels were given.
        points: The embeddings where the head decides, for instance on the sphere: (B, d').
        concentration: (B,), for heads whose embeddings carry a certainty.
    """

    logits: Tensor
    loss: Tensor | None = None
    points: Tensor | None = None
    concentration: Tensor | None = None


class Head(nn.Module):
    """Base class of the heads; it owns the flow, a subclass overrides the steps that differ.

    A forward pass is `embeddings -> represent -> classify -> compute_loss`. A subclass in a file of this folder that
    sets `name` is found by that name, and nothing else has to be touched. Class weights, prototypes and temperatures
    are parameters or persistent buffers of the head, so that they are saved, moved and trained with the model.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        label_smoothing: Share of the target spread evenly over the classes, in [0, 1).
    """

    name: ClassVar[str] = ""
    """Name in configurations; empty for classes that are no head themselves."""
    replaces_activation: ClassVar[bool] = True
    """Whether the head takes the place of the backbone's last activation (and its dropout)."""
    distance: ClassVar[str] = "cosine"
    """How near two points of the head are: a distance of `hf_sphere.metrics.retrieval_scores`."""
    needs_calibration: ClassVar[bool] = False
    """Whether `calibrate` must see training embeddings before training starts; may be a property of the state."""
    reduction: str = "mean"
    """Whether the loss is the `mean` or the `sum` over a batch."""

    def __init__(self, embedding_dim: int, num_classes: int, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1); got {label_smoothing}.")
        self.embedding_dim = embedding_dim
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing

    def represent(self, embeddings: Tensor) -> Tensor:
        """Bring embeddings (B, d) to where the head decides: (B, d')."""
        return embeddings

    def classify(self, points: Tensor) -> Tensor:
        """Turn points (B, d') into logits (B, K), as at prediction time."""
        raise NotImplementedError(f"{type(self).__name__} must define `classify`.")

    def compute_loss(self, points: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compare with labels (B,): the mean cross-entropy of the logits, in float32 or better."""
        return F.cross_entropy(self.widen(logits), labels, label_smoothing=self.label_smoothing)

    def forward(self, embeddings: Tensor, labels: Tensor | None = None) -> HeadOutput:
        """Answer for embeddings (B, d) and, where given, labels (B,)."""
        points = self.represent(embeddings)
        logits = self.classify(points)
        loss = None
        if labels is not None:
            self.check_labels(labels)
            loss = self.compute_loss(points, logits, labels)
        return HeadOutput(logits, loss, points.to(embeddings.dtype), self.measure_concentration(points))

    def measure_concentration(self, points: Tensor) -> Tensor | None:
        """Certainty of points (B, d'), for heads that have one: (B,)."""
        return None

    @staticmethod
    def widen(values: Tensor) -> Tensor:
        """Bring values to float32, or leave a better dtype as it is."""
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def check_labels(self, labels: Tensor) -> None:
        """Refuse labels outside 0..K-1 with a readable error.

        Only on the CPU and outside of compilation and vmap: elsewhere reading the labels would make the device wait, or
        is not possible.
        """
        unreadable = labels.device.type != "cpu" or torch.compiler.is_compiling() or is_batched(labels)
        if unreadable or labels.numel() == 0:
            return
        low, high = labels.aminmax()
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"labels run from {low} to {high}, but the model has {self.num_classes} classes (0 to "
                f"{self.num_classes - 1}). Set `num_labels` to the number of classes in the data."
            )

    def calibrate(self, embeddings: Tensor) -> None:
        """Fit state to training embeddings (N, d); called once before training if `needs_calibration`."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the head that epoch `epoch` (from 0) starts, for schedules of its own."""

    def parameter_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Optimiser settings of single parameters, for instance `{"log_temperature": {"lr": 1e-3}}`."""
        return {}

    def reset_parameters(self) -> None:
        """Initialise all state anew."""
        for child in self.children():
            reset = getattr(child, "reset_parameters", None)
            if reset is not None:
                reset()

    def directions(self) -> Tensor | None:
        """Unit class vectors (K, d') in the space of the points, or None if a class has no direction."""
        return None


class TemperatureHead(Head):
    """Base class of heads whose logits are bounded, and sharpened by a learned temperature.

    Args:
        embedding_dim: See `Head`.
        num_classes: See `Head`.
        log_temperature: Logarithm of the temperature at the start; logits are multiplied by exp(-log_temperature).
        temperature_lr: Learning rate of `log_temperature`, whatever that of the rest; the same if None. The recipes
            train it without momentum and decay; the stock Trainer knows neither and trains it like any other.
        **options: See `Head`.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        log_temperature: float = FIRST_LOG_TEMPERATURE,
        temperature_lr: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(embedding_dim, num_classes, **options)
        if temperature_lr is not None and not temperature_lr >= 0.0:
            raise ValueError(f"temperature_lr must not be negative; got {temperature_lr}.")
        self.first_log_temperature = log_temperature
        self.temperature_lr = temperature_lr
        self.log_temperature = nn.Parameter(torch.tensor(float(log_temperature)))

    def reset_parameters(self) -> None:
        """Put the temperature back to its start."""
        nn.init.constant_(self.log_temperature, self.first_log_temperature)

    def inverse_temperature(self) -> Tensor:
        """Return `beta = exp(-log_temperature)`, a scalar of float32 or better."""
        return self.widen(self.log_temperature).neg().exp()

    def parameter_options(self) -> dict[str, dict[str, Any]]:
        """The temperature has its own learning rate and no momentum."""
        lr = {} if self.temperature_lr is None else {"lr": self.temperature_lr}
        return {"log_temperature": {"momentum": 0.0, **lr}}


def option_names(head_class: type[Head]) -> list[str]:
    """Names of the keyword options a head takes, its bases' included."""
    names: list[str] = []
    for cls in head_class.__mro__:
        if "__init__" not in vars(cls) or not issubclass(cls, Head):
            continue
        parameters = inspect.signature(cls.__init__).parameters.values()
        names += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in names]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names
