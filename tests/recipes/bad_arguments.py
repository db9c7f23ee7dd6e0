"""Call public functions and classes with wrong arguments, values of every kind, one argument at a time.

python tests/recipes/bad_arguments.py
python tests/recipes/bad_arguments.py comparison metrics

What may leave a call: a result, without NaN if the value is finite; an exception that the docstring documents; an
error of Python, torch or numpy whose message names the argument, the shape, or the kind of number or tensor; or the
TypeError, AttributeError or LookupError by which Python refuses a value that is not of the annotated type. Anything
else, a call of more than 20 seconds, and a process that ends, are failures. Functions, and methods of classes with an
instance, are found by the public names of the packages, and their required arguments by name in `VALID` and `VALID_OF`.
Those that cannot be called so are counted, at most 10 %, and listed with `--show`.
"""

import argparse
import contextlib
import copy
import importlib
import inspect
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch

from hf_sphere import cluster, comparison, distributions, losses, ood, prototypes, search

PACKAGES = ["cluster", "comparison", "distributions", "geometry", "losses", "metrics"]
PACKAGES += ["nn", "ood", "optim", "prototypes", "search"]
SECONDS = 20

POINTS = torch.nn.functional.normalize(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), dim=1)
LABELS = torch.arange(12) % 3
RUNS = {"a": {0: 0.60, 1: 0.61, 2: 0.59}, "b": {0: 0.85, 1: 0.86, 2: 0.84}}
WEIGHTS = torch.nn.Parameter(POINTS.clone())
MANY = torch.nn.functional.normalize(torch.randn(120, 4, generator=torch.Generator().manual_seed(1)), dim=1)
VALID: dict[str, Any] = {
    **dict.fromkeys(
        ["points", "vectors", "embeddings", "x", "a", "features", "queries", "references", "point"], POINTS
    ),
    **dict.fromkeys(["values", "samples", "data", "X", "train", "weight", "prototypes", "class_vectors"], POINTS),
    **dict.fromkeys(["y", "b", "other", "others", "base", "first", "second", "loc", "directions"], POINTS.flip(0)),
    **dict.fromkeys(["tangent", "vector", "learning_rate", "direction", "anisotropy", "momentum"], POINTS.flip(0)),
    **dict.fromkeys(["images", "distances", "denominator", "angles"], POINTS.abs() + 0.1),
    **dict.fromkeys(["labels", "targets", "groups", "query_labels", "reference_labels", "clusters"], LABELS),
    **dict.fromkeys(["confidences", "scores", "known", "uncertainties", "inside"], torch.linspace(0.1, 0.9, 12)),
    **dict.fromkeys(["unknown", "novel", "unknown_scores", "ood_scores", "outside"], torch.linspace(0.0, 0.6, 12)),
    **dict.fromkeys(["rows", "ids", "keys", "query_keys", "old"], torch.arange(12)),
    **dict.fromkeys(["probabilities"], torch.full((12, 3), 1 / 3)),
    **dict.fromkeys(["logits"], POINTS[:, :3]),
    **dict.fromkeys(["correct", "is_correct"], LABELS == 0),
    **dict.fromkeys(["dim", "in_features", "embedding_dim", "hidden_size", "num_features", "n", "size"], 4),
    **dict.fromkeys(["in_channels", "out_channels"], 4),
    **dict.fromkeys(["num_classes", "n_clusters", "n_components", "count", "out_features", "k", "seeds"], 3),
    **dict.fromkeys(["num_points", "kernel_size"], 3),
    **dict.fromkeys(["length", "cosines", "t", "t_values"], torch.tensor([0.2, 0.5, 0.9])),
    **dict.fromkeys(["concentration"], torch.linspace(1.0, 9.0, 12)),
    **dict.fromkeys(["difference", "deviation", "radius", "scale", "time", "angle", "false_accept", "share"], 0.5),
    **dict.fromkeys(["level", "coverage", "threshold", "lr"], 0.5),
    **dict.fromkeys(["model", "encoder", "module"], torch.nn.Linear(4, 4)),
    "operator": torch.nn.functional.linear,
    "class_names": ["a", "b", "c"],
    "params": [WEIGHTS],
    "head": "cosine",
    "runs": RUNS,
    "reference": "a",
    "higher_is_better": True,
    "p_values": [0.01, 0.2],
    "value_range": (0.0, 1.0),
    "path": "file",
    "folder": "folder",
    "value": 0.5,
    "measure": lambda rows: float(len(rows)),
    "batches": [POINTS],
    "support_embeddings": POINTS,
    "support_labels": LABELS,
    "query_embeddings": POINTS,
    "expand": (12,),
    "batch_shape": (12,),
    "log": print,
}
"""Values that are right for most arguments of a name."""

