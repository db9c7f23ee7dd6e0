"""Calibration of confidences after training, by temperature and vector scaling of the logits."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.nn.checks import check_labels

LARGEST_FACTOR = 1000.0
"""Bound of the temperatures and their inverses."""


def fit_calibration(
    logits: Tensor, labels: Tensor, kind: Literal["temperature", "vector"] = "temperature"
) -> dict[str, Any]:
    """Fit the calibration with the smallest negative log-likelihood of held-out labels, in float64.

    So that the optimum is finite if all predictions are correct, the uniform distribution over the classes counts as
    the label of one additional example. Assign the result to `model.config.calibration`: in eval mode the models with a
    head return calibrated logits, also after saving, loading and export. The loss remains that of the head.

    Args:
        logits: (N, K), uncalibrated, not those of the training examples.
        labels: (N,), class indices.
        kind: `temperature`: one number, which changes no prediction. `vector`: a temperature and a shift of each class;
            needs examples of all classes.

    Returns:
        The arguments of `calibrate`: `temperature`, a number or one of each class, and in the second case `shift`.

    Raises:
        ValueError: If a shape or value is invalid, or a class has no example for `vector`.

    Reference:
        Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017.
    """
    if kind not in ("temperature", "vector"):
        raise ValueError(f"unknown kind of calibration {kind!r}; choose temperature or vector.")
    from scipy.optimize import minimize  # slow to import

    logits, labels = torch.as_tensor(logits).detach().cpu().double(), torch.as_tensor(labels).cpu().long()
    if logits.ndim != 2 or not logits.numel() or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits and labels must have the shapes (N, K) and (N,) with N >= 1; got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}."
        )
    if not logits.isfinite().all():
        raise ValueError(f"logits must be finite; {int((~logits.isfinite()).any(1).sum())} of {len(logits)} are not.")
    (count, classes), found = logits.shape, labels.unique()
    check_labels(labels, classes, owner="model", advice="Use the labels that the model was trained with.")
    if found[0] < 0:
        raise ValueError("labels must not be negative: examples without a class cannot be used. Remove them.")
    width = 1 if kind == "temperature" else classes
    if kind == "vector" and len(found) < classes:
        missing = sorted(set(range(classes)) - set(found.tolist()))
        raise ValueError(
            f"vector scaling needs examples of all classes; {', '.join(map(str, missing[:10]))} have none. Use more "
            "held-out examples, or `temperature`."
        )

    smoothing = 1 / (count + 1)
    targets = F.one_hot(labels, classes).double() * (1 - smoothing) + smoothing / classes

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = torch.from_numpy(values)
        scaled = logits * parameters[:width].exp()
        logs = (scaled + parameters[width:] if kind == "vector" else scaled).log_softmax(1)
        errors = (logs.exp() - targets) / count
        slopes = (errors * scaled).sum(0)  # not by autograd, which inference tensors do not allow
        gradient = torch.cat([slopes, errors.sum(0)]) if kind == "vector" else slopes.sum().reshape(1)
        return -float((targets * logs).sum()) / count, gradient.numpy()

    largest = float(np.log(LARGEST_FACTOR))
    bounds = [(-largest, largest)] * width + [(None, None)] * (classes if kind == "vector" else 0)
    options = {"maxiter": 1000, "ftol": 1e-15, "gtol": 1e-9}
    best = minimize(objective, np.zeros(len(bounds)), jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    temperatures = np.exp(-best[:width]).tolist()
    if kind == "temperature":
        return {"temperature": temperatures[0]}
    return {"temperature": temperatures, "shift": (best[width:] - best[width:].mean()).tolist()}


def calibrate(logits: Tensor, temperature: float | list[float], shift: list[float] | None = None) -> Tensor:
    """Return logits (B, K) divided by the temperature, plus the shift, each a number or one of each class."""
    scaled = logits / (temperature if isinstance(temperature, (float, int)) else logits.new_tensor(temperature))
    return scaled if shift is None else scaled + logits.new_tensor(shift)


def check_calibration(calibration: Mapping[str, Any] | None, num_classes: int) -> None:
    """Raise a `ValueError` if a calibration is not of the form that `fit_calibration` returns."""
    if calibration is None:
        return
    temperature, shift = calibration.get("temperature"), calibration.get("shift")
    numbers = temperature if isinstance(temperature, list) else [temperature]
    lists = [values for values in (temperature, shift) if isinstance(values, list)]
    is_valid = (
        set(calibration) <= {"temperature", "shift"}
        and all(isinstance(number, (float, int)) and number > 0 for number in numbers)
        and (shift is None or isinstance(shift, list))
        and all(len(values) == num_classes for values in lists)
    )
    if not is_valid:
        raise ValueError(
            f"calibration must have a positive temperature, or {num_classes} of them and as many numbers `shift`, as "
            f"`fit_calibration` returns; got {dict(calibration)}."
        )
