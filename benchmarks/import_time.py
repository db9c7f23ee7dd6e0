"""Time of `import hf_sphere` after `import transformers`, and what a search of vectors adds to `import torch`.

python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys

from common import report, row

PROGRAM = """
import time
start = time.perf_counter()
import transformers
between = time.perf_counter()
import hf_sphere
print(between - start, time.perf_counter() - between)
"""

SEARCH = """
import time
start = time.process_time()
import torch
between = time.process_time()
import numpy as np
from hf_sphere.search import EmbeddingSpace
vectors = np.random.default_rng(0).standard_normal((1_000, 384), np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
EmbeddingSpace.fit(vectors).search(vectors[0], k=3, false_accept=0.05)
print(between - start, time.process_time() - between)
"""


def times(program: str, runs: int) -> tuple[float, float]:
    """Return the medians of the two times that a program prints; the first two of its runs fill the file cache."""
    command = [sys.executable, "-c", program]
    printed = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2 + runs)][2:]
    first, second = zip(*(map(float, run.split()) for run in printed), strict=True)
    return statistics.median(first), statistics.median(second)


def main() -> None:
    """Time the imports in new processes."""
    transformers, after_it = times(PROGRAM, 5)
    torch, search = times(SEARCH, 5)
    report(
        "import_time",
        [
            row("import transformers, s", transformers),
            row("import hf_sphere after it, s", after_it, at_most=0.3),
            row("import torch, s of processor time", torch),
            row("search among 1,000 vectors of 384 dimensions after it, s of processor time", search, at_most=1.0),
        ],
    )


if __name__ == "__main__":
    main()
