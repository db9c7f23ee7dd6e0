"""Compare `SphericalKMeans(n_clusters="auto")` with HDBSCAN and the silhouette, where the number is unknown.

python benchmarks/clustering_number.py --output_dir outputs/matching --weights efficientnet_lite0.safetensors

Omniglot (242 characters) and WikiText-2 (122 articles) are the embeddings of `matching.py`; the 10,000 test images of
CIFAR-10 are embedded by the same network. None of these networks was trained on the classes. The embeddings of the
10,000 test images of MNIST are the last hidden layer of a perceptron that was trained on the training images. The
digits are the pixels of scikit-learn's images. HDBSCAN is scikit-learn's, on unit vectors, with each of `SETTINGS`, and
the same on the unit vectors of the first 50 principal components. Its noise counts as one cluster, unless the name of
a number says otherwise; `left out` is measured on the rows that are not noise, for both methods. The silhouette is
that of 2,000 random rows. Seconds are those of the processor, on one thread.
Writes `results/clustering_number.json` (about 10 minutes).
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import report, row
from matching import DATA, ROOT, corpus, embed_images, load
from sklearn.cluster import HDBSCAN
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import (
    adjusted_mutual_info_score as ami,
    adjusted_rand_score,
    normalized_mutual_info_score,
    silhouette_score,
)
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import normalize

from hf_sphere.cluster import SphericalKMeans

SIZES = (2, 3, 5, 10, 15, 25, 50, 100)
SETTINGS = [*({"min_cluster_size": size} for size in SIZES), {"min_cluster_size": 5, "min_samples": 1}]
NUMBERS = (2, 5, 10, 20, 50, 100, 200, 400)
SCORES = {"NMI": normalized_mutual_info_score, "AMI": ami, "ARI": adjusted_rand_score}


def cifar10(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    path = args.output_dir / "cifar10_all.npz"
    if not path.is_file():
        test = load("uoft-cs/cifar10", "test", args.data)
        vectors = F.normalize(embed_images(list(test["img"]), args.weights))
        np.savez(path, vectors=vectors.numpy(), labels=np.array(test["label"]))
    file = np.load(path)
    return file["vectors"], file["labels"]


def mnist(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    (train, labels), (test, test_labels) = (
        (np.stack([np.asarray(image, np.float32).ravel() / 255 for image in part["image"]]), np.array(part["label"]))
        for part in (load("ylecun/mnist", split, args.data) for split in ("train", "test"))
    )
    network = MLPClassifier((256, 64), max_iter=8, random_state=0).fit(train, labels)
    for weight, bias in zip(network.coefs_[:-1], network.intercepts_[:-1], strict=True):
        test = np.maximum(test @ weight + bias, 0)
    return normalize(test.astype(np.float32)), test_labels


def digits(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return normalize(images.astype(np.float32)), labels


DATASETS = {
    "Omniglot": lambda args: corpus("omniglot", args), "WikiText-2": lambda args: corpus("wikitext", args),
    "CIFAR-10": cifar10, "MNIST, trained": mnist, "digits, pixels": digits,
}  # fmt: skip


def measured(name: str, classes: np.ndarray, clusters: np.ndarray, seconds: float) -> dict[str, Any]:
    """Return what the table shows; label -1 is noise."""
    is_noise = clusters < 0
    alone = np.where(is_noise, clusters.max() + 1 + np.arange(len(clusters)), clusters)
    return {
        "method": name,
        "clusters": len(np.unique(clusters[~is_noise])),
        "noise": float(is_noise.mean()),
        **{score: float(function(classes, clusters)) for score, function in SCORES.items()},
        **{f"{score}, noise as singletons": float(SCORES[score](classes, alone)) for score in ("NMI", "AMI")},
        "seconds": seconds,
    }


def compare(vectors: np.ndarray, classes: np.ndarray) -> dict[str, Any]:
    def timed(function: Any) -> tuple[Any, float]:
        start = time.process_time()
        return function(), time.process_time() - start

    runs = [timed(lambda s=seed: SphericalKMeans("auto", random_state=s).fit_predict(vectors)) for seed in range(3)]
    found = [measured(f"auto, seed {seed}", classes, *run) for seed, run in enumerate(runs)]
    reduced = normalize(PCA(50, random_state=0).fit_transform(vectors))
    for what, points in (("", vectors), (", 50 components", reduced)):
        for setting in SETTINGS:
            algorithm = "auto" if points is reduced else "brute"
            clusters, seconds = timed(
                lambda points=points, setting=setting, algorithm=algorithm: HDBSCAN(
                    **setting, algorithm=algorithm, copy=True
                ).fit_predict(points)
            )
            text = ", ".join(f"{key} {value}" for key, value in setting.items())
            found.append(measured(f"HDBSCAN{what}, {text}", classes, clusters, seconds))
            is_row = clusters >= 0
            if is_row.any():
                for who, of in (("", clusters), (" of auto", runs[0][0])):
                    for score in ("NMI", "AMI"):
                        found[-1][f"{score}{who}, left out"] = float(SCORES[score](classes[is_row], of[is_row]))
    chosen: tuple[float, int, np.ndarray] = (-1.0, 0, np.array([]))
    start = time.process_time()
    for number in NUMBERS:
        clusters = SphericalKMeans(number, random_state=0).fit_predict(vectors)
        sample = min(2_000, len(vectors))
        value = silhouette_score(vectors, clusters, metric="cosine", sample_size=sample, random_state=0)
        chosen = max(chosen, (float(value), number, clusters), key=lambda item: item[0])
    found.append(measured("silhouette", classes, chosen[2], time.process_time() - start))
    count = len(np.unique(classes))
    clusters, seconds = timed(lambda: SphericalKMeans(count, random_state=0).fit_predict(vectors))
    return {"classes": count, "found": [*found, measured("true number", classes, clusters, seconds)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="file of examples/convert_efficientnet_lite0.py")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of datasets; others are downloaded")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "matching")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, datasets = [], {}
    for name, read in DATASETS.items():
        datasets[name] = compare(*read(args))
        found = datasets[name]["found"]
        for line in found:
            print(name, line, flush=True)
        ours = [line for line in found if line["method"].startswith("auto")]
        best = max(line["NMI"] for line in found if line["method"].startswith("HDBSCAN"))
        rows.append(row(f"{name}: NMI", statistics.mean(line["NMI"] for line in ours), at_least=best))
    report("clustering_number", rows, datasets=datasets)


if __name__ == "__main__":
    main()
