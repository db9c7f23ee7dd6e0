import math
from typing import Any

import numpy as np
import pytest
from figure_texts import legend_of
from hypothesis import given, strategies as st
from scipy.stats import beta, kstest

from hf_sphere.visualization import plot_projection_histograms, plot_projection_masses, plot_projections_along_training
from hf_sphere.visualization.figures import choose_evenly, shorten_layer_names


def layer(*projections: float, dim: int = 9, **more: Any) -> dict[str, Any]:
    """A layer in the format of `hf_sphere.hyperplanes`, not significant in any test."""
    mass = sum(value <= 0 for value in projections) / len(projections) if projections else None
    low, high = (0.3, 0.7) if projections else (None, None)
    numbers = {"num_filters": len(projections), "num_dead": 0, "dim": dim, "mass": mass}
    band = {"null_mass_low": low, "null_mass_high": high}
    p_values = {"ks_p_value_adjusted": 0.5, "sign_p_value_adjusted": 0.5}
    return {**numbers, **band, **p_values, "projections": list(projections), **more}


def statistics(layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    everything = [value for each in layers.values() for value in each["projections"]]
    return {"normalized": True, "layers": layers, "net": layer(*everything), **more}


def random_layer(filters: int, dim: int, seed: int = 0) -> dict[str, Any]:
    rows = np.random.default_rng(seed).normal(size=(filters, dim))
    return layer(*(rows.sum(1) / np.linalg.norm(rows, axis=1) / math.sqrt(dim)), dim=dim)


def numbered(count: int) -> dict[str, Any]:
    return {f"conv{number}": random_layer(20, 27, number) for number in range(count)}


def epoch(number: int, layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"epoch": number, "projections": statistics(layers), **more}


class TestMasses:
    def bars(self, figure, label: str) -> list[tuple[float, float, float]]:
        """Center, start and end of the bars with this label."""
        (found,) = [bars for bars in figure.axes[0].containers if bars.get_label() == label]
        return [((box.y0 + box.y1) / 2, box.x0, box.x1) for box in (bar.get_bbox() for bar in found)]

    def names(self, axis) -> list[str]:
        return [tick.get_text() for tick in axis.get_ticklabels()]

    def test_bars_show_layer_masses_and_the_last_bar_the_network_mass(self):
        figure = plot_projection_masses(statistics({"a": layer(-1, 1), "b": layer(-1, -1, 1, -1)}))
        assert self.bars(figure, "no significant difference") == [
            pytest.approx((0, 0, 0.5)),
            pytest.approx((1, 0, 0.75)),
            pytest.approx((2.5, 0, 4 / 6)),
        ]
        assert self.names(figure.axes[0].yaxis) == ["a", "b", "network"]
        assert figure.axes[0].yaxis_inverted()  # from top to bottom

    @pytest.mark.parametrize("test", ["sign_p_value_adjusted", "ks_p_value_adjusted"])
    def test_layers_significant_in_either_test_differ_in_color_and_hatch(self, test):
        layers = {"a": layer(-1, 1), "b": layer(-1, 1, **{test: 0.049}), "c": layer(-1, 1, **{test: 0.05})}
        figure = plot_projection_masses(statistics(layers))
        _, different, alike = figure.axes[0].containers
        significant = self.bars(figure, "unlike random filters (sign or KS test, adjusted p < 0.05)")
        assert [middle for middle, *_ in significant] == [1]
        assert different[0].get_facecolor() != alike[0].get_facecolor()
        assert different[0].get_hatch() != alike[0].get_hatch()
        assert len(legend_of(figure)) == 3

    def test_a_layer_of_dead_filters_has_no_bar(self):
        dead = layer(num_filters=4, num_dead=4, sign_p_value_adjusted=None, ks_p_value_adjusted=None)
        figure = plot_projection_masses(statistics({"a": dead, "b": layer(-1, 1)}))
        assert [middle for middle, *_ in self.bars(figure, "no significant difference")] == [1, 2.5]
        assert [middle for middle, *_ in self.bars(figure, "95 % range of random filters")] == [1, 2.5]


class TestHistograms:
    def grid(self, figure) -> list[tuple[str, str]]:
        """Layer and epoch of each panel, from its row and column labels."""
        rows = [axes.get_ylabel().split("\n")[0] for axes in figure.axes if axes.get_ylabel()]
        columns = [axes.get_title() for axes in figure.axes if axes.get_title()]
        return [(row, column) for row in rows for column in columns]

    def stairs(self, axes) -> dict[str, Any]:
        return {patch.get_label(): patch.get_data() for patch in axes.patches}

    def test_bars_are_densities_in_units_of_the_null_standard_deviation(self):
        one = random_layer(500, 16)
        (axes,) = plot_projection_histograms(statistics({"a": one})).axes
        sides = self.stairs(axes)
        edges = np.concatenate([sides["projection ≤ 0"].edges[:-1], sides["projection > 0"].edges])
        heights = np.concatenate([sides["projection ≤ 0"].values, sides["projection > 0"].values])
        expected, _ = np.histogram(4 * np.array(one["projections"]), edges, density=True)
        assert heights == pytest.approx(expected)
        assert (heights * np.diff(edges)).sum() == pytest.approx(1)

    def test_the_area_left_of_zero_is_the_mass(self):
        one = layer(-0.5, 0.0, 0.0, 0.25, 0.5)
        (axes,) = plot_projection_histograms(statistics({"a": one})).axes
        left = self.stairs(axes)["projection ≤ 0"]
        assert left.edges[-1] == 0
        assert (left.values * np.diff(left.edges)).sum() == pytest.approx(0.6)

    def test_the_line_is_the_null_density(self):
        dim = 10
        (axes,) = plot_projection_histograms(statistics({"a": random_layer(50, dim)})).axes
        x, density = axes.get_lines()[0].get_data()
        samples = random_layer(4000, dim, seed=1)["projections"]
        steps = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))])
        result = kstest(math.sqrt(dim) * np.array(samples), lambda at: np.interp(at, x, steps))
        assert result.pvalue > 1e-3
        assert density[100] == pytest.approx(beta.pdf(0.5, 4.5, 4.5) / 2 / math.sqrt(dim))

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_filters_of_few_weights_can_be_drawn(self, dim):
        (axes,) = plot_projection_histograms(statistics({"a": layer(-1, 1, 1, dim=dim)})).axes
        assert len(axes.get_lines()) == (dim > 1)
        assert axes.get_ylim()[1] < 2

    def test_at_most_eight_layers_and_six_epochs_are_drawn_including_first_and_last(self):
        training = {"epochs": [epoch(number, numbered(20)) for number in range(11)]}
        grid = self.grid(plot_projection_histograms(training))
        assert len(grid) == 48
        assert (grid[0], grid[-1]) == (("conv0", "epoch 0"), ("conv19", "epoch 10"))
        assert [column for row, column in grid if row == "conv0"] == [f"epoch {n}" for n in (0, 2, 4, 6, 8, 10)]

    def test_outlying_projections_are_counted_but_do_not_set_the_scale(self):
        far = layer(*random_layer(999, 10_000)["projections"], 0.9, dim=10_000)
        figure = plot_projection_histograms(statistics({"a": far}))
        right = self.stairs(figure.axes[0])["projection > 0"]
        assert right.edges[-1] < 5
        assert "outliers in the outermost bars" in figure.legends[0].get_title().get_text()
        assert (right.values * np.diff(right.edges)).sum() == pytest.approx(1 - far["mass"])

    def test_a_layer_of_dead_filters_is_labeled_as_dead(self):
        figure = plot_projection_histograms(statistics({"a": layer(num_dead=4), "b": layer(-0.1, 0.1)}))
        assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [["all dead"], []]
        assert legend_of(figure) == ["projection ≤ 0", "projection > 0", "random filters"]


