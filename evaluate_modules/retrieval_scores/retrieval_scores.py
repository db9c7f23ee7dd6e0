"""Retrieval scores of embeddings for the library `evaluate`."""

import datasets
import evaluate
import numpy
import torch

from hf_sphere.metrics import retrieval_scores

_DESCRIPTION = """
How well embeddings find others of their class among all others: Recall@k, R-precision and MAP@R.
"""

_KWARGS_DESCRIPTION = """
Args:
    embeddings (list of list of float): Each is a query among all others.
    labels (list of int): Class of each embedding.
    distance (str): "cosine" (default), "euclidean" or "hyperbolic", in the Poincare ball.
    ks (list of int): For which k to give Recall@k; [1] by default.
    curvature (float): With the hyperbolic distance, c > 0 for the curvature -c; 1e-5 by default.

Returns:
    recall_at_<k> (float): Share of queries with one of their class or more among the k nearest.
    r_precision (float): Share of the class among the R nearest, R the number of its other members.
    map_at_r (float): Mean average precision among the R nearest.
    num_queries (int): Number of queries that have others of their class; over them the scores are means.
    num_excluded (int): Number of embeddings that are alone in their class.

Examples:
    >>> metric = evaluate.load("evaluate_modules/retrieval_scores")
    >>> metric.compute(embeddings=[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]], labels=[0, 0, 1, 1])
"""

_CITATION = """
@inproceedings{musgrave2020metric,
  title = {A Metric Learning Reality Check},
  author = {Musgrave, Kevin and Belongie, Serge and Lim, Ser-Nam},
  booktitle = {ECCV},
  year = {2020}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class RetrievalScores(evaluate.Metric):
    """Wraps `hf_sphere.metrics.retrieval_scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"embeddings": datasets.List(datasets.Value("float32")), "labels": datasets.Value("int64")}
            ),
        )

    def _compute(
        self,
        embeddings: list[list[float]],
        labels: list[int],
        distance: str = "cosine",
        ks: tuple[int, ...] = (1,),
        curvature: float = 1e-5,
    ) -> dict[str, float]:
        return retrieval_scores(
            torch.from_numpy(numpy.asarray(embeddings, dtype=numpy.float32)),
            torch.tensor(labels),
            distance=distance,
            ks=ks,
            curvature=curvature,
        )
