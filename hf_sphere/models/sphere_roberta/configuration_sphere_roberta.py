# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""Configuration of the spherized RoBERTa."""

from huggingface_hub.dataclasses import strict
from transformers.models.roberta.configuration_roberta import RobertaConfig

from hf_sphere.models.spherized_encoder.settings import SpherizationSettings


@strict
class SphereRobertaConfig(SpherizationSettings, RobertaConfig):
    """Configuration of `SphereRobertaModel` and the models with a head on it.

    All fields of `transformers.RobertaConfig`, and those of `SpherizationSettings`. `from_pretrained` reads the
    configurations of RoBERTa too.

    Example:
        >>> config = SphereRobertaConfig(spherized_layers=[-2, -1])
        >>> model = SphereRobertaForMaskedLM(config)
    """

    model_type = "sphere_roberta"
    base_model_type = "roberta"


__all__ = ["SphereRobertaConfig"]
