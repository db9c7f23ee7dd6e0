"""Measure how many inputs a rejection calls unknown: those of the classes of a model, and others.

pip install --no-deps pytorch-ood==0.4.0
python benchmarks/rejection.py [--parts level unknown] [--models mnist cifar10 digits]

Models of eight of the ten classes of MNIST (LeNet-5), CIFAR-10 (the narrow fast network) and the bundled digits are
trained by the recipe, each with five seeds, which also choose the classes. The other classes are unknown, and for MNIST
Omniglot, inverted to bright strokes, and CIFAR-10 in gray. What models compute is kept in `--output_dir`. Images that
they have not seen are split at random: in the part `level` two thirds, but at most 1,000, and in the part `unknown` one
half calibrate, the others are tested. Scores of pytorch-ood are fitted to training images, and left out without the
package. Writes `results/rejection.json`, of which a part replaces its rows.
"""

import argparse
import importlib.util
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, report, row
from scipy.stats import t
from torch import Tensor, nn
from transformers import AutoImageProcessor

from hf_sphere.data import load_image_split
from hf_sphere.ood import SCORES, Outputs, Rejection, fit_rejection, model_outputs
from hf_sphere.search.extract import class_names, load_embedding_model

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
LEVEL, COVERAGE, MOST_CALIBRATION = 0.05, 0.9, 1_000
NARROW = "--config cifar10_fast/cifar10-fast-softmax --backbone_kwargs '{widths: [32, 128, 128]}'"
LENET = "--backbone lenet5 --head softmax --optim adam --learning_rate 1e-3"
MODELS = {
    "mnist": f"ylecun/mnist {LENET} --per_device_train_batch_size 128 --num_train_epochs 3",
    "cifar10": f"uoft-cs/cifar10 {NARROW} --num_train_epochs 4 --warmup_epochs 1",
    "digits": f"digits --image_size 28 --train_split train[:50%] {LENET} --per_device_train_batch_size 32 "
    "--num_train_epochs 20",
}
"""Dataset and options of the recipe."""

TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "bundled digits"}
SETS = {"near": "two other classes", "omniglot": "Omniglot", "gray": "CIFAR-10"}
Lines = list[dict[str, Any]]


def local(name: str) -> str:
    return str(DATA / name) if (DATA / name).is_dir() else name


def train(args: argparse.Namespace, name: str, seed: int) -> str:
    """Train a model if it does not exist, and return its folder."""
    folder = args.output_dir / f"{name}-{seed}"
    if not (folder / "all_results.json").is_file():
        dataset, *options = shlex.split(MODELS[name])
        command = [sys.executable, str(ROOT / "recipes" / "train_image_classification.py"), *options]
        command += ["--dataset_name", local(dataset), "--sample_classes", "8", "--corruption_seed", str(seed)]
        command += ["--seed", str(seed), "--disable_tqdm", "--output_dir", str(folder), "--overwrite_output_dir"]
        subprocess.run(command, check=True)
    return str(folder)


def load(args: argparse.Namespace, name: str, seed: int) -> tuple[nn.Linear, dict[str, Outputs]]:
    """Return the last layer of a model, and what the model computes for each set of images, computed once."""
    path = args.output_dir / "outputs" / f"{name}-{seed}.pt"
    folder, dataset = train(args, name, seed), MODELS[name].split()[0]
    model = load_embedding_model(folder)
    if path.is_file():
        return model.head.linear, {key: Outputs(*fields) for key, fields in torch.load(path, weights_only=True).items()}
    is_known = set(class_names(model)).__contains__

    def outputs(dataset: str, parts: Sequence[str] = ("test",), is_inverted: bool = False, **options: Any) -> Outputs:
        found = []
        for part in parts:
            images = load_image_split(local(dataset), part, like=folder, progress=False, **options).batches
            pixels = ((batch["pixel_values"], batch["labels"]) for batch in images.epoch())
            if is_inverted:  # of x = (pixel - mean) / std to that of 1 - pixel
                about = AutoImageProcessor.from_pretrained(folder)
                mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (about.image_mean, about.image_std))
                pixels = (((1 - 2 * mean) / std - values, labels) for values, labels in pixels)
            found.append(model_outputs(model, pixels))
        return Outputs(*(torch.cat(fields) for fields in list(zip(*found, strict=True))[:3]))

    unseen = ["test", "train[50%:]"] if name == "digits" else ["test"]
    sets = {"known": outputs(dataset, unseen, select_class=is_known)}
    sets["near"] = outputs(dataset, unseen, select_class=lambda label: not is_known(label))
    sets["train"] = outputs(dataset, ["training"], select_class=is_known, max_samples=10_000)
    if name == "mnist":
        sets["omniglot"] = outputs("brendenlake/omniglot", is_inverted=True)
        sets["gray"] = outputs("uoft-cs/cifar10")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({key: tuple(fields) for key, fields in sets.items()}, path)
    return model.head.linear, sets


