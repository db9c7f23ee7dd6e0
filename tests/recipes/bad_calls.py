"""Random calls of recipes: bad command lines and configurations, damaged and crafted folders, odd inputs, outputs."""

import contextlib
import dataclasses
import os
import random
import re
import shutil
import stat
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from bad_words import random_value, random_words
from crafted_folders import CONFIGURATIONS, INVALID, ODD
from file_changes import ESCAPE, damage
from training_runs import QUICK_RUNS, ROOT, TINY_BERT

from hf_sphere.training import find_task
from hf_sphere.utils.arguments import Arguments
from hf_sphere.utils.commands import COMMANDS
from hf_sphere.utils.configs import config_names, load_config

_FOUND = "--table out/found.csv --contact_sheet out/sheet.png"
TRAINING = {quick.recipe: task for task, quick in QUICK_RUNS.items()}
OTHER_RECIPES = {
    "extract_embeddings": "--model_name_or_path model --dataset_name digits --max_samples 20 --output_dir out",
    "evaluate_embeddings": "--embeddings embeddings --output_dir out",
    "visualize_embeddings": "--embeddings embeddings --pictures angles --output_dir out",
    "reinitialize_layers": "--model_name_or_path model --max_samples 20 --output_dir out",
    "compute_projections": "--model_name_or_path model --layers all --normalize false --output_dir out",
    "place_prototypes": "--num_classes 4 --dim 3 --output_dir out",
    "prepare_images": "class_split --source images --output out",
    "build_index": "--model_name_or_path model --images photos --num_workers 0 --output_dir out",
    "search_images": f"--index index --query photos/a/0.png --top_k 3 {_FOUND}",
    "search_page": "--index index",
    "predict_images": "--model_name_or_path model --images photos --num_workers 0 --output out/photos.csv",
    "export_onnx": "--model_name_or_path model --output out/model.onnx",
    "evaluate_analogies": f"--model_name_or_path {TINY_BERT} --dataset_name questions --benchmarks tiny --templates "
    "is-to-what --output_dir out",
}
RECIPES = sorted([*TRAINING, *OTHER_RECIPES])
_MODEL_READERS = ["extract_embeddings", "reinitialize_layers", "compute_projections", "train_image_classification"]
READERS = {
    "model": [*_MODEL_READERS, "build_index", "predict_images", "export_onnx"],
    "embeddings": ["evaluate_embeddings", "visualize_embeddings"],
    "index": ["search_images", "search_page", "build_index --images more --add_to index --num_workers 0"],
    "ivf": [f"search_images --index ivf --query photos/a/0.png {_FOUND}", "search_page --index ivf"],
    "prototypes": ["train_image_classification"],
    "photos": [
        *("build_index", "predict_images", f"search_images --index index --query photos --top_k 2 {_FOUND}"),
        "extract_embeddings --model_name_or_path model --dataset_name photos --cache_dir cache --output_dir out",
    ],
}
"""Recipes that read the files of a folder, by its name, some with a command line that differs from `OTHER_RECIPES`."""

SPECIAL_INPUTS = ["zero", "null", "fifo", "loop", "dangling", "empty.json", "bytes.bin", ".", "a\nb", ESCAPE]
SPECIAL_INPUTS += ["null/x", "x" * 300, "/".join("x" * 2000), "", " ", "~", "file:///etc", "a\0b", "\udcff"]
"""What is no input: devices, a FIFO, broken links, and odd texts."""

REPLACING = {"build_index", "extract_embeddings", "search_images", "predict_images", "export_onnx"}
"""Recipes whose output is a folder that they replace, or a file."""

OUTPUTS = ["/proc/out", "/sys/out", ".", "..", "", " ", "-x", "x" * 300, "scratch/" + "x" * 300, "null/x"]
OUTPUTS += ["bytes.bin/x"]
OUTPUTS += ["fifo", "null", "zero", "full", "loop", "scratch/kept", "scratch/kept/x.txt", "scratch/locked/x"]
OUTPUTS += ["scratch/linked", "scratch/dangling", "scratch/new", "scratch/a/b", "scratch/a\nb", f"scratch/{ESCAPE}"]
"""Outputs; those in `scratch` may work."""

KEPT = {"disable_tqdm", "full_determinism", "report_to", "push_to_hub"}
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
    classes: Any = find_task(TRAINING[recipe]).arguments if recipe in TRAINING else vars(load(recipe)).values()
    for cls in classes:
        if isinstance(cls, type) and issubclass(cls, Arguments) and cls is not Arguments:
            hints = get_type_hints(cls)
            for field in dataclasses.fields(cls):
                parts = [part for part in get_args(hints[field.name]) if part is not type(None)]
                is_union = isinstance(hints[field.name], types.UnionType)
                yield cls, field, parts[0] if is_union else hints[field.name]


def load(recipe: str) -> Any:
    """Import a recipe."""
    if recipe not in TRAINING:
        return import_module(f"hf_sphere.commands.{COMMANDS[recipe]}")
    if str(ROOT / "recipes") not in sys.path:
        sys.path.insert(0, str(ROOT / "recipes"))
    return import_module(recipe)


