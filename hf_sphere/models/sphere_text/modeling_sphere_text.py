"""Encoders in which the feed-forward of some layers is spherized; by default that of the last layer.

`SphereBertForMaskedLM` inherits from `SphereEncoderPreTrainedModel` and `BertForMaskedLM`, in this order. The plain
constructor builds the plain model; at its end it calls `post_init`, which replaces the parts that are spherized before
weights are initialized or loaded. Everything else, `forward` included, is that of the plain encoder. New modules have
names of their own, so that a plain checkpoint loads into the others.

Reference:
    Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping, initialization as init
from transformers.modeling_utils import _CAN_RECORD_REGISTRY

from hf_sphere.models.accumulation import weighted_by_targets
from hf_sphere.models.sphere_text import configuration_sphere_text as configurations
from hf_sphere.models.sphere_text.encoders import Encoder, find_encoder
from hf_sphere.nn.layers import SphericalLinear, Spherization, names_kept_in_float32


class SphericalMap(SphericalLinear):
    """Spherization and linear map in place of the second map of a feed-forward."""

    @property
    def weight(self) -> Tensor:
        """Weight (hidden_size, intermediate_size + 1), for encoders that initialize the map by this name."""
        return self.linear.weight


class SpherizedClassificationHead(nn.Module):
    """Classifier on features: hidden_size -> hidden_size / 2 - 1, spherization, a linear map without bias.

    Args:
        config: The configuration.
        dropout: None for features (..., hidden_size). For hidden states (B, L, hidden_size), the dropout applied to
            that of the first token, which gives the features.
    """

    def __init__(self, config: Any, dropout: nn.Module | None = None) -> None:
        super().__init__()
        width = config.hidden_size // 2 - 1
        if width < 1:
            raise ValueError(f"a spherized classifier needs a hidden_size of at least 4; got {config.hidden_size}.")
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


class SphereEncoderPreTrainedModel(PreTrainedModel):
    """Base class of the models: construction and loading, from checkpoints of the spherized and the plain encoder."""

    encoder_row: ClassVar[Encoder]
    config: Any
    config_class: Any
    classifier: Any
    model_tags = ["hf_sphere"]
    accepts_loss_kwargs = True
    _keep_in_fp32_modules: Any
    _keys_to_ignore_on_load_unexpected: Any

    def post_init(self) -> None:
        """Spherize the plain model that the constructor has built, then initialize it.

        Subclasses with a constructor of their own call this a second time.
        """
        base: Any = self.base_model
        if base is self:
            self._spherize_layers()
        else:  # built by the constructor, which knows only the plain class
            base.__class__ = _sphere_class(self.encoder_row, "Model")
            # The constructor has registered the outputs that can be recorded by the name of the plain class.
            _CAN_RECORD_REGISTRY.update({str(base.__class__): base._can_record_outputs})
            base.post_init()
        spherical = names_kept_in_float32(self)
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

    def _spherize_layers(self) -> None:
        row, replaced = self.encoder_row, set()
        for index in self.config.spherized_layer_indices:
            layer: Any = self.get_submodule(row.layers).get_submodule(str(index))
            parent, name = _locate(layer, row.second_map)
            plain = getattr(parent, name)
            if isinstance(plain, SphericalMap):
                continue
            if row.activation is not None:
                setattr(*_locate(layer, row.activation), nn.Identity())
            spherical = SphericalMap(plain.in_features, plain.out_features, **self.config.spherization_options)
            # In its place, since optimizers store their state in the order of the parameters.
            parent._modules = dict(
                ("spherical", spherical) if child == name else (child, module)
                for child, module in parent._modules.items()
            )
            parent.__class__ = _with_spherical(parent.__class__, name)
            parent._is_hf_initialized = False  # some encoders initialize the maps of their feed-forward here
            replaced.add(rf"{re.escape(row.layers)}\.{index}\.{re.escape(row.second_map)}\.")
        # The plain maps in the checkpoint have no use here.
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *replaced}

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
        that is spherized); `calibrate_spherization` fits them to the plain encoder. The arguments are those of
        `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: If the configuration spherizes other layers than the checkpoint, or is that of the plain
                encoder.
        """
        config = kwargs.get("config")
        if isinstance(config, PreTrainedConfig) and not isinstance(config, cls.config_class):
            raise ValueError(
                f"config must be a {cls.config_class.__name__}; got a {type(config).__name__}. Omit it, or read it "
                f"with {cls.config_class.__name__}.from_pretrained."
            )
        returns_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        configured = set(model.config.spherized_layer_indices)
        missing, unexpected = (cls._spherical_layers(info[keys]) for keys in ("missing_keys", "unexpected_keys"))
        found = (configured - missing) | unexpected
        if found and found != configured:
            raise ValueError(
                f"in the checkpoint {pretrained_model_name_or_path} the layers {sorted(found)} are spherized, but the "
                f"configuration has spherized_layers {sorted(configured)}. Load it with those of the checkpoint."
            )
        return (model, info) if returns_info else model

    @classmethod
    def _spherical_layers(cls, keys: Iterable[str]) -> set[int]:
        """Return the layers of which there is a spherical map among the keys of a checkpoint."""
        pattern = re.compile(rf"(?:^|\.){re.escape(cls.encoder_row.layers)}\.(\d+)\..*\bspherical\.linear\.weight$")
        return {int(found.group(1)) for key in keys if (found := pattern.search(key))}


