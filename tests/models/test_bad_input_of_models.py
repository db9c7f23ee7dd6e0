"""Configurations, images, labels and files that do not fit are refused by the models."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from small_encoders import BERT, DISTILBERT
from transformers import BertConfig, BertModel, HGNetV2Config, ViTConfig, ViTModel

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForFewShotClassification,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
    SphereVisionImageProcessor,
    SphereVisionModel,
    fit_spherization,
)
from hf_sphere.models.backbones import create_backbone

VALUES = {"embedding_dim": 4, "value_range": [-10.0, 30.0], "head": "prototype"}
SPHERIZED = {"spherization": {}, "embedding_dim": 4, "value_range": [0.0, 1.0], "head": "softmax"}
REGRESSION = {"problem_type": "regression", "head": "softmax"}
PICTURES = torch.zeros(3, 1, 6, 6)


def config(**options):
    small = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}, "num_channels": 1, "image_size": 6}
    return lambda: SphereVisionConfig(**small | {"num_labels": 4} | options)


def build(kind=SphereVisionForImageClassification, **options):
    return lambda: kind(config(**options)())


def run(pixels=PICTURES, kind=SphereVisionForImageClassification, labels=None, given=None, **options):
    return lambda: build(kind, **options)()(pixels, labels=labels, **(given or {}))


def backbone(name, image_size=224, **options):
    return lambda: create_backbone(name, num_channels=1, image_size=image_size, **options)


def encoder(task="Model", **options):
    return lambda: BERT.model(task, **options)


def joint(labels=None, values=None):
    return run(kind=SphereVisionForJointPrediction, labels=labels, given={"regression_labels": values}, **VALUES)


CONFIGURATIONS = [
    (config(initialization="glorot"), "initialization"),
    (config(problem_type="multi_label"), "multi_label"),
    *((config(task_weight=weight), r"task_weight must be a number in \[0, 1\]; got") for weight in (-0.1, 1.5)),
    (config(value_range=["low", "high"]), "value_range"),
    *((config(**{name: value}), name) for name, value in (("spherization", True), ("few_shot_kwargs", "cosine"))),
    *(
        (config(calibration=calibration), "calibration")
        for calibration in (
            {},
            {"temperature": [1.0, 2.0]},
            {"temperature": 1.0, "shift": [1.0]},
            {"temperature": -1.5},
            {"temperature": [1.0, 0.0, 1.0, 1.0]},
        )
    ),
    *(
        (config(calibration={"temperature": 2.0}, problem_type=kind), "one per image")
        for kind in ("multi_label_classification", "regression")
    ),
    *((lambda layers=layers: BERT.model(spherized_layers=layers), "has 3 layers") for layers in ([3], [0, -4])),
    (lambda: BERT.config(spherized_layers="last"), "spherized_layers"),
    (lambda: BERT.config(spherization_scaling="5"), "spherization_scaling"),
]
MODELS = [
    (encoder(spherization_delta=1.0), r"delta must be a number in \(0, 1\); got 1.0"),
    (encoder(spherization_radius=0.0), r"radius must be a number in \(0, inf\); got 0.0"),
    *((encoder(spherization_scaling=value), "scaling must be finite and not 0") for value in (0, math.nan, math.inf)),
    (encoder("ForSequenceClassification", hidden_size=2, spherized_classifier=True), "in_features must be an integer"),
    (build(head="vfm"), r"unknown head 'vfm'; the heads are: .*softmax"),
    (build(embedding_dim=0), "embedding_dim must be an integer of at least 1; got 0"),
    (build(head=None), r"unknown head None; the heads are: .*softmax"),
    (
        lambda: (
            build(initialization="xavier")() and SphereVisionModel(config(initialization="xavier")(), pretrained=True)
        ),
        "would overwrite the pretrained weights",
    ),
    (build(head="spherized", spherization={}), "head .spherized. would spherize embeddings .*set spherization=None"),
    (build(SphereVisionModel, spherization={"slope": 2.0}), "slope"),
    (build(SphereVisionModel, spherization={"radius": 0.0}), r"radius must be a number in \(0, inf\); got 0"),
    (build(SphereVisionForFewShotClassification, few_shot_kwargs={"way": 5}), "way"),
    (build(SphereVisionForFewShotClassification, few_shot_kwargs={"metric": "l1"}), "metric must be one of euclidean"),
    *(
        row
        for kind in (SphereVisionForRegression, SphereVisionForJointPrediction)
        for row in (
            (build(kind, **SPHERIZED), "spherized embeddings have no negative coordinates"),
            (build(kind, **VALUES | {"value_range": None}), "NoneType"),
            (build(kind, **VALUES | {"embedding_dim": None}), "embedding_dim must be an integer .*; got None"),
            (build(kind, **VALUES, regression_kwargs={"reducion": "sum"}), "reducion"),
            (build(kind, **VALUES | {"value_range": [2.0, 1.0]}), "two finite numbers, the lower one first"),
        )
    ),
    *(
        (build(SphereVisionForJointPrediction, **VALUES, **{name: {"reduction": "sum"}}), "set the same `reduction`")
        for name in ("regression_kwargs", "head_kwargs")
    ),
    (build(SphereVisionForRegression, **VALUES | {"embedding_dim": 1}), "of at least 2; got 1"),
    *(
        (
            build(head=head, problem_type=kind),
            f"one class per example; problem_type '{kind}' requires",
        )
        for head in ("arcface", "vmf", "prototype")
        for kind in ("multi_label_classification", "regression")
    ),
    *(
        (build(**REGRESSION, head_kwargs=options), "a regression has neither class_weights nor label_smoothing")
        for options in ({"label_smoothing": 0.1}, {"class_weights": [2.0] * 4})
    ),
    *((backbone(name, 8), "needs at least") for name in ("lenet5", "vgg11_cifar", "conv4", "conv4_maxpool", "alexnet")),
    (backbone("lenet5_bn", 3), "lenet5_bn' needs at least 4 pixels per side; got 3 x 3. Set image_size"),
    (backbone("vgg11_cifar", widths=[16, 32, 64]), "argument 2 is shorter"),
    (backbone("cnn9", hidden_kwargs={"scaling": 2.0}), "spherized; plain has no"),
    (backbone("cnn9", hidden_layer="w_cosine", hidden_kwargs={"scaling": 2.0}), "spherized; w_cosine has none"),
    (backbone("cnn9", hidden_layer="spherized", hidden_kwargs={"scale": 2.0}), "unexpected keyword argument 'scale'"),
    (backbone("cnn9", hidden_layer="relu"), "hidden_layer must be one of plain, .*w_sigmoid; got 'relu'"),
    (backbone("lenet5", depth=3), "'lenet5' does not accept the options .* unexpected keyword argument 'depth'"),
    (backbone("lenet"), r"unknown backbone 'lenet'; similar names: .*lenet5"),
    (backbone("lenet5", pretrained=True), "backbone 'lenet5' has no pretrained weights"),
]
RUNS = [
    (run(torch.zeros(2, 3, 6, 6)), r"expected pixel_values of shape \(batch, 1, 6, 6\); got"),
    (run(torch.zeros(1, 6, 6)), "expected pixel_values of shape"),
    (run(torch.zeros(2, 1, 4, 9)), r"expected pixel_values of shape \(batch, 1, 6, 6\); got \(2, 1, 4, 9\)"),
    *(
        (run(labels=torch.rand(shape), **REGRESSION, num_labels=2), r"a regression requires labels \(3, 2\); got")
        for shape in ((2, 3), (6,), (3,), (3, 1))
    ),
    (run(labels=torch.tensor([0, 1, 2]), problem_type="multi_label_classification"), "do not fit the problem_type"),
    (run(labels=torch.ones(3, 4), problem_type="single_label_classification"), "labels .batch,., or soft labels"),
    *((joint(*given), "NoneType") for given in ((torch.zeros(3).long(), None), (None, torch.zeros(3)))),
    (run(kind=SphereVisionForRegression, labels=torch.tensor([0, 0, 30.5]), **VALUES), r"target 30\.5 is outside"),
    (joint(torch.zeros(3).long(), torch.tensor([0, 0, 30.5])), r"target 30\.5 is outside"),
    (
        run(kind=SphereVisionForFewShotClassification, labels=torch.full((3,), 3),
            given={"support_pixel_values": torch.zeros(3, 2, 1, 6, 6)}),
        "labels run from 3 to 3, but the support has 3 classes",
    ),
    (
        run(kind=SphereVisionForFewShotClassification, given={"support_pixel_values": torch.zeros(3, 1, 6, 6)}),
        r"expected the shapes \(\.\.\., queries, d\)",
    ),
    *(
        (lambda options=options: SphereVisionImageProcessor(**options), message)
        for options, message in (
            ({"crop_pct": 0}, r"crop_pct must be a number in \(0, 1\]"),
            ({"crop_pct": 2}, r"crop_pct must be a number in \(0, 1\]"),
            ({"num_channels": 4}, "num_channels must be one of 1, 3"),
            ({"image_mean": [0.5]}, "image_mean must have one value per channel, 3"),
            ({"image_mean": [math.nan] * 3}, r"image_mean must be a number in \(-inf, inf\); got nan"),
            ({"image_std": [0.5, 0.5, -0.5]}, r"image_std must be a number in \(0, inf\); got -0\.5"),
            ({"image_std": [0.5] * 4}, "image_std must have one value per channel, 3"),
            ({"num_channels": 1, "image_mean": [0.1] * 3}, "image_mean must have one value per channel, 1"),
        )
    ),
    (lambda: fit_spherization(BERT.model(), BERT.plain(), "one text"), "texts must be a list of texts"),
    (lambda: fit_spherization(BERT.model(spherized_layers=[]), BERT.plain(), []), "has no spherized layer to fit"),
    (lambda: fit_spherization(BERT.plain(), BERT.plain(), []), "has no spherized layer"),
    (lambda: fit_spherization(BERT.model(), BERT.model(), []), "layer 2 of the reference is spherized"),
    (lambda: fit_spherization(DISTILBERT.model(), BERT.plain(), []), "its model_type is bert; the model has"),
    *(
        (lambda name=name: fit_spherization(BERT.model(), BERT.plain(**{name: 48}), []), f"its {name} is 48; the model")
        for name in ("num_hidden_layers", "intermediate_size", "vocab_size")
    ),
]  # fmt: skip
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 50}
ERRORS = (ValueError, TypeError, RuntimeError, StrictDataclassError)


@pytest.mark.parametrize(("call", "message"), [*CONFIGURATIONS, *MODELS, *RUNS])
def test_bad_input_is_refused(call, message):
    with pytest.raises(ERRORS, match=message):
        call()


@pytest.mark.parametrize(
    ("encoder", "options", "message"),
    [
        (BertConfig(**SMALL), {}, "BertModel is no image encoder; texts need"),
        (HGNetV2Config(), {"image_size": 64}, "has no last hidden state|computes no features"),
        (ViTConfig(**SMALL, image_size=28, patch_size=14), {"num_channels": 1}, "mismatch"),
        (ViTConfig(quantization_config={"quant_method": "bitsandbytes"}), {}, "has quantized weights"),
    ],
)
def test_models_of_transformers_that_are_no_such_encoders_are_refused(encoder, options, message, tmp_path):
    kind = {"bert": BertModel, "vit": ViTModel}.get(encoder.model_type)
    encoder.save_pretrained(tmp_path)
    if kind is not None and "quantized" not in message:
        kind(encoder).save_pretrained(tmp_path)
    with pytest.raises((*ERRORS, AttributeError), match=message):
        SphereVisionModel(SphereVisionConfig(backbone=str(tmp_path), **options), pretrained="num_channels" in options)


def test_a_file_without_the_weights_of_a_backbone_is_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    foreign = str(tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match=r"does not fit the backbone resnet10t: \d+ tensors are missing"):
        create_backbone("resnet10t", num_channels=3, image_size=32, pretrained=foreign)
    ViTModel(ViTConfig(**SMALL, image_size=28, patch_size=14)).save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match=r"does not fit the backbone vit: \d+ tensors are missing"):
        SphereVisionModel(SphereVisionConfig(backbone=str(tmp_path / "own"), image_size=28), pretrained=foreign)
    other = create_backbone("resnet10t", num_channels=3, image_size=32).state_dict()
    save_file(other | {"conv1.0.weight": torch.zeros(1, 3, 3, 3)}, foreign)
    with pytest.raises(RuntimeError, match=r"size mismatch for conv1\.0\.weight"):
        create_backbone("resnet10t", num_channels=3, image_size=32, pretrained=foreign)
    with pytest.raises(FileNotFoundError):
        create_backbone("resnet10t", num_channels=3, image_size=32, pretrained=str(tmp_path / "nowhere.pth"))
