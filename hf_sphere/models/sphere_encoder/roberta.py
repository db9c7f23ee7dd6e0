# Copyright 2026 The hf_sphere authors  (transformers' common tests read the year)
"""RoBERTa with spherized feed-forward layers."""

from huggingface_hub.dataclasses import strict
from transformers import RobertaConfig
from transformers.models.roberta import modeling_roberta as plain

from hf_sphere.models.sphere_encoder import modeling_sphere_encoder as base
from hf_sphere.models.sphere_encoder.bert import SphereBertIntermediate, SphereBertOutput


@strict
class SphereRobertaConfig(base.SphereEncoderConfigMixin, RobertaConfig):
    """`RobertaConfig` with the fields of `SphereEncoderConfigMixin`."""

    model_type = "sphere_roberta"


class SphereRobertaModel(base.SphereEncoderMixin, plain.RobertaModel):
    """`RobertaModel` of transformers with spherized feed-forwards."""

    config: SphereRobertaConfig
    feed_forward_classes = {"RobertaIntermediate": SphereBertIntermediate, "RobertaOutput": SphereBertOutput}


class SphereRobertaForMaskedLM(base.SphereEncoderMixin, plain.RobertaForMaskedLM):
    """`RobertaForMaskedLM` of transformers with spherized feed-forwards."""


class SphereRobertaForSequenceClassification(base.SphereEncoderMixin, plain.RobertaForSequenceClassification):
    """`RobertaForSequenceClassification` of transformers with spherized feed-forwards."""


class SphereRobertaForTokenClassification(base.SphereEncoderMixin, plain.RobertaForTokenClassification):
    """`RobertaForTokenClassification` of transformers with spherized feed-forwards."""
