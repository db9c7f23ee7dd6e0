# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""Image models: a timm backbone, an embedding and a head on the hypersphere, for classification and regression."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization as init
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
from hf_sphere.models.sphere_vision.outputs_sphere_vision import (
    SphereVisionClassifierOutput,
    SphereVisionJointOutput,
    SphereVisionModelOutput,
    SphereVisionRegressionOutput,
)
from hf_sphere.nn.heads import HEADS, Head, build_head
from hf_sphere.nn.heads.spherized import SpherizedHead
from hf_sphere.nn.pole_regression import PoleRegression
from hf_sphere.nn.spherization import Spherization

logger = logging.get_logger(__name__)


class SphereVisionPreTrainedModel(PreTrainedModel):
    """Base class: loading, saving and initialization."""

    config: SphereVisionConfig
    config_class = SphereVisionConfig
    base_model_prefix = "sphere_vision"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    model_tags = ["hf_sphere"]
    accepts_loss_kwargs = False
    _no_split_modules = ["SphereVisionModel"]
    _supports_sdpa = True  # timm's attention calls scaled_dot_product_attention itself

    def initialize_weights(self) -> None:
        """Initialize tensors that neither the constructor nor a checkpoint has set."""
        # The backbone first: transformers' default initialization of its layers would overwrite timm's.
        self.base_model.initialize_backbone()
        super().initialize_weights()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Layers outside the backbone have `reset_parameters`. It may overwrite loaded tensors (batch-norm statistics),
        # which are restored.
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            return
        loaded = {name: tensor.clone() for name, tensor in _tensors(module).items() if _is_filled(tensor)}
        if len(loaded) == len(_tensors(module)):
            return  # nothing is missing, and placing prototypes is expensive
        reset()
        if self.config.initialization == "xavier":
            _initialize_xavier(module)
        for name, tensor in _tensors(module).items():
            if name in loaded:
                tensor.copy_(loaded[name])

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        self.base_model.backbone.set_grad_checkpointing(enable)

    def get_input_embeddings(self) -> None:
        """Images have no token embeddings."""


class SphereVisionModel(SphereVisionPreTrainedModel):
    """The image encoder: pixels to embeddings.

    Args:
        config: The configuration.
        pretrained: Whether to load timm's pretrained weights of the backbone, from its cache or the Hub;
            `from_pretrained` never does.

    Attributes:
        embedding_dim: Length of the embeddings, including the additional coordinate of a spherization.
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool = False) -> None:
        super().__init__(config)
        keeps_activation = config.keeps_activation  # first, since this checks the head
        self.backbone = _build_backbone(config, pretrained=pretrained)
        for tensor in _tensors(self.backbone).values():
            _mark_filled(tensor, not tensor.is_meta)
        # Some of timm's heads keep a hidden layer of this width when the classifier is removed.
        features: Any = getattr(self.backbone, "head_hidden_size", None) or self.backbone.num_features
        self.projection: nn.Module = nn.Identity()
        self.spherization: nn.Module = nn.Identity()
        self.embedding_dim: int = features if config.embedding_dim is None else config.embedding_dim
        if config.embedding_dim is not None:
            self.projection = nn.Linear(features, self.embedding_dim)
        if not keeps_activation:
            self._remove_activation()
        if config.spherization is not None:
            self.spherization = Spherization(self.embedding_dim, **config.spherization)
            self.embedding_dim += 1
        self.supports_gradient_checkpointing = hasattr(self.backbone, "set_grad_checkpointing")
        self.post_init()
        self.train(self.training)  # freezes batch norms if configured

    def _remove_activation(self) -> None:
        """Remove the backbone's last activation if it has one that can be removed."""
        from hf_sphere.models.backbones import ends_in_activation

        remove = getattr(self.backbone, "remove_final_activation", None)
        if remove is not None:
            remove()
        elif ends_in_activation(self.backbone):
            logger.warning_once(
                "A head, a spherization or `final_activation` of the configuration removes the backbone's last "
                f"activation, which {self.config.backbone!r} does not support. Set `embedding_dim` to add a linear map "
                "after it."
            )

    def train(self, mode: bool = True) -> "SphereVisionModel":
        """Set the mode; frozen batch norms stay in eval mode."""
        super().train(mode)
        if self.config.freeze_batch_norm:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def initialize_backbone(self) -> None:
        """Copy missing tensors of the backbone from a new one, since timm initializes them in the constructor."""
        missing = {name: tensor for name, tensor in _tensors(self.backbone).items() if not _is_filled(tensor)}
        if not missing:
            return
        with torch.device("cpu"):
            fresh = _tensors(_build_backbone(self.config))
        for name, tensor in missing.items():
            init.copy_(tensor, fresh[name])
            _mark_filled(tensor, True)

    @can_return_tuple
    def forward(self, pixel_values: Tensor, **kwargs: Any) -> SphereVisionModelOutput:
        """Embed images.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            **kwargs: Ignored; accepted for compatibility with transformers.
        """
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.config.num_channels:
            raise ValueError(
                f"expected pixel_values of shape (batch, {self.config.num_channels}, height, width); got "
                f"{tuple(pixel_values.shape)}. Use the model's image processor to convert images."
            )
        features = self.backbone(pixel_values.to(self.dtype))
        return SphereVisionModelOutput(embeddings=self.spherization(self.projection(features)))


