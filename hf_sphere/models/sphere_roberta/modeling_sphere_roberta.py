# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""RoBERTa in which the feed-forward of some layers is spherized; the last one by default.

Every part is built once and called by RoBERTa's own `forward`; what is not spherized is RoBERTa's own layer.
"""

from torch import Tensor, nn
from transformers.models.roberta.modeling_roberta import (
    RobertaClassificationHead,
    RobertaEmbeddings,
    RobertaEncoder,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaLayer,
    RobertaLMHead,
    RobertaModel,
    RobertaPooler,
    RobertaPreTrainedModel,
)

from hf_sphere.models.sphere_roberta.configuration_sphere_roberta import SphereRobertaConfig
from hf_sphere.models.spherized_encoder.feed_forward import (
    SpherizedClassificationHead,
    SpherizedIntermediate,
    SpherizedOutput,
)
from hf_sphere.models.spherized_encoder.loading import SpherizedEncoderMixin


class SphereRobertaLayer(RobertaLayer):
    """A layer whose feed-forward goes over the sphere: linear, spherization, linear without bias.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022.
    """

    def __init__(self, config: SphereRobertaConfig, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.intermediate = SpherizedIntermediate(config)
        self.output = SpherizedOutput(config)


class SphereRobertaEncoder(RobertaEncoder):
    """RoBERTa's layers, some of them spherized."""

    def __init__(self, config: SphereRobertaConfig) -> None:
        super(RobertaEncoder, self).__init__()
        self.config = config
        spherized = config.spherized_layer_indices
        self.layer = nn.ModuleList(
            SphereRobertaLayer(config, index) if index in spherized else RobertaLayer(config, index)
            for index in range(config.num_hidden_layers)
        )


class SphereRobertaClassificationHead(SpherizedClassificationHead):
    """The spherized classifier on the first token."""

    def __init__(self, config: SphereRobertaConfig) -> None:
        super().__init__(config)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits: (B, L, hidden_size) -> (B, num_labels)."""
        return super().forward(self.dropout(features[:, 0]))


class SphereRobertaPreTrainedModel(SpherizedEncoderMixin, RobertaPreTrainedModel):
    """Base class: loading, saving and initialisation."""

    config: SphereRobertaConfig
    config_class = SphereRobertaConfig


class SphereRobertaModel(SphereRobertaPreTrainedModel, RobertaModel):
    """The encoder: token ids to hidden states.

    Args:
        config: The configuration.
        add_pooling_layer: Whether to pool the first token's hidden state.
    """

    _no_split_modules = ["RobertaEmbeddings", "RobertaLayer", "SphereRobertaLayer"]

    def __init__(self, config: SphereRobertaConfig, add_pooling_layer: bool = True) -> None:
        super(RobertaModel, self).__init__(config)
        self.gradient_checkpointing = False
        self.embeddings = RobertaEmbeddings(config)
        self.encoder = SphereRobertaEncoder(config)
        self.pooler = RobertaPooler(config) if add_pooling_layer else None
        self.post_init()


class SphereRobertaForMaskedLM(SphereRobertaPreTrainedModel, RobertaForMaskedLM):
    """The encoder with RoBERTa's masked-language-model head."""

    def __init__(self, config: SphereRobertaConfig) -> None:
        super(RobertaForMaskedLM, self).__init__(config)
        self.roberta = SphereRobertaModel(config, add_pooling_layer=False)
        self.lm_head = RobertaLMHead(config)
        self.post_init()


class SphereRobertaForSequenceClassification(SphereRobertaPreTrainedModel, RobertaForSequenceClassification):
    """The encoder with a sequence classifier, spherized if any layer is; see `spherized_classifier`."""

    def __init__(self, config: SphereRobertaConfig) -> None:
        super(RobertaForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.roberta = SphereRobertaModel(config, add_pooling_layer=False)
        self.classifier = (
            SphereRobertaClassificationHead(config)
            if config.has_spherized_classifier
            else RobertaClassificationHead(config)
        )
        self.post_init()


__all__ = [
    "SphereRobertaForMaskedLM",
    "SphereRobertaForSequenceClassification",
    "SphereRobertaModel",
    "SphereRobertaPreTrainedModel",
]
