"""Retrieval metrics of embeddings for the library `evaluate`."""

from typing import Any

import datasets
import evaluate

from hf_sphere.geometry.checks import check_labels
from hf_sphere.metrics import retrieval_scores

_DESCRIPTION = """
Recall@k, R-precision and MAP@R of embeddings, with each embedding as a query among all others.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (list of list of float): Embeddings of the same length.
    references (list of int): Class of each embedding.
    embeddings, labels: Other names of both; give either.
    distance (str): "cosine" (default), "euclidean" or "hyperbolic", in the Poincare ball.
    ks (list of int): Values of k for Recall@k; [1] by default.
    curvature (float): c > 0 for the curvature -c of the hyperbolic distance; 1e-5 by default.

Returns:
    recall_at_<k> (float): Fraction of queries with at least one member of their class among the k nearest neighbors.
    r_precision (float): Precision among the R nearest neighbors; R is the number of other members of the class.
    map_at_r (float): Mean average precision among the R nearest neighbors.
    num_queries (int): Number of queries, the embeddings with other members of their class.
    num_excluded (int): Number of embeddings that are the only one of their class.

Examples:
    >>> metric = evaluate.load("retrieval_scores")
    >>> metric.compute(embeddings=[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]], labels=[0, 0, 1, 1])
    {'recall_at_1': 1.0, 'r_precision': 1.0, 'map_at_r': 1.0, 'num_queries': 4, 'num_excluded': 0}
"""

_CITATION = """
@inproceedings{musgrave2020metric,
  title = {A Metric Learning Reality Check},
  author = {Musgrave, Kevin and Belongie, Serge and Lim, Ser-Nam},
  booktitle = {ECCV},
  year = {2020}
}
"""


_NAMES = {"embeddings": "predictions", "labels": "references"}
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
class RetrievalScores(evaluate.Metric):
    """Wraps `hf_sphere.metrics.retrieval_scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"predictions": datasets.List(datasets.Value("float64")), "references": datasets.Value("int64")}
            ),
        )

    def compute(self, **values: Any) -> dict[str, Any] | None:
        """See `evaluate.EvaluationModule.compute`."""
        return super().compute(**_rename(values))

    def add_batch(self, **values: Any) -> None:
        """See `evaluate.EvaluationModule.add_batch`."""
        renamed = _rename(values)
        labels: Any = renamed.get("references", ())
        check_labels(labels, len(labels))  # evaluate would round fractions and parse texts
        super().add_batch(**renamed)

    def add(self, **values: Any) -> None:
        """See `evaluate.EvaluationModule.add`."""
        renamed = _rename(values)
        check_labels([renamed.get("references", renamed.get("reference", 0))], 1)
        super().add(**{name.removesuffix("s") if name in _NAMES.values() else name: renamed[name] for name in renamed})

    def _compute(
        self,
        predictions: list[list[float]],
        references: list[int],
        distance: str = "cosine",
        ks: tuple[int, ...] = (1,),
        curvature: float = 1e-5,
    ) -> dict[str, float]:
        return retrieval_scores(
            predictions,
            references,
            distance=distance,
            ks=ks,
            curvature=curvature,
        )
