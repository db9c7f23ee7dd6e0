"""Image models: a timm backbone, an embedding and a head on the hypersphere."""

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from hf_sphere.models.accumulation import weighted_by_targets
from hf_sphere.models.sphere_vision import construction
from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
from hf_sphere.nn.calibration import calibrate
from hf_sphere.nn.heads import HEADS, Head, HeadOutput, build_head
from hf_sphere.nn.heads.mixins import ClassVectorHead
from hf_sphere.nn.heads.softmax import SpherizedHead
from hf_sphere.nn.layers import Spherization, names_kept_in_float32
from hf_sphere.nn.mixed_labels import divide_soft_labels, pop_mixed, refuse_mixed, refuse_soft_labels
from hf_sphere.nn.rejection import Rejection
from hf_sphere.utils.modules import digest_weights, shared_tensors
from hf_sphere.utils.options import check_names, keyword_options

logger = logging.get_logger(__name__)
is_loading: ContextVar[bool] = ContextVar("is_loading", default=False)


@dataclass
class SphereVisionOutput(ModelOutput):
    """Output of the image models. Each model has only some of the values; E episodes may be an axis before the others.

    Attributes:
        loss: Scalar, if labels were given.
        logits: (B, K); `argmax` is the prediction, `softmax` the confidence.
        predictions: (B,), the values of a regression, in the unit of its labels.
        embeddings: (B, d). Those of `SphereVisionModel` are the input of a head, and on the sphere if the configuration
            has a `spherization`; those of a model with a head are transformed by it.
        concentration: (B,), the certainty of the embeddings, for heads that have one.
        known: (B,), whether the image is of one of the classes, in eval mode of a model with a rejection.
        p_value: (B,), the p-value of that; see `hf_sphere.ood.Rejection`.
        class_p_values: (B, K), the p-value of each class.
        prototypes: (way, d), the mean embedding of each class in few-shot classification.
        pooler_output: The embeddings of `SphereVisionModel`, by the name they have in other models.
        hidden_states: Features of the backbone's stages or blocks, if `output_hidden_states` is set.
        attentions: Attention weights of an encoder of transformers, if `output_attentions` is set.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    predictions: Tensor | None = None
    embeddings: Tensor | None = None
    concentration: Tensor | None = None
    known: Tensor | None = None
    p_value: Tensor | None = None
    class_p_values: Tensor | None = None
    prototypes: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class SphereVisionPreTrainedModel(PreTrainedModel):
    """Base class: loading, saving and initialization."""

    config: SphereVisionConfig
    config_class = SphereVisionConfig
    base_model_prefix = "sphere_vision"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    model_tags = ["hf_sphere"]
    accepts_loss_kwargs = True
    _no_split_modules = ["SphereVisionModel"]
    _keys_to_ignore_on_load_unexpected = [r"^rejection\."]  # of a model that is loaded to be trained further
    _supports_sdpa = True  # timm's attention calls scaled_dot_product_attention itself

    def post_init(self) -> None:
        """Finish the construction, and keep spherical and angular layers, and a rejection, in float32."""
        self._keep_in_fp32_modules = names_kept_in_float32(self)
        if getattr(self, "rejection", None) is not None:
            self._keep_in_fp32_modules_strict = {"rejection"}  # in bfloat16 too
        self._tied_weights_keys = shared_tensors(self)  # timm's CoaT shares modules among its blocks
        self.supports_gradient_checkpointing = hasattr(self.base_model.backbone, "set_grad_checkpointing")
        super().post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the names of shared parameters; the base class does so only for models with tied embeddings."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        return {name: first for name, first in self._tied_weights_keys.items() if name in parameters}

    def initialize_weights(self) -> None:
        """Initialize tensors that neither the constructor nor a checkpoint has set."""
        # The backbone first: transformers' default initialization of its layers would overwrite timm's.
        construction.initialize_missing(self.base_model.backbone, self.config)
        super().initialize_weights()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        construction.reset_missing_parameters(module, xavier=self.config.initialization == "xavier")

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        self.base_model.backbone.set_grad_checkpointing(enable)
        self.base_model.gradient_checkpointing = enable

    def save_pretrained(self, *args: Any, save_original_format: bool = False, **kwargs: Any) -> None:
        """Save the model, its tensors by the names in the model: a `Trainer` reads its checkpoints by those alone."""
        # An encoder can have the configuration of a classifier.
        self.config.rejection = getattr(getattr(self, "rejection", None), "settings", None)
        super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)

    def get_input_embeddings(self) -> None:
        """Images have no token embeddings."""


class SphereVisionModel(SphereVisionPreTrainedModel):
    """The image encoder: pixels to embeddings.

    Args:
        config: The configuration.
        pretrained: Whether to load pretrained weights of the backbone from timm or transformers; or a file of
            weights, or the folder of an encoder of transformers. `from_pretrained` never does.

    Attributes:
        embedding_dim: Length of the embeddings, including the additional coordinate of a spherization.

    Example:
        >>> config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=28)
        >>> SphereVisionModel(config)(torch.rand(2, 1, 28, 28)).embeddings.shape
        torch.Size([2, 84])
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool | str = False) -> None:
        super().__init__(config)
        keeps_activation = config.keeps_activation  # first, since this checks the head
        self.backbone = construction.build_backbone(config, pretrained=pretrained)
        # Some of timm's heads keep a hidden layer of this width when the classifier is removed.
        features: Any = getattr(self.backbone, "head_hidden_size", None) or self.backbone.num_features
        self.projection: nn.Module = nn.Identity()
        self.spherization: nn.Module = nn.Identity()
        self.embedding_dim: int = features if config.embedding_dim is None else config.embedding_dim
        if config.embedding_dim is not None:
            self.projection = nn.Linear(features, self.embedding_dim)
        if not keeps_activation:
            getattr(self.backbone, "remove_final_activation", lambda: None)()
        if config.spherization is not None:
            check_names("spherization", config.spherization, keyword_options(Spherization))
            self.spherization = Spherization(self.embedding_dim, **config.spherization)
            self.embedding_dim += 1
        self.gradient_checkpointing = False  # `is_activation_checkpointing` reads it
        self.post_init()
        self.train(self.training)  # freezes batch norms if configured

    def train(self, mode: bool = True) -> "SphereVisionModel":
        """Set the mode; frozen batch norms, and those whose parameters are not trained, stay in eval mode."""
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                untrained = module.affine and not any(p.requires_grad for p in module.parameters())
                if self.config.freeze_batch_norm or untrained:
                    module.eval()
        return self

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, *, output_hidden_states: bool | None = None, **kwargs: Any
    ) -> SphereVisionOutput:
        """Embed images.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            output_hidden_states: Whether to return the intermediate features of the backbone; None for
                `output_hidden_states` of the configuration.
            **kwargs: Ignored; accepted for compatibility with transformers.
        """
        refuse_mixed(kwargs)  # of a task without such a loss
        shape, size = tuple(pixel_values.shape), self.config.input_size
        fits = len(shape) == 4 and shape[1] == self.config.num_channels
        if not fits or (getattr(self.backbone, "has_fixed_size", False) and shape[2:] != size):
            expected = f"(batch, {self.config.num_channels}, {size[0]}, {size[1]})"
            raise ValueError(f"expected pixel_values of shape {expected}; got {shape}. Use the image processor.")
        weight = next(filter(torch.is_floating_point, self.parameters()), None)  # none if all are quantized
        pixel_values, hidden_states = pixel_values.to(torch.float32 if weight is None else weight.dtype), None
        if self.config.output_hidden_states if output_hidden_states is None else output_hidden_states:
            backbone: Any = self.backbone
            last, intermediates = backbone.forward_intermediates(pixel_values)
            features, hidden_states = backbone.forward_head(last), tuple(intermediates)
        else:
            features = self.backbone(pixel_values)
        embeddings = self.spherization(self.projection(features))
        return SphereVisionOutput(embeddings=embeddings, pooler_output=embeddings, hidden_states=hidden_states)


