"""Tables of pages that are made from the files of `benchmarks/results`, one function per table."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from reproduction import rejection_tables
from reproduction.comparisons import compare
from reproduction.summaries import Benchmarks
from reproduction.tables import fold, join_lines

LARGEST_TABLE = 25
"""Rows of a table that a page shows; longer tables are folded."""

Rows = Mapping[str, Mapping[str, Any]]
"""The rows of a file by what they measure."""

Entry = tuple[str, str, str, float]
"""Text on the page, name of the row in the file, format of its value and bound, and their factor."""


def render_benchmarks(benchmarks: Benchmarks) -> dict[str, str]:
    """Return the tables in Markdown by name; without its file, or a number of it, a table says "not measured"."""
    tables = {}
    for table, (name, make) in TABLES.items():
        path = benchmarks.folder / f"{name}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = {row["what"]: row for row in content["rows"]}
            if not rows or len(rows) < len(content["rows"]):
                raise ValueError("there are no rows, or two have the same name")
            text = make(rows, content)
            count = text.count("\n| ") - 1
            tables[table] = fold(f"Table of {count} rows", text) if count >= LARGEST_TABLE else text
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            benchmarks.problems.append(f"{path.name} is not used for the table {table!r}: {error!r}")
            tables[table] = f"*Not measured: `{path.name}` is missing or damaged, or lacks a number of this table.*"
    return tables


def _list(entries: Iterable[Entry], with_bound: bool, rows: Rows, content: Mapping[str, Any]) -> str:
    """Return a table with a line per measurement, and its bound on request."""
    lines = []
    for text, what, form, factor in entries:
        row, bound = rows[what], ""
        if "bound" in row:
            words, _, number = row["bound"].rpartition(" ")
            bound = f"{words} {form.format(factor * float(number))}{'' if row['holds'] else ', missed'}"
        lines.append([text, form.format(factor * row["value"]), *([bound] if with_bound else [])])
    return join_lines(["what", "measured", *(["bound"] if with_bound else [])], lines, [])


SCALING = [
    ("cosine, K = 1,000,000, d = 512, B = 1,024: memory beyond weights and gradient (logits: 4,096 MB)",
     "cosine, 1,000,000 classes: memory / that of the logits", "{:.0f} MB", 4096),
    ("arcface, the same", "arcface, 1,000,000 classes: memory / that of the logits", "{:.0f} MB", 4096),
    *((f"vmf, 10 samples, d = 512, B = 64, K = {count}: memory beyond weights and gradient",
       f"vmf, {count} classes, batch 64: memory, GB", "{:.0f} MB", 1000)
      for count in ("50,000", "100,000", "200,000")),
    *((f"{head}, K = 20,000: largest relative deviation of a gradient from that with logits",
       f"{head}, 20,000 classes: largest relative deviation of a gradient", "{:.2g}", 1)
      for head in ("cosine", "arcface")),
    *((f"{head}, K = 100,000, B = 1,024: time in blocks / with logits",
       f"{head}, 100,000 classes: time in blocks / time with logits", "{:.2f}", 1)
      for head in ("softmax", "cosine", "arcface")),
    ("softmax, the same: time of torch's chunked cross-entropy / with logits",
     "softmax, 100,000 classes: time of torch's chunked cross-entropy / time with logits", "{:.2f}", 1),
    *((f"{text}: {deviation}", f"{what}: {deviation}", "{:.2g}", 1)
      for text, what in (("arcface, K = 200,000, SGD, 4 processes and 1", "4 processes and 1"),
                         ("their checkpoint resumed by 3 processes", "4 resumed by 3 and 4"),
                         ("their checkpoint resumed by 1 process", "4 resumed by 1 and 4"))
      for deviation in ("largest relative deviation of a loss", "largest deviation of a weight")),
]  # fmt: skip

KMEANS = "k-means, 200,000 x 128, 256 clusters, 20 iterations"
CLUSTERING = [
    ("k-means, 200,000 points in 128 dimensions, 256 clusters: objective relative to FAISS",
     f"{KMEANS}: objective / FAISS", "{:.8f}", 1),
    ("the same: processor time relative to FAISS", f"{KMEANS}: processor time / FAISS", "{:.2f}", 1),
    ("the same: memory with the data, relative to the data", f"{KMEANS}: memory with the data / data", "{:.2f}", 1),
    *((f"mixture, 768 dimensions, 20 clusters, concentration {kappa:,}: largest relative error of a concentration",
       f"mixture, d = 768, 20 components of {points} points, kappa {kappa}: largest relative error of a concentration",
       "{:.2g} %", 100) for points, kappa in ((1000, 5000), (1000, 500), (3000, 100), (5000, 50))),
    *((text, f"10,000 embeddings, {name}: NMI", "{:.3f}", 1) for text, name in (
        ("10,000 embeddings of MNIST test images, normalized mutual information: scikit-learn's `KMeans`",
         "KMeans of scikit-learn"),
        ("the same on normalized embeddings", "KMeans, normalized"),
        ("`SphericalKMeans`", "SphericalKMeans"), ("`VonMisesFisherMixture`", "VonMisesFisherMixture"))),
]  # fmt: skip


def _ood(sets: Mapping[str, str], rows: Rows, content: Mapping[str, Any]) -> str:
    """AUROC with its deviation over seeds, and FPR95, by head, score and set of images (title by name)."""
    heads: dict[str, list[Any]] = {}
    for model in content["models"].values():
        heads.setdefault(model["head"], []).append(model["results"])
    lines = []
    for head, models in heads.items():
        for score in models[0]:
            line = [head, score]
            for name in sets:
                areas = [100 * model[score][name]["auroc"] for model in models]
                rate = statistics.mean(100 * model[score][name]["fpr_at_95_tpr"] for model in models)
                line.append(f"{_mean(areas)} / {rate:.1f}")
            lines.append(line)
    return join_lines(["head", "score", *sets.values()], lines, [])


def _runtimes(rows: Rows, content: Mapping[str, Any]) -> str:
    exact, lower = ["export", "ONNX", "compiled", "step"], ["fp16", "bf16", "int8", "int8 dynamic", "int8, all"]
    lines = []
    for model in dict.fromkeys(what.rpartition(": ")[0] for what in rows):
        # The second setting of the spherization is measured in lower precision only.
        values = [] if model.endswith(", gentle") else [rows[f"{model}: {column}"]["value"] for column in exact]
        cells = [f"{value:.1g}" for value in values] or [""] * len(exact)
        lines.append([model, *cells, *(f"{rows[f'{model}: {column}']['value']:.4f}" for column in lower)])
    versions = ", ".join(f"{name} {content[name]}" for name in ("torch", "onnxruntime", "torchao"))
    note = f"Measured with {versions}, by `python benchmarks/runtimes.py`."
    return join_lines(["model", *exact, *lower], lines, [note])


def _lr_transfer(rows: Rows, content: Mapping[str, Any]) -> str:
    optimizers = ["adamw", "adam_srt", "muon", "muon_hyperball", "adamw_hyperball"]
    lines = []
    for text, net in (("ResNet-8", "resnet8"), ("character model", "characters")):
        shifts = [rows[f"{net}, {name}: best at 4 x width / best"]["value"] for name in optimizers]
        losses = [rows[f"{net}, {name}, width 32: loss"]["value"] for name in optimizers]
        lines.append([f"{text}: shift", *(f"{value:.2g}" for value in shifts)])
        lines.append([f"{text}: loss", *(f"{value:.3f}" for value in losses)])
    return join_lines(["", *(f"`{name}`" for name in optimizers)], lines, [])


def _lm_widths(rows: Rows, content: Mapping[str, Any]) -> str:
    def value(what: str) -> float:
        return rows[what]["value"]

    def change(what: str) -> str:
        low, high = rows[what]["interval"]
        return f"{value(what):+.3f} ({low:+.3f} to {high:+.3f})"

    names, lines = ["adamw_torch", "muon_hyperball"], []
    for width in (64, 128, 256):
        cells = [str(width)]
        for name in names:
            what = f"{name}, width {width}"
            loss, deviation = value(f"{what}: test loss"), value(f"{what}: standard deviation over seeds")
            cells += [f"{value(f'{what}: best learning rate'):.2g}", f"{loss:.3f} ± {deviation:.3f}"]
        lines.append([*cells, change(f"muon_hyperball, width {width}: test loss - that of adamw_torch")])
    shifts, costs = ["256 / 64"], ["256, at the rate of 64"]
    for name in names:
        shifts += [f"{value(f'{name}: best at the largest width / best at the smallest'):.2g}", ""]
        costs += ["", change(f"{name}: test loss at the best rate of the smallest width - best")]
    header = ["width", "AdamW: best rate", "test loss", "Muon-hyperball: best rate", "test loss", "difference"]
    note = f"{content['seeds']} seeds, torch {content['torch']}, transformers {content['transformers']}."
    return join_lines(header, [*lines, [*shifts, ""], [*costs, ""]], [note])


def _lm_depth(rows: Rows, content: Mapping[str, Any]) -> str:
    names = {"muon_hyperball": "Muon-hyperball", "muon": "Muon", "adamw_hyperball": "AdamW-hyperball",
             "muon_hyperball without base_layers": "Muon-hyperball, by width only",
             "muon_hyperball without base": "Muon-hyperball, unscaled", "adamw_torch": "AdamW, unscaled"}  # fmt: skip
    lines = []
    for name, title in names.items():
        if (cost := rows.get(f"{name}: test loss at the best rate of the small model - best")) is None:
            continue
        rates = [
            rows[f"{name}, width {size}: best learning rate"]["value"] for size in ("64, 2 layers", "256, 8 layers")
        ]
        losses = [
            rows[what]["value"]
            for what in (
                f"{name}: test loss at the best rate of the small model",
                f"{name}, width 256, 8 layers: test loss",
            )
        ]
        low, high = cost.get("interval", (None, None))
        interval = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
        cells = [f"{rates[0]:.2g}", f"{losses[0]:.3f}", f"{rates[1]:.2g}", f"{losses[1]:.3f}"]
        lines.append([title, *cells, f"{cost['value']:+.3f}{interval}"])
    header = ["", "best rate at 64 x 2", "loss with it at 256 x 8", "best rate there", "its loss", "difference"]
    note = f"torch {content['torch']}, transformers {content['transformers']}."
    return join_lines(header, lines, [note])


def _scale_invariance(rows: Rows, content: Mapping[str, Any]) -> str:
    kinds, lines = ["rows", "per head", "whole", "none"], []
    for model, groups in content["groups"].items():
        names: dict[str, dict[str, None]] = {kind: {} for kind in kinds}
        for weight, kind in groups.items():
            parts = [part for part in weight.removesuffix(".weight").split(".") if part != "*"]
            names[kind][f"`{parts[-1]}`"] = None
        counts = [
            rows[f"{model}: {what}"]["value"] for what in ("scale-invariant weights", "weights with two or more axes")
        ]
        lines.append([model, "{:.0f} of {:.0f}".format(*counts), *(", ".join(names[kind]) for kind in kinds)])
    note = (
        f"transformers {content['transformers']}, timm {content['timm']}, by `python benchmarks/scale_invariance.py`."
    )
    return join_lines(["model", "scale-invariant", *kinds[:3], "not"], lines, [note])


SETTINGS = {
    "plain": "plain", "scaling 5, delta 1e-06": "5, 1e-6 (`steep`)", "scaling 1, delta 1e-06": "1, 1e-6 (default)",
    "scaling 1, delta 0.1": "1, 0.1 (`even`)", "scaling 1, delta 0.5": "1, 0.5 (`flat`)",
    "scaling 0.5, delta 0.5": "0.5, 0.5",
}  # fmt: skip


def _minilm_embeddings(rows: Rows, content: Mapping[str, Any]) -> str:
    kinds = ["float16", "bfloat16", "int8 weights", "int8 weights, others", "int8 weights and activations"]
    lines = []
    for name, text in SETTINGS.items():
        found, weight = content["embedding"][name], content["embedding"][name]["largest_weight"]
        line = [text, "", ""]  # the plain encoder has no map after a spherization
        if name != "plain":
            line[1:] = [f"{100 * found['explained_variance']:.1f} %", f"{found['cosine_to_plain']['mean']:.3f}"]
        line.append(f"{weight:,.0f}" if weight >= 1 else f"{weight:.2f}")
        for kind in (*kinds, "int8 weights and activations, others"):
            is_blank = name == "plain" and kind.endswith(", others")
            cosine = 0.0 if is_blank else found["cosines"][kind]["mean"]
            line.append("" if is_blank else f"{cosine:.4f}" if cosine >= 0.99 else f"{cosine:.3f}")
        lines.append(line)
    header = ["scaling, delta", "explained variance", "cosine to plain", "largest weight", "float16", "bfloat16"]
    return join_lines(
        [*header, "int8 weights: all", "others", "int8 weights and activations: all", "others"], lines, []
    )


def _minilm_language(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for name, text in SETTINGS.items():
        losses = [content["language"][name][kind] for kind in ("float32", "int8 weights")]
        analogies = content["embedding"][name]["analogies"]["average"]
        lines.append([text, *(f"{value:.1f}" for value in (*losses, analogies))])
    return join_lines(["scaling, delta", "float32", "int8 weights, all maps", "word analogies %"], lines, [])


def _fine_tuning(rows: Rows, content: Mapping[str, Any]) -> str:
    metrics = {"recall_at_1 %": "Recall@1, %", "map_at_r %": "MAP@R, %"}
    lines = [["frozen backbone", *(f"{rows[f'{metric}, frozen']['value']:.1f}" for metric in metrics)]]
    for head in ("cosine", "arcface", "vmf"):
        lines.append([f"`{head}`", *(_mean(content["values"][f"{metric}, {head}"]) for metric in metrics)])
    return join_lines(["", *metrics.values()], lines, [])


def _head_costs(rows: Rows, content: Mapping[str, Any]) -> str:
    heads = dict.fromkeys(what.partition(":")[0] for what in rows)
    first = [rows["softmax: ms per step"]["value"] / 1000, rows["softmax: added memory, MB"]["value"]]
    lines = [["`softmax`", f"1 ({first[0]:.2f} s)", f"1 ({first[1]:.0f} MB)"]]
    for head in (head for head in heads if head != "softmax"):
        costs = [rows[f"{head}: {what} / softmax"]["value"] for what in ("time", "memory")]
        lines.append([f"`{head}`", *(f"{value:.2f}" for value in costs)])
    return join_lines(["head", "time of a step", "memory it adds"], lines, [])


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def _prototypes(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for classes, dim in ((10, 3), (100, 10), (100, 25), (200, 25), (1000, 500)):
        search = f"published program, {'300' if classes == 1000 else '10,000'} epochs"
        values = [
            rows[f"K = {classes}, d = {dim}: {what}"]["value"] for what in ("largest cosine", "lower bound", search)
        ]
        lines.append([f"{classes}, {dim}", *(f"{value:.4f}" for value in values)])
    return join_lines(["classes, dimension", "largest cosine", "lower bound", "search of the paper"], lines, [])


def _kernels(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for what, row in rows.items():
        if f"{what}, prediction" in rows:
            others = [rows[f"{what}, {kind}"]["value"] for kind in ("prediction", "compiled")]
            lines.append([f"`{what}`", *(str(value) for value in (row["value"], *others))])
        elif what.startswith("torch: "):
            lines.append([what, str(row["value"]), "", ""])
    return join_lines(["head", "training", "prediction", "training, compiled"], lines, [])


def _kernels_of_losses(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for loss in dict.fromkeys(what.partition(",")[0] for what in rows if "pytorch-metric-learning" in what):
        cells = []
        for whose in ("ours", "pytorch-metric-learning"):
            waits = rows[f"{loss}, {whose}: times the host waits"]["value"]
            cells.append(f"{rows[f'{loss}, {whose}']['value']}, {waits}")
        lines.append([f"`{loss}`", *cells])
    return join_lines(["loss", "kernels, times the host waits", "the same in pytorch-metric-learning"], lines, [])


def _matching(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for what in dict.fromkeys(name.partition(":")[0] for name in rows if ": accepted without a match" in name):
        cells = []
        for level in (1, 5, 10):
            rate, error = (
                rows.get(f"{what}: {kind} at {level}%") for kind in ("accepted without a match", "standard error")
            )
            cells.append(f"{100 * rate['value']:.1f} (± {100 * error['value']:.1f}) %" if rate and error else "")
        dataset, score, rule = what.split(", ")
        lines.append([dataset, f"{score}, {rule}" if rule == "by p-values" else f"{score}, threshold {rule}", *cells])
    return join_lines(["dataset", "score", *(f"accepted at {level} %" for level in (1, 5, 10))], lines, [])


def _matching_found(rows: Rows, content: Mapping[str, Any]) -> str:
    """What rules name of the queries of known groups at 5 %, and accept of others, by data set."""
    found: dict[str, dict[str, str]] = {}
    for what, row in rows.items():
        key, is_hit, _ = what.partition(": hits at 5%")
        title, _, rule = key.partition(" enrolled, ")
        if is_hit and rule:
            false = rows[f"{key}: false accepts at 5%"]["value"]
            found.setdefault(rule.replace("20 separate groups", "separate"), {})[title.partition(" groups of ")[2]] = (
                f"{100 * row['value']:.1f} / {100 * false:.1f}"
            )
    titles = [*dict.fromkeys(title for cells in found.values() for title in cells)]
    lines = [[rule, *(cells.get(title, "") for title in titles)] for rule, cells in found.items()]
    return join_lines(["rule", *titles], lines, [])


def _matching_spaces(rows: Rows, content: Mapping[str, Any]) -> str:
    """What approximate spaces name of the queries of known groups at 5 %, and accept of others."""
    start, lines = "WikiText-2, margin, bounded, ", []
    for key in (name.partition(": hits")[0] for name in rows if name.startswith(start) and ": hits" in name):
        hits, false, error = (
            100 * rows[f"{key}: {what} at 5%"]["value"]
            for what in ("hits", "false accepts", "standard error of false accepts")
        )
        lines.append([key.removeprefix(start), f"{hits:.1f} %", f"{false:.1f} (± {error:.1f}) %"])
    return join_lines(["space", "named", "accepted of strangers"], lines, [])


def _relevance(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    rules = ["neutral texts", "neutral texts, by document", "rows of the space", "fixed 0.7", "pooled pairs"]
    for what in (name.removesuffix(f", {rules[0]}: threshold") for name in rows if f", {rules[0]}: threshold" in name):
        cells = []
        for rule in rules:
            pair = (
                100 * rows[f"{what}, {rule}: {share}"]["value"] for share in ("off-topic accepted", "on-topic accepted")
            )
            cells.append(" / ".join(f"{value:.1f}" for value in pair))
        lines.append([*what.split(", "), *cells])
    return join_lines(["model", "passages", *rules], lines, [])


def _duplicates(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for what in dict.fromkeys(name.partition(":")[0] for name in rows if ": copies found" in name):
        mean, least, false, error, threshold = (
            rows[f"{what}: {name}"]["value"]
            for name in ("copies found of 24", "copies found of 24, fewest", "false share",
                         "standard error of the false share", "threshold")
        )  # fmt: skip
        share = f"{100 * false:.1f} (± {100 * error:.1f}) %"
        lines.append([*what.split(", "), f"{mean:.1f}", f"{least:.0f}", share, f"{threshold:.3f}"])
    return join_lines(["images", "compared by", "copies found of 24", "fewest", "false pairs", "threshold"], lines, [])


def _vector_report(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for what in (name.removesuffix(": change") for name in rows if name.endswith(": change")):
        recall, *change = (100 * rows[f"{what}: {key}"]["value"] for key in ("recall_at_1", "change", "low", "high"))
        cells = "{:+.1f} ({:+.1f} to {:+.1f})".format(*change) if any(change) else ""
        lines.append([*what.split(", ", 1), f"{recall:.1f} %", cells])
    return join_lines(["dataset", "remedy", "Recall@1", "change in points, with interval"], lines, [])


def _compression(rows: Rows, content: Mapping[str, Any]) -> str:
    names, lines = [name.removesuffix(": bytes") for name in rows if name.endswith(": bytes")], []
    for what in sorted(names, key=lambda name: name.partition(", ")[0]):
        values = {name.removeprefix(f"{what}: "): row["value"] for name, row in rows.items() if f"{what}: " in name}
        cells = [*what.split(", "), f"{values['bytes']}", "", "", ""]
        if "recall" in values:
            cells[3] = f"{values['recall']:.3f} ({values['lower end']:.3f} to {values['upper end']:.3f})"
            cells[5] = f"{100 * values['accepted without a match at 5%']:.1f} %"
        cells[4] = f"{values['recall of queries of other groups']:.3f} (± {values['standard error']:.3f})"
        lines.append(cells)
    titles = ["dataset", "codes", "bytes", "recall@10 by `compress`", "of queries of other groups", "accepted at 5 %"]
    return join_lines(titles, lines, [])


def _compression_speed(rows: Rows, content: Mapping[str, Any]) -> str:
    names = dict.fromkeys(what.partition(",")[0] for what in rows)
    lines = [
        [name, *(f"{rows[f'{name}, {size}: milliseconds per query']['value']:.2g}" for size in (1, 256))]
        for name in names
    ]
    return join_lines(["codes", "one query", "of 256 at once"], lines, [])


def _number_methods(dataset: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the lines of a dataset in the order of the table; those of the seeds of `auto` become their mean."""
    lines = {line["method"]: line for line in dataset["found"]}
    seeds = [line for method, line in lines.items() if method.startswith("auto")]
    best = max((line for method, line in lines.items() if "HDBSCAN" in method), key=lambda line: line["NMI"])
    return {
        '`SphericalKMeans("auto")`': {
            key: statistics.mean(line[key] for line in seeds) for key in seeds[0] if key != "method"
        },
        "HDBSCAN": lines["HDBSCAN, min_cluster_size 5"],
        best["method"].replace("HDBSCAN", "best HDBSCAN"): best,
        "silhouette": lines["silhouette"],
        "true number": lines["true number"],
    }


