"""Spherization and angular layers."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.geometry import spherize
from hf_sphere.geometry.angular import angular_response, find_operator
from hf_sphere.geometry.checks import check_floating
from hf_sphere.geometry.coordinates import widest_dtype
from hf_sphere.utils.checks import check_integer, check_number


class _AngularLayer(nn.Module):
    weight: Tensor
    operator: str
    _products: Callable[[Tensor, Tensor, bool], Tensor]
    """Return the products of inputs, normalized or not, and normalized weights."""

    def forward(self, x: Tensor) -> Tensor:
        check_floating("the input", x)
        operator = find_operator(self.operator)
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        if operator.of_angle is not None:
            dtype = widest_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            products = self._products(x.to(dtype), self.weight.to(dtype), operator.normalizes_input)
            return angular_response(products, self.operator).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, operator={self.operator}"


class AngularLinear(_AngularLayer, nn.Linear):
    """Linear layer without bias in which an angular operator replaces the dot product.

    The direct operators (`cosine`, `linear`, `sigmoid`) depend only on the angle between an input and each weight
    vector; the others (`w_cosine`, `w_linear`, `w_sigmoid`) depend on `x.w / |w|`. For the functions, see
    `hf_sphere.geometry.angular_response`. A zero input has no angle: direct operators return 0 for it, with zero
    gradient. LoRA adds its product outside the operator, so merging it changes the outputs; use `modules_to_save`.

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

    Example:
        >>> AngularLinear(4, 3)(embeddings).shape
        torch.Size([60, 3])
    """

    def __init__(self, in_features: int, out_features: int, operator: str = "cosine") -> None:
        find_operator(operator)
        super().__init__(in_features, out_features, bias=False)
        self.operator = operator

    def _products(self, x: Tensor, weight: Tensor, normalized: bool) -> Tensor:
        return F.linear(_unit(x, dims=-1) if normalized else x, _unit(weight, dims=-1))


class AngularConv2d(_AngularLayer, nn.Conv2d):
    """Convolution without bias in which an angular operator replaces the dot product.

    `AngularLinear` is applied to every patch. The squared norm of a patch is the sum of the squared norms of its
    pixels, so the window sums require a single channel. For patches of zeros, as in the padding or where all units are
    inactive, the direct operators return 0, with zero gradient.

    Args:
        operator: See `AngularLinear`. For the other arguments, see `torch.nn.Conv2d`.

    Shape:
        - Input: (N, in_channels, H, W) or (in_channels, H, W).
        - Output: (N, out_channels, H', W') or (out_channels, H', W'), of the input's dtype; within [-1, 1] up
          to rounding, except for `w_cosine`.

    Raises:
        ValueError: If the operator is unknown.

    Example:
        >>> AngularConv2d(1, 4, 3)(images).shape
        torch.Size([8, 4, 6, 6])
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

    def _products(self, x: Tensor, weight: Tensor, normalized: bool) -> Tensor:
        options: Any = (None, self.stride, self.padding, self.dilation)
        values = F.conv2d(x, _unit(weight, dims=(1, 2, 3)), *options)
        return values / self._patch_norms(x).to(values.dtype) if normalized else values

    def _patch_norms(self, x: Tensor) -> Tensor:
        squares = _sum_of_squares(x, dims=-3)
        ones = squares.new_ones(1, 1, *self.kernel_size)
        return _divisor(F.conv2d(squares, ones, None, self.stride, self.padding, self.dilation))


