import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import reproduce
import torch
import yaml
from fresh_python import FreshPython, run_fresh
from reproduction.entries import PlannedRun, QueueError, plan, read_queue
from reproduction.results import Results
from reproduction.runner import Job, Places, describe_device, describe_processor, hash_data

from hf_sphere.training.tasks import find_task

PLAIN, SPHERIZED = "spherization/digits-lenet5-plain", "spherization/digits-lenet5-spherized"
USUAL = {"priority": 1, "task": "classification", "configs": [PLAIN], "minutes": 1}


def queue(tmp_path, *entries: dict) -> Path:
    """Writes entries to a file, with defaults, and returns its path."""
    path = tmp_path / "queue.yaml"
    path.write_text(yaml.safe_dump([{"entry": f"entry{n}", **USUAL, **row} for n, row in enumerate(entries)]))
    return path


def only(tmp_path, **entry) -> PlannedRun:
    """The single run of an entry."""
    (run,) = plan(read_queue(queue(tmp_path, entry))[0])
    return run


def finish(results: Results, run: PlannedRun, **metrics: float) -> None:
    results.write(contents(run, **metrics))


def contents(run: PlannedRun, tuned: dict | None = None, **metrics: float) -> dict:
    content = {"name": run.name, "group": run.group, "seed": run.seed, "digest": run.digest(tuned), "metrics": metrics}
    content |= {} if metrics else {"diverged": "the loss is not finite"}
    content |= {"device": "one core", "core_minutes": 2.0, "data": {"name": "digits", "encoding": ""}}
    return {**content, "commit": "abc", "versions": {"torch": "2.0"}}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"configs": ["spherization/digits-lenet5-plane"]}, "entry0.*no configuration .*plane'; the nearest are spher"),
        ({"configs": [3]}, "entry0.*invalid configs"),
        ({"configs": ["vmf/omniglot-retrieval-vmf"]}, "entry0.*vmf.yaml is for hf-sphere train retrieval"),
        ({"overrides": {"learning_rat": 0.1}}, "entry0.*unknown argument '--learning_rat'.* mean learning_rate"),
        ({"grid": {"learning_rate": [0.1, -0.1]}}, "entry0.*learning_rate must be at least 0"),
        ({"task": "classify"}, "unknown task 'classify'; the tasks are classification"),
        ({"sedes": 3}, "unknown key 'sedes'. Did you mean seeds"),
        ({"tuned_by": "nothing"}, "tuned_by must name an entry with a grid"),
        ({"seeds": 0}, "entry0.*invalid seeds 0"),
        ({"minutes": "long"}, "entry0.*invalid minutes 'long'"),
        ({"after": ["evaluate_embeddings --embeddings x"]}, "entry0.*invalid after"),
        ({"configs": [SPHERIZED], "overrides": {"head_kwargs.scalng": 1}}, "unknown option 'scalng'.* mean scaling"),
    ],
)
def test_a_wrong_entry_is_an_error_that_names_it(tmp_path, entry, message):
    with pytest.raises(QueueError, match=message):
        read_queue(queue(tmp_path, entry))


def test_entries_are_in_order_of_priority_and_each_seed_of_all_configurations_before_the_next(tmp_path):
    entries = read_queue(queue(tmp_path, {"priority": 3}, {"priority": 1, "label": "b"}, {"priority": 2, "label": "c"}))
    assert [entry.entry for entry in entries] == ["entry1", "entry2", "entry0"]
    (entry,) = read_queue(queue(tmp_path, {"configs": [PLAIN, SPHERIZED], "first_seed": 5, "seeds": 2}))
    stems = ["digits-lenet5-plain", "digits-lenet5-spherized"]
    assert [run.name for run in plan(entry)] == [f"{stem}-seed{seed}" for seed in (5, 6) for stem in stems]


def test_an_option_of_a_mapping_is_merged_into_the_configuration(tmp_path):
    run = only(tmp_path, configs=[SPHERIZED], grid={"head_kwargs.scaling": [2.0]})
    assert run.overrides() == {"head_kwargs": {"scaling": 2.0, "radius": 5.0}}
    assert run.group == "digits-lenet5-spherized-scaling2.0"


