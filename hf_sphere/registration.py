"""Registration with transformers, timm and PEFT, each right after it has been imported.

`import hf_sphere` must stay fast, and the hooks run in the middle of the imports of these libraries. Tokenizers, the
image processor and the backbones are registered by public functions. The rest has no public way; only this file uses
what is private, and the tests named here fail if it changes:

- Configurations and models: `_model_mapping`, `_reverse_config_mapping` and `_modules` of the tables of the Auto
  classes (`tests/models/test_registration.py`). `AutoConfig.register` and `AutoModel.register` take classes, but models
  cannot be imported in the hook of `modeling_auto`: transformers' modeling files import that module themselves, and
  text models must not import timm. Pipelines also log that a model added by `register` is not supported.
- Names of optimizers in `TrainingArguments(optim=...)`: the members of the enumeration `OptimizerNames`, and
  `_OPTIMIZER_HANDLERS` (`tests/optim/test_trainer.py`). The public ways take no name: `optimizer_cls_and_kwargs` of the
  `Trainer`, with a class or a factory, and `Trainer.get_optimizer_cls_and_kwargs`, which a subclass can override.
- Optimizers of timm: `default_registry`, to which its public class has the method `register`, stands in a private
  module; and its `create_optimizer` is wrapped for the parameter groups, which timm forms without the optimizer
  (`tests/optim/test_timm.py`).
- Default layers of PEFT's adapters: the tables in `peft.utils.constants` (`tests/models/test_registration.py`).
- The pipeline of image classification: the `impl` of the task in `PIPELINE_REGISTRY.supported_tasks`
  (`tests/models/test_rejecting_pipeline.py`). `register_pipeline` would log a warning, and save code beside each model.
"""

import functools
import importlib.util
import sys
from types import ModuleType
from typing import Any

import wrapt

from hf_sphere import models
from hf_sphere.models.sphere_encoder import ENCODERS
from hf_sphere.optim.optimizers import listeners, optimizer_class, optimizer_names

__all__ = ["register"]

_PREFIXES = {f"sphere_{name}": f"Sphere{prefix}" for name, prefix in {**ENCODERS, "vision": "Vision"}.items()}
"""Prefix of the classes by model type."""

_CONFIGURATIONS = {model_type: f"{prefix}Config" for model_type, prefix in _PREFIXES.items()}
"""Configuration by model type."""

_MODELS = {
    table: {model_type: prefix + task for model_type, prefix in _PREFIXES.items() if prefix + task in dir(models)}
    for table, task in {
        "MODEL_MAPPING": "Model",
        "MODEL_FOR_MASKED_LM_MAPPING": "ForMaskedLM",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING": "ForSequenceClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING": "ForTokenClassification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING": "ForImageClassification",
    }.items()
}
"""Model by transformers' table and model type."""


def register() -> None:
    """Install the hooks; calling it again has no effect."""
    for module, hook in _HOOKS.items():
        if module not in _installed:
            _installed.add(module)
            wrapt.register_post_import_hook(hook, module)
    if _update_optimizers not in listeners:
        listeners.append(_update_optimizers)


def _update_optimizers() -> None:
    """Register an optimizer that was added after the libraries had been imported."""
    for name in ("transformers.training_args", "transformers.trainer_optimizer", "timm.optim._optim_factory"):
        if name in sys.modules:
            _HOOKS[name](sys.modules[name])


def _register_configurations(auto: ModuleType) -> None:
    for model_type, name in _CONFIGURATIONS.items():
        auto.CONFIG_MAPPING_NAMES[model_type] = name
        auto.CONFIG_MAPPING._modules[model_type] = models


def _register_models(auto: ModuleType) -> None:
    for table_name, names in _MODELS.items():
        table = getattr(auto, table_name)
        for model_type, name in names.items():
            table._model_mapping[model_type] = name
            table._reverse_config_mapping[_CONFIGURATIONS[model_type]] = model_type
            table._modules[model_type] = models


def _register_encoder(module: ModuleType) -> None:
    """Give a spherized encoder the tokenizer or the image processor of the plain one."""
    config = getattr(module, f"Sphere{ENCODERS[module.__name__.rpartition('.')[2]]}Config")
    plain_type = config.model_type.removeprefix("sphere_")
    images = plain_type == "vit"

    def register_processor(auto: ModuleType) -> None:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        plain = CONFIG_MAPPING[plain_type]
        if images:
            auto.AutoImageProcessor.register(config, image_processor_classes=auto.IMAGE_PROCESSOR_MAPPING[plain])
        else:
            auto.AutoTokenizer.register(config, auto.TOKENIZER_MAPPING[plain], exist_ok=True)

    kind = "image_processing" if images else "tokenization"
    wrapt.register_post_import_hook(register_processor, f"transformers.models.auto.{kind}_auto")


