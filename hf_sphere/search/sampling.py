"""Rows that calibrate and are compared: drawn by groups, the same again when others are added."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def sample_rows(groups: Tensor, keys: np.ndarray, ids: Tensor, per_group: int, most: int) -> Tensor:
    """Draw groups (N,), and rows of each, by their keys: those of groups that stay do not change when others are added.

    The keys, (N,) uint64, are pseudo-random and equal within a group. At least one group is drawn, and at most
    `per_group` rows of each and `most` in all. The rows are in increasing order, int64.
    """
    order = torch.from_numpy(np.lexsort((mix(ids.numpy()), groups.numpy(), keys)))
    _, counts = groups[order].unique_consecutive(return_counts=True)
    per_group = max(1, min(per_group, most // len(counts)))  # more groups rather than more rows of each
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    end = counts.clamp_max(per_group).cumsum(0).repeat_interleave(counts)  # of the rows of complete groups so far
    chosen = (rank < per_group) & (end <= max(most, int(end[0])))
    return order[chosen].sort().values


def independent_rows(groups: Tensor, most: int, seed: int) -> Tensor:
    """Draw one row per group (N,), of up to `most` groups: those of one group belong together."""
    salt = mix(np.array([seed]))
    ids = torch.from_numpy((mix(np.arange(len(groups))) ^ salt).view(np.int64))
    return sample_rows(groups, mix(mix(groups.numpy()) ^ salt), ids, 1, most)


def mix(values: np.ndarray) -> np.ndarray:
    """Return pseudo-random numbers, uint64, that follow from integers (the finalizer of SplitMix64)."""
    bits = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def name_keys(names: Sequence[str | int]) -> np.ndarray:
    """Return a pseudo-random number for each name, uint64."""
    digests = b"".join(hashlib.blake2b(repr(name).encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, np.uint64)


def name_numbers(names: Sequence[str | int]) -> Tensor:
    """Return the number of each name as int64."""
    return torch.from_numpy(name_keys(names).view(np.int64).copy())
