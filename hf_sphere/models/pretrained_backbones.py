"""Pretrained backbones: weights in files, preprocessing, and image encoders of transformers."""

import inspect
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import adapt_input_conv, load_state_dict
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, AutoImageProcessor, AutoModel, PreTrainedConfig

from hf_sphere.utils.loading import load_model, load_pretrained, package_file
from hf_sphere.utils.model_sources import processor_options, timm_options

logger = logging.getLogger(__name__)

_NOT_ARCHITECTURE = {field.name for field in fields(PreTrainedConfig)} | {"torch_dtype", "output_attentions"}
"""Settings of any configuration, such as the dtype of a file, that do not apply to a model with this backbone."""


class TransformersBackbone(nn.Module):
    """An image encoder of transformers with the interface of timm's models: images to pooled features (B, d).

    The features are the encoder's pooled output, or without it the class token or the mean over all positions. Poolers
    of BERT's kind, which pretrained weights often lack, are left out. The weights have torch's default dtype, which
    `from_pretrained` sets to the one requested. Only the architecture of the `settings`, a configuration, is used;
    `pretrained` is the folder, Hub id or file of the weights, None for random ones.
    """

    def __init__(self, settings: dict[str, Any], num_channels: int, pretrained: str | None = None) -> None:
        super().__init__()
        config = AutoConfig.for_model(**_architecture(settings))
        dtype: Any = torch.get_default_dtype()
        config.num_channels = num_channels
        (getattr(config, "model_args", None) or {}).pop("num_classes", None)  # timm writes it, its wrapper sets it
        if hasattr(config, "mask_ratio"):
            config.mask_ratio = 0.0  # masked autoencoders would hide parts of the images
        if pretrained is None:
            encoder: Any = AutoModel.from_config(config, dtype=dtype)
        elif Path(pretrained).is_file():
            weights: Any = {"state_dict": load_state_dict(pretrained, weights_only=True), "output_loading_info": True}
            encoder, report = MODEL_MAPPING[type(config)].from_pretrained(None, config=config, dtype=dtype, **weights)
            _check_complete(pretrained, config.model_type, report["missing_keys"])
        else:
            checks: Any = {"complete": True, "unused": "pooler"}
            encoder = load_model(AutoModel, pretrained, config=config, dtype=dtype, **checks)
        if encoder.main_input_name != "pixel_values":
            raise ValueError(f"{type(encoder).__name__} is no image encoder; texts need sentence-transformers.")
        pooler = getattr(encoder, "pooler", None)
        if pooler is not None and any(isinstance(layer, nn.Linear) for layer in pooler.modules()):
            encoder.pooler = None
        for name, parameter in encoder.named_parameters():
            if name.endswith("mask_token"):  # only masked pretraining uses it; DDP requires that training uses all
                parameter.requires_grad_(False)
        self.encoder = encoder
        of_timm: Any = getattr(encoder, "timm_model", None)  # its wrapper's configuration lacks the size of images
        width = getattr(of_timm, "head_hidden_size", None) or getattr(of_timm, "num_features", None)
        self._has_class_token = any(re.search(r"cls_(\w+_)?token$", name) for name, _ in encoder.named_parameters())
        self.num_features: int = getattr(config, "hidden_size", None) or width or self._count_features(config)
        interpolates = "interpolate_pos_encoding" in inspect.signature(encoder.forward).parameters
        self._options = {"interpolate_pos_encoding": True} if interpolates else {}

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Compute the features."""
        return self.forward_head(self.encoder(pixel_values=pixel_values, **self._options))

    def forward_intermediates(self, pixel_values: Tensor) -> tuple[Any, Sequence[Tensor]]:
        """Compute the output of the encoder, for `forward_head`, and its hidden states."""
        output = self.encoder(pixel_values=pixel_values, output_hidden_states=True, **self._options)
        return output, output.hidden_states

    def forward_head(self, output: Any) -> Tensor:
        """Return the features of an output of the encoder."""
        features = getattr(output, "pooler_output", None)
        if features is None:
            last = output.last_hidden_state
            pooled = last[:, 0] if self._has_class_token else last.mean(dim=1)
            features = last.mean(dim=(2, 3)) if last.ndim == 4 else pooled
        return features.flatten(1)

    def _count_features(self, config: Any) -> int:
        """Return the number of features of an encoder without a `hidden_size`, without memory for its weights."""
        with torch.device("meta"), torch.no_grad():
            encoder = AutoModel.from_config(config, dtype=torch.get_default_dtype()).eval()
            size = getattr(config, "image_size", 224)
            height, width = [size, size] if isinstance(size, int) else size
            output = encoder(pixel_values=torch.empty(1, config.num_channels, height, width))
        if not hasattr(output, "last_hidden_state"):
            raise ValueError(f"a {type(encoder).__name__} has no last hidden state, so it is no backbone.")
        _, *positions, channels = output.last_hidden_state.shape
        if len(positions) == 2 and positions[0] == positions[1] != channels:
            raise ValueError(f"the channels of {type(encoder).__name__} are the last axis, which is not supported.")
        return self.forward_head(output).shape[1]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switch gradient checkpointing on or off."""
        (self.encoder.gradient_checkpointing_enable if enable else self.encoder.gradient_checkpointing_disable)()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of the parameters of stem and blocks, as timm's models do."""
        blocks = r"^encoder\.(?:\w+\.)*?(?:layers?|blocks|stages)\.(\d+)"
        inner = r"\.(?:layers?|blocks)\.(\d+)"
        fine = [] if coarse else [(blocks + inner, None)]
        return {"stem": r"^encoder\.embed", "blocks": [*fine, (blocks, None), (r".*norm", (99999,))]}


