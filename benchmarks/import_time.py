"""What does `import hf_sphere` add to `import transformers`?

python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys
import time

from common import report, row


def seconds(program: str) -> float:
    """Wall time of a new Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Run both programs in turn."""
    pairs = [(seconds("import transformers"), seconds("import transformers, hf_sphere")) for _ in range(7)][2:]
    report(
        "import_time",
        [
            row("import transformers, s", statistics.median(a for a, _ in pairs)),
            row("added by import hf_sphere, s", statistics.median(b - a for a, b in pairs), at_most=0.3),
        ],
    )


if __name__ == "__main__":
    main()
