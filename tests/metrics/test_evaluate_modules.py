import json
import os
import sys

import pytest
import torch
from fresh_python import run_fresh

from hf_sphere.metrics import calibration_errors, retrieval_scores

pytest.importorskip("evaluate")

CONFIDENCES = [0.9, 0.9, 0.6, 0.6, 0.55]
CORRECT = [True, True, True, False, False]
EMBEDDINGS = [[1.0, 0.0], [0.9, 0.2], [0.0, 1.0], [0.1, 1.0], [0.5, 0.6]]
LABELS = [0, 0, 1, 1, 1]
PRECISE = [[16777217.0], [16777218.0], [16777219.2], [16777220.0]]  # float32 rounds them

PROGRAM = f"""
import json, sys, evaluate, torch
confidences, correct, embeddings, labels = {CONFIDENCES}, {CORRECT}, {EMBEDDINGS}, {LABELS}
calibration, retrieval = (evaluate.load(path) for path in sys.argv[1:])
found = {{
    "calibration": calibration.compute(confidences=confidences, correct=correct),
    "retrieval": retrieval.compute(embeddings=embeddings, labels=labels, distance="euclidean", ks=[1, 2]),
    "precise": retrieval.compute(embeddings={PRECISE}, labels=[0, 0, 1, 1], distance="euclidean"),
    "tensors": retrieval.compute(embeddings=torch.tensor(embeddings), labels=torch.tensor(labels)),
    "described": [bool(module.description and module.citation) for module in (calibration, retrieval)],
}}
for number in range(5):
    calibration.add(confidences=confidences[number], correct=correct[number])
found["one by one"] = calibration.compute()
combined = evaluate.combine([calibration, evaluate.load(sys.argv[1])])
found["combined"] = combined.compute(predictions=confidences, references=correct)
combined.add_batch(predictions=confidences, references=correct)
combined.add(prediction=0.5, reference=True)
found["in parts"] = len(combined.evaluation_modules[0].compute())
found["general names"] = retrieval.compute(predictions=embeddings, references=labels)
try:
    calibration.compute(confidences=confidences, correct=correct, predictions=confidences)
except ValueError as error:
    found["twice"] = str(error)
found["refused"] = []
for module, references in [(calibration, correct_or_not) for correct_or_not in ([2, 0, 1, 1, 0], [0.9, 0, 1, 1, 1])] + [
    (retrieval, wrong) for wrong in ([0.5, 0, 1, 1, 1], [*"00111"], [True, False] * 2 + [True])
]:
    try:
        module.compute(predictions=confidences if module is calibration else embeddings, references=references)
    except (TypeError, ValueError) as error:
        found["refused"].append(str(error).split(";")[0])
try:
    retrieval.add(prediction=embeddings[0], reference=0.5)
except TypeError as error:
    found["refused"].append(str(error).split(";")[0])
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=["from the root", "by absolute path"])
def found(request, root, tmp_path_factory):
    """Results of the modules in a separate process with temporary caches."""
    home = tmp_path_factory.mktemp("home")
    folders = ["evaluate_modules/calibration_error", "evaluate_modules/retrieval_scores"]
    from_root = request.param == "from the root"
    program = run_fresh(
        [sys.executable, "-c", PROGRAM, *(folders if from_root else [str(root / folder) for folder in folders])],
        cwd=root if from_root else home,
        env={**os.environ, "HF_HOME": str(home), "HF_MODULES_CACHE": str(home), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        hugging_face=False,
    )
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout.splitlines()[-1])


def test_calibration_errors_match_the_function(found):
    expected = calibration_errors(torch.tensor(CONFIDENCES, dtype=torch.float64), torch.tensor(CORRECT))
    assert found["calibration"] == pytest.approx(expected)
    assert found["one by one"] == pytest.approx(expected)


def test_retrieval_scores_match_the_function_with_the_precision_of_embeddings(found):
    embeddings, labels = torch.tensor(EMBEDDINGS), torch.tensor(LABELS)
    assert found["retrieval"] == pytest.approx(retrieval_scores(embeddings, labels, distance="euclidean", ks=(1, 2)))
    assert found["tensors"] == pytest.approx(retrieval_scores(embeddings, labels))
    assert found["precise"]["recall_at_1"] == 1.0


def test_predictions_and_references_are_names_of_both_inputs(found):
    expected = calibration_errors(torch.tensor(CONFIDENCES, dtype=torch.float64), torch.tensor(CORRECT))
    for number in range(2):
        of_one = {name: found["combined"][f"calibration_error_{number}_{name}"] for name in expected}
        assert of_one == pytest.approx(expected)
    assert found["in parts"] == 2
    assert found["general names"] == found["tensors"]
    assert found["twice"] == "predictions are given under two names; give one of them."


def test_references_that_are_no_classes_and_not_right_or_wrong_are_refused(found):
    assert found["refused"] == ["correct must be boolean, or 0 and 1"] * 2 + ["labels must be integers"] * 4


def test_modules_have_a_description_and_a_card(found, root):
    assert found["described"] == [True, True]
    for folder in ("calibration_error", "retrieval_scores"):
        card = (root / "evaluate_modules" / folder / "README.md").read_text().split("---\n")[1]
        assert "- evaluate\n- metric\n" in card
