"""The same as `hf-sphere train joint`, for `accelerate launch`.

accelerate launch recipes/train_joint_prediction.py --config prototypes/digits-joint-slant --seed 1
"""

from functools import partial

from hf_sphere.commands.command_line import run_main, train

main = partial(train, "joint")

if __name__ == "__main__":
    run_main(main)
