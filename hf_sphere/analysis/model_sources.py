"""Weights and image classifiers by name: from folders, files, the Hub, timm, and torchvision.

`timm:<name>` and `torchvision:<name>` are models of these libraries with their pretrained weights; any other name is a
file or folder if it exists, and otherwise a repository on the Hub.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn

from hf_sphere.utils.arguments import error_text
from hf_sphere.utils.loading import load_model, load_pretrained

LIBRARIES = ("timm", "torchvision")

_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json"]
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Classifier:
    """An image classifier and the format of its input images."""

    model: nn.Module  # maps pixel values (B, C, H, W) to logits (B, K) or an output with `logits`; in evaluation mode
    fresh: Callable[[], nn.Module]  # builds the same model with new random weights
    num_classes: int  # K
    image_size: tuple[int, int]  # height and width, pixels
    num_channels: int  # C
    mean: list[float]  # mean per channel, on the scale 0 to 1
    std: list[float]  # standard deviation per channel
    crop_pct: float | None = None  # see `resize_image` of hf_sphere.utils.pixels; None if the whole image is stretched


def find_weights(name: str, *, random_weights: bool = False, seed: int = 0) -> nn.Module | Path:
    """Find the weights of a model, without building the model if they are in files.

    Args:
        name: See the module docstring.
        random_weights: Use the random initialization of a timm or torchvision model.
        seed: Seed of the random initialization.

    Returns:
        A file or folder of safetensors, or a model of timm or torchvision.

    Raises:
        ValueError: If timm or torchvision has no such model, or `random_weights` is set for another model.
        FileNotFoundError: If there is no such file or folder, and no such repository on the Hub, or no network.
    """
    if library_model := _split_name(name, random_weights):
        return _build(*library_model, pretrained=not random_weights, seed=seed)[0]
    if Path(name).exists():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=_WEIGHT_FILES, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:  # no such repository, no network, no valid repository name
        raise FileNotFoundError(
            f"{name} is not a file or folder, and cannot be downloaded from the Hub ({error_text(error)}). Pass a "
            "file or folder of safetensors, a repository on the Hub, timm:<name> or torchvision:<name>."
        ) from error


def load_classifier(name: str, *, random_weights: bool = False, seed: int = 0) -> Classifier:
    """Load an image classifier and the configuration of its preprocessing.

    The arguments are those of `find_weights`; `AutoModelForImageClassification` loads models on the Hub and in folders.

    Raises:
        ValueError: If there is no such model.
        OSError: If it cannot be loaded; the message is that of transformers.
    """
    if library_model := _split_name(name, random_weights):
        model, about = _build(*library_model, pretrained=not random_weights, seed=seed)
        return Classifier(model.eval(), lambda: _build(*library_model, pretrained=False)[0], **about)
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    model = load_model(AutoModelForImageClassification, name, complete=True).eval()
    processor = load_pretrained(AutoImageProcessor, name)
    about = (
        timm_input_format(processor.data_config)
        if hasattr(processor, "data_config")
        else processor_input_format(processor)
    )
    about["num_channels"] = getattr(model.config, "num_channels", about["num_channels"])
    return Classifier(model, lambda: type(model)(model.config), num_classes=model.config.num_labels, **about)


def file_name(name: str) -> str:
    """Turn the name of a model into the name of a folder."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name if Path(name).exists() else name).strip("-.") or "model"


def _split_name(name: str, random_weights: bool) -> tuple[str, str] | None:
    """Return the library and the name of its model, or None for a model of the Hub or on disk."""
    library, _, inner = name.partition(":")
    if library in LIBRARIES and inner:
        return library, inner
    if random_weights:
        raise ValueError(f"random weights require timm:<name> or torchvision:<name>; got {name}.")
    return None


def _build(library: str, name: str, *, pretrained: bool, seed: int | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model of a library; also return its number of classes and its input format.

    Random weights are sampled with the seed, or without one from the random state of the caller.
    """
    build = _build_timm if library == "timm" else _build_torchvision
    if seed is None:
        return build(name, pretrained)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(name, pretrained)


def _build_timm(name: str, pretrained: bool) -> tuple[nn.Module, dict[str, Any]]:
    import timm

    if not timm.is_model(name.split(".")[0]):
        raise _unknown("timm", name, timm.list_models())
    model = timm.create_model(name, pretrained=pretrained)
    return model, {"num_classes": model.num_classes, **timm_input_format(timm.data.resolve_model_data_config(model))}


def _build_torchvision(name: str, pretrained: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchvision.models import get_model, get_model_builder, get_model_weights, list_models

    if name not in list_models():
        raise _unknown("torchvision", name, list_models())
    weights = get_model_weights(name).DEFAULT
    options: dict[str, Any] = {"weights": weights if pretrained else None}
    if not pretrained and "weights_backbone" in inspect.signature(get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # otherwise it would be downloaded
    transform = weights.transforms()
    size = getattr(transform, "crop_size", [224])
    return get_model(name, **options), {
        "num_classes": len(weights.meta.get("categories", [])),
        "image_size": (size[0], size[-1]),
        "num_channels": 3,
        "mean": list(getattr(transform, "mean", _IMAGENET_MEAN)),
        "std": list(getattr(transform, "std", _IMAGENET_STD)),
    }


def _unknown(library: str, name: str, known: list[str]) -> ValueError:
    close = difflib.get_close_matches(name, known, n=5) or known[:5]
    return ValueError(f"{library} has no model {name!r}; some of its models are {', '.join(close)}.")


def timm_input_format(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input format of a data configuration of timm."""
    channels, *size = config["input_size"]
    mean, std = list(config["mean"]), list(config["std"])
    crop = config.get("crop_pct") if config.get("crop_mode", "center") == "center" else None
    return {"image_size": tuple(size), "num_channels": channels, "mean": mean, "std": std, "crop_pct": crop}


def processor_input_format(processor: Any) -> dict[str, Any]:
    """Return the input format of an image processor of transformers."""
    crop = getattr(processor, "crop_size", None) if getattr(processor, "do_center_crop", False) else None
    size, crop_pct = dict(crop or processor.size), getattr(processor, "crop_pct", None)
    if crop:
        crop_pct = min(dict(crop).values()) / min(value for value in dict(processor.size).values() if value)
    side = size.get("shortest_edge")
    mean = list(processor.image_mean or [0.0])
    return {
        "image_size": (size.get("height", side), size.get("width", side)),
        "num_channels": getattr(processor, "num_channels", None) or len(mean),
        "mean": mean,
        "std": list(processor.image_std or [1.0]),
        "crop_pct": crop_pct,
    }
