"""Linear and convolution layers with an angular operator in place of the dot product."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.angular import Operator, angular_response, find_operator


class AngularLinear(nn.Linear):
    """Linear layer without bias in which an angular operator replaces the dot product.

    The direct operators (`cosine`, `linear`, `sigmoid`) depend only on the angle between an input and each weight
    vector; the others (`w_cosine`, `w_linear`, `w_sigmoid`) depend on `x.w / |w|`. The functions are those of
    `hf_sphere.geometry.angular_response`. A zero input has no angle: direct operators return 0 for it, with zero
    gradient.

    The arcsine magnifies the rounding error of a cosine near 1, to 3e-4 in float32. Therefore `linear` and `sigmoid`
    and their `w_` forms compute products and norms in float64 (float32 on devices without it, such as mps), regardless
    of the autocast dtype. This takes twice the memory of float32 and, where float64 is slow, several times as long. The
    cosines are computed in float32 or better.

    Args:
        in_features: Length of the input vectors.
        out_features: Number of weight vectors.
        operator: A key of `hf_sphere.geometry.OPERATORS`.

    Shape:
        - Input: (..., in_features).
        - Output: (..., out_features), of the input's dtype; within [-1, 1] up to rounding, except for `w_cosine`.

    Raises:
        ValueError: If the operator is unknown.

    Reference:
        Liu et al., "Deep hyperspherical learning", NeurIPS 2017; as compared by Kim and Kim, "Spherization layer:
        representation using only angles", NeurIPS 2022.
    """

    def __init__(self, in_features: int, out_features: int, operator: str = "cosine") -> None:
        find_operator(operator)
        super().__init__(in_features, out_features, bias=False)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        """Apply the operator along the last axis."""
        operator = find_operator(self.operator)
        with torch.autocast(x.device.type, enabled=False):
            inputs, weight = _upcast(x, self.weight, operator)
            if operator.normalizes_input:
                inputs = _unit(inputs, dims=-1)
            values = F.linear(inputs, _unit(weight, dims=-1))
            return angular_response(values, self.operator).to(x.dtype)

    def extra_repr(self) -> str:
        """Describe the layer with its operator."""
        return f"{super().extra_repr()}, operator={self.operator}"


class AngularConv2d(nn.Conv2d):
    """Convolution without bias in which an angular operator replaces the dot product.

    `AngularLinear` is applied to every patch. The squared norm of a patch is the sum of the squared norms of its
    pixels, so the window sums require a single channel. For patches of zeros, as in the padding or where all units are
    inactive, the direct operators return 0, with zero gradient.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of filters.
        kernel_size: As in `torch.nn.Conv2d`.
        operator: See `AngularLinear`.
        stride: As in `torch.nn.Conv2d`.
        padding: As in `torch.nn.Conv2d`, including `same` and `valid`.
        dilation: As in `torch.nn.Conv2d`.

    Shape:
        - Input: (N, in_channels, H, W) or (in_channels, H, W).
        - Output: (N, out_channels, H', W') or (out_channels, H', W'), of the input's dtype; within [-1, 1] up
          to rounding, except for `w_cosine`.

    Raises:
        ValueError: If the operator is unknown.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        operator: str = "cosine",
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
    ) -> None:
        find_operator(operator)
        super().__init__(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, dilation=dilation, bias=False
        )
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        """Apply the operator to every patch."""
        operator = find_operator(self.operator)
        with torch.autocast(x.device.type, enabled=False):
            inputs, weight = _upcast(x, self.weight, operator)
            filters = _unit(weight, dims=(1, 2, 3))
            values = F.conv2d(inputs, filters, None, self.stride, self.padding, self.dilation)
            if operator.normalizes_input:
                values = values / self._patch_norms(x).to(values.dtype)
            return angular_response(values, self.operator).to(x.dtype)

    def _patch_norms(self, x: Tensor) -> Tensor:
        """Return the norm of each patch, (..., 1, H', W'), with infinity for 0."""
        squares = _sum_of_squares(x, dims=-3)
        window = squares.new_ones(1, 1, *self.kernel_size)
        return _divisor(F.conv2d(squares, window, None, self.stride, self.padding, self.dilation))

    def extra_repr(self) -> str:
        """Describe the layer with its operator."""
        return f"{super().extra_repr()}, operator={self.operator}"


def _upcast(x: Tensor, weight: Tensor, operator: Operator) -> tuple[Tensor, Tensor]:
    """Convert input and weight to the dtype in which the operator is computed."""
    if not x.is_floating_point():
        raise TypeError(f"expected an input of a floating-point dtype; got {x.dtype}. Convert it with .float().")
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    if operator.of_angle is not None:
        dtype = _exact(x)
    return x.to(dtype), weight.to(dtype)


def _unit(vectors: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Divide vectors by their norms, however small; zero vectors stay zero, with zero gradient."""
    return vectors / _divisor(_sum_of_squares(vectors, dims)).to(vectors.dtype)


def _sum_of_squares(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Sum in float64, in which squares of float32 values neither underflow nor overflow."""
    return x.to(_exact(x)).square().sum(dims, keepdim=True)


def _divisor(squares: Tensor) -> Tensor:
    """Return square roots, with infinity for 0, so that quotients and all their derivatives are 0."""
    return squares.masked_fill(squares == 0, torch.inf).sqrt()


def _exact(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64  # Metal has no float64
