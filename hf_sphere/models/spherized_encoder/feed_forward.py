# Copyright 2026 The hf_sphere authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
"""The spherized halves of an encoder layer's feed-forward, and the spherized sequence classifier.

Their parts have the names of the plain layers where they have their shapes, so that a plain checkpoint fills them; what
differs has a name of its own.
"""

from typing import Any

from torch import Tensor, nn

from hf_sphere.nn.spherization import SphericalLinear, Spherization


class SpherizedIntermediate(nn.Module):
    """The first half: a linear map, and no activation, whose place the spherization takes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., intermediate_size)."""
        return self.dense(hidden_states)


class SpherizedOutput(nn.Module):
    """The second half: spherization, a linear map without bias, dropout, the residual, and the norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.spherical = SphericalLinear(config.intermediate_size, config.hidden_size, **config.spherization_options)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Map (..., intermediate_size) to (..., hidden_size) and add the layer's input."""
        return self.LayerNorm(self.dropout(self.spherical(hidden_states)) + input_tensor)


class SpherizedClassificationHead(nn.Module):
    """Classify by angles: hidden_size -> hidden_size / 2 - 1, spherization, a linear map without bias.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size // 2 - 1
        if width < 1:
            raise ValueError(f"a spherized classifier needs a hidden_size of at least 4; got {config.hidden_size}.")
        self.projection = nn.Linear(config.hidden_size, width)
        self.spherization = Spherization(width, **config.spherization_options)
        self.linear = nn.Linear(width + 1, config.num_labels, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits: (B, hidden_size) -> (B, num_labels)."""
        return self.linear(self.spherization(self.projection(features)))


__all__ = ["SpherizedClassificationHead", "SpherizedIntermediate", "SpherizedOutput"]
