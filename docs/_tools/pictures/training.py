"""Pictures of training runs and benchmarks: learning rates, accuracies, steps on the sphere, speed."""

import statistics
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator
from sklearn.datasets import load_digits

from hf_sphere.search import EmbeddingSpace
from hf_sphere.visualization.figures import LINE_COLORS, new_figure

from .style import FIXED, INK, MUTED, ROOT, WIDTH, Panels, grid, label, label_ends, panel, picture, read

OPTIMIZERS = {
    "softmax": "SGD", "sgd": "SGD", "sgd_mrt": "SGD-MRT", "adam": "Adam", "adam_s": "Adam-S", "adam_srt": "Adam-SRT",
    "adam_g": "Adam-G", "adamw": "AdamW", "adamw_torch": "AdamW", "muon": "Muon", "muon_hyperball": "Muon-hyperball",
    "adamw_hyperball": "AdamW-hyperball",
}  # fmt: skip
WIDTHS = {8: LINE_COLORS[0], 16: LINE_COLORS[1], 32: LINE_COLORS[2]}


def read_runs(pattern: str) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of `results/runs` whose name matches, by their name without the seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((ROOT / "results" / "runs").glob(f"{pattern}.json")):
        run = read(f"results/runs/{path.name}")
        groups.setdefault(run["group"], []).append(run)
    return groups


def draw_optimizers(network: str, metric: str, names: list[str]) -> Panels:
    """A network on CIFAR-10: validation accuracy by learning rate, and accuracy by epoch with its range."""
    rates, epochs, titles = {}, {}, [OPTIMIZERS[name] for name in names]
    for name in names:
        sweep = read_runs(f"{network}-{name}-5epochs-tuning-learning_rate*")
        rates[name] = sorted(
            (float(group.rpartition("rate")[2]), 100 * run["metrics"]["validation_accuracy"])
            for group, (run,) in sweep.items()
        )
        runs = read_runs(f"{network}-{name}-5epochs-seed*")[f"{network}-{name}-5epochs"]
        epochs[name] = 100 * np.array([run["history"][metric] for run in runs])
    figure, cells = grid("Validation accuracy, %", titles, "learning rate")
    for axes, name in zip(cells, names, strict=True):
        for other in names:
            axes.plot(*zip(*rates[other], strict=True), color="0.8", linewidth=0.8)
        axes.plot(*zip(*rates[name], strict=True), "o-", color=LINE_COLORS[0])
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    yield f"{network}-rates", figure
    split = "Test" if metric.startswith("eval") else "Validation"
    figure, cells = grid(f"{split} accuracy, %", titles, "epoch")
    for axes, name in zip(cells, names, strict=True):
        places = range(1, epochs[name].shape[1] + 1)
        for other in names:
            axes.plot(places, epochs[other].mean(0), color="0.8", linewidth=0.8)
        axes.fill_between(places, epochs[name].min(0), epochs[name].max(0), color=LINE_COLORS[0], alpha=0.25, lw=0)
        axes.plot(places, epochs[name].mean(0), "o-", color=LINE_COLORS[0])
        axes.set_xticks(places)
    yield f"{network}-epochs", figure


@picture
def cifar10_fast() -> Panels:
    """The fast network on CIFAR-10 with five optimizers, and its accuracy by minutes."""
    yield from draw_optimizers(
        "cifar10-fast", "eval_accuracy", ["softmax", "adamw", "adam_srt", "muon", "muon_hyperball"]
    )
    curve = read("benchmarks/results/fast_cifar10.json")["curve"]
    minutes, accuracies = zip(*((each["minutes"], 100 * each["eval_accuracy"]) for each in curve), strict=True)
    figure, axes = panel("Test accuracy, %", xlabel="minutes", ylim=(55, 95))
    axes.plot(minutes, accuracies, "o-", color=LINE_COLORS[0])
    label(axes, f"{accuracies[-1]:.2f}", (minutes[-1], accuracies[-1]), LINE_COLORS[0], xytext=(0, 9), ha="right")
    yield "cifar10-fast-minutes", figure


