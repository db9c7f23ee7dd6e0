# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""Text encoders in which the feed-forward of some layers is spherized; by default that of the last layer.

`SphereBertModel` inherits from `SphereTextModel` and `BertModel`, in this order: its constructor is defined here, its
`forward` in transformers. The other parts and encoders follow the same pattern. Every module is built once; layers that
are not spherized are those of the plain encoder. Modules with the shapes of the plain encoder have its names, so that a
plain checkpoint loads into them; the others have different names.

Reference:
    Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization as init

from hf_sphere.models.sphere_text import configuration_sphere_text as configurations
from hf_sphere.models.sphere_text.encoders import TEXT_ENCODERS, TextEncoder
from hf_sphere.nn.spherization import SphericalLinear, Spherization, spherical_linear_names

_SPHERICAL_WEIGHT = re.compile(r"(?:^|\.)encoder\.layer\.(\d+)\.output\.spherical\.linear\.weight$")


class SpherizedIntermediate(nn.Module):
    """First half of a spherized feed-forward: a linear map, without the activation that the spherization replaces."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., intermediate_size)."""
        return self.dense(hidden_states)


class SpherizedOutput(nn.Module):
    """Second half: spherization, a linear map without bias, dropout, the residual connection and the norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.spherical = SphericalLinear(config.intermediate_size, config.hidden_size, **config.spherization_options)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Map (..., intermediate_size) to (..., hidden_size) and add the layer's input."""
        return self.LayerNorm(self.dropout(self.spherical(hidden_states)) + input_tensor)


class SpherizedClassificationHead(nn.Module):
    """Classifier on features: hidden_size -> hidden_size / 2 - 1, spherization, a linear map without bias."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size // 2 - 1
        if width < 1:
            raise ValueError(f"a spherized classifier needs a hidden_size of at least 4; got {config.hidden_size}.")
        self.projection = nn.Linear(config.hidden_size, width)
        self.spherization = Spherization(width, **config.spherization_options)
        self.linear = nn.Linear(width + 1, config.num_labels, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits: (B, hidden_size) -> (B, num_labels)."""
        wide = features.to(torch.promote_types(features.dtype, self.spherization.scaling.dtype))  # as `SphericalLinear`
        return self.linear(self.spherization(self.projection(wide))).to(features.dtype)


class SpherizedFirstTokenHead(SpherizedClassificationHead):
    """`SpherizedClassificationHead` on the hidden state of the first token, after dropout."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = _classifier_dropout(config)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits: (B, L, hidden_size) -> (B, num_labels)."""
        return super().forward(self.dropout(features[:, 0]))


class SphereTextLayer(nn.Module):
    """A layer with a spherized feed-forward: linear map, spherization, linear map without bias."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)  # of the plain layer
        self.intermediate = SpherizedIntermediate(config)
        self.output = SpherizedOutput(config)


class SphereTextEncoder(nn.Module):
    """The layers of the encoder, some of them spherized."""

    text_encoder: ClassVar[TextEncoder]

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.config = config
        plain, spherized = self.text_encoder.load_class("Layer"), _sphere_class(self.text_encoder, "Layer")
        self.layer = nn.ModuleList(
            (spherized if index in config.spherized_layer_indices else plain)(config, index)
            for index in range(config.num_hidden_layers)
        )


class SphereTextPreTrainedModel(PreTrainedModel):
    """Base class of the models: initialization and loading, from checkpoints of the spherized and the plain encoder."""

    text_encoder: ClassVar[TextEncoder]
    config: Any
    config_class: Any
    model_tags = ["hf_sphere"]
    accepts_loss_kwargs = False  # the losses of the plain encoders ignore `num_items_in_batch`
    _keys_to_ignore_on_load_unexpected: set[str] | list[str] | None = None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Spherization):
            # These functions skip tensors loaded from a checkpoint.
            init.constant_(module.scaling, module.initial_scaling)
            init.constant_(module.radius, module.initial_radius)

    def post_init(self) -> None:
        """Finish the construction.

        The plain output layers that spherical ones replace are ignored on loading; quantizers skip the spherical ones.
        """
        replaced = {rf"encoder\.layer\.{index}\.output\.dense\." for index in self.config.spherized_layer_indices}
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *replaced}
        self._keep_in_fp32_modules = spherical_linear_names(self)
        if isinstance(getattr(self, "classifier", None), SpherizedClassificationHead):
            self._keep_in_fp32_modules.add("classifier")
        super().post_init()

    def _add_encoder(self, *, add_pooling_layer: bool) -> None:
        model = _sphere_class(self.text_encoder, "Model")(self.config, add_pooling_layer=add_pooling_layer)
        setattr(self, self.base_model_prefix, model)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint of this model or of the plain encoder.

        From a plain checkpoint only the output layers of the spherized feed-forwards are new (and the classifier, if
        that is spherized); `calibrate_spherization` fits them to the plain encoder. The arguments are those of
        `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: If the configuration spherizes other layers than the checkpoint, or is that of the plain
                encoder.
        """
        config = kwargs.get("config")
        if isinstance(config, PreTrainedConfig) and not isinstance(config, cls.config_class):
            raise ValueError(
                f"config must be a {cls.config_class.__name__}; got a {type(config).__name__}. Read it with "
                f"{cls.config_class.__name__}.from_pretrained, or omit it and pass its settings as keywords."
            )
        returns_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        configured = set(model.config.spherized_layer_indices)
        found = (configured - _spherical_layers(info["missing_keys"])) | _spherical_layers(info["unexpected_keys"])
        if found and found != configured:
            raise ValueError(
                f"in the checkpoint {pretrained_model_name_or_path} the layers {sorted(found)} are spherized, but the "
                f"configuration has spherized_layers {sorted(configured)}. Load it with "
                f"spherized_layers={sorted(found)}, or start from a checkpoint of the plain encoder."
            )
        return (model, info) if returns_info else model


