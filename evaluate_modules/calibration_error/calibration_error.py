"""Calibration error for the library `evaluate`, by the two common definitions."""

from typing import Any

import datasets
import evaluate

from hf_sphere.metrics import calibration_errors

_DESCRIPTION = """
Expected calibration error: whether 80 % of the predictions with a confidence of 80 % are correct.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (list of float): Predicted probability, in [0, 1], that each prediction is correct.
    references (list of bool): Whether the prediction is correct.
    confidences, correct: Other names of both; give either.

Returns:
    calibration_error_equal_mass_l2 (float): 15 bins of equal mass, root mean square of the differences.
    calibration_error_equal_width_l1 (float): 15 bins of equal width, mean absolute difference.

Examples:
    >>> metric = evaluate.load("calibration_error")
    >>> result = metric.compute(confidences=[0.9, 0.9, 0.6, 0.6], correct=[True, True, True, False])
    >>> {name: round(value, 6) for name, value in result.items()}
    {'calibration_error_equal_mass_l2': 0.1, 'calibration_error_equal_width_l1': 0.1}
"""

_CITATION = """
@inproceedings{scott2021mises,
  title = {von Mises-Fisher Loss: An Exploration of Embedding Geometries for Supervised Learning},
  author = {Scott, Tyler R. and Gallagher, Andrew C. and Mozer, Michael C.},
  booktitle = {ICCV},
  year = {2021}
}
@inproceedings{guo2017calibration,
  title = {On Calibration of Modern Neural Networks},
  author = {Guo, Chuan and Pleiss, Geoff and Sun, Yu and Weinberger, Kilian Q.},
  booktitle = {ICML},
  year = {2017}
}
"""


_NAMES = {"confidences": "predictions", "correct": "references"}
"""The names that `evaluate.combine` passes to all of its modules, by those of this one."""


def _rename(values: dict[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        if (to := _NAMES.get(name, name)) in renamed and value is not None:
            raise ValueError(f"{to} are given under two names; give one of them.")
        if value is not None:
            renamed[to] = value
    return renamed


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class CalibrationError(evaluate.Metric):
    """Wraps `hf_sphere.metrics.calibration_errors`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            # Booleans are stored as 0 and 1: cast to bool, each other number would be True, such as a class.
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
        )

    def compute(self, **values: Any) -> dict[str, Any] | None:
        """See `evaluate.EvaluationModule.compute`."""
        return super().compute(**_rename(values))

    def add_batch(self, **values: Any) -> None:
        """See `evaluate.EvaluationModule.add_batch`."""
        super().add_batch(**_rename(values))

    def add(self, **values: Any) -> None:
        """See `evaluate.EvaluationModule.add`."""
        renamed = _rename(values)
        super().add(**{name.removesuffix("s") if name in _NAMES.values() else name: renamed[name] for name in renamed})

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return calibration_errors(predictions, references)
