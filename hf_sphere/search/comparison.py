"""Comparison of vectors, block by block: which are equal, and which have the largest inner products."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_sphere.metrics.neighbors import padded


def hash_rows(vectors: Tensor) -> Tensor:
    """Return a number of each vector, (N,) int64: of two different ones of a million in one of 10^7 cases the same."""
    blocks = ((block + 0.0).contiguous().numpy() for block in vectors.split(1024))  # -0.0 and 0.0 are equal
    digests = (hashlib.blake2b(row, digest_size=8).digest() for block in blocks for row in block)
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=torch.long)


def largest_products(
    queries: Tensor, parts: Iterable[Tensor], count: int, keys: Any = None, query_keys: Any = None
) -> Tensor:
    """Return the rows of references, given in parts (n, e), with the largest inner products with queries (b, e).

    They are (b, count), in order; of equal products the first. References with the key of a query are left out, and -1
    fills up.
    """
    products, rows, start = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long), 0
    for part in parts:
        similarities = (padded(queries) @ padded(part).T)[: len(queries), : len(part)]
        if keys is not None:
            similarities.masked_fill_(query_keys[:, None] == keys[start : start + len(part)], -torch.inf)
        largest = _largest(similarities, min(count, len(part)))
        products = torch.cat([products, similarities.gather(1, largest)], 1)
        chosen = _largest(products, min(count, products.shape[1]))
        products, rows = products.gather(1, chosen), torch.cat([rows, start + largest], 1).gather(1, chosen)
        start += len(part)
    return rows.masked_fill(products == -torch.inf, -1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` largest values per row, (b, m) -> (b, count); of equal values the first."""
    largest, columns = values.topk(min(count + 1, values.shape[1]), dim=1)
    if (tied := largest[:, count - 1] == largest[:, -1]).any() and count < values.shape[1]:
        columns[tied, :count] = values[tied].sort(dim=1, descending=True, stable=True).indices[:, :count]
    return columns[:, :count].sort(dim=1).values
