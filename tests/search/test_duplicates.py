"""Duplicates of a space: clusters, the fitted threshold, labels and parts, thumbnails, and the command."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from clustered import unit
from datasets import Dataset
from PIL import Image

from hf_sphere.commands import duplicates as command
from hf_sphere.search import EmbeddingSpace, duplicates
from hf_sphere.search.encoder import ThumbnailEncoder
from hf_sphere.search.source import ImageSource


def planted(count=500, copies=20, dim=32, noise=0.1, seed=0):
    """Unit vectors (N, d) of which the last ones are noisy copies of the first ones."""
    generator = torch.Generator().manual_seed(seed)
    vectors = unit(count - copies, dim, generator=generator)
    noise = noise * torch.randn(copies, dim, generator=generator) / dim**0.5
    return torch.nn.functional.normalize(torch.cat([vectors, vectors[:copies] + noise]))


def clusters_by_all_pairs(vectors, threshold):
    """Return the clusters as sets, by the cosines of all pairs in float64."""
    points = vectors.double().numpy()
    parents = list(range(len(points)))

    def root(row):
        while parents[row] != row:
            row = parents[row]
        return row

    for one, other in zip(*np.nonzero(np.triu(points @ points.T, 1) >= threshold), strict=True):
        parents[root(one)] = root(other)
    roots = [root(row) for row in range(len(points))]
    return {frozenset(np.flatnonzero(np.array(roots) == row).tolist()) for row in {*roots} if roots.count(row) > 1}


def as_sets(found):
    return {frozenset(rows.tolist()) for rows in found.clusters}


@pytest.mark.parametrize("is_coarse", [True, False])
@pytest.mark.parametrize("block", [64, 2_048])
@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.99])
def test_clusters_are_those_of_all_pairs(threshold, block, is_coarse, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: is_coarse)
    monkeypatch.setattr(duplicates, "BLOCK", block)
    monkeypatch.setattr(duplicates, "PENDING", 100)
    vectors = planted(300, 80, 12, 0.4)
    vectors[7] = vectors[90] = vectors[3]
    found = EmbeddingSpace(vectors).duplicates(threshold)
    assert as_sets(found) == clusters_by_all_pairs(vectors, threshold) != set()
    assert [len(rows) for rows in found.clusters] == sorted(map(len, found.clusters), reverse=True)


def test_without_the_second_rows_of_all_pairs_the_first_row_of_each_cluster_is_left():
    vectors = planted(300, 80, 12, 0.4)
    found = EmbeddingSpace(vectors).duplicates(0.6)
    assert max(map(len, found.clusters)) > 3
    second = found.pairs[:, 1].tolist()
    assert sorted(second) == sorted(row for rows in found.clusters for row in rows[1:].tolist())
    assert len(EmbeddingSpace(vectors).duplicates(1.0).pairs) == 0


def test_cosines_in_bfloat16_are_within_their_bound():
    vectors = torch.nn.functional.normalize(torch.rand(500, 256) + torch.rand(256))  # no cancellation of the rounding
    coarse = vectors.bfloat16()
    error = (coarse @ coarse.T).double() - vectors.double() @ vectors.double().T
    assert error.abs().max() < duplicates.COARSE


def test_pairs_connect_each_cluster_by_its_largest_cosines():
    vectors = planted(300, 80, 12, 0.4)
    found = EmbeddingSpace(vectors).duplicates(0.7)
    assert len(found.pairs) == sum(len(rows) - 1 for rows in found.clusters)
    points = vectors[found.pairs].double()
    torch.testing.assert_close(found.cosines, (points[:, 0] * points[:, 1]).sum(1), atol=1e-6, rtol=0)
    cosines = (vectors @ vectors.T).fill_diagonal_(-1)
    nearest = torch.stack([torch.arange(300), cosines.argmax(1)], 1)[cosines.amax(1) >= 0.7].sort(1).values
    assert {*map(tuple, nearest.tolist())} <= {*map(tuple, found.pairs.sort(1).values.tolist())}


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_an_approximate_search_of_fewer_rows_than_neighbors_finds_them(kind):
    pytest.importorskip("faiss")
    vectors = planted(10, 2)
    assert as_sets(EmbeddingSpace(vectors, kind=kind).duplicates(0.9)) == clusters_by_all_pairs(vectors, 0.9) != set()


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("kind", ["torch", "ivf"])
def test_more_duplicates_than_neighbors_are_one_cluster(kind, noise):
    if kind == "ivf":
        pytest.importorskip("faiss")
    generator = torch.Generator().manual_seed(0)
    near = unit(1, 16, generator=generator) + noise * torch.randn(100, 16, generator=generator) / 4
    vectors = torch.nn.functional.normalize(torch.cat([near, unit(400, 16, generator=generator)]))
    found = EmbeddingSpace(vectors, kind=kind).duplicates(0.99)
    assert [rows.tolist() for rows in found.clusters] == [[*range(100)]]


@pytest.mark.parametrize("dim", [6, 16, 128])
def test_planted_copies_are_found_and_few_others(dim):
    false = []
    for seed in range(20):
        found = EmbeddingSpace(planted(1_000, 24, dim, 0.02, seed)).duplicates()
        pairs = {*map(tuple, found.pairs.tolist())}
        copies = {(row, 976 + row) for row in range(24)}
        assert len(copies & pairs) >= 23 or dim == 6
        assert found.is_fitted
        assert found.expected_false == pytest.approx(1)
        false.append(len(pairs - copies))
    assert np.mean(false) <= 1 + 2 * np.std(false) / 20**0.5


@pytest.mark.parametrize("expected", [1, 20])
def test_false_pairs_are_about_as_many_as_expected_at_most(expected):
    false = [
        len(EmbeddingSpace(planted(1_000, 0, 16, seed=seed)).duplicates(expected_false=expected).pairs)
        for seed in range(30)
    ]
    assert expected / 10 <= np.mean(false) <= expected + 2 * np.std(false) / 30**0.5


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.15])
def test_many_copies_do_not_hide_themselves(fraction):
    copies = int(1_000 * fraction)
    found = EmbeddingSpace(planted(1_000, copies)).duplicates()
    assert as_sets(found) == {frozenset({row, 1_000 - copies + row}) for row in range(copies)}


def test_groups_that_contain_the_duplicates_of_their_rows_lower_the_threshold():
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(500) // 5
    vectors = unit(100, 32, generator=generator)[groups] + 0.05 * torch.randn(500, 32, generator=generator)
    vectors = torch.nn.functional.normalize(vectors)
    alone, grouped = (EmbeddingSpace(vectors, names).duplicates() for names in (None, groups))
    assert grouped.threshold < 0.8 < alone.threshold
    assert [len(rows) for rows in grouped.clusters] == [5] * 100


def test_the_model_states_the_expected_false_pairs_of_a_given_threshold():
    space = EmbeddingSpace(planted())
    chosen = space.duplicates(expected_false=2.5)
    given = space.duplicates(chosen.threshold)
    assert not given.is_fitted
    assert given.expected_false == pytest.approx(2.5)
    assert space.duplicates(0.0).expected_false is None  # below the fitted similarities
    assert str(replace(chosen, expected_false=1 - 1e-9)).endswith(f"one of {len(chosen.pairs)} pairs expected false")
    assert str(replace(chosen, pairs=chosen.pairs[:1], expected_false=1.0)).endswith(", 1 false pair expected")
    assert str(replace(chosen, expected_false=0.02)).endswith(", 0.02 false pairs expected")


def test_conflicts_shared_clusters_and_suspects_are_found():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3
    vectors = unit(3, 32, generator=generator)[labels] + 0.2 * torch.randn(600, 32, generator=generator)
    vectors[300:310] = vectors[:10] + 0.001
    wrong = [0, 17, 405]
    names = ["abc"[(label + (row in wrong)) % 3] for row, label in enumerate(labels.tolist())]
    found = EmbeddingSpace.fit(vectors).duplicates(labels=names, parts=["train"] * 300 + ["test"] * 300)
    assert as_sets(found) == {frozenset({row, row + 300}) for row in range(10)}
    assert sorted(found.suspects.tolist()) == wrong
    assert found.suggestions == ["abc"[labels[row]] for row in found.suspects.tolist()]
    assert [found.clusters[n].tolist() for n in found.conflicts] == [[0, 300]]
    assert len(found.shared) == 10


def test_a_few_neighbors_make_no_label_suspect():
    assert not len(EmbeddingSpace(planted(12, 0)).duplicates(0.99, labels=["a"] * 11 + ["b"]).suspects)


@pytest.mark.parametrize(("count", "threshold"), [(10, 1.0), (200, 0.9)])
def test_rows_that_are_all_equal_are_one_cluster(count, threshold):
    found = EmbeddingSpace(torch.ones(count, 4)).duplicates(threshold)
    assert [len(rows) for rows in found.clusters] == [count]
    assert found.expected_false is None


def test_thumbnails_of_copies_are_near_identical(digits):
    buffer = io.BytesIO()
    digits[0].resize((200, 150)).save(buffer, "JPEG", quality=80)
    images = [*digits, Image.open(buffer), Image.new("L", (8, 8), 128), Image.new("RGB", (50, 9), (9, 9, 9))]
    ((_, columns),) = ThumbnailEncoder().encode(ImageSource.of(images), range(15), progress=False)
    cosines = (columns["embedding"] @ columns["embedding"].T).fill_diagonal_(0)
    assert cosines[12].argmax() == 0
    assert cosines[12, 0] > 0.95
    assert cosines[13].argmax() == 14  # blank images


def test_the_command_finds_copies_in_another_folder(tmp_path, capsys):
    # Two folders of 120 digits each, of which the second one has resized copies of six from the first one
    folder, source = tmp_path / "digits", ImageSource.of("digits", "train")
    for row in range(240):
        image = source.open(row, 1).resize((64, 64), Image.Resampling.BICUBIC)
        path = folder / ("train" if row < 120 else "test") / source.labels[row]
        path.mkdir(parents=True, exist_ok=True)
        image.save(path / f"{row:03}.png")
        if row < 6:
            (folder / "test" / "copies").mkdir(parents=True, exist_ok=True)
            image.resize((40, 40)).save(folder / "test" / "copies" / f"{row:03}.jpg", quality=90)
    train, test = folder / "train", folder / "test"
    table = tmp_path / "found.csv"
    arguments = [str(train), "--other", str(test), "--threshold", "0.999", "--table", str(table)]
    command.main([*arguments, "--label_column", "label"])
    with table.open() as file:
        rows = [*csv.DictReader(file)]
    names = [tuple(row[f"file_{n}"].rpartition("/")[2] for n in (1, 2)) for row in rows]
    assert names == [(f"{row:03}.png", f"{row:03}.jpg") for row in range(6)]
    text = capsys.readouterr().err
    assert "found     12 rows in 6 clusters, threshold 0.999, " in text
    assert "labels    6 clusters have several" in text
    assert "parts     6 clusters have rows of several" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["empty"], "any data files"),
        (["space", "--column", "code"], "--column has no effect on .*space, which is an index"),
        (["space", "--other_split", "test"], "--other_split has no effect on .*space, which is an index"),
        (["space", "--label_column", "label"], "has no 'label'"),
        (["photos", "--other", "photos"], "--other is .*photos itself. Name another part"),
        (["photos"], "broken.png cannot be read as an image: .*Repair or remove it, or skip such images: --skip_inv"),
    ],
)
def test_invalid_words_are_one_error(words, message, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "broken.png").write_bytes(b"no image")
    EmbeddingSpace.fit(planted()).save(tmp_path / "space")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        command.main(words)


def test_a_given_and_a_chosen_threshold_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        command.main(["space", "--threshold", "0.9", "--expected_false", "1"])
    assert "threshold and expected_false exclude each other; leave one of them out" in capsys.readouterr().err


def test_the_other_split_is_of_the_same_dataset(tmp_path, capsys):
    vectors = planted()
    for name, rows in (("train", vectors[:480]), ("test", vectors[480:])):
        Dataset.from_dict({"embedding": rows.tolist()}).to_parquet(tmp_path / f"{name}.parquet")
    words = ["--column", "embedding", "--split", "train", "--other_split", "test", "--threshold", "0.9"]
    command.main([str(tmp_path), *words])
    assert "parts     20 clusters have rows of several" in capsys.readouterr().err