PAIRS, ONE, FOUR_AXES = torch.arange(12) // 2, torch.zeros(12, 1), torch.randn(2, 4, 8, 8)
VALID_OF: dict[str, dict[str, Any]] = {
    **{key: {"labels": PAIRS} for key in ["losses.InfoNCELoss.forward", "losses.SigLIPLoss.forward"]},
    "search.EmbeddingSpace.add": {"groups": [*"abcdefghijkl"]},
    **{
        f"search.{name}Space.{job}": {"folder": name}
        for name in ("Compressed", "Embedding")
        for job in ("load", "save")
    },
    **{f"distributions.{name}.log_prob": {"value": POINTS} for name in distributions.__all__},
    **{f"nn.{name}Conv2d.forward": {"x": FOUR_AXES, "input": FOUR_AXES} for name in ("Angular", "Spherical")},
    **{f"ood.OODDetector.{name}": {"embeddings": MANY[:12]} for name in ("score_embeddings", "score")},
    "geometry.angles_to_cartesian": {"angles": POINTS[:, :3]},
    "geometry.angular_response": {"operator": "cosine"},
    "nn.PrototypicalClassifier.forward": {"query": POINTS, "support": POINTS.reshape(3, 4, 4)},
    "nn.build_head": {"name": "cosine"},
    "optim.build_optimizer": {"name": "adamw"},
    "optim.renormalize": {"weights": {"weight": 0}},
    "comparison.pseudo_values": {"ids": [*range(12)]},
    "search.EmbeddingSpace.remove": {"groups": "0"},
    "search.EmbeddingSpace.compare": {"other": MANY.flip(1)},
    "search.ImageSource.of": {"images": MANY, "content": "vector"},
    "ood.compare_scores": {
        "train": ood.Outputs(POINTS),
        "inside": ood.Outputs(MANY[:12]),
        "outside": {"a": ood.Outputs(MANY[12:24])},
    },
    "ood.fit_rejection": {"score": "energy", "level": 0.5},
    "losses.HeadLoss": {"head": "cosine"},
    "losses.CrossBatchSupConLoss": {"size": 24},
    "losses.MetricLearningLoss": {"loss": losses.InfoNCELoss()},
    "losses.SentenceTransformerLoss": {"loss": losses.InfoNCELoss()},
    "losses.cached_step": {"loss": losses.InfoNCELoss(), "batch": (POINTS, PAIRS)},
    "losses.LossCheckpointCallback": {"loss": losses.ArcFaceLoss(4, 3)},
    "losses.trainer_loss": {"loss": losses.InfoNCELoss()},
    "optim.step_diagnostics": {"optimizer": torch.optim.SGD([WEIGHTS], 0.1)},
    "optim.as_metrics": {"measured": {"a": {"b": 0.5}}},
    "prototypes.Placement.load": {"path": "placement"},
}
"""Values of arguments of one function."""

