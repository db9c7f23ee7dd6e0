"""Construction of the backbone of an image model, and of tensors that no checkpoint has set."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig


def reset_missing_parameters(module: nn.Module, *, xavier: bool = False) -> None:
    """Initialize the tensors of a module that no checkpoint has set by its `reset_parameters`, if it has one."""
    reset = getattr(module, "reset_parameters", None)
    # The flag of transformers.
    loaded = {k: v.clone() for k, v in _tensors(module).items() if getattr(v, "_is_hf_initialized", False)}
    if reset is None or len(loaded) == len(_tensors(module)):  # placing prototypes is expensive
        return
    reset()
    if xavier:
        from hf_sphere.models.backbones.base import initialize

        initialize(module, nn.init.xavier_uniform_)
    for name, tensor in _tensors(module).items():
        if name in loaded:  # `reset_parameters` may overwrite loaded tensors, such as batch-norm statistics
            tensor.copy_(loaded[name])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def build_backbone(config: SphereVisionConfig, *, pretrained: bool | str = False) -> nn.Module:
    """Build the backbone of a configuration; imports timm, which text models do not need."""
    from hf_sphere.models.backbones.base import create_backbone, initialize

    if pretrained and config.initialization is not None:
        raise ValueError("initialization would overwrite the pretrained weights; use only one of the two.")
    if config.backbone_config is not None:
        from hf_sphere.models.pretrained_backbones import TransformersBackbone

        source = getattr(config, "_local_backbone", config.backbone) if pretrained is True else pretrained or None
        backbone: Any = TransformersBackbone(config.backbone_config, config.num_channels, source)
        if config._attn_implementation == "eager":  # requested, for instance to see the attention weights
            backbone.encoder.set_attn_implementation("eager")
    else:
        options: Any = {"num_channels": config.num_channels, "image_size": config.input_size}
        options |= {"pretrained": pretrained, **(config.backbone_kwargs or {})}
        backbone = create_backbone(config.backbone, **options)
    if config.initialization == "xavier":
        initialize(backbone, nn.init.xavier_uniform_)
    elif config.initialization == "torch":
        for module in backbone.modules():
            if (reset := getattr(module, "reset_parameters", None)) is not None:
                reset()
    for tensor in _tensors(backbone).values():
        tensor._is_hf_initialized = not tensor.is_meta  # type: ignore[attr-defined]
    return backbone


def initialize_missing(backbone: nn.Module, config: SphereVisionConfig) -> None:
    """Copy missing tensors of a backbone from a new one, since timm initializes them in the constructor."""
    missing = {k: v for k, v in _tensors(backbone).items() if not getattr(v, "_is_hf_initialized", False)}
    if not missing:
        return
    with torch.device("cpu"):
        fresh = _tensors(build_backbone(config))
    for name, tensor in missing.items():
        init.copy_(tensor, fresh[name])
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