class TestAlongTraining:
    def training(self, count: int = 2, **more: Any) -> dict[str, Any]:
        layers = [{f"conv{n}": layer(*[-1] * (n + e), *[1] * 5) for n in range(count)} for e in range(3)]
        return {"epochs": [epoch(number, each, **more) for number, each in enumerate(layers)]}

    def lines(self, axes) -> dict[str, list[tuple[float, float]]]:
        return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}

    def test_a_line_shows_the_masses_of_a_layer_and_the_thick_one_the_network(self):
        (axes,) = plot_projections_along_training(self.training()).axes
        lines, widths = self.lines(axes), {line.get_label(): line.get_linewidth() for line in axes.get_lines()}
        assert lines["conv0"] == [(0, 0.0), (1, pytest.approx(1 / 6)), (2, pytest.approx(2 / 7))]
        assert lines["network"][0] == (0, pytest.approx(1 / 11))
        assert widths["network"] == max(widths.values()) > 1.5 * widths["conv0"]
        assert [0.5, 0.5] in [list(line.get_ydata()) for line in axes.get_lines()]

    def test_accuracies_are_above_in_percent(self):
        above, _ = plot_projections_along_training(self.training(train_accuracy=0.5, eval_accuracy=0.25)).axes
        assert self.lines(above) == {"training": [(0, 50), (1, 50), (2, 50)], "evaluation": [(0, 25), (1, 25), (2, 25)]}
        assert [text.get_text() for text in above.get_legend().get_texts()] == ["training", "evaluation"]
        above, _ = plot_projections_along_training(self.training(eval_accuracy=0.25)).axes
        assert list(self.lines(above)) == ["evaluation"]

    @pytest.mark.parametrize("drawn", [["conv0", "conv1"], ["conv0"]])
    def test_relative_distances_are_below_in_the_colors_of_their_layers(self, drawn):
        of_layers = {f"conv{n}": {"l2": 1.5, "l_inf": 2.0, "relative": f"conv{n}" in drawn} for n in range(2)}
        masses, below = plot_projections_along_training(self.training(distances={"layers": of_layers})).axes
        assert self.lines(below) == {name: [(0, 1.5), (1, 1.5), (2, 1.5)] for name in drawn}
        colors = [{line.get_label(): line.get_color() for line in axes.get_lines()} for axes in (masses, below)]
        assert all(colors[0][name] == colors[1][name] for name in drawn)
        labels = [masses.get_ylabel(), below.get_ylabel()]
        assert labels == ["share of projections ≤ 0", "distance from\ninitialization, relative"]

    def test_missing_values_leave_a_gap(self):
        training = self.training(1)
        training["epochs"].insert(1, {"epoch": 0.5, "eval_accuracy": 0.5})
        training["epochs"][2]["projections"]["layers"]["conv0"]["mass"] = None
        above, axes = plot_projections_along_training(training).axes
        assert self.lines(above)["evaluation"] == [(0.5, 50)]
        assert [place for place, _ in self.lines(axes)["conv0"]] == [0, 2]

    def test_epochs_are_sorted_and_one_suffices(self):
        training = self.training()
        training["epochs"].reverse()
        (axes,) = plot_projections_along_training(training).axes
        assert [place for place, _ in self.lines(axes)["conv0"]] == [0, 1, 2]
        (axes,) = plot_projections_along_training({"epochs": [epoch(3, numbered(1))]}).axes
        assert len(self.lines(axes)["conv0"]) == 1


