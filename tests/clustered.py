"""Unit vectors, and groups of them."""

import torch
import torch.nn.functional as F


def unit(*shape, seed=0, generator=None, shift=0.0, dtype=torch.float32):
    vectors = torch.randn(*shape, generator=generator or torch.Generator().manual_seed(seed), dtype=dtype)
    vectors[..., 0] += shift
    return vectors / vectors.norm(dim=-1, keepdim=True)


def other_unit(*shape, dtype=torch.float64):
    """Unit vectors that differ from call to call."""
    return F.normalize(torch.randn(shape, dtype=dtype), dim=-1)


def clusters(num_groups=40, size=5, dim=16, noise=0.15, seed=0):
    """Vectors (N, d) of groups, and the groups (N,)."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(num_groups).repeat_interleave(size)
    points = unit(num_groups, dim, generator=generator)[groups]
    points = points + noise * torch.randn(points.shape, generator=generator)
    return points / points.norm(dim=1, keepdim=True), groups
