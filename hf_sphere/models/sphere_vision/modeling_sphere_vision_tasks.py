"""Image models for classification, regression, joint prediction and few-shot classification."""

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
from hf_sphere.models.sphere_vision.modeling_sphere_vision import (
    SphereVisionModel,
    SphereVisionOutput,
    SphereVisionPreTrainedModel,
)
from hf_sphere.nn.calibration import calibrate
from hf_sphere.nn.heads import HEADS, Head, HeadOutput, build_head
from hf_sphere.nn.heads.mixins import ClassVectorHead
from hf_sphere.nn.heads.softmax import SpherizedHead
from hf_sphere.nn.labels import (
    divide_soft_labels,
    pop_mixed,
    refuse_mixed,
    refuse_soft_labels,
    weighted_by_targets,
)
from hf_sphere.nn.parameter_free import PoleRegression, PrototypicalClassifier
from hf_sphere.nn.rejection import Rejection
from hf_sphere.utils.modules import digest_weights

logger = logging.get_logger(__name__)
is_loading: ContextVar[bool] = ContextVar("is_loading", default=False)


class ModelWithHead(nn.Module):
    """Mixin of the models that can have a classification head: the head's interface to training loops."""

    head: Head
    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(config), *args, **kwargs)  # its calibration and rejection are of one model

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model; with `shard_classes`, then keep the class vectors of this process."""
        token = is_loading.set(True)
        try:
            loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]  # of PreTrainedModel
        finally:
            is_loading.reset(token)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        head = getattr(model, "head", None)  # encoders of transformers may have their own classifier
        if isinstance(head, ClassVectorHead):
            head.keep_own_classes()
        if (rejection := getattr(model, "rejection", None)) is not None and not rejection.is_fitted:
            raise ValueError(f"{model.name_or_path} has no values of its rejection; remove it from config.json.")
        return loaded

    def save_pretrained(self, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any) -> None:
        """Save the model; that its class vectors were spread over processes is not saved.

        If they are, the `state_dict` must have those of all processes.
        """
        head = getattr(self, "head", None)
        self.remove_outdated(state_dict)
        if state_dict is None and isinstance(head, ClassVectorHead) and head.is_sharded:
            raise ValueError("the class vectors are spread over processes; pass state_dict=gather_classes(model).")
        options = self.config.head_kwargs
        self.config.head_kwargs = options and {name: options[name] for name in options if name != "shard_classes"}
        try:
            super().save_pretrained(*args, state_dict=state_dict, **kwargs)  # type: ignore[misc]
        finally:
            self.config.head_kwargs = options

    def train(self, mode: bool = True) -> Self:
        """Set the mode; in eval mode after training, a calibration or rejection of other weights is removed."""
        was_training = any(module.training for module in self.modules())
        super().train(mode)
        if was_training and not mode and not is_loading.get():
            self.remove_outdated()
        return self

    def set_calibration(self, calibration: Mapping[str, Any] | None) -> None:
        """Set the calibration of the logits in eval mode, as `fit_calibration` returns it, or remove it.

        It belongs to the present weights. When they have changed, it is removed with a warning: in eval mode after
        training, and when the model is saved; an export is an error.

        Raises:
            ValueError: If the model has a calibration, since the logits that it returns are then calibrated already.
        """
        if calibration is not None:
            if getattr(self.config, "calibration", None) is not None:
                raise ValueError("the model's logits are calibrated already; compute them after set_calibration(None).")
            calibration = {**calibration, "weights": digest_weights(self, is_widened=True)}
            self.warn_of_adapters("calibration")
        self.config.calibration = calibration

    def warn_of_adapters(self, fitted: str) -> None:
        """Log a warning if the model has adapters of PEFT, whose files lack what was fitted to it."""
        if getattr(self, "peft_config", None):
            what = f"PEFT saves an adapter without the {fitted} of its model"
            logger.warning(f"{what}. To keep it, call merge_and_unload() first, and fit and save the merged model.")

    def find_outdated(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, str]:
        """Return, by name, why the rejection and the calibration do not fit the model or other weights, if so."""
        settings = getattr(getattr(self, "rejection", None), "settings", None)
        fitted: dict[str, Any] = {"rejection": settings, "calibration": getattr(self.config, "calibration", None)}
        reasons = {}
        for name, values in fitted.items():
            if values is not None:
                names = [self.config.id2label[index] for index in range(self.config.num_labels)]
                what = "" if values.get("class_names") in (None, names) else "classes"
                if not what and values.get("weights") != digest_weights(weights or self, is_widened=True):
                    what = "weights"
                if what:
                    reasons[name] = f"{what} of the model are not those that its {name} was fitted to"
        return reasons

    def remove_outdated(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Remove, with a warning, a rejection and a calibration that do not fit the model or other weights."""
        for name, reason in self.find_outdated(weights).items():
            logger.warning(f"The {reason}, so it is removed. Fit it again by `fit_{name}`.")
            getattr(self, f"set_{name}")(None)

    def head_inputs(self, embeddings: Tensor) -> Tensor:
        """Select the input of the head from embeddings (B, d)."""
        return embeddings

    def classify(
        self, embeddings: Tensor, labels: Tensor | None = None, mixed: Mapping[str, Tensor] | None = None, **states: Any
    ) -> SphereVisionOutput:
        """Apply the head to embeddings (B, d), with the loss of the configuration's `problem_type` if there are labels.

        `mixed` has `mixed_labels` and `mixed_share` of the head; `states` are further values of the output.

        In eval mode unknown images are rejected if the model has a `rejection`, and then the logits are calibrated if
        the configuration has a `calibration`; the loss is that of the uncalibrated ones. Labels whose shape contradicts
        the problem type are an error.
        """
        head, decision = self.apply_head(self.head_inputs(embeddings), labels, **(mixed or {})), {}
        calibration, rejection = getattr(self.config, "calibration", None), getattr(self, "rejection", None)
        logits = head.logits
        outputs: Any = {"embeddings": head.embeddings, "concentration": head.concentration}
        if logits is not None and not self.training:
            if rejection is not None:
                decision = rejection(self.head_inputs(embeddings), logits, head.concentration)._asdict()
            if calibration is not None:
                logits = calibrate(logits, calibration["temperature"], calibration.get("shift"))
        return SphereVisionOutput(head.loss, logits, **outputs, **decision, **states)

    def apply_head(self, inputs: Tensor, labels: Tensor | None, **mixed: Tensor | None) -> HeadOutput:
        """Apply the head to its inputs (B, d), with the loss of the `problem_type`; see `classify`."""
        problem_type = self.config.problem_type
        if labels is None:
            return self.head(inputs, **mixed)
        if problem_type is None and labels.ndim == 2:
            refuse_soft_labels(labels)
        elif problem_type == "single_label_classification" and labels.ndim == 2:
            labels, mixed["mixed_labels"], mixed["mixed_share"] = divide_soft_labels(labels)
        elif problem_type == "regression":
            refuse_mixed(mixed)
            output = self.head(inputs)
            logits = self.head.upcast(output.logits)
            if labels.shape not in (logits.shape, logits.squeeze(1).shape):
                raise ValueError(f"a regression requires labels {tuple(logits.shape)}; got {tuple(labels.shape)}.")
            return replace(output, loss=F.mse_loss(logits, labels.to(logits.dtype).view_as(logits)))
        elif problem_type is not None and labels.ndim != 1 + (problem_type == "multi_label_classification"):
            raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit the problem_type {problem_type!r}.")
        return self.head(inputs, labels, **mixed)

    @staticmethod
    def _build_head(config: Any, embedding_dim: int) -> Head:
        if getattr(config, "spherization", None) is not None and issubclass(HEADS[config.head], SpherizedHead):
            raise ValueError(f"head {config.head!r} would spherize embeddings again; set spherization=None.")
        if config.problem_type not in (None, "single_label_classification"):
            HEADS[config.head].require_cross_entropy(f"problem_type {config.problem_type!r}")
        options = config.head_kwargs or {}
        if config.problem_type == "regression" and (options.get("class_weights") or options.get("label_smoothing")):
            raise ValueError("a regression has neither class_weights nor label_smoothing; leave them out.")
        return build_head(config.head, embedding_dim, config.num_labels, **options)


