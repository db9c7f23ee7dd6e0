# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""BERT in which the feed-forward of some layers is spherized; the last one by default.

Every part is built once and called by BERT's own `forward`; what is not spherized is BERT's own layer.
"""

from torch import nn
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertEncoder,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLayer,
    BertModel,
    BertOnlyMLMHead,
    BertPooler,
    BertPreTrainedModel,
)

from hf_sphere.models.sphere_bert.configuration_sphere_bert import SphereBertConfig
from hf_sphere.models.spherized_encoder.feed_forward import (
    SpherizedClassificationHead,
    SpherizedIntermediate,
    SpherizedOutput,
)
from hf_sphere.models.spherized_encoder.loading import SpherizedEncoderMixin


class SphereBertLayer(BertLayer):
    """A layer whose feed-forward goes over the sphere: linear, spherization, linear without bias.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022.
    """

    def __init__(self, config: SphereBertConfig, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.intermediate = SpherizedIntermediate(config)
        self.output = SpherizedOutput(config)


class SphereBertEncoder(BertEncoder):
    """BERT's layers, some of them spherized."""

    def __init__(self, config: SphereBertConfig) -> None:
        super(BertEncoder, self).__init__()
        self.config = config
        spherized = config.spherized_layer_indices
        self.layer = nn.ModuleList(
            SphereBertLayer(config, index) if index in spherized else BertLayer(config, index)
            for index in range(config.num_hidden_layers)
        )


class SphereBertPreTrainedModel(SpherizedEncoderMixin, BertPreTrainedModel):
    """Base class: loading, saving and initialisation."""

    config: SphereBertConfig
    config_class = SphereBertConfig


class SphereBertModel(SphereBertPreTrainedModel, BertModel):
    """The encoder: token ids to hidden states.

    Args:
        config: The configuration.
        add_pooling_layer: Whether to pool the first token's hidden state.
    """

    _no_split_modules = ["BertEmbeddings", "BertLayer", "SphereBertLayer"]

    def __init__(self, config: SphereBertConfig, add_pooling_layer: bool = True) -> None:
        super(BertModel, self).__init__(config)
        self.gradient_checkpointing = False
        self.embeddings = BertEmbeddings(config)
        self.encoder = SphereBertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()


class SphereBertForMaskedLM(SphereBertPreTrainedModel, BertForMaskedLM):
    """The encoder with BERT's masked-language-model head."""

    def __init__(self, config: SphereBertConfig) -> None:
        super(BertForMaskedLM, self).__init__(config)
        self.bert = SphereBertModel(config, add_pooling_layer=False)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()


class SphereBertForSequenceClassification(SphereBertPreTrainedModel, BertForSequenceClassification):
    """The encoder with a sequence classifier, spherized if any layer is; see `spherized_classifier`."""

    def __init__(self, config: SphereBertConfig) -> None:
        super(BertForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.bert = SphereBertModel(config)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = (
            SpherizedClassificationHead(config)
            if config.has_spherized_classifier
            else nn.Linear(config.hidden_size, config.num_labels)
        )
        self.post_init()


__all__ = [
    "SphereBertForMaskedLM",
    "SphereBertForSequenceClassification",
    "SphereBertModel",
    "SphereBertPreTrainedModel",
]
