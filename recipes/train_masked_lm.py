"""Train a masked language model, plain or spherized.

python recipes/train_masked_lm.py --config recipes/configs/language/minilm-spherized.yaml
accelerate launch recipes/train_masked_lm.py --config <run>.yaml --learning_rate 1e-4

Every argument can be set in the YAML file or on the command line, which takes precedence.
"""

from collections.abc import Sequence

from hf_sphere.training.command_line import run_recipe, train
from hf_sphere.training.tasks.masked_lm import MaskedLanguageModeling


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments define."""
    train(MaskedLanguageModeling, argv, script=__file__)


if __name__ == "__main__":
    run_recipe(main)
