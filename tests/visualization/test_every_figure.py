"""What holds for the functions of all figures."""

from functools import partial

import pytest
import torch
from torch import nn

from hf_sphere import visualization
from hf_sphere.comparison import compare_runs
from hf_sphere.hyperplanes import projection_statistics
from hf_sphere.metrics import reliability_bins, risk_coverage
from hf_sphere.search import report_vectors
from hf_sphere.visualization import Panel

RESULT = {"model": "bert", "benchmark": "sat", "scoring": "pmi", "chance_level": 0.2}
RESULT |= {"eval_accuracy": 0.4, "eval_accuracy_low": 0.3, "eval_accuracy_high": 0.5}
LAYER = {"snapshots": {"0": 0.1, "5": 0.5}, "random": None}
RUNS = {"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0, 1: 3.0}}
POINTS, LABELS, NAMES = torch.rand(30, 3) + 0.1, torch.arange(30) % 3, ["a", "b", "c"]
CORRECT = LABELS > 0
PROJECTIONS = projection_statistics(nn.Conv2d(3, 8, 3)).to_dict()
FIGURES = {
    "plot_analogy_accuracies": ([RESULT],),
    "plot_circle": (POINTS[:, :2], LABELS, NAMES),
    "plot_class_angles": (POINTS, LABELS),
    "plot_comparison": (compare_runs(RUNS, reference="a", higher_is_better=True, perfect=100),),
    "plot_gallery": ({"one": Panel(POINTS, LABELS)}, NAMES),
    "plot_projection_histograms": (PROJECTIONS,),
    "plot_projection_masses": (PROJECTIONS,),
    "plot_projections_along_training": ({"epochs": [{"epoch": 0, "projections": PROJECTIONS}]},),
    "plot_reinitialization": ({"accuracy": 0.9, "layers": {"a": LAYER}, "missing": []},),
    "plot_reliability": (reliability_bins(POINTS[:, 0].clamp_max(1), CORRECT),),
    "plot_report": (report_vectors(torch.rand(60, 4), torch.arange(60) // 2),),
    "plot_risk_coverage": ({"norm": risk_coverage(POINTS[:, 0], CORRECT)},),
    "plot_sphere": (POINTS, LABELS, NAMES),
}
OPTIONS = {"plot_gallery": {"dim": 3}}


@pytest.fixture(params=FIGURES)
def plot(request):
    function, options = getattr(visualization, request.param), OPTIONS.get(request.param, {})
    return partial(function, *FIGURES[request.param], **options)


def test_every_figure_is_tested():
    assert set(FIGURES) == {name for name in visualization.__all__ if name.startswith("plot_")}


def test_a_figure_is_written_into_a_new_folder(plot, tmp_path):
    plot(path=tmp_path / "new" / "a.png")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_is_the_format(suffix, start, tmp_path):
    visualization.plot_projection_masses(PROJECTIONS, path=tmp_path / f"a.{suffix}")
    assert (tmp_path / f"a.{suffix}").read_bytes().startswith(start)


PERCENT = {"percent": (torch.ones(1), torch.tensor([25.0]))}
GALLERY = {"cosine": Panel(POINTS, LABELS), "plain": Panel(POINTS[:, :2], LABELS)}
ZERO = {"accuracy": 0.0, "layers": {"a": LAYER}}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("plot_analogy_accuracies", ([RESULT] * 2,), "pass one accuracy per model, benchmark and scoring"),
        ("plot_analogy_accuracies", ([RESULT | {"eval_accuracy_high": 40.08}],), r"not in percent; got 40\.08"),
        ("plot_projection_histograms", (PROJECTIONS | {"normalized": False},), r"not normalized; use .*=True\)"),
        ("plot_risk_coverage", ({},), "at least one, of coverages and risks from 0 to 1"),
        ("plot_risk_coverage", (PERCENT,), "at least one, of coverages and risks from 0 to 1"),
        ("plot_gallery", (GALLERY, NAMES), "plain: points of 2 coordinate"),
        ("plot_reinitialization", (ZERO,), "accuracy of 0, so a relative drop is undefined"),
    ],
)
def test_what_cannot_be_drawn_is_refused(name, given, message):
    options = OPTIONS | {"plot_reinitialization": {"quantity": "relative_drop"}}
    with pytest.raises(ValueError, match=message):
        getattr(visualization, name)(*given, **options.get(name, {}))


def test_a_title_is_not_parsed_as_math(plot):
    figure = plot(title="$a^$")
    figure.draw_without_rendering()
    assert "$a^$" in (figure.get_suptitle(), figure.axes[0].get_title())
