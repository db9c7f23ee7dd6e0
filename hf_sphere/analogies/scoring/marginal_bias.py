"""Perplexity less what the head and the tail alone bring: the AP score."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sphere.analogies.scoring.base import WEIGHTS, Measurements
from hf_sphere.analogies.scoring.sentences import GridScoring, log_shares


@dataclass(frozen=True, kw_only=True)
class MarginalBias(GridScoring):
    """Analogical proportion score: the share of perplexity, less those of the head and of the tail with any other.

    With P[i, j] the perplexity of the sentence with head c_i and tail d_j: log(P_ii / sum_k P_kk)
    - weight_head log(sum_j P_ij / sum P) - weight_tail log(sum_j P_ji / sum P). Ushio et al., "BERT is to NLP what
    AlexNet is to CV", ACL 2021.
    """

    name = "marginal_bias"
    grid = {"weight_head": WEIGHTS, "weight_tail": WEIGHTS}

    weight_head: float = 0.0
    weight_tail: float = 0.0

    def terms(self, measurements: Measurements) -> Tensor:
        """See `PermutedScoring.terms`."""
        perplexity = measurements.values
        return torch.stack(
            [
                log_shares(perplexity.diagonal(dim1=-2, dim2=-1)),
                log_shares(perplexity.nansum(-1)),
                log_shares(perplexity.nansum(-2)),
            ]
        )

    def permutation_costs(self, terms: Tensor) -> Tensor:
        """See `PermutedScoring.permutation_costs`."""
        sentence, head, tail = terms
        return sentence - self.weight_head * head - self.weight_tail * tail
