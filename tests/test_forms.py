"""Forms of vectors and names: every public function that takes vectors takes all of them, with the same results."""

import importlib.util
import math
import tempfile
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pandas as pd
import pgvector
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse
import torch
from public_parameters import public_parameters

from hf_sphere import cluster, metrics, ood, prototypes, search, visualization

PACKAGES = ("search", "cluster", "metrics", "ood", "visualization", "evaluation", "comparison", "prototypes")
"""Those that take data. Functions of tensors with gradients (geometry, nn, losses, distributions) take tensors only."""

LABELS = np.arange(48) // 4
RANDOM = np.random.default_rng(0)
X = (RANDOM.integers(4, 8, (48, 6)) * 2 ** RANDOM.integers(0, 5, (48, 6))).astype(np.float64)
"""Exact in all types of numbers, also of 8 bits."""


def arrow(kind: pa.DataType, values: np.ndarray = X) -> pa.Array:
    return pa.array(values.tolist(), kind)


class Column:
    """What an object has that only numpy can read."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values if dtype is None else self.values.astype(dtype)


def memmap() -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        file.write(X.astype(np.float32).tobytes())
        return np.memmap(file, np.float32, "r", shape=X.shape)


FLOATS = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point]
FLOATS = sorted({*FLOATS} - {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}, key=str)  # which have no zero, or are pairs

TAKEN = {f"torch {str(dtype)[6:]}": lambda dtype=dtype: torch.tensor(X).to(dtype) for dtype in FLOATS}
TAKEN |= {f"numpy {dtype}": lambda dtype=dtype: X.astype(dtype) for dtype in ("f2", "f4", "f8", ">f4", "longdouble")}
TAKEN |= {
    "lists": X.tolist,
    "tuples": lambda: tuple(map(tuple, X.tolist())),
    "list of arrays": lambda: [*X.astype(np.float32)],
    "list of tensors": lambda: [*torch.tensor(X)],
    "array of objects": lambda: pd.Series([*X]).to_numpy(),
    "memmap": memmap,
    "read by numpy": lambda: Column(X),
    "Fortran order": lambda: np.asfortranarray(X),
    "masked without a mask": lambda: np.ma.masked_array(X),
    "needs a gradient": lambda: torch.tensor(X, requires_grad=True),
    "pandas table": lambda: pd.DataFrame(X),
    "pandas nullable table": lambda: pd.DataFrame(X).astype("Float32"),
    "pandas column of lists": lambda: pd.Series(X.tolist()),
    "pandas column of arrays": lambda: pd.Series([*X], index=range(100, 148)),
    "pandas column of Arrow": lambda: pd.Series(X.tolist(), dtype=pd.ArrowDtype(pa.list_(pa.float32()))),
    "polars table": lambda: pl.DataFrame(X),
    "polars lists": lambda: pl.Series(X.tolist()),
    "polars arrays": lambda: pl.Series(X.tolist(), dtype=pl.Array(pl.Float32, 6)),
    "rows of polars": lambda: [pl.Series(row) for row in X],
    "pyarrow table": lambda: pa.table(dict(zip("abcdef", X.T, strict=True))),
    "pyarrow list": lambda: arrow(pa.list_(pa.float32())),
    "pyarrow list of half": lambda: pa.array([[*row] for row in X.astype(np.float16)], pa.list_(pa.float16())),
    "pyarrow fixed list": lambda: arrow(pa.list_(pa.float32(), 6)),
    "pyarrow large list": lambda: arrow(pa.large_list(pa.float64())),
    "pyarrow list view": lambda: arrow(pa.list_view(pa.float32())),
    "pyarrow tensors": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(X),
    "pyarrow slice": lambda: pa.array([[9.0] * 6, *X.tolist()], pa.list_(pa.float32()))[1:],
    "pyarrow chunks": lambda: pa.chunked_array(
        [arrow(pa.list_(pa.float32()))[part] for part in (slice(7), slice(7, 48))]
    ),
    "datasets": lambda: datasets.Dataset.from_dict({"v": X.tolist()})["v"],
    "datasets as torch": lambda: datasets.Dataset.from_dict({"v": X.tolist()}).with_format("torch")["v"],
    "datasets as numpy": lambda: datasets.Dataset.from_dict({"v": X.tolist()}).with_format("numpy")["v"],
    "pgvector": lambda: [pgvector.Vector(row) for row in X],
    "pgvector half": lambda: [pgvector.HalfVector(row) for row in X],
    "pgvector sparse": lambda: [pgvector.SparseVector(row) for row in X],
    "pgvector in pandas": lambda: pd.Series([pgvector.Vector(row) for row in X]),
    "pgvector in polars": lambda: pl.Series([pgvector.Vector(row) for row in X], dtype=pl.Object),
}

INTEGERS = {
    "numpy int32": lambda: X.astype(np.int32),
    "torch int64": lambda: torch.tensor(X).long(),
    "torch uint16": lambda: torch.tensor(X).to(torch.uint16),
    "lists of integers": lambda: X.astype(int).tolist(),
}

ROWS, NAN = X.tolist(), np.where(np.arange(48)[:, None] == 5, np.nan, X)
DENSE, CODES, NONE, FINITE = "must be dense, without masked values", "packed bits", "row 5 has none", "finite"
REFUSED = {
    "masked": (lambda: np.ma.masked_array(X, X > 9), DENSE),
    "rows with masks": (lambda: [*np.ma.masked_array(X, X > 9)], DENSE),
    "column of rows with masks": (lambda: pd.Series([*np.ma.masked_array(X, X > 9)]), DENSE),
    "sparse tensor": (lambda: torch.tensor(X).to_sparse(), DENSE),
    "complex": (lambda: torch.tensor(X) + 0j, "must be real"),
    "torch int8": (lambda: torch.tensor(X).to(torch.int8), CODES),
    "numpy uint8": (lambda: X.astype(np.uint8), CODES),
    "a row of None": (lambda: [*ROWS[:5], None, *ROWS[6:]], NONE),
    "a row missing in pandas": (lambda: pd.Series([*ROWS[:5], None, *ROWS[6:]]), NONE),
    "a row missing in polars": (lambda: pl.Series([*ROWS[:5], None, *ROWS[6:]]), NONE),
    "a row missing in pyarrow": (lambda: pa.array([*ROWS[:5], None, *ROWS[6:]]), NONE),
    "a row missing in chunks": (lambda: pa.chunked_array([pa.array([*ROWS[:5], None, *ROWS[6:]])]), NONE),
    "a row missing in pgvector": (lambda: [*map(pgvector.Vector, ROWS[:5]), None], NONE),
    "another length": (lambda: [*ROWS[:5], [1.0]], "must be numbers"),
    "another length in pyarrow": (lambda: pa.array([*ROWS[:5], [1.0]]), "must be numbers"),
    "nan": (lambda: NAN, FINITE),
    "null in pyarrow": (lambda: pa.array([[None if x != x else x for x in row] for row in NAN.tolist()]), FINITE),
}
SPARSE = {"scipy csr": scipy.sparse.csr_matrix, "scipy coo": scipy.sparse.coo_array}


SPACE = search.EmbeddingSpace.fit(X, LABELS, score="cosine")
MANY = search.EmbeddingSpace.fit(np.random.default_rng(2).normal(size=(120, 6)), np.arange(120), score="cosine")
COMPRESSED = MANY.compress(8) if importlib.util.find_spec("faiss") else None
K_MEANS = cluster.SphericalKMeans(3, random_state=0).fit(X)
MIXTURE = cluster.VonMisesFisherMixture(2, random_state=0, max_iter=5).fit(X)
NEIGHBORS = search.NeighborSearch(X, kind="torch")
DIFFERENT = np.random.default_rng(1).normal(size=(48, 5))
NAMES, OWN, NEW = [*"abcdefghijkl"], torch.arange(48), X[::-1] + 1


def changed(change: Any, rows: Any = X) -> Any:
    space = search.EmbeddingSpace.fit(rows, LABELS, score="cosine")
    change(space)
    return found(space.search(NEW, 2))


def found(matches: search.Matches) -> Any:
    return matches.scores, matches.p_values


def detected(score: str, embeddings: Any, logits: Any) -> Any:
    return (
        ood.OODDetector(score, **{"k": 3} if score == "knn" else {})
        .fit_embeddings(embeddings, logits, LABELS % 6)
        .score_embeddings(NEW, NEW)
    )


def detect(score: str, embeddings: Any, logits: Any) -> Any:
    return (
        ood.OODDetector(score, **{"k": 3} if score == "knn" else {})
        .fit_embeddings(NEW, NEW, LABELS % 6)
        .score_embeddings(embeddings, logits)
    )


@pytest.fixture(scope="module", autouse=True)
def _points_instead_of_figures():
    def plot(scenes, *arguments):
        return scenes[""].points, scenes[""].directions

    offline = mock.patch.dict("sys.modules", {"plotly": mock.Mock(), "plotly.offline": mock.Mock(get_plotlyjs=str)})
    installed = mock.patch("hf_sphere.visualization.interactive.check_plotly")
    with offline, installed, mock.patch("hf_sphere.visualization.sphere.plot_scenes", plot):
        yield


def page(points: Any, directions: Any = None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        names = NAMES if directions is None else [*map(str, OWN)]
        labels = LABELS if directions is None else OWN
        path = visualization.write_interactive_sphere(
            Path(folder, "a.html"), points, labels, names, directions=directions
        )
        return path.read_text()


def lance(vectors: Any, use: Any) -> Any:
    pytest.importorskip("lancedb")
    with tempfile.TemporaryDirectory() as folder:
        rows = {"vector": vectors, "name": LABELS}
        return use(search.LanceSpace.create(folder, rows, group_column="name"))


CASES = {
    "search.EmbeddingSpace.fit.vectors": lambda x: found(search.EmbeddingSpace.fit(x, LABELS).search(NEW, 2)),
    "search.EmbeddingSpace.fit.calibration": lambda x: found(
        search.EmbeddingSpace.fit(NEW, calibration=x).search(NEW, 2)
    ),
    "search.EmbeddingSpace.calibrate.queries": lambda x: changed(lambda space: space.calibrate(x), NEW),
    "search.EmbeddingSpace.add.vectors": lambda x: changed(lambda space: space.add(LABELS, x)),
    "search.EmbeddingSpace.check_model.vectors": lambda x: SPACE.check_model(x),
    "search.EmbeddingSpace.compare.other": lambda x: search.EmbeddingSpace.fit(X).compare(x).p_value,
    "search.EmbeddingSpace.search.queries": lambda x: found(SPACE.search(x, 2)),
    "search.EmbeddingSpace.identify.queries": lambda x: SPACE.identify(x, 0.5),
    "search.CompressedSpace.search.queries": lambda x: found(COMPRESSED.search(x, 2)),
    "search.CompressedSpace.identify.queries": lambda x: COMPRESSED.identify(x, 0.5),
    "search.LanceSpace.create.batches": lambda x: lance(x, lambda space: space.search(NEW, 2).scores),
    "search.LanceSpace.add.batches": lambda x: lance(X, lambda space: space.add({"vector": x, "name": LABELS})),
    "search.LanceSpace.search.queries": lambda x: lance(X, lambda space: space.search(x, 2).scores),
    "search.LanceSpace.identify.queries": lambda x: lance(X, lambda space: space.identify(x, 0.5)),
    "search.ImageSource.of.images": lambda x: search.ImageSource.of(x, content="vector").encoded,
    "search.NeighborSearch.references": lambda x: search.NeighborSearch(x, kind="torch").search(NEW, 3)[0],
    "search.NeighborSearch.search.queries": lambda x: NEIGHBORS.search(x, 3)[0],
    "search.NeighborSearch.search_others.queries": lambda x: NEIGHBORS.search_others(x, 3, OWN, OWN)[0],
    "search.read_vectors.values": search.read_vectors,
    "search.report_vectors.vectors": lambda x: search.report_vectors(x).numbers["smallest_median_largest_norm"],
    "cluster.SphericalKMeans.init": lambda x: cluster.SphericalKMeans(48, init=x, max_iter=2).fit(X).inertia_,
    "cluster.SphericalKMeans.fit.X": lambda x: cluster.SphericalKMeans(3, random_state=0).fit(x).inertia_,
    "cluster.SphericalKMeans.predict.X": K_MEANS.predict,
    "cluster.SphericalKMeans.score.X": K_MEANS.score,
    "cluster.SphericalKMeans.transform.X": K_MEANS.transform,
    "cluster.VonMisesFisherMixture.transform.X": MIXTURE.transform,
    "cluster.VonMisesFisherMixture.fit.X": lambda x: cluster.VonMisesFisherMixture(2, random_state=0).fit(x).weights_,
    "cluster.VonMisesFisherMixture.fit_predict.X": lambda x: cluster.VonMisesFisherMixture(
        2, random_state=0
    ).fit_predict(x),
    **{
        f"cluster.VonMisesFisherMixture.{name}.X": getattr(MIXTURE, name)
        for name in ("bic", "predict", "predict_proba", "score", "score_samples")
    },
    "metrics.alignment.embeddings": lambda x: metrics.alignment(x, LABELS),
    "metrics.class_angles.embeddings": lambda x: metrics.class_angles(x, LABELS),
    "metrics.class_overlap.embeddings": lambda x: metrics.class_overlap(x, LABELS, LABELS > 2, threshold=1.0),
    "metrics.effective_dimension.embeddings": metrics.effective_dimension,
    "metrics.energy_test.x": lambda x: metrics.energy_test(x, NEW),
    "metrics.energy_test.y": lambda x: metrics.energy_test(NEW, x),
    "metrics.probability_scores.logits": lambda x: metrics.probability_scores(x, LABELS % 6),
    "metrics.retrieval_scores.embeddings": lambda x: metrics.retrieval_scores(x, LABELS),
    "metrics.sampled_retrieval_scores.directions": lambda x: metrics.sampled_retrieval_scores(x, LABELS * 1e6, LABELS),
    "metrics.score_queries.embeddings": lambda x: metrics.score_queries(x, LABELS)[1],
    "metrics.uniformity.embeddings": metrics.uniformity,
    "ood.OODDetector.fit_embeddings.embeddings": lambda x: detected("knn", x, X),
    "ood.OODDetector.fit_embeddings.logits": lambda x: detected("vim", X, x),
    "ood.OODDetector.score_embeddings.embeddings": lambda x: detect("knn", x, X),
    "ood.OODDetector.score_embeddings.logits": lambda x: detect("energy", X, x),
    "prototypes.measure_order.prototypes": lambda x: astuple(prototypes.measure_order(x, DIFFERENT)),
    "prototypes.measure_order.class_vectors": lambda x: astuple(prototypes.measure_order(DIFFERENT, x)),
    "prototypes.place_prototypes.class_vectors": lambda x: (
        prototypes.place_prototypes(
            48, 47, method="closed_form", ordering="assignment", class_vectors=x, progress=False
        ).prototypes
    ),
    "visualization.plot_circle.points": lambda x: visualization.plot_circle(x, LABELS, NAMES),
    "visualization.plot_circle.directions": lambda x: visualization.plot_circle(X, OWN, [*map(str, OWN)], directions=x),
    "visualization.plot_sphere.points": lambda x: visualization.plot_sphere(x, LABELS, NAMES),
    "visualization.plot_sphere.directions": lambda x: visualization.plot_sphere(X, OWN, [*map(str, OWN)], directions=x),
    "visualization.write_interactive_sphere.points": page,
    "visualization.write_interactive_sphere.directions": lambda x: page(X, x),
}

OTHERS = {
    "no vectors": "about cells encoder random_state model table database settings tokenizer values results training "
    "statistics robustness measure curves batches unknown outputs",
    "names or numbers of rows, or of one each": "groups calibration_groups labels parts ids indices sample_weight keys "
    "query_keys rows old y correct concentration concentrations confidences scores inside outside known class_p_values "
    "prediction scale offset columns",
    "images or texts": "images calibration texts",
}
INTERNAL = {
    "search.CompressedSpace": "a space that compress returns",
    "search.EmbeddingSpace": "a space of valid vectors; fit checks them",
    "search.EmbeddingSpace.migrate": "needs 100 anchors, which are checked as vectors of fit and add are",
    "search.NeighborSearch.distances": "between queries that were checked",
    "search.NeighborSearch.extend": "references that the space has checked",
    "search.NeighborSearch.find": "queries that were checked",
    "search.ImageSource": "what `of` returns",
    "search.LanceSpace.build_index": "needs 5,000 rows; its queries are checked as those of search",
    "visualization.plot_class_angles": "draws metrics.class_angles",
    "ood.Rejection.forward": "outputs of a model, on its device",
}

NEEDS_A_SCALE = {"search.read_vectors.values", "search.report_vectors.vectors", "search.ImageSource.of.images"}
"""Vectors as APIs deliver them: integers are codes, also in lists."""

TAKES_SPARSE = {name for name in CASES if "KMeans" in name}

COUNTS_NAN = {"search.report_vectors.vectors", "search.ImageSource.of.images"}


by_owner = pytest.mark.settings(name=lambda name: {"owner": name.rsplit(".", 2)[0]})
"""By default, one parameter of each class, and of the functions of each package."""


def parameters() -> Iterator[str]:
    """Yield what the public functions and methods take that may be vectors by its annotation."""
    for name, parameter in public_parameters(PACKAGES, records=False):
        kind = str(parameter.annotation)
        is_any = any(text in kind for text in ("Tensor", "Any", "ndarray", "_empty"))
        if parameter.name != "self" and is_any and parameter.kind is not parameter.VAR_KEYWORD:
            yield name


def test_every_parameter_that_takes_vectors_is_in_the_table():
    others = set(" ".join(OTHERS.values()).split())
    found = {name for name in parameters() if name in CASES or name.rsplit(".", 1)[1] not in others}
    assert {name for name in found if name not in CASES and name.rsplit(".", 1)[0] not in INTERNAL} == set()
    assert CASES.keys() <= {*parameters()}


def flat(result: Any) -> list[Any]:
    """Return the numbers of a result."""
    if isinstance(result, dict):
        return [number for value in result.values() for number in flat(value)]
    if isinstance(result, (tuple, list)):
        return [number for value in result for number in flat(value)]
    return [repr(result)] if isinstance(result, (str, type(None))) else np.asarray(result).ravel().tolist()


@by_owner
@pytest.mark.parametrize("name", CASES)
def test_each_form_of_vectors_has_the_result_of_an_array(name):
    expected, forms = flat(CASES[name](X.astype(np.float32))), TAKEN | ({} if name in NEEDS_A_SCALE else INTEGERS)
    wrong = {}
    for form, make in forms.items():
        try:
            pairs = [*zip(flat(CASES[name](make())), expected, strict=True)]
            if not all(
                a == b if isinstance(b, str) else math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4) for a, b in pairs
            ):
                wrong[form] = "another result"
        except Exception as error:
            wrong[form] = repr(error)
    assert wrong == {}


@by_owner
@pytest.mark.parametrize("name", CASES)
def test_what_is_no_vectors_has_the_same_reason_everywhere(name):
    wrong = {}
    forms = {
        form: (lambda kind=kind: kind(X), DENSE) for form, kind in (SPARSE if name not in TAKES_SPARSE else {}).items()
    }
    forms |= {form: (make, "need their scale") for form, make in (INTEGERS if name in NEEDS_A_SCALE else {}).items()}
    for form, (make, message) in (REFUSED | forms).items():
        if form in ("torch int8", "numpy uint8") and name in NEEDS_A_SCALE:
            message = "need their scale"
        if message == DENSE and "scipy" in form and "Mixture" in name:
            message = "dense data is required"  # of scikit-learn
        if message == FINITE and name in COUNTS_NAN:
            continue
        message = "contains NaN" if message == FINITE and name.endswith(".X") else message
        try:
            CASES[name](make())
            wrong[form] = "taken"
        except (TypeError, ValueError) as error:
            if message not in str(error):
                wrong[form] = repr(error)
    assert wrong == {}


NUMBERS = {
    "numpy int32": lambda: LABELS.astype(np.int32),
    "list": LABELS.tolist,
    "numpy uint64": lambda: LABELS.astype(np.uint64),
    "torch int16": lambda: torch.tensor(LABELS).short(),
    "pandas": lambda: pd.Series(LABELS, index=range(9, 57)),
    "pandas nullable": lambda: pd.Series(LABELS, dtype="Int64"),
    "pandas of Arrow": lambda: pd.Series(LABELS, dtype="int64[pyarrow]"),
    "polars": lambda: pl.Series(LABELS),
    "pyarrow": lambda: pa.array(LABELS),
    "pyarrow chunks": lambda: pa.chunked_array([LABELS[:7], LABELS[7:]]),
    "datasets": lambda: datasets.Dataset.from_dict({"v": LABELS})["v"],
}
TEXTS = [NAMES[label] for label in LABELS]
OF_TEXTS = {
    "numpy": lambda: np.array(TEXTS),
    "pandas": lambda: pd.Series(TEXTS),
    "pandas categories": lambda: pd.Series(TEXTS, dtype="category"),
    "polars": lambda: pl.Series(TEXTS),
    "polars categories": lambda: pl.Series(TEXTS, dtype=pl.Categorical),
    "pyarrow": lambda: pa.array(TEXTS),
    "pyarrow dictionary": lambda: pa.array(TEXTS).dictionary_encode(),
    "pyarrow chunks": lambda: pa.chunked_array([TEXTS[:7], TEXTS[7:]]),
    "datasets": lambda: datasets.Dataset.from_dict({"v": TEXTS})["v"],
}


@pytest.mark.parametrize("form", NUMBERS)
def test_each_form_of_labels_has_the_result_of_an_array(form):
    assert metrics.retrieval_scores(X, NUMBERS[form]()) == metrics.retrieval_scores(X, LABELS)


@pytest.mark.parametrize(
    ("values", "form"), [*((NUMBERS, form) for form in NUMBERS), *((OF_TEXTS, form) for form in OF_TEXTS)]
)
def test_each_form_of_groups_has_the_names_of_a_list(values, form):
    expected = LABELS.tolist() if values is NUMBERS else TEXTS
    assert search.EmbeddingSpace.fit(X, values[form](), score="cosine").groups == expected


@pytest.mark.parametrize("make", [lambda: np.ma.masked_array(LABELS, LABELS > 2), lambda: [True] * 47 + [False]])
def test_labels_and_groups_that_are_masked_or_boolean_are_errors(make):
    with pytest.raises(TypeError):
        metrics.retrieval_scores(X, make())
    with pytest.raises((ValueError, TypeError), match=r"groups must be (all texts or all integers|dense)"):
        search.EmbeddingSpace.fit(X, make())


SEEDED = {
    "energy_test": lambda seed: metrics.energy_test(X, NEW, seed=seed),
    "class_angles": lambda seed: metrics.class_angles(X, LABELS, max_pairs=9, seed=seed),
    "sampled_retrieval_scores": lambda seed: metrics.sampled_retrieval_scores(X, LABELS * 1.0, LABELS, seed=seed),
    "measure_order": lambda seed: astuple(prototypes.measure_order(DIFFERENT, DIFFERENT, seed=seed)),
    "place_prototypes": lambda seed: prototypes.place_prototypes(9, 3, seed=seed, progress=False).prototypes,
    "fit": lambda seed: found(search.EmbeddingSpace.fit(X, LABELS, seed=seed).search(NEW)),
    "report": lambda seed: search.report_vectors(X, LABELS, seed=seed).numbers["rows"],
    "compare": lambda seed: MANY.compare(MANY.vectors, seed=seed).p_value,
}


@pytest.mark.parametrize("name", SEEDED)
def test_an_integer_of_numpy_is_the_seed_of_the_same_number(name):
    assert flat(SEEDED[name](np.int64(3))) == flat(SEEDED[name](3))


@pytest.mark.parametrize("seed", [True, np.True_, 1.0, -1, 2**70, "1", None])
@pytest.mark.parametrize("name", SEEDED)
def test_what_is_no_seed_is_named(name, seed):
    with pytest.raises(ValueError, match="seed must be an integer from 0 to"):
        SEEDED[name](seed)
