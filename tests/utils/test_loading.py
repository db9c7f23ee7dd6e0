"""Loading of saved models."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from hf_sphere.data.sources import load_splits
from hf_sphere.models import SphereVisionConfig
from hf_sphere.models.backbones.base import create_backbone
from hf_sphere.models.pretrained_backbones import TransformersBackbone, transformers_settings
from hf_sphere.prototypes import embed_class_names
from hf_sphere.utils.files import atomic_files
from hf_sphere.utils.loading import load_dataset, load_model, load_pretrained
from hf_sphere.utils.model_sources import find_weights
from hf_sphere.utils.modules import digest_weights


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
    ("load", "name"),
    [
        (lambda: load_pretrained(AutoConfig, "nobody/model"), "nobody/model"),
        (lambda: load_dataset("nobody/data"), "nobody/data"),
        (lambda: transformers_settings("nobody/encoder"), "nobody/encoder"),
        (lambda: embed_class_names(["cat"], "nobody/texts"), "nobody/texts"),
        (lambda: find_weights("nobody/weights"), "nobody/weights"),
        (lambda: find_weights("timm:resnet18"), ""),
        (lambda: create_backbone("resnet18", num_channels=3, image_size=32, pretrained=True), ""),
    ],
)
def test_what_is_neither_here_nor_on_the_hub_is_an_os_error_that_names_it(load, name, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match=f"^{name} is no file or folder, and cannot be loaded from" if name else "."):
        load()


def test_a_digest_of_weights_depends_on_names_shapes_types_and_values():
    weights = {"a": torch.zeros(2, 2), "b": torch.ones(4)}
    others = [
        {"a": torch.zeros(2, 2), "c": torch.ones(4)},
        {"a": torch.zeros(4), "b": torch.ones(4)},
        {"a": torch.zeros(2, 2, dtype=torch.int32), "b": torch.ones(4)},  # with equal bytes
        {"a": torch.zeros(2, 2), "b": torch.full((4,), 2.0)},
    ]
    found = {digest_weights(each) for each in (weights, *others)}
    assert len(found) == 5
    assert digest_weights({name: tensor.clone() for name, tensor in weights.items()}) in found


def test_a_file_without_rows_is_named_with_the_suffixes(tmp_path):
    (tmp_path / "rows").write_text("a")
    with pytest.raises(ValueError, match=r"rows is no file of rows, whose suffixes are \.\w+, "):
        load_splits(str(tmp_path / "rows"))


def test_a_model_without_hidden_states_is_no_backbone():
    config = SphereVisionConfig(backbone="lenet5", head="softmax", num_labels=3, num_channels=1, image_size=[28, 28])
    with pytest.raises(ValueError, match=r"a SphereVision\w+ has no last hidden state, so it is no backbone"):
        TransformersBackbone(config.to_dict(), 1)