class ModelWithHead(nn.Module):
    """Mixin of the models that can have a classification head: the head's interface to training loops."""

    head: Head
    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(config), *args, **kwargs)  # its calibration and rejection are of one model

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model; with `shard_classes`, then keep the class vectors of this process."""
        token = is_loading.set(True)
        try:
            loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]  # of PreTrainedModel
        finally:
            is_loading.reset(token)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        head = getattr(model, "head", None)  # encoders of transformers may have their own classifier
        if isinstance(head, ClassVectorHead):
            head.keep_own_classes()
        if (rejection := getattr(model, "rejection", None)) is not None and not rejection.is_fitted:
            raise ValueError(f"{model.name_or_path} has no values of its rejection; remove it from config.json.")
        return loaded

    def save_pretrained(self, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any) -> None:
        """Save the model; that its class vectors were spread over processes is not saved.

        If they are, the `state_dict` must have those of all processes.
        """
        head = getattr(self, "head", None)
        self.remove_outdated(state_dict)
        if state_dict is None and isinstance(head, ClassVectorHead) and head.is_sharded:
            raise ValueError("the class vectors are spread over processes; pass state_dict=gather_classes(model).")
        options = self.config.head_kwargs
        self.config.head_kwargs = options and {name: options[name] for name in options if name != "shard_classes"}
        try:
            super().save_pretrained(*args, state_dict=state_dict, **kwargs)  # type: ignore[misc]
        finally:
            self.config.head_kwargs = options

    def train(self, mode: bool = True) -> Self:
        """Set the mode; in eval mode after training, a calibration or rejection of other weights is removed."""
        was_training = any(module.training for module in self.modules())
        super().train(mode)
        if was_training and not mode and not is_loading.get():
            self.remove_outdated()
        return self

    def set_calibration(self, calibration: Mapping[str, Any] | None) -> None:
        """Set the calibration of the logits in eval mode, as `fit_calibration` returns it, or remove it.

        It belongs to the present weights. When they have changed, it is removed with a warning: in eval mode after
        training, and when the model is saved; an export is an error.

        Raises:
            ValueError: If the model has a calibration, since the logits that it returns are then calibrated already.
        """
        if calibration is not None:
            if getattr(self.config, "calibration", None) is not None:
                raise ValueError("the model's logits are calibrated already; compute them after set_calibration(None).")
            calibration = {**calibration, "weights": digest_weights(self, is_widened=True)}
        self.config.calibration = calibration

    def find_outdated(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, str]:
        """Return, by name, why the rejection and the calibration do not fit the model or other weights, if so."""
        settings = getattr(getattr(self, "rejection", None), "settings", None)
        fitted: dict[str, Any] = {"rejection": settings, "calibration": getattr(self.config, "calibration", None)}
        reasons = {}
        for name, values in fitted.items():
            if values is not None:
                names = [self.config.id2label[index] for index in range(self.config.num_labels)]
                what = "" if values.get("class_names") in (None, names) else "classes"
                if not what and values.get("weights") != digest_weights(weights or self, is_widened=True):
                    what = "weights"
                if what:
                    reasons[name] = f"{what} of the model are not those that its {name} was fitted to"
        return reasons

    def remove_outdated(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Remove, with a warning, a rejection and a calibration that do not fit the model or other weights."""
        for name, reason in self.find_outdated(weights).items():
            logger.warning(f"The {reason}, so it is removed. Fit it again by `fit_{name}`.")
            getattr(self, f"set_{name}")(None)

    def head_inputs(self, embeddings: Tensor) -> Tensor:
        """Select the input of the head from embeddings (B, d)."""
        return embeddings

    def classify(
        self, embeddings: Tensor, labels: Tensor | None = None, mixed: Mapping[str, Tensor] | None = None, **states: Any
    ) -> SphereVisionOutput:
        """Apply the head to embeddings (B, d), with the loss of the configuration's `problem_type` if there are labels.

        `mixed` has `mixed_labels` and `mixed_share` of the head; `states` are further values of the output.

        In eval mode unknown images are rejected if the model has a `rejection`, and then the logits are calibrated if
        the configuration has a `calibration`; the loss is that of the uncalibrated ones. Labels whose shape contradicts
        the problem type are an error.
        """
        head, decision = self.apply_head(self.head_inputs(embeddings), labels, **(mixed or {})), {}
        calibration, rejection = getattr(self.config, "calibration", None), getattr(self, "rejection", None)
        logits = head.logits
        outputs: Any = {"embeddings": head.embeddings, "concentration": head.concentration}
        if logits is not None and not self.training:
            if rejection is not None:
                decision = rejection(self.head_inputs(embeddings), logits, head.concentration)._asdict()
            if calibration is not None:
                logits = calibrate(logits, calibration["temperature"], calibration.get("shift"))
        return SphereVisionOutput(head.loss, logits, **outputs, **decision, **states)

    def apply_head(self, inputs: Tensor, labels: Tensor | None, **mixed: Tensor | None) -> HeadOutput:
        """Apply the head to its inputs (B, d), with the loss of the `problem_type`; see `classify`."""
        problem_type = self.config.problem_type
        if labels is not None and labels.ndim == 2:
            if problem_type is None:
                refuse_soft_labels(labels)
            elif problem_type == "single_label_classification":
                labels, mixed["mixed_labels"], mixed["mixed_share"] = divide_soft_labels(labels)
        if labels is None or problem_type is None:
            return self.head(inputs, labels, **mixed)
        if problem_type == "regression":
            refuse_mixed(mixed)
            output = self.head(inputs)
            logits = self.head.upcast(output.logits)
            if labels.shape not in (logits.shape, logits.squeeze(1).shape):
                raise ValueError(f"a regression requires labels {tuple(logits.shape)}; got {tuple(labels.shape)}.")
            return replace(output, loss=F.mse_loss(logits, labels.to(logits.dtype).view_as(logits)))
        if labels.ndim != (2 if problem_type == "multi_label_classification" else 1):
            raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit the problem_type {problem_type!r}.")
        return self.head(inputs, labels, **mixed)

    @staticmethod
    def _build_head(config: Any, embedding_dim: int) -> Head:
        if config.head is None:
            raise ValueError(f"the model needs a head: {', '.join(HEADS)}.")
        if getattr(config, "spherization", None) is not None and issubclass(HEADS[config.head], SpherizedHead):
            raise ValueError(f"head {config.head!r} would spherize embeddings again; set spherization=None.")
        if config.problem_type not in (None, "single_label_classification"):
            HEADS[config.head].require_cross_entropy(f"problem_type {config.problem_type!r}")
        options = config.head_kwargs or {}
        if config.problem_type == "regression" and (options.get("class_weights") or options.get("label_smoothing")):
            raise ValueError("a regression has neither class_weights nor label_smoothing; leave them out.")
        return build_head(config.head, embedding_dim, config.num_labels, **options)


