"""The note of a saved model on the modules that define its head and backbone, if no library does."""

import sys
from typing import Any

from hf_sphere.nn.heads import HEADS
from hf_sphere.utils.imports import is_module_name

_NO_IMPORT = ("hf_sphere", "transformers", "timm", "__main__", "builtins")


class OwnPartsMixin:
    """Mixin of configurations whose saved form names these modules in `requires_import`.

    The modules of a file, which others may have written, are never imported: the error for an unknown part names them.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with the modules if there are any."""
        config: Any = self
        timm: Any = sys.modules.get("timm")  # imported with the first backbone
        parts: list[Any] = [HEADS[config.head]] if config.head in HEADS else []
        if timm and timm.is_model(name := getattr(config, "backbone", "").partition(".")[0]):
            parts.append(timm.model_entrypoint(name))
        modules = [part.__module__ for part in parts if part.__module__.partition(".")[0] not in _NO_IMPORT]
        fields: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        fields.pop("requires_import", None)  # of the file that the configuration was read from
        return fields | ({"requires_import": list(dict.fromkeys(modules))} if modules else {})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration with the values of a file; an unknown part whose modules it names is an error."""
        settings = {**config_dict, **kwargs}
        names, head, backbone = (settings.get(key) for key in ("requires_import", "head", "backbone"))
        names = [name for name in names if is_module_name(name)][:2] if isinstance(names, list) else []
        unknown = "" if head is None or head in HEADS else f"head {head!r}"
        if names and not unknown and isinstance(backbone, str) and not settings.get("backbone_config"):
            import timm

            unknown = "" if timm.is_model(backbone.partition(".")[0]) else f"backbone {backbone!r}"
        if names and unknown:
            code, options = "; ".join(f"import {name}" for name in names), " --import ".join(["", *names])
            raise ValueError(
                f"unknown {unknown}: the model's author defines it in a module. If you have it and trust it, run "
                f"`{code}` before loading in Python, or pass{options} to hf-sphere."
            )
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]