@picture
def cifar10_resnet20() -> Panels:
    """ResNet-20 on CIFAR-10 with ten optimizers."""
    paper = ["sgd", "sgd_mrt", "adam", "adam_g", "adam_s", "adam_srt", "adamw"]
    yield from draw_optimizers(
        "cifar10-resnet20", "validation_accuracy", [*paper, "muon", "adamw_hyperball", "muon_hyperball"]
    )


def draw_transfer(axes: Axes, curves: dict[int, dict[float, float]]) -> None:
    """Draw the loss by the learning rate relative to the best of the smallest width, and mark the best of each."""
    start = min(curves[min(curves)], key=curves[min(curves)].__getitem__)
    for (width, curve), color in zip(curves.items(), LINE_COLORS, strict=False):
        rates = sorted(curve)
        losses = [curve[rate] for rate in rates]
        axes.plot([rate / start for rate in rates], losses, color=color, label=str(width))
        best = min(rates, key=curve.__getitem__)
        axes.plot(best / start, curve[best], "o", color=color, label="_")
    axes.axvline(1, color=MUTED, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([1 / 8, 1 / 4, 1 / 2, 1, 2, 4]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1 else "⅛¼½"[round(3 + np.log2(value))])
    axes.xaxis.set_minor_locator(NullLocator())


def name_widths(axes: Axes) -> None:
    """Write the width beside the start of each line."""
    for line in axes.lines:
        if not line.get_label().startswith("_"):
            at = line.get_xdata()[0], line.get_ydata()[0]
            label(axes, line.get_label(), at, line.get_color(), xytext=(-4, 0), ha="right")


@picture
def lr_transfer() -> Panels:
    """Loss by learning rate for three widths of two small networks."""
    curves = read("benchmarks/results/lr_transfer.json")["curves"]
    names = ["adamw", "adam_srt", "adamw_hyperball", "muon", "muon_hyperball"]
    for model, title in {"resnet8": "ResNet-8", "characters": "Character model"}.items():
        below = "learning rate, by the best one of width 8"
        figure, cells = grid(f"{title}: held-out loss by width", [OPTIMIZERS[name] for name in names], below, 1.3)
        for axes, name in zip(cells, names, strict=True):
            found = {width: curves[f"{model}, {name}, width {width}"] for width in WIDTHS}
            draw_transfer(axes, {w: {float(k): statistics.mean(v) for k, v in c.items()} for w, c in found.items()})
        for axes in cells:
            axes.set_xlim(0.07, 3)
            axes.margins(y=0.12)
            name_widths(axes)
        yield f"lr_transfer-{model}", figure


@picture
def lm_widths() -> Panels:
    """Test loss of a language model by learning rate for three widths."""
    curves = read("benchmarks/results/lm_widths.json")["curves"]
    for name, limits in (("adamw_torch", (4.2, 5.25)), ("muon_hyperball", (3.97, 4.05))):
        figure, axes = panel(f"{OPTIMIZERS[name]}: test loss by width", ylim=limits)
        found = {width: curves[f"{name}, width {width}"] for width in (64, 128, 256)}
        draw_transfer(
            axes,
            {w: {float(k): statistics.mean(t for _, t in v) for k, v in c.items()} for w, c in found.items()},
        )
        axes.set(xlabel="learning rate, by the best one of width 64", xlim=(0.06, 3))
        name_widths(axes)
        yield f"lm_widths-{name.removesuffix('_torch')}", figure


@picture
def effective_steps() -> Panels:
    """Effective learning rates, step angles and anisotropy of three layers during training."""
    steps = read("results/pictures/effective_steps.json")
    families = [["sgd", "sgd_mrt"], ["adam", "adam_s", "adam_srt", "adam_g"]]
    layers = [(layer, family) for layer in ("first", "middle", "last") for family in families]
    for quantity, title, unit in (
        ("effective_learning_rate", "Effective learning rate", 1.0),
        ("step_angle", "Step angle, degrees", 180 / np.pi),
    ):
        figure, cells = grid(title, [f"{layer} layer" for layer, _ in layers], "step", 1.55)
        for axes, (layer, family) in zip(cells, layers, strict=True):
            for number, name in enumerate(family):
                values = unit * np.array(steps[name][layer][quantity])
                style = {"color": LINE_COLORS[number], "linewidth": 2.4 - 0.5 * number, "label": OPTIMIZERS[name]}
                axes.plot(range(0, 10 * len(values), 10), values, linestyle=("-", "--", ":", "-.")[number], **style)
            axes.set(yscale="log", ylim=(2e-4, 20))
            axes.yaxis.set_major_locator(FixedLocator([0.01, 0.1, 1, 10]))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        for axes in cells[:2]:
            style = {"loc": "lower left", "handlelength": 1.6, "borderpad": 0, "labelspacing": 0.2}
            axes.legend(frameon=False, labelcolor="linecolor", **style)
        yield f"effective_steps-{quantity}", figure
    figure, axes = panel("Anisotropy of Adam's second moment", xlabel="step")
    for layer, color in zip(("first", "middle", "last"), LINE_COLORS, strict=False):
        values = steps["adam"][layer]["anisotropy"]
        axes.plot(range(0, 10 * len(values), 10), values, color=color, label=layer)
    axes.set_ylim(bottom=0)
    label_ends(figure, axes)
    yield "effective_steps-anisotropy", figure


@picture
def decay_and_equivalence() -> Panels:
    """Accuracy by regularization, and how far SGD and its equivalent on the sphere are apart."""
    result = read("benchmarks/results/effective_steps.json")
    figure, axes = panel("Held-out accuracy by L2 regularization, %", xlabel="L2 regularization", ylim=(55, 60))
    for number, (name, accuracies) in enumerate(result["decays"].items()):
        color, places = LINE_COLORS[number], np.arange(5) + 0.12 * (2 * number - 1)
        axes.vlines(places, list(map(min, accuracies)), list(map(max, accuracies)), color=color, linewidth=1)
        axes.plot(places, list(map(statistics.mean, accuracies)), "os"[number] + "-", color=color)
        at = places[3], (59.3, 55.6)[number]
        label(axes, OPTIMIZERS[name], at, color, xytext=(0, 0), ha="center")
    axes.set_xticks(range(5), ["0", "0.0001", "0.001", "0.01", "0.1"])
    yield "decay", figure
    figure, axes = panel("Angle, degrees", xlabel="step", yscale="log", ylim=(1e-13, 1e3))
    for (rate, values), color in zip(result["equivalence"].items(), LINE_COLORS, strict=False):
        for key, name, style in (("way", "from the start", "-"), ("difference", "between the two", "--")):
            steps = np.arange(0, 10 * len(values[key]), 10)
            axes.plot(steps[1:], values[key][1:], style, color=color, label=f"{name},\nlearning rate {rate}")
    label_ends(figure, axes)
    yield "equivalence", figure


@picture
def dimensions() -> Panels:
    """Accuracy on MNIST by the number of dimensions: mean and range of the runs of `results/runs`."""
    runs = read_runs("mnist-lenet5-*").items()
    accuracies = {name: [100 * run["metrics"]["eval_accuracy"] for run in group] for name, group in runs}
    heads = {"ten prototypes": "mnist-lenet5-d{}"}
    heads |= {f"{head} head": f"mnist-lenet5-d3-heads-head{head}-embedding_dim{{}}" for head in ("softmax", "cosine")}
    for smallest, low in ((2, 90), (4, 98.4)):
        figure, axes = panel(f"Test accuracy from {smallest} dimensions on, %", xlabel="dimensions")
        for number, ((title, pattern), color) in enumerate(zip(heads.items(), LINE_COLORS, strict=False)):
            found = {dim: accuracies.get(pattern.format(dim)) for dim in range(smallest, 10)}
            found = {dim + 0.12 * (number - 1): values for dim, values in found.items() if values}
            means = [statistics.mean(values) for values in found.values()]
            axes.vlines(list(found), list(map(min, found.values())), list(map(max, found.values())), color=color, lw=1)
            axes.plot(list(found), means, "osD"[number] + "-", color=color, label=title)
        plain = statistics.mean(accuracies["mnist-lenet5-plain"])
        axes.axhline(plain, color=INK, linewidth=1, linestyle=":", label="softmax head,\n84 dimensions")
        axes.set_ylim(bottom=low)
        label_ends(figure, axes)
        yield f"dimensions-{smallest}", figure


@picture
def recall_and_speed() -> Panels:
    """Recall and speed of approximate search."""
    result = read("benchmarks/results/search_approximate.json")
    names = {"ivf": "inverted file (IVF)", "hnsw": "graph (HNSW)"}
    figure, axes = panel("Speed relative to exact search", xlabel="recall@10 of held-out images", ylim=(0.3, 60))
    for (kind, curve), color, at in zip(result["curves"].items(), LINE_COLORS, ((0.55, 38), (0.94, 40)), strict=False):
        axes.plot([each["recall_at_10"] for each in curve], [each["speed"] for each in curve], "o-", color=color)
        (chosen,) = (each for each in curve if each["chosen"])
        axes.plot(chosen["recall_at_10"], chosen["speed"], "o", markersize=9, fillstyle="none", color=INK)
        label(axes, names[kind], at, color, xytext=(0, 0), ha="center")
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--")
    label(axes, "exact search", (0.36, 1), MUTED, xytext=(0, 7))
    axes.set(yscale="log", xticks=[0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter("{x:g}")
    yield "recall_and_speed", figure


@picture
def found() -> Panels:
    """What two rules name of sentences of known articles, and accept of others, at levels of 2 to 30 %."""
    curves = read("benchmarks/results/matching.json")["identification"]
    names = {"margin, bounded": "EmbeddingSpace", "cosine, quantile over rows": "quantile of cosines"}
    figure, axes = panel(
        "Named, by accepted strangers", xlabel="accepted strangers, %", ylabel="named, %", xlim=(0, 34)
    )
    for (rule, name), color in zip(names.items(), LINE_COLORS, strict=False):
        curve = curves[f"WikiText-2, {rule}"]
        false, hits = ([100 * point[key] for point in curve] for key in ("false_accepts", "hits"))
        axes.plot(false, hits, "o-", color=color)
        label(
            axes, name, (false[-3], hits[-3]), color, xytext=(0, 14 if name == "EmbeddingSpace" else -14), ha="center"
        )
    axes.set_ylim(0, 80)
    yield "found", figure


@picture
def matches() -> Panels:
    """Queries of the program of the front page, with their nearest pictures and the decisions."""
    pictures = load_digits().data
    space = EmbeddingSpace.fit(pictures[::2])
    queries = [pictures[2 * row] // 4 for row in (12, 38, 61)] + [pictures[2 * row + 1] for row in (7, 150)]
    found = space.search(np.stack(queries), k=1, false_accept=0.05)
    figure = new_figure(WIDTH, 2.05)
    cells = figure.subplots(2, len(queries))
    for number, query in enumerate(queries):
        is_match = bool(found.accepted[number, 0])
        nearest = pictures[2 * int(found.rows[number, 0])]
        for axes, pixels in zip(cells[:, number], (query, nearest), strict=True):
            axes.imshow(pixels.reshape(8, 8), cmap="gray_r", gid=f"{FIXED}-{number}")
            axes.set(xticks=[], yticks=[])
        cells[0, number].set_title("copy" if number < 3 else "other", loc="center")
        cells[1, number].set_xlabel("match" if is_match else "no match", weight="bold")
        for row, width in ((0, 0.5), (1, 3 if is_match else 0.5)):
            color = LINE_COLORS[2] if row and is_match else MUTED
            cells[row, number].spines[:].set(visible=True, color=color, linewidth=width)
    cells[0, 0].set_ylabel("query")
    cells[1, 0].set_ylabel("nearest")
    yield "matches", figure
