"""Train embeddings for open-set retrieval: training on some classes, evaluation on others.

accelerate launch recipes/train_image_retrieval.py --config vmf/omniglot-retrieval-vmf --seed 1
"""

from functools import partial

from hf_sphere.training.command_line import run_recipe, train

main = partial(train, "retrieval", script=__file__)  # hf_sphere/training/tasks/retrieval.py

if __name__ == "__main__":
    run_recipe(main)
