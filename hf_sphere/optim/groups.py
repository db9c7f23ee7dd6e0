"""Parameter groups: which parameters are radial, which decay, which have settings of their own."""

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
    """Sort a model's trainable parameters into groups for the optimisers of this library.

    Radially invariant weights come with the `channel_dims` of their groups; other weights are ordinary; norms, biases,
    temperatures, gains of weight normalisation, what the model names in `no_weight_decay()` (as timm's models do) and
    other parameters of one axis or none are ordinary and do not decay. The groups hold named parameters. Parameters
    that the model names in a method `parameter_options() -> {name: settings}` get a group of their own with those
    settings.

    Args:
        model: See `find_radial_weights`, as for the other arguments.
        batch: A batch of real data makes the proof stronger.
        loss: Loss of the model's output and the batch.
        tolerance: Largest deviation that counts as zero.

    Returns:
        Parameter groups; the radial ones first.

    Raises:
        ValueError: See `find_radial_weights`.

    Warns:
        UserWarning: If no weight is radially invariant, or if the batch proves wrong what the structure says.

    Example:
        >>> optimizer = AdamSRT(radial_parameter_groups(model), lr=1e-3)
    """
    model = extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    found = find_radial_weights(model, batch, loss, tolerance=tolerance)
    logger.info(found.summary())
    if found.refuted:
        listed = "; ".join(f"{name}: {found.rejected[name]}" for name in found.refuted)
        warnings.warn(
            "The structure of the model says that these weights are radially invariant, the batch proves they are "
            f"not; they are treated as ordinary ones. {listed}",
            stacklevel=2,
        )
    if not found.channel_dims:
        warnings.warn(
            f"{type(model).__name__} has no radially invariant weight, so the optimiser will be the ordinary one. "
            f"Looked at:\n{found}",
            stacklevel=2,
        )
    return parameter_groups(model, found.channel_dims)


def parameter_groups(model: nn.Module, channel_dims: Mapping[str, ChannelDims] | None = None) -> list[dict[str, Any]]:
    """Sort trainable parameters into radial ones, other weights, those that do not decay, and those with own settings.

    Args:
        model: Any module; its method `parameter_options`, if it has one, names parameters with settings of their own.
        channel_dims: Radially invariant weights.

    Raises:
        ValueError: If `parameter_options` names a parameter that the model lacks.
    """
    channel_dims = channel_dims or {}
    own: Mapping[str, Mapping[str, Any]] = getattr(model, "parameter_options", dict)()
    kept = set(getattr(model, "no_weight_decay", set)())
    missing = set(own) - {name for name, _ in model.named_parameters()}
    if missing:
        raise ValueError(f"settings are given for parameters that the model lacks: {', '.join(sorted(missing))}.")
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
    """Whether a parameter is a matrix or kernel; gains and temperatures may have axes of length 1 besides their own."""
    gain = name.endswith((".original0", "weight_g")) or (parameter.ndim > 2 and sum(n > 1 for n in parameter.shape) < 2)
    return parameter.ndim > 1 and not gain and name not in kept
