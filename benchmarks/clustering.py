"""Compare spherical k-means with FAISS, and measure mixtures of von Mises-Fisher distributions.

Writes `results/clustering.json`. `--only` selects parts; on a shared machine, seconds are those of the processor.
"""

import argparse
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import report, row
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from threadpoolctl import threadpool_limits

from hf_sphere.cluster import SphericalKMeans, VonMisesFisherMixture
from hf_sphere.cluster.mixture import Parameters
from hf_sphere.distributions import VonMisesFisher
from hf_sphere.geometry import project_to_sphere
from hf_sphere.search import read_embeddings

COMPONENTS, DIM = 20, 768


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def processor_seconds(functions: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, float]:
    """Return the least processor time of each function, in turn; other programs change it less than the wall time."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            function()
            seconds[name].append(time.process_time() - start)
    return {name: min(values) for name, values in seconds.items()}


def compare_with_faiss(rows: int = 200_000, dim: int = 128, clusters: int = 256, iterations: int = 20) -> list[dict]:
    import faiss

    generator = torch.Generator().manual_seed(0)
    centers = project_to_sphere(torch.randn(clusters, dim, generator=generator))
    points = torch.randn(rows, dim, generator=generator).mul_(1.5 / dim**0.5)
    for start in range(0, rows, 10_000):  # in parts, so that the data do not cause the memory peak
        part = points[start : start + 10_000]
        part += centers[torch.randint(clusters, (len(part),), generator=generator)]
        part.div_(torch.linalg.vector_norm(part, dim=1, keepdim=True))
    data, init = points.numpy(), points[:clusters].numpy().copy()
    before = peak_mib()

    def ours() -> SphericalKMeans:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return SphericalKMeans(clusters, init=init, max_iter=iterations, tol=0.0).fit(data)

    def theirs() -> tuple[Any, Any]:
        k_means = faiss.Kmeans(dim, clusters, niter=iterations, spherical=True, max_points_per_centroid=rows, seed=1)
        k_means.train(data, init_centroids=init)
        return k_means.centroids, k_means.assign(data)[1]  # our `fit` includes the labels

    found = ours()
    memory = (peak_mib() - before) / (data.nbytes / 2**20) + 1
    centroids, labels = theirs()
    objective = float((data * centroids[labels]).sum(dtype=np.float64))
    seconds = processor_seconds({"ours": ours, "theirs": theirs})
    where = f"k-means, {rows:,} x {dim}, {clusters} clusters, {iterations} iterations"
    return [
        row(f"{where}: objective / FAISS", (rows - found.inertia_ / 2) / objective, at_least=1 - 1e-6),
        row(f"{where}: processor time / FAISS", seconds["ours"] / seconds["theirs"], at_most=1.0),
        row(f"{where}: processor seconds", seconds["ours"]),
        row(f"{where}: memory with the data / data", memory, at_most=3.0),
    ]


def draw(kappas: torch.Tensor, each: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return directions, training and test points of a mixture with equal weights."""
    means = project_to_sphere(torch.randn(len(kappas), DIM))
    labels = torch.arange(len(kappas)).repeat(each)
    sets = (
        VonMisesFisher(means[labels[:size]], kappas[labels[:size]], validate_args=False).sample()
        for size in (len(labels), max(len(labels) // 4, len(kappas)))
    )
    return means, *sets


def recover_concentrations() -> list[dict]:
    """Recover equal concentrations from random starts.

    Components of low concentration can only be found in many points: the means of a mixture change the second moment
    of the coordinates by A^2 / 20 in 20 directions, which exceeds the noise sqrt(d / n) / d of n points only for
    n > 400 d / (d A^2)^2: 18 million points at kappa 10, 30,000 at kappa 50 and 2,000 at kappa 100.
    """
    rows = []
    for kappa, each, starts in (
        (10.0, 1000, 1),
        (50.0, 5000, 1),
        (100.0, 3000, 3),
        (500.0, 1000, 3),
        (5000.0, 1000, 3),
    ):
        means, train, test = draw(torch.full((COMPONENTS,), kappa), each)
        mixture = VonMisesFisherMixture(COMPONENTS, n_init=starts, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mixture.fit(train)
        nearest = (means.double() @ mixture.means_.T).argmax(1)
        error = (mixture.concentrations_[nearest] / kappa - 1).abs().max().item()
        hard = hard_fit(train, mixture)
        where = f"mixture, d = {DIM}, {COMPONENTS} components of {each} points, kappa {kappa:g}"
        rows += [
            row(f"{where}: largest relative error of a concentration", error, at_most=0.02),
            row(
                f"{where}: held-out log-likelihood above hard k-means",
                mixture.score(test) - hard.score(test),
                None,
                0.0,
            ),
        ]
    return rows


def hard_fit(train: torch.Tensor, like: VonMisesFisherMixture) -> VonMisesFisherMixture:
    """Return the mixture of the maximum-likelihood distributions of the clusters of k-means."""
    labels = SphericalKMeans(like.n_components, n_init=like.n_init, random_state=0).fit(train).labels_
    fits = [VonMisesFisher.fit(train[labels == label].double()) for label in range(like.n_components)]
    weights = torch.bincount(labels, minlength=like.n_components).double() / len(train)
    concentrations = torch.stack([fit.concentration for fit in fits]).clamp(max=1e8)
    hard = VonMisesFisherMixture(like.n_components)
    hard.n_features_in_ = train.shape[1]
    hard.means_, hard.concentrations_, hard.weights_ = Parameters(
        torch.stack([fit.loc for fit in fits]), concentrations, weights
    )
    return hard


def survive_extremes() -> list[dict]:
    means, train, _ = draw(torch.full((COMPONENTS,), 1e5), 100)
    single = project_to_sphere(torch.randn(3, DIM))
    mixture = VonMisesFisherMixture(COMPONENTS + 3, n_init=3, random_state=0).fit(torch.cat([train, single]))
    values = torch.cat([mixture.concentrations_, mixture.means_.flatten(), mixture.score_samples(train)])
    error = (mixture.concentrations_[(means.double() @ mixture.means_.T).argmax(1)] / 1e5 - 1).abs().max().item()
    return [
        row("mixture, kappa 1e5 and 3 single points: values that are not finite", int((~values.isfinite()).sum()), 0),
        row("mixture, kappa 1e5 and 3 single points: largest relative error of a concentration", error, at_most=0.02),
    ]


def compare_with_scikit_learn(folder: Path) -> list[dict]:
    """Compare the clusters of real embeddings with their classes."""
    stored = read_embeddings(str(folder))
    points, labels = stored.embeddings.double(), stored.labels.numpy()
    units, classes = project_to_sphere(points), len(np.unique(labels))
    found = {
        "KMeans of scikit-learn": KMeans(classes, n_init=10, random_state=0).fit(points.numpy()).labels_,
        "KMeans, normalized": KMeans(classes, n_init=10, random_state=0).fit(units.numpy()).labels_,
        "SphericalKMeans": SphericalKMeans(classes, n_init=10, random_state=0).fit(points.numpy()).labels_,
        "VonMisesFisherMixture": VonMisesFisherMixture(classes, n_init=10, random_state=0).fit(points.numpy()).labels_,
    }
    scores = {"NMI": normalized_mutual_info_score, "ARI": adjusted_rand_score}
    return [
        row(f"{len(labels):,} embeddings, {name}: {score}", function(labels, clusters))
        for name, clusters in found.items()
        for score, function in scores.items()
    ]


PARTS: dict[str, Callable[[], list[dict]]] = {
    "faiss": compare_with_faiss,
    "concentrations": recover_concentrations,
    "extremes": survive_extremes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--embeddings", type=Path, help="folder of hf-sphere extract, to compare with classes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with threadpool_limits(arguments.threads):
        rows = [line for name in PARTS if name in arguments.only for line in PARTS[name]()]
        if arguments.embeddings:
            rows += compare_with_scikit_learn(arguments.embeddings)
        report("clustering", rows)


if __name__ == "__main__":
    main()