def _locate(layer: nn.Module, path: str) -> tuple[Any, str]:
    """Return the parent of a module and the module's name in it."""
    parent, _, name = path.rpartition(".")
    return layer.get_submodule(parent), name


@functools.cache
def _with_spherical(plain: type[nn.Module], name: str) -> type[nn.Module]:
    """Return a subclass in which the attribute `name`, that `forward` calls, is the submodule `spherical`."""
    attributes = {
        name: property(lambda self: self.spherical),
        "__module__": __name__,
        # Pickle cannot find a class that is defined here by its name.
        "__reduce__": lambda self: (_new_with_spherical, (plain, name), self.__dict__),
    }
    return type(f"Spherized{plain.__name__}", (plain,), attributes)


def _new_with_spherical(plain: Any, name: str) -> nn.Module:
    kind = _with_spherical(plain, name)
    return kind.__new__(kind)


@functools.cache
def _sphere_class(encoder: Encoder, part: str) -> Any:
    name, plain = f"Sphere{encoder.prefix}{part}", encoder.load_class(part)
    conversions = conversion_mapping.get_checkpoint_conversion_mapping(plain.__name__)
    if conversions is not None:  # names in older checkpoints of the plain model
        conversion_mapping.register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    attributes = {
        "__module__": __name__,
        "__doc__": f"""`{plain.__name__}` of transformers with spherized feed-forwards.

    The inputs and outputs are those of `{plain.__name__}`.

    Args:
        config: The `Sphere{encoder.prefix}Config`; its fields say which layers are spherized and how.
        **kwargs: See `{plain.__name__}`.

    Example:
        >>> config = Sphere{encoder.prefix}Config(spherized_layers=[-2, -1])
        >>> model = {name}(config)
    """,
        "encoder_row": encoder,
        "config_class": getattr(configurations, f"Sphere{encoder.prefix}Config"),
    }
    base = SphereEncoderPreTrainedModel
    if part == "ForImageClassification":
        from hf_sphere.models.sphere_text import image_classification  # imports the heads

        base = image_classification.SphereEncoderForImageClassification
    elif part != "Model":
        attributes["forward"] = weighted_by_targets(plain.forward)
    return type(name, (base, plain), attributes)


def __getattr__(name: str) -> Any:
    """Define the model class of an encoder, for instance `SphereBertModel`, when it is first used."""
    encoder, part = find_encoder(name)
    if part == "Config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _sphere_class(encoder, part)
