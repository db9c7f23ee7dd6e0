import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap

from hf_sphere.geometry import OPERATORS, angular_response
from hf_sphere.nn import AngularConv2d, AngularLinear, build_head

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DIRECT = [name for name, operator in OPERATORS.items() if operator.normalizes_input]
LAYERS = [lambda operator: AngularLinear(8, 5, operator), lambda operator: AngularConv2d(2, 5, 2, operator)]


def plain_response(x: Tensor, weight: Tensor, operator: str) -> Tensor:
    """Evaluate the formulas of the paper for vectors (..., d) and weights (K, d) in float64."""
    x, weight = x.double(), weight.double()
    values = x @ weight.T / weight.norm(dim=-1)
    if not operator.startswith("w_"):
        values = values / x.norm(dim=-1, keepdim=True)
    if operator.endswith("cosine"):
        return values
    angle = values.clamp(-1, 1).acos()
    if operator.endswith("linear"):
        return 1 - 2 * angle / math.pi
    k = 0.3
    end, here = math.exp(-math.pi / (2 * k)), torch.exp(angle / k - math.pi / (2 * k))
    return (1 + end) / (1 - end) * (1 - here) / (1 + here)


def plain_convolution(x: Tensor, layer: AngularConv2d, margins: list[int]) -> Tensor:
    """Evaluate the formulas on patches extracted one by one."""
    padded = F.pad(x, margins)
    patches = F.unfold(padded, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)  # (N, C k k, positions)
    answers = plain_response(patches.movedim(1, -1), layer.weight.flatten(1), layer.operator).movedim(-1, 1)
    span = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    sides = [
        (side - length) // step + 1 for side, length, step in zip(padded.shape[-2:], span, layer.stride, strict=True)
    ]
    return answers.unflatten(-1, sides)


# Operators as functions


def test_operators_list_and_input_normalization():
    assert list(OPERATORS) == ["cosine", "linear", "sigmoid", "w_cosine", "w_linear", "w_sigmoid"]
    assert [operator.normalizes_input for operator in OPERATORS.values()] == [True] * 3 + [False] * 3


@given(value=st.floats(-1, 1, width=32))
def test_responses_match_the_formula(value):
    point, axis = torch.tensor([[value, (1 - value**2) ** 0.5]], dtype=torch.float64), torch.eye(2)[:1]
    for operator in OPERATORS:
        for dtype in (torch.float32, torch.float64):
            answer = angular_response(torch.tensor(value, dtype=dtype), operator)
            assert answer.item() == pytest.approx(plain_response(point, axis, operator).item(), abs=1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_responses_are_exact_at_0_90_and_180_degrees_accurate_near_90_and_clipped_beyond_one(operator):
    answers = angular_response(torch.tensor([-1.0, 0.0, 1.0]), operator)
    torch.testing.assert_close(answers, torch.tensor([-1.0, 0.0, 1.0]), rtol=0, atol=1e-7)
    assert answers[1] == 0
    small = torch.tensor([1e-7, 1e-20, 1e-37])
    slope = {"cosine": 1.0, "linear": 2 / math.pi, "sigmoid": 1 / (0.6 * math.tanh(math.pi / 1.2))}
    expected = small * slope[operator.removeprefix("w_")]
    torch.testing.assert_close(angular_response(small, operator), expected, rtol=1e-6, atol=0)
    limit = 3.0 if operator.endswith("cosine") else 1.0
    answers = angular_response(torch.tensor([3.0, -3.0]), operator)
    torch.testing.assert_close(answers, torch.tensor([limit, -limit]))


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


def test_an_unknown_operator_and_integers_are_refused():
    with pytest.raises(ValueError, match=r"operator must be one of cosine, linear, .*w_sigmoid; got 'cos'"):
        angular_response(torch.zeros(1), "cos")
    with pytest.raises(TypeError, match=r"floating-point dtype; got torch.int64. Convert it with .float\(\)"):
        angular_response(torch.tensor([1]), "cosine")


# Layers


@pytest.mark.parametrize("operator", OPERATORS)
def test_linear_layer_matches_the_formula(operator):
    layer, x = AngularLinear(64, 10, operator), torch.randn(3, 7, 64)
    answers = layer(x)
    assert answers.dtype == torch.float32
    torch.testing.assert_close(answers.double(), plain_response(x, layer.weight, operator), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("operator", DIRECT)
def test_response_to_a_weight_is_exact(operator, sign):
    linear, conv = AngularLinear(300, 20, operator), AngularConv2d(12, 20, 5, operator)
    for answers in (linear(sign * linear.weight), conv(sign * conv.weight).flatten(1)):
        torch.testing.assert_close(answers.diagonal(), torch.full((20,), sign), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("options", "margins"),
    [
        ({}, [0, 0, 0, 0]),
        ({"stride": 2, "padding": 1}, [1, 1, 1, 1]),
        ({"stride": (2, 3), "padding": (2, 1)}, [1, 1, 2, 2]),
        ({"dilation": (1, 2), "padding": 2}, [2, 2, 2, 2]),
        ({"padding": "valid", "dilation": 2}, [0, 0, 0, 0]),
        ({"padding": "same"}, [0, 1, 1, 1]),  # the kernel has three rows and two columns
        ({"padding": "same", "dilation": 3}, [1, 2, 3, 3]),
    ],
    ids=str,
)
def test_convolution_matches_the_formula_on_every_patch(operator, options, margins):
    layer, x = AngularConv2d(4, 6, (3, 2), operator, **options), torch.randn(2, 4, 9, 8)
    expected = plain_convolution(x, layer, margins)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-6, atol=1e-6)


def test_convolution_accepts_an_unbatched_image_and_layers_show_the_operator():
    layer, x = AngularConv2d(3, 4, 3, "sigmoid", padding=1), torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    assert repr(AngularLinear(4, 3, "w_linear")).endswith("bias=False, operator=w_linear)")
    assert repr(AngularConv2d(4, 3, 2)).endswith("bias=False, operator=cosine)")


@given(power=st.integers(-35, 35), seed=st.integers(0, 2**31))
def test_operators_ignore_the_weight_norm_and_direct_ones_the_input_norm(power, seed):
    torch.manual_seed(seed)
    for operator in OPERATORS:
        for layer, x in layers_and_inputs(operator):
            before = layer(x)
            if operator in DIRECT:
                torch.testing.assert_close(layer(x * 10.0**power), before, rtol=1e-5, atol=1e-6)
            with torch.no_grad():
                layer.weight *= 10.0**power
            torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-6)


