"""Pointwise mutual information of the head and the tail."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sphere.analogies.scoring.base import WEIGHTS, GridScoring, aggregate, check_choice, log_shares

AGGREGATIONS = ("mean", "max", "min", "index_0", "index_1")


@dataclass(frozen=True, kw_only=True)
class PMI(GridScoring):
    """Pointwise mutual information of the head and the tail, computed in both directions.

    With P[i, j] the perplexity of the sentence with head c_i and tail d_j, two terms:
    log(P_ii / sum_j P_ij) - alpha log(sum_j P_ji / sum P), the tail given the head, and
    log(P_ii / sum_j P_ji) - alpha log(sum_j P_ij / sum P), the head given the tail. `pmi_aggregation` reduces them to
    one (`index_0` is the first, `index_1` the second). Ushio et al., "BERT is to NLP what AlexNet is to CV", ACL 2021.
    """

    name = "pmi"
    grid = {"alpha": WEIGHTS, "pmi_aggregation": AGGREGATIONS}

    alpha: float = 0.0
    pmi_aggregation: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("pmi_aggregation", self.pmi_aggregation, AGGREGATIONS)

    def grid_terms(self, perplexity: Tensor) -> Tensor:
        """See `GridScoring.grid_terms`."""
        sentence = perplexity.diagonal(dim1=-2, dim2=-1)
        by_head, by_tail = perplexity.sum(-1), perplexity.sum(-2)
        given = [(sentence / by_head).log(), (sentence / by_tail).log()]
        return torch.stack([*given, log_shares(by_tail), log_shares(by_head)])

    def permutation_costs(self, terms: Tensor) -> Tensor:
        """See `PermutedScoring.permutation_costs`."""
        given, marginal = terms[:2], terms[2:]
        return aggregate(given - self.alpha * marginal, self.pmi_aggregation, 0)
