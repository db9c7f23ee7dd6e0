"""Train an image model that predicts a real value from the angle to a pole.

accelerate launch recipes/train_image_regression.py --config prototypes/digits-regression-slant --seed 1
"""

from functools import partial

from hf_sphere.training.command_line import run_recipe, train

main = partial(train, "regression", script=__file__)  # hf_sphere/training/tasks/regression.py

if __name__ == "__main__":
    run_recipe(main)
