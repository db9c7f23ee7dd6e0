"""Encoders in which the feed-forward of some layers is spherized; by default that of the last layer.

`SphereBertForMaskedLM` inherits from `SphereEncoderMixin` and `BertForMaskedLM`, in this order. In a spherized layer,
the second map of the feed-forward is a `SphericalMap`, and the activation is left out because the spherization replaces
it. Everything else, `forward` included, is that of the plain encoder. New modules have names of their own, so that a
plain checkpoint loads into the others.

Reference:
    Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022.
"""

import functools
import itertools
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, conversion_mapping, initialization as init

from hf_sphere.models import REQUIRES
from hf_sphere.nn.labels import weighted_by_targets
from hf_sphere.nn.layers import SphericalLinear, Spherization, names_kept_in_float32
from hf_sphere.utils.loading import check_settings


@dataclass(init=False, repr=False, eq=False)  # the configuration classes have their own
class SphereEncoderConfigMixin:
    """Fields of the configurations of spherized encoders, in addition to those of the plain encoder.

    `from_pretrained` also reads configurations of the plain encoder.

    Args:
        spherized_layers: Indices of the encoder layers whose feed-forward is spherized, counted from 0, or from the end
            if negative; the last layer if None, and none if empty.
        spherization_scaling: Slope of the sigmoid that turns values into angles, or its initial value if learned.
        spherization_radius: Norm of the spherized values, or its initial value if learned.
        spherization_delta: Lower bound of the product of all sines.
        learn_spherization_scaling: Whether each spherization learns its scaling.
        learn_spherization_radius: Whether each spherization learns its radius.
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
    learn_spherization_radius: bool = False
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
            "learn_radius": self.learn_spherization_radius,
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


class SphericalMap(SphericalLinear):
    """Spherization and linear map, in place of the second map of a feed-forward."""

    @property
    def weight(self) -> Tensor:
        """Weight (hidden_size, intermediate_size + 1), for encoders that initialize the map by this name."""
        return self.linear.weight


class SpherizedClassificationHead(nn.Module):
    """Classifier on features: hidden_size -> hidden_size / 2 - 1, spherization, a linear map without bias.

    With a `dropout`, the features are the hidden state of the first token, to which it is applied.
    """

    def __init__(self, config: Any, dropout: nn.Module | None = None) -> None:
        super().__init__()
        width = config.hidden_size // 2 - 1
        self.projection = nn.Linear(config.hidden_size, width)
        self.spherization = Spherization(width, **config.spherization_options)
        self.linear = nn.Linear(width + 1, config.num_labels, bias=False)
        self.dropout = dropout

    @property
    def weight(self) -> Tensor:
        """Weight (num_labels, hidden_size / 2), for encoders that initialize the classifier by this name."""
        return self.linear.weight

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, (..., num_labels) or (B, num_labels)."""
        if self.dropout is not None:
            features = self.dropout(features[:, 0])
        wide = features.to(torch.promote_types(features.dtype, self.spherization.scaling.dtype))  # as `SphericalLinear`
        return self.linear(self.spherization(self.projection(wide))).to(features.dtype)


