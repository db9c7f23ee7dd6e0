import json
import os
import shutil
import sys

import pytest
import torch
from doubles import spy
from fresh_python import run_fresh
from transformers import AutoModelForMaskedLM, AutoTokenizer

from hf_sphere.analogies.evaluation import score_questions
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.questions import make_questions

evaluate = pytest.importorskip("evaluate")

STEM = [["word", "language"], ["hot", "cold"], ["big", "small"]]
CHOICE = [
    [["paint", "portrait"], ["note", "music"], ["tale", "story"], ["week", "year"]],
    [["up", "down"], ["sun", "moon"]],
    [["good", "bad"], ["day", "week"], ["tree", "leaf"]],
]
REFERENCES = [1, 0, 0]
GROUPS = ["parts", "opposites", "opposites"]
OPTIONS = {"scoring": "marginal_bias", "template": "she-to-as", "weight_head": 0.2, "positive_aggregation": "mean"}
QUESTIONS = {"stem": STEM, "choice": CHOICE, "references": REFERENCES}

PROGRAM = f"""
import json, sys, evaluate
metric, by_path = (evaluate.load(place) for place in sys.argv[1:3])
found = {{
    "by path": by_path.compute(model_id=sys.argv[3], **{QUESTIONS}),
    "model": metric.compute(model_id=sys.argv[3], groups={GROUPS}, **{QUESTIONS}, **{OPTIONS}),
    "plain": metric.compute(model_id=sys.argv[3], **{QUESTIONS}),
    "described": bool(metric.description and metric.citation),
}}
for reference, stem, choice in zip({REFERENCES}, {STEM}, {CHOICE}):
    metric.add(reference=reference, stem=stem, choice=choice)
found["one by one"] = metric.compute(model_id=sys.argv[3])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tiny_folder(golden_folder):
    return golden_folder / "tiny-bert"


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return AutoModelForMaskedLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="module")
def module(load_file):
    """The source of the module, not the copy made by evaluate."""
    return load_file("analogy/analogy.py")


@pytest.fixture
def metric(module, tmp_path):
    return module.Analogy(cache_dir=str(tmp_path))


def test_the_module_loads_by_name_and_path_and_matches_the_function(root, tmp_path, tiny, tiny_folder):
    program = run_fresh(
        [sys.executable, "-c", PROGRAM, "analogy", str(root / "analogy"), str(tiny_folder)],
        cwd=root,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_MODULES_CACHE": str(tmp_path), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        hugging_face=False,
    )
    assert program.returncode == 0, program.stderr
    found = json.loads(program.stdout.splitlines()[-1])
    assert found["described"]
    assert found["one by one"] == found["by path"] == found["plain"]

    questions = make_questions(STEM, CHOICE, REFERENCES)
    for name, options in (("model", OPTIONS), ("plain", {})):
        scores = score_questions(questions, LanguageModel.load(*tiny, device="cpu"), **options)
        assert found[name]["predictions"] == scores.predictions.tolist()
        assert found[name]["accuracy"] == pytest.approx(scores.accuracy(questions))
        assert found[name]["chance_level"] == pytest.approx((1 / 4 + 1 / 2 + 1 / 3) / 3)
        for costs, expected in zip(found[name]["costs"], scores.by_question(), strict=True):
            assert costs == pytest.approx(expected, rel=1e-4)
    assert "accuracy_by_group" not in found["plain"]
    assert set(found["model"]["accuracy_by_group"]) == {"parts", "opposites"}


def test_the_test_cases_of_the_space_pass(load_file, metric):
    for case in load_file("analogy/tests.py").test_cases:
        assert metric.compute(**{name: case[name] for name in case if name != "result"}) == case["result"]


@pytest.mark.filterwarnings("ignore:the tokenizer of .* does not know the words:UserWarning")
def test_a_tie_counts_one_kth(metric, tiny):
    model, tokenizer = tiny
    choice = [[["麟", "鱗"], ["鶴", "龍"]], [["鶴", "鼈"], ["鷹", "麟"], ["鮪", "鱗"]]]
    given = {"stem": [["犬", "鮪"], ["鯨", "麒"]], "choice": choice, "references": [0, 2], "groups": ["two", "three"]}
    found = metric.compute(model_id=model, tokenizer=tokenizer, **given)
    assert found["accuracy"] == pytest.approx(5 / 12) == pytest.approx(found["chance_level"])
    assert found["accuracy_by_group"] == {"three": pytest.approx(1 / 3), "two": pytest.approx(1 / 2)}


def test_a_model_id_is_reloaded_only_if_its_files_change(module, metric, tiny_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_folder, tmp_path / "model", copy_function=shutil.copyfile)
    load = spy(monkeypatch, LanguageModel, "load")
    first = metric.compute(model_id=folder, **QUESTIONS)
    assert metric.compute(model_id=str(folder), **QUESTIONS, scoring="perplexity") == first
    assert [call.args[0] for call in load.call_args_list] == [str(folder)]

    model = AutoModelForMaskedLM.from_pretrained(folder)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(folder)
    os.utime(folder / "model.safetensors", (0, 0))
    assert metric.compute(model_id=folder, **QUESTIONS)["costs"] != first["costs"]
    assert [call.args[0] for call in load.call_args_list] == [str(folder)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"references": None}, "references are missing"),
        ({"references": [1, 0, 3]}, "the question .* has the answer 3; allowed are 0 to 2"),
        ({"stem": STEM[:2]}, "Mismatch in the number of|got 2 stems"),
        ({"stem": None}, "give predictions and references, or model_id, stem, choice and references"),
        ({"choice": [*CHOICE[:2], [["a", "b"], ["c"]]]}, "a question needs pairs of two words"),
        ({"template": "is"}, "'is' is not a template. Use one of is-to-what"),
        ({"scoring": "ap"}, "scoring must be one of embedding_similarity, .*; got 'ap'"),
        ({"alpha": 0.2}, "unexpected keyword argument 'alpha'"),
        ({"predictions": [0, 0, 0]}, "do not need a model; omit model_id, tokenizer, or predictions"),
        ({"weights": 1}, "unexpected keyword argument 'weights'"),
    ],
)
def test_invalid_arguments_are_rejected(metric, tiny, change, message):
    model, tokenizer = tiny
    arguments = {"model_id": model, "tokenizer": tokenizer} | QUESTIONS | change
    with pytest.raises((ValueError, TypeError), match=message):
        metric.compute(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"predictions": [0, 4], "references": [0, 1], "choice": CHOICE[:2]}, "prediction of question 1 is 4; allowed"),
        ({"predictions": [0, 1], "references": [0, -1]}, "reference of question 1 is -1; allowed are 0 or more"),
        ({"predictions": [0, 1], "references": [0, 1], "template": "is-to-as"}, "omit template, or predictions"),
        ({"predictions": [], "references": []}, "there are no questions; give at least one"),
        ({"model_id": "any", "references": [], "stem": [], "choice": []}, "there are no questions; give at least one"),
    ],
)
def test_invalid_predictions_are_rejected(metric, arguments, message):
    with pytest.raises(ValueError, match=message):
        metric.compute(**arguments)


@pytest.mark.parametrize("indices", [[0, 1.7], ["0", "1"], [True, False]])
@pytest.mark.parametrize("name", ["predictions", "references"])
def test_indices_that_are_no_integers_are_rejected(metric, name, indices):
    with pytest.raises(TypeError, match=f"{name} must be integers"):
        metric.compute(**{"predictions": [0, 1], "references": [0, 1], name: indices})
