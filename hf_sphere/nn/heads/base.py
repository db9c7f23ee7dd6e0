"""Base classes of the heads: embeddings in, logits and a loss out."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.checks import IGNORED, check_class_labels, is_batched, is_readable
from hf_sphere.geometry.manifold import divide_by_norms
from hf_sphere.nn.labels import reduce_mixed_loss
from hf_sphere.utils.checks import check_integer, check_number, check_unique, keyword_options

logger = logging.getLogger(__name__)

SMALL_NORM = 2.0**-7
"""Norm below which the gradient of normalization is limited in float16."""

HEADS: dict[str, type["Head"]] = {}
"""Head classes by name. Every subclass of `Head` that sets `name` is added when it is defined."""


@dataclass(frozen=True)
class HeadOutput:
    """Output of a head.

    Attributes:
        logits: (B, K). `argmax` is the prediction and `softmax` the confidence of the head. None in training with
            labels if the head computes the loss in blocks of classes.
        loss: Scalar, if labels were given.
        embeddings: (B, d'), the transformed embeddings that the logits are computed from, for instance normalized.
        concentration: (B,), the certainty of the embeddings, for heads that have one.
    """

    logits: Tensor | None
    loss: Tensor | None = None
    embeddings: Tensor | None = None
    concentration: Tensor | None = None


class Head(nn.Module):
    """Base class of the heads; it defines the order of the steps, and a subclass overrides those that differ.

    A forward pass is `transform -> observe -> compute_logits -> compute_loss`. A subclass that sets `name` is
    registered under it; one in a file of this folder is also imported with the library and covered by its tests. Class
    vectors, prototypes and temperatures are parameters or persistent buffers of the head, so that they are saved, moved
    and trained with the model. All heads have the first two arguments.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        label_smoothing: Fraction of the target probability spread evenly over the classes, or over the two outcomes of
            each class if an example can have several, in [0, 1).
        class_weights: (K,), factors of the losses of the examples of each class; all 1 if None. The mean loss is over
            the number of examples, so weights with a mean of 1 over the data keep its scale.

    Example:
        >>> class ScaledHead(Head):
        ...     name = "scaled"
        ...
        ...     def __init__(self, embedding_dim, num_classes, *, factor=1.0, **options):
        ...         super().__init__(embedding_dim, num_classes, **options)
        ...         self.factor = factor
        ...         self.linear = nn.Linear(embedding_dim, num_classes)
        ...
        ...     def compute_logits(self, embeddings):
        ...         return self.factor * self.linear(embeddings)
        >>> head = build_head("scaled", 8, 3, factor=2.0)
    """

    name: ClassVar[str] = ""
    """Name in configurations; empty for base classes."""
    replaces_activation: ClassVar[bool] = True
    """Whether the head replaces the backbone's last activation (and its dropout)."""
    needs_data_initialization: ClassVar[bool] = False
    """Whether `initialize_from_data` must be called before training; may be a property that depends on the state."""
    without_decay: ClassVar[tuple[str, ...]] = ()
    """Parameters without weight decay, such as class vectors whose norm has no effect."""
    class_parameters: tuple[str, ...] = ()
    """Parameters whose first axis is that of the classes: the weights, then a bias if there is one."""
    in_blocks: bool = False
    """Whether the loss is computed in blocks of classes, even where there are logits."""
    reduction: str = "mean"
    """Whether the loss is the `mean` or the `sum` over a batch."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).get("name"):  # not inherited: a subclass without a name must not replace its parent
            before = HEADS.get(cls.name)
            check_unique("head", cls.name, cls.__module__, before.__module__ if before else None)
            heads = sorted({**HEADS, cls.name: cls}.items())
            HEADS.clear()
            HEADS.update(heads)

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim = check_integer("embedding_dim", embedding_dim, 1)
        self.num_classes = check_integer("num_classes", num_classes, 1)
        weights = np.ones(num_classes) if class_weights is None else np.asarray(class_weights, dtype=float)
        if weights.shape != (num_classes,) or not ((weights > 0) & (weights < np.inf)).all():
            raise ValueError(f"class_weights must be {num_classes} positive numbers; got {weights.tolist()}.")
        self.class_weights = None if class_weights is None else weights.tolist()
        self.label_smoothing = check_number("label_smoothing", label_smoothing, "[0, 1)")
        self._warned: set[str] = set()  # shared by the copies of `DataParallel`

    def transform(self, embeddings: Tensor) -> Tensor:
        """Map embeddings (B, d) to those that the logits are computed from: (B, d')."""
        return embeddings

    def observe(self, embeddings: Tensor, labels: Tensor) -> None:
        """Update running statistics from transformed embeddings (B, d') and labels (B,); called only in training.

        Examples with the label -100 are to be ignored.
        """

    def compute_logits(self, embeddings: Tensor) -> Tensor:
        """Compute the logits (B, K) of transformed embeddings (B, d'), as at prediction time."""
        raise NotImplementedError(f"{type(self).__name__} must define `compute_logits`.")

    def compute_loss(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each example, in float32 or better: (B,).

        A head whose loss is not this one overrides it, and is then limited to one class per example.

        Args:
            embeddings: Transformed embeddings (B, d').
            logits: Their logits (B, K).
            labels: (B,), class indices for the cross-entropy; or (B, K), from 0 to 1, for the mean binary cross-entropy
                over the classes.
        """
        if labels.ndim == logits.ndim:
            logits = self.upcast(logits)
            targets = labels.to(logits.dtype)
            targets = targets + self.label_smoothing * (0.5 - targets)
            return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=-1)
        return self._cross_entropy(embeddings, logits, labels, "none")

    def loss_logits(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the logits (B, K) whose cross-entropy is the loss; others than those at prediction with a margin.

        Labels (B,) can be -100.
        """
        return logits

    def _cross_entropy(self, embeddings: Tensor, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        logits = self.upcast(self.loss_logits(embeddings, logits, labels))
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing, reduction=reduction)

    def compute_concentration(self, embeddings: Tensor) -> Tensor | None:
        """Compute the certainty (B,) of transformed embeddings (B, d'), for heads that have one."""
        return None

    def omits_logits(self, embeddings: Tensor, labels: Tensor, needs_logits: bool) -> bool:
        """Whether the loss of transformed embeddings (B, d') is computed in blocks of classes, without logits."""
        return self.in_blocks and self.training

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        *,
        mixed_labels: Tensor | None = None,
        mixed_share: Tensor | None = None,
        needs_logits: bool = True,
    ) -> HeadOutput:
        """Compute the logits of embeddings (B, d) and, if labels are given, the loss.

        Args:
            embeddings: (B, d).
            labels: (B,), class indices, where examples with -100 are ignored; or (B, K), from 0 to 1, for examples that
                can have several classes.
            mixed_labels: (B,), class indices of a second example that each is mixed with, as by mixup and CutMix. The
                losses of `labels` and `mixed_labels`, with their margins, have the weights `1 - mixed_share` and
                `mixed_share`; running statistics use `labels`, which should have the larger fraction.
            mixed_share: (B,), from 0 to 1, fraction of the second example.
            needs_logits: Whether the output must have logits, unless `blockwise` or the like excludes them in training.

        Raises:
            ValueError: If embeddings or labels do not fit the head.
        """
        if embeddings.shape[1:] != (self.embedding_dim,):
            raise ValueError(f"embeddings must have shape (B, {self.embedding_dim}); got {tuple(embeddings.shape)}.")
        transformed = self.transform(embeddings)
        if labels is not None:
            if labels.shape[:1] != transformed.shape[:1]:  # a single label would be broadcast
                raise ValueError(f"labels {tuple(labels.shape)} are not one for each of {len(embeddings)} embeddings.")
            self.check_labels(labels)
            labels = labels.long() if labels.ndim == 1 else labels
            if self.training:
                self.observe(transformed, labels)
        omits_logits = labels is not None and self.omits_logits(transformed, labels, needs_logits)
        logits: Any = None if omits_logits else self._predict(transformed)
        loss: Tensor | None
        if mixed_labels is not None or mixed_share is not None:
            loss = reduce_mixed_loss(self, transformed, logits, labels, mixed_labels, mixed_share)
        else:
            loss = None if labels is None else self.reduce_loss(transformed, logits, labels)
        if self.training and loss is None and logits.requires_grad:
            self._watch(logits)
        concentration = self.compute_concentration(transformed)
        return HeadOutput(logits, loss, transformed.to(embeddings.dtype), concentration)

    @staticmethod
    def upcast(values: Tensor) -> Tensor:
        """Convert values to float32, or keep a wider dtype."""
        return values.to(torch.promote_types(values.dtype, torch.float32))

    @classmethod
    def upcast_embeddings(cls, embeddings: Tensor) -> Tensor:
        """Upcast embeddings (B, d), and shorten those whose squared norm could overflow."""
        wide = cls.upcast(embeddings)
        if embeddings.dtype == torch.float16:
            return wide
        limit = torch.finfo(wide.dtype).max ** 0.4  # 1e15 in float32
        largest = torch.linalg.vector_norm(wide.detach(), torch.inf, -1, keepdim=True)
        return wide / (largest * (1 / limit)).clamp_min(1.0)

    @classmethod
    def normalize(cls, embeddings: Tensor) -> Tensor:
        """Divide embeddings (B, d) by their norms, in float32 or better.

        The gradient is inversely proportional to the norm, and 0 for zero vectors, which have no direction. In float16,
        where it would overflow, it is limited to that at the norm `SMALL_NORM`.
        """
        return cls.split(embeddings)[0]

    @classmethod
    def split(cls, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized embeddings (B, d), see `normalize`, and their norms (B, 1), infinity for 0."""
        points, norms = divide_by_norms(cls.upcast_embeddings(embeddings), torch.inf)
        norms = norms.detach()
        if embeddings.dtype == torch.float16:
            points = points.detach() + (norms / SMALL_NORM).clamp_max(1.0) * (points - points.detach())
        return points, norms

    @classmethod
    def has_own_loss(cls) -> bool:
        """Whether the loss is not a cross-entropy of the logits but one for a single class per example."""
        is_common = cls.compute_loss is Head.compute_loss and cls.loss_logits is Head.loss_logits
        return not is_common or cls.compares_examples()

    @classmethod
    def compares_examples(cls) -> bool:
        """Whether the loss of a batch is not the mean or sum of losses of its examples."""
        return cls.reduce_loss is not Head.reduce_loss

    @classmethod
    def require_cross_entropy(cls, purpose: str) -> None:
        """Raise a `ValueError` that names the purpose if the head has a loss of its own."""
        if cls.has_own_loss():
            others = ", ".join(name for name, head in HEADS.items() if not head.has_own_loss())
            raise ValueError(f"head {cls.name!r} is for one class per example; {purpose} requires one of {others}.")

    def check_labels(self, labels: Tensor) -> None:
        """Raise a ValueError for labels of a wrong shape and, if they can be read without synchronization, value."""
        if labels.ndim == 1:
            advice = "Set `num_labels`, or `num_classes` of a head or loss, to the number of classes in the data."
            check_class_labels(labels, self.num_classes, owner="model", advice=advice)
            return
        self.require_cross_entropy("an example with several classes")
        if self.class_weights is not None:
            raise ValueError("class_weights are for one class per example; leave them out.")
        if is_readable(labels) and not ((labels >= 0) & (labels <= 1)).all():
            raise ValueError("labels of examples with several classes must be 0 or 1, or between them.")

    def _predict(self, embeddings: Tensor) -> Tensor:
        return self.compute_logits(embeddings)

    def _losses(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        return self.compute_loss(embeddings, logits, labels)

    def reduce_loss(self, embeddings: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean or sum of the losses of examples without the label -100; 0 if there are none.

        A head whose loss is not one of single examples overrides it.
        """
        if labels.ndim > 1:
            losses = self._losses(embeddings, logits, labels)
            return losses.sum() if self.reduction == "sum" else losses.sum() / max(len(losses), 1)
        has_own_losses = self.class_weights is not None or type(self).compute_loss is not Head.compute_loss
        if has_own_losses or logits is None or self.in_blocks:
            total = self.used_losses(embeddings, logits, labels).sum()
        else:
            total = self._cross_entropy(embeddings, logits, labels, "sum")
        return total if self.reduction == "sum" else total / (labels != IGNORED).sum().clamp_min(1)

    def used_losses(self, embeddings: Tensor, logits: Any, labels: Tensor) -> Tensor:
        """Return the loss of each example, times the weight of its class, and 0 for the label -100: (B,).

        The logits are (B, K), or None if the loss is computed in blocks of classes.
        """
        # Masked instead of selected: the number of examples is not known without a device synchronization.
        ignored = labels == IGNORED
        labels = labels.masked_fill(ignored, 0)
        losses = self._losses(embeddings, logits, labels)
        if self.class_weights is not None:
            losses = losses * losses.new_tensor(self.class_weights)[labels]
        return losses.masked_fill(ignored, 0.0)

    def _watch(self, logits: Tensor) -> None:
        """Have a message logged once the logits without labels have a gradient: another loss trains the head."""
        has_other = self.has_own_loss() or self.label_smoothing or self.class_weights
        if not has_other or "loss" in self._warned or torch.compiler.is_compiling() or is_batched(logits):
            return
        message = (
            "is trained by a loss of its logits instead of its own loss, which alone has its margin, label smoothing "
            "or class weights. For that, pass the labels to the model and minimize `output.loss`; in a Trainer, leave "
            "out compute_loss_func and, unless it is a SphereTrainer, label_smoothing_factor."
        )
        logits.register_hook(lambda _: self._warn_once("loss", message))

    def division_advice(self) -> str:
        """Return what to do where the batch of an optimizer step is divided, if that changes the training."""
        return ""

    def warn_if_divided(self, size: float | Tensor, total: float | Tensor) -> None:
        """Log a message, once, if a batch of a `size` out of a `total` per optimizer step changes the training."""
        advice = self.division_advice()
        if advice and not torch.compiler.is_compiling() and "division" not in self._warned and size < total:
            self._warn_once("division", f"does not train as with one large batch where it is divided: {advice}")

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning(f"Head {self.name!r} {message}")

    def initialize_from_data(self, embeddings: Tensor) -> None:
        """Initialize the head from training embeddings (N, d); see `needs_data_initialization`."""

    def set_epoch(self, epoch: int) -> None:
        """Update the head's schedules at the start of epoch `epoch`, counted from 0."""

    def before_forward(self, seed: int, positions: Tensor) -> None:
        """Prepare the next forward pass in training, so that it does not depend on how batches are divided.

        The recipes call it before each forward pass, and `after_step` after each optimizer step. Then random numbers
        and running statistics are the same on any number of processes and with any gradient accumulation, given the
        same examples per optimizer step. Another loop may call both or neither.

        Args:
            seed: A different number in each optimizer step, the same on all processes.
            positions: Position of each example in the global batch, that is, among all examples of the optimizer step:
                (B,), int64, on the device of the head.
        """

    def after_step(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Update running statistics after an optimizer step; `reduce` sums a tensor over all processes."""

    def parameter_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Per-parameter optimizer options, for instance `{"log_temperature": {"lr": 1e-3}}`.

        The parameters have no weight decay unless their options set it.
        """
        return {name: {} for name in self.without_decay}

    def reset_parameters(self) -> None:
        """Initialize the parameters and buffers of submodules. Override it for a head that has its own."""
        for child in self.children():
            if (reset := getattr(child, "reset_parameters", None)) is not None:
                reset()

    def metric(self) -> dict[str, Any]:
        """Return the distance between transformed embeddings, as options of `hf_sphere.metrics.retrieval_scores`."""
        return {"distance": "cosine"}

    def directions(self) -> Tensor | None:
        """Return unit class vectors (K, d') in the space of the transformed embeddings, or None if there are none."""
        if not self.class_parameters:
            return None
        return F.normalize(attrgetter(self.class_parameters[0])(self).detach(), dim=-1)

    def extra_repr(self) -> str:
        """Describe the head with its options in a printed model."""
        names = [name for name in keyword_options(type(self)) if isinstance(vars(self).get(name), (str, int, float))]
        options = "".join(f", {name}={getattr(self, name)!r}" for name in names)
        return f"{self.embedding_dim} -> {self.num_classes} classes{options}"


def heads_of(model: nn.Module) -> list[Head]:
    """Return the heads in a model, whose methods training loops call; not the frozen copies of PEFT."""
    modules = model.named_modules()
    return [module for name, module in modules if isinstance(module, Head) and "original_module" not in name.split(".")]
