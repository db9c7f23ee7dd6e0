"""Train one setting with several optimizers, one run after another, and plot the comparison.

python recipes/sweep_optimizers.py --setting cifar10-resnet20 --optimizers adam adam_srt --seeds 0 1 2
python recipes/sweep_optimizers.py --setting cifar10-resnet20 --num_train_epochs 3 --output_dir outputs/short

Each run is `train_image_classification.py` with `configs/adamsrt/<setting>-<optimizer>.yaml`; it receives the arguments
that are unknown here. Finished runs are not repeated and interrupted runs are resumed, so the same command continues a
sweep, also on several machines or devices that share its folder, with different optimizers or seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_sphere.training.command_line import run_recipe
from hf_sphere.utils.files import write_json

RECIPES = Path(__file__).parent
CONFIGS = RECIPES / "configs" / "adamsrt"
OPTIMIZERS = ["sgd", "adam", "adamw", "adam_g", "sgd_mrt", "adam_s", "adam_srt"]
"""Those with a configuration for every setting, in the order of the paper."""


def main(argv: Sequence[str] | None = None) -> None:
    """Start the missing runs, then compare all finished ones."""
    args, rest = parse(argv)
    from hf_sphere.training.output_dir import RESULTS_FILE, list_checkpoints
    from hf_sphere.visualization import plot_training_curves

    folder = Path(args.output_dir or f"outputs/adamsrt/{args.setting}-sweep")
    check_same_sweep(folder, args.setting, rest)
    stopped = []
    for seed in args.seeds:
        for optimizer in args.optimizers:
            run = folder / f"{optimizer}-seed{seed}"
            if (run / RESULTS_FILE).is_file():
                print(f"{run}: already finished")
                continue
            print(f"{run}: {'resuming' if list_checkpoints(run) else 'starting'}", flush=True)
            status = subprocess.run(command(args.setting, optimizer, seed, run, rest)).returncode
            if status == 130:
                raise KeyboardInterrupt
            if status:
                stopped.append(f"{optimizer} with seed {seed}")
    results = gather(folder)
    if results:
        print(table(results))
        summary = {name: [run["eval_accuracy"] for run in runs] for name, runs in results.items()}
        write_json(folder / "sweep.json", {"setting": args.setting, "eval_accuracy": summary})
        metric = f"{'validation' if chosen_on_validation(results) else 'eval'}_accuracy"
        curves = {name: [run["history"] for run in runs] for name, runs in results.items()}
        plot_training_curves(curves, metric=metric, title=args.setting, path=folder / "sweep.png")
        print(f"comparison in {folder / 'sweep.png'} and {folder / 'sweep.json'}")
    if stopped:
        raise ValueError(f"{len(stopped)} of the runs failed: {', '.join(stopped)}. See their messages above.")


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the arguments of the sweep; the rest are those of the training recipe."""
    settings = sorted({path.stem.rsplit("-", 1)[0] for path in CONFIGS.glob("*.yaml")})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--setting", required=True, choices=settings, help="data set and model")
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS, help="all by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--output_dir", help="folder of the runs; outputs/adamsrt/<setting>-sweep by default")
    args, rest = parser.parse_known_args(argv)
    given = {word.split("=")[0].replace("-", "_").replace("__", "--", 1) for word in rest}
    own = given & {"--config", "--optimizer", "--seed", "--resume_from_checkpoint", "--output_dir"}
    if own:
        parser.error(f"{', '.join(sorted(own))} is set by the sweep; leave it out.")
    return args, rest


def check_same_sweep(folder: Path, setting: str, rest: list[str]) -> None:
    """Raise ValueError if the runs in a folder had other arguments: they cannot be compared with these."""
    noted = folder / "arguments.json"
    now = {"setting": setting, "arguments": rest}
    if noted.is_file() and (before := json.loads(noted.read_text(encoding="utf-8"))) != now:
        raise ValueError(
            f"the runs in {folder} are of {before['setting']} with the arguments {' '.join(before['arguments'])!r}, "
            f"not of {setting} with {' '.join(rest)!r}. Pass the same arguments, or another --output_dir."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(noted, now)


def command(setting: str, optimizer: str, seed: int, run: Path, rest: list[str]) -> list[str]:
    """Command line of one run, which resumes from its latest checkpoint."""
    from hf_sphere.training.checkpoints import list_checkpoints

    line = [sys.executable, str(RECIPES / "train_image_classification.py")]
    line += ["--config", str(CONFIGS / f"{setting}-{optimizer}.yaml"), "--seed", str(seed), "--output_dir", str(run)]
    how = ["--resume_from_checkpoint", "latest"] if list_checkpoints(run) else ["--overwrite_output_dir", "true"]
    return line + how + rest


def gather(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Results of all finished runs in the folder, by optimizer, in the order of the seeds."""
    from hf_sphere.training.output_dir import RESULTS_FILE

    results: dict[str, list[dict[str, Any]]] = {}
    for optimizer in OPTIMIZERS:
        paths = sorted(folder.glob(f"{optimizer}-seed*/{RESULTS_FILE}"))
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if runs:
            results[optimizer] = runs
    return results


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Accuracies of the last and the best epoch, and seconds per epoch, as a Markdown table."""
    best_on = "validation" if chosen_on_validation(results) else "test"
    lines = [f"| optimizer | runs | last epoch, % | best epoch on {best_on} data, % | s per epoch |"]
    lines += ["|---|---|---|---|---|"]
    for name, runs in results.items():
        last = [100 * run["eval_accuracy"] for run in runs]
        best = [100 * run["best_accuracy"] for run in runs]
        seconds = statistics.mean(run["train_runtime"] / max(run["epoch"], 1e-9) for run in runs)
        lines.append(f"| {name} | {len(runs)} | {spread(last)} | {spread(best)} | {seconds:.1f} |")
    return "\n".join(lines)


def chosen_on_validation(results: dict[str, list[dict[str, Any]]]) -> bool:
    """Whether the runs held out validation data and evaluated each epoch on it."""
    return any("validation_accuracy" in run for runs in results.values() for run in runs)


def spread(values: list[float]) -> str:
    """Mean, and standard deviation of two or more."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


if __name__ == "__main__":
    run_recipe(main)
