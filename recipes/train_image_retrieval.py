"""The same as `hf-sphere train retrieval`, for `accelerate launch`.

accelerate launch recipes/train_image_retrieval.py --config vmf/omniglot-retrieval-vmf --seed 1
"""

from functools import partial

from hf_sphere.commands.command_line import run_main, train

main = partial(train, "retrieval")

if __name__ == "__main__":
    run_main(main)
