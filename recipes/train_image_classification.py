"""The same as `hf-sphere train classification`, for `accelerate launch`.

accelerate launch recipes/train_image_classification.py --config spherization/digits-lenet5-spherized --seed 1
"""

from functools import partial

from hf_sphere.commands.command_line import run_main, train

main = partial(train, "classification")

if __name__ == "__main__":
    run_main(main)
