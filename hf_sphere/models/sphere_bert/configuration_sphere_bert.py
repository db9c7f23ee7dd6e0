# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""Configuration of the spherized BERT."""

from huggingface_hub.dataclasses import strict
from transformers.models.bert.configuration_bert import BertConfig

from hf_sphere.models.spherized_encoder.settings import SpherizationSettings


@strict
class SphereBertConfig(SpherizationSettings, BertConfig):
    """Configuration of `SphereBertModel` and the models with a head on it.

    All fields of `transformers.BertConfig`, and those of `SpherizationSettings`. `from_pretrained` reads the
    configurations of BERT too.

    Example:
        >>> config = SphereBertConfig(spherized_layers=[-2, -1])
        >>> model = SphereBertForMaskedLM(config)
    """

    model_type = "sphere_bert"
    base_model_type = "bert"


__all__ = ["SphereBertConfig"]
