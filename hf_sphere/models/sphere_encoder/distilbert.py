# Copyright 2026 The hf_sphere authors  (transformers' common tests read the year)
"""DistilBERT with spherized feed-forward layers."""

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import DistilBertConfig
from transformers.models.distilbert import modeling_distilbert as plain

from hf_sphere.models.sphere_encoder import modeling_sphere_encoder as base


@strict
class SphereDistilBertConfig(base.SphereEncoderConfigMixin, DistilBertConfig):
    """`DistilBertConfig` with the fields of `SphereEncoderConfigMixin`."""

    model_type = "sphere_distilbert"


class SphereFFN(plain.FFN):
    """Feed-forward whose second map follows a spherization, which replaces the activation."""

    def __init__(self, config: Any) -> None:
        super(plain.FFN, self).__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.seq_len_dim = 1
        self.lin1 = nn.Linear(config.dim, config.hidden_dim)
        self.spherical = base.SphericalMap(config.hidden_dim, config.dim, **config.spherization_options)

    def ff_chunk(self, input: Tensor) -> Tensor:
        """Map (B, L, dim) to (B, L, dim)."""
        return self.dropout(self.spherical(self.lin1(input)))


class SphereDistilBertModel(base.SphereEncoderMixin, plain.DistilBertModel):
    """`DistilBertModel` of transformers with spherized feed-forwards."""

    config: SphereDistilBertConfig
    layers_path = "transformer.layer"
    feed_forward_path = "ffn"
    plain_map_path = "ffn.lin2"
    feed_forward_classes = {"FFN": SphereFFN}


class SphereDistilBertForMaskedLM(base.SphereEncoderMixin, plain.DistilBertForMaskedLM):
    """`DistilBertForMaskedLM` of transformers with spherized feed-forwards."""


class SphereDistilBertForSequenceClassification(base.SphereEncoderMixin, plain.DistilBertForSequenceClassification):
    """`DistilBertForSequenceClassification` of transformers with spherized feed-forwards."""


class SphereDistilBertForTokenClassification(base.SphereEncoderMixin, plain.DistilBertForTokenClassification):
    """`DistilBertForTokenClassification` of transformers with spherized feed-forwards."""
