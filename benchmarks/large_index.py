"""Measure memory, disk space and time of an approximate search of many vectors: build, open, search, add.

python benchmarks/large_index.py
python benchmarks/large_index.py --rows 200000 --kind hnsw --steps build open search
python benchmarks/large_index.py --what index --steps build open

The vectors are unit vectors in 384 dimensions in clusters of 50, float32, in a file that is mapped into memory. Each
step is a process of its own. Its memory is the largest resident one, anonymous and mapped together, with Python and all
libraries, as a multiple of the bytes of the vectors; that of the imports alone is a row too. `anonymous` is the part
that is not mapped from files, sampled. Writes `results/large_index.json`, or that with the name of a run (`--name`).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import report, row
from torch import Tensor

import hf_sphere.search
from hf_sphere.search import EmbeddingSpace, NeighborSearch

DIM, CLUSTER, ADDED, QUERIES, K = 384, 50, 1_000, 2_000, 10
STEPS = ("build", "open", "search", "add")
LIMITS = {"build": 1.6, "open": 1.2, "add": 1.6}


def status(name: str) -> int:
    """Return a number of bytes of `/proc/self/status`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def draw(count: int, seed: int, shift: float = 0.0) -> Tensor:
    """Draw unit vectors of clusters: those of a seed are new members of the clusters of the file."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(20_000, DIM, generator=torch.Generator().manual_seed(0))[: max(1, count // CLUSTER)]
    parts = []
    for size in (min(50_000, count - start) for start in range(0, count, 50_000)):
        chosen = centers[torch.randint(len(centers), (size,), generator=generator)]
        parts.append(F.normalize(chosen + 0.7 * torch.randn(size, DIM, generator=generator) + shift))
    return torch.cat(parts)


@contextmanager
def measured(result: dict[str, float], name: str) -> Iterator[None]:
    wall, processor = time.perf_counter(), time.process_time()
    yield
    result[f"{name}, seconds"] = time.perf_counter() - wall
    result[f"{name}, processor seconds"] = time.process_time() - processor


def run(step: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run one step in this process, and return what it measured."""
    import faiss  # noqa: F401, so that it counts as an import

    # Only what is measured is imported: `ImageIndex` needs further libraries, for images and models.
    kind: Any = getattr(hf_sphere.search, {"space": "EmbeddingSpace", "index": "ImageIndex"}[args.what])
    result: dict[str, float] = {}
    imports, largest, done = status("VmHWM"), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            largest[0] = max(largest[0], status("RssAnon"))

    threading.Thread(target=sample, daemon=True).start()
    queries = torch.from_numpy(np.load(folder / "queries.npy"))
    if step == "build":
        vectors = torch.from_numpy(np.load(folder / "vectors.npy", mmap_mode="c"))
        with measured(result, "fit"):
            made = (
                EmbeddingSpace.fit(vectors, kind=args.kind, score="cosine")
                if args.what == "space"
                else kind.build(None, vectors, kind=args.kind, progress=False)
            )
        with measured(result, "build"):
            search = getattr(made, "space", made).neighbor_search
        result["recall@10, as measured by the search"] = search.recall
        with measured(result, "save"):
            made.save(folder / "saved")
        size = sum(path.stat().st_size for path in (folder / "saved").iterdir())
        result["disk, times the bytes of the vectors"] = size / vectors.nbytes
    else:
        with measured(result, "load"):
            made = kind.load(folder / "saved")
    find = getattr(made, "space", made).neighbor_search.search
    if step in ("open", "search"):
        with measured(result, "first query"):
            find(queries[:1], K)
    if step == "search":
        exact = NeighborSearch(made.space.vectors if args.what == "index" else made.vectors, kind="flat")
        farthest = exact.search(queries[:500], K)[0][:, -1:] * (1 + 1e-9)
        result["recall@10 of new queries"] = float((find(queries[:500], K)[0] <= farthest).double().mean())
        for size in (len(queries), 1):
            for attempt in ("first", "again"):
                with measured(result, f"{size:,} queries at once, {attempt}"):
                    for block in queries[: 200 if size == 1 else None].split(size):
                        find(block, K)
    if step == "add":
        new = draw(ADDED, seed=2)
        with measured(result, f"add {ADDED:,} rows"):
            made.add(None, new) if args.what == "space" else made.add(new, progress=False)
        with measured(result, "first search after it"):
            rows = getattr(made, "space", made).neighbor_search.search(new, 1)[1][:, 0]
        result["new rows that are found, fraction"] = float((rows >= args.rows).double().mean())
        with measured(result, "save after it"):
            made.save(folder / "added")
        shutil.rmtree(folder / "added")
    done.set()
    result |= {"imports, bytes": imports, "peak, bytes": status("VmHWM"), "anonymous peak, bytes": largest[0]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=["ivf", "hnsw"], default="ivf")
    parser.add_argument("--what", choices=["space", "index"], default="space", help="EmbeddingSpace or ImageIndex")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--folder", type=Path, help="keep the vectors and the index here")
    parser.add_argument("--name", default="large_index", help="name of the results")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step is not None:
        print(json.dumps(run(args.step, args, args.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "vectors.npy").exists():
            np.save(folder / "vectors.npy", draw(args.rows, seed=0).numpy())
            np.save(folder / "queries.npy", draw(args.rows, seed=1)[:QUERIES].numpy())
        total, rows = 4 * DIM * args.rows, []
        for step in args.steps:
            options = ["--rows", str(args.rows), "--kind", args.kind, "--what", args.what, "--folder", str(folder)]
            command = [sys.executable, __file__, *options, "--step", step]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                what, unit = name.removesuffix(", bytes"), name.endswith(", bytes")
                limit = LIMITS.get(step) if what == "peak" else None
                text = f"{step}: {what}" + (", times the bytes of the vectors" if unit else "")
                rows.append(row(text, value / total if unit else value, at_most=limit))
    report(args.name, rows, vectors=args.rows, dim=DIM, kind=args.kind, what=args.what)


if __name__ == "__main__":
    main()
