"""Train a model.

hf-sphere train classification --config vmf/mnist-vmf --seed 1
accelerate launch -m hf_sphere.commands.train few-shot --config few_shot/omniglot-conv4-5shot-spherized-cosine
"""

import os
from collections.abc import Sequence

from hf_sphere.commands.command_line import run_job
from hf_sphere.training import tasks
from hf_sphere.training.arguments import USUAL
from hf_sphere.utils.arguments import import_modules, parse_arguments
from hf_sphere.utils.commands import COMMANDS, running

TASKS = {name.replace("_", "-"): summary for name, summary in tasks.TASKS.items()}


def main(argv: Sequence[str]) -> None:
    """Train on the task that the first argument names, with the others."""
    name, *words = argv or ["--help"]
    if name in ("-h", "--help"):
        print("Usage: hf-sphere train TASK [options]\n")
        known = TASKS | {own.replace("_", "-"): task.summary for own, task in tasks.OWN_TASKS.items()}
        print("\n".join(f"  {task:<16}{summary}" for task, summary in known.items()))
        print("\nhf-sphere train TASK --help shows the options of a task. On several devices:")
        print("accelerate launch -m hf_sphere.commands.train TASK [options]")
        return
    words, name = import_modules(words), name.replace("_", "-")
    task = tasks.find_task(name.replace("-", "_"))
    recipe = dict(zip(COMMANDS.values(), COMMANDS, strict=True)).get(f"train {name}")
    token = running.set(running.get() if recipe is None else f"hf-sphere train {name}")
    try:
        arguments = parse_arguments(task.arguments, words, f"{task.summary}\n\n{task.example}", recipe, USUAL)

        from hf_sphere.training.run import run_training

        is_single = os.environ.get("WORLD_SIZE", "1") == "1"
        job = ["hf-sphere", "train"] if is_single else ["accelerate", "launch", "-m", "hf_sphere.commands.train"]
        run_training(task, arguments, [*job, name, *words], recipe or task.name or name)
    finally:
        running.reset(token)  # a program may train, and go on


if __name__ == "__main__":
    run_job("train")
