"""Does the pipeline of transformers return `unknown` for rejected images, and is it otherwise that of transformers?"""

import copy
import sys

import numpy as np
import pytest
import torch
import transformers
from fresh_python import run_fresh
from PIL import Image
from transformers import ImageClassificationPipeline, pipeline, pipelines

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.models.pipeline import RejectingPipeline
from hf_sphere.ood import fit_rejection

LEVEL = 0.5
NAMES = {0: "cat", 1: "unknown", 2: "dog"}


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)) for _ in range(12)]


@pytest.fixture(scope="module")
def parts() -> dict[str, object]:
    """A model with a rejection, and its image processor."""
    torch.manual_seed(0)
    options = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}, "num_channels": 1, "image_size": 8}
    model = SphereVisionForImageClassification(SphereVisionConfig(**options, head="softmax", id2label=NAMES)).eval()
    size = {"height": 8, "width": 8}
    processor = SphereVisionImageProcessor(num_channels=1, size=size, image_mean=[0.5], image_std=[0.3])
    fit_rejection(model, [torch.randn(60, 1, 8, 8)], LEVEL, "max_logit")
    return {"model": model, "image_processor": processor}


@pytest.fixture(scope="module")
def output(parts, images):
    with torch.no_grad():
        output = parts["model"](**parts["image_processor"](images, return_tensors="pt"))
    assert set(output.known.tolist()) == {False, True}
    return output


@pytest.mark.parametrize("given", ["objects", "a name"])
@pytest.mark.parametrize("options", [{}, {"batch_size": 5}, {"top_k": 1}, {"function_to_apply": "none", "top_k": 2}])
def test_an_unknown_image_has_its_p_value_and_a_known_one_its_classes(given, options, parts, images, output, tmp_path):
    if given == "a name":
        for part in parts.values():
            part.save_pretrained(tmp_path)
    result = (pipeline("image-classification", **parts if given == "objects" else {"model": str(tmp_path)}))(
        images, **options
    )
    plain = ImageClassificationPipeline(**parts)(images, **options)
    for entries, expected, known, p in zip(result, plain, output.known, output.p_value.tolist(), strict=True):
        if known:
            assert [entry["label"] for entry in entries] == [entry["label"] for entry in expected]
            assert [entry["score"] for entry in entries] == pytest.approx([entry["score"] for entry in expected])
            assert [entry["p_value"] for entry in entries] == pytest.approx([p] * len(expected))
        else:
            assert entries == [{"label": "unknown", "score": pytest.approx(p), "p_value": pytest.approx(p)}]


@pytest.mark.parametrize("how", ["in training mode", "copied", "without its rejection"])
def test_the_pipeline_of_a_model_in_another_state_decides_the_same(how, parts, images):
    expected = pipeline("image-classification", **parts)(images)
    made = pipeline("image-classification", **parts | {"model": copy.deepcopy(parts["model"])})
    if how == "in training mode":
        made.model.train()
    elif how == "copied":
        made = copy.deepcopy(made)
    else:
        made.model.set_rejection(None)
        expected = ImageClassificationPipeline(**parts)(images)
    assert made(images) == expected
    assert made.model.training is (how == "in training mode")


def test_the_p_value_separates_a_class_named_unknown_from_rejected_images(parts, images, output):
    entry = pipelines.PIPELINE_REGISTRY.supported_tasks["image-classification"]
    assert entry["impl"] is RejectingPipeline
    results = [pipeline("image-classification", **parts)(image) for image in images]  # a list each
    is_rejected = [result[0]["label"] == "unknown" and result[0]["p_value"] <= LEVEL for result in results]
    assert is_rejected == (~output.known).tolist()
    classes = [entry for result in results for entry in result if entry["p_value"] > LEVEL]
    assert {"label": "unknown"} in [{"label": entry["label"]} for entry in classes]


def test_a_model_without_a_rejection_has_the_pipeline_of_transformers(parts, images):
    plain = SphereVisionForImageClassification(
        SphereVisionConfig(**parts["model"].config.to_diff_dict() | {"rejection": None})
    )
    made = pipeline("image-classification", **parts | {"model": plain})
    assert type(made) is ImageClassificationPipeline
    assert set(made(images[0])[0]) == {"label", "score"}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=4))
    made = pipeline("image-classification", model=model, image_processor=transformers.ViTImageProcessor())
    assert type(made) is ImageClassificationPipeline


def test_a_pipeline_is_saved_without_code(parts, tmp_path):
    pipeline("image-classification", **parts).save_pretrained(tmp_path)
    assert not [*tmp_path.rglob("*.py")]


def test_the_module_can_be_imported_first_as_by_pickle():
    code = "import hf_sphere.models.pipeline as own; from transformers import pipelines as p; task = "
    code += "p.PIPELINE_REGISTRY.supported_tasks['image-classification']; assert task['impl'] is own.RejectingPipeline"
    run_fresh([sys.executable, "-c", code], check=True, hugging_face=False)
