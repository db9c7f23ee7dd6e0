"""The report on vectors: its numbers by plain formulas, planted faults, remedies, invalid input, and the command."""

import json
import math
import re

import numpy as np
import pytest
import torch
from clustered import unit
from datasets import Dataset
from scipy import stats

from hf_sphere.commands.report import main
from hf_sphere.metrics.geometry import effective_dimension_interval, uniformity_test
from hf_sphere.search import EmbeddingSpace, ImageIndex, ImageSource, report, report_vectors
from hf_sphere.visualization import plot_report


def clusters(seed=0, num_groups=60, size=5, dim=32, noise=1.2, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(num_groups).repeat_interleave(size)
    points = torch.randn(num_groups, dim, generator=generator)[groups]
    points = points + noise * torch.randn(points.shape, generator=generator) + mean
    return points / points.norm(dim=1, keepdim=True), groups


@pytest.mark.parametrize(("count", "dim"), [(20, 2), (50, 64), (30, 384)])
def test_p_values_of_uniform_directions_are_uniform(count, dim):
    generator = torch.Generator().manual_seed(1)
    values = [uniformity_test(unit(count, dim, generator=generator).double()) for _ in range(300)]
    assert min(stats.kstest(column, "uniform").pvalue for column in np.array(values).T) > 1e-3


def test_p_values_of_many_rows_are_those_of_rayleigh_and_bingham():
    x = unit(2000, 5).double().numpy()
    n, d = x.shape
    rayleigh = n * d * np.sum(x.mean(0) ** 2)
    bingham = d * (d + 2) / 2 * n * (np.sum((x.T @ x / n) ** 2) - 1 / d)
    expected = stats.chi2.sf([rayleigh, bingham], [d, (d - 1) * (d + 2) / 2])
    assert uniformity_test(torch.from_numpy(x)) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("size", [1, 4])
def test_the_interval_has_the_effective_dimension_of_the_distribution(size):
    generator, spread = torch.Generator().manual_seed(2), torch.arange(1, 25) ** -0.5
    covered, values, groups = [], [], torch.arange(160) // size
    truth = float(spread.square().sum() ** 2 / spread.pow(4).sum())
    for _ in range(100):
        points = torch.randn(160 // size, 24, generator=generator)[groups] * 0.7
        points = (points + math.sqrt(1 - 0.49) * torch.randn(160, 24, generator=generator)) * spread
        value, low, high = effective_dimension_interval(points.double(), groups)
        covered.append(low <= truth <= high)
        values.append(value)
    assert np.mean(covered) >= 0.87
    assert np.mean(values) == pytest.approx(truth, rel=0.03)


def test_hubs_and_overlap_are_those_of_all_cosines():
    vectors, groups = clusters(mean=0.5)
    cosines = vectors.double().numpy() @ vectors.double().numpy().T
    np.fill_diagonal(cosines, -np.inf)
    nearest = np.argsort(-cosines, axis=1)[:, :10]
    counts = np.bincount(nearest.ravel(), minlength=len(vectors))
    numbers = report_vectors(vectors, groups).numbers
    of_pairs = cosines[np.isfinite(cosines)].mean()  # not of one per group
    assert numbers["mean_cosine_of_pairs"] == pytest.approx(of_pairs)
    assert numbers["hub_skewness"] == pytest.approx(stats.skew(counts))
    assert numbers["largest_hub"] == counts.max()
    assert numbers["fraction_never_found"] == pytest.approx((counts == 0).mean())
    assert numbers["overlap"] == pytest.approx((groups.numpy()[nearest[:, 0]] != groups.numpy()).mean())


def test_remedies_are_fitted_to_one_half_of_the_groups_and_measured_on_the_other():
    vectors, groups = clusters(mean=0.5)
    found = report._measure_remedies(vectors, groups, torch.Generator().manual_seed(0))
    x, g = vectors.double().numpy(), groups.numpy()
    hits = dict.fromkeys((remedy.name for remedy in found), 0)
    for side in (0, 1):
        fit, rest, labels = x[g % 2 != side], x[g % 2 == side], g[g % 2 == side]
        mean = fit.mean(0)
        axes = np.linalg.svd(fit - mean)[2]
        views = {"nothing": rest, "mean removed": rest - mean, "first 16 dimensions": rest[:, :16]}
        views |= {"8 dimensions by PCA": (rest - mean) @ axes[:8].T}
        views |= {"mean and 2 components removed": (rest - mean) @ (np.eye(32) - axes[:2].T @ axes[:2])}
        scores = {name: (y := v / np.linalg.norm(v, axis=1)[:, None]) @ y.T for name, v in views.items()}
        scores["CSLS"] = 2 * rest @ rest.T - np.sort(rest @ fit.T)[:, -10:].mean(1)
        for name, matrix in scores.items():
            np.fill_diagonal(matrix, -np.inf)
            hits[name] += (labels[matrix.argmax(1)] == labels).sum()
    recalls = {remedy.name: remedy.recall_at_1 for remedy in found}
    for name in scores:
        assert recalls[name] == pytest.approx(hits[name] / len(x), abs=1e-6)


def test_a_remedy_that_does_nothing_is_seldom_recommended(monkeypatch):
    def noise(fit, points):
        yield "nothing", points + 0.1 * torch.randn(points.shape, generator=generator), 0.0
        for name in ("a", "b", "c"):
            yield name, points + 0.1 * torch.randn(points.shape, generator=generator), 0.0

    monkeypatch.setattr(report, "_remedies", noise)
    generator = torch.Generator().manual_seed(3)
    false = 0
    for seed in range(100):
        remedies = report._measure_remedies(*clusters(seed, num_groups=30), generator)
        false += any(remedy.low > 0 or remedy.high < 0 for remedy in remedies)
    assert false <= 12  # the 99.9 % quantile of 100 reports at 5 %


FAULTS = {
    "not finite, the first is 7": lambda x: x.index_fill_(0, torch.tensor([7, 9]), torch.nan),
    "zero, the first is 3": lambda x: x.index_fill_(0, torch.tensor([3]), 0.0),
    "1 of 300 rows are equal to an earlier row, the first is 8": lambda x: x[8].copy_(x[0]),
    "norms differ by a factor of 3": lambda x: x.mul_(torch.linspace(1, 3, 300)[:, None]),
    "1 of 32 dimensions are collapsed": lambda x: x.index_fill_(1, torch.tensor([5]), 0.0),
    "in a cone: pairs have a mean cosine of 0.": lambda x: x.add_(0.2),
    "they are collapsed": lambda x: x.copy_(x[0].expand(300, 32)),
    "No row is left": lambda x: x.zero_(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_recognized(fault):
    vectors, groups = clusters()
    whole = "\n".join(report_vectors(vectors, groups).verdicts)
    FAULTS[fault](vectors)
    assert fault not in whole
    assert fault in "\n".join(report_vectors(vectors, groups).verdicts)


def test_a_common_offset_makes_hubs_and_removing_the_mean_helps():
    vectors, groups = clusters(num_groups=150, size=6, dim=64, noise=1.5, mean=1.8)
    found = report_vectors(vectors, groups)
    verdicts = [verdict.split(":")[0] for verdict in found.verdicts]
    assert re.fullmatch(r"The nearest row of \d+ of 100 rows is of another group\.", verdicts[0])
    assert verdicts[1:] == ["The vectors are in a cone", "There are hubs", "What helps most"]
    assert found.remedies[1].low > 0.02


def test_copies_of_rows_are_left_out_of_all_that_is_measured():
    vectors, groups = clusters(mean=0.5)
    once, twice = (report_vectors(vectors.repeat(n, 1), groups.repeat(n)) for n in (1, 2))
    assert twice.remedies == once.remedies
    assert [twice.numbers[name] for name in ("rows_compared", "overlap")] == [300, once.numbers["overlap"]]


def test_pairs_are_drawn_from_all_rows_and_not_only_from_different_groups():
    groups = torch.arange(300) // 100
    vectors = torch.eye(16)[groups] + 0.05 * unit(300, 16)
    found = report_vectors(vectors, groups)
    assert found.drawn["pairs"].mean() == pytest.approx(1 / 3, abs=0.1)
    assert "in a cone" not in "".join(found.verdicts)


@pytest.mark.parametrize("noise", [0.01, 100.0])  # all rows match, or hardly any
def test_equal_results_of_few_rows_promise_little(noise):
    found = report_vectors(*clusters(num_groups=20, size=3, noise=noise))
    assert all(remedy.low <= -0.02 and remedy.high >= 0.02 for remedy in found.remedies[1:])
    assert "Fewer dimensions" not in "".join(found.verdicts)


@pytest.mark.parametrize("seed", range(3))
def test_groups_around_uniform_directions_need_no_remedy(seed):
    found = report_vectors(*clusters(seed, num_groups=100))
    assert "The directions look uniform: no significant mean, and no significant axis." in found.verdicts
    assert found.verdicts[-1].startswith("No remedy raised the Recall@1 of ")


def test_dimensions_without_information_can_be_cut():
    vectors, groups = clusters(num_groups=200, dim=16)
    wide = torch.cat([vectors, 0.01 * unit(1000, 48)], 1)
    assert "Fewer dimensions cost at most 2 % of the Recall@1: " in report_vectors(wide, groups).verdicts[-1]


@pytest.mark.parametrize("groups", [None, [1] * 60, [1, 2] * 30])
def test_without_groups_the_report_says_what_it_did_not_measure(groups):
    found = report_vectors(unit(60, 8), groups)
    assert found.verdicts[-1].startswith("What helps was not measured, which takes 20 groups of two rows or more")
    overlap = [verdict for verdict in found.verdicts if verdict.endswith("of 100 rows is of another group.")]
    assert len(overlap) == (groups == [1, 2] * 30)
    assert not found.remedies


@pytest.mark.parametrize("shape", [(10, 8), (60, 1), (1, 4)])
def test_few_rows_or_one_dimension_are_a_sentence(shape):
    vectors = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    verdict = "Nothing more can be said, which takes 50 different rows of two dimensions or more."
    assert report_vectors(vectors).verdicts[-1] == verdict


def test_of_many_rows_whole_groups_are_compared(monkeypatch):
    monkeypatch.setattr(report, "ROWS", 100)
    rows, groups = report._sample(torch.arange(400) // 4, torch.Generator().manual_seed(0))
    assert groups.tolist() == [number for number in range(25) for _ in range(4)]
    assert (rows // 4).unique().shape == (25,)


def test_a_space_says_that_it_has_normalized_its_vectors():
    vectors, groups = clusters()
    found = EmbeddingSpace.fit(3 * vectors, groups, score="cosine").report()
    assert found.numbers["smallest_median_largest_norm"] == pytest.approx([1, 1, 1])
    assert found.verdicts[-1].startswith("Norms are those in the space")
    assert found.remedies == report_vectors(vectors, groups.tolist()).remedies


def test_an_index_of_vectors_that_are_not_finite_names_their_file(tmp_path):
    Dataset.from_dict({"vector": [[1.0, 2.0], [1.0, math.nan]]}).to_parquet(path := tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"vectors of {path} must be finite and not zero; 1 of 2 are not, the"):
        ImageIndex.build(None, ImageSource.of(path, content="vector"))


@pytest.mark.parametrize("form", ["file", "index", "space"])
def test_the_command_reads_files_and_folders(form, tmp_path, capsys):
    vectors, groups = clusters()
    source, words = str(tmp_path / "vectors.parquet"), []
    rows = Dataset.from_dict({"embedding": vectors.tolist(), "article": groups.tolist()})
    if form == "file":
        rows.to_parquet(source)
        words = ["--group_column", "article", "--figure", str(tmp_path / "report.png")]
    elif form == "index":
        ImageIndex.build(None, ImageSource.of(rows, content="vector"), groups="article").save(source := tmp_path / "a")
    else:
        EmbeddingSpace.fit(vectors, groups).save(source := tmp_path / "b")
    main([str(source), *words, "--json", str(tmp_path / "report.json")])
    written, expected = json.loads((tmp_path / "report.json").read_text()), report_vectors(vectors, groups.tolist())
    for name, value in expected.numbers.items():
        assert written["numbers"][name] == pytest.approx(value, rel=1e-4)
    assert written["verdicts"][0] in capsys.readouterr().out
    assert (tmp_path / "report.png").exists() == (form == "file")


def test_an_index_without_groups_is_reported_by_one_of_its_columns(tmp_path):
    vectors, groups = clusters()
    rows = Dataset.from_dict({"embedding": vectors.tolist(), "article": groups.tolist()})
    ImageIndex.build(None, ImageSource.of(rows, content="vector"), columns=["article"]).save(folder := tmp_path / "a")
    main([str(folder), "--group_column", "article", "--json", str(tmp_path / "report.json")])
    numbers = json.loads((tmp_path / "report.json").read_text())["numbers"]
    assert numbers["overlap"] == pytest.approx(report_vectors(vectors, groups.tolist()).numbers["overlap"])
    with pytest.raises(ValueError, match="has article, not 'label'; leave out --group_column"):
        main([str(folder), "--group_column", "label"])
    with pytest.raises(ValueError, match="is an index, which has its vectors, ids and columns; leave out --column"):
        main([str(folder), "--id_column", "article"])


def test_the_text_counts_faulty_rows_and_names_them():
    vectors, groups = clusters()
    vectors[8:20] = vectors[:1]
    vectors[5] = torch.nan
    lines = str(report_vectors(vectors, groups)).splitlines()
    assert f"{'rows not finite':<36}1 (row 5)" in lines
    assert f"{'rows equal to an earlier row':<36}12 (rows 8, 9, 10, 11, 12, ...)" in lines
    shown = report_vectors(vectors, groups, ids=[f"S{row}" for row in range(300)]).to_pandas()
    cells = dict(zip(shown["name"], shown["value"], strict=True))
    assert cells["rows not finite"] == "1 (id S5)"
    assert cells["p-value of uniform axes"].startswith(("0.", "below 0.0001"))
    assert cells["largest hub"].startswith("among the nearest 10 of ")
    assert cells["overlap"].endswith(" %")
    assert len(cells) == len(shown)


def test_norms_that_differ_by_rounding_are_drawn_as_one_bar():
    norms = plot_report(report_vectors(torch.nn.functional.normalize(torch.randn(60, 4)))).axes[-1]
    assert sum(bar.get_height() > 0 for bar in norms.patches) == 1


def test_bad_input_is_refused(tmp_path):
    EmbeddingSpace.fit(*clusters()).save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"nothing to draw: No row is left"):
        plot_report(report_vectors(torch.zeros(4, 4)))
    for option in ("--figure", "--json"):
        with pytest.raises(OSError, match="it cannot be written"):
            main([str(tmp_path / "a"), option, "/proc/none/a"])
