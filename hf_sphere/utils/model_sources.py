"""Weights and image classifiers by name: from folders, files, the Hub and timm.

`timm:<name>` is a model of timm with its pretrained weights; any other name is a file or folder if it exists, and
otherwise a repository on the Hub.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from torchvision.transforms.v2 import InterpolationMode

from hf_sphere.utils.loading import load_model, load_pretrained, not_found
from hf_sphere.utils.pixels import resize_image

logger = logging.getLogger(__name__)

_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json"]


@dataclass(frozen=True)
class Classifier:
    """An image classifier and the format of its input images."""

    model: nn.Module  # maps pixel values (B, C, H, W) to logits (B, K) or an output with `logits`; in evaluation mode
    fresh: Callable[[], nn.Module]  # builds the same model with new random weights
    num_classes: int  # K
    preprocessing: dict[str, Any]  # as options of `hf_sphere.data.ImageSourceOptions`


def find_weights(name: str) -> nn.Module | Path:
    """Find a file or folder of safetensors, or a model of timm; see the module docstring for names."""
    if name.startswith("timm:"):
        return _build(name)
    if Path(name).exists():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=_WEIGHT_FILES, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:  # no such repository, no network, no valid repository name
        raise not_found(name, error) from error


def load_classifier(name: str) -> Classifier:
    """Load an image classifier and the configuration of its preprocessing.

    `AutoModelForImageClassification` loads models on the Hub and in folders.
    """
    if name.startswith("timm:"):
        model = _build(name).eval()
        fresh = partial(_build, name, pretrained=False)
        return Classifier(model, fresh, model.num_classes, processor_options(model))
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    model = load_model(AutoModelForImageClassification, name, complete=True).eval()
    preprocessing = processor_options(load_pretrained(AutoImageProcessor, name))
    preprocessing["num_channels"] = getattr(model.config, "num_channels", preprocessing["num_channels"])
    return Classifier(model, lambda: type(model)(model.config), model.config.num_labels, preprocessing)


def file_name(name: str) -> str:
    """Turn the name of a model into the name of a folder."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name if Path(name).exists() else name).strip("-.") or "model"


def _build(name: str, *, pretrained: bool = True) -> Any:
    """Build a model of timm; only one with random weights changes the random state of the caller."""
    import timm

    name = name.removeprefix("timm:")
    if not timm.is_model(name.split(".")[0]):
        raise ValueError(f"timm has no model {name!r}; see timm.list_models().")
    with torch.random.fork_rng(devices=[], enabled=pretrained):
        return timm.create_model(name, pretrained=pretrained)


def name_of(model: Any) -> str | None:
    """Return the folder or Hub id that a model is, or from which transformers loaded it; None for others."""
    is_name = isinstance(model, str | os.PathLike)
    name = model if is_name else getattr(getattr(model, "config", None), "name_or_path", "")
    return None if os.fspath(name).startswith("timm:") else os.fspath(name) or None


def preprocessing_of(model: Any, given: Any) -> dict[str, Any]:
    """Return the preprocessing of a model, by name or loaded, or of an image processor, as `ImageSourceOptions`.

    Without image processor, the configuration of a model of this library has the size of its images, and the options
    that are `given` must have their mean and standard deviation: wrong ones would change results silently.
    """
    from transformers import AutoConfig, AutoImageProcessor

    name, source = name_of(model), model
    if isinstance(model, str) and model.startswith("timm:"):
        with torch.random.fork_rng(devices=[]):
            source = _build(model, pretrained=False)  # for its configuration
    elif name:
        with suppress(OSError):
            source = load_pretrained(AutoImageProcessor, name)
    if not any(hasattr(source, field) for field in ("pretrained_cfg", "data_config", "image_mean")):
        config: Any = getattr(model, "config", None) or (name and load_pretrained(AutoConfig, name))
        is_sphere = getattr(config, "model_type", None) == "sphere_vision"
        if is_sphere and given.image_mean is not None and given.image_std is not None:
            return {"image_size": [*config.input_size], "num_channels": config.num_channels}
        what = f"{name} has no image processor" if name else f"this {type(model).__name__} was not loaded by its name"
        hint = "Give --image_mean and --image_std of the training images, or save" if is_sphere else "Save"
        hint += " the one of its training there by its `save_pretrained`, or use load_image_split(..., like=processor)"
        raise ValueError(f"{what}, so the normalization of its images is unknown. {hint}.")
    options = processor_options(source)
    if changed := [key for key, value in options.items() if getattr(given, key) not in (None, value)]:
        what = f"{name or type(model).__name__} has an image processor"
        raise ValueError(f"{what}, which sets --{changed[0]}; leave it out.")
    if (difference := _compare(source, options)) > 0.002:
        text = f"on the scale from 0 to 1, pixels of a test image differ by {difference:.3f} on average"
        logger.warning(f"The images are prepared otherwise than by {type(source).__name__}: {text}.")
    return options


