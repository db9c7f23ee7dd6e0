"""Train twelve small seeded configurations, one per task and system, with this tree and an older commit; compare them.

git worktree add ../before COMMIT
python benchmarks/equal_runs.py ../before

Compares all weights of the saved models and all numbers of `all_results.json`; the data are bundled or made. Writes
`results/equal_runs.json`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import RESULTS, report, row
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
DIGITS = "--dataset_name digits --max_train_samples 400 --num_train_epochs 2"
SMALL = f"{DIGITS} --max_eval_samples 200 --image_size 28 --backbone lenet5_bn"
RUNS = {
    "spherization": f"classification {SMALL} --head spherized --optim adam --learning_rate 0.002",
    "prototypes": f"classification {SMALL} --head prototype --embedding_dim 9 --optim adam --learning_rate 0.002",
    "von Mises-Fisher": (
        f"classification {SMALL} --head vmf --embedding_dim 3 --optim sgd --learning_rate 0.1 --momentum 0.9 "
        "--episode_classes 10 --episode_examples 8 --episodes_per_epoch 5"
    ),
    "Adam-SRT": f"classification {SMALL} --head softmax --optim adam_srt --learning_rate 0.002 --weight_decay 0.001",
    "SGD-MRT, arcface": f"classification {SMALL} --head arcface --optim sgd_mrt --learning_rate 0.1 --momentum 0.9",
    "Muon-hyperball, label noise": (
        f"classification {SMALL} --head cosine --optim muon_hyperball --learning_rate 0.01 --label_noise 0.2"
    ),
    "hyperplanes, validation": (
        f"classification {DIGITS} --max_eval_samples 200 --backbone lenet9 --head angular --optim sgd "
        "--learning_rate 0.01 --momentum 0.9 --validation_fraction 0.2 --load_best_model_at_end true"
    ),
    "retrieval": f"retrieval {SMALL} --head proxy_anchor --optim adam_s --learning_rate 0.002 --train_classes 6",
    "regression": f"regression {SMALL} --computed_value slant --value_range -20 20 --out_of_range clip --optim adam "
    "--embedding_dim 2",
    "joint prediction": (
        f"joint {SMALL} --computed_value slant --value_range -20 20 --out_of_range clip --optim adam "
        "--head prototype --embedding_dim 10"
    ),
    "few-shot": (
        "few-shot --dataset_name digits --train_classes 6 --way 3 --shot 1 --episodes_per_epoch 20 "
        "--eval_episodes 100 --backbone linear_embedding --metric cosine --spherization '{{scaling: 1.0}}' "
        "--num_train_epochs 2 --learning_rate 0.003"
    ),
    "spherized language model": (
        "masked-lm --model_name_or_path {bert} --dataset_name {texts} --max_seq_length 32 --num_train_epochs 2 "
        "--per_device_train_batch_size 8 --learning_rate 0.003 --spherized --spherized_layers=-1 "
        "--per_device_eval_batch_size 8"
    ),
}


ROUNDED = {"von Mises-Fisher"}
"""Runs that differ by rounding: the head samples and differentiates with fewer kernels, in another order of sums."""


def write_texts(folder: Path) -> None:
    """Write texts for the language model."""
    words = ["sphere", "circle", "angle", "length", "point", "plane", "norm", "mean"]
    for split, count in (("train", 120), ("validation", 40), ("test", 40)):
        lines = (" ".join(words[(7 * i + i * j + j) % 8] for j in range(12)) for i in range(count))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")


def train(tree: Path, command: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train with the library of a tree; return weights and results."""
    environment = os.environ | {"PYTHONPATH": str(tree.resolve()), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    words = shlex.split(command.format(bert=ROOT / "tests/golden/analogy/tiny-bert", texts=folder.parent / "texts"))
    program = [sys.executable, "-P", "-m", "hf_sphere.commands.train", *words, "--seed", "3", "--disable_tqdm"]
    ended = subprocess.run([*program, "--output_dir", folder], env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{tree}: {command}\n{ended.stderr[-2000:]}")
    results = json.loads((folder / "all_results.json").read_text())
    numbers = {name: torch.tensor(value) for name, value in results.items() if isinstance(value, int | float)}
    timed = {name for name in numbers if "runtime" in name or "per_second" in name or "seconds" in name}
    found = {name: value for name, value in numbers.items() if name not in timed}
    return found | load_file(folder / "model.safetensors")


def main() -> None:
    """Compare the runs of both trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the older tree")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="others keep their rows")
    args = parser.parse_args()
    rows = {}
    if (known := RESULTS / "equal_runs.json").exists():
        rows = {each["what"]: each for each in json.loads(known.read_text())["rows"]}
    with tempfile.TemporaryDirectory() as parent:
        (texts := Path(parent) / "texts").mkdir()
        write_texts(texts)
        for number, name in enumerate(args.only):
            now, before = (
                train(tree, RUNS[name], Path(parent) / f"{number}-{part}")
                for part, tree in (("now", ROOT), ("before", args.before))
            )
            if now.keys() != before.keys():
                raise RuntimeError(f"{name} has other weights or results: {now.keys() ^ before.keys()}")
            unequal = sum(not torch.equal(value, before[key]) for key, value in now.items())
            found = [row(f"{name}: unequal weights and results of {len(now)}", unequal, None if name in ROUNDED else 0)]
            if name in ROUNDED:
                differences = [
                    float((a - before[key]).norm() / before[key].norm())
                    for key, a in now.items()
                    if a.is_floating_point() and a.any()
                ]
                found.append(row(f"{name}: largest relative difference", max(differences), at_most=1e-4))
            rows |= {each["what"]: each for each in found}
            print(*found, sep="\n", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=args.before, capture_output=True, text=True, check=True)
    report("equal_runs", [*rows.values()], before=commit.stdout.strip(), runs=RUNS)


if __name__ == "__main__":
    main()
