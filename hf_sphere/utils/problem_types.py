"""How the outputs of a model are read, by the `problem_type` of its configuration."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands print their help without torch
    from torch import Tensor

SINGLE_LABEL, MULTI_LABEL = "single_label_classification", "multi_label_classification"
PROBLEM_TYPES = (SINGLE_LABEL, MULTI_LABEL, "regression")


def problem_type(model: Any) -> str:
    """Return the `problem_type` of a model's configuration; one class per image if it has none."""
    return getattr(getattr(model, "config", None), "problem_type", None) or SINGLE_LABEL


def class_probabilities(logits: "Tensor", kind: str) -> "Tensor | None":
    """Return the probabilities of classes (B, K) of a problem type; None for a regression, whose logits are values.

    They are the softmax for one class per image, and for several classes the sigmoid, each of its own.
    """
    if kind == SINGLE_LABEL:
        return logits.softmax(-1)
    return logits.sigmoid() if kind == MULTI_LABEL else None


def why_no_accuracy(kind: str) -> str:
    """Return why a model of a problem type has neither accuracy nor calibration; an empty text if it has."""
    return "" if kind == SINGLE_LABEL else f"the model is for {kind}, not for one class per image"
