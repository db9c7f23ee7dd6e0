"""Measure `LanceSpace`: memory from the first batch to the search, and recall and time beside FAISS.

python benchmarks/beyond_memory.py

Vectors are clustered: groups of 20 rows around centers, which lie around 200 topics. Queries are new rows, half of them
of groups that are in the space. Each engine runs in a process of its own, whose peak of resident memory is read from
the kernel; batches are drawn one by one. Part `memory` has 5 million rows of 96 dimensions and needs 3 GB of disk in
`--folder`; part `engines` has 300,000 of 128. Writes `results/beyond_memory.json`; a part replaces its rows.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, report, row

BATCH, GROUP = 10_000, 20
SIZES = {"memory": (5_000_000, 96), "engines": (300_000, 128)}
ENGINES = {"memory": ["lance"], "engines": ["lance", "ivf", "flat"]}


def draw(count: int, dim: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of rows and the numbers of their groups."""
    topics = np.random.default_rng(0).standard_normal((200, dim), dtype=np.float32)
    for start in range(0, count, BATCH):
        random = np.random.default_rng([1, start])
        size = min(BATCH, count - start)
        centers = topics[random.integers(200, size=size // GROUP)]
        centers = centers + random.standard_normal(centers.shape, dtype=np.float32)
        noise = random.standard_normal((size, dim), dtype=np.float32)
        groups = np.arange(start, start + size) // GROUP
        yield {"vector": np.repeat(centers, GROUP, 0) + 0.7 * noise, "group": groups, "part": groups % 10}


def draw_queries(count: int, dim: int) -> np.ndarray:
    """Return 200 queries: rows with noise, and rows of groups that are not in the space."""
    known = next(draw(count, dim))["vector"][::100]
    random = np.random.default_rng(2)
    topics = np.random.default_rng(0).standard_normal((200, dim), dtype=np.float32)
    new = topics[random.integers(200, size=100)] + 1.2 * random.standard_normal((100, dim), dtype=np.float32)
    return np.concatenate([known + 0.5 * random.standard_normal(known.shape, dtype=np.float32), new])


def peak() -> float:
    """Return the peak of this process's resident memory, GB."""
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024 / 1e9


def measure(engine: str, count: int, dim: int, folder: Path) -> dict[str, Any]:
    """Build a space and search it; return seconds and peaks of memory by step, and the results."""
    seconds, peaks = {}, {}
    queries = draw_queries(count, dim)

    def step(name: str, function: Any) -> Any:
        start = time.perf_counter()
        result = function()
        seconds[name], peaks[name] = time.perf_counter() - start, peak()
        print(engine, name, round(seconds[name], 3), round(peaks[name], 3), file=sys.stderr, flush=True)
        return result

    if engine == "lance":
        from hf_sphere.search.lance import LanceSpace

        peaks["import"] = peak()
        space: Any = step(
            "write", lambda: LanceSpace.create(folder, draw(count, dim), group_column="group", score="cosine")
        )
        step("index", space.build_index)
    else:
        from hf_sphere.search.space import EmbeddingSpace

        peaks["import"] = peak()

        def fill() -> Any:
            vectors = np.concatenate([batch["vector"] for batch in draw(count, dim)])
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            return EmbeddingSpace(torch.from_numpy(vectors), np.arange(count) // GROUP, score="cosine", kind=engine)

        space = step("write", fill)
        step("index", lambda: space.neighbor_search)
    step("calibrate", lambda: space.calibration)
    found = step("search", lambda: space.search(queries, 10, false_accept=0.05))
    if engine == "lance":
        step("filter", lambda: space.search(queries, 10, false_accept=0.05, where="part = 3"))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9 if folder.exists() else 0.0
    recall = getattr(space, "recall", None) or space.neighbor_search.recall
    results = {"scores": found.scores.tolist(), "accepted": found.accepted[:, 0].tolist(), "recall": recall}
    return {"seconds": seconds, "peaks": peaks, "disk": size, **results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--folder", type=Path, default=Path("outputs/beyond_memory"))
    parser.add_argument("--size", type=float, default=1.0, help="fraction of the rows")
    parser.add_argument("--note", default="", help="remark for the results, for instance on other work of the machine")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(measure(args.engine[0], int(args.engine[1]), int(args.engine[2]), args.folder)))
        return
    path, rows = RESULTS / "beyond_memory.json", {}
    if path.exists():
        rows = {line["what"]: line for line in json.loads(path.read_text())["rows"]}
    for part in args.parts:
        count, dim = max(BATCH, round(args.size * SIZES[part][0]) // BATCH * BATCH), SIZES[part][1]
        results = {}
        for engine in ENGINES[part]:
            shutil.rmtree(args.folder, ignore_errors=True)
            command = [sys.executable, __file__, "--folder", args.folder, "--engine", engine, str(count), str(dim)]
            results[engine] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            shutil.rmtree(args.folder, ignore_errors=True)
        title = f"{count:,} x {dim}"
        for engine, result in results.items():
            lines = [row(f"{title}, {engine}: recall@10 at the build", result["recall"], at_least=0.98)]
            if "flat" in results:
                lowest = np.array(results["flat"]["scores"])[:, -1:] - 1e-9
                recall = float((np.array(result["scores"]) >= lowest).mean())
                lines.append(row(f"{title}, {engine}: recall@10 of queries", recall))
            for half, accepted in zip(("known", "new"), np.split(np.array(result["accepted"]), 2), strict=True):
                lines.append(row(f"{title}, {engine}: accepted of {half} queries at 5%", float(accepted.mean())))
            for name, value in result["seconds"].items():
                per_query = name in ("search", "filter")
                what = f"{title}, {engine}: {'milliseconds per query, ' if per_query else 'seconds, '}{name}"
                lines.append(row(what, value * 5 if per_query else value))
            for name, value in result["peaks"].items():
                bound = 1.5 if part == "memory" else None
                lines.append(row(f"{title}, {engine}: peak GB of resident memory, {name}", value, at_most=bound))
            lines.append(row(f"{title}, {engine}: GB on disk", result["disk"]))
            rows.update({line["what"]: line for line in lines})
    report("beyond_memory", list(rows.values()), note=args.note)


if __name__ == "__main__":
    main()