class SphereEncoderMixin(PreTrainedModel):
    """Construction and loading of the models, from checkpoints of the spherized and the plain encoder.

    A model takes the arguments of the plain one, and its configuration those of `SphereEncoderConfigMixin` too. Inputs
    and outputs are those of the plain model.

    Attributes:
        encoder_class: In a model with a head, the spherized encoder that is built in the place of the plain one: the
            class of the same file whose name ends with `Model`.
        feed_forward_classes: In an encoder, the classes that are built in its spherized layers, by the names of those
            of transformers in whose places.
        layers_path: Path of the layers in the encoder.
        feed_forward_path: Path in a layer of the module whose input is the residual: the feed-forward, or its norm.
        plain_map_path: Path in a plain layer of the feed-forward's second map.

    Example:
        >>> config = SphereBertConfig(spherized_layers=[-2, -1])
        >>> model = SphereBertForMaskedLM(config)
    """

    encoder_class: ClassVar[Any] = None
    feed_forward_classes: ClassVar[dict[str, type[nn.Module]]]
    layers_path: ClassVar[str] = "encoder.layer"  # the paths of BERT
    feed_forward_path: ClassVar[str] = "intermediate"
    plain_map_path: ClassVar[str] = "output.dense"
    classifier: Any
    _keep_in_fp32_modules: Any
    model_tags = ["hf_sphere"]
    accepts_loss_kwargs = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        encoder: Any = getattr(sys.modules[cls.__module__], f"{cls.__name__.partition('For')[0]}Model", None)
        if encoder is not None:
            cls.encoder_class, cls.config_class = encoder, encoder.config_class
            if "forward" not in vars(cls):
                cls.forward = weighted_by_targets(cls.forward)
        # Names in older checkpoints of the plain model, which transformers looks up by the name of the class.
        conversions = conversion_mapping.get_checkpoint_conversion_mapping(cls.__name__.removeprefix("Sphere"))
        if conversions is not None:
            conversion_mapping.register_checkpoint_conversion_mapping(cls.__name__, conversions, overwrite=True)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        constructor = super().__init__
        if self.encoder_class is not None:
            classes = {self.encoder_class.__name__.removeprefix("Sphere"): self.encoder_class}
        else:
            layers = config.spherized_layer_indices
            classes = {
                name: _in_layers(layers, constructor.__globals__.get(name), spherized)
                for name, spherized in self.feed_forward_classes.items()
            }
        _construct(constructor, classes, config, *args, **kwargs)

    def post_init(self) -> None:
        """Finish the construction.

        Subclasses with a constructor of their own call this a second time.
        """
        spherical = names_kept_in_float32(self)
        if len(spherical) < len(self.config.spherized_layer_indices):
            raise RuntimeError("layers are not spherized: this version of transformers is not supported.")
        if self.base_model is self:
            layers, name = (re.escape(path) for path in (self.layers_path, self.plain_map_path))
            # The plain maps of spherized layers in a checkpoint have no use here.
            unused = {rf"{layers}\.{index}\.{name}\." for index in self.config.spherized_layer_indices}
            self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *unused}
        if self.config.spherized_classifier and hasattr(self, "classifier"):
            plain = self.classifier  # a map of features, or a module on the hidden states of all tokens
            if not isinstance(plain, SpherizedClassificationHead):
                self.classifier = SpherizedClassificationHead(self.config, getattr(plain, "dropout", None))
            spherical.add("classifier")
        self._keep_in_fp32_modules = {*(self._keep_in_fp32_modules or ()), *spherical}  # quantizers skip these
        super().post_init()

    def save_pretrained(self, *args: Any, save_original_format: bool = False, **kwargs: Any) -> None:
        """Save the model, its tensors by the names in the model: a `Trainer` reads its checkpoints by those alone."""
        super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Spherization):
            # These functions skip tensors loaded from a checkpoint.
            init.constant_(module.scaling, module.initial_scaling)
            init.constant_(module.radius, module.initial_radius)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: transformers initializes modules of other libraries in part, and these as its own."""
        return False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint of this model or of the plain encoder.

        From a plain checkpoint only the second maps of the spherized feed-forwards are new (and the classifier, if
        that is spherized); `fit_spherization` fits them to the plain encoder. The arguments are those of
        `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: If the configuration spherizes other layers than the checkpoint.
        """
        returns_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        lacking, others = (
            [name for name in info[keys] if name.endswith(".spherical.linear.weight")]
            for keys in ("missing_keys", "unexpected_keys")
        )
        if others or 0 < len(lacking) < len(model.config.spherized_layer_indices):
            got = f"spherized_layers is {model.config.spherized_layers}, but it lacks {lacking} or also has {others}"
            raise ValueError(f"{pretrained_model_name_or_path} has other spherized layers: {got}.")
        return (model, info) if returns_info else model


def _in_layers(layers: Collection[int], plain: Any, spherized: Any) -> Callable[..., Any]:
    """Return a constructor of modules that each layer has once, which spherizes those of some layers."""
    index = itertools.count()
    return lambda *args, **kwargs: (spherized if next(index) in layers else plain)(*args, **kwargs)


def _construct(constructor: Any, classes: Mapping[str, Callable[..., Any]], *args: Any, **kwargs: Any) -> None:
    """Run a bound constructor of transformers with other classes in the places of those that it names.

    The constructors of transformers have no option for the classes of the modules that they build. This runs copies of
    them, also of those of the inner modules, in which a name in `classes` stands for that class. So every module is
    built once, in the order of the plain model, and no constructor of transformers is repeated here.
    """
    plain = constructor.__globals__  # the names of the file with the plain model

    def run(module: nn.Module, function: Any, *args: Any, **kwargs: Any) -> None:
        copy = types.FunctionType(function.__code__, names, None, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__
        copy(module, *args, **kwargs)

    def build(kind: Any, *args: Any, **kwargs: Any) -> nn.Module:
        module = kind.__new__(kind)
        run(module, kind.__init__, *args, **kwargs)
        return module

    inner = {
        name: functools.partial(build, kind)
        for name, kind in plain.items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__init__.__globals__ is plain
    }
    names = plain | inner | classes
    run(constructor.__self__, constructor.__func__, *args, **kwargs)
