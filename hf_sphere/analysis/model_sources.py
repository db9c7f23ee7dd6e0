"""From a name to weights, or to an image classifier: folders, files, the Hub, timm, torchvision.

`timm:<name>` and `torchvision:<name>` are models of these libraries with their pretrained weights; any other name is a
file or folder if it is there, and otherwise a repository of the Hub.
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

LIBRARIES = ("timm", "torchvision")

_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json"]
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Classifier:
    """An image classifier, and how it wants its images.

    Attributes:
        model: From pixel values (B, C, H, W) to logits (B, K), or to an output that has `logits`; in eval mode.
        fresh: Builds the same model with new random weights.
        num_classes: K.
        image_size: Height and width, pixels.
        num_channels: C.
        mean: Mean a channel on the scale 0 to 1.
        std: Standard deviation a channel.
    """

    model: nn.Module
    fresh: Callable[[], nn.Module]
    num_classes: int
    image_size: tuple[int, int]
    num_channels: int
    mean: list[float]
    std: list[float]


def find_weights(name: str, *, random_weights: bool = False, seed: int = 0) -> nn.Module | Path:
    """Find the weights that a name stands for, without building a model where a file has them.

    Args:
        name: See the module.
        random_weights: Take a model of timm or torchvision with its random initialisation.
        seed: Seed of that.

    Returns:
        A file or folder of safetensors, or a model of timm or torchvision.

    Raises:
        ValueError: If there is no such model, or random weights are asked for of what is only weights.
        FileNotFoundError: If there is neither file nor folder, and the Hub does not have it or cannot be reached.
    """
    library, _, inner = name.partition(":")
    if library in LIBRARIES and inner:
        return _build(library, inner, pretrained=not random_weights, seed=seed)[0]
    if random_weights:
        raise ValueError(f"random weights are for timm:<name> and torchvision:<name>; got {name}.")
    if Path(name).exists():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=_WEIGHT_FILES, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:  # no such repository, no network, no name of the Hub
        raise FileNotFoundError(
            f"{name} is no file or folder here, and not to be had from the Hub ({_first_line(error)}). Give a file or "
            "folder of safetensors, a repository of the Hub, timm:<name> or torchvision:<name>."
        ) from error


def load_classifier(name: str, *, random_weights: bool = False, seed: int = 0) -> Classifier:
    """Load an image classifier with what its preprocessing says.

    Args:
        name: See the module; of the Hub and of folders, what `AutoModelForImageClassification` loads.
        random_weights: Take a model of timm or torchvision with its random initialisation.
        seed: Seed of that.

    Raises:
        ValueError: If there is no such model.
        OSError: If it cannot be loaded; the message is that of transformers.
    """
    library, _, inner = name.partition(":")
    if library in LIBRARIES and inner:
        model, about = _build(library, inner, pretrained=not random_weights, seed=seed)
        return Classifier(model.eval(), lambda: _build(library, inner, pretrained=False)[0], **about)
    if random_weights:
        raise ValueError(f"random weights are for timm:<name> and torchvision:<name>; got {name}.")
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    try:
        model = AutoModelForImageClassification.from_pretrained(name).eval()
    except RuntimeError as error:  # weights of another kind of model
        raise ValueError(f"{name} cannot be loaded as an image classifier: {_first_line(error)}.") from error
    processor = AutoImageProcessor.from_pretrained(name)
    about = _from_timm(processor.data_config) if hasattr(processor, "data_config") else _from_processor(processor)
    about["num_channels"] = getattr(model.config, "num_channels", about["num_channels"])
    return Classifier(model, lambda: type(model)(model.config), num_classes=model.config.num_labels, **about)


def file_name(name: str) -> str:
    """Make of the name of a model one that a folder can have."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name if Path(name).exists() else name).strip("-.") or "model"


def _build(library: str, name: str, *, pretrained: bool, seed: int | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model of a library, and say how many classes it has and how it wants its images.

    Random weights are drawn by the seed, or without one by the caller's random state.
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
    return model, {"num_classes": model.num_classes, **_from_timm(timm.data.resolve_model_data_config(model))}


def _build_torchvision(name: str, pretrained: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchvision.models import get_model, get_model_builder, get_model_weights, list_models

    if name not in list_models():
        raise _unknown("torchvision", name, list_models())
    weights = get_model_weights(name).DEFAULT
    options: dict[str, Any] = {"weights": weights if pretrained else None}
    if not pretrained and "weights_backbone" in inspect.signature(get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # or it would be fetched
    transform = weights.transforms()
    size = getattr(transform, "crop_size", [224])
    about = {
        "num_classes": len(weights.meta["categories"]) if "categories" in weights.meta else 0,
        "image_size": (size[0], size[-1]),
        "num_channels": 3,
        "mean": list(getattr(transform, "mean", _IMAGENET_MEAN)),
        "std": list(getattr(transform, "std", _IMAGENET_STD)),
    }
    return get_model(name, **options), about


def _unknown(library: str, name: str, known: list[str]) -> ValueError:
    close = difflib.get_close_matches(name, known, n=5) or known[:5]
    return ValueError(f"{library} has no model {name!r}; it has, among others, {', '.join(close)}.")


def _from_timm(config: Mapping[str, Any]) -> dict[str, Any]:
    """What timm's data configuration says of images."""
    channels, height, width = config["input_size"]
    return {
        "image_size": (height, width),
        "num_channels": channels,
        "mean": list(config["mean"]),
        "std": list(config["std"]),
    }


def _from_processor(processor: Any) -> dict[str, Any]:
    """What an image processor of transformers says of images."""
    crop = getattr(processor, "crop_size", None) if getattr(processor, "do_center_crop", False) else None
    size = dict(crop or processor.size)
    side = size.get("shortest_edge")
    mean = list(processor.image_mean or [0.0])
    return {
        "image_size": (size.get("height", side), size.get("width", side)),
        "num_channels": getattr(processor, "num_channels", None) or len(mean),
        "mean": mean,
        "std": list(processor.image_std or [1.0]),
    }


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
