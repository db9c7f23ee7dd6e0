"""The image-classification pipeline of transformers, which returns `unknown` for images that a model rejects."""

from typing import Any

from transformers import ImageClassificationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from hf_sphere.utils.modules import eval_mode


class RejectingPipeline(ImageClassificationPipeline):
    """A pipeline for models with a rejection, whose results have a `p_value`; others get that of transformers.

    A class can have the name `unknown` too: the p-value of a rejected image is at most the level.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the pipeline that fits the model."""
        model = kwargs.get("model", args[0] if args else None)
        if model is not None and getattr(model, "rejection", None) is None:  # None for a copy
            return ImageClassificationPipeline(*args, **kwargs)
        return super().__new__(cls)

    def _forward(self, model_inputs: Any) -> Any:
        with eval_mode(self.model):  # a model in training mode, as after a `Trainer`, rejects nothing
            return super()._forward(model_inputs)

    def postprocess(self, model_outputs: Any, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Return the classes, or for an unknown image its p-value alone."""
        if model_outputs.get("known") is None:  # the rejection was removed
            return super().postprocess(model_outputs, *args, **kwargs)
        p_value = model_outputs["p_value"].item()
        if not model_outputs["known"].item():
            return [{"label": "unknown", "score": p_value, "p_value": p_value}]
        return [entry | {"p_value": p_value} for entry in super().postprocess(model_outputs, *args, **kwargs)]


PIPELINE_REGISTRY.supported_tasks["image-classification"]["impl"] = RejectingPipeline