def make_specials(folder: Path) -> None:
    """Create devices, a FIFO and broken links in a folder, where they are missing."""
    for name, numbers in {"null": (1, 3), "zero": (1, 5), "full": (1, 7)}.items():
        with contextlib.suppress(OSError):  # not everyone may create devices; those of the machine could be replaced
            os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(*numbers))
    with contextlib.suppress(FileExistsError):
        os.mkfifo(folder / "fifo")
    for name, target in {"loop": "loop", "dangling": "nowhere"}.items():
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(target)


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


def random_damage(draw: random.Random, folder: Path) -> Call:
    """Damage a file of a folder, and return a command line that reads it."""
    kind = draw.choice(sorted(set(READERS) - {"photos"}))
    copy = copy_of(kind, folder)
    path = draw.choice(sorted(path for path in copy.rglob("*") if path.is_file() and path.name != "README.md"))
    damage(path, draw)
    return reading(kind, draw)


def copy_of(kind: str, folder: Path) -> Path:
    """Copy a folder to `damaged`."""
    shutil.rmtree(folder / "damaged", ignore_errors=True)
    return Path(shutil.copytree(folder / kind, folder / "damaged", ignore=lambda *_: ["checkpoint-3", "best"]))


def reading(kind: str, draw: random.Random) -> Call:
    """Return a command line that reads `damaged` instead of a folder."""
    recipe, *given = draw.choice(READERS[kind]).split()
    argv = [re.sub(rf"^{kind}(?=/|$)", "damaged", word) for word in [*given, *([] if given else valid(recipe))]]
    if "disable_tqdm" in arguments_of(recipe) and "--disable_tqdm" not in argv:
        argv.append("--disable_tqdm")
    if kind == "prototypes":
        argv[argv.index("softmax")] = "prototype"
        argv += ["--prototypes_file", "damaged/prototypes.safetensors"]
    elif recipe in TRAINING:
        argv = [word for word in argv if word not in ("softmax", "--head")]
        argv = [*argv[: argv.index("--backbone")], *argv[argv.index("--crop_padding") :]]
        argv += ["--model_name_or_path", "damaged"]
    return Call(recipe, argv)


def crafted_folder(draw: random.Random, folder: Path) -> tuple[Call, str, bool]:
    """Make a crafted folder; return a command line that reads it, what it is, and whether it must be refused."""
    tables = [(kind, table) for table in (INVALID, ODD) for kind in table]
    kind, table = draw.choice(tables)
    name = draw.choice(sorted(table[kind]))
    table[kind][name](copy_of(kind, folder))
    call = reading(kind, draw)
    builds = call.recipe != "compute_projections"  # it only reads the weights of a model
    return call, f"{kind} with {name}", table is INVALID and builds


def special_input(draw: random.Random, folder: Path) -> tuple[Call, str]:
    """Return a command line with an input that is none, or with a crafted configuration."""
    if draw.random() < 0.3:
        recipe, name = draw.choice(RECIPES), draw.choice(sorted(CONFIGURATIONS))
        (folder / "random.yaml").write_text(CONFIGURATIONS[name])
        return Call(recipe, [*valid(recipe), "--config", "random.yaml"]), name
    recipe = draw.choice(sorted(OTHER_RECIPES))
    argv = valid(recipe)
    inputs = {*READERS, "images", "questions"}
    places = [place for place, word in enumerate(argv) if word.split("/")[0] in inputs]
    word = draw.choice(SPECIAL_INPUTS)
    if not places:
        return Call(recipe, [*argv, "--config", word]), word
    argv[draw.choice(places)] = word
    return Call(recipe, argv), word


def special_output(draw: random.Random, folder: Path) -> tuple[Call, Path]:
    """Return a command line with an output that is odd or impossible, and that output."""
    make_specials(folder)
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    for name in ("kept", "target", "locked"):
        (scratch / name).mkdir(parents=True)
    (scratch / "kept" / "x.txt").write_text("kept")
    (scratch / "linked").symlink_to(scratch / "target")
    (scratch / "dangling").symlink_to(scratch / "nowhere")
    recipe = draw.choice(sorted({*OTHER_RECIPES, "train_image_classification"} - {"search_page"}))
    argv = valid(recipe)
    options = [
        place for place, word in enumerate(argv) if word in ("--output_dir", "--output", "--table", "--contact_sheet")
    ]
    place = draw.choice(options) + 1
    suffix = Path(argv[place]).suffix
    results = recipe not in REPLACING  # which are written beside other files
    output = draw.choice([word for word in OUTPUTS if not (results and word in (".", ".."))])
    if suffix and draw.random() < 0.8:
        output += suffix
        for name in ("linked", "dangling"):
            (scratch / f"{name}{suffix}").symlink_to(scratch / "target" / ("file" if name == "linked" else "nothing"))
        (scratch / "target" / "file").write_text("old")
    argv[place] = output
    (scratch / "locked").chmod(0o555)
    overwrite = {"overwrite_output_dir", "overwrite_output"} & set(arguments_of(recipe))
    if overwrite and draw.random() < 0.5:
        argv.append(f"--{overwrite.pop()}")
    return Call(recipe, argv), Path(output)
