"""Train a few-shot classifier on episodes, to recognize unseen classes from a few examples of each.

accelerate launch recipes/train_few_shot.py --config few_shot/omniglot-conv4-5shot-spherized-cosine --seed 1
"""

from functools import partial

from hf_sphere.training.command_line import run_recipe, train

main = partial(train, "few_shot", script=__file__)  # hf_sphere/training/tasks/few_shot.py

if __name__ == "__main__":
    run_recipe(main)
