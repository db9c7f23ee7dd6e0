"""EmbeddingSpace.compress: recall, p-values, names, files, and invalid input."""

import json
import shutil

import numpy as np
import pytest
import torch
from clustered import clusters
from safetensors.torch import load_file, save_file

from hf_sphere.search import CompressedSpace, EmbeddingSpace
from hf_sphere.utils.files import write_manifest

faiss = pytest.importorskip("faiss", minversion="1.14.2")

BITS = [1, 2, 4, 8]


@pytest.fixture
def space():
    vectors, groups = clusters(60, dim=32, noise=0.2)
    return EmbeddingSpace.fit(vectors, [f"person {group}" for group in groups], score="cosine")


@pytest.mark.parametrize("bits", BITS)
def test_the_recall_is_that_of_new_queries(bits):
    vectors, _ = clusters(2_500, 1, 32, 1.0)
    gallery, queries = vectors[:2_000], vectors[2_000:]
    small = EmbeddingSpace.fit(gallery, score="cosine").compress(bits)
    exact, found = (queries @ gallery.T).topk(10).indices, small.search(queries, 10).rows
    recall = (found[:, :, None] == exact[:, None]).any(2).double().mean()
    assert small.recall[1] - 0.03 <= recall <= small.recall[2] + 0.03
    assert small.recall[0] >= {1: 0.25, 2: 0.5, 4: 0.85, 8: 0.98}[bits]
    assert small.bytes_per_vector == 32 * bits // 8 + {1: 8, 2: 20, 4: 20, 8: 0}[bits]


@pytest.mark.parametrize("bits", BITS)
def test_false_accepts_stay_at_the_level(bits):
    rates = []
    for seed in range(20):
        vectors, groups = clusters(120, 4, 32, 0.2, seed)
        is_known = groups < 60
        small = EmbeddingSpace.fit(vectors[is_known], groups[is_known], score="cosine", seed=seed).compress(bits)
        accepted = small.search(vectors[~is_known][::4], 1, false_accept=0.1).accepted
        rates.append(float(accepted.double().mean()))
    assert 0.02 < np.mean(rates) <= 0.1 + 3 * np.std(rates) / 20**0.5


def test_calibration_scores_are_of_the_codes_without_the_group(space):
    small, known = space.compress(4), space.calibration
    assert torch.equal(small.calibration.ids, known.ids)
    found = small.search(space.vectors, len(space))
    scores = torch.empty(len(space), len(space), dtype=torch.float64).scatter_(1, found.rows, found.scores)
    scores[space._groups[:, None] == space._groups] = -torch.inf
    torch.testing.assert_close(small.calibration.scores[:, 0], scores.amax(1)[known.ids], atol=1e-6, rtol=0)
    assert small.smallest_p_value == space.smallest_p_value


def test_all_rows_but_one_group_can_be_far_from_a_query():
    vectors, groups = clusters(3, 900, 16, noise=0.05)  # all candidates are of one group
    small = EmbeddingSpace.fit(vectors, groups, score="cosine").compress(8)
    cosines = vectors[small.calibration.ids] @ vectors.T
    cosines[groups[small.calibration.ids][:, None] == groups] = -1
    torch.testing.assert_close(small.calibration.scores[:, 0], cosines.amax(1).double(), atol=0.02, rtol=0)


def test_separate_queries_calibrate_the_codes():
    vectors, groups = clusters(60, dim=32, noise=0.2)
    queries = clusters(40, 1, 32, 0.2, 5)[0]
    small = EmbeddingSpace.fit(vectors, groups, calibration=queries, score="cosine").compress(8)
    assert (small.calibration.ids < 0).all()
    assert small.smallest_p_value == pytest.approx(1 / 41)
    best = (queries @ vectors.T).amax(1).double()
    torch.testing.assert_close(small.calibration.scores[:, 0], best, atol=0.02, rtol=0)


def test_codes_are_saved_to_their_folder_where_mapped_files_are_locked(space, tmp_path, monkeypatch, refused_renames):
    space.compress().save(tmp_path / "codes")
    monkeypatch.setattr("hf_sphere.utils.files.IS_WINDOWS", True)
    loaded = CompressedSpace.load(tmp_path / "codes")
    loaded.save(tmp_path / "codes")
    assert len(CompressedSpace.load(tmp_path / "codes")) == len(loaded)
    assert refused_renames == []


def test_a_space_without_groups_is_saved(tmp_path):
    small = EmbeddingSpace.fit(clusters(60, dim=32, noise=0.2)[0]).compress(4)
    small.save(tmp_path / "small")
    assert CompressedSpace.load(tmp_path / "small").ids == small.ids


def test_names_and_thresholds_are_those_of_the_space(space):
    small = space.compress(8)
    assert small.identify(space.vectors[7], 0.1) == "person 1"
    assert small.groups == space.groups
    assert small.threshold(0.1) == pytest.approx(space.threshold(0.1), abs=0.01)


def test_vectors_of_an_index_that_are_not_unit_are_compressed_by_their_directions():
    vectors, groups = clusters(60, dim=32, noise=0.2)
    scores = [EmbeddingSpace(factor * vectors, groups).compress(4).calibration.scores for factor in (1, 4, 3)]
    assert torch.equal(scores[0], scores[1])
    differ = (scores[0] - scores[2]).abs() > 1e-5  # 3 * x is rounded, and may cross the border of two codes
    assert differ.float().mean() <= 0.01


