"""Unit vectors, and groups of them."""

import torch


def unit(*shape, seed=0, generator=None, shift=0.0):
    vectors = torch.randn(*shape, generator=generator or torch.Generator().manual_seed(seed))
    vectors[..., 0] += shift
    return vectors / vectors.norm(dim=-1, keepdim=True)


def clusters(num_groups=40, size=5, dim=16, noise=0.15, seed=0):
    """Vectors (N, d) of groups, and the groups (N,)."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(num_groups).repeat_interleave(size)
    points = unit(num_groups, dim, generator=generator)[groups]
    points = points + noise * torch.randn(points.shape, generator=generator)
    return points / points.norm(dim=1, keepdim=True), groups
