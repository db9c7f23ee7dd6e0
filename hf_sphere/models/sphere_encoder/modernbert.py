# Copyright 2026 The hf_sphere authors  (transformers' common tests read the year)
"""ModernBERT with spherized feed-forward layers."""

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import ModernBertConfig
from transformers.activations import ACT2FN
from transformers.models.modernbert import modeling_modernbert as plain

from hf_sphere.models.sphere_encoder import modeling_sphere_encoder as base


@strict
class SphereModernBertConfig(base.SphereEncoderConfigMixin, ModernBertConfig):
    """`ModernBertConfig` with the fields of `SphereEncoderConfigMixin`."""

    model_type = "sphere_modernbert"


class SphereModernBertMLP(plain.ModernBertMLP):
    """Gated feed-forward whose second map follows a spherization.

    The activation belongs to the gate and is kept: the spherized vector is the product activation(a) * b of two maps.
    """

    def __init__(self, config: Any) -> None:
        super(plain.ModernBertMLP, self).__init__()
        self.config = config
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.act = ACT2FN[config.hidden_activation]
        self.drop = nn.Dropout(config.mlp_dropout)
        self.spherical = base.SphericalMap(config.intermediate_size, config.hidden_size, **config.spherization_options)

    @property
    def Wo(self) -> base.SphericalMap:  # noqa: N802
        """The second map, by the name by which ModernBERT calls and initializes it."""
        return self.spherical


class SphereModernBertModel(base.SphereEncoderMixin, plain.ModernBertModel):
    """`ModernBertModel` of transformers with spherized feed-forwards."""

    config: SphereModernBertConfig
    layers_path = "layers"
    feed_forward_path = "mlp_norm"
    plain_map_path = "mlp.Wo"
    feed_forward_classes = {"ModernBertMLP": SphereModernBertMLP}


class SphereModernBertForMaskedLM(base.SphereEncoderMixin, plain.ModernBertForMaskedLM):
    """`ModernBertForMaskedLM` of transformers with spherized feed-forwards."""


class SphereModernBertForSequenceClassification(base.SphereEncoderMixin, plain.ModernBertForSequenceClassification):
    """`ModernBertForSequenceClassification` of transformers with spherized feed-forwards."""


class SphereModernBertForTokenClassification(base.SphereEncoderMixin, plain.ModernBertForTokenClassification):
    """`ModernBertForTokenClassification` of transformers with spherized feed-forwards."""
