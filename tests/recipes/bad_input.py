"""Call recipes with random bad command lines, configurations and damaged files.

python tests/recipes/bad_input.py --lines 300 --configs 200 --files 100

A call must work, or end with an exit code other than 0 and an error of one line; a traceback, an empty message or more
than a minute of CPU time is a failure. Everything random follows from the seed of a call. The recipes are called in
this process, since importing torch and transformers takes seconds.
"""

import argparse
import contextlib
import dataclasses
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from PIL import Image
from training_runs import QUICK_RUNS, ROOT, TINY_BERT, make_sentences

from hf_sphere.training import find_task
from hf_sphere.training.command_line import run_recipe
from hf_sphere.utils.arguments import Arguments

SECONDS = 60
ENDS = {0: "worked", 2: "refused by the parser", 1: "refused by the recipe"}
"""How a call may end, by exit code."""

TRAINING = {quick.recipe: task for task, quick in QUICK_RUNS.items()}
OTHER_RECIPES = {
    "extract_embeddings": "--model_name_or_path model --dataset_name digits --max_samples 20 --output_dir out",
    "evaluate_embeddings": "--embeddings embeddings --output_dir out",
    "visualize_embeddings": "--embeddings embeddings --pictures angles --output_dir out",
    "reinitialize_layers": "--model_name_or_path model --max_samples 20 --output_dir out",
    "compute_projections": "--model_name_or_path model --layers all --normalize false --output_dir out",
    "place_prototypes": "--num_classes 4 --dim 3 --output_dir out",
    "prepare_images": "class_split --source images --output out",
    "evaluate_analogies": f"--model_name_or_path {TINY_BERT} --dataset_name questions --benchmarks tiny --templates "
    "is-to-what --num_shuffles 3 --output_dir out",
}
RECIPES = sorted([*TRAINING, *OTHER_RECIPES])
READERS = {
    "model": ["extract_embeddings", "reinitialize_layers", "compute_projections", "train_image_classification"],
    "embeddings": ["evaluate_embeddings", "visualize_embeddings"],
}
"""Recipes that read the files of a folder."""

KEPT = {"disable_tqdm", "full_determinism", "report_to", "push_to_hub"}
"""Options that are not changed: they change the process, or use the network."""

USUAL = {int: ["1", "2", "3", "5", "8"], float: ["0", "0.1", "0.5", "1", "3"]}
NUMBERS = ["-1", "0", "-3", "nan", "inf", "-inf", "1e999", "1e-30", "0.5", "2", "7", "99999999999", "1" * 400, "", "x"]
TEXTS = ["", " ", "nothing", "a\nb", "a/b/c", "ä ö", "x" * 300, "--seed", "null", "[]", "%s", ".", "image", "label"]
PATHS = [
    "empty.json",
    "bytes.bin",
    "list.json",
    "/dev/null",
    "/dev/null/x",
    "texts",
    "no_weights",
    "model",
    "embeddings",
]
NAMES = ["digits", "two_clusters", "train", "test", "softmax", "vmf", "resnet18_cifar", "conv4", "cosine", "auto"]
MAPPINGS = ["{", "[1]", "{}", "{a: 1}", "{num_samples: null}", "{scale: x}", "{width: -1}", "{delta: .nan}", "{1: 2}"]
MAPPINGS += ["{reduction: nothing}", "{scaling: [1]}", "{width: 0}", "{label_smoothing: 2}", "{drop_rate: -1}", "x"]


class TooLongError(BaseException):
    """A call took too long; not an `Exception`, so that nobody catches it."""


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
    if str(ROOT / "recipes") not in sys.path:
        sys.path.insert(0, str(ROOT / "recipes"))
    return import_module(recipe)


