import json

import on_gpu
import pytest


def measure(tmp_path, monkeypatch, names, outcomes, minutes=60.0):
    """Measure parts whose outcomes are given; return the parts that ran, and the file."""
    path = tmp_path / "on_gpu.json"
    ran = []
    monkeypatch.setattr(on_gpu, "run_part", lambda name, *_: ran.append(name) or outcomes[name])
    on_gpu.measure_parts(names, "pretend", minutes, path)
    return ran, json.loads(path.read_text("utf-8"))


ROWS = [{"what": "time", "value": 2.0}]
FAILED = "No module named 'datasets'"


def parts_of(content):
    return [row["part"] for row in content["rows"]]


def test_a_finished_part_is_not_repeated_and_a_failed_one_is_tried_again(tmp_path, monkeypatch):
    names = ["spherize", "losses", "queue"]
    _, first = measure(tmp_path, monkeypatch, names, {"spherize": ROWS, "losses": FAILED, "queue": ROWS})
    assert (parts_of(first), first["not measured"]) == (["spherize", "queue"], {"losses": FAILED})
    ran, second = measure(tmp_path, monkeypatch, names, {"losses": ROWS, "queue": ROWS})
    assert ran == ["losses", "queue"]
    assert (sorted(parts_of(second)), second["not measured"]) == (["losses", "queue", "spherize"], {})


def test_the_file_has_the_rows_that_were_measured_before_an_error(tmp_path, monkeypatch):
    with pytest.raises(KeyError):
        measure(tmp_path, monkeypatch, ["spherize", "losses"], {"spherize": ROWS})
    assert parts_of(measure(tmp_path, monkeypatch, ["losses"], {"losses": FAILED})[1]) == ["spherize"]


def test_a_part_for_which_no_time_is_left_is_not_started(tmp_path, monkeypatch):
    ran, found = measure(tmp_path, monkeypatch, ["queue", "vmf_kernels"], {"vmf_kernels": ROWS}, minutes=1)
    assert ran == ["vmf_kernels"]
    assert found["not measured"] == {"queue": "60 s were left, 180 s are needed"}
