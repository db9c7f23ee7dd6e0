"""Train embeddings for open-set retrieval: training on some classes, evaluation on others.

accelerate launch recipes/train_image_retrieval.py --config vmf/omniglot-retrieval-vmf --seed 1
"""

from collections.abc import Sequence

from hf_sphere.training.command_line import run_recipe, train


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and save as the arguments define."""
    train("retrieval", argv, script=__file__)  # hf_sphere/training/tasks/retrieval.py


if __name__ == "__main__":
    run_recipe(main)
