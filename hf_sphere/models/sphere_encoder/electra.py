# Copyright 2026 The hf_sphere authors  (transformers' common tests read the year)
"""ELECTRA with spherized feed-forward layers."""

from huggingface_hub.dataclasses import strict
from transformers import ElectraConfig
from transformers.models.electra import modeling_electra as plain

from hf_sphere.models.sphere_encoder import modeling_sphere_encoder as base
from hf_sphere.models.sphere_encoder.bert import SphereBertIntermediate, SphereBertOutput


@strict
class SphereElectraConfig(base.SphereEncoderConfigMixin, ElectraConfig):
    """`ElectraConfig` with the fields of `SphereEncoderConfigMixin`."""

    model_type = "sphere_electra"


class SphereElectraModel(base.SphereEncoderMixin, plain.ElectraModel):
    """`ElectraModel` of transformers with spherized feed-forwards."""

    config: SphereElectraConfig
    feed_forward_classes = {"ElectraIntermediate": SphereBertIntermediate, "ElectraOutput": SphereBertOutput}


class SphereElectraForMaskedLM(base.SphereEncoderMixin, plain.ElectraForMaskedLM):
    """`ElectraForMaskedLM` of transformers with spherized feed-forwards."""


class SphereElectraForSequenceClassification(base.SphereEncoderMixin, plain.ElectraForSequenceClassification):
    """`ElectraForSequenceClassification` of transformers with spherized feed-forwards."""


class SphereElectraForTokenClassification(base.SphereEncoderMixin, plain.ElectraForTokenClassification):
    """`ElectraForTokenClassification` of transformers with spherized feed-forwards."""
