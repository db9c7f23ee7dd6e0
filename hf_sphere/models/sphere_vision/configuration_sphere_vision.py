# Copyright 2026 The hf_sphere authors  (transformers' common tests read the year)
"""Configuration of the image models."""

import difflib
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_sphere.models import REQUIRES
from hf_sphere.nn.heads import HEADS, check_options
from hf_sphere.utils.checks import check_choice, check_number, is_module_name
from hf_sphere.utils.loading import check_settings
from hf_sphere.utils.problem_types import PROBLEM_TYPES

logger = logging.get_logger(__name__)

_OTHER_NAMES = {"num_classes": "num_labels", "pretrained": "pretrained of the model", "metric": "few_shot_kwargs"}
_OTHER_NAMES |= dict.fromkeys(("margin", "scale", "temperature", "class_weights", "label_smoothing"), "head_kwargs")
"""Names that users know from other libraries, or of options of the head."""


class OwnPartsMixin:
    """Mixin of configurations whose saved form names the modules of head and backbone in `requires_import`.

    The modules of a file, which others may have written, are never imported: the error for an unknown part names them.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with the modules if there are any."""
        config: Any = self
        timm: Any = sys.modules.get("timm")  # imported with the first backbone
        parts: list[Any] = [HEADS[config.head]] if config.head in HEADS else []
        if timm and timm.is_model(name := getattr(config, "backbone", "").partition(".")[0]):
            parts.append(timm.model_entrypoint(name))
        known = {"hf_sphere", "transformers", "timm", "__main__", "builtins"}
        names = dict.fromkeys(part.__module__ for part in parts if part.__module__.split(".")[0] not in known)
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
                what = f"unknown head {settings.get('head')!r} or backbone {settings.get('backbone')!r}"
                options = " --import ".join(["", *names])
                raise ValueError(f"{what}; if you trust the model's author, import {names}, or pass{options}.")
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]


