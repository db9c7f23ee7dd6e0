"""Calibration of confidences after training, by temperature and vector scaling of the logits."""

import warnings
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_embeddings, check_labels, to_tensor
from hf_sphere.utils.checks import check_choice

LARGEST_FACTOR = 1000.0
"""Bound of the temperatures and their inverses."""


def fit_calibration(
    logits: Tensor, labels: Tensor, kind: Literal["temperature", "vector"] = "temperature"
) -> dict[str, Any]:
    """Fit the calibration with the smallest negative log-likelihood of held-out labels, in float64.

    The uniform distribution over the classes counts as the label of one additional example, so that the optimum is
    finite if all predictions are correct. After `model.set_calibration` with the result, models with a head return
    calibrated logits in eval mode, also after saving, loading and export. The loss remains uncalibrated. Further
    training removes the calibration.

    The logits must not be calibrated. Only for the data of the earlier fit can this be seen, from a best temperature
    of 1; for other data, it is near 1 as for a model whose confidences are right. `set_calibration` thus requires that
    the model has none.

    A warning reports a calibration that does not demonstrably help, as of few examples: in a cross-validation, the 95 %
    interval of the change of the negative log-likelihood is not below 0.

    Args:
        logits: (N, K), a tensor or an array; uncalibrated, not of the training examples.
        labels: (N,), class indices.
        kind: `temperature`: one number, which changes no prediction; `vector`: a temperature and a shift of each class.

    Returns:
        Keyword arguments of `calibrate`.

    Raises:
        ValueError: If a shape or value is invalid, a class has no example for `vector`, or the logits are calibrated
            already.

    Reference:
        Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017.

    Example:
        >>> import numpy as np, scipy.special
        >>> logits, labels = np.tile([8.0, 0.0], (300, 1)), np.arange(300) % 3 // 2
        >>> temperature = fit_calibration(logits, labels)["temperature"]
        >>> scipy.special.softmax(logits / temperature, axis=1).round(2)[0]
        array([0.67, 0.33])
    """
    fitted, mean, margin = fit_and_validate(logits, labels, kind)
    if np.ptp(fitted.get("shift", 0.0)) < 1e-5 and np.abs(np.subtract(fitted["temperature"], 1.0)).max() < 1e-5:
        raise ValueError("the logits are calibrated already; compute them again after `model.set_calibration(None)`.")
    if mean + margin >= 0:
        doubt = f"is not shown to help {len(logits)} examples: it changes the loss by {mean:.4g} ± {margin:.4g}"
        warnings.warn(f"the calibration {doubt}. Hold out more examples, or do without.", stacklevel=2)
    return fitted


def fit_and_validate(logits: Tensor, labels: Tensor, kind: str) -> tuple[dict[str, Any], float, float]:
    """Return the result of `fit_calibration`, and the mean change of the negative log-likelihood of other examples.

    The third value is the half-width of the 95 % interval of this mean.
    """
    from scipy.stats import t  # slow to import

    check_choice("kind", kind, ("temperature", "vector"))
    logits = check_embeddings(to_tensor("logits", logits).cpu(), what="logits").double()
    labels = check_labels(labels, len(logits)).cpu()
    if (logits >= 0).all() and (logits.sum(1) - 1).abs().max() < 1e-3:
        warnings.warn("each row of logits sums to 1, as probabilities do; pass their logarithms.", stacklevel=3)
    (count, classes), occurring = logits.shape, set(labels.tolist())
    if not occurring <= set(range(classes)) or (kind == "vector" and len(occurring) < classes):
        needed = ", and all of them must occur" if kind == "vector" else ""
        raise ValueError(f"labels must be from 0 to {classes - 1}{needed}; got {sorted(occurring)}.")
    fitted = _fit(logits, labels, kind)
    folds = min(count, 10 if logits.numel() <= 10**6 else 3)  # ten fits of many classes would take minutes
    if folds == 1:
        return fitted, 0.0, float("inf")
    differences = torch.empty(logits.shape, dtype=torch.float64)
    for fold in torch.randperm(count, generator=torch.Generator().manual_seed(0)).tensor_split(folds):
        kept = torch.ones(count, dtype=torch.bool).index_fill_(0, fold, False)
        calibrated = calibrate(logits[fold], **_fit(logits[kept], labels[kept], kind, tolerance=1e-7))
        differences[fold] = logits[fold].log_softmax(1) - calibrated.log_softmax(1)
    # Few examples that are all correct would show a gain of any sharpening, since its price, a rare confident error, is
    # not among them; the additional example, whose label is uniform, has it. That the folds share examples is ignored.
    changes = torch.cat([differences.gather(1, labels[:, None])[:, 0], differences.mean()[None]])
    margin = t.ppf(0.975, count) * changes.std() / (count + 1) ** 0.5
    return fitted, float(changes.mean()), float(margin)


def _fit(logits: Tensor, labels: Tensor, kind: str, tolerance: float = 1e-15) -> dict[str, Any]:
    from scipy.optimize import minimize  # slow to import

    (count, classes), smoothing = logits.shape, 1 / (len(logits) + 1)
    width = 1 if kind == "temperature" else classes
    targets = F.one_hot(labels, classes).double() * (1 - smoothing) + smoothing / classes

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        scaled = logits * torch.from_numpy(values[:width]).exp()
        logs = (scaled + torch.from_numpy(values[width:])).log_softmax(1)
        errors = (logs.exp() - targets) / count
        slopes = (errors * scaled).sum(0)  # not by autograd, which inference tensors do not allow
        gradient = [slopes.sum().reshape(1), 0 * slopes] if kind == "temperature" else [slopes, errors.sum(0)]
        return -float((targets * logs).sum()) / count, torch.cat(gradient).numpy()

    bounds = [(-np.log(LARGEST_FACTOR), np.log(LARGEST_FACTOR))] * width + [(None, None)] * classes
    options = {"maxiter": 1000, "ftol": tolerance, "gtol": 1e-9}
    best = minimize(objective, np.zeros(len(bounds)), jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    temperatures, shift = np.exp(-best[:width]).tolist(), (best[width:] - best[width:].mean()).tolist()
    return {"temperature": temperatures[0]} if kind == "temperature" else {"temperature": temperatures, "shift": shift}


def calibrate(logits: Tensor, temperature: float | list[float], shift: list[float] | None = None) -> Tensor:
    """Return logits (B, K) divided by the temperature, plus the shift, each a number or one of each class."""
    scaled = logits / (logits.new_tensor(temperature) if isinstance(temperature, list) else temperature)
    return scaled if shift is None else scaled + logits.new_tensor(shift)
