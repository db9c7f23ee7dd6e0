"""Fields of the configurations of the spherized encoders, for instance of `SphereBertConfig`."""

from dataclasses import dataclass
from typing import Any

from hf_sphere.models import REQUIRES
from hf_sphere.utils.loading import check_settings


@dataclass(init=False, repr=False, eq=False)  # the configuration classes have their own
class SphereEncoderConfigMixin:
    """Fields of the configurations of spherized encoders, in addition to those of the plain encoder.

    `from_pretrained` also reads configurations of the plain encoder.

    Args:
        spherized_layers: Indices of the encoder layers whose feed-forward is spherized, counted from 0, or from the end
            if negative; the last layer if None, and none if empty.
        spherization_scaling: Slope of the sigmoid that turns values into angles, or its initial value if learned.
        spherization_radius: Norm of the spherized values.
        spherization_delta: Lower bound of the product of all sines.
        learn_spherization_scaling: Whether each spherization learns its scaling.
        spherized_classifier: Whether the classifier is spherized. The paper spherizes the last layer or the classifier,
            not both: set `spherized_layers` to [] for the classifier alone.

    Example:
        >>> config = SphereBertConfig(spherized_layers=[-2, -1])
        >>> model = SphereBertModel(config)
    """

    spherized_layers: list[int] | tuple[int, ...] | None = None
    spherization_scaling: float | int = 1.0
    spherization_radius: float | int = 1.0
    spherization_delta: float = 1e-6
    learn_spherization_scaling: bool = True
    spherized_classifier: bool = False

    @property
    def spherized_layer_indices(self) -> tuple[int, ...]:
        """Indices of the spherized layers, from 0, ascending; a ValueError if one is out of range."""
        layers = range(self.num_hidden_layers)  # type: ignore[attr-defined]  # a field of the encoder's configuration
        indices = [-1] if self.spherized_layers is None else list(self.spherized_layers)
        try:
            return tuple(sorted({layers[index] for index in indices}))
        except IndexError as error:
            raise ValueError(f"spherized_layers are {indices}, but the encoder has {len(layers)} layers.") from error

    @property
    def spherization_options(self) -> dict[str, Any]:
        """Keyword arguments of `hf_sphere.nn.Spherization`."""
        return {
            "scaling": float(self.spherization_scaling),
            "radius": float(self.spherization_radius),
            "delta": self.spherization_delta,
            "learn_scaling": self.learn_spherization_scaling,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and a note on the package to install."""
        return super().to_dict() | {"requires": REQUIRES}  # type: ignore[misc]

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict, dict]:
        """Read a configuration; the model type of the plain encoder is replaced by that of this class."""
        values, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)  # type: ignore[misc]
        own: str = cls.model_type  # type: ignore[attr-defined]
        if values.get("model_type") == own.removeprefix("sphere_"):
            values = {**values, "model_type": own}
        return values, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration with the values of a file, which must not make the model load other files."""
        check_settings(config_dict)
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def validate_spherized_layers(self) -> None:
        """Check that the encoder has the spherized layers."""
        _ = self.spherized_layer_indices
