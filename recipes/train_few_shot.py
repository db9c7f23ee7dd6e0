"""Train embeddings on episodes of a few classes, to tell unseen classes apart by a few examples of each.

python recipes/train_few_shot.py --config recipes/configs/few_shot/omniglot-conv4-5shot-spherized-cosine.yaml
accelerate launch recipes/train_few_shot.py --config <run>.yaml --learning_rate 0.01

Every argument can stand in the YAML file or on the command line, which has the last word.
"""

from collections.abc import Sequence
from pathlib import Path

from hf_sphere.training.command_line import run_recipe
from hf_sphere.training.image_run import train_images
from hf_sphere.training.tasks import FEW_SHOT

ROOT = Path(__file__).parent.parent


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments say."""
    train_images(
        FEW_SHOT,
        argv,
        recipe=str(Path(__file__).resolve().relative_to(ROOT.resolve())),
        card_template=ROOT / "hub_cards" / "model_card.md",
        description="Train embeddings on episodes of a few classes, to tell unseen ones apart by a few examples each.",
    )


if __name__ == "__main__":
    run_recipe(main)
