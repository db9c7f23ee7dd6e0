"""Vectors of another model: whether they are recognized, and how a space is mapped to one."""

import logging

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from hf_sphere.commands import index as index_command
from hf_sphere.search import EmbeddingSpace, ImageIndex, ImageSource
from hf_sphere.search.drift import RELATED, Axes, axes_of

DIM = 48


def texts(count, topics=30, seed=0):
    """Unit vectors (N, d) of one model: axes of different variances, a common mean, and topics."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -1.2, DIM)
    points = torch.randn(topics, DIM, generator=generator)[torch.arange(count) % topics]
    points = points + 0.7 * torch.randn(count, DIM, generator=generator)
    return normalize(scales * points + 0.3 * scales.flip(0), dim=1)


def rotation(seed=0):
    return torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(seed))).Q


@pytest.fixture(scope="module")
def space():
    return EmbeddingSpace.fit(texts(900), score="cosine", model="old")


def test_the_relation_of_rotated_vectors_has_mean_zero_and_variance_one():
    axes = Axes.of(texts(400).double())
    same_topic = texts(64, topics=1, seed=5).double()
    relations = np.array([axes.relation(same_topic @ rotation(seed).double()) for seed in range(300)])
    assert abs(relations.mean()) < 3 / 300**0.5
    assert relations.std() == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("count", [30, 400])
def test_the_relation_is_the_trace_of_a_product_of_matrices(count):
    rows, points = texts(count).double(), texts(64, seed=1).double()
    moments, others = (x.T @ x / len(x) for x in (rows, points))
    weights = -torch.linalg.inv(moments + torch.eye(DIM).double() / DIM)
    weights, others = (x - torch.eye(DIM).double() * x.trace() / DIM for x in (weights, others))
    spread = (2 * weights.square().sum() * others.square().sum() / ((DIM - 1) * (DIM + 2))) ** 0.5
    assert Axes.of(rows).relation(points) == pytest.approx(float((weights * others).sum() / spread), rel=1e-6)


def test_rotated_vectors_are_recognized_and_new_topics_are_not(space):
    for seed in range(1, 31):
        off_topic = texts(64, topics=8, seed=seed)  # each topic eight times
        assert not space.check_model(off_topic).is_foreign
        assert space.check_model(off_topic @ rotation(seed)).is_foreign
    assert axes_of(space).own > 2 * RELATED


def test_a_space_of_uniform_directions_or_of_few_rows_recognizes_nothing():
    for vectors in (torch.randn(500, DIM, generator=torch.Generator().manual_seed(0)), texts(5), texts(500)[:, :4]):
        check = EmbeddingSpace(normalize(vectors)).check_model(torch.eye(vectors.shape[1]).repeat(64, 1))
        assert not check.is_foreign
        assert "are not tested" in str(check)


def test_vectors_of_another_model_are_refused_or_warned_of(space, caplog):
    foreign = texts(64, seed=3) @ rotation()
    with pytest.raises(ValueError, match=r"the 64 vectors look like those of another model.* with its model 'o"):
        space.add(None, foreign)
    assert len(space) == 900
    space.search(foreign, 1)
    assert "the 64 vectors look like those of another model" in caplog.text
    assert space.compare(foreign).is_foreign
    caplog.clear()
    space.search(texts(64, topics=8, seed=3), 1)
    space.search(foreign[:63], 1)
    assert caplog.text == ""


def test_few_vectors_are_compared_by_the_name_of_the_model(space):
    with pytest.raises(ValueError, match="the 1 vectors are of the model 'new', and the space of 'old'"):
        space.add(None, texts(1, seed=3), model="new")
    other = EmbeddingSpace.fit(texts(900), score="cosine", model="old")
    other.add(None, texts(1, seed=3), model="old")
    other.add(None, texts(64, seed=4) @ rotation(), check=False)
    assert len(other) == 965


def test_an_index_refuses_and_warns_of_vectors_of_another_model(tmp_path, caplog):
    paths = [tmp_path / name for name in ("rows.npy", "same.npy", "foreign.npy")]
    for path, vectors in zip(paths, (texts(900), texts(64, seed=3), texts(64, seed=3) @ rotation()), strict=True):
        np.save(path, vectors.numpy())
    folder = ["--add_to", str(tmp_path / "index")]
    index_command.main([str(paths[0]), "--output_dir", str(tmp_path / "index")])
    ImageIndex.load(tmp_path / "index").search(ImageSource.of(paths[2], content="vector"), 1)
    assert "the 64 vectors look like those of another model" in caplog.text
    index_command.main([str(paths[1]), *folder])
    with pytest.raises(ValueError, match="the 64 vectors look like those of another model"):
        index_command.main([str(paths[2]), *folder])
    index_command.main([str(paths[2]), *folder, "--no_check_model"])
    assert len(ImageIndex.load(tmp_path / "index")) == 900 + 2 * 64
    assert len(ImageSource.of(paths[2], content=None)) == 64


# Migration


def new_model(vectors, noise=0.0):
    generator = torch.Generator().manual_seed(9)
    return normalize(vectors @ rotation(4) + noise * torch.randn(vectors.shape, generator=generator), dim=1)


def test_a_space_is_mapped_to_another_model_and_saved(tmp_path):
    vectors, groups = texts(900), [f"topic {row % 30}" for row in range(900)]
    space = EmbeddingSpace.fit(vectors, groups, ids=[*range(5, 905)], score="cosine", model="old")
    anchors = texts(300, seed=2)
    moved = space.migrate(anchors, new_model(anchors), max_recall_loss=0.05, model="new")
    assert moved.migration.recall > 0.99
    moved.save(tmp_path / "space")
    assert EmbeddingSpace.load(tmp_path / "space").migration == moved.migration
    torch.testing.assert_close(moved.vectors, new_model(vectors), atol=1e-3, rtol=0)
    assert (moved.model, moved.ids, moved.groups) == ("new", space.ids, groups)
    assert moved.search(new_model(vectors[[7]]), 1, false_accept=0.1).ids == [[12]]
    assert moved.calibration.num_groups == 30
    assert not moved.check_model(new_model(texts(64, seed=3))).is_foreign


def test_a_ridge_map_leads_to_other_dimensions():
    wide = torch.randn(DIM, 60, generator=torch.Generator().manual_seed(0)) / 7
    anchors, vectors = texts(300, seed=2), texts(400)
    moved = EmbeddingSpace.fit(vectors, score="cosine").migrate(anchors, anchors @ wide)
    assert moved.vectors.shape == (400, 60)
    assert moved.migration.low > 0.95
    assert "map finds 9" in str(moved.migration)


def test_a_map_that_loses_too_much_is_refused(space):
    anchors = texts(300, seed=2)
    noisy = new_model(anchors, noise=0.3)
    moved = space.migrate(anchors, noisy)
    assert 0.1 < moved.migration.low < moved.migration.recall < moved.migration.high < 0.9
    with pytest.raises(ValueError, match=r"recall@10 among 300 anchors, so the loss may exceed max_recall_loss=0.1"):
        space.migrate(anchors, noisy, max_recall_loss=0.1)


BAD_ANCHORS = {
    "few": (lambda x: (x[:99], x[:99]), "number of anchors, .*must be an integer of at least 100; got 99"),
    "equal": (lambda x: (x[[0, *range(299)]], x), "anchors must differ; of old, 1 repeat: rows 1"),
    "in another order": (lambda x: (x, new_model(x.flip(0))), "no more than by chance. Are old and new of the same"),
    "of another model": (lambda x: (new_model(x), x), "old are no vectors of the space: the 300 vectors look like"),
    "of other dimensions": (lambda x: (x[:, 1:], x), "old must have 48 dimensions, as the space; got 47"),
}


@pytest.mark.parametrize("name", BAD_ANCHORS)
def test_anchors_that_do_not_fit_are_refused(space, name):
    make, message = BAD_ANCHORS[name]
    with pytest.raises(ValueError, match=message):
        space.migrate(*make(texts(300, topics=300, seed=2)))


def test_a_space_that_separate_queries_calibrate_is_not_mapped(caplog):
    caplog.set_level(logging.ERROR)
    space = EmbeddingSpace.fit(texts(200), calibration=texts(40, seed=1), score="cosine")
    with pytest.raises(ValueError, match="only cosines that rows calibrate are migrated"):
        space.migrate(texts(300, seed=2), texts(300, seed=2))
