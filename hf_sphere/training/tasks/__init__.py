"""The tasks that models are trained for, one file each: what a task loads, builds, measures, and writes on the card.

To add a task, add a file to this folder with a subclass of `Task` that sets `name`.
"""

import importlib
import pkgutil

from hf_sphere.training.tasks.base import TASKS, Task


def task_names() -> list[str]:
    """Return the names of the tasks.

    Example:
        >>> task_names()
        ['classification', 'few_shot', 'joint', 'masked_lm', 'regression', 'retrieval']
    """
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)  # which adds its task to `TASKS`
    return list(TASKS)


def find_task(name: str) -> type[Task]:
    """Return the class of a task.

    Args:
        name: One of `task_names()`.

    Raises:
        ValueError: If there is no such task; the message lists the names.

    Example:
        >>> find_task("retrieval").metric
        'recall_at_1'
    """
    if any(module.name == name for module in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{name}")  # and no other task
    if name not in TASKS and name not in task_names():
        raise ValueError(f"unknown task {name!r}; the tasks are: {', '.join(task_names())}.")
    return TASKS[name]
