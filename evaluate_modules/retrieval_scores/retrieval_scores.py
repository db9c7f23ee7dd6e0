"""Retrieval metrics of embeddings for the library `evaluate`."""

import datasets
import evaluate

from hf_sphere.metrics import retrieval_scores

_DESCRIPTION = """
Recall@k, R-precision and MAP@R of embeddings, with each embedding as a query among all others.
"""

_KWARGS_DESCRIPTION = """
Args:
    embeddings (list of list of float): Embeddings of the same length.
    labels (list of int): Class of each embedding.
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


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class RetrievalScores(evaluate.Metric):
    """Wraps `hf_sphere.metrics.retrieval_scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"embeddings": datasets.List(datasets.Value("float64")), "labels": datasets.Value("int64")}
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
            embeddings,
            labels,
            distance=distance,
            ks=ks,
            curvature=curvature,
        )