@strict
class SphereVisionConfig(OwnPartsMixin, PreTrainedConfig):
    """Configuration of `SphereVisionModel` and of the models with a head.

    A timm backbone computes pooled features of an image. They are mapped linearly to `embedding_dim` units if that is
    set, spherized if `spherization` is set, and passed to a head.

    Args:
        backbone: Name of a timm model; `import hf_sphere` adds `lenet5`, `vgg11_cifar`, `resnet18_cifar` and others.
            Or an image encoder of transformers, by Hub id or folder, whose configuration is then copied.
        backbone_kwargs: Options of the backbone, as in `timm.create_model`, but none that reads files.
        backbone_config: Configuration of an encoder of transformers; None to load it by the name in `backbone`.
        num_channels: Channels of the images, 1 or 3.
        image_size: Side of the images in pixels, or [height, width].
        embedding_dim: Output size of the linear map to the embeddings; None for the features of the backbone.
        spherization: Options of `hf_sphere.nn.Spherization`, which maps the n units to n + 1 coordinates; {} for its
            defaults, None for embeddings without spherization.
        final_activation: Whether the backbone ends with its last activation. None keeps it unless the spherization or
            the head replaces it.
        freeze_batch_norm: Whether the backbone's batch norms keep their statistics in training, as is usual for a
            pretrained backbone trained on small batches; their scales and shifts are still trained.
        initialization: Initialization of a new model, instead of the ones of backbone and head. `torch`: torch's
            default initialization of each layer of the backbone, also where timm uses another one, as in its ResNets.
            `xavier`: Xavier-uniform weights (Glorot and Bengio, 2010) and zero biases of convolutions and linear
            layers; heads whose class vectors are not a linear layer initialize them as usual.
        head: Name of a head, for instance `softmax`, `spherized` or `prototype`; None for models without classes.
        head_kwargs: Options of the head.
        calibration: Temperature scaling of the logits in eval mode, as `set_calibration` of the model sets it, with a
            digest of its weights; the loss and the logits in training mode are not scaled.
        rejection: Rejection of unknown images, as `hf_sphere.ood.fit_rejection` sets it; its arrays are in the model.
        value_range: Lowest and highest value of a regression.
        regression_kwargs: Options of the regression, see `PoleRegression`.
        task_weight: Weight w in [0, 1] of the classification loss in joint prediction; the regression has 1 - w.
        few_shot_kwargs: Options of few-shot classification, `metric` and `temperature`, see
            `hf_sphere.nn.PrototypicalClassifier`.

    Example:
        >>> config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=28, head="spherized")
        >>> model = SphereVisionForImageClassification(config)
    """

    model_type = "sphere_vision"
    tie_word_embeddings = False  # without it, PEFT looks for token embeddings where a backbone shares tensors
    keys_to_ignore_at_inference = [*("embeddings", "concentration", "prototypes", "known", "p_value", "class_p_values")]

    backbone: str = "resnet18_cifar"
    backbone_kwargs: dict[str, Any] | None = None
    backbone_config: dict[str, Any] | None = None
    num_channels: int = 3
    image_size: int | list[int] | tuple[int, ...] = 32
    embedding_dim: int | None = None
    spherization: dict[str, Any] | None = None
    final_activation: bool | None = None
    freeze_batch_norm: bool = False
    initialization: Literal["torch", "xavier"] | None = None
    head: str | None = "spherized"
    head_kwargs: dict[str, Any] | None = None
    calibration: dict[str, float | int | str | list[float | int]] | None = None
    rejection: dict[str, Any] | None = None
    value_range: list[float | int] | tuple[float | int, ...] | None = None
    regression_kwargs: dict[str, Any] | None = None
    task_weight: float | int = 0.25
    few_shot_kwargs: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Copy the configuration of an encoder of transformers, so that the model does not depend on its source."""
        check_settings({"backbone_kwargs": self.backbone_kwargs, "backbone_config": self.backbone_config, **kwargs})
        if self.backbone_config is None and ("/" in self.backbone or Path(self.backbone).is_dir()):
            from hf_sphere.models.pretrained_backbones import is_transformers_name, transformers_settings

            if is_transformers_name(self.backbone):
                self.backbone_config = transformers_settings(self.backbone)
                if Path(self.backbone).is_dir():  # a local path is not published with the model
                    self._local_backbone = self.backbone
                    self.backbone = Path(self.backbone).resolve().name
        for name in kwargs:
            close = difflib.get_close_matches(name, self.__dataclass_fields__, 1, 0.7)
            meant = _OTHER_NAMES.get(name) or (close and close[0])
            if meant and not hasattr(type(self), name):
                warnings.warn(f"{type(self).__name__} has no setting {name!r}; is it {meant!r}?", stacklevel=4)
        if self.head_kwargs is not None:  # JSON has neither tensors nor arrays
            self.head_kwargs = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in self.head_kwargs.items()}
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration with the values of a file, which must not make the model load other files.

        A calibration or rejection is of the saved classifier: with another head or number of classes, it is removed.
        """
        check_settings(config_dict)
        saved, head = len(config_dict.get("id2label") or range(2)), config_dict.get("head")
        num_labels = kwargs.get("num_labels", len(kwargs.get("id2label") or range(saved)))
        fitted = [name for name in ("calibration", "rejection") if config_dict.get(name)]
        before = (saved, head, config_dict.get("problem_type"))
        if fitted and (num_labels, kwargs.get("head", head), kwargs.get("problem_type", before[2])) != before:
            logger.warning(f"The model gets another classifier, so it loses the {' and the '.join(fitted)}.")
            config_dict = {**config_dict, **dict.fromkeys(fitted)}
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and a note on the package to install."""
        fields = super().to_dict() | {"requires": REQUIRES}
        fields.pop("_local_backbone", None)
        return fields

    @property
    def input_size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        height, width = [self.image_size] * 2 if isinstance(self.image_size, int) else self.image_size
        return height, width

    @property
    def keeps_activation(self) -> bool:
        """Whether the backbone ends with its last activation.

        Raises:
            ValueError: If the head is unknown.
        """
        if self.head is not None:
            check_options(self.head, {})
        if self.final_activation is not None:
            return self.final_activation
        replaced = self.spherization is not None or (self.head is not None and HEADS[self.head].replaces_activation)
        return self.embedding_dim is not None or not replaced

    def validate_problem_type(self) -> None:
        """Check that the problem type exists, which transformers does not, and the weight of the tasks."""
        check_choice("problem_type", self.problem_type, (None, *PROBLEM_TYPES))
        check_number("task_weight", self.task_weight, "[0, 1]")

    def validate_calibration(self) -> None:
        """Check the temperatures of the logits."""
        if self.calibration is None:
            return
        sizes = {len(value) for value in self.calibration.values() if isinstance(value, list)}
        is_valid = sizes <= {self.num_labels} and self.problem_type in (None, "single_label_classification")
        if not is_valid or np.min(self.calibration.get("temperature", 0)) <= 0:
            what = f"{self.num_labels} classes, one per image, with positive temperatures"
            raise ValueError(f"calibration must be as by `fit_calibration` for {what}; got {self.calibration}.")
