"""Train an image model that predicts a real value from the angle to a pole.

accelerate launch recipes/train_image_regression.py --config prototypes/digits-regression-slant --seed 1
"""

from collections.abc import Sequence

from hf_sphere.training.command_line import run_recipe, train


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments define."""
    train("regression", argv, script=__file__)  # hf_sphere/training/tasks/regression.py


if __name__ == "__main__":
    run_recipe(main)
