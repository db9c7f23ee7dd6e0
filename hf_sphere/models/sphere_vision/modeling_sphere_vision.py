"""Image encoder: a timm backbone, or one of transformers, and an embedding; models with heads inherit from its base."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization as init
from transformers.modeling_outputs import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
from hf_sphere.nn.labels import refuse_mixed
from hf_sphere.nn.layers import Spherization, names_kept_in_float32
from hf_sphere.utils.checks import check_names, keyword_options
from hf_sphere.utils.modules import shared_tensors


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
        # The backbone first, whose initialization by timm transformers would overwrite with its own of each layer.
        backbone: dict[str, Any] = _tensors(self.base_model.backbone)
        missing = {name: each for name, each in backbone.items() if not getattr(each, "_is_hf_initialized", False)}
        with torch.device("cpu"):
            fresh = _tensors(build_backbone(self.config)) if missing else {}
        for name, tensor in missing.items():
            init.copy_(tensor, fresh[name])
            tensor._is_hf_initialized = True
        super().initialize_weights()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        reset_missing_parameters(module, xavier=self.config.initialization == "xavier")

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


def reset_missing_parameters(module: nn.Module, *, xavier: bool = False) -> None:
    """Initialize the tensors of a module that no checkpoint has set by its `reset_parameters`, if it has one."""
    reset = getattr(module, "reset_parameters", None)
    # The flag of transformers.
    loaded = {k: v.clone() for k, v in _tensors(module).items() if getattr(v, "_is_hf_initialized", False)}
    if reset is None or len(loaded) == len(_tensors(module)):  # placing prototypes is expensive
        return
    reset()
    if xavier:
        from hf_sphere.models.backbones.base import initialize

        initialize(module, nn.init.xavier_uniform_)
    for name, tensor in _tensors(module).items():
        if name in loaded:  # `reset_parameters` may overwrite loaded tensors, such as batch-norm statistics
            tensor.copy_(loaded[name])


def _tensors(module: nn.Module) -> dict[str, Any]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def build_backbone(config: SphereVisionConfig, *, pretrained: bool | str = False) -> nn.Module:
    """Build the backbone of a configuration; imports timm, which text models do not need."""
    from hf_sphere.models.backbones.base import create_backbone, initialize

    if pretrained and config.initialization is not None:
        raise ValueError("initialization would overwrite the pretrained weights; use only one of the two.")
    if config.backbone_config is not None:
        from hf_sphere.models.pretrained_backbones import TransformersBackbone

        source = getattr(config, "_local_backbone", config.backbone) if pretrained is True else pretrained or None
        backbone: Any = TransformersBackbone(config.backbone_config, config.num_channels, source)
        if config._attn_implementation == "eager":  # requested, for instance to see the attention weights
            backbone.encoder.set_attn_implementation("eager")
    else:
        options: Any = {"num_channels": config.num_channels, "image_size": config.input_size}
        options |= {"pretrained": pretrained, **(config.backbone_kwargs or {})}
        backbone = create_backbone(config.backbone, **options)
    if config.initialization == "xavier":
        initialize(backbone, nn.init.xavier_uniform_)
    elif config.initialization == "torch":
        for module in backbone.modules():
            if (reset := getattr(module, "reset_parameters", None)) is not None:
                reset()
    for tensor in _tensors(backbone).values():
        tensor._is_hf_initialized = not tensor.is_meta
    return backbone


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
        self.backbone = build_backbone(config, pretrained=pretrained)
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
