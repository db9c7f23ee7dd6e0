"""The jobs of the command `hf-sphere`, one file per job.

Modules of jobs import nothing heavy before their `main` has parsed the arguments, so that `--help` and a mistyped
argument return at once.
"""

import sys

JOBS = {
    "check": "print versions, extras, devices, and the pretrained weights at hand",
    "train": "train a model: classification, retrieval, regression, joint, few-shot or masked-lm",
    "predict": "classify images into a CSV or parquet file",
    "extract": "embed the images of a dataset with a trained model",
    "reject": "fit a rejection of unknown images to a classifier",
    "evaluate": "score embeddings: accuracy, calibration, retrieval, unknown inputs",
    "compare": "compare heads, losses or backbones on a dataset, with a verdict",
    "visualize": "draw embeddings as figures and an interactive page",
    "index": "embed images for search",
    "search": "find the most similar images of an index",
    "duplicates": "find near-identical images or texts, and likely wrong labels",
    "page": "serve a page to search an index",
    "report": "report what is wrong with vectors, and which remedies help",
    "export": "export a model to ONNX",
    "publish": "upload a trained model to the Hub",
    "configs": "list the configurations of the papers, or print one",
    "prepare": "convert datasets in their published layout to parquet",
    "place": "place class prototypes on the sphere",
    "analogies": "score language models on word analogies",
    "projections": "compute statistics of the hyperplane arrangements of trained layers",
    "reinitialize": "find the critical layers of a network",
}
"""What each job does."""

# Python is about to run a module of this package as a program, which only `main` and `train` are.
_started = [word.rpartition(".")[2] for word in sys.orig_argv if word.startswith(f"{__name__}.")]
if sys.argv[:1] == ["-m"] and (_job := "".join(_started[:1])) in JOBS and _job != "train":
    sys.exit(f"{__name__}.{_job} cannot be started; use hf-sphere {_job}, or python -m {__name__}.main {_job}.")