@pytest.mark.parametrize("bits", BITS)
def test_a_saved_space_gives_equal_results(tmp_path, space, bits):
    space.remove(ids=[3])
    small = space.compress(bits)
    for _ in range(2):  # it replaces itself
        small.save(tmp_path / "small")
    loaded = CompressedSpace.load(tmp_path / "small")
    queries = clusters(20, 1, 32, 0.2, 9)[0]
    first, second = (each.search(queries, 4, false_accept=0.2) for each in (small, loaded))
    for name in ("rows", "scores", "p_values", "accepted"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert repr(loaded) == repr(small)
    assert loaded.groups == space.groups
    assert loaded.ids == space.ids


@pytest.mark.parametrize(("dim", "bits"), [(8, 2), (64, 4)])
def test_p_values_of_equal_vectors_depend_neither_on_the_batch_nor_on_the_file(tmp_path, dim, bits):
    points = torch.nn.functional.normalize(torch.randn(200, dim, generator=torch.Generator().manual_seed(0)))
    small = EmbeddingSpace.fit(points.repeat(2, 1), list(range(400)), score="cosine").compress(bits)
    small.save(tmp_path / "small")
    together = small.search(points[:60], 1, false_accept=0.2).p_values
    alone = torch.cat([small.search(point, 1, false_accept=0.2).p_values for point in points[:60]])
    assert torch.equal(alone, together)
    assert torch.equal(CompressedSpace.load(tmp_path / "small").search(points[:60], 1).p_values, together)


def test_a_folder_with_other_files_is_not_replaced_and_codes_that_lose_too_much_not_made(tmp_path, space):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileExistsError, match=r"is not replaced: it has other files, such as notes.txt"):
        space.compress(1).save(tmp_path)
    with pytest.raises(ValueError, match="queries must have 32 dimensions"):
        space.compress().search(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"recall@10 is 0\.\d+ \(.*\) with bits=1, .* may exceed max_recall_loss=0.01"):
        space.compress(1, max_recall_loss=0.01)


DAMAGE = {
    "codes": lambda about, tensors: tensors.update(codes=tensors["codes"][:, 1:]),
    "fewer codes": lambda about, tensors: tensors.update(codes=tensors["codes"][1:]),
    "learned": lambda about, tensors: tensors.update(learned=tensors["learned"][1:]),
    "other bits": lambda about, tensors: about.update(bits=1),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_codes_that_would_read_other_memory_are_refused(tmp_path, space, name):
    space.compress(4).save(tmp_path)
    about, tensors = json.loads((tmp_path / "compressed.json").read_text()), load_file(tmp_path / "codes.safetensors")
    DAMAGE[name](about, tensors)
    (tmp_path / "compressed.json").write_text(json.dumps(about))
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "codes.safetensors")
    write_manifest(tmp_path)
    with pytest.raises(ValueError, match="the codes do not fit the rows"):
        CompressedSpace.load(tmp_path)


def test_a_flipped_bit_and_a_missing_file_are_found(tmp_path, space):
    space.compress(1).save(tmp_path)
    file = tmp_path / "codes.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"codes.safetensors is damaged"):
        CompressedSpace.load(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"compressed\.json"):
        CompressedSpace.load(tmp_path)


@pytest.mark.parametrize("vectors", [torch.ones(200, 3), torch.randn(200, 1), torch.eye(2).repeat(60, 1)])
@pytest.mark.parametrize("bits", BITS)
def test_equal_rows_and_few_dimensions_lose_no_neighbor(vectors, bits):
    small = EmbeddingSpace.fit(vectors, score="cosine").compress(bits, max_recall_loss=0.05)
    assert small.search(vectors[:2], 3).scores == pytest.approx(1, abs=0.02)


def test_a_perfect_recall_of_few_queries_has_an_interval():
    small = EmbeddingSpace(torch.eye(2).repeat(60, 1)).compress(8)  # 12 queries with 10 neighbors each
    assert small.recall == (1, pytest.approx(0.025 ** (1 / 120)), 1)


def test_a_missing_or_old_faiss_is_one_error(space, monkeypatch):
    monkeypatch.setattr(faiss, "__version__", "1.13.2")
    with pytest.raises(ImportError, match=r"needs FAISS 1.14.2 or later; 1.13.2 is installed: pip install"):
        space.compress()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"a compressed space requires faiss: pip install"):
        space.compress()


def test_codes_keep_margins_and_their_decisions(tmp_path):
    vectors, groups = clusters(60, noise=0.12)
    space = EmbeddingSpace.fit(vectors, groups)
    space.compress(8).save(tmp_path)
    small = CompressedSpace.load(tmp_path)
    queries = torch.cat([vectors[::5] + 0.02, torch.randn(60, 16)])
    found, expected = (each.search(queries, 3, false_accept=0.2) for each in (small, space))
    torch.testing.assert_close(found.scores[:, 0], expected.scores[:, 0], atol=0.05, rtol=0)
    assert (found.accepted[:, 0] == expected.accepted[:, 0]).double().mean() > 0.95
    assert torch.equal(small.calibration.ids, space.calibration.ids)


def test_codes_of_a_loaded_space_calibrate_as_those_of_the_space_itself(tmp_path):
    space = EmbeddingSpace.fit(*clusters(60, noise=0.12))
    space.save(tmp_path / "space")
    codes, of_loaded = (each.compress(8).calibration for each in (space, EmbeddingSpace.load(tmp_path / "space")))
    torch.testing.assert_close(of_loaded.scores, codes.scores, atol=1e-9, rtol=0)
