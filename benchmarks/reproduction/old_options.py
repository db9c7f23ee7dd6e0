"""Old names of options and jobs, of which digests were computed and that saved results have."""

from collections.abc import Mapping
from typing import Any

RENAMED_OPTIONS: dict[tuple[str, Any], dict[str, Any]] = {
    ("optimizer", None): {"optim": None},
    ("compile", None): {"torch_compile": None},
    ("max_steps", None): {"stop_after_steps": None},
    ("skip_unreadable_images", None): {"skip_invalid": None},
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

RENAMED_JOBS = {
    "extract": "extract_embeddings",
    "evaluate": "evaluate_embeddings",
    "projections": "compute_projections",
    "reinitialize": "reinitialize_layers",
}
"""Old name of a job by its new one."""


def restore_job(words: str) -> str:
    """Return a job and its options with its old name, of which digests were computed."""
    job, space, options = words.partition(" ")
    return RENAMED_JOBS.get(job, job) + space + options


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


def restore_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run with the old names of options, of which digests were computed."""
    restored = dict(settings)
    if "eval_fraction" in settings:  # None stands for the default now
        restored["eval_fraction"] = settings["eval_fraction"] or 0.2
    for (old, old_value), new in RENAMED_OPTIONS.items():
        first = next(iter(new))  # must be set; the others may be missing
        if first in restored and all(value in (None, restored.get(name, value)) for name, value in new.items()):
            value = restored[first]
            restored = {name: kept for name, kept in restored.items() if name not in new}
            restored[old] = value if old_value is None else old_value
    return restored