def _number_of_clusters(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for name, dataset in content["datasets"].items():
        title = f"{name}: {dataset['classes']} classes"
        for method, line in _number_methods(dataset).items():
            scores = [f"{line[score]:.2f}" for score in ("NMI", "AMI", "ARI")]
            noise = f"{100 * line['noise']:.0f} %" if "HDBSCAN" in method else ""
            lines.append([title, method, f"{line['clusters']:.0f}", noise, *scores, f"{line['seconds']:.1f}"])
            title = ""
    return join_lines(["embeddings", "method", "clusters", "noise", "NMI", "AMI", "ARI", "seconds"], lines, [])


def _noise_of_clusters(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for name, dataset in content["datasets"].items():
        ours, _, theirs, *_ = _number_methods(dataset).values()
        cells = [
            f"{theirs[key]:.2f} / {of[other]:.2f}"
            for score in ("NMI", "AMI")
            for key, of, other in (
                (score, ours, score),
                (f"{score}, noise as singletons", ours, score),
                (f"{score}, left out", theirs, f"{score} of auto, left out"),
            )
        ]
        lines.append([name, *cells])
    counts = ("one cluster", "singletons", "left out")
    return join_lines(["", *(f"{score}: {count}" for score in ("NMI", "AMI") for count in counts)], lines, [])


def _beyond_memory(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for what in dict.fromkeys(name.partition(":")[0] for name in rows):
        values = {name.partition(": ")[2]: line["value"] for name, line in rows.items() if name.startswith(f"{what}:")}
        cells = [
            f"{values[key]:.2f}" if key in values else "" for key in ("recall@10 at the build", "recall@10 of queries")
        ]
        cells += [f"{values[f'seconds, {step}']:.0f}" for step in ("write", "index", "calibrate")]
        cells += [f"{values['milliseconds per query, search']:.1f}"]
        cells += [f"{max(value for name, value in values.items() if 'peak' in name):.2f}"]
        size, engine = what.split(", ")
        lines.append([size, "`LanceSpace`" if engine == "lance" else f"`{engine}`", *cells])
    title = ["rows", "engine", "recall@10 at the build", "recall@10 of queries", "s to write", "s to index"]
    return join_lines([*title, "s to calibrate", "ms per query", "peak GB"], lines, [])


def _image_loading(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for size in ("500 x 375", "4000 x 3000"):
        for loop in ("plain loop, PIL", "plain loop, tensors", "library, files", "library, parquet", "library, tar"):
            name = loop if loop.startswith("plain") or loop.endswith("files") else f"{loop} stream"
            plain = [] if loop.startswith("plain") else ["PIL", "tensors"]
            ratios = [f"{rows[f'{size}: {name} / plain loop, {of}']['value']:.2f}" for of in plain]
            rate = rows[f"{size}: {name}, images per processor second"]["value"]
            lines.append([size, name, f"{rate:.0f}", *(ratios or ["", ""])])
    return join_lines(["photographs", "", "images per processor second", "/ plain, PIL", "/ plain, tensors"], lines, [])


def _comparison_null(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for case in dict.fromkeys(what.partition(":")[0] for what in rows):
        seeds, widest, minimum = (line for what, line in rows.items() if what.startswith(f"{case}: false claims "))
        bound = f"{100 * float(widest['bound'].split()[-1]):.1f} %{'' if widest['holds'] else ', missed'}"
        cells = []
        for line in (seeds, widest, minimum):
            rate, low, high = (100 * value for value in (line["value"], *line["interval"]))
            cells.append(f"{rate:.1f} % ({low:.1f} to {high:.1f})")
        differ = f"{100 * rows[f'{case}: images on which two runs differ']['value']:.1f} %"
        lines.append([case, differ, *cells, bound])
    title = ["families", "images that differ", "seeds alone", "widest interval", "with the minimum effect", "at most"]
    return join_lines(title, lines, [])


def _head_choice(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for name, each in content["regrets"].items():
        chosen, best, (low, high) = each["chosen"], each["best"], each["interval"]
        regret = "0, the best one" if chosen == best else f"{each['regret']:.2f} ({low:.2f} to {high:.2f})"
        values = [f"{each['frozen'][chosen]:.2f}", f"{each['finetuned'][chosen]:.2f}"]
        lines.append([name, f"`{chosen}`", *values, f"`{best}`, {each['finetuned'][best]:.2f}", regret])
    title = ["dataset", "chosen frozen", "its accuracy %, frozen", "fine-tuned", "best of four, fine-tuned", "regret"]
    return join_lines(title, lines, [])


def _text_codes(rows: Rows, content: Mapping[str, Any]) -> str:
    stages, lines = ("untrained", "trained", "trained with Spherize"), []
    for name in ("plain", "spherized"):
        for kind in ("float", "float, centered", "binary", "binary, centered"):
            values = [f"{rows[f'{stage}: Recall@1, {name}, {kind}']['value']:.3f}" for stage in stages]
            lines.append([f"{name}, {kind}", *values])
    return join_lines(["embeddings, numbers", *stages], lines, [])


TEXTS = [
    ("Omniglot, a ViT of 0.2 million weights: Recall@1 of new characters, untrained", "Omniglot, untrained: Recall@1",
     "{:.3f}", 1),
    ("the same, after 2,000 steps with `CosineSoftmaxLoss`", "Omniglot, trained: Recall@1", "{:.3f}", 1),
    *((f"{text}: Recall@1 of the first {dim} coordinates", f"{stage}: Recall@1, {dim} dimensions", "{:.3f}", 1)
      for text, stage in (("`ArcFaceLoss` alone", "trained"), ("inside `MatryoshkaLoss`", "MatryoshkaLoss"))
      for dim in (128, 64)),
    ("`SphericalKMeans`: NMI with the articles, untrained", "untrained: NMI of spherical k-means", "{:.3f}", 1),
    ("the same, trained", "trained: NMI of spherical k-means", "{:.3f}", 1),
    ("`EmbeddingSpace` of 42 articles at 5 %: accepted paragraphs of these", "space: accepted of an article inside",
     "{:.1f} %", 100),
    ("accepted paragraphs of other articles", "space: accepted of another article", "{:.1f} %", 100),
    *((f"`VMFSoftmaxLoss`: concentration, AUROC of {name}", f"vMF: AUROC, {what}", "{:.2f}", 1)
      for name, what in (("right against wrong nearest paragraphs", "nearest paragraph right or wrong"),
                         ("paragraphs against halves of two articles", "paragraphs or halves of two articles"),
                         ("paragraphs against their first five words", "paragraphs or first five words"))),
    ("ONNX: largest difference of a coordinate", "ONNX, float32: largest difference", "{:.0e}", 1),
    ("ONNX in int8: mean cosine to float32", "ONNX, int8: mean cosine", "{:.4f}", 1),
    ("ONNX: Recall@1", "ONNX, float32: Recall@1", "{:.3f}", 1),
    ("ONNX in int8: Recall@1", "ONNX, int8: Recall@1", "{:.3f}", 1),
    ("ONNX: size", "ONNX, float32: MB", "{:.0f} MB", 1),
    ("ONNX in int8: size", "ONNX, int8: MB", "{:.0f} MB", 1),
]  # fmt: skip


KERNELS = [
    *((f"{what}, d = {dim}", f"{what}, d = {dim}", "{:.0f}", 1)
      for what in ["VonMisesFisher: sample, density, entropy, gradient"] for dim in (2, 3, 16, 32, 128)),
    *((what, what, "{:.0f}", 1) for what in ("VonMisesFisher.fit of 50 points", "frechet_mean of 50 points",
                                                 "frechet_mean of 50 uniform points")),
    *((f"{what}, foreach operations", f"ResNet-50: {name}", "{:.0f}", 1)
      for what, name in (("AdamW of torch", "foreach AdamW of torch"), ("Adam-S", "AdamS"),
                         ("Adam-SRT", "AdamSRT"), ("AdamG", "AdamG"), ("SGD-MRT", "SGDMRT"))),
]  # fmt: skip


def _pair_batch(rows: Rows, content: Mapping[str, Any]) -> str:
    lines = []
    for batch in (256, 512, 1024, 2048, 4096, 8192):
        ways = [f"batch {batch}, in chunks of 64", *([f"batch {batch}, at once"] if batch <= 2048 else [])]
        memory = [f"{rows[f'{way}: additional memory, MB']['value']:,.0f}" for way in ways]
        times = [f"{rows[f'{way}: ms per example']['value']:.1f}" for way in ways]
        lines.append([f"{batch:,}", *memory, *[""] * (2 - len(ways)), *times, *[""] * (2 - len(ways))])
    title = ["batch", "MB in chunks of 64", "MB at once", "ms per example in chunks", "ms per example at once"]
    return join_lines(title, lines, [])


def _uniformity(rows: Rows, content: Mapping[str, Any]) -> str:
    lines, dims = [], (3, 16, 128)
    for name in dict.fromkeys(what.partition(", d = ")[0] for what in rows):
        measured = [f"{name}, d = {dim}: relative variance times ms" for dim in dims]
        cells = [f"{rows[f'{what}, {kind}']['value']:.2g}" for kind in ("shift", "stretch") for what in measured]
        kind, _, circles = name.partition(", ")
        lines.append([f"`{kind}`{', ' if circles else ''}{circles}", *cells])
    return join_lines(["loss", *(f"{kind}, d = {dim}" for kind in ("shift", "stretch") for dim in dims)], lines, [])


def _minilm_analogies(rows: Rows, content: Mapping[str, Any]) -> str:
    sets = {"sat": "SAT", "u2": "U2", "u4": "U4", "google": "Google", "bats": "BATS", "average": "average"}
    lines = [
        [name, *(f"{found['analogies'][key]:.1f}" for key in sets)] for name, found in content["embedding"].items()
    ]
    return join_lines(["encoder", *sets.values()], lines, [])


def _imbalance_and_blur(rows: Rows, content: Mapping[str, Any]) -> str:
    """Mean, deviation and paired difference of two heads, with the interval of the seeds."""
    pairs = [("accuracy % of rare digits", "etf", "softmax"), ("Recall@1 % of blurred queries", "adaface", "cosine"),
             ("Recall@1 % of blurred queries", "adaface", "arcface"),
             ("Recall@1 % of blurred queries", "cosine", "arcface")]  # fmt: skip
    lines = []
    for what, *heads in pairs:
        first, second = (dict(enumerate(content["values"][f"{what}, {head}"])) for head in heads)
        found = compare("", "difference", heads[0], first, heads[1], second, test="paired")
        shown = [f"`{head}` {_mean([*values.values()])}" for head, values in zip(heads, (first, second), strict=True)]
        lines.append([what, *shown, found.show()])
    return join_lines(["measured", "head", "other head", "difference"], lines, [])


TABLES: dict[str, tuple[str, Callable[[Rows, Mapping[str, Any]], str]]] = {
    "scaling": ("sharding", partial(_list, SCALING, True)),
    "clustering": ("clustering", partial(_list, CLUSTERING, False)),
    "number-of-clusters": ("clustering_number", _number_of_clusters),
    "noise-of-clusters": ("clustering_number", _noise_of_clusters),
    "ood": ("ood", partial(_ood, {"near": "other two digits", "omniglot": "Omniglot", "cifar10": "CIFAR-10"})),
    "ood-cifar10": ("ood_cifar10", partial(_ood, {name: name for name in ("near", "omniglot", "mnist")})),
    "runtimes": ("runtimes", _runtimes),
    "lr-transfer": ("lr_transfer", _lr_transfer),
    "lm-widths": ("lm_widths", _lm_widths),
    "lm-depth": ("lm_depth", _lm_depth),
    "scale-invariance": ("scale_invariance", _scale_invariance),
    "minilm-embeddings": ("minilm", _minilm_embeddings),
    "minilm-language": ("minilm", _minilm_language),
    "minilm-analogies": ("minilm", _minilm_analogies),
    "kernels": ("kernel_counts", _kernels),
    "kernels-losses": ("kernel_counts", _kernels_of_losses),
    "kernels-functions": ("kernel_counts", partial(_list, KERNELS, True)),
    "matching": ("matching", _matching),
    "matching-found": ("matching", _matching_found),
    "matching-spaces": ("matching", _matching_spaces),
    "relevance": ("relevance", _relevance),
    "vector-report": ("vector_report", _vector_report),
    "compression": ("compression", _compression),
    "compression-speed": ("compression_speed", _compression_speed),
    "duplicates": ("duplicates", _duplicates),
    "beyond-memory": ("beyond_memory", _beyond_memory),
    "imbalance-and-blur": ("imbalance_and_blur", _imbalance_and_blur),
    "image-loading": ("image_loading", _image_loading),
    "head-costs": ("head_costs", _head_costs),
    "text-embeddings-codes": ("text_embeddings", _text_codes),
    "text-embeddings": ("text_embeddings", partial(_list, TEXTS, False)),
    "fine-tuning": ("fine_tuning", _fine_tuning),
    "prototypes-search": ("prototypes", _prototypes),
    "rejection-level": ("rejection", rejection_tables.level),
    "rejection-unknown": ("rejection", rejection_tables.unknown),
    "comparison-null": ("comparison_null", _comparison_null),
    "head-choice": ("head_choice", _head_choice),
    "rejection-runtime": ("rejection_runtime", rejection_tables.runtime),
    "pair-batch": ("pair_batch", _pair_batch),
    "uniformity-gradients": ("uniformity", _uniformity),
}
"""File of `benchmarks/results` and function of each table by its name in the markers of the pages."""
