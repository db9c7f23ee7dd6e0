"""Time of `import hf_sphere` after `import transformers`.

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


def main() -> None:
    """Time both imports in new processes."""
    runs = [subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True).stdout for _ in range(7)]
    pairs = [tuple(map(float, run.split())) for run in runs[2:]]
    report(
        "import_time",
        [
            row("import transformers, s", statistics.median(a for a, _ in pairs)),
            row("import hf_sphere after it, s", statistics.median(b for _, b in pairs), at_most=0.3),
        ],
    )


if __name__ == "__main__":
    main()
