"""Train a masked language model, plain or spherized.

python recipes/train_masked_lm.py --config language/minilm-spherized
accelerate launch recipes/train_masked_lm.py --config <run>.yaml --learning_rate 1e-4

Every argument can be set in the YAML file or on the command line, which takes precedence.
"""

from collections.abc import Sequence

from hf_sphere.training.command_line import run_recipe, train


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments define."""
    train("masked_lm", argv, script=__file__)  # hf_sphere/training/tasks/masked_lm.py


if __name__ == "__main__":
    run_recipe(main)
