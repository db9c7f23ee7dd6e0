"""Backbones that timm does not have, functions decorated with `register_backbone` in the files of this folder."""

import importlib
import pkgutil

from hf_sphere.models.backbones.base import BACKBONES, EmbeddingNet, create_backbone, register_backbone

__all__ = ["BACKBONES", "EmbeddingNet", "create_backbone", "register_backbone"]

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