def _compare(processor: Any, options: Mapping[str, Any]) -> float:
    """Return the mean difference of an image's pixels as prepared by options and by an image processor of others."""
    if not type(processor).__module__.startswith("transformers.") or hasattr(processor, "data_config"):
        return 0.0
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(64), indexing="ij")
    image = torch.stack([8 * rows, 4 * columns - 4 * (columns % 2), 4 * columns])[: options["num_channels"]].byte()
    mode = InterpolationMode(options["interpolation"])
    try:
        given = processor(image, return_tensors="pt", input_data_format="channels_first")["pixel_values"][0]
        resized = resize_image(image, options["image_size"], options["crop_pct"], mode)
        mean, std = (torch.tensor(options[name])[:, None, None] for name in ("image_mean", "image_std"))
        return float((resized / 255 - mean - given * std).abs().mean())
    except (RuntimeError, TypeError, ValueError):  # of a shape that it does not support
        return 1.0


def timm_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data configuration of timm as options of `hf_sphere.data.ImageSourceOptions`."""
    channels, *size = config["input_size"]
    statistics = {"image_mean": list(config["mean"]), "image_std": list(config["std"])}
    crop = config.get("crop_pct") if config.get("crop_mode", "center") == "center" else None
    mode = "bicubic" if config.get("interpolation") == "bicubic" else "bilinear"  # others are not supported
    return {"image_size": size, "num_channels": channels, **statistics, "crop_pct": crop, "interpolation": mode}


def processor_options(processor: Any) -> dict[str, Any]:
    """Return an image processor of transformers, or model of timm, as options of `ImageSourceOptions`."""
    if hasattr(processor, "pretrained_cfg"):
        from timm.data import resolve_model_data_config

        return timm_options(resolve_model_data_config(processor))
    if (of_timm := getattr(processor, "data_config", None)) is not None:  # of transformers' wrapper of timm
        return timm_options(of_timm)
    crop = getattr(processor, "crop_size", None) if getattr(processor, "do_center_crop", False) else None
    size, crop_pct = dict(crop or processor.size), getattr(processor, "crop_pct", None)
    if crop:
        share = min(dict(crop).values()) / min(value for value in dict(processor.size).values() if value)
        crop_pct = share * (crop_pct or 1)  # PoolFormer's has both
    side = size.get("shortest_edge")
    if not crop and side is not None and side >= 384:
        crop_pct = None  # of ConvNext, whose processor then stretches the image
    mean, std = list(processor.image_mean or [0.0]), list(processor.image_std or [1.0])
    if not getattr(processor, "do_normalize", True):
        mean, std = [0.0] * len(mean), [1.0] * len(mean)
    # What the processor normalizes, relative to the scale 0 to 1.
    scale = 255 * (getattr(processor, "rescale_factor", 1 / 255) if getattr(processor, "do_rescale", True) else 1)
    return {
        "image_size": [size.get("height", side), size.get("width", side)],
        "num_channels": getattr(processor, "num_channels", None) or len(mean),
        "image_mean": [value / scale for value in mean],
        "image_std": [value / scale for value in std],
        "crop_pct": crop_pct,
        "interpolation": "bicubic" if getattr(processor, "resample", None) == 3 else "bilinear",
        "background_color": getattr(processor, "background_color", None),
    }
