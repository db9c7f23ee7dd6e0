"""Makes the library known to transformers and timm, each at the moment it is imported.

Registering needs the classes, and those need torch: seconds that `import hf_sphere` must not cost. Every hook below
runs right after the module it names has been imported, or at once if that has happened already.
"""

from types import ModuleType

import wrapt


def register() -> None:
    """Install the hooks; calling it again changes nothing."""
    for module, hook in _HOOKS.items():
        if module not in _installed:
            _installed.add(module)
            wrapt.register_post_import_hook(hook, module)


def _register_configurations(auto: ModuleType) -> None:
    from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig

    auto.AutoConfig.register(SphereVisionConfig.model_type, SphereVisionConfig)


def _register_models(auto: ModuleType) -> None:
    from hf_sphere.models.sphere_vision import modeling_sphere_vision as vision
    from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig

    auto.AutoModel.register(SphereVisionConfig, vision.SphereVisionModel)
    auto.AutoModelForImageClassification.register(SphereVisionConfig, vision.SphereVisionForImageClassification)


def _register_image_processors(auto: ModuleType) -> None:
    from hf_sphere.models.sphere_vision.configuration_sphere_vision import SphereVisionConfig
    from hf_sphere.models.sphere_vision.image_processing_sphere_vision import SphereVisionImageProcessor

    auto.AutoImageProcessor.register(
        SphereVisionConfig, image_processor_classes={"torchvision": SphereVisionImageProcessor}
    )


def _register_backbones(timm: ModuleType) -> None:
    import hf_sphere.models.backbones  # noqa: F401  (its files register themselves)


def _register_optimizer_names(training_args: ModuleType) -> None:
    from hf_sphere.optim.trainer import register_names

    register_names(training_args)


def _register_optimizer_handlers(trainer_optimizer: ModuleType) -> None:
    from hf_sphere.optim.trainer import register_handlers

    register_handlers(trainer_optimizer)


def _register_optimizers_with_timm(factory: ModuleType) -> None:
    from hf_sphere.optim.timm_factory import register_optimizers

    register_optimizers(factory)


_HOOKS = {
    "transformers.models.auto.configuration_auto": _register_configurations,
    "transformers.models.auto.modeling_auto": _register_models,
    "transformers.models.auto.image_processing_auto": _register_image_processors,
    "transformers.training_args": _register_optimizer_names,
    "transformers.trainer_optimizer": _register_optimizer_handlers,
    "timm": _register_backbones,
    "timm.optim._optim_factory": _register_optimizers_with_timm,
}
_installed: set[str] = set()
