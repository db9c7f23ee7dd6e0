"""Old public names and old names of options, which are accepted for one release: the only tables of them."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

RENAMED = {
    "hf_sphere.analogies.NEGATIVE_PERMUTATIONS": "hf_sphere.analogies.prompts.NEGATIVE_PERMUTATIONS",
    "hf_sphere.analogies.POSITIVE_PERMUTATIONS": "hf_sphere.analogies.prompts.POSITIVE_PERMUTATIONS",
    "hf_sphere.analogies.bootstrap_interval": "hf_sphere.analogies.search.bootstrap_interval",
    "hf_sphere.analogies.join_results": "hf_sphere.analogies.search.join_results",
    "hf_sphere.analysis": "hf_sphere.hyperplanes",
    "hf_sphere.calibrate_spherization": "hf_sphere.fit_spherization",
    "hf_sphere.analysis.find_layers": "hf_sphere.hyperplanes.layers.find_layers",
    "hf_sphere.embeddings": "hf_sphere.search",
    "hf_sphere.embeddings.Evaluation": "hf_sphere.evaluation.Evaluation",
    "hf_sphere.embeddings.EvaluationOptions": "hf_sphere.evaluation.EvaluationOptions",
    "hf_sphere.embeddings.evaluate_embeddings": "hf_sphere.evaluation.evaluate_embeddings",
    "hf_sphere.metrics.NeighborSearch": "hf_sphere.search.NeighborSearch",
    "hf_sphere.models.calibrate_spherization": "hf_sphere.models.fit_spherization",
    "hf_sphere.training.TrainingArguments": "hf_sphere.training.RecipeArguments",
    "hf_sphere.training.command_line.run_recipe": "hf_sphere.commands.command_line.run_main",
    "hf_sphere.training.command_line.train": "hf_sphere.commands.command_line.train",
    "hf_sphere.visualization.choose_view": "hf_sphere.visualization.sphere.choose_view",
    "hf_sphere.visualization.project_to_great_sphere": "hf_sphere.visualization.scene.project_to_great_sphere",
}
"""New name by old name, of packages with all their names, and of single names."""


RENAMED_OPTIONS: dict[tuple[str, Any], dict[str, Any]] = {
    ("optimizer", None): {"optim": None},
    ("compile", None): {"torch_compile": None},
    ("max_steps", None): {"stop_after_steps": None},
    ("mixed_precision", "bf16"): {"bf16": True, "fp16": False},
    ("mixed_precision", "fp16"): {"fp16": True, "bf16": False},
    ("mixed_precision", "no"): {"bf16": False, "fp16": False},
    ("mixed_precision", None): {"bf16": None, "fp16": None},
    ("calibrate", True): {"fit_spherization": True},  # of language models; that of images has texts
    ("calibrate", False): {"fit_spherization": False},
    ("calibration_tokens", None): {"fit_tokens": None},
    ("lr_scheduler_type", "plateau"): {"lr_scheduler_type": "reduce_lr_on_plateau"},
}
"""New names and values of an option by its old ones; None stands for any value, which is kept."""

OLD_OPTIONS = {name for name, _ in RENAMED_OPTIONS}


def rename_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run with the new names of options."""
    renamed: dict[str, Any] = {}
    for name, value in settings.items():
        word = {"true": True, "false": False}.get(str(value).lower(), value)  # on a command line
        word = "no" if name == "mixed_precision" and word is False else word  # YAML reads a bare no as False
        key = (name, word if isinstance(word, (str, bool)) else None)
        new = RENAMED_OPTIONS.get(key) or RENAMED_OPTIONS.get((name, None)) or {name: None}
        renamed |= {new_name: value if new_value is None else new_value for new_name, new_value in new.items()}
    return renamed


def find_renamed(package: str, lookup: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, which finds old names in their new place, with a `FutureWarning`.

    `lookup` is that for all other names, if the package has one.
    """

    def find(name: str) -> Any:
        old = f"{package}.{name}"
        new = RENAMED.get(old)
        if name == "__all__" and package in RENAMED:
            rows = [row.removeprefix(f"{package}.") for row in RENAMED if row.startswith(f"{package}.")]
            return [*rows, *importlib.import_module(RENAMED[package]).__all__]
        if new is None and package in RENAMED and not name.startswith("_"):
            new = f"{RENAMED[package]}.{name}"
        if new is None:
            if lookup is None:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            return lookup(name)
        module, _, attribute = new.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        warnings.warn(f"{old} is now {new}; the old name will be removed.", FutureWarning, stacklevel=2)
        return value

    return find
