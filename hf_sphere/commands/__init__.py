"""The jobs of the command `hf-sphere`, one file per job.

Modules of jobs import nothing heavy before their `main` has parsed the arguments, so that `--help` and a mistyped
argument return at once.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """A job of the command."""

    summary: str  # what it does
    stopped: str = "files and checkpoints that were finished are complete"  # printed if the user interrupts it
    environment: Mapping[str, str] = field(default_factory=dict)  # set before torch is imported, see `run_main`


# A thread of the model that waits for work leaves its core to the decoding processes.
_DECODING = {"OMP_WAIT_POLICY": "passive"}

JOBS = {
    "check": Job("print versions, extras, devices, and the pretrained weights at hand"),
    "train": Job("train a model: classification, retrieval, regression, joint, few-shot or masked-lm"),
    "predict": Job("classify images into a CSV or parquet file", "repeat the command to continue", _DECODING),
    "extract": Job("embed the images of a dataset with a trained model", "nothing was written"),
    "reject": Job("fit a rejection of unknown images to a classifier", "nothing was written"),
    "evaluate": Job("score embeddings: accuracy, calibration, retrieval, unknown inputs", "no results were written"),
    "compare": Job(
        "compare heads, losses or backbones on a dataset, with a verdict",
        "finished runs are kept; the same command resumes",
    ),
    "visualize": Job("draw embeddings as figures and an interactive page"),
    "index": Job("embed images for search", environment=_DECODING),
    "search": Job("find the most similar images of an index"),
    "duplicates": Job("find near-identical images or texts, and likely wrong labels"),
    "page": Job("serve a page to search an index", "the page is closed"),
    "report": Job("report what is wrong with vectors, and which remedies help"),
    "export": Job("export a model to ONNX"),
    "publish": Job("upload a trained model to the Hub", "nothing was uploaded"),
    "configs": Job("list the configurations of the papers, or print one"),
    "prepare": Job("convert datasets in their published layout to parquet", "nothing was written"),
    "place": Job("place class prototypes on the sphere"),
    "analogies": Job("score language models on word analogies", "no results were written"),
    "projections": Job("compute statistics of the hyperplane arrangements of trained layers"),
    "reinitialize": Job(
        "find the critical layers of a network",
        "finished accuracies are saved; the same command, without --overwrite_output_dir, resumes",
    ),
}

# Python is about to run a module of this package as a program, which only `main` and `train` are.
_started = [word.rpartition(".")[2] for word in sys.orig_argv if word.startswith(f"{__name__}.")]
if sys.argv[:1] == ["-m"] and (_job := "".join(_started[:1])) in JOBS and _job != "train":
    sys.exit(f"{__name__}.{_job} cannot be started; use hf-sphere {_job}, or python -m {__name__}.main {_job}.")