class SphereTextModel(SphereTextPreTrainedModel):
    """The encoder: token ids to hidden states.

    Args:
        config: The configuration.
        add_pooling_layer: Whether to pool the first token's hidden state.
    """

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        PreTrainedModel.__init__(self, config)
        self.gradient_checkpointing = False
        self.embeddings = self.text_encoder.load_class("Embeddings")(config)
        self.encoder = _sphere_class(self.text_encoder, "Encoder")(config)
        self.pooler = self.text_encoder.load_class("Pooler")(config) if add_pooling_layer else None
        self.post_init()


class SphereTextForMaskedLM(SphereTextPreTrainedModel):
    """The encoder with the plain encoder's masked-language-model head."""

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        attribute, head = self.text_encoder.lm_head
        self._add_encoder(add_pooling_layer=False)
        setattr(self, attribute, self.text_encoder.load_class(head)(config))
        self.post_init()


class SphereTextForSequenceClassification(SphereTextPreTrainedModel):
    """The encoder with a sequence classifier; see `spherized_classifier` of the configuration."""

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        plain_head = self.text_encoder.classification_head
        self._add_encoder(add_pooling_layer=plain_head is None)
        if plain_head is None:
            self.dropout = _classifier_dropout(config)
        if config.spherized_classifier:
            spherized = SpherizedClassificationHead if plain_head is None else SpherizedFirstTokenHead
            self.classifier: nn.Module = spherized(config)
        elif plain_head is None:
            self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        else:
            self.classifier = self.text_encoder.load_class(plain_head)(config)
        self.post_init()


_PARTS: dict[str, type[nn.Module]] = {
    "Layer": SphereTextLayer,
    "Encoder": SphereTextEncoder,
    "Model": SphereTextModel,
    "ForMaskedLM": SphereTextForMaskedLM,
    "ForSequenceClassification": SphereTextForSequenceClassification,
}
"""First base class, before that of the plain encoder, by the name of the plain class without prefix."""


@functools.cache
def _sphere_class(encoder: TextEncoder, part: str) -> Any:
    attributes = {
        "__module__": __name__,
        "__doc__": f"Spherized `{encoder.prefix}{part}`.\n\n    {_PARTS[part].__doc__}",
        "text_encoder": encoder,
        "config_class": getattr(configurations, f"Sphere{encoder.prefix}Config"),
        "_no_split_modules": [f"{encoder.prefix}Embeddings", f"{encoder.prefix}Layer", f"Sphere{encoder.prefix}Layer"],
    }
    return type(f"Sphere{encoder.prefix}{part}", (_PARTS[part], encoder.load_class(part)), attributes)


def __getattr__(name: str) -> Any:
    """Define the classes of the rows of `TEXT_ENCODERS`, for instance `SphereBertModel`, when they are first used."""
    for encoder in TEXT_ENCODERS:
        part = name.removeprefix(f"Sphere{encoder.prefix}")
        if part in _PARTS and part != name:
            return _sphere_class(encoder, part)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _classifier_dropout(config: Any) -> nn.Dropout:
    return nn.Dropout(config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout)


def _spherical_layers(keys: Iterable[str]) -> set[int]:
    return {int(found.group(1)) for key in keys if (found := _SPHERICAL_WEIGHT.search(key))}
