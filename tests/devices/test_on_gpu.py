import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import on_gpu


@pytest.mark.parametrize("name", ["spherize", "optimizers", "losses", "arcface_300k", "vmf_kernels", "throughput"])
def test_a_dry_run_measures_the_rows_of_a_part(pretend, name, request):
    if name == "losses":
        pytest.importorskip("pytorch_metric_learning")
    request.addfinalizer(lambda: torch.compiler.set_stance("default"))
    rows = on_gpu.PARTS[name].measure(pretend.NAME, 1)
    assert rows
    assert all(math.isfinite(row["value"]) for row in rows)
