"""Measure how often vectors of another model are recognized, and what mapping a space to another model costs.

See `relevance.py` for the packages, the texts and the two models, whose embeddings have 384 dimensions each.
python benchmarks/foreign_vectors.py

A space has the passages of one corpus. Draws of 64 vectors are: of the other model (passages, sentences or questions);
of the space, rotated at random; sentences of the passages (on-topic); of another corpus, or questions (off-topic); and
off-topic ones that repeat eight topics, a vector with its seven nearest each. Anchors of a migration are passages of
all three corpora. Writes `results/foreign_vectors.json` (three minutes, with the embeddings at hand).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import report, row
from matching import DATA
from relevance import CORPORA, MODELS, embeddings

from hf_sphere.search import EmbeddingSpace
from hf_sphere.search.drift import FEWEST

DRAWS, ANCHORS, FALSE_ALARMS, DETECTED = 100, 1_000, 0.05, 0.99


def draws(vectors: np.ndarray, topics: int | None, count: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield vectors that are drawn independently, or some with their nearest."""
    for _ in range(count):
        if topics is None:
            yield vectors[random.choice(len(vectors), FEWEST, replace=False)]
        else:
            centers = vectors[random.choice(len(vectors), topics, replace=False)]
            yield vectors[(centers @ vectors.T).argsort(1)[:, -FEWEST // topics :].ravel()]


def rotated(vectors: np.ndarray, count: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    for number in range(count):
        if number % 4 == 0:
            rotation = np.linalg.qr(random.standard_normal(2 * vectors.shape[1:]))[0]
        yield vectors[random.choice(len(vectors), FEWEST, replace=False)] @ rotation


def recognize(vectors: dict[str, dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Count the draws of each kind that look like those of another model."""
    random, found = np.random.default_rng(0), dict[str, list[list[bool]]]()
    for model, of_model in vectors.items():
        (other,) = vectors.keys() - {model}
        for corpus in CORPORA:
            space = EmbeddingSpace(torch.from_numpy(of_model[f"{corpus} passages"]).float())
            off = {name: each for name, each in of_model.items() if not name.startswith(corpus)}
            kinds = {
                f"{other} in a space of {model}": [(each, None) for each in vectors[other].values()],
                f"rotated {model}": [],
                f"{model}, on-topic": [(of_model[f"{corpus} queries"], None)],
                f"{model}, off-topic": [(each, None) for each in off.values()],
                f"{model}, off-topic, eight topics": [(each, 8) for each in off.values()],
            }
            for kind, sets in kinds.items():
                streams = [draws(each, topics, DRAWS // len(sets), random) for each, topics in sets]
                streams = streams or [rotated(of_model[f"{corpus} passages"], DRAWS, random)]
                batches = [torch.from_numpy(batch).float() for stream in streams for batch in stream]
                found.setdefault(kind, []).append([space.check_model(batch).is_foreign for batch in batches])
    rows = []
    for kind, runs in found.items():
        share, is_same = float(np.mean([np.mean(run) for run in runs])), "topic" in kind
        worst = max(map(np.mean, runs)) if is_same else min(map(np.mean, runs))
        limit = (0.01 if "on-topic" in kind else FALSE_ALARMS) if is_same else DETECTED
        bound = {"at_most" if is_same else "at_least": limit}
        rows.append(row(f"{kind}: taken for another model", share, **bound))
        rows.append(row(f"{kind}: in the worst of three corpora", float(worst)))
    return rows


def move(vectors: dict[str, dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Migrate a space of one model to the other one."""
    passages = {
        model: torch.from_numpy(np.concatenate([of_model[f"{corpus} passages"] for corpus in CORPORA])).float()
        for model, of_model in vectors.items()
    }
    first = [np.unique(points.numpy(), axis=0, return_index=True)[1] for points in passages.values()]
    rows, anchors = [], np.random.default_rng(0).permutation(np.intersect1d(*first))[:ANCHORS]  # docstrings repeat
    for model in vectors:
        (other,) = vectors.keys() - {model}
        moved = EmbeddingSpace(passages[model]).migrate(passages[model][anchors], passages[other][anchors])
        print(f"{model} to {other}: {moved.migration}")
        for name in ("recall", "low", "high"):
            what = {"recall": "recall@10", "low": "lower end", "high": "upper end"}[name]
            rows.append(row(f"{model} to {other}, {ANCHORS:,} anchors: {what}", getattr(moved.migration, name)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/relevance"))
    args = parser.parse_args()
    vectors = {}
    for model in MODELS:
        found = embeddings(args, model)
        kept = {name: each for name, each in found.items() if each.ndim == 2 and not name.startswith("neutral")}
        kept = {name: each for name, each in kept.items() if name.split()[-1] in ("passages", "queries", "en")}
        vectors[model] = {name: each / np.linalg.norm(each, axis=1, keepdims=True) for name, each in kept.items()}
    report("foreign_vectors", recognize(vectors) + move(vectors))


if __name__ == "__main__":
    main()