def test_later_configurations_of_a_combination_take_precedence(tmp_path):
    run = only(tmp_path, configs=["hyperplanes/cifar10-lenet9 + hyperplanes/corruptions/label_noise-1.0"])
    assert run.group == "cifar10-lenet9-label_noise-1.0"
    assert run.arguments()[:4] == [
        *("--config", "hyperplanes/cifar10-lenet9"),
        *("--config", "hyperplanes/corruptions/label_noise-1.0"),
    ]


def test_the_digest_changes_with_the_numerics_of_the_task_and_not_with_arguments_without_effect(tmp_path, monkeypatch):
    before = only(tmp_path).digest()
    assert only(tmp_path, overrides={"save_epochs": 7, "output_dir": "elsewhere"}).digest() == before
    monkeypatch.setattr(find_task("classification"), "numerics", 1000)
    assert only(tmp_path).digest() != before


def test_a_finished_run_is_done_and_one_of_other_settings_is_stale(tmp_path):
    entries, results = read_queue(queue(tmp_path, {})), Results(tmp_path)
    (run,) = plan(entries[0])
    assert results.state(run, entries) == "missing"
    finish(results, run, eval_accuracy=0.9)
    assert (Results.read(tmp_path).state(run, entries), results.stale(entries)) == ("done", [])
    changed = read_queue(queue(tmp_path, {"overrides": {"learning_rate": 0.5}}))
    assert results.state(plan(changed[0])[0], changed) == "stale"
    assert results.stale(changed) == results.stale(read_queue(queue(tmp_path, {"label": "other"}))) == [run.name]


def test_damaged_and_misnamed_results_are_named_and_the_others_used(tmp_path):
    runs = plan(read_queue(queue(tmp_path, {"seeds": 2}))[0])
    results = Results(tmp_path)
    for run in runs:
        finish(results, run, eval_accuracy=0.9)
    good, bad = (tmp_path / f"{run.name}.json" for run in runs)
    (tmp_path / "other.json").write_text(good.read_text())
    (tmp_path / "list.json").write_text("[]")
    bad.write_text(bad.read_text()[:50])
    (tmp_path / "text.json").write_text(good.read_text().replace("0.9", '"high"'))
    read = Results.read(tmp_path)
    assert set(read.runs) == {runs[0].name}
    for name, problem in zip((bad.name, "list.json", "other.json", "text.json"), read.problems, strict=True):
        assert str(tmp_path / name) in problem
    assert "has the results of digits-lenet5-plain-seed0" in read.problems[2]


def test_a_tuning_without_the_selection_metric_is_an_error(tmp_path):
    tuning = {"entry": "tune", "label": "tuning", "grid": {"learning_rate": [0.1]}}
    entries = read_queue(queue(tmp_path, tuning, {"tuned_by": "tune", "priority": 2}))
    results = Results(tmp_path)
    finish(results, plan(entries[0])[0], eval_accuracy=0.9)
    with pytest.raises(QueueError, match="has no validation_accuracy; it has eval_accuracy"):
        results.state(plan(entries[1])[0], entries)


@pytest.mark.parametrize("metric", ["validation_accuracy", "validation_loss"])
def test_tuned_runs_wait_for_the_tuning_and_get_its_best_values(tmp_path, metric):
    tuning = {"priority": 1, "label": "tuning", "grid": {"learning_rate": [0.1, 0.2, 0.3]}, "seeds": 2}
    tuned = {"priority": 2, "tuned_by": "tune", "selection_metric": metric}
    entries = read_queue(queue(tmp_path, {**tuning, "entry": "tune"}, tuned))
    (run,) = plan(entries[1])
    results = Results(tmp_path)
    # 0.2 has the best single value, 0.1 the best mean, and 0.3 diverged once.
    scores = {0.1: [0.8, 0.8], 0.2: [0.9, 0.6], 0.3: [0.85, None]}
    *first, last = plan(entries[0])
    for candidate in [*first, last]:
        if candidate is last:
            assert results.state(run, entries) == "waiting"
        score = scores[candidate.grid["learning_rate"]][candidate.seed]
        value = score if score is None or metric == "validation_accuracy" else 1 - score
        finish(results, candidate, **({} if score is None else {metric: value}))
    assert results.state(run, entries) == "missing"
    assert results.tuned(run, entries) == {"learning_rate": 0.1}


