"""Pictures of sensitivity: the accuracy by the own parameter of a method, beside the range of the baseline."""

import re
import statistics

from matplotlib.ticker import NullLocator

from hf_sphere.visualization.figures import LINE_COLORS

from .style import MUTED, Panels, grid, label, label_ends, panel, picture
from .training import OPTIMIZERS, read_runs


def accuracies(pattern: str, metric: str = "eval_accuracy") -> dict[str, list[float]]:
    """Return the accuracies in percent of the groups of runs that match."""
    return {
        name: [100 * run["metrics"][metric] for run in runs] for name, runs in read_runs(f"{pattern}-seed*").items()
    }


def best_by(pattern: str, option: str) -> dict[float, float]:
    """Return the highest validation accuracy by the value of an option, over the other options of a grid."""
    best: dict[float, float] = {}
    for group, (accuracy,) in accuracies(pattern, "validation_accuracy").items():
        found = re.search(rf"{option}([\d.e-]*\d)", group)
        assert found is not None
        best[float(found[1])] = max(accuracy, best.get(float(found[1]), 0))
    return dict(sorted(best.items()))


@picture
def spherization_accuracy() -> Panels:
    """Accuracy of four settings of the spherization, minus that of the plain network, on three networks."""
    networks = {
        "MNIST, fully connected": ("mnist-simplefnn-spherized", "mnist-simplefnn-plain"),
        "MNIST, LeNet-5": ("mnist-lenet5-spherized", "mnist-lenet5-plain"),
        "CIFAR-10, fast network": ("cifar10-fast-spherized", "cifar10-fast-softmax"),
    }
    settings = [(scaling, delta) for scaling in ("1.0", "5.0") for delta in ("0.5", "1e-06")]
    figure, cells = grid("Accuracy minus plain, points", list(networks), "slope, and floor below it", 1.5)
    for axes, (ours, plain) in zip(cells, networks.values(), strict=True):
        (band,) = accuracies(f"{plain}-settings").values()
        center = statistics.mean(band)
        axes.axhspan(min(band) - center, max(band) - center, color="0.85", lw=0)
        for place, (scaling, delta) in enumerate(settings):
            (values,) = accuracies(f"{ours}-settings-scaling{scaling}-delta{delta}").values()
            axes.vlines(place, min(values) - center, max(values) - center, color=LINE_COLORS[0], lw=1.2)
            axes.plot(place, statistics.mean(values) - center, "o", color=LINE_COLORS[0])
        axes.set_xticks(range(4), [f"{scaling[0]}\n{delta.replace('-06', '-6')}" for scaling, delta in settings])
    yield "spherization-accuracy", figure


@picture
def adam_rates() -> Panels:
    """Validation accuracy of ResNet-20 in five epochs by learning rate, at the best L2 penalty of each rate."""
    for file, names in (("adam-rates", ("adam", "adam_s", "adam_srt")), ("sgd-rates", ("sgd", "sgd_mrt"))):
        figure, axes = panel("Validation accuracy at the best L2, %", xscale="log", xlabel="learning rate")
        for name, color, marker in zip(names, LINE_COLORS, "osD", strict=False):
            curve = best_by(f"cifar10-resnet20-{name}-l2-tuning-learning_rate*", "learning_rate")
            axes.plot(list(curve), list(curve.values()), f"{marker}-", color=color, label=OPTIMIZERS[name])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        label_ends(figure, axes)
        yield file, figure


@picture
def head_settings() -> Panels:
    """Validation accuracy of two heads by their own parameter, beside softmax at its selected settings."""
    softmax = best_by("cifar10-fast-softmax-settings-tuning-*label_smoothing_factor0.0*", "learning_rate")
    heads = {
        "vmf": ("kappa_confidence", "Head vmf: validation accuracy, %", "kappa_confidence"),
        "arcface": ("margin", "Head arcface: validation accuracy, %", "margin, radians"),
    }
    for name, (option, title, below) in heads.items():
        figure, axes = panel(title, xlabel=below)
        axes.axhspan(min(softmax.values()), max(softmax.values()), color="0.85", lw=0)
        curve = best_by(f"cifar10-fast-{name}-settings-tuning-*", option)
        axes.plot(list(curve), list(curve.values()), "o-", color=LINE_COLORS[0])
        label(
            axes, "softmax, three learning rates", (max(curve), max(softmax.values())), MUTED, ha="right", xytext=(0, 8)
        )
        axes.margins(y=0.15)
        yield f"{name}-settings", figure
