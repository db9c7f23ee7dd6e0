import logging
import math
import time

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_sphere.search import neighbor_search
from hf_sphere.search.neighbor_search import NeighborSearch, choose_kind

pytest.importorskip("faiss")
EXACT = [*(("torch", distance) for distance in ("cosine", "euclidean", "hyperbolic"))]
EXACT += [("flat", "cosine"), ("flat", "euclidean")]


def points(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Points in the ball of radius 0.9."""
    drawn = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return 0.9 * drawn / drawn.norm(dim=1).max()


def formula(queries, references, distance: str) -> torch.Tensor:
    """All distances, (Q, N), float64, by their definitions."""
    queries, references = queries.double(), references.double()
    if distance == "cosine":
        return 1 - F.cosine_similarity(queries[:, None], references, dim=2)
    gaps = (queries[:, None] - references).norm(dim=2)
    if distance == "euclidean":
        return gaps
    inside = (1 - queries.square().sum(1))[:, None] * (1 - references.square().sum(1))
    return torch.acosh(1 + 2 * gaps.square() / inside)


@pytest.mark.parametrize(("kind", "distance"), EXACT)
@pytest.mark.parametrize("count", [1, 30, 9001])
def test_exact_search_matches_the_formula(kind, distance, count):
    references, queries, k = points(count, 6), points(20, 6, seed=1), min(count, 5)
    expected = formula(queries, references, distance).sort(dim=1)
    distances, rows = NeighborSearch(references, distance=distance, curvature=1.0, kind=kind).search(queries, k)
    assert torch.equal(rows, expected.indices[:, :k])
    torch.testing.assert_close(distances, expected.values[:, :k], atol=1e-12, rtol=1e-9)


def test_results_do_not_depend_on_the_blocks(monkeypatch):
    references, queries = points(1003, 5), points(30, 5, seed=1)
    expected = NeighborSearch(references, kind="torch").search(queries, 7)
    monkeypatch.setattr(neighbor_search, "QUERIES", 7)
    monkeypatch.setattr(neighbor_search, "REFERENCES", 101)
    monkeypatch.setattr(neighbor_search, "NUMBERS", 200)
    found = NeighborSearch(references, kind="torch").search(queries, 7)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("kind", ["torch", "flat"])
def test_zero_vectors_have_the_cosine_distance_one_and_norms_almost_one_no_effect(kind):
    found = NeighborSearch(torch.tensor([[1.0, 0], [0, 2], [0, 0]]), kind=kind).search(torch.zeros(1, 2), 3)
    assert found[0].tolist() == [[1, 1, 1]]
    query = F.normalize(points(1, 64))
    others = F.normalize(query + 1.2e-3 * F.normalize(points(200, 64, seed=1))) * (1 + 9e-7)
    assert NeighborSearch(torch.cat([others, query * (1 - 9e-7)]), kind=kind).search(query, 1)[1].tolist() == [[200]]


def test_large_and_small_numbers_neither_overflow_nor_underflow():
    references = torch.tensor([[1e30, 1e30], [1e-30, 0.0], [0.0, 1e-30]])
    _, rows = NeighborSearch(references, kind="torch").search(torch.tensor([[3.0, 3.0], [1e-35, 0.0]]), 1)
    assert rows.tolist() == [[0], [1]]


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_approximate_search_finds_most_neighbors_and_is_saved(kind, distance, tmp_path):
    references, queries = points(4000, 8), points(200, 8, seed=1)
    built = NeighborSearch(references, distance=distance, kind=kind)
    assert built.recall >= neighbor_search.TARGET_RECALL
    exact = NeighborSearch(references, distance=distance, kind="flat").search(queries, 10)
    distances, rows = built.search(queries, 10)
    assert (distances <= exact[0][:, -1:] + 1e-9).double().mean() > 0.93
    built.save(tmp_path / "index")
    loaded = NeighborSearch(references, distance=distance, kind=kind, file=tmp_path / "index")
    assert torch.equal(loaded.search(queries, 10)[1], rows)
    assert math.isnan(loaded.recall)  # not in the file


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
@pytest.mark.parametrize("count", [1, 2, 50])
def test_approximate_search_of_few_references_finds_all(kind, count):
    references = points(count, 3)
    _, rows = NeighborSearch(references, kind=kind).search(references, count)
    assert rows.sort(dim=1).values.tolist() == [list(range(count))] * count


def test_missing_neighbors_are_marked_and_zeros_of_either_sign_are_equal():
    searched = NeighborSearch(points(3, 2), kind="torch")
    assert searched.distances(torch.ones(1, 2), torch.tensor([[0, -1]]))[0, 1] == torch.inf
    rows = NeighborSearch([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0]], kind="torch").search([[-0.0, 1.0]], 2)[1]
    assert rows.tolist() == [[0, 1]]


def test_the_kind_is_chosen_by_the_number_of_references(monkeypatch, caplog):
    assert [choose_kind(count, "cosine") for count in (10, 200_000, 200_001)] == ["flat", "flat", "ivf"]
    assert choose_kind(10**6, "hyperbolic") == "torch"
    monkeypatch.setattr(neighbor_search.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert choose_kind(10, "cosine") == "torch"
        assert not caplog.text  # exact in any case
        assert choose_kind(10**6, "cosine") == "torch"
    assert "FAISS is not installed, so the search is exact" in caplog.text
    with pytest.raises(ImportError, match=r"pip install 'hf_sphere\[faiss\]'"):
        NeighborSearch(points(3, 2), kind="flat")


def test_a_file_of_another_index_or_a_damaged_one_is_rejected(tmp_path):
    NeighborSearch(points(50, 2), kind="ivf").save(tmp_path / "index")
    others = [(points(3, 2), "cosine"), (points(50, 2, seed=1), "cosine"), (points(50, 2), "euclidean")]
    for references, distance in others:
        with pytest.raises(ValueError, match="index was built for other embeddings"):
            NeighborSearch(references, distance=distance, kind="ivf", file=tmp_path / "index")
    with pytest.raises(KeyError, match="links"):
        NeighborSearch(points(50, 2), kind="hnsw", file=tmp_path / "index")
    (tmp_path / "index").write_bytes((tmp_path / "index").read_bytes()[:-8])
    with pytest.raises(SafetensorError):
        NeighborSearch(points(50, 2), kind="ivf", file=tmp_path / "index")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("ivf", "sizes", lambda sizes: sizes + 10**9),
        ("ivf", "sizes", lambda sizes: sizes * torch.tensor([-1] + [1] * (len(sizes) - 1))),
        ("ivf", "sizes", lambda sizes: sizes[:-1]),
        ("ivf", "sizes", lambda sizes: torch.cat([sizes, torch.zeros(1, dtype=torch.long)])),
        ("ivf", "centroids", lambda centroids: centroids[:, :1]),
        *[
            (kind, name, change)
            for kind in ("ivf", "hnsw")
            for name, change in (
                ("codes", lambda codes: codes[:-1]),
                ("codes", lambda codes: codes[:, 1:]),
                ("ranges", lambda ranges: ranges[1:]),
            )
        ],
        ("hnsw", "links", lambda links: links + 1000),
        ("hnsw", "links", lambda links: links - 1000),
        ("hnsw", "links", lambda links: links.index_fill(0, torch.tensor([0]), -2)),
        ("hnsw", "links", lambda links: links[1:]),
        ("hnsw", "links", lambda links: torch.full_like(links, 7)),
        ("hnsw", "levels", lambda levels: levels * 0),
        ("hnsw", "levels", lambda levels: levels + 100),
        ("hnsw", "levels", lambda levels: levels.flip(0)),
    ],
)
def test_a_crafted_file_that_would_crash_the_process_is_rejected(kind, name, value, tmp_path):
    references, file = points(900, 4), tmp_path / "index"
    NeighborSearch(references, kind=kind).save(file)
    with safe_open(file, "pt") as stored:
        about, parts = stored.metadata(), {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    save_file({**parts, name: value(parts[name]).contiguous()}, file, about)
    with pytest.raises((ValueError, RuntimeError, IndexError, AssertionError)):
        NeighborSearch(references, kind=kind, file=file)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_float64_embeddings_are_compared_in_float64(distance):
    near = [[1.0, 1e-9 * number] for number in range(30)]  # equal in float32
    if distance == "euclidean":
        near = [[16777217.0 + 0.01 * number] for number in range(30)]
    assert NeighborSearch(near, distance=distance).search(near[25:26], 2)[1][0, 0] == 25


KINDS = [*EXACT, *((kind, distance) for kind in ("ivf", "hnsw") for distance in ("cosine", "euclidean"))]


@pytest.mark.parametrize(("kind", "distance"), KINDS)
@pytest.mark.parametrize("k", [3, 30])
def test_of_many_copies_of_a_vector_the_first_are_found(kind, distance, k):
    vectors, generator = points(40, 4), torch.Generator().manual_seed(0)
    numbers = torch.randint(40, (4000,), generator=generator)  # about 100 copies of each, in any order
    distances, rows = NeighborSearch(vectors[numbers], distance=distance, kind=kind).search(vectors, k)
    assert rows.tolist() == [(numbers == number).nonzero()[:k, 0].tolist() for number in range(40)]
    assert (distances == distances[:, :1]).all()


@pytest.mark.parametrize("kind", ["torch", "flat"])
@pytest.mark.parametrize(("distance", "k"), [("euclidean", 3), ("euclidean", 200), ("cosine", 3)])
def test_different_vectors_at_equal_distances_are_in_the_order_of_the_references(kind, distance, k):
    grid = torch.cartesian_prod(
        *[torch.arange(5.0) + (100 if distance == "euclidean" else -2)] * 4
    )  # up to 40 of 625 are equally far from a point
    grid = grid[torch.randperm(len(grid), generator=torch.Generator().manual_seed(0))[:601]]
    if distance == "cosine":  # powers of two are exact
        grid = torch.cat([grid * 2.0**power for power in range(20)])
    search = NeighborSearch(grid, distance=distance, kind=kind)
    queries = torch.cat([grid[:30], torch.zeros(2, 4)])
    expected = search.distances(queries, torch.arange(len(grid)).expand(len(queries), -1)).sort(dim=1, stable=True)
    distances, rows = search.search(queries, k)
    assert torch.equal(distances, expected.values[:, :k])
    assert torch.equal(rows, expected.indices[:, :k])


@pytest.mark.parametrize("kind", ["torch", "flat", "ivf", "hnsw"])
def test_a_zero_query_has_the_first_references_as_neighbors(kind):
    rows = NeighborSearch(points(500, 3), kind=kind).search(torch.zeros(1, 3), 4)[1]
    assert rows.tolist() == ([[0, 1, 2, 3]] if kind != "ivf" else rows.sort(dim=1).values.tolist())


def test_collapsed_embeddings_are_searched_as_fast_as_others():
    references = torch.ones(50_000, 64)
    start = time.process_time()
    assert NeighborSearch(references, kind="torch").search(references, 3)[1].unique(dim=0).tolist() == [[0, 1, 2]]
    assert time.process_time() - start < 30


@pytest.mark.parametrize("kind", ["torch", "flat"])
@pytest.mark.parametrize("value", [1e300, 1e155, 1e20])
def test_values_whose_squares_overflow_are_named_by_row(kind, value):
    large = torch.full((3, 2), 1.0, dtype=torch.float64)
    large[2, 1] = value
    if kind == "torch" and value == 1e20:  # fits into float64
        assert NeighborSearch(large, distance="euclidean", kind=kind).search(large[:1], 1)[1].tolist() == [[0]]
        return
    with pytest.raises(ValueError, match=r"references must be below .* to be compared .*the first at index 2"):
        NeighborSearch(large, distance="euclidean", kind=kind)
    with pytest.raises(ValueError, match=r"queries must be below .*the first at index 2"):
        NeighborSearch(large[:2], distance="euclidean", kind=kind).search(large, 1)


@pytest.mark.parametrize("kind", ["torch", "flat"])
def test_a_query_that_float32_cannot_represent_has_a_direction(kind):
    search = NeighborSearch(torch.eye(2), kind=kind)
    distances, rows = search.search(torch.tensor([[1e300, 0], [0, 1e-300]], dtype=torch.float64), 1)
    assert rows.tolist() == [[0], [1]]
    assert distances.abs().max() == 0


@pytest.mark.parametrize("kind", ["torch", "flat"])
def test_one_large_reference_does_not_change_the_neighbors_of_others(kind):
    references, queries = points(500, 3), points(30, 3, seed=1)
    before = NeighborSearch(references, distance="euclidean", kind=kind).search(queries, 5)
    references = torch.cat([references, torch.full((1, 3), 1e15)])
    assert torch.equal(NeighborSearch(references, distance="euclidean", kind=kind).search(queries, 5)[1], before[1])


@pytest.fixture
def built(monkeypatch):
    """Kinds of the indexes that are built."""
    kinds, new_index = [], neighbor_search.new_index
    monkeypatch.setattr(neighbor_search, "new_index", lambda kind, *args: kinds.append(kind) or new_index(kind, *args))
    return kinds


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_an_extended_search_finds_what_a_new_one_finds_without_training(kind, distance, built, tmp_path):
    references, queries = points(3000, 8), points(200, 8, seed=1)
    references[1500:1600] = references[:100]  # copies
    search = NeighborSearch(references, distance=distance, kind=kind)
    rows = torch.cat([references, points(200, 8, seed=2), references[:100]])
    assert search.extend(rows)
    search.refresh()
    assert built == [kind]
    assert search.recall >= neighbor_search.TARGET_RECALL
    exact = NeighborSearch(rows, distance=distance, kind="torch").search(queries, 10)
    distances, found = search.search(queries, 10)
    agrees = found == exact[1]
    assert agrees.double().mean() > 0.93
    torch.testing.assert_close(distances[agrees], exact[0][agrees])
    assert search.search(rows[-100:], 1)[1].equal(NeighborSearch(rows, kind="torch").search(rows[-100:], 1)[1])
    search.save(tmp_path / "index")
    loaded = NeighborSearch(rows, distance=distance, kind=kind, file=tmp_path / "index")
    assert torch.equal(loaded.search(queries, 10)[1], found)


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_an_index_is_built_again_when_added_rows_are_not_found(kind, built, caplog):
    vectors = torch.eye(1, 16) + 0.02 * torch.randn(3000, 16, generator=torch.Generator().manual_seed(0))
    search = NeighborSearch(vectors[:2500], kind=kind)
    rows = torch.cat([vectors[:2500], -vectors[2500:]])  # outside the ranges of the codes
    assert search.extend(rows)
    with caplog.at_level(logging.WARNING):
        search.refresh()
    assert "Many rows have changed" in caplog.text
    assert built == [kind, kind]
    assert search.recall >= neighbor_search.TARGET_RECALL
    search.refresh()
    assert len(built) == 2


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_near_duplicates_that_codes_cannot_distinguish_are_found(kind, tmp_path):
    generator = torch.Generator().manual_seed(0)
    vectors = F.normalize(torch.randn(60, 16, generator=generator)).repeat_interleave(50, dim=0)
    vectors = vectors + 2e-4 * torch.randn(3000, 16, generator=generator)
    search = NeighborSearch(vectors, kind=kind)
    exact = NeighborSearch(vectors, kind="torch").search(vectors[::7], 10)[0][:, -1:]
    assert (search.search(vectors[::7], 10)[0] <= exact * (1 + 1e-9)).double().mean() > 0.97
    search.save(tmp_path / "index")
    loaded = NeighborSearch(vectors, kind=kind, file=tmp_path / "index")
    assert torch.equal(loaded.search(vectors, 10)[1], search.search(vectors, 10)[1])


def test_an_index_of_four_times_the_rows_gets_more_lists(built):
    vectors = points(9000, 8)
    search = NeighborSearch(vectors[:2000], kind="ivf")
    search.extend(vectors)
    search.refresh()
    assert built == ["ivf", "ivf"]


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_references_far_from_the_first_ones_are_found(kind, caplog):
    vectors = torch.cat([points(1000, 8), points(2000, 8, seed=1) + 1e4])
    search = NeighborSearch(vectors[:1000], distance="euclidean", kind=kind)
    search.extend(vectors)
    search.refresh()
    queries, keys = points(100, 8, seed=2) + 1e4, torch.zeros(3000).long()
    exact = NeighborSearch(vectors, distance="euclidean", kind="torch").search(queries, 10)
    assert torch.equal(search.search_others(queries, 10, keys, keys[:100] + 1)[0], exact[0])
    recall = float((search.search(queries, 10)[0] <= exact[0][:, -1:]).double().mean())
    # The codes of a graph have the range of all references.
    assert recall > 0.93 or (kind == "hnsw" and "use kind='flat'" in caplog.text)


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_one_large_reference_does_not_coarsen_the_codes_of_others(kind):
    references = torch.cat([points(3000, 8), torch.full((1, 8), 1e6)])
    assert NeighborSearch(references, distance="euclidean", kind=kind).recall >= neighbor_search.TARGET_RECALL


def test_the_recall_is_measured_again_after_many_changes_only(monkeypatch, tmp_path):
    vectors, measured = points(4010, 8), []
    search = NeighborSearch(vectors[:4000], kind="ivf")
    for count in (4002, 4004, 4006):
        search.extend(vectors[:count])
        search.save(tmp_path / "index")
        search = NeighborSearch(vectors[:count], kind="ivf", file=tmp_path / "index")
        monkeypatch.setattr(search, "_held_out", lambda *_, count=count: measured.append(count) or (vectors[:9], 9.0))
        search.refresh()
    assert measured == [4006, 4006]


def test_of_two_settings_the_one_with_the_higher_recall_is_tried_further(monkeypatch):
    """Here more lists help and more candidates do not, so the number of candidates stays."""

    def recalls(search, queries, farthest):
        return torch.tensor([min(0.99, 0.5 + 0.1 * search._index.nprobe)])

    monkeypatch.setattr(NeighborSearch, "_recalls", recalls)
    search = NeighborSearch(points(2000, 8), kind="ivf")
    assert (search._index.nprobe, search._spare) == (8, neighbor_search.SPARE)