def test_each_value_of_a_grid_of_its_own_is_tuned_separately(tmp_path):
    own = {"configs": [SPHERIZED], "grid": {"head_kwargs.scaling": [1.0, 2.0]}}
    tuning = {**own, "entry": "tune", "label": "tuning", "grid": {"learning_rate": [0.1, 0.2], **own["grid"]}}
    entries = read_queue(queue(tmp_path, tuning, {**own, "tuned_by": "tune", "priority": 2}))
    results = Results(tmp_path)
    for candidate in plan(entries[0]):
        best = {1.0: 0.1, 2.0: 0.2}[candidate.grid["head_kwargs.scaling"]]
        finish(results, candidate, validation_accuracy=0.9 if candidate.grid["learning_rate"] == best else 0.8)
    assert [results.tuned(run, entries)["learning_rate"] for run in plan(entries[1])] == [0.1, 0.2]


def test_a_second_queue_takes_other_runs(tmp_path):
    entries = read_queue(queue(tmp_path, {"configs": [PLAIN, SPHERIZED]}))
    first, second = (Results(tmp_path), Results(tmp_path))
    taken, other = plan(entries[0])
    lock = first.lock(taken)
    assert second.lock(taken) is None
    assert reproduce.state_of(taken, entries, second) == "running"
    assert second.lock(other) is not None
    lock.close()
    assert reproduce.state_of(taken, entries, second) == "missing"


def finished_job(run: PlannedRun, tuned: dict, lock: Any, places: Places) -> Any:
    """A job that ends at once."""
    job = create_autospec(Job, instance=True, run=run)
    job.poll.return_value, job.collect.return_value, job.unlock = "finished", contents(run, {}), lock.close
    return job


def run_queue(tmp_path, entries) -> reproduce.Queue:
    started = reproduce.Queue(entries, Results(tmp_path), Places(tmp_path, None), 1, "cpu")
    started.run(1)
    return started


