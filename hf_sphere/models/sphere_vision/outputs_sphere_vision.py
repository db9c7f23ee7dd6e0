"""Outputs of the image models."""

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import ModelOutput


@dataclass
class SphereVisionModelOutput(ModelOutput):
    """Output of `SphereVisionModel`.

    Attributes:
        embeddings: (B, d), the input of a head; on the sphere if the configuration has a `spherization`.
        pooler_output: The embeddings, by the name they have in other models.
        hidden_states: Features of the backbone's stages or blocks, if `output_hidden_states` is set.
    """

    embeddings: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class SphereVisionClassifierOutput(ModelOutput):
    """Output of `SphereVisionForImageClassification`.

    Attributes:
        loss: Scalar, if labels were given.
        logits: (B, K); `argmax` is the prediction, `softmax` the confidence.
        embeddings: (B, d'), transformed by the head: on the sphere for a spherized head.
        concentration: (B,), the certainty of the embeddings, for heads that have one.
        hidden_states: See `SphereVisionModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    embeddings: Tensor | None = None
    concentration: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class SphereVisionRegressionOutput(ModelOutput):
    """Output of `SphereVisionForRegression`.

    Attributes:
        loss: Scalar, if labels were given.
        predictions: (B,), in the unit of the labels.
        embeddings: (B, d), on the sphere.
        hidden_states: See `SphereVisionModelOutput`.
    """

    loss: Tensor | None = None
    predictions: Tensor | None = None
    embeddings: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class SphereVisionJointOutput(ModelOutput):
    """Output of `SphereVisionForJointPrediction`.

    Attributes:
        loss: Scalar, if both kinds of labels were given.
        logits: (B, K); `argmax` is the predicted class, `softmax` the confidence.
        predictions: (B,), the predicted values in the unit of `regression_labels`.
        embeddings: (B, d), on the sphere.
        hidden_states: See `SphereVisionModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    predictions: Tensor | None = None
    embeddings: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class SphereVisionFewShotOutput(ModelOutput):
    """Output of `SphereVisionForFewShotClassification`; the axis of episodes E is absent if the images have none.

    Attributes:
        loss: Scalar, if labels were given.
        logits: (E, Q, way); `argmax` is the prediction, `softmax` the confidence.
        embeddings: (E, Q, d), embeddings of the queries.
        prototypes: (E, way, d), the mean embedding of each class.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    embeddings: Tensor | None = None
    prototypes: Tensor | None = None
