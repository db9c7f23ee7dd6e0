# Copyright 2026 The hf_sphere authors  (transformers' common tests read the year)
"""ELECTRA with spherized feed-forward layers."""

from huggingface_hub.dataclasses import strict
from transformers import ElectraConfig
from transformers.models.electra import modeling_electra as plain

from hf_sphere.models.sphere_encoder.bert import SphereBertIntermediate, SphereBertOutput
from hf_sphere.models.sphere_encoder.configuration_sphere_encoder import SphereEncoderConfigMixin
from hf_sphere.models.sphere_encoder.modeling_sphere_encoder import SphereEncoderMixin


@strict
class SphereElectraConfig(SphereEncoderConfigMixin, ElectraConfig):
    """`ElectraConfig` with the fields of `SphereEncoderConfigMixin`."""

    model_type = "sphere_electra"


class SphereElectraModel(SphereEncoderMixin, plain.ElectraModel):
    """`ElectraModel` of transformers with spherized feed-forwards."""

    config: SphereElectraConfig
    feed_forward_classes = {"ElectraIntermediate": SphereBertIntermediate, "ElectraOutput": SphereBertOutput}


class SphereElectraForMaskedLM(SphereEncoderMixin, plain.ElectraForMaskedLM):
    """`ElectraForMaskedLM` of transformers with spherized feed-forwards."""


class SphereElectraForSequenceClassification(SphereEncoderMixin, plain.ElectraForSequenceClassification):
    """`ElectraForSequenceClassification` of transformers with spherized feed-forwards."""


class SphereElectraForTokenClassification(SphereEncoderMixin, plain.ElectraForTokenClassification):
    """`ElectraForTokenClassification` of transformers with spherized feed-forwards."""
