"""What spaces, searches, reports and readers of vectors refuse, and the message; sources have a table of their own."""

import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from clustered import unit

from hf_sphere.metrics import energy_test
from hf_sphere.search import EmbeddingSpace, ImageSource, NeighborSearch, read_vectors, report_vectors

fit, of_texts = EmbeddingSpace.fit, ImageSource.of(["a", "b", "c"], content="text")


def neighbors(query=(1, 2), k=1, **options):
    return NeighborSearch(unit(3, 2), **options).search(torch.ones(query), k)


def others(dim=4, k=1, keys=10, query_keys=2):
    names = torch.arange(keys), torch.arange(query_keys)
    return NeighborSearch(unit(10, 4)).search_others(torch.ones(2, dim), k, *names)


def shape(*, groups, rows=300, **options):
    return EmbeddingSpace(unit(rows, 4), torch.arange(rows) % groups, **options)


EUCLIDEAN, INTEGERS = {"metric": {"distance": "euclidean"}}, torch.ones(2, 3, dtype=torch.int8)
IDS = [f"S{row:03}" for row in range(240)]
BAD_IDS = [
    (["a", "a", *IDS[2:]], "ids must be different; 1 are repeated: 'a'"),
    ([None, *IDS[1:]], "ids must be all texts or all integers; got NoneType, str"),
    ([1, *IDS[1:]], "ids must be all texts or all integers; got int, str"),
    (np.arange(240) / 2, "ids must be all texts or all integers; got float"),
    (IDS[1:], "ids must have one name per row, 240; got 239"),
    (torch.ones(240, dtype=torch.long).to_sparse(), "ids must be dense"),
]