def test_runs_that_another_queue_has_locked_are_named_and_entries_of_another_device_left_out(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(reproduce, "Job", finished_job)
    entries = read_queue(queue(tmp_path, {"device": "gpu"}, {"label": "b"}))
    with Results(tmp_path).lock(plan(entries[1])[0]):
        assert list(run_queue(tmp_path, entries).results.runs) == []
    assert "in progress in another queue: digits-lenet5-plain-b-seed0." in capsys.readouterr().out
    assert list(run_queue(tmp_path, entries).results.runs) == ["digits-lenet5-plain-b-seed0"]


def test_the_hash_of_the_data_depends_on_names_and_contents_of_its_files(tmp_path):
    folders = [tmp_path / name for name in ("a", "copy", "renamed", "changed")]
    for folder, name, content in zip(folders, ("x", "x", "y", "x"), (b"1", b"1", b"1", b"2"), strict=True):
        (folder / "data").mkdir(parents=True)
        (folder / "data" / name).write_bytes(content)
    first, copy, *others = [hash_data(str(folder)) for folder in folders]
    assert first == copy not in others
    assert (len(first), hash_data("digits")) == (64, "")


def test_the_processor_has_its_name_and_numbers_and_a_gpu_is_recorded_instead(monkeypatch):
    text = "cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel Xeon\nstepping\t: 8\nmodel name\t: Intel Xeon\n"
    monkeypatch.setattr(Path, "read_text", lambda *args, **options: text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert describe_processor() == "Intel Xeon, family 6, model 143, stepping 8"
    assert describe_device() == "one core of Intel Xeon"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert describe_device() == "NVIDIA H200"


def one_thread() -> dict[str, str]:
    """Return the environment of a queue and its runs."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """A queue of one run that is interrupted after a checkpoint, killed after another, and then runs to its end."""
    folder = tmp_path_factory.mktemp("disturbed")
    after = [
        "extract --model_name_or_path {model} --dataset_name digits --output_dir {folder}/test",
        "evaluate --embeddings {folder}/test --output_dir {folder}/scores",
    ]
    path, model = folder / "queue.yaml", folder / "work" / "digits-lenet5-plain-seed0" / "model"
    overrides = {"num_train_epochs": 8, "save_epochs": 1, "max_eval_samples": 60}
    path.write_text(yaml.safe_dump([{**USUAL, "entry": "entry0", "overrides": overrides, "after": after}]))
    (run,) = plan(read_queue(path)[0])
    program = [sys.executable, reproduce.__file__, "--queue", path, "--jobs", "1"]
    program += ["--results_dir", folder / "results", "--work_dir", folder / "work", "--device", "cpu"]
    seen = SimpleNamespace(run=run)
    with start_until_checkpoint(program, model) as interrupted:
        interrupted.terminate()
        seen.printed = interrupted.communicate(timeout=120)[0]
    seen.results = [*(folder / "results").glob("*.json")]
    with start_until_checkpoint(program, model) as killed:
        os.killpg(killed.pid, signal.SIGKILL)
    while (lock := Results(folder / "results").lock(run)) is None:  # until the last killed process has ended
        time.sleep(0.01)
    with lock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "_start_next", lambda self: None)
        seen.resumed_words = Job(run, {}, lock, Places(folder / "work", None))._commands[0]
    seen.checkpoints = [*model.glob("checkpoint-*")]
    run_fresh(program, check=True, timeout=600, env=one_thread())
    seen.content = json.loads((folder / "results" / "digits-lenet5-plain-seed0.json").read_text())
    return seen


def start_until_checkpoint(program: list, model: Path) -> FreshPython:
    """Start a queue and wait until its run has written a new checkpoint."""
    before = set(model.glob("checkpoint-*"))
    options = {"start_new_session": True, "stdout": subprocess.PIPE, "text": True, "env": one_thread()}
    started = FreshPython(program, **options)
    while not set(model.glob("checkpoint-*")) - before:
        assert started.poll() is None
        time.sleep(0.01)
    return started


@pytest.mark.slow
def test_an_interrupted_queue_stops_its_run_without_a_result_and_a_killed_one_resumes(disturbed):
    assert ("stopped   digits-lenet5-plain-seed0" in disturbed.printed, disturbed.results) == (True, [])
    assert "--resume_from_checkpoint" in disturbed.resumed_words
    assert disturbed.checkpoints


@pytest.mark.slow
def test_a_result_has_the_metrics_of_later_steps_all_definitions_and_the_processor(disturbed):
    content = disturbed.content
    assert set(content["metrics"]) <= set(content["definitions"])
    assert "scores/eval_recall_at_1" in content["metrics"]
    last = content["history"]["eval_accuracy"][-2:]
    assert content["metrics"]["eval_accuracy_last_quarter"] == pytest.approx(sum(last) / 2)
    assert (content["threads"], content["processor"] != "", content["data_hash"]) == (1, True, "")


@pytest.mark.slow
def test_an_interrupted_and_killed_queue_gets_the_metrics_of_an_undisturbed_run(disturbed, tmp_path):
    script, words = reproduce.ROOT / disturbed.run.script, disturbed.run.arguments()
    words += ["--dataset_name", "digits", "--output_dir", tmp_path / "whole", "--disable_tqdm"]
    run_fresh([sys.executable, script, *words], check=True, env=one_thread())
    whole = json.loads((tmp_path / "whole" / "all_results.json").read_text())
    added = re.compile("/|train_runtime|_last_quarter")
    resumed = {name: value for name, value in disturbed.content["metrics"].items() if not added.search(name)}
    assert resumed == {name: whole[name] for name in resumed}
    assert "eval_accuracy" in resumed
