"""Few-shot classification of images: an encoder, and classes defined by a few examples each."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import can_return_tuple

from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionModel, SphereVisionPreTrainedModel
from hf_sphere.models.sphere_vision.outputs_sphere_vision import SphereVisionFewShotOutput
from hf_sphere.nn.prototypical import PrototypicalClassifier


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

    loss_reduction = "mean"

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool | str = False) -> None:
        config = copy.deepcopy(config)  # changed below
        if config.architectures and not config.keeps_activation:
            config.final_activation = False  # a saved encoder must return the same embeddings without its head
        config.head = None
        super().__init__(config)
        self.sphere_vision = SphereVisionModel(config, pretrained=pretrained)
        self.classifier = PrototypicalClassifier(**(config.few_shot_kwargs or {}))
        self.supports_gradient_checkpointing = self.sphere_vision.supports_gradient_checkpointing
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        support_pixel_values: Tensor,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SphereVisionFewShotOutput:
        """Classify the queries of episodes, or of one episode without the axis E.

        Args:
            pixel_values: (E, Q, num_channels, height, width), the queries, normalized by the image processor.
            support_pixel_values: (E, way, shot, num_channels, height, width), the examples of each class.
            labels: (E, Q), from 0 to way - 1 in the order of the examples; if given, the output has a loss.
            **kwargs: Ignored; accepted for compatibility with transformers.
        """
        self._check_shapes(pixel_values, support_pixel_values)
        queries, examples = pixel_values.shape[:-3], support_pixel_values.shape[:-3]
        # In one batch; otherwise batch norms in training would use different statistics for queries and examples.
        images = [pixel_values.flatten(end_dim=-4), support_pixel_values.flatten(end_dim=-4)]
        embeddings = self.sphere_vision(torch.cat(images), return_dict=True).embeddings
        query, support = embeddings.tensor_split([queries.numel()])
        query, support = query.unflatten(0, queries), support.unflatten(0, examples)
        output = self.classifier(query, support, labels)
        return SphereVisionFewShotOutput(output.loss, output.logits, query, output.prototypes)

    @staticmethod
    def _check_shapes(queries: Tensor, examples: Tensor) -> None:
        fits = queries.ndim in (4, 5) and examples.ndim == queries.ndim + 1
        if not fits or queries.shape[-3:] != examples.shape[-3:] or queries.shape[:-4] != examples.shape[:-5]:
            raise ValueError(
                "expected pixel_values of shape (episodes, queries, channels, height, width) and support_pixel_values "
                "of shape (episodes, way, shot, channels, height, width), with the same episodes and images of the "
                f"same shape, or both without the axis of episodes; got {tuple(queries.shape)} and "
                f"{tuple(examples.shape)}."
            )
