# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""The settings that a spherized text encoder has besides those of the encoder it is made from."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(kw_only=True, repr=False, eq=False)  # the configuration has its own of these
class SpherizationSettings:
    """Fields of the configurations of spherized encoders; a base class beside that of the plain encoder.

    Args:
        spherized_layers: Indices of the encoder layers whose feed-forward is spherized, counted from 0, or from the end
            if negative; the last layer if None, and none if empty.
        spherization_scaling: Slope of the sigmoid that turns values into angles, or its initial value if learned.
        spherization_radius: Norm of the spherized values, or its initial value if learned.
        spherization_delta: Lower bound of the product of all sines.
        learn_spherization_scaling: Whether each spherization learns its scaling.
        learn_spherization_radius: Whether each spherization learns its radius.
        spherized_classifier: Whether the sequence classifier is spherized too; if None, it is if any layer is.
    """

    base_model_type: ClassVar[str] = ""

    spherized_layers: list[int] | tuple[int, ...] | None = None
    spherization_scaling: float | int = 1.0
    spherization_radius: float | int = 1.0
    spherization_delta: float = 1e-6
    learn_spherization_scaling: bool = True
    learn_spherization_radius: bool = False
    spherized_classifier: bool | None = None

    @property
    def spherized_layer_indices(self) -> tuple[int, ...]:
        """The spherized layers, counted from 0, in order.

        Raises:
            ValueError: If an index is out of range or stands there twice.
        """
        layers: int = self.num_hidden_layers  # type: ignore[attr-defined]  # a field of the encoder's configuration
        asked = [-1] if self.spherized_layers is None else list(self.spherized_layers)
        outside = [index for index in asked if not -layers <= index < layers]
        if outside:
            raise ValueError(
                f"spherized_layers {asked} names layer {outside[0]}, but the encoder has {layers} layers: 0 to "
                f"{layers - 1}, or -{layers} to -1 from the end."
            )
        indices = sorted(index % layers for index in asked)
        if len(set(indices)) < len(indices):
            raise ValueError(f"spherized_layers {asked} names a layer twice; each may stand there once.")
        return tuple(indices)

    @property
    def has_spherized_classifier(self) -> bool:
        """Whether a sequence classifier is spherized."""
        if self.spherized_classifier is None:
            return bool(self.spherized_layer_indices)
        return self.spherized_classifier

    @property
    def spherization_options(self) -> dict[str, Any]:
        """Keywords of `hf_sphere.nn.Spherization`."""
        return {
            "scaling": float(self.spherization_scaling),
            "radius": float(self.spherization_radius),
            "delta": self.spherization_delta,
            "learn_scaling": self.learn_spherization_scaling,
            "learn_radius": self.learn_spherization_radius,
        }

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a configuration; that of the plain encoder is one of this kind with the defaults for what it lacks."""
        values, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)  # type: ignore[misc]
        if values.get("model_type") == cls.base_model_type:
            values = {**values, "model_type": cls.model_type}  # type: ignore[attr-defined]
        return values, unused

    def validate_spherized_layers(self) -> None:
        """Refuse layers that the encoder does not have."""
        _ = self.spherized_layer_indices

    def validate_spherization(self) -> None:
        """Refuse values that no spherization takes."""
        if not self.spherization_radius > 0:
            raise ValueError(f"spherization_radius must be positive; got {self.spherization_radius}.")
        if not 0.0 < self.spherization_delta < 1.0:
            raise ValueError(
                f"spherization_delta must lie between 0 and 1, both excluded; got {self.spherization_delta}. The usual "
                "value is 1e-6."
            )


__all__ = ["SpherizationSettings"]
