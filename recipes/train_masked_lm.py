"""Train a masked language model, plain or spherized.

python recipes/train_masked_lm.py --config language/minilm-spherized
accelerate launch recipes/train_masked_lm.py --config <name or file> --learning_rate 1e-4
"""

from collections.abc import Sequence

from hf_sphere.training.command_line import run_recipe, train


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments define."""
    train("masked_lm", argv, script=__file__)  # hf_sphere/training/tasks/masked_lm.py


if __name__ == "__main__":
    run_recipe(main)
