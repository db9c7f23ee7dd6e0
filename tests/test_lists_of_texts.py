"""A single text where a list of texts is taken: its letters are never the items."""

import collections.abc
import pkgutil
import types
from typing import Any, Union, get_args, get_origin
from unittest import mock

import pytest
import torch
from public_parameters import public_parameters

import hf_sphere
from hf_sphere import analogies, comparison, data, hyperplanes, models, prototypes, search, training, visualization

X, LABELS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
PAIRS = [("dog", "puppy"), ("cow", "calf")]
ENCODER = mock.Mock(embeds_texts=True)
PANEL = {"mine": visualization.Panel(X, LABELS)}


def write(**names: str) -> None:
    with search.embeddings_writer("missing", "test", {}, **names):
        raise AssertionError


def find(classes: Any) -> Any:
    return search.ImageIndex.search(mock.Mock(), X, 1, classes=classes)


def task(**metrics: Any) -> training.Task:
    return training.Task("", (), lambda: None, "accuracy", **{"headline": (), **metrics})


CASES = {
    "analogies.Question.stem": lambda x: analogies.Question(x, (PAIRS[0],)),
    "analogies.Question.choices": lambda x: analogies.Question(PAIRS[0], x),
    "analogies.make_questions.stems": lambda x: analogies.make_questions(x, [PAIRS, PAIRS]),
    "analogies.make_questions.choices": lambda x: analogies.make_questions(PAIRS, x),
    "comparison.pseudo_values.ids": lambda x: comparison.pseudo_values(lambda rows: 0.0, x),
    "data.ImageDataOptions.class_names": lambda x: data.ImageDataOptions("digits", streaming=True, class_names=x),
    "hyperplanes.reinitialization_robustness.snapshots": lambda x: hyperplanes.reinitialization_robustness(
        torch.nn.Linear(2, 2), x, lambda model: 0.0
    ),
    "models.fit_spherization.texts": lambda x: models.fit_spherization(None, None, x),
    "prototypes.embed_class_names.class_names": lambda x: prototypes.embed_class_names(x, "missing"),
    "prototypes.place_prototypes.class_names": lambda x: prototypes.place_prototypes(2, 2, class_names=x),
    "search.ImageEncoder.encode_texts.texts": lambda x: search.ImageEncoder.encode_texts(ENCODER, x),
    "search.ImageIndex.build.columns": lambda x: search.ImageIndex.build(None, X, columns=x),
    "search.ImageIndex.search.classes": find,
    "search.ImageIndex.search_texts.classes": find,
    "search.ImageIndex.search_texts.texts": lambda x: search.ImageIndex.search_texts(mock.Mock(), x),
    "search.ImageSource.with_columns.columns": lambda x: search.ImageSource.of(X, content="vector").with_columns(
        None, x
    ),
    "search.TextEncoder.encode_texts.texts": lambda x: search.TextEncoder.encode_texts(ENCODER, x),
    "search.embeddings_writer.class_names": lambda x: write(class_names=x),
    "search.embeddings_writer.predicted_names": lambda x: write(predicted_names=x),
    "search.read_embeddings.needed": lambda x: search.read_embeddings("missing", needed=x),
    "training.RecipeArguments.report_to": lambda x: training.RecipeArguments(output_dir="missing", report_to=x),
    "training.Task.headline": lambda x: task(headline=x),
    "training.Task.unused": lambda x: task(unused=x),
    "visualization.plot_circle.class_names": lambda x: visualization.plot_circle(X, LABELS, x),
    "visualization.plot_gallery.class_names": lambda x: visualization.plot_gallery(PANEL, x, dim=3),
    "visualization.plot_sphere.class_names": lambda x: visualization.plot_sphere(X, LABELS, x),
    "visualization.write_interactive_sphere.class_names": lambda x: visualization.write_interactive_sphere(
        "missing", X, LABELS, x
    ),
    "visualization.write_interactive_sphere.texts": lambda x: visualization.write_interactive_sphere(
        "missing", X[:2], LABELS[:2], ["a", "b"], texts=x
    ),
}

RETURNED = {"Embeddings", "Evaluation", "ImageData", "ImageIndex", "ImageSource", "ImageSplit", "Placement"} | {
    "ReinitializationRobustness",
    "VectorReport",
}
"""Classes that functions return, and no caller makes."""

OTHERS = {"architectures": "of transformers", "layer_types": "of transformers", "needs": "what a score states"}

LISTS = (collections.abc.Iterable, collections.abc.Sequence, collections.abc.Collection, list, tuple, set)


def takes_texts(annotation: Any) -> bool:
    """Whether an annotation is of a list of texts, at any depth, and not of a single text too."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return str not in arguments and any(map(takes_texts, arguments))
    return origin in LISTS and any(each is str or takes_texts(each) or is_optional(each) for each in arguments)


def is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType) and str in get_args(annotation)


def test_every_parameter_that_takes_a_list_of_texts_is_in_the_table():
    packages = {module.name for module in pkgutil.iter_modules(hf_sphere.__path__)} - {"commands", "utils"}
    given = (name for name, each in public_parameters(packages, records=True) if takes_texts(each.annotation))
    found = {name for name in given if name.split(".")[1:-1] not in [[each] for each in RETURNED]}
    assert {name for name in found if name.rsplit(".", 1)[1] not in OTHERS} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_single_text_instead_of_a_list_is_an_error(name):
    with pytest.raises((TypeError, ValueError)) as caught:
        CASES[name]("ab")
    assert any(text in str(caught.value) for text in ("must be a list", "needs pairs of two words")), caught
