"""The one interface of every head: embeddings in, logits and a loss out."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.coordinates import is_batched


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
    needs_calibration: ClassVar[bool] = False
    """Whether `calibrate` must see training embeddings before training starts."""
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
        """Compare with labels (B,): the mean cross-entropy of the logits, in float32."""
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.label_smoothing)

    def forward(self, embeddings: Tensor, labels: Tensor | None = None) -> HeadOutput:
        """Answer for embeddings (B, d) and, where given, labels (B,)."""
        points = self.represent(embeddings)
        logits = self.classify(points)
        loss = None
        if labels is not None:
            self.check_labels(labels)
            loss = self.compute_loss(points, logits, labels)
        return HeadOutput(logits, loss, points.to(embeddings.dtype), self.measure_concentration(embeddings))

    def measure_concentration(self, embeddings: Tensor) -> Tensor | None:
        """Certainty of embeddings (B, d), for heads that have one: (B,)."""
        return None

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
