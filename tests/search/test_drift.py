"""EmbeddingSpace.compare: the test, what moved, the rows that are outside, and invalid input."""

import json

import numpy as np
import pytest
import torch
from clustered import unit
from datasets import Dataset
from scipy.stats import kstest

from hf_sphere.commands.report import main
from hf_sphere.search import EmbeddingSpace


def drawn(count, seed):
    return EmbeddingSpace(unit(count, 8, seed=seed, shift=3.0))


def test_p_values_of_parts_of_one_dataset_are_uniform_and_intervals_contain_no_change():
    found = [drawn(40, seed).compare(drawn(60, 1_000 + seed)) for seed in range(100)]
    assert kstest([each.p_value for each in found], "uniform").pvalue > 1e-3
    assert np.mean([each.angle[1] > 0 for each in found]) < 0.1
    dimensions = np.array([each.dimensions for each in found])[:, :, 1:]  # of two intervals one is to the left
    assert np.mean(dimensions[..., 0].max(1) > dimensions[..., 1].min(1)) < 0.1
    assert np.mean([len(each.outside) > 0 for each in found]) < 0.1


def test_rows_of_one_group_are_not_evidence_of_a_difference():
    generator = torch.Generator().manual_seed(0)
    p_values = []
    for seed in range(100):
        sides = []
        for _ in range(2):
            centers = torch.randn(20, 8, generator=generator).repeat_interleave(10, 0)
            vectors = centers + 0.1 * torch.randn(centers.shape, generator=generator)
            sides.append(EmbeddingSpace(vectors, torch.arange(20).repeat_interleave(10)))
        p_values.append(sides[0].compare(sides[1], seed=seed).p_value)
    assert kstest(p_values, "uniform").pvalue > 1e-3


def test_the_angle_between_mean_directions_is_in_its_interval():
    direction = torch.tensor([np.cos(np.radians(30)), np.sin(np.radians(30))])
    inside = []
    for seed in range(60):
        first, second = (0.3 * torch.randn(200, 6, generator=torch.Generator().manual_seed(seed + k)) for k in (0, 999))
        first[:, 0] += 1
        second[:, :2] += direction
        angle = EmbeddingSpace(first).compare(second).angle
        inside.append(angle[1] <= 30 <= angle[2])
    assert np.mean(inside) > 0.85


def test_opposite_directions_are_180_degrees_apart_and_a_mean_of_zero_has_none():
    found = EmbeddingSpace(unit(100, 8, shift=9.0)).compare(unit(100, 8, seed=1, shift=-9.0))
    assert found.angle[1] > 150
    assert "The mean direction moved by 1" in str(found)
    assert EmbeddingSpace(unit(100, 8)).compare(unit(100, 8, seed=1)).angle[1:] == (0, 180)


def test_equal_means_have_an_interval():
    angles = [drawn(40, seed).compare(drawn(60, 1_000 + seed)).angle for seed in range(40)]
    assert min(high for _, _, high in angles) > 1


def test_the_effective_dimension_is_that_of_many_rows():
    found = EmbeddingSpace(unit(60, 40)).compare(torch.cat([unit(200, 5), torch.zeros(200, 35)], 1))
    first, second = found.dimensions
    assert first[1] <= 40 <= first[2]  # the ratio of 60 rows is 24
    assert second[0] == pytest.approx(5, abs=0.3)


def test_rows_that_are_outside_are_found():
    space = EmbeddingSpace.fit(unit(1_000, 6, shift=4.0), score="cosine")
    others = torch.cat([unit(190, 6, seed=1, shift=4.0), unit(10, 6, seed=2, shift=-4.0)])
    found = space.compare(others)
    assert set(range(190, 200)) <= set(found.outside.tolist())
    assert len(found.outside) <= 12
    assert "the vectors differ" in str(found)
    assert f"{len(found.outside)} of 200 rows are outside" in str(found)


@pytest.mark.parametrize("options", [{"rule": "strict"}, {"calibration": unit(30, 6, seed=9)}])
def test_rows_outside_do_not_depend_on_how_matches_are_calibrated(options):
    vectors, others = unit(200, 6, shift=2.0), unit(50, 6, seed=1)
    spaces = EmbeddingSpace.fit(vectors, score="cosine"), EmbeddingSpace.fit(vectors, **options)
    first, second = (space.compare(others) for space in spaces)
    assert torch.equal(first.outside_p_values, second.outside_p_values)


def test_an_approximate_search_leaves_no_row_outside():
    pytest.importorskip("faiss")
    vectors, others = unit(2_000, 16), unit(100, 16, seed=1)
    spaces = (EmbeddingSpace.fit(vectors, score="cosine", kind=kind) for kind in ("torch", "ivf"))
    first, second = (space.compare(others).outside_p_values for space in spaces)
    assert (first - second).abs().max() < 1e-3


def test_equal_vectors_do_not_differ_and_few_groups_are_said():
    space = EmbeddingSpace(unit(1, 4).repeat(20, 1))
    found = space.compare(space)
    assert (found.p_value, found.angle[0]) == (1, pytest.approx(0, abs=1e-3))
    assert str(found).startswith("no difference found among 20 rows of each, one per group (p-value 1).")
    assert "too few groups to find fewer than 20" in str(found)
    assert str(space.compare(space, level=0.01)).endswith("too few groups to find any.")


def test_the_report_of_the_command_compares_an_index_with_a_file(tmp_path, capsys):
    space, others = EmbeddingSpace.fit(unit(100, 6, shift=2.0), score="cosine"), unit(100, 6, seed=1, shift=-2.0)
    space.save(tmp_path / "index")
    Dataset.from_dict({"vector": others.tolist()}).to_parquet(tmp_path / "new.parquet")
    written = tmp_path / "report.json"
    main([str(tmp_path / "index"), "--compare_with", str(tmp_path / "new.parquet"), "--json", str(written)])
    printed, found = capsys.readouterr().out.splitlines()[-1], space.compare(others)
    assert printed == f"compared with {tmp_path / 'new.parquet'}: {found}"
    assert "the vectors differ" in printed
    comparison = json.loads(written.read_text())["comparison"]
    assert (comparison["p_value"], comparison["outside"]) == (found.p_value, found.outside.tolist())


def test_what_cannot_be_compared_is_an_error_before_the_report(tmp_path, capsys):
    for number, dim in enumerate((6, 4)):
        Dataset.from_dict({"vector": unit(60, dim).tolist()}).to_parquet(tmp_path / f"{number}.parquet")
    with pytest.raises(ValueError, match="other must have 6 dimensions"):
        main([str(tmp_path / "0.parquet"), "--compare_with", str(tmp_path / "1.parquet")])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("has_groups", [True, False])
def test_other_vectors_without_groups_are_named_where_the_space_has_some(has_groups):
    vectors, groups = torch.randn(120, 8, generator=torch.Generator().manual_seed(0)), torch.arange(120) // 2
    space = EmbeddingSpace.fit(vectors, groups, score="cosine")
    other = EmbeddingSpace(space.vectors, groups) if has_groups else space.vectors
    assert ("each row counts as one" in str(space.compare(other))) is not has_groups