INSTANCES: dict[str, Callable[[], Any]] = {
    "search.EmbeddingSpace": lambda: search.EmbeddingSpace.fit(MANY, [*map(str, range(120))], score="cosine"),
    "search.CompressedSpace": lambda: search.EmbeddingSpace.fit(MANY, score="cosine").compress(8),
    "search.NeighborSearch": lambda: search.NeighborSearch(POINTS),
    "search.ImageSource": lambda: search.ImageSource.of(POINTS, content="vector"),
    "cluster.SphericalKMeans": lambda: cluster.SphericalKMeans(2, random_state=0).fit(POINTS),
    "cluster.VonMisesFisherMixture": lambda: cluster.VonMisesFisherMixture(2, random_state=0).fit(POINTS),
    "ood.OODDetector": lambda: ood.OODDetector("knn", k=3).fit_embeddings(POINTS, POINTS[:, :3], LABELS),
    "ood.Outputs": lambda: ood.Outputs(POINTS, POINTS[:, :3], LABELS),
    "comparison.Comparison": lambda: comparison.compare_runs(RUNS, reference="a", higher_is_better=True),
    "prototypes.Placement": lambda: prototypes.place_prototypes(3, 2, progress=False),
    "distributions.VonMisesFisher": lambda: distributions.VonMisesFisher(POINTS, torch.ones(12)),
    "distributions.PowerSpherical": lambda: distributions.PowerSpherical(POINTS, torch.ones(12)),
    "distributions.HypersphericalUniform": lambda: distributions.HypersphericalUniform(4),
}
"""Makers of instances whose public methods are called; of modules only `forward` is."""

MADE = {"optim.SphereOptimizer", "ood.Rejection", "nn.Head"}
MADE |= {f"search.{name}" for name in ("EmbeddingSpace", "CompressedSpace", "LanceSpace")}
MADE |= {"search.ImageEncoder", "search.TextEncoder"}
"""Classes that functions make, of what they have checked, and abstract ones."""

INTERNAL = {"check_groups", "distances", "refresh", "update", "checked", "expand"}
INTERNAL |= {"rsample", "name_rows", "open", "find"}
"""Methods of which the checked arguments of other methods are passed on."""

WRONG: dict[str, Callable[[], Any]] = {
    **{repr(value): (lambda value=value: value) for value in (None, True, 0, -1, 3, 2**70, 0.5, -1e300, 1e154, 1e-40)},
    **{repr(value): (lambda value=value: value) for value in (math.nan, math.inf, "", "abc", b"ab", 1j)},
    **{repr(value): (lambda value=value: value) for value in ([], {}, (), [1, "a"], {"a": 1}, [[1.0], [2.0, 3.0]])},
    "object": object,
    "function": lambda: print,
    "missing path": lambda: Path("no", "such", "file"),
    "numpy integer": lambda: np.int64(3),
    "array of objects": lambda: np.array([None, "a"], dtype=object),
    "array of dates": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "masked array": lambda: np.ma.masked_array(np.ones((12, 4)), np.eye(12, 4)),
    "empty tensor": lambda: torch.empty(0),
    "no rows": lambda: torch.empty(0, 4),
    "no columns": lambda: torch.empty(12, 0),
    "scalar": lambda: torch.tensor(0.5),
    "integers": lambda: torch.ones(12, 4, dtype=torch.int64),
    "booleans": lambda: torch.ones(12, dtype=torch.bool),
    "complex": lambda: torch.ones(12, 4, dtype=torch.complex64),
    "zeros": lambda: torch.zeros(12, 4),
    "tiny": lambda: torch.full((12, 4), 1e-40),
    "huge": lambda: torch.full((12, 4), 3e38),
    "half": lambda: POINTS.half() * 60000,
    "not finite": lambda: torch.full((12, 4), math.nan),
    "largest labels": lambda: torch.full((12,), 2**63 - 1),
    "negative labels": lambda: torch.full((12,), -1),
    "other length": lambda: torch.ones(7, 4),
    "three axes": lambda: torch.ones(2, 12, 4),
    "sparse": lambda: torch.eye(12, 4).to_sparse(),
    "meta": lambda: torch.empty(12, 4, device="meta"),
}
"""Makers of the values, by what they are."""

OVERFLOWS = {"huge", "-1e+300", "1e+154"}
OF_UNIT_VECTORS = {
    f"geometry.{name}" for name in ("exp_map", "log_map", "parallel_transport", "project_to_tangent", "slerp")
}
"""Functions of unit vectors and tangents, whose inner products must be finite."""

FINITE = set(WRONG) - {"nan", "inf", "not finite", "array of objects"}


class TooLongError(BaseException):
    """A call took too long; not an `Exception`, so that nobody catches it."""