def is_transformers_name(name: str) -> bool:
    """Whether a backbone is a folder or Hub id of transformers, and not a name of timm."""
    return Path(name, "config.json").is_file() or (name.count("/") == 1 and not name.startswith(("hf-hub:", "hf_hub:")))


def _architecture(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _NOT_ARCHITECTURE and not key.startswith("_")}


def transformers_settings(name: str) -> dict[str, Any]:
    """Return the architecture of a model of transformers, or of its vision part as of CLIP, as a dictionary.

    Quantized weights are an error.
    """
    config = load_pretrained(AutoConfig, name)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{name} has quantized weights, which cannot be trained; use the model before quantization.")
    return _architecture(getattr(config, "vision_config", config).to_diff_dict())


def pretrained_preprocessing(name: str) -> dict[str, Any]:
    """Return the preprocessing that a backbone was pretrained with, as options of `hf_sphere.data.ImageSourceOptions`.

    The name is one of timm, or a folder or Hub id of transformers. Without a known preprocessing there are no options.
    """
    if is_transformers_name(name):
        try:
            return processor_options(load_pretrained(AutoImageProcessor, name))
        except OSError:
            return {}
    settings = timm.get_pretrained_cfg(name) if timm.is_model(name.split(".")[0]) else None
    bilinear = {"interpolation": "bilinear"}  # as random crops
    return {} if settings is None else timm_options(timm.data.resolve_data_config(bilinear, settings.to_dict()))


def load_backbone_weights(backbone: nn.Module, name: str, file: str) -> None:
    """Load the weights of a backbone from a file, as timm does: converted, and adapted to the number of channels.

    The file is safetensors, a state dict that torch loads with `weights_only`, or the module of a pip package of
    `hf_sphere.utils.loading`. A classifier in it is not used; tensors that are missing or have another shape are
    an error. Messages have the `name` of the backbone.
    """
    path = package_file(file)
    state, tensors = load_state_dict(str(path or file), weights_only=True), backbone.state_dict()
    if path is not None:  # its tensors have other names, in the same order
        state = dict(zip(tensors, state.values(), strict=False))
    if convert := getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None):
        state = convert(state, backbone)
    stem = f"{getattr(backbone, 'pretrained_cfg', {}).get('first_conv')}.weight"
    if stem in state and state[stem].shape[1] != tensors[stem].shape[1]:
        state[stem] = adapt_input_conv(tensors[stem].shape[1], state[stem])
    missing, unused = backbone.load_state_dict(state, strict=False)  # which raises an error for other shapes
    _check_complete(file, name, missing)
    ignored = f"; not used: {', '.join(unused[:10])}{', ...' * (len(unused) > 10)}" if unused else ""
    logger.info("Loaded the %d tensors of the backbone %s from %s%s.", len(tensors), name, Path(file).name, ignored)


def _check_complete(file: str, name: str, missing: Iterable[str]) -> None:
    lacking = sorted(key for key in missing if not key.startswith("pooler.") and not key.endswith("batches_tracked"))
    if lacking:
        lacks = f"{len(lacking)} tensors are missing, such as {', '.join(lacking[:5])}"
        raise ValueError(f"{file} does not fit the backbone {name}: {lacks}. Use weights of this architecture.")
