"""The check of the installed package, `.ci/smoke.py`, runs each job and finds what fails."""

import itertools
from types import ModuleType

import pytest

EXTRA = "Error: exporting to ONNX requires onnx: pip install 'hf_sphere[onnx]'.\n"


@pytest.fixture(scope="module")
def smoke(load_file) -> ModuleType:
    return load_file(".ci/smoke.py")


def test_each_job_and_task_is_run(smoke):
    smoke.names_of_jobs([smoke.MODEL, *itertools.chain(*smoke.chains())])
    assert smoke.failures == []


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("Error: there is no file a.\n", 1),
        ("Traceback (most recent call last):\n", 0),
        ("/env/site-packages/hf_sphere/nn/layers.py:7: FutureWarning: old\n", 0),
        ("saved\nWARNING hf_sphere.training: careful\n", 0),
        ("next step recipes/search_images.py\n", 0),
        (f"one\ntwo\nthree\n{EXTRA}", 1),
    ],
)
def test_a_failure_is_found(smoke, output, status):
    assert smoke.is_failure(output, status, has_extras=False)


@pytest.mark.parametrize(("output", "status"), [("saved\n", 0), (EXTRA, 1), (f"saved\nno plots: {EXTRA}", 0)])
def test_a_missing_extra_is_no_failure(smoke, output, status):
    assert not smoke.is_failure(output, status, has_extras=False)


def test_a_missing_extra_is_a_failure_once_the_extras_are_installed(smoke):
    assert smoke.is_failure(EXTRA, 1, has_extras=True)