class SphereVisionModelWithHead(SphereVisionPreTrainedModel):
    """Base class of the models with a classification head: the head's interface to training loops."""

    head: Head

    def parameter_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Per-parameter optimizer options of the head, by full parameter names."""
        return {f"head.{name}": options for name, options in self.head.parameter_options().items()}

    def set_epoch(self, epoch: int) -> None:
        """Update the head's schedules at the start of epoch `epoch`, counted from 0."""
        self.head.set_epoch(epoch)

    def before_forward(self, seed: int, places: Tensor) -> None:
        """Prepare the next forward pass in training; see `Head.before_forward`."""
        self.head.before_forward(seed, places)

    def after_step(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Update running statistics after an optimizer step; see `Head.after_step`."""
        self.head.after_step(reduce)

    def head_inputs(self, embeddings: Tensor) -> Tensor:
        """Select the input of the head from embeddings (B, d)."""
        return embeddings

    @property
    def loss_reduction(self) -> str:
        """Whether the loss is the `mean` or the `sum` over a batch."""
        return self.head.reduction

    @staticmethod
    def _build_head(config: SphereVisionConfig, embedding_dim: int) -> Head:
        if config.head is None:
            raise ValueError(
                f"the model needs a head: {', '.join(HEADS)}. For a regression, which has none, use "
                "SphereVisionForRegression."
            )
        if config.spherization is not None and issubclass(HEADS[config.head], SpherizedHead):
            raise ValueError(
                f"head {config.head!r} would spherize embeddings that the configuration's spherization has spherized "
                "already. Use only one of them: set spherization=None, or use another head such as 'softmax'."
            )
        return build_head(config.head, embedding_dim, config.num_labels, **(config.head_kwargs or {}))


class SphereVisionForImageClassification(SphereVisionModelWithHead):
    """The image encoder with a classification head.

    Args:
        config: The configuration; `num_labels` is the number of classes.
        pretrained: See `SphereVisionModel`.

    Example:
        >>> config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=28, num_labels=10)
        >>> model = SphereVisionForImageClassification(config)
        >>> model(torch.rand(2, 1, 28, 28)).logits.shape
        torch.Size([2, 10])
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool = False) -> None:
        super().__init__(config)
        self.sphere_vision = SphereVisionModel(config, pretrained=pretrained)
        self.head = self._build_head(config, self.sphere_vision.embedding_dim)
        self.supports_gradient_checkpointing = self.sphere_vision.supports_gradient_checkpointing
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> SphereVisionClassifierOutput:
        """Classify images.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: (B,), class indices from 0 to `num_labels` - 1; if given, the output has a loss.
            **kwargs: Ignored; accepted for compatibility with transformers.
        """
        output = self.head(self.sphere_vision(pixel_values, return_dict=True).embeddings, labels)
        return SphereVisionClassifierOutput(
            loss=output.loss,
            logits=output.logits,
            embeddings=output.embeddings,
            concentration=output.concentration,
        )