def prepare(folder: Path) -> None:
    """Create the inputs of the recipes in a folder: a model, embeddings, texts, and files that are none of these."""
    folder.mkdir(exist_ok=True)
    (folder / "texts").mkdir()
    for seed, split in enumerate(("train", "validation", "test")):
        (folder / "texts" / f"{split}.txt").write_text(make_sentences(60, seed))
    (folder / "images" / "images").mkdir(parents=True)
    (folder / "questions" / "tiny").mkdir(parents=True)
    for split in ("train", "val", "test"):
        names = [f"{split}-{number}.jpg" for number in range(4)]
        for number, name in enumerate(names):
            Image.effect_noise((8, 8), 10 + number).save(folder / "images" / "images" / name)
        rows = "".join(f"{name},{split}-{number % 2}\n" for number, name in enumerate(names))
        (folder / "images" / f"{split}.csv").write_text(f"filename,label\n{rows}")
    asked = {"stem": [["cat", "dog"]] * 3, "choice": [[["red", "sea"], ["man", "king"]]] * 3, "answer": [0, 1, 0]}
    for split in ("validation", "test"):
        Dataset.from_dict(asked).to_parquet(folder / "questions" / "tiny" / f"{split}-00000-of-00001.parquet")
    (folder / "empty.json").touch()
    (folder / "list.json").write_text("[1, 2]")
    (folder / "bytes.bin").write_bytes(bytes(range(256)) * 4)
    with contextlib.chdir(folder):
        words = [*valid("train_image_classification"), "--snapshot_epochs", "1", "--output_dir", "model"]
        for call in (Call("train_image_classification", words), Call("extract_embeddings", [])):
            argv = call.argv or [*OTHER_RECIPES[call.recipe].split()[:-1], "embeddings", "--disable_tqdm"]
            code, printed = run(Call(call.recipe, argv))
            assert code == 0, printed
    shutil.copytree(folder / "model", folder / "no_weights", ignore=lambda *_: ["snapshots", "best", "checkpoint-3"])
    (folder / "no_weights" / "model.safetensors").unlink()


def valid(recipe: str) -> list[str]:
    """Return a valid command line that takes little time, in the prepared folder."""
    if recipe not in TRAINING:
        words = OTHER_RECIPES[recipe].split()
        return [*words, "--disable_tqdm"] if "disable_tqdm" in arguments_of(recipe) else words
    quick = ["texts" if word == "TEXTS" else word for word in QUICK_RUNS[TRAINING[recipe]].argv]
    quick += ["--max_train_samples", "120", "--num_train_epochs", "1", "--cache_dir", "cache", "--output_dir", "out"]
    return [*quick, *(["--max_eval_samples", "40"] if recipe == "train_masked_lm" else [])]


def random_line(draw: random.Random) -> Call:
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


def random_config(draw: random.Random, folder: Path) -> Call:
    """Return a valid command line with a random YAML file; sometimes a shipped one with changed bytes."""
    recipe, path = draw.choice(RECIPES), folder / "random.yaml"
    hints = arguments_of(recipe)
    if draw.random() < 0.3:
        data = bytearray(draw.choice(sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))).read_bytes())
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
    else:
        names = draw.sample([name for name in hints if name not in KEPT], draw.randint(1, 4))
        path.write_text(yaml.safe_dump({name: random_value(draw) for name in names}))
    # The other way round, the command line would override the file.
    given = valid(recipe)
    bounded = ["--max_steps", "2"] if recipe in TRAINING else []
    return Call(recipe, [*given, *bounded, "--config", str(path)])


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


def random_damage(draw: random.Random, folder: Path) -> Call:
    """Damage a file of the model or the embeddings, and return a command line that reads it."""
    kind = draw.choice(sorted(READERS))
    copy = folder / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / kind, copy, ignore=lambda *_: ["checkpoint-3", "best"])
    path = draw.choice(sorted(path for path in copy.rglob("*") if path.is_file() and path.name != "README.md"))
    damage(path, draw)
    recipe = draw.choice(READERS[kind])
    argv = ["damaged" if word == kind else word for word in valid(recipe)]
    if recipe in TRAINING:
        argv = [word for word in argv if word not in ("softmax", "--head")]
        argv = [
            *argv[: argv.index("--backbone")],
            *argv[argv.index("--crop_padding") :],
            "--model_name_or_path",
            "damaged",
        ]
    return Call(recipe, argv)


