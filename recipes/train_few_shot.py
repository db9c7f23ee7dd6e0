"""The same as `hf-sphere train few-shot`, for `accelerate launch`.

accelerate launch recipes/train_few_shot.py --config few_shot/omniglot-conv4-5shot-spherized-cosine --seed 1
"""

from functools import partial

from hf_sphere.commands.command_line import run_main, train

main = partial(train, "few_shot")

if __name__ == "__main__":
    run_main(main)
