"""Heads and backbones of a model that are defined outside of this library, transformers and timm."""

import sys
from collections.abc import Mapping
from typing import Any

from hf_sphere.nn.heads import HEADS
from hf_sphere.utils.imports import REQUIRES_IMPORT, defining_modules, explain_requirement


def own_parts(config: Any) -> dict[str, list[str]]:
    """Return a field for a configuration with the modules that define its head and backbone; {} if there are none."""
    timm: Any = sys.modules.get("timm")  # imported, if a model with a backbone has been built
    head, backbone = getattr(config, "head", None), getattr(config, "backbone", None)
    parts = [type(config), *([HEADS[head]] if head in HEADS else [])]
    if timm is not None and isinstance(backbone, str) and timm.is_model(name := backbone.partition(".")[0]):
        parts.append(timm.model_entrypoint(name))
    modules = defining_modules(parts) or getattr(config, REQUIRES_IMPORT, [])
    return {REQUIRES_IMPORT: modules} if modules else {}


def check_own_parts(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError if the head or backbone of a saved configuration is to be defined by a module of its author.

    The error names the module; it is not imported, since its name comes from the file.
    """
    if not (advice := explain_requirement(settings)):
        return
    head, backbone = settings.get("head"), settings.get("backbone")
    if head is not None and head not in HEADS:
        raise ValueError(f"unknown head {head!r}. {advice}")
    if isinstance(backbone, str) and not settings.get("backbone_config"):
        import timm

        if not timm.is_model(backbone.partition(".")[0]):
            raise ValueError(f"unknown backbone {backbone!r}. {advice}")
