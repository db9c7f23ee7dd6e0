"""Metric of `evaluate` for word analogies, answered by a language model or given as predictions."""

import functools
import os
from typing import Any

import datasets
import evaluate

from hf_sphere.analogies.evaluation import score_questions
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.questions import make_questions
from hf_sphere.geometry.checks import check_labels

_DESCRIPTION = """
Accuracy on word analogies: which pair of words has the same relation as a given pair? A language model scores a
sentence for each choice.
"""

_KWARGS_DESCRIPTION = """
Args:
    references (list of int): Index of the correct choice of each question, from 0.
    stem (list of pairs of str): The pair (a, b) of each question.
    choice (list of lists of pairs of str): The candidate pairs (c, d) of each question.
    groups (list of str): Kind of relation of each question, for the accuracy by group.
    model_id (str or model): Hub id or folder of a masked, causal or embedding model, or a model of transformers.
    tokenizer: Tokenizer of the model; by default that of the id.
    predictions (list of int): Predictions, instead of a model.
    scoring (str): "perplexity" (default), "marginal_bias", "pmi", "hypothesis_bias" or "embedding_similarity".
    template (str): "is-to-what" (default), "is-to-as", "rel-same", "what-is-to", "she-to-as", "as-what-same", or a text
        with the fields {a}, {b}, {c} and {d}.
    positive_aggregation (str): Over the 8 permutations in which the analogy holds: "mean", "max", "min" or
        "index_0" (default) to "index_7".
    negative_aggregation (str): Over the 16 others: "mean", "max", "min" or "index_0" (default) to "index_15".
    negative_weight (float): Weight of the negative permutations; 0 by default.
    weight_head (float): Weight of the head in "marginal_bias" and "hypothesis_bias"; 0 by default.
    weight_tail (float): Weight of the tail, likewise.
    alpha (float): Weight of the marginal term in "pmi"; 0 by default.
    pmi_aggregation (str): Of the two terms of "pmi": "mean" (default), "max", "min", "index_0" or "index_1".
    batch_size (int): Sequences per batch; chosen for speed by default.
    device (str): Device of the model; by default the accelerator if there is one.

Returns:
    accuracy (float): Share of correct predictions; with a model, a tie of k choices counts 1/k.
    chance_level (float): Expected accuracy of guessing; if the choices are given.
    accuracy_by_group (dict): Accuracy by group; if groups are given.
    predictions (list of int): The predictions.
    costs (list of lists of float): Cost of each choice, lower is better; with a model.

Examples:
    >>> metric = evaluate.load("analogy")
    >>> metric.compute(predictions=[1, 0], references=[1, 2])
    {'accuracy': 0.5, 'predictions': [1, 0]}
    >>> result = metric.compute(  # doctest: +SKIP
    ...     model_id="bert-base-cased",
    ...     stem=[["word", "language"]],
    ...     choice=[[["paint", "portrait"], ["note", "music"]]],
    ...     references=[1],
    ... )
"""

_CITATION = """
@inproceedings{ushio2021bert,
  title = {{BERT} is to {NLP} what {AlexNet} is to {CV}: Can Pre-Trained Language Models Identify Analogies?},
  author = {Ushio, Asahi and Espinosa-Anke, Luis and Schockaert, Steven and Camacho-Collados, Jose},
  booktitle = {ACL},
  year = {2021}
}
"""

_EMPTY = {"predictions": None, "references": None, "stem": None, "choice": None, "groups": ""}


@functools.lru_cache(maxsize=1)  # one, since two may not fit in memory
def _load(name: str, files: tuple[tuple[str, int], ...], tokenizer: Any, device: str | None) -> LanguageModel:
    return LanguageModel.load(name, tokenizer, device=device)


