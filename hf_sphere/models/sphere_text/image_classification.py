"""Image classification by an encoder of transformers, with a head of `hf_sphere.nn`."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from hf_sphere.models.accumulation import weighted_by_targets
from hf_sphere.models.sphere_text.modeling_sphere_text import SphereEncoderPreTrainedModel
from hf_sphere.models.sphere_vision.modeling_sphere_vision import (
    ModelWithHead,
    SphereVisionClassifierOutput,
    reset_missing_parameters,
)


class SphereEncoderForImageClassification(ModelWithHead, SphereEncoderPreTrainedModel):
    """Base class of the image classifiers; without a head in the configuration they have that of the plain model."""

    def post_init(self) -> None:
        """Replace the linear classifier by the head if the configuration has one."""
        if self.config.head is not None and hasattr(self, "classifier"):
            del self.classifier
            self._keys_to_ignore_on_load_unexpected = {r"^classifier\."}
            self.head = self._build_head(self.config, self.config.hidden_size)
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if self.config.head is not None and any(module is part for part in self.head.modules()):
            reset_missing_parameters(module)
        else:
            super()._init_weights(module)

    @weighted_by_targets
    @can_return_tuple
    def forward(self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """Classify images.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: (B,), class indices; see `SphereVisionForImageClassification`. If given, the output has a loss.
            **kwargs: Options of the encoder.
        """
        if self.config.head is None:
            return super().forward(pixel_values, labels=labels, **kwargs)
        encoder: Any = self.base_model
        encoded = encoder(pixel_values, return_dict=True, **kwargs)
        output = vars(self.classify(encoded.last_hidden_state[:, 0], labels))
        states, attentions = encoded.hidden_states, encoded.attentions
        return SphereVisionClassifierOutput(**output, hidden_states=states, attentions=attentions)
