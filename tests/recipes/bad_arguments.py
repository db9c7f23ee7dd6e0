"""Call public functions and classes with wrong arguments, values of every kind, one argument at a time.

python tests/recipes/bad_arguments.py
python tests/recipes/bad_arguments.py comparison metrics

What may leave a call: a result, without NaN if the value is finite; an exception that the docstring documents; one
whose message names the argument, its type or its shape; or the TypeError by which Python refuses a type. Anything else,
a call of more than 20 seconds, and a process that ends, are failures. Functions are found by the public names of the
packages, and their required arguments by name in `VALID`; those that cannot be called so are counted, and listed with
`--show`.
"""

import argparse
import contextlib
import importlib
import inspect
import math
import multiprocessing
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

PACKAGES = ["cluster", "comparison", "distributions", "geometry", "losses", "metrics"]
PACKAGES += ["nn", "ood", "optim", "prototypes", "search"]
SECONDS = 20

POINTS = torch.nn.functional.normalize(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), dim=1)
LABELS = torch.arange(12) % 3
RUNS = {"a": {0: 0.60, 1: 0.61, 2: 0.59}, "b": {0: 0.85, 1: 0.86, 2: 0.84}}
VALID: dict[str, Any] = {
    **dict.fromkeys(["points", "vectors", "embeddings", "x", "a", "features", "queries", "references"], POINTS),
    **dict.fromkeys(["values", "samples", "data", "X", "train", "weight", "prototypes", "class_vectors"], POINTS),
    **dict.fromkeys(["y", "b", "other", "others", "base", "first", "second", "loc", "directions"], POINTS.flip(0)),
    **dict.fromkeys(["labels", "targets", "groups", "query_labels", "reference_labels", "clusters"], LABELS),
    **dict.fromkeys(["confidences", "scores", "known", "uncertainties"], torch.linspace(0.1, 0.9, 12)),
    **dict.fromkeys(["unknown", "novel", "unknown_scores", "ood_scores"], torch.linspace(0.0, 0.6, 12)),
    **dict.fromkeys(["probabilities"], torch.full((12, 3), 1 / 3)),
    **dict.fromkeys(["logits"], POINTS[:, :3]),
    **dict.fromkeys(["correct", "is_correct"], LABELS == 0),
    **dict.fromkeys(["dim", "in_features", "embedding_dim", "hidden_size", "num_features", "n", "size"], 4),
    **dict.fromkeys(["num_classes", "n_clusters", "n_components", "count", "out_features", "k", "seeds"], 3),
    **dict.fromkeys(["concentration", "length", "cosines", "t", "t_values"], torch.tensor([0.2, 0.5, 0.9])),
    **dict.fromkeys(["difference", "deviation", "radius", "scale", "time", "angle"], 0.5),
    "runs": RUNS,
    "reference": "a",
    "higher_is_better": True,
    "p_values": [0.01, 0.2],
}
"""Values that are right for most arguments of a name."""

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

FINITE = set(WRONG) - {"nan", "inf", "not finite", "array of objects"}


class TooLongError(BaseException):
    """A call took too long; not an `Exception`, so that nobody catches it."""


def find(packages: list[str]) -> Iterator[tuple[str, Any]]:
    """Return public functions and classes, each once."""
    seen = set()
    for package in packages:
        module = importlib.import_module(f"hf_sphere.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if callable(value) and not is_error and id(value) not in seen:
                seen.add(id(value))
                yield f"{package}.{name}", value


def arguments_of(function: Any) -> tuple[dict[str, Any], list[str]]:
    """Return valid values of the required arguments, and the names of all."""
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    needed = [each.name for each in named if each.default is each.empty]
    if missing := [name for name in needed if name not in VALID]:
        raise LookupError(f"no value of {', '.join(missing)}")
    values = {name: VALID[name] for name in needed}
    if "runs" not in values and needed[:1] == ["values"] and "reference" in needed:
        values["values"] = RUNS
    return values, [each.name for each in named if each.kind is not each.POSITIONAL_ONLY]


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


def is_documented(error: Exception, function: Any, name: str) -> bool:
    """Return whether a docstring names the exception, or its message what is wrong."""
    if isinstance(error, TypeError) or "ambiguous" in str(error):  # the latter, of an array instead of a number
        return True
    raises = (inspect.getdoc(function) or "").partition("Raises:")[2].partition("\n\n")[0]
    words = rf"\b{re.escape(name)}\b|shape|size|dimension|dtype|type|argument|meta|finite|must|needs|expected|got "
    words += "|Complex|not supported|one element|too big|too large|overflow|NVIDIA driver"  # messages of torch
    kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception) and kind is not Exception]
    return any(re.search(rf"\b{kind}\b", raises) for kind in kinds) or bool(re.search(words, str(error), re.IGNORECASE))


def problem(function: Any, values: dict[str, Any], name: str, kind: str) -> str | None:
    """Make one call; return what is wrong with how it ended, or None."""
    try:
        result = function(**values | {name: WRONG[kind]()})
    except TooLongError:
        return f"takes more than {SECONDS} s"
    except Exception as error:
        return None if is_documented(error, function, name) else f"raises {type(error).__name__}: {str(error)[:200]}"
    return "returns NaN" if kind in FINITE and has_nan(result) else None


def attack(label: str, function: Any, results: Any) -> None:
    """Call a function with every value for every argument, in a process of its own; send what is wrong."""

    def stop(*_: object) -> None:
        raise TooLongError

    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, stop)
    try:
        values, names = arguments_of(function)
        function(**values)
    except Exception as error:
        results.send(("not called", str(error)[:100]))
        return
    for name in names:
        for kind in WRONG:
            results.send(("call", f"{label}({name}={kind})"))
            signal.alarm(SECONDS)
            wrong = problem(function, values, name, kind)
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
    calls, failures, unknown = 0, 0, list[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where some may write
        for label, function in find(args.packages):
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
    print(f"{calls} calls, {failures} failed; {len(unknown)} functions and classes were not called")
    print("\n".join(unknown if args.show else []), end="\n" if args.show else "")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
