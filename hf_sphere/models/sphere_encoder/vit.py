# Copyright 2026 The hf_sphere authors  (transformers' common tests read the year)
"""ViT with spherized feed-forward layers, and a head of `hf_sphere.nn` if the configuration has one."""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import ViTConfig
from transformers.models.vit import modeling_vit as plain
from transformers.utils.generic import can_return_tuple

from hf_sphere.models.sphere_encoder import modeling_sphere_encoder as base
from hf_sphere.models.sphere_vision.configuration_sphere_vision import OwnPartsMixin
from hf_sphere.models.sphere_vision.modeling_sphere_vision import reset_missing_parameters
from hf_sphere.models.sphere_vision.modeling_sphere_vision_tasks import ModelWithHead
from hf_sphere.nn.labels import pop_mixed, refuse_mixed, weighted_by_targets


@strict
class SphereViTConfig(base.SphereEncoderConfigMixin, OwnPartsMixin, ViTConfig):
    """`ViTConfig` with the fields of `SphereEncoderConfigMixin` and the head of the image classifier.

    Args:
        head: Name of the head of the image classifier, one of `hf_sphere.nn.HEADS`. It takes the last hidden state of
            the first token. None for the linear classifier of the plain model.
        head_kwargs: Options of the head.
    """

    model_type = "sphere_vit"
    keys_to_ignore_at_inference = ["embeddings", "concentration"]

    head: str | None = None
    head_kwargs: dict[str, Any] | None = None

    def validate_head(self) -> None:
        """Check that there is only one classifier."""
        if self.head is not None and self.spherized_classifier:
            raise ValueError("spherized_classifier spherizes the linear classifier; leave it out, or set head to None.")


class SphereViTMLP(nn.Module):
    """Feed-forward whose second map follows a spherization, which replaces the activation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.spherical = base.SphericalMap(config.intermediate_size, config.hidden_size, **config.spherization_options)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, L, hidden_size) to (B, L, hidden_size)."""
        return self.spherical(self.fc1(hidden_states))


class SphereViTModel(base.SphereEncoderMixin, plain.ViTModel):
    """`ViTModel` of transformers with spherized feed-forwards."""

    config: SphereViTConfig
    layers_path = "layers"
    feed_forward_path = "layernorm_after"
    plain_map_path = "mlp.fc2"
    feed_forward_classes = {"ViTMLP": SphereViTMLP}

    def __init__(self, config: SphereViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False) -> None:
        super().__init__(config, add_pooling_layer, use_mask_token)  # by whose names transformers tests such models


class SphereViTForImageClassification(ModelWithHead, base.SphereEncoderMixin, plain.ViTForImageClassification):
    """`ViTForImageClassification` of transformers with spherized feed-forwards, and any head."""

    def post_init(self) -> None:
        """Replace the linear classifier by the head if the configuration has one."""
        if self.config.head is not None and hasattr(self, "classifier"):
            del self.classifier
            self._keys_to_ignore_on_load_unexpected = {r"^classifier\."}
            self.head = self._build_head(self.config, self.config.hidden_size)
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if self.config.head is not None and any(module is inner for inner in self.head.modules()):
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
            **kwargs: Options of the encoder, and `mixed_labels` and `mixed_share` of images that are mixed, likewise.
        """
        mixed = pop_mixed(kwargs)
        if self.config.head is None:
            refuse_mixed(mixed)
            return super().forward(pixel_values, labels=labels, **kwargs)
        encoder: Any = self.base_model
        encoded = encoder(pixel_values, return_dict=True, **kwargs)
        states = {"hidden_states": encoded.hidden_states, "attentions": encoded.attentions}
        return self.classify(encoded.last_hidden_state[:, 0], labels, mixed, **states)