class SphereVisionForImageClassification(ModelWithHead, SphereVisionPreTrainedModel):
    """The image encoder with a classification head.

    Args:
        config: The configuration; `num_labels` is the number of classes. With `problem_type` set to
            `multi_label_classification`, an image can have several of them; with `regression`, the logits are values.
            Heads whose loss is not a cross-entropy have neither.
        pretrained: See `SphereVisionModel`.

    Example:
        >>> config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=28, num_labels=10)
        >>> model = SphereVisionForImageClassification(config)
        >>> model(torch.rand(2, 1, 28, 28)).logits.shape
        torch.Size([2, 10])
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool | str = False) -> None:
        super().__init__(config)
        config = self.config
        self.sphere_vision = SphereVisionModel(config, pretrained=pretrained)
        self.head = self._build_head(config, self.sphere_vision.embedding_dim)
        self.rejection = None if config.rejection is None else Rejection(config.rejection)
        self.post_init()

    def set_rejection(self, rejection: Rejection | None) -> None:
        """Set the rejection of unknown images, or remove it; `hf_sphere.ood.fit_rejection` calls this."""
        if rejection is not None:
            self.warn_of_adapters("rejection")
        device: Any = self.device
        self.rejection = None if rejection is None else rejection.to(device)
        self.config.rejection = None if rejection is None else rejection.settings

    @weighted_by_targets
    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> SphereVisionOutput:
        """Classify images.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: (B,), class indices from 0 to `num_labels` - 1, or -100 for images to ignore; or (B, num_labels),
                from 0 to 1, for images with several classes, or values. With the `problem_type`
                `single_label_classification`, these are the fractions of one or two classes in a mixed image, as of the
                transforms `MixUp` and `CutMix` of torchvision. If given, the output has a loss.
            **kwargs: Options of the encoder, see `SphereVisionModel`, and `mixed_labels` and `mixed_share` of images
                that are mixed with others, see `Head.forward`.
        """
        mixed = pop_mixed(kwargs)
        encoded = self.sphere_vision(pixel_values, return_dict=True, **kwargs)
        return self.classify(encoded.embeddings, labels, mixed, hidden_states=encoded.hidden_states)


class SphereVisionForRegression(SphereVisionPreTrainedModel):
    """The image encoder with regression by the angle between embedding and pole.

    Args:
        config: The configuration; `embedding_dim` and `value_range` must be set.
        pretrained: See `SphereVisionModel`.

    Example:
        >>> config = SphereVisionConfig(
        ...     backbone="lenet5", num_channels=1, image_size=28, embedding_dim=2, head=None, value_range=[0.0, 1.0]
        ... )
        >>> SphereVisionForRegression(config)(torch.rand(3, 1, 28, 28)).predictions.shape
        torch.Size([3])
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool | str = False) -> None:
        config = copy.deepcopy(config)
        config.head = config.rejection = None  # so that the saved model is not mistaken for a classifier
        super().__init__(config)
        self.sphere_vision, self.regression = _build_regression(config, pretrained)
        self.post_init()

    @weighted_by_targets
    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> SphereVisionOutput:
        """Predict values for images.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: (B,), the values; if given, the output has a loss.
            **kwargs: Options of the encoder, see `SphereVisionModel`.
        """
        encoded = self.sphere_vision(pixel_values, return_dict=True, **kwargs)
        results: Any = self.regression(encoded.embeddings, labels)._asdict()
        return SphereVisionOutput(**results, hidden_states=encoded.hidden_states)


