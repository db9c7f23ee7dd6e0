"""Train an image model that predicts a class and a real value on one sphere.

accelerate launch recipes/train_joint_prediction.py --config prototypes/digits-joint-slant --seed 1
"""

from functools import partial

from hf_sphere.training.command_line import run_recipe, train

main = partial(train, "joint", script=__file__)  # hf_sphere/training/tasks/joint.py

if __name__ == "__main__":
    run_recipe(main)
