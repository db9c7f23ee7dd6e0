import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch.func import grad, vmap

from hf_sphere.geometry import OPERATORS, angular_response

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def plain(value: float, operator: str) -> float:
    """Evaluate the formulas of the paper, computed from the angle."""
    if operator.endswith("cosine"):
        return value
    angle = math.acos(min(max(value, -1.0), 1.0))
    if operator.endswith("linear"):
        return 1 - 2 * angle / math.pi
    k = 0.3
    end, here = math.exp(-math.pi / (2 * k)), math.exp(angle / k - math.pi / (2 * k))
    return (1 + end) / (1 - end) * (1 - here) / (1 + here)


def test_operators_list_and_input_normalization():
    assert list(OPERATORS) == ["cosine", "linear", "sigmoid", "w_cosine", "w_linear", "w_sigmoid"]
    assert [operator.normalizes_input for operator in OPERATORS.values()] == [True] * 3 + [False] * 3


@given(value=st.floats(-1, 1, width=32))
def test_responses_match_the_formula(value):
    for operator in OPERATORS:
        for dtype in (torch.float32, torch.float64):
            answer = angular_response(torch.tensor(value, dtype=dtype), operator)
            assert answer.item() == pytest.approx(plain(value, operator), abs=1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_responses_at_0_90_and_180_degrees_are_exact(operator):
    answers = angular_response(torch.tensor([-1.0, 0.0, 1.0]), operator)
    torch.testing.assert_close(answers, torch.tensor([-1.0, 0.0, 1.0]), rtol=0, atol=1e-7)
    assert answers[1] == 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_small_cosines_are_accurate(operator):
    small = torch.tensor([1e-7, 1e-20, 1e-37])
    slope = {"cosine": 1.0, "linear": 2 / math.pi, "sigmoid": 1 / (0.6 * math.tanh(math.pi / 1.2))}
    expected = small * slope[operator.removeprefix("w_")]
    torch.testing.assert_close(angular_response(small, operator), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("operator", "answer"), [("w_cosine", 3.0), ("w_linear", 1.0), ("w_sigmoid", 1.0)])
def test_angle_operators_clip_projections_beyond_one(operator, answer):
    answers = angular_response(torch.tensor([3.0, -3.0], dtype=torch.float64), operator)
    torch.testing.assert_close(answers, torch.tensor([answer, -answer], dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_are_finite_everywhere(operator, dtype):
    near = [1 - 2.0**-power for power in range(1, 54)]
    values = torch.tensor([0.0, *near, 1.0, 1.5, 100.0], dtype=dtype)
    values = torch.cat([values, -values]).requires_grad_()
    answers = angular_response(values, operator)
    assert answers.dtype == dtype
    (gradient,) = torch.autograd.grad(answers.sum(), values)
    assert gradient.isfinite().all()
    assert (gradient >= 0).all()


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_match_finite_differences(operator):
    values = torch.linspace(-0.9, 0.9, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: angular_response(v, operator), values)
    assert torch.autograd.gradgradcheck(lambda v: angular_response(v, operator), values)


@pytest.mark.parametrize("operator", ["linear", "sigmoid"])
@pytest.mark.parametrize("angle", [1e-2, 1e-4, 1e-6])
def test_angle_gradient_is_accurate_near_0_and_180_degrees(operator, angle):
    """The derivative with respect to the angle is finite: the infinite slope of arccos meets a zero slope of cos."""
    angles = torch.tensor([angle, math.pi - angle], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(angular_response(angles.cos(), operator).sum(), angles)
    k, end = 0.3, torch.tensor([angle, math.pi - angle], dtype=torch.float64)
    sigmoid = 1 / (2 * k) / math.tanh(math.pi / (4 * k)) / torch.cosh((math.pi / 2 - end) / (2 * k)) ** 2
    expected = torch.full_like(end, 2 / math.pi) if operator == "linear" else sigmoid
    torch.testing.assert_close(gradient, -expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("operator", "unit"), [("w_linear", 2 / math.pi), ("w_sigmoid", None)])
def test_projection_gradient_is_bounded(operator, unit):
    values = torch.tensor([1.0, 1 - 1e-12, -1.0, 1.001], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(angular_response(values, operator).sum(), values)
    unit = unit or 1 / 0.6 / math.tanh(math.pi / 1.2) / math.cosh(math.pi / 1.2) ** 2
    expected = torch.tensor([100 * unit] * 3 + [0.0], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=0)


def test_operators_support_vmap():
    values = torch.linspace(-0.9, 0.9, 5)
    together = vmap(grad(lambda v: angular_response(v, "sigmoid")))(values)
    torch.testing.assert_close(
        together, torch.stack([grad(lambda v: angular_response(v, "sigmoid"))(v) for v in values])
    )


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"operator must be one of cosine, linear, .*w_sigmoid; got 'cos'"):
        angular_response(torch.zeros(1), "cos")
    with pytest.raises(TypeError, match=r"floating-point dtype; got torch.int64. Convert it with .float\(\)"):
        angular_response(torch.tensor([1]), "cosine")