def _unit(vectors: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Divide vectors by their norms, however small; zero vectors stay zero, with zero gradient."""
    return vectors / _divisor(_sum_of_squares(vectors, dims)).to(vectors.dtype)


def _sum_of_squares(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Sum in float64, in which squares of float32 values neither underflow nor overflow."""
    return x.to(widest_dtype(x)).square().sum(dims, keepdim=True)


def _divisor(squares: Tensor) -> Tensor:
    """Return square roots, with infinity for 0, so that quotients and all their derivatives are 0."""
    return squares.masked_fill(squares == 0, torch.inf).sqrt()


SPHERIZATION_SETTINGS: dict[str, dict[str, float]] = {
    "steep": {"scaling": 5.0, "delta": 1e-6},
    "even": {"scaling": 1.0, "delta": 0.1},
    "flat": {"scaling": 1.0, "delta": 0.5},
}
"""Slopes and floors of `Spherization` by name, for instance `Spherization(64, **SPHERIZATION_SETTINGS["even"])`.

`steep`, as published, puts most of the length into the first coordinates, `even` shares it out, and `flat` leaves most
of it to the last coordinate. docs/results/spherization.md compares them.
"""


class Spherization(nn.Module):
    """Map each vector to a sphere, so that only its angles carry information.

    It replaces the activation before a linear map, and the length n of one axis becomes n + 1. The map is described in
    `hf_sphere.geometry.spherize`.

    Args:
        in_features: Length n of the spherized axis.
        scaling: Slope of the sigmoid that turns values into angles, or its initial value if it is learned.
        radius: Norm of the result, or its initial value if it is learned.
        delta: Lower bound of the product of all sines. `SPHERIZATION_SETTINGS` has values of `scaling` and `delta`.
        learn_scaling: Whether `scaling` is a parameter; otherwise it is a buffer.
        learn_radius: Whether `radius` is a parameter; otherwise it is a buffer.
        dim: Axis to spherize; 1 for feature maps of shape (N, C, H, W).

    Shape:
        - Input: (..., n, ...), with n at axis `dim`.
        - Output: (..., n + 1, ...), of the input's dtype.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022.

    Example:
        >>> layer = Spherization(84, scaling=5.0, radius=5.0)
        >>> layer(torch.randn(2, 84)).norm(dim=-1).detach().round()
        tensor([5., 5.])
    """

    scaling: Tensor
    radius: Tensor

    def __init__(
        self,
        in_features: int,
        *,
        scaling: float = 1.0,
        radius: float = 1.0,
        delta: float = 1e-6,
        learn_scaling: bool = True,
        learn_radius: bool = False,
        dim: int = -1,
    ) -> None:
        super().__init__()
        if not math.isfinite(scaling) or scaling == 0.0:
            raise ValueError(f"scaling must be finite and not 0, which would make all angles equal; got {scaling}.")
        self.in_features = check_integer("in_features", in_features, 1)
        self.delta = check_number("delta", delta, "(0, 1)")
        self.dim = dim
        self.initial_scaling = scaling
        self.initial_radius = check_number("radius", radius, "(0, inf)")
        register_scalar(self, "scaling", scaling, learn_scaling)
        register_scalar(self, "radius", radius, learn_radius)

    def reset_parameters(self) -> None:
        """Set `scaling` and `radius` to their initial values."""
        nn.init.constant_(self.scaling, self.initial_scaling)
        nn.init.constant_(self.radius, self.initial_radius)

    def forward(self, x: Tensor) -> Tensor:
        """Spherize axis `dim`, from n values to n + 1 coordinates."""
        check_floating("the input", x)
        if x.shape[self.dim :][:1] != (self.in_features,):
            raise ValueError(f"expected {self.in_features} features along axis {self.dim}; got shape {tuple(x.shape)}.")
        scaling = read_scalar(self, "scaling", self.initial_scaling, x.dtype)
        radius = read_scalar(self, "radius", self.initial_radius, x.dtype)
        return spherize(x.movedim(self.dim, -1), scaling, radius, self.delta).movedim(-1, self.dim)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model."""
        return f"{self.in_features} -> {self.in_features + 1}, delta={self.delta:g}, dim={self.dim}"


def register_scalar(module: nn.Module, name: str, value: float, learned: bool) -> None:
    """Add a scalar to a module as a parameter if it is learned, else as a buffer."""
    scalar = torch.tensor(float(value))
    if learned:
        module.register_parameter(name, nn.Parameter(scalar))
    else:
        module.register_buffer(name, scalar)


def read_scalar(module: nn.Module, name: str, initial: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a scalar parameter or buffer in float32 or better, for values of a dtype.

    A buffer with the initial value is exact, although it is rounded in half precision, and in float64 after conversion
    or for values in float64.
    """
    stored = getattr(module, name)
    wide = stored.to(torch.promote_types(torch.promote_types(stored.dtype, dtype), torch.float32))
    if name in module._parameters or stored.dtype == wide.dtype == torch.float32:
        return wide
    exact = torch.full_like(wide, initial)
    rounded = exact.to(torch.float32 if stored.dtype == torch.float64 else stored.dtype)
    return torch.where(wide == rounded, exact, wide)


class SphericalLinear(nn.Module):
    """Spherization followed by a linear map without bias.

    Args:
        in_features: Number of values before the spherization, n.
        out_features: Number of outputs.
        **spherization: Options of `Spherization`: `scaling`, `radius`, `delta`, `learn_scaling`, `learn_radius`.

    Shape:
        - Input: (..., in_features).
        - Output: (..., out_features).

    Example:
        >>> SphericalLinear(4, 3)(embeddings).shape
        torch.Size([60, 3])
    """

    def __init__(self, in_features: int, out_features: int, **spherization: Any) -> None:
        super().__init__()
        self.spherization = Spherization(in_features, **spherization)
        self.linear = nn.Linear(in_features + 1, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Initialize the weights, the scaling and the radius."""
        self.spherization.reset_parameters()
        self.linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Spherize the last axis, then apply the linear map."""
        check_floating("the input", x)
        # transformers keeps this module in float32 if it loads a model in float16; see `names_kept_in_float32`.
        wide = x.to(torch.promote_types(x.dtype, self.spherization.scaling.dtype))
        result = self.linear(self.spherization(wide))
        return result if wide is x else result.to(x.dtype)


def names_kept_in_float32(model: nn.Module) -> set[str]:
    """Return the names of the modules in which a linear map follows a spherization, and of angular linear layers.

    Spherized values differ in size by orders of magnitude, and so do the weights of a map that was fitted to them, so
    quantization to 8 or 4 bits would destroy these maps. An `AngularLinear` would be replaced by a layer that computes
    dot products, or fail. transformers' quantizers skip the names that a model lists in `_keep_in_fp32_modules`.
    """
    return {name for name, module in model.named_modules() if isinstance(module, (SphericalLinear, AngularLinear))}


class SphericalConv2d(nn.Module):
    """Spherization of the channels followed by a convolution without bias.

    As after any other activation, zero padding adds values at the border that are not on the sphere.

    Args:
        in_channels: Number of channels before the spherization, n.
        **spherization: See `SphericalLinear`. For the other arguments, see `torch.nn.Conv2d`.

    Shape:
        - Input: (N, in_channels, H, W) or (in_channels, H, W).
        - Output: (N, out_channels, H', W') or (out_channels, H', W').

    Example:
        >>> SphericalConv2d(1, 4, 3)(images).shape
        torch.Size([8, 4, 6, 6])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        **spherization: Any,
    ) -> None:
        super().__init__()
        self.spherization = Spherization(check_integer("in_channels", in_channels, 1), dim=-3, **spherization)
        self.conv = nn.Conv2d(
            in_channels + 1, out_channels, kernel_size, stride=stride, padding=padding, dilation=dilation, bias=False
        )

    def reset_parameters(self) -> None:
        """Initialize the weights, the scaling and the radius."""
        self.spherization.reset_parameters()
        self.conv.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Spherize the channels, then convolve."""
        return self.conv(self.spherization(x))
