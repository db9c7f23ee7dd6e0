"""Perplexity of the sentence, minus those of its head and of its tail (the analogical proportion score)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sphere.analogies.scoring.base import BiasScoring, GridScoring, log_shares


@dataclass(frozen=True, kw_only=True)
class MarginalBias(BiasScoring, GridScoring):
    """Analogical proportion score: share in the perplexities, minus the shares of the head and of the tail.

    With P[i, j] the perplexity of the sentence with head c_i and tail d_j: log(P_ii / sum_k P_kk)
    - weight_head log(sum_j P_ij / sum P) - weight_tail log(sum_j P_ji / sum P). Ushio et al., "BERT is to NLP what
    AlexNet is to CV", ACL 2021.
    """

    name = "marginal_bias"

    def grid_terms(self, perplexity: Tensor) -> Tensor:
        """See `GridScoring.grid_terms`."""
        sentence = perplexity.diagonal(dim1=-2, dim2=-1)
        return log_shares(torch.stack([sentence, perplexity.sum(-1), perplexity.sum(-2)]))