def _load_once(model: Any, tokenizer: Any, device: str | None) -> LanguageModel:
    """Load a model, or return the last loaded one if its name and the files in its folder are unchanged."""
    if not isinstance(model, (str, os.PathLike)):
        return LanguageModel.load(model, tokenizer, device=device)
    name = os.fspath(model)
    entries = sorted(os.scandir(name), key=lambda entry: entry.name) if os.path.isdir(name) else []
    return _load(name, tuple((entry.name, entry.stat().st_mtime_ns) for entry in entries), tokenizer, device)


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class Analogy(evaluate.Metric):
    """Wraps `hf_sphere.analogies.score_questions`."""

    def _info(self) -> evaluate.MetricInfo:
        pair = datasets.List(datasets.Value("string"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {
                    "predictions": datasets.Value("int64"),
                    "references": datasets.Value("int64"),
                    "stem": pair,
                    "choice": datasets.List(pair),
                    "groups": datasets.Value("string"),
                }
            ),
        )

    # All inputs except the references are optional, which evaluate does not support: empty columns replace them.

    def compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, Any] | None:
        """See `evaluate.EvaluationModule.compute`."""
        inputs = dict.fromkeys(self._feature_names()) | kwargs
        return super().compute(**(inputs | {"predictions": predictions, "references": references}))

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """See `evaluate.EvaluationModule.add_batch`."""
        columns = {"predictions": predictions, "references": references, **kwargs}
        _check_indices(predictions=predictions, references=references)
        length = next((len(column) for column in columns.values() if column is not None), 0)
        empty = {name: [value] * length for name, value in _EMPTY.items()}
        super().add_batch(**(empty | {name: column for name, column in columns.items() if column is not None}))

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """See `evaluate.EvaluationModule.add`."""
        values = {name: value for name, value in kwargs.items() if value is not None}
        _check_indices(prediction=[prediction], reference=[reference])
        empty = {name: value for name, value in _EMPTY.items() if name not in ("predictions", "references")}
        super().add(prediction=prediction, reference=reference, **(empty | values))

    def _compute(
        self,
        predictions: list[int | None],
        references: list[int | None],
        stem: list[list[str] | None],
        choice: list[list[list[str]] | None],
        groups: list[str],
        model_id: Any = None,
        tokenizer: Any = None,
        scoring: str | None = None,
        template: str | None = None,
        positive_aggregation: str | None = None,
        negative_aggregation: str | None = None,
        negative_weight: float | None = None,
        weight_head: float | None = None,
        weight_tail: float | None = None,
        alpha: float | None = None,
        pmi_aggregation: str | None = None,
        batch_size: int | None = None,
        device: str | None = None,
    ) -> dict[str, Any]:
        if not references:
            raise ValueError("there are no questions; give at least one, with the index of its correct choice.")
        if None in references:
            raise ValueError("references are missing; give the index of the correct choice of each question, from 0.")
        options = {
            "scoring": scoring,
            "template": template,
            "positive_aggregation": positive_aggregation,
            "negative_aggregation": negative_aggregation,
            "negative_weight": negative_weight,
            "weight_head": weight_head,
            "weight_tail": weight_tail,
            "alpha": alpha,
            "pmi_aggregation": pmi_aggregation,
            "batch_size": batch_size,
        }
        options = {name: value for name, value in options.items() if value is not None}
        of_model = {"model_id": model_id, "tokenizer": tokenizer, "device": device}
        result: dict[str, Any] = {}
        if None not in predictions:
            unused = [*options, *(name for name, value in of_model.items() if value is not None)]
            if unused:
                raise ValueError(f"predictions do not need a model; omit {', '.join(unused)}, or predictions.")
            _check_numbers(references, predictions, choice)
            correct = [answer == prediction for answer, prediction in zip(references, predictions, strict=True)]
        else:
            if model_id is None or None in stem or None in choice:
                raise ValueError(
                    "give predictions and references, or model_id, stem, choice and references; one of them is "
                    "missing, or is None for a question."
                )
            questions = make_questions(stem, choice, references)
            scores = score_questions(questions, _load_once(model_id, tokenizer, device), **options)
            predictions, correct = scores.predictions.tolist(), scores.correct(questions).tolist()
            result["costs"] = scores.by_question()
        result |= {"accuracy": _mean(correct), "predictions": predictions}
        if None not in choice:
            result["chance_level"] = _mean([1 / len(pairs) for pairs in choice])
        if any(groups):
            result["accuracy_by_group"] = {
                name: _mean([right for right, group in zip(correct, groups, strict=True) if group == name])
                for name in sorted(set(groups))
            }
        return result


def _check_indices(**columns: Any) -> None:
    """Raise a TypeError for indices that are no integers: evaluate would round fractions and parse texts."""
    for name, values in columns.items():
        if given := [value for value in (() if values is None else values) if value is not None]:
            check_labels(given, len(given), name)


def _check_numbers(references: list[int], predictions: list[int], choice: list[list[list[str]] | None]) -> None:
    """Raise a ValueError if an index is out of range."""
    for index, (answer, prediction, pairs) in enumerate(zip(references, predictions, choice, strict=True)):
        for name, value in (("reference", answer), ("prediction", prediction)):
            if value < 0 or (pairs is not None and value >= len(pairs)):
                allowed = "0 or more" if pairs is None else f"0 to {len(pairs) - 1}"
                raise ValueError(f"the {name} of question {index} is {value}; allowed are {allowed}.")


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)
