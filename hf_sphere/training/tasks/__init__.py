"""Training tasks, one file per task: data, model, metrics and model card."""

import importlib
import pkgutil

from hf_sphere.training.tasks.base import Task


def task_names() -> list[str]:
    """Return the names of the tasks; each is the name of a file in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in ("base", "image"))


def find_task(name: str) -> type[Task]:
    """Return the class of a task.

    Args:
        name: One of `task_names()`.

    Raises:
        ValueError: If there is no such task; the message lists the tasks.
    """
    if name not in task_names():
        raise ValueError(f"unknown task {name!r}; the tasks are: {', '.join(task_names())}.")
    module = importlib.import_module(f"{__name__}.{name}")
    return next(kind for kind in vars(module).values() if isinstance(kind, type) and vars(kind).get("name") == name)
