"""Train embeddings on some classes, and search among images of others: open-set retrieval.

python recipes/train_image_retrieval.py --config recipes/configs/vmf/omniglot-retrieval-vmf.yaml
accelerate launch recipes/train_image_retrieval.py --config <run>.yaml --learning_rate 0.01

Every argument can stand in the YAML file or on the command line, which has the last word.
"""

from collections.abc import Sequence
from pathlib import Path

from hf_sphere.training.command_line import run_recipe
from hf_sphere.training.image_run import train_images
from hf_sphere.training.tasks import RETRIEVAL

ROOT = Path(__file__).parent.parent


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments say."""
    train_images(
        RETRIEVAL,
        argv,
        recipe=str(Path(__file__).resolve().relative_to(ROOT.resolve())),
        card_template=ROOT / "hub_cards" / "model_card.md",
        description="Train embeddings on some classes, and search among images of others.",
    )


if __name__ == "__main__":
    run_recipe(main)
