"""Loading of saved models."""

from unittest import mock

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from hf_sphere.models.backbones.base import create_backbone
from hf_sphere.models.pretrained_backbones import transformers_settings
from hf_sphere.prototypes import embed_class_names
from hf_sphere.utils.files import atomic_files
from hf_sphere.utils.loading import load_dataset, load_model, load_pretrained, not_found
from hf_sphere.utils.model_sources import find_weights


@pytest.mark.parametrize(("options", "expected"), [({}, torch.float32), ({"dtype": torch.float16}, torch.float16)])
def test_a_model_saved_in_bfloat16_is_loaded_in_the_dtype_asked_for(options, expected, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(**sizes)).bfloat16().save_pretrained(tmp_path)
    model = load_model(AutoModel, tmp_path, **options)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_a_model_is_saved_to_its_folder_where_mapped_files_are_locked(tmp_path, monkeypatch, refused_renames):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    monkeypatch.setattr("hf_sphere.utils.files.IS_WINDOWS", True)
    model = load_model(AutoModel, tmp_path)
    with atomic_files(tmp_path) as unfinished:
        model.save_pretrained(unfinished)
    assert refused_renames == []
    assert load_model(AutoModel, tmp_path).pooler.dense.weight.equal(model.pooler.dense.weight)


@pytest.mark.parametrize(
    ("load", "named"),
    [
        (lambda: load_pretrained(AutoConfig, "nobody/model"), r"file nobody/model \(model_name_or_path\)"),
        (lambda: load_dataset("nobody/data"), r"file nobody/data \(dataset_name\)"),
        (lambda: transformers_settings("nobody/encoder"), r"file nobody/encoder \(backbone\)"),
        (lambda: embed_class_names(["cat"], "nobody/texts"), r"file nobody/texts \(text_model\)"),
        (
            lambda: find_weights("nobody/weights", option="initial_model"),
            r"nobody/weights \(initial_model\) is no file or folder, nor timm:<name>",
        ),
        (lambda: find_weights("timm:resnet18"), r"weights of timm:resnet18 \(model_name_or_path\)"),
        (
            lambda: create_backbone("resnet18", num_channels=3, image_size=32, pretrained=True),
            r"weights of the backbone resnet18 \(or pass a file, --backbone_weights\)",
        ),
    ],
)
def test_a_missing_download_names_what_the_argument_the_reason_and_what_to_do(load, named, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"{named}.*downloads are off \(HF_HUB_OFFLINE\).*hf download"):
        load()


def test_the_reason_of_a_missing_download_is_the_cause_of_the_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for cause, reason in (
        (RepositoryNotFoundError("404", response=mock.MagicMock()), "there is no such repository, or it is private"),
        (LocalEntryNotFoundError("no connection"), "the Hub cannot be reached, and the cache lacks its files"),
        (ValueError("a certificate has expired."), "loaded from the Hub: a certificate has expired."),
    ):
        error = OSError(str(cause))
        error.__cause__ = cause
        assert reason in str(not_found("the model", error))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "Permission denied" in str(not_found("the model m", PermissionError(13, "Permission denied", "cache/m")))
