"""The same as `hf-sphere train regression`, for `accelerate launch`.

accelerate launch recipes/train_image_regression.py --config prototypes/digits-regression-slant --seed 1
"""

from functools import partial

from hf_sphere.commands.command_line import run_main, train

main = partial(train, "regression")

if __name__ == "__main__":
    run_main(main)
