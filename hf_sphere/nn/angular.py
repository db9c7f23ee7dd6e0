"""Linear and convolution layers that answer to the angle between input and weight."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry.angular import Operator, angular_response, find_operator


class AngularLinear(nn.Linear):
    """A linear layer without bias whose products are replaced by an angular operator.

    The direct operators (`cosine`, `linear`, `sigmoid`) see nothing but the angle between an input and each weight
    vector; the others (`w_cosine`, `w_linear`, `w_sigmoid`) see `x.w / |w|`. The functions are those of
    `hf_sphere.geometry.angular_response`. An input of zero has no angle: the direct operators answer 0, without
    gradient.

    The arcsine of a cosine near 1 magnifies its rounding: of float32, to 3e-4. So `linear` and `sigmoid` and their `w_`
    forms compute products and lengths in float64 (float32 on devices without it, such as mps), whatever the autocast
    dtype, which takes twice the memory of float32 and, where float64 is slow, a multiple of the time. The cosines are
    computed in float32 or better.

    Args:
        in_features: Length of the input vectors.
        out_features: Number of weight vectors.
        operator: A key of `hf_sphere.geometry.OPERATORS`.

    Shape:
        - Input: (..., in_features).
        - Output: (..., out_features), of the input's dtype; in [-1, 1] up to rounding, but for `w_cosine`.

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
        """Answer for the vectors along the last axis."""
        operator = find_operator(self.operator)
        with torch.autocast(x.device.type, enabled=False):
            inputs, weight = _widen(x, self.weight, operator)
            if operator.normalizes_input:
                inputs = _unit(inputs, dims=-1)
            values = F.linear(inputs, _unit(weight, dims=-1))
            return angular_response(values, self.operator).to(x.dtype)

    def extra_repr(self) -> str:
        """Describe the layer with its operator."""
        return f"{super().extra_repr()}, operator={self.operator}"


class AngularConv2d(nn.Conv2d):
    """A convolution without bias whose products are replaced by an angular operator.

    As `AngularLinear` on the patches that the kernel sees. The length of each patch comes from the lengths of its
    pixels, whose squares are summed over the window on one channel, whatever the number of channels. To patches of
    zeros, as in the padding or where all units are off, the direct operators answer 0, without gradient.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of filters.
        kernel_size: As in `torch.nn.Conv2d`.
        operator: See `AngularLinear`.
        stride: As in `torch.nn.Conv2d`.
        padding: As in `torch.nn.Conv2d`, with zeros; also `same` or `valid`.
        dilation: As in `torch.nn.Conv2d`.

    Shape:
        - Input: (N, in_channels, H, W) or (in_channels, H, W).
        - Output: (N, out_channels, H', W') or (out_channels, H', W'), of the input's dtype; in [-1, 1] up to
          rounding, but for `w_cosine`.

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
        """Answer for every patch."""
        operator = find_operator(self.operator)
        with torch.autocast(x.device.type, enabled=False):
            inputs, weight = _widen(x, self.weight, operator)
            filters = _unit(weight, dims=(1, 2, 3))
            values = F.conv2d(inputs, filters, None, self.stride, self.padding, self.dilation)
            if operator.normalizes_input:
                values = values / self._patch_lengths(x).to(values.dtype)
            return angular_response(values, self.operator).to(x.dtype)

    def _patch_lengths(self, x: Tensor) -> Tensor:
        """Length of each patch, (..., 1, H', W'), made ready to divide by."""
        sums = F.pad(_sum_of_squares(x, dims=-3), self._margins())
        for dim in (-2, -1):  # a window's sum is the sum over its rows of the sums over its columns
            size, stride, dilation = self.kernel_size[dim], self.stride[dim], self.dilation[dim]
            sums = sums.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation].sum(-1)
        return _divisor(sums)

    def _margins(self) -> list[int]:
        """Pixels of padding as left, right, top, bottom."""
        if self.padding == "valid":
            return [0, 0, 0, 0]
        if isinstance(self.padding, str):
            spans = [dilation * (size - 1) for dilation, size in zip(self.dilation, self.kernel_size, strict=True)]
            return [margin for span in reversed(spans) for margin in (span // 2, span - span // 2)]
        return [margin for margin in reversed(self.padding) for _ in range(2)]

    def extra_repr(self) -> str:
        """Describe the layer with its operator."""
        return f"{super().extra_repr()}, operator={self.operator}"


def _widen(x: Tensor, weight: Tensor, operator: Operator) -> tuple[Tensor, Tensor]:
    """Bring both to the dtype that the operator is computed in."""
    if not x.is_floating_point():
        raise TypeError(f"expected an input of a floating dtype; got {x.dtype}. Convert it with .float().")
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    if operator.of_angle is not None:
        dtype = _exact(x)
    return x.to(dtype), weight.to(dtype)


def _unit(vectors: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Divide vectors by their lengths, however small; those of zero stay, without a gradient."""
    return vectors / _divisor(_sum_of_squares(vectors, dims)).to(vectors.dtype)


def _sum_of_squares(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """In float64, where the squares of float32 neither vanish nor overflow."""
    return x.to(_exact(x)).square().sum(dims, keepdim=True)


def _divisor(squares: Tensor) -> Tensor:
    """Lengths by their squares, with infinity for zero: what is divided by it is 0, and so are all derivatives."""
    return squares.masked_fill(squares == 0, torch.inf).sqrt()


def _exact(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64  # Metal has no float64
