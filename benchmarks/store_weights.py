"""Store the models of `reproduce.py --keep_models` beside their cards, as float16 if the accuracy stays the same.

python benchmarks/reproduce.py --only mnist-lenet5 --keep_models outputs/models
python benchmarks/store_weights.py --models outputs/models --data_dir ../shared/data

Each folder of `--models` has the name of a group of runs, whose first run it is of. Both kinds of weights are evaluated
as the run was; a model whose float32 weights do not have the number in `results/runs` is not stored.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import EvalResult
from reproduction.cards import CARDS
from reproduction.entries import ROOT, PlannedRun, plan, read_queue
from reproduction.results import Results
from safetensors.torch import load_file, save_file

from hf_sphere.training.model_card import write_eval_results

LARGEST = 4_000_000
"""Bytes of the weights of a card."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of models, one per group of runs")
    parser.add_argument("--data_dir", type=Path, required=True, help="local datasets")
    parser.add_argument("--results_dir", type=Path, default=ROOT / "results" / "runs", help="results files")
    args = parser.parse_args()
    results = Results.read(args.results_dir)
    runs = {run.group: run for entry in read_queue(ROOT / "benchmarks" / "queue.yaml") for run in reversed(plan(entry))}
    for model in sorted(path for path in args.models.iterdir() if path.is_dir()):
        store(model, runs[model.name], results.runs[f"{model.name}-seed0"], args.data_dir)


def store(model: Path, run: PlannedRun, result: dict, data_dir: Path) -> None:
    expected, name = result["metrics"]["eval_accuracy"], result["data"]["name"]
    with tempfile.TemporaryDirectory() as temporary:
        accuracy = {}
        for dtype in (torch.float32, torch.float16):
            folder = Path(temporary, str(dtype))
            folder.mkdir()
            for file in ("config.json", "preprocessor_config.json"):
                shutil.copy(model / file, folder)
            tensors = load_file(model / "model.safetensors")
            cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in tensors.items()}
            save_file(cast, folder / "model.safetensors", {"format": "pt"})
            (folder / "model.safetensors").chmod(0o644)
            accuracy[folder] = evaluate(folder, run, result, data_dir / name)
        exact = [folder for folder in accuracy if accuracy[folder] == expected]
        chosen = exact[-1] if exact else folder
        size = (chosen / "model.safetensors").stat().st_size
        shown = ", ".join(f"{folder.name} {value}" for folder, value in accuracy.items())
        print(f"{model.name}: run {expected}, {shown}; {chosen.name}, {size:,} bytes", flush=True)
        if not exact or size > LARGEST:
            sys.exit(f"{model.name} is not stored: it has other numbers than its run, or is too large.")
        shutil.copytree(chosen, CARDS / model.name, dirs_exist_ok=True)
    accuracy_on_test = EvalResult("image-classification", name, name, "accuracy", expected, dataset_split="test")
    write_eval_results(CARDS / model.name, [accuracy_on_test])


def evaluate(folder: Path, run: PlannedRun, result: dict, data: Path) -> float:
    """Return the accuracy of a saved model in the evaluation of the run."""
    with tempfile.TemporaryDirectory() as output:
        words = [sys.executable, run.script, *run.arguments(result["overrides"]), f"--model_name_or_path={folder}"]
        words += ["--num_train_epochs=0", f"--dataset_name={data}", f"--output_dir={output}/model", "--disable_tqdm"]
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(output, "model", "all_results.json").read_text())["eval_accuracy"]


if __name__ == "__main__":
    main()
