# Copyright 2026 The hf_sphere authors  (transformers' common tests read the year)
"""BERT with spherized feed-forward layers."""

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert import modeling_bert as plain

from hf_sphere.models.sphere_encoder import modeling_sphere_encoder as base


@strict
class SphereBertConfig(base.SphereEncoderConfigMixin, BertConfig):
    """`BertConfig` with the fields of `SphereEncoderConfigMixin`."""

    model_type = "sphere_bert"


class SphereBertIntermediate(plain.BertIntermediate):
    """First map of the feed-forward; the spherization replaces the activation."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, L, hidden_size) to (B, L, intermediate_size)."""
        return self.dense(hidden_states)


class SphereBertOutput(nn.Module):
    """Spherization and second map of the feed-forward, residual connection and norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.spherical = base.SphericalMap(config.intermediate_size, config.hidden_size, **config.spherization_options)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Map (B, L, intermediate_size) to (B, L, hidden_size)."""
        return self.LayerNorm(self.dropout(self.spherical(hidden_states)) + input_tensor)


class SphereBertModel(base.SphereEncoderMixin, plain.BertModel):
    """`BertModel` of transformers with spherized feed-forwards."""

    config: SphereBertConfig
    feed_forward_classes = {"BertIntermediate": SphereBertIntermediate, "BertOutput": SphereBertOutput}


class SphereBertForMaskedLM(base.SphereEncoderMixin, plain.BertForMaskedLM):
    """`BertForMaskedLM` of transformers with spherized feed-forwards."""


class SphereBertForSequenceClassification(base.SphereEncoderMixin, plain.BertForSequenceClassification):
    """`BertForSequenceClassification` of transformers with spherized feed-forwards."""


class SphereBertForTokenClassification(base.SphereEncoderMixin, plain.BertForTokenClassification):
    """`BertForTokenClassification` of transformers with spherized feed-forwards."""
