"""The same as `hf-sphere train masked-lm`, for `accelerate launch`.

accelerate launch recipes/train_masked_lm.py --config language/minilm-spherized --seed 1
"""

from functools import partial

from hf_sphere.commands.command_line import run_main, train

main = partial(train, "masked_lm")

if __name__ == "__main__":
    run_main(main)
