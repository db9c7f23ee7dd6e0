"""Train an image classifier on the sphere.

python recipes/train_image_classification.py --config spherization/digits-lenet5-spherized
accelerate launch recipes/train_image_classification.py --config <run>.yaml --learning_rate 0.01

Every argument can be set in the YAML file or on the command line, which takes precedence.
"""

from collections.abc import Sequence

from hf_sphere.training.command_line import run_recipe, train


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments define."""
    train("classification", argv, script=__file__)  # hf_sphere/training/tasks/classification.py


if __name__ == "__main__":
    run_recipe(main)