def find(packages: list[str]) -> Iterator[tuple[str, Any]]:
    """Return public functions and classes, each once, and the methods of classes; records are made by functions."""
    seen = set()
    for package in packages:
        module = importlib.import_module(f"hf_sphere.{package}")
        for name in module.__all__:
            value, label = getattr(module, name), f"{package}.{name}"
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if not callable(value) or is_error or id(value) in seen:
                continue
            seen.add(id(value))
            if not (is_dataclass(value) or hasattr(value, "_fields") or label in MADE):
                yield label, value
            is_module = isinstance(value, type) and issubclass(value, torch.nn.Module) and label not in MADE
            for member in dir(value) if label in INSTANCES or is_module else ():
                method = getattr(value, member)
                is_own = str(getattr(method, "__module__", "")).startswith("hf_sphere") and member[0] != "_"
                if callable(method) and is_own and (member == "forward" or not is_module) and member not in INTERNAL:
                    yield f"{label}.{member}", method


def bind(label: str, function: Any) -> Any:
    """Return a function, or a method of a new instance."""
    package, name, *method = label.split(".")
    if not method or inspect.ismethod(function):  # of the class
        return function
    make = INSTANCES.get(f"{package}.{name}")
    if make is None:
        cls = getattr(importlib.import_module(f"hf_sphere.{package}"), name)
        make = partial(cls, **arguments_of(f"{package}.{name}", cls)[0])
    return getattr(make(), method[0])


def arguments_of(label: str, function: Any) -> tuple[dict[str, Any], list[str]]:
    """Return valid values of the required arguments, and the names of all."""
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    own = VALID_OF.get(label, {})
    needed = [each.name for each in named if each.default is each.empty or each.name in own]
    if missing := [name for name in needed if name not in VALID | own]:
        raise LookupError(f"no value of {', '.join(missing)}")
    values = {name: (VALID | own)[name] for name in needed}
    if "runs" not in values and needed[:1] == ["values"] and "reference" in needed:
        values["values"] = RUNS
    return values, [each.name for each in named if each.kind is not each.POSITIONAL_ONLY]