class TestLayerNames:
    def test_a_common_start_is_removed_up_to_the_last_module(self):
        for names, short in (
            (["features.0", "features.3"], ["features.0", "features.3"]),
            (["model.vision_tower.features.0", "model.vision_tower.features.13"], ["features.0", "features.13"]),
            (
                [f"vision.backbone.network.layer{n}.0.conv" for n in range(2)],
                ["network.layer0.0.conv", "network.layer1.0.conv"],
            ),
        ):
            assert shorten_layer_names(names) == short

    def test_names_that_cannot_be_shortened_are_numbered(self):
        names = ["y." * place + "x" + ".y" * (20 - place) for place in (0, 7, 14, 20)]
        short = shorten_layer_names(names, 10)
        assert [name[:2] for name in short] == ["1…", "2…", "3…", "4…"]

    @given(
        names=st.lists(st.from_regex(r"[a-z_]{1,12}(\.([a-z]{1,12}|[0-9]{1,2})){0,6}", fullmatch=True), unique=True),
        longest=st.integers(8, 30),
    )
    def test_shortened_names_fit_and_are_unique(self, names, longest):
        short = shorten_layer_names(names, longest)
        assert len(set(short)) == len(names)
        assert all(0 < len(name) <= longest for name in short)

    @given(count=st.integers(1, 200), most=st.integers(2, 20))
    def test_chosen_items_are_evenly_spaced_and_include_both_ends(self, count, most):
        chosen = choose_evenly(range(count), most)
        assert len(chosen) == min(count, most)
        assert (chosen[0], chosen[-1]) == (0, count - 1)
        gaps = np.diff(chosen)
        assert gaps.size == 0 or (gaps.min() > 0 and gaps.max() - gaps.min() <= 1)
