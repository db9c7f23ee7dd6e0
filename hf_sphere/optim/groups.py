"""Parameter groups: radial parameters, weight decay, and per-parameter optimizer options."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from hf_sphere.optim.channels import ChannelDims
from hf_sphere.optim.invariance import Loss, find_radial_weights

logger = logging.getLogger(__name__)


def radial_parameter_groups(
    model: nn.Module, batch: Any = None, loss: Loss | None = None, *, tolerance: float = 1e-3
) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into groups for the optimizers of this library.

    Radially invariant weights get the `channel_dims` of their groups; other weights are ordinary. Norms, biases,
    temperatures, gains of weight normalization, parameters in the model's `no_weight_decay()` (as in timm) and other
    parameters with at most one axis are ordinary and do not decay. The groups contain named parameters. Each parameter
    in the model's `parameter_options() -> {name: options}`, if it has this method, gets a separate group with these
    options.

    Args:
        model: See `find_radial_weights`, also for the other arguments.
        batch: A batch of real data, if the generated input is not representative.
        loss: Loss of the model's output and the batch.
        tolerance: Largest deviation that is considered zero.

    Returns:
        Parameter groups; the radial ones first.

    Raises:
        ValueError: See `find_radial_weights`.

    Warns:
        UserWarning: If no weight is radially invariant.

    Example:
        >>> optimizer = AdamSRT(radial_parameter_groups(model), lr=1e-3)
    """
    model = extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    found = find_radial_weights(model, batch, loss, tolerance=tolerance)
    logger.info(found.summary())
    if not found.channel_dims:
        warnings.warn(
            f"{type(model).__name__} has no radially invariant weight, so the optimizer will be the ordinary one. "
            f"Checked weights:\n{found}",
            stacklevel=2,
        )
    return parameter_groups(model, found.channel_dims)


def parameter_groups(model: nn.Module, channel_dims: Mapping[str, ChannelDims] | None = None) -> list[dict[str, Any]]:
    """Split trainable parameters into radial ones, other weights, those without decay, and those with separate options.

    Args:
        model: Any module; its method `parameter_options`, if it has one, returns per-parameter optimizer options.
        channel_dims: Radially invariant weights.

    Raises:
        ValueError: If `parameter_options` names a parameter that the model lacks.
    """
    channel_dims = channel_dims or {}
    own: Mapping[str, Mapping[str, Any]] = getattr(model, "parameter_options", dict)()
    kept = set(getattr(model, "no_weight_decay", set)())
    missing = set(own) - {name for name, _ in model.named_parameters()}
    if missing:
        raise ValueError(f"parameter_options names parameters that the model lacks: {', '.join(sorted(missing))}.")
    radial: dict[ChannelDims, dict[str, Any]] = {}
    weights: dict[str, Any] = {"params": []}
    plain: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    special = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in own:
            special.append({"params": [(name, parameter)], "weight_decay": 0.0, **own[name]})
        elif name in channel_dims:
            dims = channel_dims[name]
            radial.setdefault(dims, {"params": [], "channel_dims": dims})["params"].append((name, parameter))
        else:
            (weights if _decays(name, parameter, kept) else plain)["params"].append((name, parameter))
    ordered = [radial[dims] for dims in sorted(radial, reverse=True)]
    return [group for group in (*ordered, weights, plain, *special) if group["params"]]


def _decays(name: str, parameter: Tensor, kept: set[str]) -> bool:
    """Return whether a parameter is a matrix or kernel; gains and temperatures may have additional axes of length 1."""
    gain = name.endswith((".original0", "weight_g")) or (parameter.ndim > 2 and sum(n > 1 for n in parameter.shape) < 2)
    return parameter.ndim > 1 and not gain and name not in kept
