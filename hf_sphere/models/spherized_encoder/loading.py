# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""Loading and initialisation of spherized encoders: from their own checkpoints and from those of the plain encoder."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, initialization as init

from hf_sphere.nn.spherization import Spherization

_SPHERICAL = re.compile(r"(?:^|\.)encoder\.layer\.(\d+)\.output\.spherical\.linear\.weight$")


class SpherizedEncoderMixin:
    """What the base classes of spherized encoders add to those of the plain ones."""

    config: Any
    config_class: Any
    model_tags = ["hf_sphere"]
    _keys_to_ignore_on_load_unexpected: set[str] | list[str] | None = None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]  # of the plain encoder's base class
        if isinstance(module, Spherization):
            # These leave alone what a checkpoint has filled.
            init.constant_(module.scaling, module.initial_scaling)
            init.constant_(module.radius, module.initial_radius)

    def post_init(self) -> None:
        """Finish the construction: a plain checkpoint's output layers that spherical ones replace are no surprise."""
        replaced = {rf"encoder\.layer\.{index}\.output\.dense\." for index in self.config.spherized_layer_indices}
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *replaced}
        super().post_init()  # type: ignore[misc]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint of this model, or start from one of the plain encoder.

        From a plain checkpoint only the output layers of the spherized feed-forwards are new (and the classifier, if
        that is spherized); `calibrate_spherization` fits them to the plain encoder. Arguments are those of
        `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: If other layers are spherized in the checkpoint than in the configuration, or the configuration
                is that of the plain encoder.
        """
        config = kwargs.get("config")
        if isinstance(config, PreTrainedConfig) and not isinstance(config, cls.config_class):
            raise ValueError(
                f"config must be a {cls.config_class.__name__}; got a {type(config).__name__}. Read it with "
                f"{cls.config_class.__name__}.from_pretrained, or leave it out and give its settings as keywords."
            )
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(  # type: ignore[misc]
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        asked = set(model.config.spherized_layer_indices)
        found = (asked - _spherical_layers(info["missing_keys"])) | _spherical_layers(info["unexpected_keys"])
        if found and found != asked:
            raise ValueError(
                f"in the checkpoint {pretrained_model_name_or_path} the layers {sorted(found)} are spherized, but the "
                f"configuration has spherized_layers {sorted(asked)}. Load it with spherized_layers={sorted(found)}, "
                "or start from a checkpoint of the plain encoder."
            )
        return (model, info) if wants_info else model


def _spherical_layers(keys: Iterable[str]) -> set[int]:
    return {int(found.group(1)) for key in keys if (found := _SPHERICAL.search(key))}


__all__ = ["SpherizedEncoderMixin"]
