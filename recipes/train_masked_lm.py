"""Train a masked language model, plain or spherized.

python recipes/train_masked_lm.py --config recipes/configs/language/minilm-spherized.yaml
accelerate launch recipes/train_masked_lm.py --config <run>.yaml --learning_rate 1e-4

Every argument can stand in the YAML file or on the command line, which has the last word.
"""

from collections.abc import Sequence
from pathlib import Path

from hf_sphere.training.command_line import run_recipe
from hf_sphere.training.text_run import train_masked_lm

ROOT = Path(__file__).parent.parent


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments say."""
    train_masked_lm(
        argv,
        recipe=str(Path(__file__).resolve().relative_to(ROOT.resolve())),
        card_template=ROOT / "hub_cards" / "model_card.md",
        description="Train a masked language model, plain or spherized.",
    )


if __name__ == "__main__":
    run_recipe(main)
