"""Image models for regression, joint prediction and few-shot classification."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import can_return_tuple

from hf_sphere.models.accumulation import weighted_by_targets
from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
from hf_sphere.models.sphere_vision.modeling_sphere_vision import (
    ModelWithHead,
    SphereVisionModel,
    SphereVisionOutput,
    SphereVisionPreTrainedModel,
)
from hf_sphere.nn.pole_regression import PoleRegression
from hf_sphere.nn.prototypical import PrototypicalClassifier


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
        output = self.regression(encoded.embeddings, labels)
        results: Any = {"predictions": output.predictions, "embeddings": output.embeddings}
        return SphereVisionOutput(loss=output.loss, **results, hidden_states=encoded.hidden_states)


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
        if (labels is None) != (regression_labels is None):
            raise ValueError("the joint loss needs both labels (classes) and regression_labels (values), or neither.")
        encoded = self.sphere_vision(pixel_values, return_dict=True, **kwargs)
        values = self.regression(encoded.embeddings, regression_labels)
        classes = self.classify(encoded.embeddings, labels)
        loss = None
        if classes.loss is not None:
            weight = self.config.task_weight
            loss = (1.0 - weight) * values.loss + weight * classes.loss
        results: Any = {"predictions": values.predictions, "embeddings": values.embeddings}
        return SphereVisionOutput(loss=loss, logits=classes.logits, **results, hidden_states=encoded.hidden_states)


def _build_regression(config: SphereVisionConfig, pretrained: bool | str) -> tuple[SphereVisionModel, PoleRegression]:
    if config.embedding_dim is None or config.value_range is None:
        raise ValueError("a regression needs embedding_dim and value_range (lowest, highest).")
    if config.spherization is not None:
        raise ValueError("spherized embeddings have no negative coordinates for a regression; set spherization=None.")
    regression = PoleRegression(config.embedding_dim, list(config.value_range), **(config.regression_kwargs or {}))
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
