"""Image models that predict values: regression, alone or together with classification."""

import copy
from typing import Any

from torch import Tensor
from transformers.utils.generic import can_return_tuple

from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
from hf_sphere.models.sphere_vision.modeling_sphere_vision import (
    SphereVisionModel,
    SphereVisionModelWithHead,
    SphereVisionPreTrainedModel,
)
from hf_sphere.models.sphere_vision.outputs_sphere_vision import SphereVisionJointOutput, SphereVisionRegressionOutput
from hf_sphere.nn.pole_regression import PoleRegression


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
        config.head = None  # so that the saved model is not mistaken for a classifier
        super().__init__(config)
        self.sphere_vision, self.regression = _build_regression(config, pretrained)
        self.supports_gradient_checkpointing = self.sphere_vision.supports_gradient_checkpointing
        self.post_init()

    @property
    def loss_reduction(self) -> str:
        """Whether the loss is the `mean` or the `sum` over a batch."""
        return self.regression.reduction

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> SphereVisionRegressionOutput:
        """Predict values for images.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: (B,), the values; if given, the output has a loss.
            **kwargs: Options of the encoder, see `SphereVisionModel`.
        """
        encoded = self.sphere_vision(pixel_values, return_dict=True, **kwargs)
        output = self.regression(encoded.embeddings, labels)
        return SphereVisionRegressionOutput(output.loss, output.predictions, output.embeddings, encoded.hidden_states)


class SphereVisionForJointPrediction(SphereVisionModelWithHead):
    """The image encoder with a regression and a classification on one sphere.

    The first axis is the pole of the regression, so a value is a latitude. The head receives only the other
    coordinates, orthogonal to the pole. Every value is therefore compatible with every class, and the two tasks do not
    conflict.

    Args:
        config: The configuration; `num_labels`, `embedding_dim` (including the pole's axis) and `value_range` must be
            set. `task_weight` w makes the loss (1 - w) * regression + w * classification.
        pretrained: See `SphereVisionModel`.

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019, section 2.3.
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool | str = False) -> None:
        super().__init__(config)
        if config.embedding_dim is not None and config.embedding_dim < 3:
            raise ValueError(f"joint prediction needs an embedding_dim of at least 3; got {config.embedding_dim}.")
        self.sphere_vision, self.regression = _build_regression(config, pretrained)
        self.head = self._build_head(config, self.sphere_vision.embedding_dim - 1)
        if self.head.reduction != self.regression.reduction:
            raise ValueError(
                f"the losses of the two tasks are added, but one is a {self.head.reduction} and the other a "
                f"{self.regression.reduction} over the batch; set the same `reduction` in head_kwargs and "
                "regression_kwargs."
            )
        self.supports_gradient_checkpointing = self.sphere_vision.supports_gradient_checkpointing
        self.post_init()

    def head_inputs(self, embeddings: Tensor) -> Tensor:
        """Return the coordinates orthogonal to the pole: (B, d) -> (B, d - 1)."""
        return embeddings[:, 1:]

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        regression_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SphereVisionJointOutput:
        """Classify images and predict values for them.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: The classes, see `SphereVisionForImageClassification`.
            regression_labels: (B,), the values; if both are given, the output has a loss.
            **kwargs: Options of the encoder, see `SphereVisionModel`.
        """
        if (labels is None) != (regression_labels is None):
            raise ValueError("the joint loss needs both labels (classes) and regression_labels (values), or neither.")
        encoded = self.sphere_vision(pixel_values, return_dict=True, **kwargs)
        values = self.regression(encoded.embeddings, regression_labels)
        classes = self.classify(encoded.embeddings, labels)
        loss = None
        if classes.loss is not None:
            weight = self.config.task_weight
            loss = (1.0 - weight) * values.loss + weight * classes.loss
        return SphereVisionJointOutput(
            loss, classes.logits, values.predictions, values.embeddings, encoded.hidden_states
        )


def _build_regression(config: SphereVisionConfig, pretrained: bool | str) -> tuple[SphereVisionModel, PoleRegression]:
    if config.embedding_dim is None or config.value_range is None:
        raise ValueError(
            "regression on the sphere needs embedding_dim (the sphere's dimension plus one, for instance 2) and "
            f"value_range (lowest and highest value); got {config.embedding_dim} and {config.value_range}."
        )
    if config.spherization is not None:
        raise ValueError(
            "regression does not work on spherized embeddings: they have no negative coordinates, so values below "
            "the middle of the range could not be predicted. Set spherization to None; the regression normalizes the "
            "embeddings itself."
        )
    low, high = config.value_range
    options = config.regression_kwargs or {}
    unknown = sorted(set(options) - {"out_of_range", "reduction"})
    if unknown:
        raise ValueError(f"a regression has no option {', '.join(unknown)}; its options are: out_of_range, reduction.")
    regression = PoleRegression(config.embedding_dim, (low, high), **options)
    return SphereVisionModel(config, pretrained=pretrained), regression