def _register_image_processors(auto: ModuleType) -> None:
    if importlib.util.find_spec("torchvision") is not None:  # text models do not require it
        processors = {"torchvision": models.SphereVisionImageProcessor}
        auto.AutoImageProcessor.register(models.SphereVisionConfig, image_processor_classes=processors)


def _register_pipeline(pipelines: ModuleType) -> None:
    importlib.import_module("hf_sphere.models.pipeline")  # at its end, since it can be what imports `pipelines`


def _register_adapter_targets(constants: ModuleType) -> None:
    """Give spherized encoders the default adapter layers of the plain ones."""
    for name, mapping in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MAPPING"):
            for model_type in ENCODERS:
                if model_type in mapping:
                    mapping.setdefault(f"sphere_{model_type}", mapping[model_type])


def _register_backbones(timm: ModuleType) -> None:
    import hf_sphere.models.backbones  # noqa: F401  # each file registers its backbones


def _register_optimizer_names(training_args: ModuleType) -> None:
    """Add the names to transformers' enumeration of optimizers, which has no public way to extend it."""
    names = training_args.OptimizerNames
    for value in optimizer_names():
        if value not in names._value2member_map_:
            key = value.upper()
            member = str.__new__(names, value)
            member._name_, member._value_, member._sort_order_ = key, value, len(names._member_names_)
            names._member_names_.append(key)
            names._member_map_[key] = names._value2member_map_[value] = member
            type.__setattr__(names, key, member)


def _register_optimizer_handlers(trainer_optimizer: ModuleType) -> None:
    for name in optimizer_names():
        trainer_optimizer._OPTIMIZER_HANDLERS.setdefault(name, _optimizer_for_trainer)


def _optimizer_for_trainer(context: Any) -> tuple[type, dict[str, Any]]:
    from hf_sphere.optim.groups import optimizer_for_trainer  # imports torch

    return optimizer_for_trainer(context)


def _register_optimizers_with_timm(factory: ModuleType) -> None:
    """Register the optimizers for `timm.optim.create_optimizer_v2(model, "adamsrt")`, with `scale_invariant_groups`.

    timm uses only the part of a name after the last underscore, so `adam_srt` is registered as `adamsrt`.
    """
    registry = factory.default_registry
    kinds = {name.replace("_", ""): optimizer_class(name) for name in optimizer_names()}
    names = registry.list_optimizers()  # timm has a muon; a class of a script may have been defined again
    known = {name: registry.get_optimizer_info(name).opt_class for name in names if name in kinds}
    own = {name for name, kind in known.items() if getattr(kind, "name", "") and kind is not kinds[name]}
    classes = {name: kind for name, kind in kinds.items() if name not in known or name in own}
    if not classes:
        return
    for name, kind in classes.items():
        has = {f"has_{option}": option in kind.option_defaults() for option in ("eps", "betas", "momentum")}
        description = (kind.__doc__ or "").strip().split("\n")[0]
        registry.register(factory.OptimInfo(name=name, opt_class=kind, description=description, **has))
    create = registry.create_optimizer

    @functools.wraps(create)
    def create_optimizer(model_or_params: Any, opt: str, *args: Any, **options: Any) -> Any:
        from torch import nn

        kind = classes.get(opt.lower().split("_")[-1])
        if kind is not None and isinstance(model_or_params, nn.Module):
            if options.get("layer_decay") is not None:
                raise ValueError(f"{opt} does not support layer_decay; use build_optimizer with lr_scales.")
            if options.get("param_group_fn") is None:
                decay_all = options.get("weight_decay_exclude_1d", True) is False
                of_groups = kind.take_group_options(options)
                options["param_group_fn"] = functools.partial(_groups_for_timm, kind, decay_all, of_groups)
        return create(model_or_params, opt, *args, **options)

    registry.create_optimizer = create_optimizer


def _groups_for_timm(kind: Any, decay_all: bool, options: dict[str, Any], model: Any) -> list[dict[str, Any]]:
    """Parameter groups of a model; timm's `filter_bias_and_bn=False` applies weight decay to norms and biases too."""
    groups = kind.form_groups(model, **options)
    norms = {"params", "weight_decay"}  # and no per-parameter options
    return [{"params": group["params"]} if decay_all and set(group) == norms else group for group in groups]


_HOOKS = {
    **{f"hf_sphere.models.sphere_encoder.{name}": _register_encoder for name in ENCODERS},
    "transformers.models.auto.configuration_auto": _register_configurations,
    "transformers.models.auto.modeling_auto": _register_models,
    "transformers.models.auto.image_processing_auto": _register_image_processors,
    "transformers.pipelines": _register_pipeline,
    "transformers.training_args": _register_optimizer_names,
    "transformers.trainer_optimizer": _register_optimizer_handlers,
    "peft.utils.constants": _register_adapter_targets,
    "timm": _register_backbones,
    "timm.optim._optim_factory": _register_optimizers_with_timm,
}
_installed: set[str] = set()
