import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.transforms.v2.functional import normalize
from transformers import (
    ConvNextImageProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTImageProcessor,
)

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.data import ImageSourceOptions
from hf_sphere.utils.model_sources import file_name, find_weights, load_classifier, preprocessing_of, processor_options


@pytest.fixture
def resnet(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=4)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "resnet")
    return tmp_path / "resnet"


@pytest.fixture
def without_pretrained(monkeypatch):
    """Build models of timm with random weights, since pretrained ones are on the Hub."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name))


@pytest.mark.usefixtures("without_pretrained")
def test_an_existing_file_or_folder_and_a_model_of_timm_are_found_without_change_of_the_random_state(tmp_path):
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert find_weights(str(path)) == path
    state = torch.random.get_rng_state()
    assert isinstance(find_weights("timm:test_resnet"), nn.Module)
    assert preprocessing_of("timm:test_resnet", ImageSourceOptions())["num_channels"] == 3
    assert torch.equal(torch.random.get_rng_state(), state)


def test_only_weights_and_configuration_are_downloaded_from_the_hub(tmp_path, monkeypatch):
    asked = {}

    def fetch(name, allow_patterns, ignore_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("hf_sphere.utils.model_sources.snapshot_download", fetch)
    assert find_weights("timm/resnet50.a1_in1k") == tmp_path
    assert asked["name"] == "timm/resnet50.a1_in1k"
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["patterns"])


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"timm has no model 'resnet51'; see timm.list_models\(\)"):
        find_weights("timm:resnet51")
    with pytest.raises(FileNotFoundError, match="no such folder/at all/here is no file or folder"):
        find_weights("no such folder/at all/here")


def test_the_preprocessing_of_a_saved_model_is_found(tmp_path):
    config = SphereVisionConfig(backbone="lenet5", head="softmax", num_channels=1, image_size=[28, 30], num_labels=3)
    SphereVisionForImageClassification(config).save_pretrained(tmp_path)
    SphereVisionImageProcessor(
        num_channels=1, size={"height": 28, "width": 30}, image_mean=[0.2], image_std=[0.4]
    ).save_pretrained(tmp_path)
    found = load_classifier(str(tmp_path))
    format = {"image_size": [28, 30], "num_channels": 1, "image_mean": [0.2], "image_std": [0.4], "crop_pct": None}
    format |= {"interpolation": "bilinear", "background_color": [255, 255, 255]}
    assert (found.num_classes, found.preprocessing) == (3, format)
    assert found.model(torch.zeros(1, 1, 28, 30)).logits.shape == (1, 3)


def test_a_new_random_model_has_different_weights_of_the_same_shapes(resnet):
    ViTImageProcessor().save_pretrained(resnet)
    found = load_classifier(str(resnet))
    fresh = found.fresh().state_dict()
    for name, value in found.model.state_dict().items():
        assert fresh[name].shape == value.shape
    assert any(not torch.equal(fresh[name], value) for name, value in found.model.state_dict().items())


def test_the_image_size_is_the_crop_size_or_a_square_of_the_shortest_edge(resnet):
    for options, size in (({"do_center_crop": True, "crop_size": 40}, 40), ({}, 48)):
        ConvNextImageProcessor(size={"shortest_edge": 48}, **options).save_pretrained(resnet)
        assert load_classifier(str(resnet)).preprocessing["image_size"] == [size, size]


def test_the_statistics_are_those_of_a_processor_that_leaves_out_a_step():
    statistics = {"image_mean": [0.2, 0.4, 0.6], "image_std": [0.5, 0.6, 0.7]}
    pixels = torch.arange(0, 240, 5, dtype=torch.uint8).reshape(3, 4, 4)
    for steps in (["do_normalize"], ["do_rescale"], ["do_normalize", "do_rescale"]):
        processor = ViTImageProcessor(**statistics, do_resize=False, **dict.fromkeys(steps, False))
        found = processor_options(processor)
        ours = normalize(pixels / 255, found["image_mean"], found["image_std"])
        torch.testing.assert_close(ours, processor(pixels, return_tensors="pt")["pixel_values"][0].float())


def test_the_preprocessing_of_a_timm_model_in_a_repository_is_found(tmp_path):
    about = {"input_size": (3, 40, 48), "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)}
    config = TimmWrapperConfig(architecture="test_resnet", num_labels=7, pretrained_cfg=about)
    TimmWrapperForImageClassification(config).save_pretrained(tmp_path)
    found = load_classifier(str(tmp_path))
    assert (found.preprocessing["num_channels"], found.preprocessing["image_size"]) == (3, [40, 48])
    assert found.preprocessing["image_mean"] == [0.1, 0.2, 0.3]
    assert found.model(torch.zeros(1, 3, 40, 48)).logits.shape == (1, found.num_classes)


@pytest.mark.usefixtures("without_pretrained")
def test_the_preprocessing_of_a_model_of_timm_is_found():
    found = load_classifier("timm:test_resnet")
    with torch.inference_mode():
        logits = found.model(torch.zeros(1, 3, 40, 48))
    assert logits.shape == (1, found.num_classes)
    assert not found.model.training


def test_a_model_name_becomes_a_folder_name_and_a_path_is_reduced_to_its_last_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"timm/resnet50.a1_in1k": "timm-resnet50.a1_in1k", "timm:vgg11": "timm-vgg11", "../..": "model"}
    assert [file_name(name) for name in names] == [*names.values()]
    (tmp_path / "run-1").mkdir()
    assert file_name(str(tmp_path / "run-1")) == "run-1"
