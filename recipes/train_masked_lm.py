"""Train a masked language model, plain or spherized.

accelerate launch recipes/train_masked_lm.py --config language/minilm-spherized --seed 1
"""

from functools import partial

from hf_sphere.training.command_line import run_recipe, train

main = partial(train, "masked_lm", script=__file__)  # hf_sphere/training/tasks/masked_lm.py

if __name__ == "__main__":
    run_recipe(main)