def damage(path: Path, draw: random.Random) -> None:
    """Truncate or remove a file, replace its content, or change some of its bytes or JSON values."""
    data = bytearray(path.read_bytes())
    change = draw.choice(["truncate", "remove", "replace", "bytes", "value"])
    if change == "remove":
        path.unlink()
        return
    if change == "truncate":
        data = data[: draw.randrange(len(data))]
    elif change == "replace":
        data = bytearray(draw.choice([b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 5000, b'{"a": NaN}']))
    elif change == "value" and path.suffix == ".json":
        lines = data.decode().splitlines()
        place = draw.randrange(len(lines))
        name, colon, _ = lines[place].partition(":")
        lines[place] = f"{name}{colon} {draw.choice(['null', '-1', '[]', '{}', '1e400', 'true', chr(34) * 2])}"
        lines[place] += "," if place < len(lines) - 2 else ""
        data = bytearray("\n".join(lines).encode())
    else:
        for _ in range(draw.randint(1, 5)):
            data[draw.randrange(min(len(data), 400))] = draw.randrange(256)
    path.write_bytes(data)


def run(call: Call) -> tuple[int, str]:
    """Call a recipe; return its exit code (-1 for a traceback or one that took too long) and what it printed."""

    def stop(*_: object) -> None:
        raise TooLongError

    shutil.rmtree("out", ignore_errors=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    printed, errors, code = io.StringIO(), io.StringIO(), 0
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_recipe(lambda _: load(call.recipe).main(call.argv))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except (Exception, TooLongError):
        code = -1
        traceback.print_exc(file=errors)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        torch.set_flush_denormal(False)
    return code, errors.getvalue()


def problem(code: int, printed: str) -> str | None:
    """Return what is wrong with how a call ended, or None."""
    if code == 0:
        return None
    if code == -1 or "Traceback" in printed:
        return f"a traceback\n{printed[-3000:]}"
    messages = [line for line in printed.splitlines() if line.startswith("Error: ") or ": error: " in line]
    if len(messages) != 1 or messages[0].endswith((": ", "Error:")) or not messages[0].partition(": ")[2].strip():
        return f"not one line: {printed[-1000:]!r}"
    return None


def attack(kind: str, seed: int, folder: Path) -> tuple[int, str | None]:
    """Make one call in the prepared folder; return its exit code and what is wrong with it."""
    draw = random.Random(f"{kind} {seed}")
    with contextlib.chdir(folder):
        if kind == "line":
            call = random_line(draw)
        else:
            call = random_config(draw, folder) if kind == "config" else random_damage(draw, folder)
        code, printed = run(call)
    wrong = problem(code, printed)
    return code, None if wrong is None else f"{kind} {seed}: {call.recipe} {call.argv}: {wrong}"


def main(argv: Sequence[str] | None = None) -> None:
    """Make the calls and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", type=int, default=300, help="number of command lines")
    parser.add_argument("--configs", type=int, default=200, help="number of configurations")
    parser.add_argument("--files", type=int, default=100, help="number of damaged files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first call of each kind")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="bad-input-"))
    os.environ["HF_HOME"] = str(folder / "hf")
    prepare(folder)
    failed = 0
    for kind, count in {"line": args.lines, "config": args.configs, "file": args.files}.items():
        ended: Counter[str] = Counter()
        for seed in range(args.seed, args.seed + count):
            code, wrong = attack(kind, seed, folder)
            ended["failed" if wrong else ENDS[code]] += 1
            if wrong:
                print(wrong, flush=True)
        failed += ended["failed"]
        print(f"{count} x {kind}: {', '.join(f'{ended[end]} {end}' for end in (*ENDS.values(), 'failed'))}")
    shutil.rmtree(folder)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
