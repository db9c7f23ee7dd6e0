"""The Triton kernels of `spherize`, computed by Triton's interpreter on the CPU, against float64 in plain torch."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import json
import torch
from hf_sphere.geometry import coordinates, spherize

def run(x, scaling, radius, cotangent):
    leaves = [tensor.clone().requires_grad_() for tensor in (x, scaling, radius)]
    points = spherize(*leaves)
    points.backward(cotangent)
    return [points.detach(), *(leaf.grad for leaf in leaves)]

def error(ours, exact):
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item()

errors = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for shape in ((3, 1), (5, 7), (2, 3, 64), (3, 333), (2, 8192), (1, 10001)):
        for slope in (1.0, 4.0):
            generator = torch.Generator().manual_seed(0)
            x, cotangent = (
                torch.randn(*shape[:-1], shape[-1] + more, generator=generator).to(dtype) for more in (0, 1)
            )
            inputs = x, torch.tensor(slope), torch.tensor(3.0), cotangent
            coordinates._uses_kernel = lambda x: False
            exact = run(*(tensor.double() for tensor in inputs))
            coordinates._uses_kernel = lambda x: True
            ours = run(*inputs)
            assert [tensor.dtype for tensor in ours] == [dtype, dtype, torch.float32, torch.float32]
            errors[f"{dtype}, {shape}, {slope}"] = [*map(error, ours, exact)]
x = torch.randn(6, 5)
one, cotangent = torch.tensor(1.0), torch.randn(5, 7)
pair = run(x.T, one, one, cotangent.T.contiguous().T), run(x.T.contiguous(), one, one, cotangent)
errors["not contiguous"] = [error(a, b.double()) for a, b in zip(*pair, strict=True)]
errors["no rows"] = [tensor.numel() for tensor in run(x[:0], one, one, x.new_ones(0, 6))]
extreme = run(torch.tensor([[-1e30, 1e30, 0.0, -50.0, 50.0]]), one, one, torch.ones(1, 6))
errors["extreme"] = [int(tensor.isfinite().all()) for tensor in extreme]
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    """Largest error relative to the largest value: of points, and gradients of values, scaling and radius."""
    # Functions of Triton are interpreted if the variable is set when it is imported.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SHAPES = ["(3, 1)", "(5, 7)", "(2, 3, 64)", "(3, 333)", "(2, 8192)", "(1, 10001)"]


@pytest.mark.parametrize("shape", SHAPES)
def test_points_and_gradients_in_float32_have_six_digits(errors, shape):
    for slope in (1.0, 4.0):
        points, grad_x, grad_scaling, grad_radius = errors[f"torch.float32, {shape}, {slope}"]
        assert max(points, grad_x) < 1e-6
        assert max(grad_scaling, grad_radius) < 3e-6  # sums of all, which cancel


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_points_and_gradients_in_half_precision_have_two_digits(errors, dtype, shape):
    for slope in (1.0, 4.0):
        points, grad_x, *_ = errors[f"{dtype}, {shape}, {slope}"]
        assert max(points, grad_x) < 1e-2


def test_tensors_that_are_not_contiguous_have_no_rows_or_extreme_values_are_supported(errors):
    assert max(errors["not contiguous"]) == 0  # against the same values
    assert errors["no rows"] == [0, 0, 1, 1]  # neither points nor a gradient
    assert errors["extreme"] == [1, 1, 1, 1]  # all finite