def split(outputs: Outputs, seed: int, most: int | None = None) -> tuple[Outputs, Outputs]:
    """Split rows at random into halves, or two thirds, but at most a number of them, and the others."""
    count = len(outputs.logits)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    rows = order.split([(first := min(2 * count // 3, most) if most else count // 2), count - first])
    first, second = (Outputs(*(None if field is None else field[part] for field in outputs)) for part in rows)
    return first, second


def fit(layer: nn.Linear, outputs: Outputs, score: str = "auto", **options: Any) -> Rejection:
    """Fit a rejection to the inputs of the last layer."""
    return fit_rejection(layer, [(outputs.embeddings, outputs.labels)], LEVEL, score, **options)


def level(args: argparse.Namespace, name: str) -> Lines:
    """Measure the known inputs that are rejected, and prediction sets, over draws of calibration and test rows."""
    rows: Lines = []
    for kind in ("pooled", "by class"):
        seeds: dict[str, list[float]] = {}
        for seed in range(args.seeds):
            layer, sets = load(args, name, seed)
            draws: dict[str, list[float]] = {}
            score = "auto"  # chosen in the first draw
            for draw in range(args.draws):
                calibration, test = split(sets["known"], draw, MOST_CALIBRATION)
                rejection = fit(layer, calibration, score, by_class=kind == "by class", seed=draw)
                decision, score = rejection(*test[:2]), rejection.settings["score"]
                predicted = test.logits.argmax(1)
                is_right = predicted == test.labels
                is_in_set = rejection.prediction_set(decision.known, decision.class_p_values, predicted, COVERAGE)
                for what, found in {
                    "known rejected": ~decision.known,
                    "true class in the set": is_in_set.gather(1, test.labels[:, None]),
                    "classes in the set": is_in_set.sum(1),
                    "accuracy": is_right,
                    "accuracy of those not rejected": is_right[decision.known],
                    "unknown rejected": ~rejection(*sets["near"][:2]).known,
                }.items():
                    draws.setdefault(what, []).append(found.double().mean().item())
            for what, values in draws.items():
                seeds.setdefault(what, []).append(statistics.mean(values))
        for what, values in seeds.items():
            error = statistics.stdev(values) / math.sqrt(len(values))
            at_most = LEVEL + 2 * error if what == "known rejected" else None
            line = row(f"{TITLES[name]}, {kind}: {what}", statistics.mean(values), at_most)
            rows.append(line | {"error": error, "seeds": values})
    return rows


def rejected(known: Tensor, unknown: Tensor) -> float:
    """Return the share of unknown scores below the quantile of known ones, and of ties as many as give the level."""
    threshold = known.sort().values[int(LEVEL * len(known))]
    ties = (LEVEL - (known < threshold).double().mean()) / (known == threshold).double().mean()
    return ((unknown < threshold).double().mean() + ties * (unknown == threshold).double().mean()).item()


def peers(layer: nn.Linear, train: Outputs) -> dict[str, Any]:
    """Return the scores of pytorch-ood, functions of outputs, fitted to training images; none without the package."""
    if importlib.util.find_spec("pytorch_ood") is None:
        return {}
    from pytorch_ood import detector as d

    x, y, same, weight = train.embeddings, train.labels, nn.Identity(), layer.weight.detach()
    bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.detach()
    of_logits = {one.__name__: one(None) for one in (d.MaxSoftmax, d.MaxLogit, d.EnergyBased, d.Entropy, d.GEN)}
    of_logits["KLMatching"] = d.KLMatching(None).fit_logits(train.logits, y)
    of_features = {one.__name__: one(None) for one in (d.Mahalanobis, d.RMD, d.KNN)}
    of_features |= {one.__name__: one(same, layer) for one in (d.SHE, d.fDBD, d.NNGuide)}
    of_features |= {"ViM": d.ViM(None, x.shape[1] // 2, weight, bias), "DICE": d.DICE(None, weight, bias, 0.7)}
    react = d.ReAct(same, layer).fit_feature_maps(x, y)
    scores = {name: lambda o, one=one: -one.predict_logits(o.logits) for name, one in of_logits.items()}
    for name, one in of_features.items():
        one.fit_features(x, y)
        scores[name] = lambda o, one=one: -one.predict_features(o.embeddings)
    return scores | {"ReAct": lambda o: -react.predict_feature_maps(o.embeddings)}


@torch.no_grad()
def unknown(args: argparse.Namespace, name: str) -> Lines:
    """Measure the share of unknown inputs that is rejected where the share of known test inputs is the level."""
    shares: dict[tuple[str, str], list[float]] = {}
    chosen: dict[tuple[str, str], list[str]] = {}
    for seed in range(args.seeds):
        layer, sets = load(args, name, seed)
        calibration, test = split(sets["known"], seed)
        ours = {score: fit(layer, calibration, score, seed=seed) for score in SCORES if score != "concentration"}
        ours["auto"] = fit(layer, calibration, seed=seed)
        ours["auto, by class"] = fit(layer, calibration, by_class=True, seed=seed)
        others = peers(layer, sets["train"])
        for key in (key for key in SETS if key in sets):
            chosen_by, tested = split(sets[key], seed)
            ours["auto, with unknown"] = fit(layer, calibration, seed=seed, unknown=[chosen_by.embeddings])
            for score, function in {**{key: partial(order, r) for key, r in ours.items()}, **others}.items():
                shares.setdefault((SETS[key], score), []).append(rejected(function(test), function(tested)))
            for how in ("auto", "auto, by class", "auto, with unknown"):
                chosen.setdefault((SETS[key], how), []).append(ours[how].settings["score"])
    rows = []
    for (key, score), of_seeds in shares.items():
        changes = [share - plain for share, plain in zip(of_seeds, shares[key, "max_softmax"], strict=True)]
        mean, error = statistics.mean(changes), statistics.stdev(changes) / math.sqrt(len(changes))
        half = t.ppf(0.975, len(changes) - 1) * error
        line = row(f"{TITLES[name]}, {key}, {score}", statistics.mean(of_seeds))
        line |= {"seeds": of_seeds, "change": [mean, mean - half, mean + half]}
        rows.append(line | ({"chosen": chosen[key, score]} if (key, score) in chosen else {}))
    return rows


def scores(rejection: Rejection, outputs: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the scores of a rejection, and those of the classes."""
    return rejection.score(Outputs(outputs.embeddings.double(), outputs.logits.double()))


def order(rejection: Rejection, outputs: Outputs) -> Tensor:
    """Return what a rejection orders inputs by: its score, or by class the p-value."""
    pooled = scores(rejection, outputs)[0]
    return rejection(*outputs[:2]).p_value if pooled is None else pooled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["level", "unknown"], default=["level", "unknown"])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "rejection")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--draws", type=int, default=200, help="draws of the calibration and test rows, per seed")
    args = parser.parse_args()
    path = RESULTS / "rejection.json"
    for part in (part for part in (level, unknown) if part.__name__ in args.parts):
        for name in args.models:
            rows = [line | {"part": f"{part.__name__}, {name}"} for line in part(args, name)]
            old = json.loads(path.read_text())["rows"] if path.is_file() else []
            kept = [line for line in old if line["part"] != rows[0]["part"]]
            report("rejection", [*kept, *rows], draws=args.draws)


if __name__ == "__main__":
    main()