def layers_and_inputs(operator: str) -> tuple[tuple[nn.Module, Tensor], ...]:
    conv = AngularConv2d(2, 3, 3, operator, padding=1)
    return (AngularLinear(6, 3, operator), torch.randn(4, 6)), (conv, torch.randn(2, 2, 6, 6))


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_match_finite_differences(operator):
    for layer, shape in (
        (AngularLinear(4, 3, operator), (5, 4)),
        (AngularConv2d(2, 2, 2, operator, stride=2), (1, 2, 4, 4)),
    ):
        layer, x = layer.double(), 0.4 * torch.randn(shape, dtype=torch.float64, requires_grad=True)

        def answer(x: Tensor, weight: Tensor, layer: nn.Module = layer) -> Tensor:
            return torch.func.functional_call(layer, {"weight": weight}, (x,))

        assert torch.autograd.gradcheck(answer, (x, layer.weight))
        assert torch.autograd.gradgradcheck(answer, (x, layer.weight))


@pytest.mark.parametrize("operator", DIRECT)
@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_are_accurate_if_the_input_is_close_to_a_weight(operator, sign):
    layer = AngularLinear(4, 1, operator).double()
    x = (sign * layer.weight + 1e-3 * torch.randn(1, 4, dtype=torch.float64)).detach().requires_grad_()
    assert torch.autograd.gradcheck(layer, x, eps=1e-8, atol=1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layer_of", LAYERS)
def test_gradients_are_bounded_if_the_input_is_a_weight(operator, layer_of):
    layer = layer_of(operator)
    x = layer.weight.detach().clone().requires_grad_()
    layer(x).sum().backward()
    for gradient, of in ((x.grad, x), (layer.weight.grad, layer.weight)):
        # Moving x by 1 changes the angle by up to 1 / |x|; the slope of w_ operators is bounded by 100.
        lengths = of.detach().flatten(1).norm(dim=-1)
        steepest = 5 * 3 * (100 if operator.startswith("w_") else 1 / lengths.min())
        assert gradient.isfinite().all()
        assert gradient.abs().max() <= steepest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layer_of", LAYERS)
def test_zero_input_gives_zero(operator, dtype, layer_of):
    layer = layer_of(operator).to(dtype)
    x = torch.zeros_like(layer.weight[:2]).requires_grad_()
    answers = layer(x)
    (gradient,) = torch.autograd.grad(answers.sum(), x)
    assert answers.dtype == gradient.dtype == dtype
    assert answers.abs().max() == 0
    assert gradient.isfinite().all()
    assert (gradient.abs().max() == 0) == (operator in DIRECT)


@pytest.mark.parametrize("operator", DIRECT)
def test_zero_patches_have_zero_first_and_second_gradients(operator):
    layer, x = AngularConv2d(2, 3, 3, operator, padding=1), torch.zeros(1, 2, 8, 8)
    x[..., :3, :3] = torch.randn(3, 3)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    for values in (gradient, x.grad):
        assert values.isfinite().all()
        assert values[..., 5:, 5:].abs().max() == 0
        assert values[..., :3, :3].abs().max() > 0


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layer_of", LAYERS)
def test_autocast_responses_match_float32(operator, layer_of):
    layer = layer_of(operator)
    x = torch.randn_like(layer.weight[:3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answers, rounded = layer(x), layer(x.bfloat16())
    assert torch.equal(answers, layer(x))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, layer(x.bfloat16().float()).bfloat16())


@pytest.mark.parametrize("operator", ["cosine", "sigmoid", "w_linear"])  # without and with a function of the angle
def test_layers_compile_with_fullgraph(operator):
    for layer, x in layers_and_inputs(operator):
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))


# The head


@pytest.mark.parametrize("operator", OPERATORS)
def test_head_logits_are_the_responses_to_the_embeddings_and_weights_do_not_decay(operator):
    head, x, labels = build_head("angular", 8, 4, operator=operator), torch.randn(5, 8), torch.arange(5) % 4
    output, expected = head(x, labels), plain_response(x, head.linear.weight, operator)
    torch.testing.assert_close(output.logits.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.loss.double(), F.cross_entropy(expected, labels))
    torch.testing.assert_close(output.embeddings, F.normalize(x, dim=-1) if operator in DIRECT else x)
    assert head.parameter_options() == {"linear.weight": {}}
