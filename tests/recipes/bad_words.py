"""Random words and values for options; most of them are wrong."""

import random
from typing import Any, Literal, get_args, get_origin

USUAL = {int: ["1", "2", "3", "5", "8"], float: ["0", "0.1", "0.5", "1", "3"]}
NUMBERS = ["-1", "0", "-3", "nan", "inf", "-inf", "1e999", "1e-30", "0.5", "2", "7", "99999999999", "1" * 400, "", "x"]
TEXTS = ["", " ", "nothing", "a\nb", "a/b/c", "ä ö", "x" * 300, "--seed", "null", "[]", "%s", ".", "image", "label"]
PATHS = ["empty.json", "bytes.bin", "list.json", "texts", "no_weights", "model", "embeddings"]
PATHS += ["index", "photos"]
NAMES = ["digits", "two_clusters", "train", "test", "softmax", "vmf", "resnet18_cifar", "conv4", "cosine", "auto"]
MAPPINGS = ["{", "[1]", "{}", "{a: 1}", "{num_samples: null}", "{scale: x}", "{width: -1}", "{delta: .nan}", "{1: 2}"]
MAPPINGS += ["{reduction: nothing}", "{scaling: [1]}", "{width: 0}", "{label_smoothing: 2}", "{drop_rate: -1}", "x"]


def random_words(hint: Any, draw: random.Random) -> list[str]:
    """Return random words for an option of a type; most of them are wrong."""
    if get_origin(hint) is list:
        return [word for _ in range(draw.randint(0, 3)) for word in random_words(get_args(hint)[0], draw)]
    if draw.random() < 0.05:
        return [draw.choice([*NUMBERS, *TEXTS, *MAPPINGS])]
    if get_origin(hint) is Literal:
        return [draw.choice([str(choice) for choice in get_args(hint)])]
    if hint in (int, float):
        return [draw.choice(USUAL[hint] if draw.random() < 0.7 else NUMBERS)]
    if hint is bool:
        return [draw.choice(["true", "false"])]
    return [draw.choice(MAPPINGS if hint is not str else [*TEXTS, *PATHS, *NAMES])]


def random_value(draw: random.Random, depth: int = 2) -> Any:
    """Return a random YAML value."""
    kind = draw.randrange(7 if depth else 5)
    if kind == 5:
        return [random_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    if kind == 6:
        return {draw.choice(TEXTS): random_value(draw, depth - 1) for _ in range(draw.randint(0, 2))}
    if kind == 4:
        return draw.choice([None, True, False, b"bytes"])
    pool = draw.choice([TEXTS, NUMBERS, PATHS + NAMES, ["--overwrite_output_dir", "-1", "--seed=1"]])
    word = draw.choice(pool)
    try:
        return float(word) if draw.random() < 0.5 else int(word)
    except ValueError:
        return word
