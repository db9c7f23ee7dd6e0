"""Train a model.

hf-sphere train classification --config vmf/mnist-vmf --seed 1
accelerate launch -m hf_sphere.commands.train few-shot --config few_shot/omniglot-conv4-5shot-spherized-cosine
"""

from collections.abc import Sequence

from hf_sphere.commands.command_line import run_job, train
from hf_sphere.training import tasks
from hf_sphere.utils.arguments import given_configs
from hf_sphere.utils.commands import COMMANDS
from hf_sphere.utils.configs import load_config

TASKS = {name.replace("_", "-"): summary for name, summary in tasks.TASKS.items()}


def main(argv: Sequence[str]) -> None:
    """Train on the task that the first argument names, with the others."""
    (name, *words), known = argv or ["--help"], dict(TASKS)
    for own, task in tasks.OWN_TASKS.items():
        known[own.replace("_", "-")] = task.summary
    if name in ("-h", "--help"):
        print("Usage: hf-sphere train TASK [options]\n")
        print("\n".join(f"  {task:<16}{summary}" for task, summary in known.items()))
        print("\nhf-sphere train TASK --help shows the options of a task. On several devices:")
        print("accelerate launch -m hf_sphere.commands.train TASK [options]")
        return
    if name.startswith("--"):  # the configuration states its task
        words, recipes = list(argv), [load_config(config).recipe for config in given_configs(argv)]
        _, _, name = COMMANDS.get(next(filter(None, recipes), ""), "").partition("train ")
        if not name:
            raise ValueError(f"hf-sphere train: name the task first; the tasks are {', '.join(TASKS)}.")
    if name.replace("_", "-") not in known:
        raise ValueError(f"hf-sphere train: there is no task {name!r}; the tasks are {', '.join(known)}.")
    train(name.replace("-", "_"), words)


if __name__ == "__main__":
    run_job("train")
