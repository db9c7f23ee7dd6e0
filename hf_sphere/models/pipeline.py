"""The image-classification pipeline of transformers, which returns `unknown` for images that a model rejects."""

from typing import Any

from transformers import ImageClassificationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from hf_sphere.utils.modules import eval_mode


class RejectingPipeline(ImageClassificationPipeline):
    """A pipeline whose results have a `p_value` if the model has a rejection, and are those of transformers otherwise.

    A class can have the name `unknown` too: the p-value of a rejected image is at most the level.
    """

    def _forward(self, model_inputs: Any) -> Any:
        with eval_mode(self.model):  # a model in training mode, as after a `Trainer`, rejects nothing
            return super()._forward(model_inputs)

    def postprocess(self, model_outputs: Any, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Return the classes, or for an unknown image its p-value alone."""
        if model_outputs.get("known") is None:
            return super().postprocess(model_outputs, *args, **kwargs)
        p_value = model_outputs["p_value"].item()
        if not model_outputs["known"].item():
            return [{"label": "unknown", "score": p_value, "p_value": p_value}]
        return [entry | {"p_value": p_value} for entry in super().postprocess(model_outputs, *args, **kwargs)]


PIPELINE_REGISTRY.supported_tasks["image-classification"]["impl"] = RejectingPipeline