class SphereVisionForRegression(SphereVisionPreTrainedModel):
    """The image encoder with regression by the angle between embedding and pole.

    Args:
        config: The configuration; `embedding_dim` and `value_range` must be set.
        pretrained: See `SphereVisionModel`.

    Example:
        >>> config = SphereVisionConfig(
        ...     backbone="lenet5", num_channels=1, image_size=28, embedding_dim=2, head=None, value_range=[0.0, 1.0]
        ... )
        >>> SphereVisionForRegression(config)(torch.rand(3, 1, 28, 28)).predictions.shape
        torch.Size([3])
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool = False) -> None:
        config.head = None  # so that the saved model is not mistaken for a classifier
        super().__init__(config)
        self.sphere_vision, self.regression = _build_regression(config, pretrained)
        self.supports_gradient_checkpointing = self.sphere_vision.supports_gradient_checkpointing
        self.post_init()

    @property
    def loss_reduction(self) -> str:
        """Whether the loss is the `mean` or the `sum` over a batch."""
        return self.regression.reduction

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> SphereVisionRegressionOutput:
        """Predict values for images.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: (B,), the values; if given, the output has a loss.
            **kwargs: Ignored; accepted for compatibility with transformers.
        """
        output = self.regression(self.sphere_vision(pixel_values, return_dict=True).embeddings, labels)
        return SphereVisionRegressionOutput(output.loss, output.predictions, output.embeddings)


class SphereVisionForJointPrediction(SphereVisionModelWithHead):
    """The image encoder with a regression and a classification on one sphere.

    The first axis is the pole of the regression, so a value is a latitude. The head receives only the other
    coordinates, orthogonal to the pole. Every value is therefore compatible with every class, and the two tasks do not
    conflict.

    Args:
        config: The configuration; `num_labels`, `embedding_dim` (including the pole's axis) and `value_range` must be
            set. `task_weight` w makes the loss (1 - w) * regression + w * classification.
        pretrained: See `SphereVisionModel`.

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019, section 2.3.
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool = False) -> None:
        super().__init__(config)
        if config.embedding_dim is not None and config.embedding_dim < 3:
            raise ValueError(f"joint prediction needs an embedding_dim of at least 3; got {config.embedding_dim}.")
        self.sphere_vision, self.regression = _build_regression(config, pretrained)
        self.head = self._build_head(config, self.sphere_vision.embedding_dim - 1)
        if self.head.reduction != self.regression.reduction:
            raise ValueError(
                f"the losses of the two tasks are added, but one is a {self.head.reduction} and the other a "
                f"{self.regression.reduction} over the batch; set the same `reduction` in head_kwargs and "
                "regression_kwargs."
            )
        self.supports_gradient_checkpointing = self.sphere_vision.supports_gradient_checkpointing
        self.post_init()

    def head_inputs(self, embeddings: Tensor) -> Tensor:
        """Return the coordinates orthogonal to the pole: (B, d) -> (B, d - 1)."""
        return embeddings[:, 1:]

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        regression_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SphereVisionJointOutput:
        """Classify images and predict values for them.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: (B,), class indices from 0 to `num_labels` - 1.
            regression_labels: (B,), the values; if both are given, the output has a loss.
            **kwargs: Ignored; accepted for compatibility with transformers.
        """
        if (labels is None) != (regression_labels is None):
            raise ValueError("the joint loss needs both labels (classes) and regression_labels (values), or neither.")
        embeddings = self.sphere_vision(pixel_values, return_dict=True).embeddings
        values = self.regression(embeddings, regression_labels)
        classes = self.head(self.head_inputs(embeddings), labels)
        loss = None
        if labels is not None:
            weight = self.config.task_weight
            loss = (1.0 - weight) * values.loss + weight * classes.loss
        return SphereVisionJointOutput(loss, classes.logits, values.predictions, values.embeddings)


def _build_regression(config: SphereVisionConfig, pretrained: bool) -> tuple[SphereVisionModel, PoleRegression]:
    if config.embedding_dim is None or config.value_range is None:
        raise ValueError(
            "regression on the sphere needs embedding_dim (the sphere's dimension plus one, for instance 2) and "
            f"value_range (lowest and highest value); got {config.embedding_dim} and {config.value_range}."
        )
    if config.spherization is not None:
        raise ValueError(
            "regression does not work on spherized embeddings: they have no negative coordinates, so values below "
            "the middle of the range could not be predicted. Set spherization to None; the regression normalizes the "
            "embeddings itself."
        )
    low, high = config.value_range
    options = config.regression_kwargs or {}
    unknown = sorted(set(options) - {"out_of_range", "reduction"})
    if unknown:
        raise ValueError(f"a regression has no option {', '.join(unknown)}; its options are: out_of_range, reduction.")
    regression = PoleRegression(config.embedding_dim, (low, high), **options)
    return SphereVisionModel(config, pretrained=pretrained), regression


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _is_filled(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)


def _mark_filled(tensor: Tensor, filled: bool) -> None:
    tensor._is_hf_initialized = filled  # type: ignore[attr-defined]  # the flag of transformers


def _build_backbone(config: SphereVisionConfig, *, pretrained: bool = False) -> nn.Module:
    from hf_sphere.models.backbones import create_backbone  # imports timm, which text models do not need

    if pretrained and config.initialization is not None:
        raise ValueError(
            "initialization would overwrite the pretrained weights of the backbone; use only one of the two."
        )
    backbone = create_backbone(
        config.backbone,
        num_channels=config.num_channels,
        image_size=config.input_size,
        pretrained=pretrained,
        **(config.backbone_kwargs or {}),
    )
    if config.initialization == "xavier":
        _initialize_xavier(backbone)
    elif config.initialization == "torch":
        for module in backbone.modules():
            if (reset := getattr(module, "reset_parameters", None)) is not None:
                reset()
    return backbone


def _initialize_xavier(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
