"""Measure what `EmbeddingSpace.compress` costs: recall@10, time per query, and false accepts at a level.

python benchmarks/compression.py --weights efficientnet_lite0.safetensors
OMP_NUM_THREADS=1 python benchmarks/compression.py --parts speed

The embeddings are those of `matching.py`. For the recall, a tenth of the groups, or 500 images of CIFAR-10, are
queries, which are not in the gallery; the interval is over them. Beside it are the codes of sentence-transformers, with
its rescoring. For the levels, half of the groups are the gallery and up to five rows of the others are queries without
a match. Writes `results/compression.json` and `results/compression_speed.json` (20 minutes on one core).
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import RESULTS, report, row, time_in_turn
from matching import DATA, LEVELS, ROOT, TITLES, corpus, mean_and_error, rank_in_group
from sentence_transformers.util.quantization import quantize_embeddings, semantic_search_faiss

from hf_sphere.search import EmbeddingSpace

BITS = (1, 2, 4, 8)


def space(vectors: np.ndarray, groups: np.ndarray, **options: Any) -> EmbeddingSpace:
    names = None if len(set(groups)) == len(groups) else groups
    return EmbeddingSpace.fit(vectors, names, score="cosine", **options)


def count_of(bits: int) -> str:
    return f"{bits} bit{'s' * (bits > 1)}"


def recall_at_10(queries: np.ndarray, gallery: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the fraction of the ten nearest rows that are among those that were found, (Q,)."""
    nearest = torch.from_numpy(queries @ gallery.T).topk(10).indices.numpy()
    return (rows[:, :10, None] == nearest[:, None]).any(2).mean(1)


def of_sentence_transformers(queries: np.ndarray, gallery: np.ndarray, precision: str) -> tuple[np.ndarray, int]:
    """Return the rows that its search finds, which rescores 40 candidates by float32 queries, and bytes per code."""
    options = {} if precision == "ubinary" else {"calibration_embeddings": gallery}
    codes = quantize_embeddings(gallery, precision, **options)
    found, _ = semantic_search_faiss(
        queries,
        corpus_embeddings=codes,
        corpus_precision=precision,
        top_k=10,
        exact=True,
        rescore_multiplier=4,
        **options,
    )
    return np.array([[match["corpus_id"] for match in matches] for matches in found]), codes.shape[1]


def recall(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in LEVELS:
        title = TITLES[name]
        vectors, groups = corpus(name, args)
        order = np.random.default_rng(0).permutation(np.unique(groups))
        is_query = np.isin(groups, order[: 500 if len(order) == len(vectors) else len(order) // 10])
        gallery, queries, of_query = vectors[~is_query], vectors[is_query], groups[is_query]
        fitted, found = space(gallery, groups[~is_query]), {}
        for bits in BITS:
            small = fitted.compress(bits)
            found[count_of(bits)] = small.search(queries, 10).rows.numpy(), small.bytes_per_vector
            for which, value in zip(("recall", "lower end", "upper end"), small.recall, strict=True):
                rows.append(row(f"{title}, {count_of(bits)}: {which}", value))
        for precision in ("ubinary", "uint8"):
            found[f"sentence-transformers {precision}"] = of_sentence_transformers(queries, gallery, precision)
        for what, (neighbors, size) in found.items():
            share = recall_at_10(queries, gallery, neighbors)
            sums, counts = np.bincount(of_query, share), np.bincount(of_query)
            mean, error = mean_and_error(sums, counts)
            rows.append(row(f"{title}, {what}: bytes", size))
            rows.append(row(f"{title}, {what}: recall of queries of other groups", mean))
            rows.append(row(f"{title}, {what}: standard error", error))
            print(rows[-2]["what"], size, round(mean, 3), round(error, 3), flush=True)
    return rows


def levels(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in LEVELS:
        title = TITLES[name]
        vectors, groups = corpus(name, args)
        count, random = int(groups.max()) + 1, np.random.default_rng(0)
        sums = {(bits, level): [np.zeros(count), np.zeros(count)] for bits in BITS for level in LEVELS[name]}
        for split in range(args.splits):
            is_known = np.isin(groups, random.permutation(count)[: count // 2])
            order = random.permutation(np.flatnonzero(~is_known))
            queries = order[rank_in_group(groups[order]) < 5][:1_000]
            fitted = space(vectors[is_known], groups[is_known], seed=split, calibration_rows=1_000)
            for bits in BITS:
                found = fitted.compress(bits, seed=split).search(vectors[queries], 1)
                for level in LEVELS[name]:
                    is_accepted = found.p_values.numpy()[:, 0] <= level * (1 + 1e-12)
                    sums[bits, level][0] += np.bincount(groups[queries], is_accepted, count)
                    sums[bits, level][1] += np.bincount(groups[queries], minlength=count)
        for (bits, level), total in sums.items():
            rate, error = mean_and_error(*total)
            what = f"{title}, {count_of(bits)}: accepted without a match at {level:.0%}"
            rows.append(row(what, rate, at_most=level + 2 * error))
            print(rows[-1]["what"], round(rate, 4), round(error, 4), flush=True)
    return rows


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure uniform directions of 384 dimensions, on the threads that are set."""
    vectors = F.normalize(torch.randn(args.size, 384, generator=torch.Generator().manual_seed(0)))
    queries = F.normalize(torch.randn(256, 384, generator=torch.Generator().manual_seed(1)))
    fitted = EmbeddingSpace.fit(vectors, score="cosine", calibration_rows=200)
    spaces = {"exact": fitted} | {count_of(bits): fitted.compress(bits) for bits in BITS}
    cases = {f"{name}, {size}": (each, size) for name, each in spaces.items() for size in (1, 256)}
    seconds = time_in_turn(
        {name: lambda each=each, size=size: each.search(queries[:size], 10) for name, (each, size) in cases.items()},
        rounds=args.rounds,
    )
    return [
        row(f"{name}: milliseconds per query", 1e3 * statistics.median(seconds[name]) / size)
        for name, (_, size) in cases.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["recall", "levels", "speed"], default=["recall", "levels"])
    parser.add_argument("--weights", help="file of examples/convert_efficientnet_lite0.py")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "matching")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--size", type=int, default=20_000, help="number of embeddings of the part speed")
    parser.add_argument("--note", default="", help="remark for the results, for instance on other work of the machine")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    file = RESULTS / "compression.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []  # those of the other part are kept
    for part in (recall, levels):
        if part.__name__ in args.parts:
            rows += part(args)
            report("compression", [*{line["what"]: line for line in rows}.values()], splits=args.splits)
    if "speed" in args.parts:
        about = {"vectors": args.size, "dim": 384, "threads": torch.get_num_threads(), "note": args.note}
        report("compression_speed", speed(args), **about)


if __name__ == "__main__":
    main()
