"""The rejection of unknown images in a training run: its checks, its fit to the reserved images, and its report."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from hf_sphere.ood import Outputs, fit_rejection, model_outputs
from hf_sphere.ood.rejection import check_counts
from hf_sphere.utils.shared_rows import Rows, check_disjoint

if TYPE_CHECKING:
    from hf_sphere.data import ImageData
    from hf_sphere.training.run import Run


def check_reserved(images: "ImageData", level: float) -> None:
    """Raise an error if too few images are reserved for a level, or some are used otherwise."""
    reserved: Any = images.rejection
    record: Any = images.record
    rows = {key: Rows(ids, ids) for key, ids in record.ids.items()}
    try:
        check_counts((reserved.num_examples + 1) // 2, level, is_split=True)
        for key, what in {"train": "training", "validation": "validation", "eval": "evaluation"}.items():
            if key in rows:
                check_disjoint(rows["rejection"], rows[key], "images reserved for rejection", f"{what} images")
    except ValueError as error:
        raise ValueError(
            f"{error} The images of --reject are the part --rejection_fraction of the training images; for others, "
            "leave out --reject and run hf-sphere reject after the training."
        ) from error


def fit_to_reserved(
    run: "Run", images: "ImageData", level: float, calibrate: Callable[[Any], dict[str, Any]] | None, model: Any
) -> dict[str, Any]:
    """Fit a rejection to the reserved images, on all processes, before the logits are calibrated, if requested."""
    reserved: Any = images.rejection
    own = [(reserved.epoch_rows(), *model_outputs(model, reserved))] if len(reserved) else []
    rows, *values = zip(*gather_object(own), strict=True)
    order = torch.cat(rows).argsort()  # so that the halves do not depend on the number of processes
    outputs = Outputs(*(None if each[0] is None else torch.cat(each)[order] for each in values))
    fit_rejection(model, outputs, level)
    return {} if calibrate is None else calibrate(model)


def report_rejection(run: "Run", model: Any, results: Mapping[str, Any]) -> dict[str, Any]:
    """Print which rejection a trained model has, if any, and return it as further results."""
    if (settings := model.config.rejection) is None:
        return {}
    summary = f"{describe(settings)}, rejects {100 * results['eval_rejected']:.1f} % of the evaluation images"
    run.accelerator.print(f"rejection  {summary}")
    names = ("score", "level", "num_images", "ranking", "ranked_by")
    return {"rejection": {name: settings[name] for name in names if name in settings} | {"summary": summary}}


def describe(settings: Mapping[str, Any]) -> str:
    """Return the score, the level and the number of images of a rejection."""
    whose = " of each class" * settings["by_class"]
    return f"score {settings['score']} at level {100 * settings['level']:g} %{whose}, {settings['num_images']:,} images"
