"""Train an image classifier on the sphere.

python recipes/train_image_classification.py --config recipes/configs/spherization/digits-lenet5-spherized.yaml
accelerate launch recipes/train_image_classification.py --config <run>.yaml --learning_rate 0.01

Every argument can stand in the YAML file or on the command line, which has the last word.
"""

from collections.abc import Sequence
from pathlib import Path

from hf_sphere.training.command_line import run_recipe
from hf_sphere.training.image_run import train_images
from hf_sphere.training.tasks import CLASSIFICATION

ROOT = Path(__file__).parent.parent


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments say."""
    train_images(
        CLASSIFICATION,
        argv,
        recipe=str(Path(__file__).resolve().relative_to(ROOT.resolve())),
        card_template=ROOT / "hub_cards" / "model_card.md",
        description="Train an image classifier on the sphere.",
    )


if __name__ == "__main__":
    run_recipe(main)
