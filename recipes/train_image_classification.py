"""Train an image classifier on the sphere.

accelerate launch recipes/train_image_classification.py --config spherization/digits-lenet5-spherized --seed 1
"""

from functools import partial

from hf_sphere.training.command_line import run_recipe, train

main = partial(train, "classification", script=__file__)  # hf_sphere/training/tasks/classification.py

if __name__ == "__main__":
    run_recipe(main)
