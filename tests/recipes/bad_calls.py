"""Random calls of recipes: bad command lines and configurations."""

import dataclasses
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from bad_words import random_value, random_words
from training_runs import QUICK_RUNS, TINY_BERT, load_recipe

from hf_sphere.training import find_task
from hf_sphere.utils.arguments import Arguments
from hf_sphere.utils.configs import config_names, load_config

_FOUND = "--table out/found.csv --contact_sheet out/sheet.png"
TRAINING = {quick.recipe: task for task, quick in QUICK_RUNS.items()}
OTHER_RECIPES = {
    "extract": "--model_name_or_path model --dataset_name digits --max_samples 20 --output_dir out",
    "evaluate": "--embeddings embeddings --output_dir out",
    "visualize": "--embeddings embeddings --pictures angles --output_dir out",
    "reinitialize": "--model_name_or_path model --max_samples 20 --output_dir out",
    "projections": "--model_name_or_path model --layers all --normalize false --output_dir out",
    "place": "--num_classes 4 --dim 3 --output_dir out",
    "prepare": "class_split --source images --output out",
    "index": "--model_name_or_path model --images photos --num_workers 0 --output_dir out",
    "search": f"--index index --query photos/a/0.png --top_k 3 {_FOUND}",
    "page": "--index index",
    "predict": "--model_name_or_path model --images photos --num_workers 0 --output out/photos.csv",
    "export": "--model_name_or_path model --output out/model.onnx",
    "analogies": f"--model_name_or_path {TINY_BERT} --dataset_name questions --benchmarks tiny --templates "
    "is-to-what --output_dir out",
}
RECIPES = sorted([*TRAINING, *OTHER_RECIPES])

KEPT = {"disable_tqdm", "report_to"}
"""Options that are not changed: they change the process, or use the network."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A command line.

    Attributes:
        recipe: Name of the script.
        argv: Its arguments.
    """

    recipe: str
    argv: list[str]


def arguments_of(recipe: str) -> dict[str, Any]:
    """Return the types of the arguments of a recipe by name."""
    return {field.name: hint for _, field, hint in declared_arguments(recipe)}


def declared_arguments(recipe: str) -> Iterator[tuple[type, dataclasses.Field, Any]]:
    """Yield class, field and type, without None, of every argument of a recipe."""
    classes: Any = find_task(TRAINING[recipe]).arguments if recipe in TRAINING else vars(load_recipe(recipe)).values()
    for cls in classes:
        if isinstance(cls, type) and issubclass(cls, Arguments) and cls is not Arguments:
            hints = get_type_hints(cls)
            for field in dataclasses.fields(cls):
                parts = [part for part in get_args(hints[field.name]) if part is not type(None)]
                is_union = isinstance(hints[field.name], types.UnionType)
                yield cls, field, parts[0] if is_union else hints[field.name]


def valid(recipe: str) -> list[str]:
    """Return a valid command line that takes little time, in the prepared folder."""
    if recipe not in TRAINING:
        words = OTHER_RECIPES[recipe].split()
        return [*words, "--disable_tqdm"] if "disable_tqdm" in arguments_of(recipe) else words
    quick = ["texts" if word == "TEXTS" else word for word in QUICK_RUNS[TRAINING[recipe]].argv]
    quick += ["--max_train_samples", "120", "--num_train_epochs", "1", "--cache_dir", "cache", "--output_dir", "out"]
    return [*quick, *(["--max_eval_samples", "40"] if recipe == "train_masked_lm" else [])]


def random_line(draw: random.Random, folder: Path) -> Call:
    """Return a valid command line with one to three random options, and sometimes another disorder."""
    recipe = draw.choice(RECIPES)
    argv, hints = valid(recipe), arguments_of(recipe)
    for name in draw.sample([name for name in hints if name not in KEPT], draw.randint(1, 3)):
        argv += [f"--{name}", *random_words(hints[name], draw)]
    disorder = draw.random()
    if disorder < 0.05:
        argv.pop(draw.randrange(len(argv)))
    elif disorder < 0.1:
        argv.insert(draw.randrange(len(argv)), draw.choice(["--nonsense", "stray", "--config", "--", "-x"]))
    return Call(recipe, argv)


def random_config(draw: random.Random, folder: Path) -> Call:
    """Return a valid command line with a random YAML file; sometimes a shipped one with changed bytes."""
    recipe, path = draw.choice(RECIPES), folder / "random.yaml"
    hints = arguments_of(recipe)
    if draw.random() < 0.3:
        data = bytearray(yaml.safe_dump(load_config(draw.choice(config_names())).settings).encode())
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
    else:
        names = [name for name in hints if name not in KEPT]
        names = draw.sample(names, min(len(names), draw.randint(1, 4)))
        path.write_text(yaml.safe_dump({name: random_value(draw) for name in names}))
    # The other way round, the command line would override the file.
    given = valid(recipe)
    bounded = ["--stop_after_steps", "2"] if recipe in TRAINING else []
    return Call(recipe, [*given, *bounded, "--config", str(path)])