def is_of_type(value: Any, annotation: Any) -> bool:
    """Return whether a value, and the items of a list, are of an annotated type; of Any everything is."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if value is print:  # a function of another kind than any that is asked for
        return False
    if annotation in (Any, inspect.Parameter.empty) or isinstance(annotation, str | TypeVar):
        return True
    if origin in (Union, types.UnionType):
        return any(is_of_type(value, each) for each in arguments)
    if origin is Literal:
        return type(value) in {type(each) for each in arguments}
    if annotation is None or annotation is type(None):
        return value is None
    kind = origin or annotation
    if kind in (float, int):
        return not isinstance(value, bool) and isinstance(value, (int, float) if kind is float else int)
    if not isinstance(kind, type) or not isinstance(value, kind) or (kind is not str and isinstance(value, str)):
        return False
    if kind is tuple and ... not in arguments and len(value) != len(arguments):
        return False
    items = list(value.values() if isinstance(value, dict) else value) if isinstance(value, list | tuple | dict) else []
    return all(is_of_type(item, arguments[-1 if isinstance(value, dict) else 0]) for item in items if arguments)


def has_nan(value: Any) -> bool:
    """Return whether there is a NaN in numbers, tensors, or collections of them."""
    if isinstance(value, torch.Tensor):
        is_plain = value.is_floating_point() and value.layout == torch.strided and not value.is_meta
        return is_plain and bool(value.isnan().any())
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and bool(np.isnan(value).any())
    if isinstance(value, Mapping):
        return any(map(has_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def is_documented(error: Exception, function: Any, name: str, annotation: Any, value: Any) -> bool:
    """Return whether a docstring names the exception, or its message what is wrong."""
    raises = (inspect.getdoc(function) or "").partition("Raises:")[2].partition("\n\n")[0]
    kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception) and kind is not Exception]
    if any(re.search(rf"\b{kind}\b", raises) for kind in kinds):
        return True
    if isinstance(error, TypeError | AttributeError | LookupError) and not is_of_type(value, annotation):
        return True
    words = (
        rf"\b{re.escape(name).replace('_', '[_ ]')}s?\b|\b(shapes?|sizes?|dimensions?|dtypes?|scalar ?type|data type)\b"
    )
    words += r"|\b(layout|meta|Sparse\w*|Complex\w*|bool tensor|one element tensors?|dim \d|\dD|NVIDIA driver)\b"
    words += "|implemented for '|truth value of an array|Boolean value of Tensor|could not convert string to float"
    words += "|too big|too large|cannot fit 'int'|overflow|math range error|isIntegral"  # numbers that no dtype has
    words += "|is not iterable|argument must be|empty parameter list|learning rate|floating point|memory format|Errno"
    return bool(re.search(words, str(error), re.IGNORECASE))


def problem(label: str, function: Any, values: dict[str, Any], name: str, kind: str) -> str | None:
    """Make one call; return what is wrong with how it ended, or None."""
    value = WRONG[kind]()
    annotation = inspect.signature(function).parameters[name].annotation
    try:
        result = bind(label, function)(**copy.deepcopy(values) | {name: value})
    except TooLongError:
        return f"takes more than {SECONDS} s"
    except Exception as error:
        is_fine = is_documented(error, function, name, annotation, value)
        return None if is_fine else f"raises {type(error).__name__}: {str(error)[:200]}"
    is_finite = kind in FINITE - (OVERFLOWS if label in OF_UNIT_VECTORS else set()) and is_of_type(value, annotation)
    return "returns NaN" if is_finite and has_nan(result) else None


def attack(label: str, function: Any, results: Any) -> None:
    """Call a function with every value for every argument, in a process of its own; send what is wrong."""

    def stop(*_: object) -> None:
        raise TooLongError

    warnings.simplefilter("ignore")
    logging.disable()
    signal.signal(signal.SIGALRM, stop)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # of functions that are called
    try:
        bound = bind(label, function)
        values, names = arguments_of(label, bound)
        bound(**copy.deepcopy(values))
    except Exception as error:
        results.send(("not called", str(error)[:100]))
        return
    for name in names:
        for kind in WRONG:
            results.send(("call", f"{label}({name}={kind})"))
            signal.alarm(SECONDS)
            try:
                wrong = problem(label, function, values, name, kind)
            except TooLongError:  # in between
                wrong = f"takes more than {SECONDS} s"
            signal.alarm(0)
            if wrong:
                results.send(("failed", wrong))
    results.send(("end", ""))


def main() -> None:
    """Make the calls and print the failures and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="packages of hf_sphere")
    parser.add_argument("--show", action="store_true", help="list what is not called, and why")
    args = parser.parse_args()
    torch.linalg.vector_norm(torch.empty(1, 1, device="meta"), dim=-1)  # the first such call imports for seconds
    calls, failures, total, unknown = 0, 0, 0, list[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where some may write
        for label, name in (("search.CompressedSpace", "Compressed"), ("search.EmbeddingSpace", "Embedding")):
            INSTANCES[label]().save(name)
        INSTANCES["prototypes.Placement"]().save("placement")
        for label, function in find(args.packages):
            total += 1
            results, other = multiprocessing.Pipe(duplex=False)
            # Forked, so that it need not import anything again.
            process = multiprocessing.get_context("fork").Process(target=attack, args=(label, function, other))
            process.start()
            other.close()
            kind, text, last = "", "", ""
            while kind not in ("end", "not called"):
                try:
                    kind, text = results.recv() if results.poll(4 * SECONDS) else ("failed", "cannot be interrupted")
                except EOFError:
                    kind, text = "failed", "ends the process"
                calls += kind == "call"
                last = text if kind == "call" else last
                if kind == "failed":
                    failures += 1
                    print(f"{last} {text}", flush=True)
                if text in ("cannot be interrupted", "ends the process"):
                    break
            unknown += [f"{label}: {text}"] if kind == "not called" else []
            process.kill()
            process.join()
    print(f"{calls} calls, {failures} failed; {len(unknown)} of {total} functions and classes were not called")
    print("\n".join(unknown if args.show else []), end="\n" if args.show else "")
    sys.exit(failures > 0 or len(unknown) > total / 10)


if __name__ == "__main__":
    main()