class SphereVisionForJointPrediction(ModelWithHead, SphereVisionPreTrainedModel):
    """The image encoder with a regression and a classification on one sphere.

    The first axis is the pole of the regression, so a value is a latitude. The head receives only the other
    coordinates, orthogonal to the pole. So every value is compatible with every class: the tasks do not conflict.

    Args:
        config: The configuration; `num_labels`, `embedding_dim` (including the pole's axis) and `value_range` must be
            set. `task_weight` w makes the loss (1 - w) * regression + w * classification.
        pretrained: See `SphereVisionModel`.

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019, section 2.3.

    Example:
        >>> kwargs = {"num_channels": 1, "image_size": 28, "embedding_dim": 3, "value_range": (0, 1)}
        >>> model = SphereVisionForJointPrediction(SphereVisionConfig(backbone="lenet5", **kwargs))
        >>> model(torch.rand(2, 1, 28, 28)).logits.shape
        torch.Size([2, 2])
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool | str = False) -> None:
        super().__init__(config)
        config = self.config
        self.sphere_vision, self.regression = _build_regression(config, pretrained)
        self.head = self._build_head(config, self.sphere_vision.embedding_dim - 1)
        if self.head.reduction != self.regression.reduction:
            raise ValueError("set the same `reduction` in head_kwargs and regression_kwargs.")
        self.post_init()

    def head_inputs(self, embeddings: Tensor) -> Tensor:
        """Return the coordinates orthogonal to the pole: (B, d) -> (B, d - 1)."""
        return embeddings[:, 1:]

    @weighted_by_targets
    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, regression_labels: Tensor | None = None, **kwargs: Any
    ) -> SphereVisionOutput:
        """Classify images and predict values for them.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: The classes, see `SphereVisionForImageClassification`.
            regression_labels: (B,), the values; if both are given, the output has a loss. Where the Trainer accumulates
                gradients, both parts of the loss of a batch are weighted by its number of classes that are not -100.
            **kwargs: Options of the encoder, see `SphereVisionModel`.
        """
        encoded = self.sphere_vision(pixel_values, return_dict=True, **kwargs)
        values = self.regression(encoded.embeddings, regression_labels)
        classes = self.classify(encoded.embeddings, labels)
        weight, loss = self.config.task_weight, None
        if labels is not None or regression_labels is not None:
            loss = (1.0 - weight) * values.loss + weight * classes.loss
        results: Any = values._asdict() | {"loss": loss, "logits": classes.logits}
        return SphereVisionOutput(**results, hidden_states=encoded.hidden_states)


def _build_regression(config: SphereVisionConfig, pretrained: bool | str) -> tuple[SphereVisionModel, PoleRegression]:
    if config.spherization is not None:
        raise ValueError("spherized embeddings have no negative coordinates for a regression; set spherization=None.")
    settings: Any = (config.embedding_dim, config.value_range)
    regression = PoleRegression(*settings, **(config.regression_kwargs or {}))
    return SphereVisionModel(config, pretrained=pretrained), regression


class SphereVisionForFewShotClassification(SphereVisionPreTrainedModel):
    """The image encoder with a classifier that compares queries with the mean embedding of each class's examples.

    All images of all episodes go through the encoder together. `model.classifier(query_embeddings,
    support_embeddings)` classifies existing embeddings; `model.base_model` is the encoder.

    `from_pretrained` also loads the encoder of any other model of this family, without its head. The backbone then ends
    with its last activation only if it did so in that model.

    Args:
        config: The configuration; `few_shot_kwargs` and `spherization` apply to this model, and `head` is set to None.
        pretrained: See `SphereVisionModel`.

    Reference:
        Snell, Swersky and Zemel, "Prototypical networks for few-shot learning", NeurIPS 2017.

    Example:
        >>> config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=28, spherization={})
        >>> model = SphereVisionForFewShotClassification(config)
        >>> queries, support = torch.rand(8, 15, 1, 28, 28), torch.rand(8, 5, 1, 1, 28, 28)  # 8 episodes, 5-way 1-shot
        >>> model(queries, support).logits.shape
        torch.Size([8, 15, 5])
    """

    _keys_to_ignore_on_load_unexpected = [r"^head\.", r"^regression\."]

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool | str = False) -> None:
        config = copy.deepcopy(config)  # changed below
        if config.architectures and not config.keeps_activation:
            config.final_activation = False  # a saved encoder must return the same embeddings without its head
        config.head = config.rejection = None
        super().__init__(config)
        self.sphere_vision = SphereVisionModel(config, pretrained=pretrained)
        self.classifier = PrototypicalClassifier(**(config.few_shot_kwargs or {}))
        self.post_init()

    @weighted_by_targets
    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, support_pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> SphereVisionOutput:
        """Classify the queries of episodes, or of one episode without the axis E.

        Args:
            pixel_values: (E, Q, num_channels, height, width), the queries, normalized by the image processor.
            support_pixel_values: (E, way, shot, num_channels, height, width), the examples of each class.
            labels: (E, Q), from 0 to way - 1 in the order of the examples; if given, the output has a loss.
            **kwargs: Ignored; accepted for compatibility with transformers.
        """
        queries, examples = pixel_values.shape[:-3], support_pixel_values.shape[:-3]
        # In one batch; otherwise batch norms in training would use different statistics for queries and examples.
        images = [pixel_values.flatten(end_dim=-4), support_pixel_values.flatten(end_dim=-4)]
        embeddings = self.sphere_vision(torch.cat(images), return_dict=True).embeddings
        query, support = embeddings.tensor_split([queries.numel()])
        query, support = query.unflatten(0, queries), support.unflatten(0, examples)
        output = self.classifier(query, support, labels)
        return SphereVisionOutput(output.loss, output.logits, embeddings=query, prototypes=output.prototypes)