class SphereVisionForImageClassification(ModelWithHead, SphereVisionPreTrainedModel):
    """The image encoder with a classification head.

    Args:
        config: The configuration; `num_labels` is the number of classes. With `problem_type` set to
            `multi_label_classification`, an image can have several of them; with `regression`, the logits are values.
            Heads whose loss is not a cross-entropy have neither.
        pretrained: See `SphereVisionModel`.

    Example:
        >>> config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=28, num_labels=10)
        >>> model = SphereVisionForImageClassification(config)
        >>> model(torch.rand(2, 1, 28, 28)).logits.shape
        torch.Size([2, 10])
    """

    def __init__(self, config: SphereVisionConfig, *, pretrained: bool | str = False) -> None:
        super().__init__(config)
        config = self.config
        self.sphere_vision = SphereVisionModel(config, pretrained=pretrained)
        self.head = self._build_head(config, self.sphere_vision.embedding_dim)
        self.rejection = None if config.rejection is None else Rejection(config.rejection)
        self.post_init()

    def set_rejection(self, rejection: Rejection | None) -> None:
        """Set the rejection of unknown images, or remove it; `hf_sphere.ood.fit_rejection` calls this."""
        device: Any = self.device
        self.rejection = None if rejection is None else rejection.to(device)
        self.config.rejection = None if rejection is None else rejection.settings

    @weighted_by_targets
    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> SphereVisionOutput:
        """Classify images.

        Args:
            pixel_values: (B, num_channels, height, width), normalized by the image processor.
            labels: (B,), class indices from 0 to `num_labels` - 1, or -100 for images to ignore; or (B, num_labels),
                from 0 to 1, for images with several classes, or values. With the `problem_type`
                `single_label_classification`, these are the fractions of one or two classes in a mixed image, as of the
                transforms `MixUp` and `CutMix` of torchvision. If given, the output has a loss.
            **kwargs: Options of the encoder, see `SphereVisionModel`, and `mixed_labels` and `mixed_share` of images
                that are mixed with others, see `Head.forward`.
        """
        mixed = pop_mixed(kwargs)
        encoded = self.sphere_vision(pixel_values, return_dict=True, **kwargs)
        return self.classify(encoded.embeddings, labels, mixed, hidden_states=encoded.hidden_states)