TABLE = [
    (lambda: fit(unit(5, 4) * torch.tensor(float("nan"))), "finite"),
    (lambda: fit(torch.zeros(5, 4)), "vectors must be finite and not zero; 5 of 5 are not"),
    (lambda: fit(unit(5, 4), [1] * 5), "of one group"),
    (lambda: fit(unit(1, 4)), "of one group"),
    (lambda: fit(unit(5, 4), [1, 2]), "one name per row, 5; got 2"),
    (lambda: fit(unit(3, 4), [1, "a", 2]), "all texts or all integers; got int, str"),
    (lambda: fit(unit(5, 4), score="dot"), "score must be one of auto, cosine, margin; got 'dot'"),
    (lambda: fit(unit(5, 4), rows_per_group=0), "rows_per_group must be an integer"),
    (lambda: fit(unit(5, 4), calibration_rows=2.5), "must be an integer"),
    (lambda: fit(unit(5, 4), seed=-1), "seed must be an integer from 0 to"),
    (lambda: fit(unit(4, 4), "auto"), "must be a list, an array or a column"),
    (lambda: fit(unit(4, 4), {1, 2, 3, 4}), "must be a list, an array or a column"),
    (lambda: fit(unit(4, 4), torch.tensor(3)), "must be a list, an array or a column"),
    (lambda: fit(unit(5, 4), rule="exact"), "rule must be one of bounded, sharp, strict"),
    (lambda: fit(unit(5, 4)).calibrate(score="dot"), "score must be one of auto, cosine, margin; got 'dot'"),
    (lambda: fit(unit(4, 4), range(4)).add("a", unit(4)), "old and new.*got int, str"),
    (lambda: fit(unit(5, 4), calibration_groups=[1]), "calibration_groups"),
    (
        lambda: fit(unit(4, 4), range(4), calibration=unit(2, 4), calibration_groups=[3, 1_000]),
        "1 groups of the space are groups of calibration queries, such as 3",
    ),
    (lambda: fit(unit(5, 4)).search(unit(1, 5)), "queries must have 4 dimensions"),
    (lambda: fit(unit(5, 4)).search(unit(1, 4), 6), "k must be an integer from 1 to 5; got 6"),
    (lambda: fit(unit(5, 4)).search(unit(1, 4), 1, false_accept=0), "between 0 and 1"),
    (lambda: fit(unit(5, 4)).search(unit(4), 1, false_accept="0.5"), "got '0.5'"),
    (lambda: fit(unit(5, 4)).add("anna", unit(4)), "the space has no groups"),
    (lambda: fit(unit(5, 4)).add(None, unit(1, 4), ids=["a"]), "the space has no ids"),
    (lambda: fit(unit(4, 4), [1, 1, 2, 2]).remove(3), "there is no group 3"),
    (lambda: fit(unit(2, 4), ids=["a", "b"]).remove("b"), "Name its rows by ids="),
    *(
        (lambda wanted=wanted: fit(unit(4, 4), [1, 1, 2, 2]).remove(**wanted), r"there is no (id|group) (True|1\.0) in")
        for wanted in ({"ids": True}, {"ids": [1.0]}, {"groups": [True]}, {"groups": np.array([True])})
    ),
    (lambda: fit(unit(1, 4)[0]), r"got \(4,\)\. A single vector is a list of one: \[vec"),
    (lambda: fit(unit(2, 4)).remove(ids=[0, 1]), "no row would remain"),
    *(
        (lambda vectors=vectors: EmbeddingSpace(vectors), r"Use fit, and vectors\[None\] for one vector")
        for vectors in (unit(3), torch.eye(3).long(), torch.eye(3).double(), torch.ones(2, 2, 2))
    ),
    *((lambda ids=ids: fit(unit(240, 4), ids=ids), message) for ids, message in BAD_IDS),
    *((lambda ids=ids: report_vectors(unit(240, 4), ids=ids), message) for ids, message in BAD_IDS),
    # Comparisons
    (lambda: shape(rows=5, groups=5).compare(unit(1, 4)), "the space must be .* at least 20; got 5"),
    (lambda: shape(rows=5, groups=1).compare(unit(5, 4)), "the space must be .* got 1"),
    (lambda: shape(rows=20, groups=20).compare(unit(10, 4)), "groups of other must be .* got 10"),
    (lambda: shape(rows=5, groups=5).compare(unit(5, 3)), "other must have 4 dimensions"),
    (lambda: shape(rows=5, groups=5).compare(unit(5, 4) * torch.inf), "other must be finite"),
    (lambda: shape(rows=20, groups=20).compare(unit(20, 4), seed=-1), "seed must be an integer from 0 to"),
    (lambda: shape(rows=5, groups=5).compare(unit(5, 4), level=5), "level must be a number in"),
    *((lambda n=n: energy_test(unit(6, 3), unit(9, 3), permutations=n), f"least 1; got {n}") for n in (-1, 0, 9.0)),
    # Compression
    (lambda: shape(groups=9).compress(3), "bits must be one of 1, 2, 4, 8; got 3"),
    (lambda: shape(groups=9).compress(seed=-1), "seed must be an integer from 0 to"),
    (lambda: shape(groups=9).compress(max_recall_loss=5), "max_recall_loss must be"),
    (lambda: shape(rows=10, groups=9).compress(), "number of rows, .* of at least 100; got 10"),
    (lambda: shape(groups=1).compress(), "number of groups must be an integer of at least 2; got 1"),
    (lambda: shape(groups=9, **EUCLIDEAN).compress(), "one of cosine"),
    # Duplicates
    (lambda: shape(rows=10, groups=10).duplicates(), "to choose the threshold takes 100 rows of .* Give a cosine"),
    (lambda: EmbeddingSpace(torch.ones(200, 4)).duplicates(), "takes 100 rows of .* most of them different"),
    (lambda: shape(groups=1).duplicates(), "takes 100 rows of several groups"),
    (lambda: shape(groups=9, **EUCLIDEAN).duplicates(0.9), "must be one of cosine; got 'euclidean'"),
    (lambda: shape(groups=9).duplicates(-1), r"threshold must be a number in \(-1, 1\]; got -1"),
    (lambda: shape(groups=9).duplicates(True), "threshold must be a number in .* got True"),
    (lambda: shape(groups=9).duplicates(math.nan), "got nan"),
    (lambda: shape(groups=9).duplicates(expected_false=31), r"expected_false must be a number in \(0, 30\]; got 31"),
    (lambda: shape(groups=9).duplicates(0.9, expected_false=1), "threshold and expected_false are two ways to choose"),
    (lambda: shape(groups=9).duplicates(labels=["a"] * 299), "labels must have one name per row, 300; got 299"),
    (lambda: shape(groups=9).duplicates(parts="train"), "parts must be a list"),
    # Reports
    (lambda: report_vectors(torch.zeros(3)), r"vectors must have the shape \(N, d\)"),
    (lambda: report_vectors([[1.0, 2.0], [3.0]]), "vectors must be numbers, the same number of them for each"),
    (lambda: report_vectors(torch.ones(3, 2), [1, 2]), "groups must have one name per row, 3; got 2"),
    (lambda: report_vectors(torch.ones(3, 2), seed=-1), "seed must be"),
    (lambda: shape(groups=9, **EUCLIDEAN).report(), "the report must be one of cosine; got 'euclidean'"),
    # Nearest neighbors
    (lambda: neighbors(distance="manhattan"), "distance must be one of cosine, .*'manhattan'"),
    (lambda: neighbors(kind="tree"), "kind of search must be one of torch, flat, ivf, hnsw"),
    (lambda: neighbors(kind="ivf", distance="hyperbolic"), "does not support the hyperbolic"),
    (lambda: neighbors(distance="hyperbolic", curvature=-1), "curvature must be a number in"),
    (lambda: neighbors((1, 3)), "must have 2 dimensions, as the references"),
    (lambda: neighbors(k=4), "k must be an integer from 1 to 3; got 4"),
    (lambda: neighbors(k=2.0), "k must be an integer from 1 to 3; got 2.0"),
    (lambda: NeighborSearch(unit(3, 2)).search(torch.full((1, 2), torch.nan), 1), "must be finite"),
    (lambda: others(query_keys=1), "must be one integer per reference, and one per query"),
    (lambda: others(keys=9), "must be one integer per reference, and one per query"),
    (lambda: others(k=0), "k must be an integer of at least 1"),
    (lambda: others(dim=3), "queries must have 4 dimensions"),
    # Vectors
    (lambda: read_vectors(INTEGERS), "are integers, which need their scale"),
    (lambda: read_vectors([[1, 2], [3, 4]]), "are integers, which need their scale"),
    (lambda: read_vectors(INTEGERS, scale=[1.0, 2.0]), "have 3 dimensions; scale and offset are one number or one"),
    (lambda: read_vectors([[1.0, 2.0], [1.0]]), "must be numbers, the same number of them for each"),
    (lambda: read_vectors([[1.0, None]]), "must be numbers, the same number of them for each"),
    (lambda: read_vectors([[1.0], None]), "row 1 has none"),
    (lambda: read_vectors(["AAAAAAA="]), "buffer size must be a multiple"),
    (lambda: read_vectors(["no base64!"]), "base64"),
    (lambda: read_vectors([[1.0, math.nan]]), "must be finite; 1 of 1 are not, the first at index 0"),
    (lambda: read_vectors(torch.ones(3)), r"must have the shape \(N, d\)"),
    (lambda: read_vectors([]), r"must have the shape \(N, d\)"),
    (lambda: read_vectors([[1 + 2j, 3j]], scale=1.0), "vectors must be real"),
    (lambda: read_vectors(torch.tensor([[1 + 2j, 3j]]), scale=1.0), "vectors must be real"),
    (lambda: read_vectors(np.array([[1.0, 0.0], [1e50, 0.0]])), "must be finite; 1 of 2 are not, the first at index 1"),
    (lambda: read_vectors(unit(5, 8), dim=9), "dim must be an integer from 1 to 8; got 9"),
    # Names
    *((lambda i=i: of_texts.read_groups(i), r"list, an array or a column of .*; got \{1") for i in ({1, 2, 3}, {1: 1})),
    (lambda: of_texts.read_groups(pd.Series(["a", "b", None], dtype="string")), "all integers; got NAType, str"),
    (lambda: of_texts.read_groups(pa.array([1.5, 2.0, 3.0])), "groups must be all texts or all integers; got float"),
]


@pytest.mark.parametrize(("call", "message"), TABLE)
def test_what_is_wrong_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
