"""Train an image model that predicts a real value from the angle to a pole.

python recipes/train_image_regression.py --config prototypes/digits-regression-slant
accelerate launch recipes/train_image_regression.py --config <run>.yaml --learning_rate 0.01

Every argument can be set in the YAML file or on the command line, which takes precedence.
"""

from functools import partial

from hf_sphere.training.command_line import run_recipe, train

main = partial(train, "regression", script=__file__)  # hf_sphere/training/tasks/regression.py

if __name__ == "__main__":
    run_recipe(main)
