"""Calibration of confidences after training, by temperature and vector scaling of the logits."""

import warnings
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import to_floating, to_tensor

LARGEST_FACTOR = 1000.0
"""Bound of the temperatures and their inverses."""

FEWEST_EXAMPLES = 200
"""Number of held-out examples below which a calibration is reported as uncertain."""


def fit_calibration(
    logits: Tensor, labels: Tensor, kind: Literal["temperature", "vector"] = "temperature"
) -> dict[str, Any]:
    """Fit the calibration with the smallest negative log-likelihood of held-out labels, in float64.

    The uniform distribution over the classes counts as the label of one additional example, so that the optimum is
    finite if all predictions are correct. Assign the result to `model.config.calibration`: models with a head then
    return calibrated logits in eval mode, also after saving, loading and export. The loss remains that of the head.

    A warning reports fewer than 200 examples, which leave the calibration uncertain, and a calibration that increases
    the negative log-likelihood of these labels, as for a few confident predictions that are all correct.

    Args:
        logits: (N, K), a tensor or an array; uncalibrated, not those of the training examples.
        labels: (N,), class indices.
        kind: `temperature`: one number, which changes no prediction; `vector`: a temperature and a shift of each class.

    Returns:
        Keyword arguments of `calibrate`.

    Raises:
        ValueError: If a shape or value is invalid, or a class has no example for `vector`.

    Reference:
        Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017.

    Example:
        >>> import numpy as np, scipy.special
        >>> logits, labels = np.tile([8.0, 0.0], (300, 1)), np.arange(300) % 3 // 2
        >>> temperature = fit_calibration(logits, labels)["temperature"]
        >>> scipy.special.softmax(logits / temperature, axis=1).round(2)[0]
        array([0.67, 0.33])
    """
    from scipy.optimize import minimize  # slow to import

    if kind not in ("temperature", "vector"):
        raise ValueError(f"unknown kind of calibration {kind!r}; choose temperature or vector.")
    logits = to_floating("logits", logits).detach().cpu().double()
    labels = to_tensor("labels", labels, "integers").cpu()
    if logits.ndim != 2 or not logits.isfinite().all() or not len(logits) or labels.shape != logits.shape[:1]:
        shapes = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"logits and labels must be finite, of shapes (N, K) and (N,) with N >= 1; got {shapes}.")
    if (logits >= 0).all() and (logits.sum(1) - 1).abs().max() < 1e-3:
        warnings.warn("each row of logits sums to 1, as probabilities do; pass their logarithms.", stacklevel=2)
    (count, classes), occurring = logits.shape, set(labels.tolist())
    if not occurring <= set(range(classes)) or (kind == "vector" and len(occurring) < classes):
        needed = ", and all of them must occur" if kind == "vector" else ""
        raise ValueError(f"labels must be from 0 to {classes - 1}{needed}; got {sorted(occurring)}.")
    labels = labels.long()
    width, smoothing = 1 if kind == "temperature" else classes, 1 / (count + 1)
    targets = F.one_hot(labels, classes).double() * (1 - smoothing) + smoothing / classes

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        scaled = logits * torch.from_numpy(values[:width]).exp()
        logs = (scaled + torch.from_numpy(values[width:])).log_softmax(1)
        errors = (logs.exp() - targets) / count
        slopes = (errors * scaled).sum(0)  # not by autograd, which inference tensors do not allow
        gradient = [slopes.sum().reshape(1), 0 * slopes] if kind == "temperature" else [slopes, errors.sum(0)]
        return -float((targets * logs).sum()) / count, torch.cat(gradient).numpy()

    bounds = [(-np.log(LARGEST_FACTOR), np.log(LARGEST_FACTOR))] * width + [(None, None)] * classes
    options = {"maxiter": 1000, "ftol": 1e-15, "gtol": 1e-9}
    best = minimize(objective, np.zeros(len(bounds)), jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    temperatures, shift = np.exp(-best[:width]).tolist(), (best[width:] - best[width:].mean()).tolist()
    fitted: dict[str, Any] = {"temperature": temperatures, "shift": shift}
    if kind == "temperature":
        fitted = {"temperature": temperatures[0]}
    if count < FEWEST_EXAMPLES:
        few = f"the calibration rests on {count} examples; below {FEWEST_EXAMPLES} it is uncertain. Hold out more."
        warnings.warn(few, stacklevel=2)
    if is_harmful(logits, labels, fitted):
        worse = "increases the negative log-likelihood of the labels that it is fitted to"
        warnings.warn(f"the calibration {worse}; do not use it.", stacklevel=2)
    return fitted


def is_harmful(logits: Tensor, labels: Tensor, calibration: dict[str, Any]) -> bool:
    """Return whether a calibration increases the negative log-likelihood of labels (N,), beyond rounding."""
    logits = logits.double()
    before, after = (F.cross_entropy(values, labels) for values in (logits, calibrate(logits, **calibration)))
    return bool(after > before + 1e-6)


def calibrate(logits: Tensor, temperature: float | list[float], shift: list[float] | None = None) -> Tensor:
    """Return logits (B, K) divided by the temperature, plus the shift, each a number or one of each class."""
    scaled = logits / (logits.new_tensor(temperature) if isinstance(temperature, list) else temperature)
    return scaled if shift is None else scaled + logits.new_tensor(shift)
