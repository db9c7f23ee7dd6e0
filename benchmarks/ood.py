"""Compare scores of out-of-distribution images on classifiers with several heads.

python benchmarks/ood.py [--dataset_name ylecun/mnist] [--far brendenlake/omniglot uoft-cs/cifar10] [--seeds 3]
python benchmarks/ood.py --dataset_name uoft-cs/cifar10 --far brendenlake/omniglot ylecun/mnist --name ood_cifar10 \
    --epochs 4 --backbone airbench_cifar --backbone_kwargs "{widths: [32, 128, 128]}" --bf16

Without `--models`, LeNet-5 is trained on eight of the ten classes by the recipe, for each head and seed; the other two
depend on the seed. Unknown options, such as `--backbone`, are passed to the recipe. With `--models`, all models below
the folder are measured; they must not know all classes of the dataset.
The near images are the test images of the classes that the model does not know, the far ones those of other datasets.
Scores are fitted to training images of the known classes. Results are written to `results/<name>.json`; finished models
in the output folder are neither trained nor measured again. About one core-minute per model.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from common import report, row

from hf_sphere.data import load_image_split
from hf_sphere.nn.heads.mixins import INITIAL_LOG_TEMPERATURE
from hf_sphere.ood import SCORES, compare_scores, model_outputs
from hf_sphere.search.extract import class_names, load_embedding_model
from hf_sphere.utils.files import read_json, write_json

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
HEADS = ("softmax", "cosine", "arcface", "vmf", "prototype")
METRICS = {"auroc": "AUROC", "fpr_at_95_tpr": "FPR95"}


def local(name: str) -> str:
    return str(DATA / name) if (DATA / name).is_dir() else name


def main() -> None:
    """Train the models that do not exist, measure them, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder of saved models; trained if not set")
    parser.add_argument("--dataset_name", default="ylecun/mnist")
    parser.add_argument("--far", nargs="+", default=["brendenlake/omniglot", "uoft-cs/cifar10"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--max_samples", type=int, default=10_000, help="training images, and half as many of a test set"
    )
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "ood")
    parser.add_argument("--name", default="ood", help="name of the results file")
    args, args.recipe_options = parser.parse_known_args()
    args.output_dir /= args.name
    torch.set_num_threads(1)
    if args.models is None:
        folders = [args.output_dir / f"{head}-{seed}" for seed in range(args.seeds) for head in HEADS]
    else:
        folders = sorted(path.parent for path in args.models.rglob("config.json") if "checkpoint-" not in str(path))
    finished: dict[str, dict] = {}
    for folder in folders:
        if args.models is None and not (folder / "config.json").is_file():
            train(args, folder)
        result = args.output_dir / "scores" / f"{folder.name}.json"
        if not result.is_file():
            result.parent.mkdir(parents=True, exist_ok=True)
            write_json(result, measure(args, str(folder)))
        finished[folder.name] = read_json(result)
    write(args, finished)


def train(args: argparse.Namespace, folder: Path) -> None:
    head, seed = folder.name.split("-")
    command = [sys.executable, str(ROOT / "recipes" / "train_image_classification.py"), "--backbone", "lenet5"]
    command += ["--dataset_name", local(args.dataset_name), "--sample_classes", "8", "--corruption_seed", seed]
    if head == "arcface":  # a learned scale, as those of the other heads
        command += ["--head_kwargs", f"{{log_temperature: {INITIAL_LOG_TEMPERATURE}}}"]
    command += ["--head", head, "--optim", "adam", "--learning_rate", "1e-3", "--seed", seed, "--disable_tqdm"]
    command += ["--per_device_train_batch_size", "128", "--num_train_epochs", str(args.epochs)]
    command += ["--output_dir", str(folder), "--overwrite_output_dir", *args.recipe_options]
    subprocess.run(command, check=True)


def measure(args: argparse.Namespace, folder: str) -> dict:
    """Return the results of `compare_scores` for a model, and its head and accuracy."""
    model = load_embedding_model(folder)
    known = set(class_names(model))

    def outputs(name: str, split: str, is_known: bool | None = None, share: int = 2):
        chosen = {} if is_known is None else {"select_class": lambda label: (label in known) == is_known}
        limit = args.max_samples // share
        images = load_image_split(local(name), split, like=folder, max_samples=limit, progress=False, **chosen)
        return model_outputs(model, images.batches)

    inside = outputs(args.dataset_name, "test", True)
    near = outputs(args.dataset_name, "test", False)
    far = {Path(name).name: outputs(name, "test") for name in args.far}
    train = outputs(args.dataset_name, "train", True, share=1)
    comparison = compare_scores(train, inside, {"near": near, **far})
    print(f"\n{folder}\n{comparison}", flush=True)
    accuracy = (inside.logits.argmax(1) == inside.labels).double().mean().item()
    return {"head": model.config.head, "accuracy": accuracy, "results": comparison.results}


def write(args: argparse.Namespace, finished: dict[str, dict]) -> None:
    """Write the results, and print the table of means over the seeds."""
    heads = list(dict.fromkeys(model["head"] for model in finished.values()))
    sets = ["near", *(Path(name).name for name in args.far)]
    rows, lines = [], []
    for head in heads:
        own = [model for model in finished.values() if model["head"] == head]
        for score in SCORES:
            if any(score not in model["results"] for model in own):
                continue
            cells = []
            for name in sets:
                values = {key: [100 * model["results"][score][name][key] for model in own] for key in METRICS}
                means = {key: statistics.mean(found) for key, found in values.items()}
                spread = statistics.stdev(values["auroc"]) if len(own) > 1 else float("nan")
                cells.append(f"{means['auroc']:.1f} ± {spread:.1f} / {means['fpr_at_95_tpr']:.1f}")
                rows += [row(f"{head}, {score}, {name}: {METRICS[key]} %", mean) for key, mean in means.items()]
            lines.append(f"| {head} | {score} | {' | '.join(cells)} |")
    settings = {name: getattr(args, name) for name in ("epochs", "max_samples", "recipe_options")}
    report(args.name, rows, models=finished, **settings)
    header = f"| head | score | {' | '.join(sets)} |"
    print("\n".join([header, "|" + "---|" * (2 + len(sets)), *lines]), flush=True)


if __name__ == "__main__":
    main()
