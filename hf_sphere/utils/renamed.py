"""Old public names, which stay importable for one release: the only table of them."""

import importlib
import warnings
from collections.abc import Callable
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
    "hf_sphere.visualization.choose_view": "hf_sphere.visualization.sphere.choose_view",
    "hf_sphere.visualization.project_to_great_sphere": "hf_sphere.visualization.scene.project_to_great_sphere",
}
"""New name by old name, of packages with all their names, and of single names."""


def find_renamed(package: str, lookup: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, which finds old names in their new place, with a `FutureWarning`.

    Args:
        package: The package's `__name__`.
        lookup: Its `__getattr__` for all other names, if it has one.
    """

    def find(name: str) -> Any:
        old = f"{package}.{name}"
        new = RENAMED.get(old)
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
