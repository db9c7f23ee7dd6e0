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
        names = dict.fromkeys(part.__module__ for part in parts if part.__module__.split(".")[0] not in _NO_IMPORT)
        fields: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        fields.pop("requires_import", None)  # of the file that the configuration was read from
        return fields | ({"requires_import": [*names]} if names else {})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration with the values of a file; an unknown part whose modules it names is an error."""
        settings = {**config_dict, **kwargs}
        names = [name for name in (settings.get("requires_import") or []) if is_module_name(name)]
        if names:
            import timm

            is_known = settings.get("head") in (None, *HEADS)
            if is_known and not settings.get("backbone_config"):
                is_known = timm.is_model(settings.get("backbone", "resnet18").partition(".")[0])
            if not is_known:
                code, options = "; ".join(f"import {name}" for name in names), " --import ".join(["", *names])
                raise ValueError(
                    f"unknown head {settings.get('head')!r} or backbone {settings.get('backbone')!r}; the model's "
                    f"author defines it in a module. If you trust it, run `{code}` before loading in Python, "
                    f"or pass{options} to hf-sphere."
                )
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]
