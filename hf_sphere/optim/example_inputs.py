"""Generation of inputs for a model from its configuration or its first layer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_SIDES = (32, 28, 64, 84, 96, 128, 224, 299, 16, 8)
_BATCH = 4  # batch norm over a 1 x 1 map has one value per image, and has no gradient for two values


def example_inputs(model: nn.Module) -> Iterator[Any]:
    """Yield inputs that the model may accept, the most likely first.

    Models of transformers have `main_input_name` and a configuration, models of timm `pretrained_cfg`; for others the
    first layer with weights determines the number of channels or features, and several sizes are tried.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if name is not None and config is not None:
        yield from _for_transformers(name, config, device)
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if size:
        yield torch.randn(_BATCH, *size, device=device)
    yield from _for_first_layer(model, device)


def _for_transformers(name: str, config: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if name == "input_ids":
        ids = torch.randint(0, getattr(text, "vocab_size", 100), (2, 16), device=device)
        yield {"input_ids": ids}
        yield {"input_ids": ids, "decoder_input_ids": ids}
    elif name == "pixel_values":
        side = getattr(config, "image_size", 224)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        yield {name: torch.randn(_BATCH, getattr(config, "num_channels", 3), height, width, device=device)}
    elif name == "input_values":
        yield {name: torch.randn(2, 16000, device=device)}


def _for_first_layer(model: nn.Module, device: torch.device) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            spatial = len(module.kernel_size)
            for side in _SIDES:
                yield torch.randn(_BATCH, module.in_channels, *[side] * spatial, device=device)
        elif isinstance(module, nn.Linear):
            yield torch.randn(_BATCH, module.in_features, device=device)
            yield torch.randn(_BATCH, 5, module.in_features, device=device)
            for side in _SIDES:
                for channels in (1, 3):  # images that the model flattens
                    if channels * side * side == module.in_features:
                        yield torch.randn(_BATCH, channels, side, side, device=device)
        elif isinstance(module, nn.Embedding):
            yield torch.randint(0, module.num_embeddings, (2, 16), device=device)
        else:
            continue
        return
