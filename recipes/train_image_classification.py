"""Train an image classifier on the sphere.

accelerate launch recipes/train_image_classification.py --config spherization/digits-lenet5-spherized --seed 1
"""

from collections.abc import Sequence

from hf_sphere.training.command_line import run_recipe, train


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments define."""
    train("classification", argv, script=__file__)  # hf_sphere/training/tasks/classification.py


if __name__ == "__main__":
    run_recipe(main)
